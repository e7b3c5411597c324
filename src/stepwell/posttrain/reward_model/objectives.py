"""What trained reward models were trained to say, and whether several of them say one thing."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from stepwell.config import Run
from stepwell.posttrain.reward_model.ensembles import Combination, combine, standardised
from stepwell.posttrain.reward_model.model import Scorer, reward_folder, reward_model, score_notes
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError


def objective_of(folder: str) -> str | None:
    """method.objective of a run or a checkpoint; "process" for a token classifier of Transformers,
    None for its sequence classifiers, which do not say."""
    path = reward_folder(folder)
    recipe = next(
        (r for r in (path / "run.toml", path.parent.parent / "run.toml") if r.is_file()), None
    )
    if recipe is not None:
        return getattr(Run.load(recipe).method, "objective", None)
    config = path / "config.json"
    if not config.is_file():
        return None
    names = json.loads(config.read_text("utf-8")).get("architectures") or []
    return "process" if any("TokenClassification" in str(name) for name in names) else None


def check_objectives(folders: Sequence[str]) -> list[str | None]:
    """Each model's. Raises ConfigError where they differ: their scores are of different things, and
    a mean of them is of none."""
    found = [objective_of(folder) for folder in folders]
    known = dict.fromkeys(o or "unknown" for o in found)
    mixed = len([o for o in known if o != "unknown"]) > 1
    if mixed or ("process" in known and "unknown" in known):
        each = ", ".join(
            f"{folder} ({objective or 'a sequence classifier'})"
            for folder, objective in zip(folders, found, strict=True)
        )
        raise ConfigError(
            f"the reward models were trained with different objectives: {each}; score with models "
            f"of one, e.g. {folders[0]} alone"
        )
    return found


def check_reward(
    folders: Sequence[str],
    aggregate: Combination = "mean",
    k: float = 1.0,
    tokenizer: Tokenizer | None = None,
) -> list[str]:
    """What a user should know of these models as one reward of whole answers, before any of them is
    built. Raises what opening and scoring with them would: ConfigError for a model without a score
    or with several, of another tokenizer, or of another objective than the others, and for an
    aggregate that needs more of them; CheckpointError for what cannot be read."""
    combine(torch.zeros(len(folders), 1), aggregate, k)
    for folder in folders:
        num_labels = reward_model(folder, tokenizer)[1].num_labels
        if num_labels > 2:
            raise ConfigError(
                f"a reward is one number, but {folder} scores {num_labels} classes; take a model "
                "with one label, or with two (the log-odds of the second)"
            )
    found, notes = [], [score_notes(reward_folder(folder)) for folder in folders]
    if "process" in check_objectives(folders):
        found.append(
            f"{', '.join(folders)}: trained on steps (objective 'process'), and as a reward of "
            "whole answers it scores the last token alone"
        )
    unknown = [f for f, n in zip(folders, notes, strict=True) if n.mean is None or n.sd is None]
    if len(folders) > 1 and unknown:
        found.append(_not_standardised(aggregate, unknown))
    elif len(folders) > 1:
        means, sds = (torch.tensor([getattr(n, key) for n in notes]) for key in ("mean", "sd"))
        standardised(torch.zeros(len(folders), 1), means, sds)
    return found


def remarks(scorer: Scorer, objectives: Sequence[str | None], steps: bool) -> list[str]:
    """What the reader of the scores should know."""
    found, names = [], [member.folder for member in scorer.members]
    if not steps and "process" in objectives:
        found.append(
            f"{', '.join(names)}: trained on steps (objective 'process'), and asked for whole "
            "answers it scores the last token alone; --steps min scores the steps"
        )
    others = [o for o in objectives if o not in (None, "process")]
    if steps and others:
        found.append(
            f"{', '.join(names)}: trained on whole answers (objective {others[0]!r}); what it says "
            "of a step it has not learnt. --steps none scores answers"
        )
    unknown = [m.folder for m in scorer.members if m.mean is None or m.sd is None]
    if len(names) > 1 and not steps and unknown:
        found.append(_not_standardised(scorer.aggregate, unknown))
    return found


def _not_standardised(aggregate: str, unknown: Sequence[str]) -> str:
    return (
        f"the models' scores are combined by {aggregate} as they are, not standardised: no mean "
        f"and deviation on held-out data are known of {', '.join(unknown)} (train with "
        "train.eval_every), so the model of the widest scores counts most"
    )
