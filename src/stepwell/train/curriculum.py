"""How much of the learning rate each stage of a run gets, and whether the best data is wasted on
its low end. No torch.

Learning-rate mass is the sum of the learning rates of a stage's steps over that of all steps: to
first order, how far the stage's gradients can move the weights.

A stage is not judged by its share of the tokens: the decay of a WSD schedule, which is where the
best data is put on purpose (MiniCPM, 2404.06395), has only a third of it per token (the mean of
1 - sqrt(p) over the decay is 1/3). It is judged by what the same steps would get if they were the
1-sqrt decay of a WSD schedule, and warned of below half of that.
"""

from __future__ import annotations

from typing import NamedTuple

from stepwell.config import Run
from stepwell.data.curriculum import BASE, Span, spans
from stepwell.sections.optim import ScheduleConfig
from stepwell.train.schedule import lr_fraction

LEAST_OF_WSD = 0.5
# quality-ascending has no stages: what it keeps for the end is judged by this last part of the run.
BEST_PART = 0.2
SAMPLED_STEPS = 10_000


class Shares(NamedTuple):
    """Of one span of steps (first to stop - 1, 0 is the run's first). wsd_lr_share: its share of
    the learning-rate mass if the run were WSD with a 1-sqrt decay from `first` to the end."""

    name: str
    first: int
    stop: int
    token_share: float
    lr_share: float
    wsd_lr_share: float


def shares_of(run: Run) -> list[Shares]:
    """For the spans of a pretraining run in their order; empty for other methods."""
    if run.method.kind != "pretrain":
        return []
    found = spans(run.data, run.optim.schedule, run.train.steps)
    return [_shares(span, run.optim.schedule, run.train.steps) for span in found]


def low_rate_warnings(run: Run) -> list[str]:
    """One for each stage, begun after the warm-up, that gets less than half of the learning-rate
    mass that it would get as the decay of a WSD schedule."""
    if run.method.kind != "pretrain":
        return []
    schedule, steps = run.optim.schedule, run.train.steps
    judged = [s for s in shares_of(run) if s.name != BASE and s.first >= schedule.warmup_steps]
    if run.data.order == "quality-ascending":
        tail = Span("order='quality-ascending'", steps - max(1, round(BEST_PART * steps)), steps)
        judged.append(_shares(tail, schedule, steps))
    return [_warning(s, steps) for s in judged if s.lr_share < LEAST_OF_WSD * s.wsd_lr_share]


def lr_mass(schedule: ScheduleConfig, first: int, stop: int, num_steps: int) -> float:
    """Sum of the learning rates of steps first to stop - 1 of a run of num_steps, in peak rates; of
    many steps by up to SAMPLED_STEPS that stand for their neighbours."""
    stride = -(-(stop - first) // SAMPLED_STEPS) or 1
    sampled = range(first + (stride - 1) // 2, stop, stride)
    mean = sum(lr_fraction(schedule, step, num_steps) for step in sampled) / max(len(sampled), 1)
    return mean * (stop - first)


def as_wsd(schedule: ScheduleConfig, first: int, num_steps: int) -> ScheduleConfig:
    """The same warm-up, then stable, then a 1-sqrt decay from `first` to the end."""
    warmup = min(schedule.warmup_steps, first)
    return ScheduleConfig(kind="wsd", warmup_steps=warmup, decay_steps=num_steps - first)


def _shares(span: Span, schedule: ScheduleConfig, num_steps: int) -> Shares:
    found = []
    for of in (schedule, as_wsd(schedule, span.first, num_steps)):
        mass = lr_mass(of, span.first, span.stop, num_steps)
        before = lr_mass(of, 0, span.first, num_steps)
        found.append(mass / (before + mass + lr_mass(of, span.stop, num_steps, num_steps)))
    return Shares(*span, (span.stop - span.first) / num_steps, *found)


def _warning(shares: Shares, num_steps: int) -> str:
    if shares.name.startswith("order"):
        what = (
            f"data.{shares.name} keeps the best of each epoch for its end, but the last "
            f"{shares.token_share:.0%} of the run's tokens get"
        )
    else:
        steps = f"steps {shares.first + 1:,} to {shares.stop:,}"
        what = f"data.{shares.name} ({steps}, {shares.token_share:.1%} of the tokens) gets"
    wsd = f"optim.schedule.kind='wsd', decay_steps={num_steps - shares.first}"
    return (
        f"{what} {shares.lr_share:.2%} of the learning-rate mass; with {wsd} it would be "
        f"{shares.wsd_lr_share:.2%}. Or keep the rate constant and average the last checkpoints "
        "(`stepwell average`)"
    )
