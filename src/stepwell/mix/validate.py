"""Candidate mixtures on a half-trained model, instead of full runs: from one checkpoint, the
learning rate decays to 0 on each of them, and the held-out losses are compared (Llama 3,
2407.21783, section 3.1.3; the microanneals of OLMo 2, 2501.00656)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stepwell.config import Run
from stepwell.files import write_text
from stepwell.mix.files import check_plan, read_lines
from stepwell.mix.sweep import Domain, finished, overread, sources_of
from stepwell.train.lock import folder_lock
from stepwell.train.run_checkpoints import of_run_or_itself, read_state
from stepwell.train.schedule import lr_fraction
from stepwell.types import CheckpointError, ConfigError

PLAN, ANNEALS = "validate.json", "anneals.jsonl"
LEVEL = 0.95
# Anneals from less of the run's peak rate hardly move the weights.
LOW_RATE = 0.1


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
    seeds: how many. lr: the rate that the anneals begin with."""

    mix: str
    loss: float
    gain: float
    error: float | None
    by_target: dict[str, float]
    seeds: int
    lr: float | None = None

    @property
    def half_width(self) -> float | None:
        """Of Student's 95 % interval of the gain over the seeds; None for one seed."""
        if self.error is None:
            return None
        from scipy.stats import t as student

        return self.error * float(student.ppf((1 + LEVEL) / 2, self.seeds - 1))

    @property
    def sure(self) -> bool:
        """Whether that interval lies above 0."""
        return self.half_width is not None and self.gain > self.half_width


def validate(
    checkpoint: str | Path,
    mixes: dict[str, dict[str, float]],
    domains: Sequence[Domain],
    targets: Sequence[Domain],
    out: str | Path,
    num_steps: int,
    seeds: Sequence[int],
    num_procs: int = 1,
    lr: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Verdict]:
    """Anneals every mixture with every seed (of the data's order) and compares them with the first.

    checkpoint: a run's folder, or a checkpoint within one. mixes: name -> weight of each domain.
    Finished anneals are kept, stopped ones go on. lr: the rate that they begin with; None: the
    checkpoint's.
    Raises CheckpointError for a checkpoint without its run's recipe, ConfigError for mixtures of
    unknown domains, fewer than 2 mixtures, or a folder with another validation in it.
    """
    check_mixes(mixes, domains)
    folder = of_run_or_itself(checkpoint, "--checkpoint")
    parent = recipe_of(folder)
    step = int(read_state(folder)["step"])
    lr = rate_at(parent, step) if lr is None else lr
    if not (math.isfinite(lr) and lr > 0):
        raise ConfigError(
            f"lr={lr} must be a positive number; the run's peak is {parent.optim.lr:g}"
        )
    out = Path(out)
    plan = {
        "checkpoint": str(folder),
        "mixes": mixes,
        "num_steps": num_steps,
        "lr": lr,
        "domains": [asdict(domain) for domain in domains],
        "targets": [asdict(target) for target in targets],
    }
    with folder_lock(out):
        check_plan(out / PLAN, plan, f"the validation in {out}")
        say(rate_text(parent, lr))
        tokens = num_steps * parent.train.global_batch_rows * parent.data.seq_len
        for mix, weights in mixes.items():
            shares = shares_of(domains, weights)
            for line in overread(domains, shares, tokens):
                say(f"warning: {mix} {line}")
        done = read_anneals(out / ANNEALS)
        known = {(anneal.mix, anneal.seed) for anneal in done}
        todo = [(mix, seed) for seed in seeds for mix in mixes if (mix, seed) not in known]
        jobs = [
            (
                anneal_run(parent, folder, domains, mixes[m], num_steps, s, out / f"{m}-{s}", lr),
                targets,
            )
            for m, s in todo
        ]
        for place, (losses, seconds) in finished(jobs, num_procs):
            done.append(Anneal(*todo[place], losses, seconds))
            write_text(out / ANNEALS, "".join(json.dumps(asdict(a)) + "\n" for a in done))
            mix, seed = todo[place]
            say(f"{mix}, seed {seed}: " + "  ".join(f"{k} {v:.4f}" for k, v in losses.items()))
    wanted = {(mix, seed) for mix in mixes for seed in seeds}
    found = compare([a for a in done if (a.mix, a.seed) in wanted], list(mixes), targets)
    return [replace(verdict, lr=lr) for verdict in found]


def rate_at(parent: Run, step: int) -> float:
    """optim.lr's rate at which the run would go on from `step`, or with which it made its last one
    where it has come to 0."""
    schedule, steps = parent.optim.schedule, parent.train.steps
    share = lr_fraction(schedule, step, steps) if step < steps else 0.0
    return parent.optim.lr * (share or lr_fraction(schedule, max(step - 1, 0), steps))


def rate_text(parent: Run, lr: float) -> str:
    share = lr / parent.optim.lr
    text = f"anneals begin with the learning rate {lr:.3g}, {share:.1%} of the run's peak"
    if share < LOW_RATE:
        text = (
            f"warning: {text}: they can hardly move the weights; name a checkpoint before the "
            "decay, or give --lr"
        )
    return text


def shares_of(domains: Sequence[Domain], weights: dict[str, float]) -> list[float]:
    total = sum(weights.values())
    return [weights.get(domain.name, 0.0) / total for domain in domains]


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
    lr: float,
) -> Run:
    """The branch: num_steps more steps, the rate from lr down to 0, all of them on the mixture, in
    shuffled order (a seed must change it)."""
    step = read_state(checkpoint)["step"]
    mixture = [weights.get(domain.name, 0.0) for domain in domains]
    muon = {"optim.muon_lr": parent.optim.muon_lr * lr / parent.optim.lr}
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
            "optim.lr": lr,
            **(muon if parent.optim.kind == "muon" else {}),
            "data.order": "shuffled",
            "optim.schedule.kind": "wsd",
            "optim.schedule.warmup_steps": min(parent.optim.schedule.warmup_steps, step),
            "optim.schedule.decay_steps": num_steps,
            "optim.schedule.final_fraction": 0.0,
            # The trunk's own sources are read no more; their caps would be the branch's, too.
            "data.sources": sources_of(domains, mixture),
            "data.stages": [{"phase": "decay", "sources": sources_of(domains, mixture)}],
        },
        where=f"the anneal {folder}",
    )


def read_anneals(path: Path) -> list[Anneal]:
    if not path.is_file():
        return []
    return read_lines(path, Anneal)


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
                seeds=len(seeds),
            )
        )
    return verdicts


def as_text(verdicts: Sequence[Verdict]) -> str:
    first, lines = verdicts[0], []
    if first.lr is not None:
        lines.append(f"learning rate {first.lr:.3g} down to 0, {first.seeds} seeds")
    for v in verdicts:
        losses = "  ".join(f"{name} {loss:.4f}" for name, loss in v.by_target.items())
        line = f"{v.mix:<12} target {v.loss:.4f}  ({losses})"
        if v is not first:
            half = v.half_width
            error = " (one seed: no error known)"
            if half is not None:
                error = f" (95 % interval {v.gain - half:+.4f} to {v.gain + half:+.4f})"
            said = "better" if v.sure else "not surely better"
            line += f"  gain over {first.mix} {v.gain:+.4f}{error}: {said}"
        lines.append(line)
    return "\n".join(lines)
