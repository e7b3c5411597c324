"""What trained reward models were trained to say, and whether several of them say one thing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from stepwell.config import Run
from stepwell.posttrain.reward_model.model import Scorer, reward_folder
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
        found.append(
            f"the models' scores are combined by {scorer.aggregate} as they are, not standardised: "
            f"no mean and deviation on held-out data are known of {', '.join(unknown)} (train with "
            "train.eval_every), so the model of the widest scores counts most"
        )
    return found
