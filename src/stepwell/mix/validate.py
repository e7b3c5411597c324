"""Candidate mixtures on a half-trained model, instead of full runs: from one checkpoint, the
learning rate decays to 0 on each of them, and the held-out losses are compared (Llama 3,
2407.21783, section 3.1.3; the microanneals of OLMo 2, 2501.00656)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stepwell.config import Run
from stepwell.mix.sweep import (
    Domain,
    check_plan,
    finished,
    sources_of,
    write_whole,
)
from stepwell.train.checkpoint import of_run_or_itself, read_state
from stepwell.train.lock import folder_lock
from stepwell.types import CheckpointError, ConfigError

PLAN, ANNEALS = "validate.json", "anneals.jsonl"
NATURAL = "natural"


@dataclass(frozen=True)
class Anneal:
    """One finished anneal: losses (nats a token) by target."""

    mix: str
    seed: int
    losses: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """A mixture against the first one, of the same seeds. loss: the weighted mean of the targets.
    gain: the first's loss minus this one's, and its standard error over seeds (None for one seed).
    """

    mix: str
    loss: float
    gain: float
    error: float | None
    by_target: dict[str, float]

    @property
    def sure(self) -> bool:
        """Whether the gain is above twice its standard error."""
        return self.error is not None and self.gain > 2 * self.error


def validate(
    checkpoint: str | Path,
    mixes: dict[str, dict[str, float]],
    domains: Sequence[Domain],
    targets: Sequence[Domain],
    out: str | Path,
    num_steps: int,
    seeds: Sequence[int],
    num_procs: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> list[Verdict]:
    """Anneals every mixture with every seed (of the data's order) and compares them with the first.

    checkpoint: a run's folder, or a checkpoint within one. mixes: name -> weight of each domain.
    Finished anneals are kept, stopped ones go on.
    Raises CheckpointError for a checkpoint without its run's recipe, ConfigError for mixtures of
    unknown domains, fewer than 2 mixtures, or a folder with another validation in it.
    """
    check_mixes(mixes, domains)
    folder = of_run_or_itself(checkpoint, "--checkpoint")
    parent = recipe_of(folder)
    out = Path(out)
    plan = {
        "checkpoint": str(folder),
        "mixes": mixes,
        "num_steps": num_steps,
        "domains": [asdict(domain) for domain in domains],
        "targets": [asdict(target) for target in targets],
    }
    with folder_lock(out):
        check_plan(out / PLAN, plan, f"the validation in {out}")
        done = read_anneals(out / ANNEALS)
        known = {(anneal.mix, anneal.seed) for anneal in done}
        todo = [(mix, seed) for seed in seeds for mix in mixes if (mix, seed) not in known]
        jobs = [
            (anneal_run(parent, folder, domains, mixes[m], num_steps, s, out / f"{m}-{s}"), targets)
            for m, s in todo
        ]
        for place, (losses, seconds) in finished(jobs, num_procs):
            done.append(Anneal(*todo[place], losses, seconds))
            write_whole(out / ANNEALS, "".join(json.dumps(asdict(a)) + "\n" for a in done))
            mix, seed = todo[place]
            say(f"{mix}, seed {seed}: " + "  ".join(f"{k} {v:.4f}" for k, v in losses.items()))
    wanted = {(mix, seed) for mix in mixes for seed in seeds}
    return compare([a for a in done if (a.mix, a.seed) in wanted], list(mixes), targets)


def check_mixes(mixes: dict[str, dict[str, float]], domains: Sequence[Domain]) -> None:
    names = [domain.name for domain in domains]
    if len(mixes) < 2:
        raise ConfigError(f"{len(mixes)} mixtures cannot be compared; the fewest is 2")
    for mix, weights in mixes.items():
        if unknown := sorted(set(weights) - set(names)):
            raise ConfigError(f"the mixture {mix!r} has {unknown[0]!r}; domains are {names}")
        if not all(math.isfinite(w) and w >= 0 for w in weights.values()) or not any(
            weights.values()
        ):
            raise ConfigError(
                f"the mixture {mix!r} needs weights of 0 or more, one above 0, not {weights}"
            )


def recipe_of(checkpoint: Path) -> Run:
    """The recipe of the run that a checkpoint lies in."""
    path = checkpoint.parent.parent / "run.toml"
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint} does not lie in a run's folder ({path} is missing); name the run"
        )
    return Run.load(path)


def anneal_run(
    parent: Run,
    checkpoint: Path,
    domains: Sequence[Domain],
    weights: dict[str, float],
    num_steps: int,
    seed: int,
    folder: Path,
) -> Run:
    """The branch: num_steps more steps, the rate down to 0, all of them on the mixture."""
    step = read_state(checkpoint)["step"]
    mixture = [weights.get(domain.name, 0.0) for domain in domains]
    return Run.parse(
        parent.model_dump(mode="json", exclude_none=True),
        {
            "dir": str(folder),
            "name": f"anneal {folder.name}",
            "checkpoint.branch_from": str(checkpoint),
            "checkpoint.keep_best": 0,
            "train.steps": step + num_steps,
            "train.seed": seed,
            "train.eval_every": 0,
            "optim.schedule.kind": "wsd",
            "optim.schedule.warmup_steps": min(parent.optim.schedule.warmup_steps, step),
            "optim.schedule.decay_steps": num_steps,
            "optim.schedule.final_fraction": 0.0,
            "data.stages": [{"phase": "decay", "sources": sources_of(domains, mixture)}],
        },
        where=f"the anneal {folder}",
    )


def read_anneals(path: Path) -> list[Anneal]:
    if not path.is_file():
        return []
    return [Anneal(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def compare(
    anneals: Sequence[Anneal], mixes: Sequence[str], targets: Sequence[Domain]
) -> list[Verdict]:
    """Each mixture against the first, paired by seed."""
    total = sum(target.weight for target in targets)
    share = {target.name: target.weight / total for target in targets}
    mean = {
        (a.mix, a.seed): sum(share[name] * loss for name, loss in a.losses.items()) for a in anneals
    }
    seeds = sorted({a.seed for a in anneals})
    verdicts = []
    for mix in mixes:
        gains = [mean[mixes[0], seed] - mean[mix, seed] for seed in seeds]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
        mine = [a for a in anneals if a.mix == mix]
        verdicts.append(
            Verdict(
                mix=mix,
                loss=statistics.fmean(mean[mix, seed] for seed in seeds),
                gain=statistics.fmean(gains),
                error=error,
                by_target={name: statistics.fmean(a.losses[name] for a in mine) for name in share},
            )
        )
    return verdicts


def as_text(verdicts: Sequence[Verdict]) -> str:
    first, lines = verdicts[0], []
    for v in verdicts:
        losses = "  ".join(f"{name} {loss:.4f}" for name, loss in v.by_target.items())
        line = f"{v.mix:<12} target {v.loss:.4f}  ({losses})"
        if v is not first:
            error = f" +- {v.error:.4f}" if v.error is not None else " (one seed: no error known)"
            said = "better" if v.sure else "not surely better"
            line += f"  gain over {first.mix} {v.gain:+.4f}{error}: {said}"
        lines.append(line)
    return "\n".join(lines)
