"""A dry run of a step with many micro-batches from two of few.

Once the pipeline is full, a micro-batch more repeats what the one before did: every collective's
number of calls is a + b m, of which two runs give both numbers. Nothing more is held than its rows
of tokens; but gpipe holds all activations until the last forward pass, c + d m bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B

from stepwell.config import Run
from stepwell.parallel import pipeline
from stepwell.parallel.rules import axis_sizes
from stepwell.parallel.schedules import next_micro_batches
from stepwell.plan.dryrun import dryrun
from stepwell.plan.dryrun.dryrun import (
    Counted,
    DryRun,
    bytes_of,
    distinct_ranks,
    dry_run,
    full_rows,
    rows_of_rank,
)
from stepwell.plan.dryrun.watch import Issued
from stepwell.sections.layout import LayoutConfig


def dry_run_scaled(
    run: Run,
    world: int,
    gpus_per_node: int = 8,
    tell: Callable[[str], None] = lambda line: None,
) -> DryRun:
    """`dry_run` of the whole step, of which only `few_micro_batches` are run where it has more.
    tell: hears a line before each rank's step.

    Raises as `dry_run`, and ArithmeticError where the calls do not grow evenly.
    """
    axes = axis_sizes(run.layout, world)
    wanted = -(-rows_of_rank(run, axes) // run.train.micro_batch_rows)
    m = next_micro_batches(wanted, run.layout) if axes.pp > 1 else wanted
    few, more = few_micro_batches(run.layout)
    if m <= more:
        return _told(run, world, gpus_per_node, m, m, tell)
    first = _told(run, world, gpus_per_node, few, m, tell)
    second = _told(run, world, gpus_per_node, more, m, tell)
    pairs = zip(first.ranks, second.ranks, strict=True)
    found = [scaled_calls(a, b, few, more, m) for a, b in pairs]
    if axes.pp > 1 and run.layout.pp_schedule == "gpipe":
        pairs = zip(first.ranks, found, strict=True)
        return DryRun(world, m, [scaled_bytes(a, b, few, more, m) for a, b in pairs])
    rows = (m - more) * row_bytes(run)
    return DryRun(world, m, [with_more_held(one, rows) for one in found])


def few_micro_batches(layout: LayoutConfig) -> tuple[int, int]:
    """Two numbers of micro-batches. The larger one fills the pipeline, so that its peak is every
    larger number's; the smaller one may be less than the schedule allows to a real run."""
    p = layout.pp
    if p == 1:
        return 2, 3
    if layout.pp_schedule == "1f1b":
        return 2, p + 1
    if layout.pp_schedule == "gpipe":
        return 3, 4
    if layout.pp_schedule == "interleaved-1f1b":
        return 2 * p, 3 * p
    return 2 * p + 1, 2 * p + 2


def scaled_calls(few: Counted, more: Counted, m_few: int, m_more: int, m: int) -> Counted:
    """`more` with the calls of m micro-batches. Raises ArithmeticError for no whole number."""
    by_key = {one._replace(calls=0): one.calls for one in few.issued}
    issued: list[Issued] = []
    for one in more.issued:
        calls = by_key.pop(one._replace(calls=0), 0)
        issued.append(one._replace(calls=_on_line(calls, one.calls, m_few, m_more, m)))
    if by_key:
        raise ArithmeticError(f"sent with {m_few} micro-batches, but not with {m_more}: {by_key}")
    return replace(more, issued=issued, wall_s=few.wall_s + more.wall_s)


def scaled_bytes(few: Counted, more: Counted, m_few: int, m_more: int, m: int) -> Counted:
    """`more` with what m micro-batches hold. Raises ArithmeticError for no whole number."""
    peaks = {
        name: _on_line(few.peaks[name], peak, m_few, m_more, m) for name, peak in more.peaks.items()
    }
    held = _on_line(few.activations, more.activations, m_few, m_more, m)
    return replace(more, activations=held, peaks=peaks)


def _on_line(at_few: int, at_more: int, m_few: int, m_more: int, m: int) -> int:
    further, rest = divmod((at_more - at_few) * (m - m_more), m_more - m_few)
    if rest:
        raise ArithmeticError(
            f"{at_few} with {m_few} micro-batches and {at_more} with {m_more} do not grow evenly "
            f"to {m}"
        )
    return at_more + further


def row_bytes(run: Run) -> int:
    """Of a micro-batch's rows on the device, and of torch's target for it in a pipeline."""
    rows = full_rows(run, run.train.micro_batch_rows)
    tensors = [x for x in vars(rows).values() if isinstance(x, Tensor)]
    return bytes_of(tensors) + (4 if run.layout.pp > 1 else 0)


def with_more_held(rank: Counted, num_bytes: int) -> Counted:
    peaks = {name: peak + num_bytes for name, peak in rank.peaks.items()}
    return replace(rank, activations=rank.activations + num_bytes, peaks=peaks)


def _told(
    run: Run, world: int, gpus_per_node: int, m: int, whole: int, tell: Callable[[str], None]
) -> DryRun:
    ranks = distinct_ranks(run)
    names = ", ".join(str(rank) for rank in ranks)
    of = f"of {run.layout.pp}" if run.layout.pp > 1 else "of a pipeline of 1"
    tell(f"dry run: {m} of {whole} micro-batches on pipeline ranks {names} {of}")
    with as_few_as_asked():
        return dry_run(run, world, ranks, None, gpus_per_node, m)


@contextmanager
def as_few_as_asked() -> Iterator[None]:
    """A pipeline may have fewer micro-batches than it has ranks: 1f1b's and gpipe's orders are then
    still those of its first and last ones."""
    with (
        patch.object(dryrun, "next_micro_batches", _as_asked),
        patch.object(pipeline, "next_micro_batches", _as_asked),
        patch.dict(pipeline.SCHEDULES, {"1f1b": _Few1F1B}),
    ):
        yield


def _as_asked(wanted: int, _: LayoutConfig) -> int:
    return wanted


class _Few1F1B(Schedule1F1B):
    """Torch's, which only refuses to be made for fewer micro-batches than stages."""

    def __init__(self, stage: Any, n_microbatches: int, **settings: Any):
        super().__init__(stage, max(n_microbatches, stage.num_stages), **settings)
        self._n_microbatches = n_microbatches
