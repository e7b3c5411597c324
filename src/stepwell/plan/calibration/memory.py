"""How near the memory ledger comes to what others have measured, and the fit of its few
coefficients. No torch.

Which rank a source's nvidia-smi is of is not printed; it is taken for the first machine's, so the
first pipeline rank's. torch's own figures are the largest of all ranks. Whether a run fits is asked
of the rank that needs the most, and only of runs whose recomputation is printed.

`benchmarks/plan_memory.py` prints `report`, the table of docs/memory.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from stepwell.hardware import GIB
from stepwell.plan.calibration.published import Published
from stepwell.plan.footprint.coefficients import SHIPPED, MemoryCoefficients
from stepwell.plan.footprint.footprint import footprint, headroom

# Where the fit may look: buffers of a communicator as NCCL has them (some ten connections a
# channel, 12 to 24 channels, 4 MiB and more each), and a share.
BOUNDS = ((0.1 * GIB, 0.6 * GIB), (0.0, 1.0))
TORCHS_OWN = ("reserved", "allocated", "active")


@dataclass(frozen=True)
class MemoryScore:
    """Of num_runs whose memory was measured: the median of |predicted / measured - 1|, the median
    error with its sign, the part within 10 %, and the row that is furthest off."""

    num_runs: int
    median_error: float
    bias: float
    within_10_percent: float
    worst: str


@dataclass(frozen=True)
class FitScore:
    """Of num_fit runs that fitted and num_oom that ran out of memory: the rows that are said wrong.
    num_unknown: runs that are not asked about, for what they recompute is not printed."""

    num_fit: int
    num_oom: int
    num_unknown: int
    wrong: tuple[str, ...]


def predicted_bytes(run: Published, coefficients: MemoryCoefficients = SHIPPED) -> float:
    """What the run's way of measuring should have shown."""
    found = footprint(run.job, _rank_shown(run), coefficients)
    return found.measured_as(run.mem_kind)


def memory_error(
    runs: Iterable[Published], coefficients: MemoryCoefficients = SHIPPED
) -> MemoryScore:
    """Raises ValueError if no run's memory was measured."""
    errors = {}
    for run in runs:
        if run.peak_bytes is not None:
            errors[run.row_id] = predicted_bytes(run, coefficients) / run.peak_bytes - 1
    return _score(errors)


def has_room(run: Published, coefficients: MemoryCoefficients = SHIPPED) -> bool:
    """On its GPUs; what memory the machines had is not printed."""
    held = footprint(run.job, None, coefficients)
    return headroom(held, run.job.cluster, coefficients) >= 0


def fit_errors(runs: Iterable[Published], coefficients: MemoryCoefficients = SHIPPED) -> FitScore:
    """Whether the runs fitted, predicted and observed."""
    runs = list(runs)
    asked = [run for run in runs if run.recompute_known or not run.fits]
    wrong = [run.row_id for run in asked if has_room(run, coefficients) != run.fits]
    num_fit = sum(run.fits for run in asked)
    return FitScore(num_fit, len(asked) - num_fit, len(runs) - len(asked), tuple(wrong))


def left_out(
    runs: Iterable[Published], group: Callable[[Published], str]
) -> dict[str, MemoryScore]:
    """Each group (a source, a family) predicted with coefficients that were fitted without it; and
    "all": all groups' errors together."""
    runs = [run for run in runs if run.peak_bytes is not None]
    parts = {run.row_id: _parts(run) for run in runs}
    errors: dict[str, dict[str, float]] = {}
    for name in sorted({group(run) for run in runs}):
        found = _fit([parts[run.row_id] for run in runs if group(run) != name])
        mine = [run.row_id for run in runs if group(run) == name]
        errors[name] = {row: _error(parts[row], found) for row in mine}
    scores = {name: _score(found) for name, found in errors.items()}
    together = {row: error for found in errors.values() for row, error in found.items()}
    return {**scores, "all": _score(together)}


def fit(runs: Iterable[Published]) -> MemoryCoefficients:
    """The coefficients with the least mean absolute relative error; repeats of one configuration
    count as one. context_bytes and margin stay as they are."""
    group_bytes, share = _fit([_parts(run) for run in runs if run.peak_bytes is not None])
    return MemoryCoefficients(SHIPPED.context_bytes, group_bytes, share, SHIPPED.margin)


# --- a prediction is linear in the coefficients ----------------------------------------------


class _Parts(NamedTuple):
    """Bytes, but for num_groups: what was measured, and what is predicted for it without
    coefficients; scattered: what they take a share of."""

    measured: float
    known: float
    scattered: float
    num_groups: float
    key: str


def _parts(run: Published) -> _Parts:
    units = MemoryCoefficients(SHIPPED.context_bytes, 1.0, 1.0, 0.0)
    found = footprint(run.job, _rank_shown(run), units)
    assert run.peak_bytes is not None
    if found.measured_as(run.mem_kind) == found.allocated:
        return _Parts(run.peak_bytes, found.allocated, 0.0, 0.0, run.config_key)
    whole = found.measured_as(run.mem_kind) == found.nvidia_smi
    return _Parts(
        measured=run.peak_bytes,
        known=found.allocated + (found.context if whole else 0.0),
        scattered=found.fragmentation,
        num_groups=found.communicators if whole else 0.0,
        key=run.config_key,
    )


def _rank_shown(run: Published) -> int | None:
    return None if any(word in run.mem_kind for word in TORCHS_OWN) else 0


def _error(parts: _Parts, found: Sequence[float]) -> float:
    group_bytes, share = found
    predicted = parts.known + share * parts.scattered + group_bytes * parts.num_groups
    return predicted / parts.measured - 1


def _fit(parts: Sequence[_Parts], steps: int = 50) -> tuple[float, float]:
    """The best of a grid: two numbers do not need more."""
    repeats = Counter(part.key for part in parts)

    def cost(found: tuple[float, float]) -> float:
        return sum(abs(_error(part, found)) / repeats[part.key] for part in parts)

    (low, high), (least, most) = BOUNDS
    grid = [
        (low + (high - low) * i / steps, least + (most - least) * j / steps)
        for i in range(steps + 1)
        for j in range(steps + 1)
    ]
    return min(grid, key=cost)


def _score(errors: dict[str, float]) -> MemoryScore:
    if not errors:
        raise ValueError("none of the runs has a measured memory")
    sizes = {row: abs(error) for row, error in errors.items()}
    return MemoryScore(
        num_runs=len(errors),
        median_error=median(sizes.values()),
        bias=median(errors.values()),
        within_10_percent=sum(size <= 0.1 for size in sizes.values()) / len(sizes),
        worst=max(sizes, key=lambda row: sizes[row]),
    )


def _line(name: str, score: MemoryScore) -> str:
    return (
        f"{name:34} {score.num_runs:4} {100 * score.median_error:6.1f} % {100 * score.bias:+6.1f} %"
        f" {100 * score.within_10_percent:4.0f} %  {score.worst}"
    )


def report(runs: Iterable[Published]) -> list[str]:
    """The fit, the errors of groups that it has not seen, and of "does it fit?", as lines."""
    runs = list(runs)
    found = fit(runs)
    lines = [
        f"fitted: {found.group_bytes / GIB:.2f} GiB a communicator, "
        f"fragmentation {found.fragmentation:.2f}",
        f"{'':34} runs, median error, bias, within 10 %, furthest off",
        _line("shipped coefficients", memory_error(runs)),
    ]
    for title, group in (("source", lambda r: r.source_key), ("family", lambda r: r.family)):
        for name, score in left_out(runs, group).items():
            label = f"each {title}, unseen" if name == "all" else f"  without {name}"
            lines.append(_line(label, score))
    asked = fit_errors(runs)
    lines.append(
        f"fits or not: {len(asked.wrong)} wrong of {asked.num_fit} that fitted and {asked.num_oom} "
        f"that did not ({asked.num_unknown} not asked): {', '.join(asked.wrong) or 'none'}"
    )
    return lines
