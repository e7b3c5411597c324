"""A dry run of a step with many micro-batches, or of a model with many blocks, from two of few.

Once the pipeline is full, a micro-batch more repeats what the one before did: every collective's
number of calls is a + b m, of which two runs give both numbers. Nothing more is held than its rows
of tokens; but gpipe holds all activations until the last forward pass, c + d m bytes.

A block more adds the same calls and the same bytes, as long as the step's worst moment stays the
same one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B

from stepwell.config import Run
from stepwell.models.lora_shapes import target_shapes
from stepwell.parallel import pipeline
from stepwell.parallel.fp8_layers import fp8_linears
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
from stepwell.plan.memory.ledger import predict_rank
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError


def dry_run_scaled(
    run: Run,
    world: int,
    gpus_per_node: int = 8,
    tell: Callable[[str], None] = lambda line: None,
) -> DryRun:
    """`dry_run` of the whole step, of which only `few_micro_batches` are run where it has more and
    what it counts grows evenly. tell: hears a line before each step.

    Raises as `dry_run`.
    """
    axes = axis_sizes(run.layout, world)
    wanted = -(-rows_of_rank(run, axes) // run.train.micro_batch_rows)
    m = next_micro_batches(wanted, run.layout) if axes.pp > 1 else wanted
    few, more = few_micro_batches(run.layout, m)
    if m <= more:
        return _told(run, world, gpus_per_node, m, m, tell)
    first = _told(run, world, gpus_per_node, few, m, tell)
    second = _told(run, world, gpus_per_node, more, m, tell)
    try:
        return DryRun(world, m, _of_all_micro_batches(run, first, second, m))
    except ArithmeticError as error:
        tell(f"dry run: {error}; all micro-batches are run, which may take long")
        return _told(run, world, gpus_per_node, m, m, tell)


def few_micro_batches(layout: LayoutConfig, m: int) -> tuple[int, int]:
    """Two numbers of micro-batches, from which those of m are found. The larger one fills the
    pipeline, so that its peak is every larger number's; the smaller one may be less than the
    schedule allows to a real run. Where weights are given back and gathered again between passes
    (ZeRO-3), a rank's first forward passes share a gather: both numbers have all of these.
    """
    p = layout.pp
    if p == 1:
        return 2, 3
    if layout.pp_schedule == "1f1b":
        gives_back = layout.zero == 3 and layout.reshard_after_forward != "never"
        return (p if gives_back else 2), p + 1
    if layout.pp_schedule == "gpipe":
        return 3, 4
    if layout.pp_schedule == "interleaved-1f1b":
        per_round = m // max(1, m // p)  # as in m: rounds may be longer than p
        return 2 * per_round, 3 * per_round
    return 2 * p + 1, 2 * p + 2


def _of_all_micro_batches(run: Run, first: DryRun, second: DryRun, m: int) -> list[Counted]:
    few, more = first.num_micro_batches, second.num_micro_batches
    pairs = zip(first.ranks, second.ranks, strict=True)
    found = [scaled_calls(a, b, few, more, m) for a, b in pairs]
    if run.layout.pp > 1 and run.layout.pp_schedule == "gpipe":
        pairs = zip(first.ranks, found, strict=True)
        return [scaled_bytes(a, b, few, more, m) for a, b in pairs]
    rows = (m - more) * row_bytes(run)
    return [with_more_held(one, rows) for one in found]


def scaled_calls(few: Counted, more: Counted, m_few: int, m_more: int, m: int) -> Counted:
    """`more` with the calls of m micro-batches. Raises ArithmeticError for no whole number."""
    by_key = {one._replace(calls=0): one.calls for one in few.issued}
    issued: list[Issued] = []
    for one in more.issued:
        calls = by_key.pop(one._replace(calls=0), 0)
        issued.append(one._replace(calls=_on_line(calls, one.calls, m_few, m_more, m)))
    if by_key:
        raise ArithmeticError(f"sent with {m_few}, but not with {m_more}: {by_key}")
    return replace(more, issued=issued, wall_s=few.wall_s + more.wall_s)


def scaled_bytes(few: Counted, more: Counted, m_few: int, m_more: int, m: int) -> Counted:
    """`more` with what m micro-batches hold. Raises ArithmeticError for no whole number."""
    peaks = {
        name: _on_line(few.peaks[name], peak, m_few, m_more, m) for name, peak in more.peaks.items()
    }
    held = _on_line(few.activations, more.activations, m_few, m_more, m)
    host = {key: _on_line(few.host[key], n, m_few, m_more, m) for key, n in more.host.items()}
    return replace(more, activations=held, peaks=peaks, host=host)


def _on_line(at_few: int, at_more: int, few: int, more: int, wanted: int) -> int:
    further, rest = divmod((at_more - at_few) * (wanted - more), more - few)
    if rest:
        raise ArithmeticError(
            f"{at_few} with {few} and {at_more} with {more} do not grow evenly to {wanted}"
        )
    return at_more + further


# --- many blocks from few --------------------------------------------------------------------


def dry_run_of_few_blocks(
    run: Run, world: int, gpus_per_node: int = 8, num_micro_batches: int | None = None
) -> DryRun:
    """`dry_run` of the whole model, of which only `few_layers` are run where it has more. The
    forward passes' own peak, which is never the step's, is a lower bound: few blocks may have it
    where the ends are gathered.

    Raises as `dry_run`, and ConfigError where blocks do not add up evenly.
    """
    few, more = few_layers(with_micro_batches(run, world, num_micro_batches), world)
    if run.model.num_layers <= more:
        return dry_run(run, world, None, None, gpus_per_node, num_micro_batches)
    n = run.model.num_layers
    found = [
        dry_run(with_layers(run, layers), world, None, None, gpus_per_node, num_micro_batches)
        for layers in (few, more)
    ]
    pairs = zip(*(one.ranks for one in found), strict=True)
    ranks = [_of_all_blocks(a, b, few, more, n) for a, b in pairs]
    return DryRun(world, found[0].num_micro_batches, ranks)


def few_layers(run: Run, world: int) -> tuple[int, int]:
    """Two numbers of blocks, the smallest whose worst moment of the backward pass is, by the
    ledger, that of the whole model, and that hold all that is gathered ahead. Raises ConfigError
    where a block more does not add what the one before did: in a pipeline, with groups of blocks
    that are computed again, and where blocks are named; or where the worst moment of few is not
    told well enough: where gathered blocks stay."""
    layout = run.layout
    stay = layout.zero < 3 or layout.reshard_after_forward == "never"
    faults = {
        f"layout.pp={layout.pp}": layout.pp > 1,
        "gathered blocks that stay": world > 1 and stay,
        f"remat.mode={run.remat.mode!r}": run.remat.mode in ("every", "sqrt", "budget"),
        "lora.targets": not _of_all_alike(target_shapes(run.model, run.lora), run),
        "precision.fp8.keep": not _of_all_alike(fp8_linears(run, run.layout.tp), run),
    }
    found = [name for name, there in faults.items() if there]
    if found:
        raise ConfigError(
            f"a few blocks do not tell of all with {', '.join(found)}; the nearest that can be "
            "scaled is layout.pp=1 with layout.zero=3, remat.mode='none' and the same layers of "
            "every block"
        )
    ahead = max(run.layout.prefetch_forward, run.layout.prefetch_backward) if world > 1 else 0
    wanted = _worst_backward(run, world)
    few = 2 + ahead
    while few < run.model.num_layers and _worst_backward(with_layers(run, few), world) != wanted:
        few += 1
    return few, few + 1


def _of_all_alike(names: Iterable[str], run: Run) -> bool:
    """Whether layers by name (`blocks.3.attn.wq`) are the same ones of each block."""
    by_block = defaultdict(set)
    for _, number, layer in (name.split(".", 2) for name in names):
        by_block[number].add(layer)
    kinds = {frozenset(layers) for layers in by_block.values()}
    return not kinds or (len(kinds) == 1 and len(by_block) == run.model.num_layers)


def with_micro_batches(run: Run, world: int, num_micro_batches: int | None) -> Run:
    if num_micro_batches is None:
        return run
    axes = axis_sizes(run.layout, world)
    rows = num_micro_batches * run.train.micro_batch_rows * axes.dp_replicate * axes.dp_shard
    train = run.train.model_copy(update={"global_batch_rows": rows})
    return run.model_copy(update={"train": train})


def with_layers(run: Run, num_layers: int) -> Run:
    model = run.model.model_copy(update={"num_layers": num_layers})
    return run.model_copy(update={"model": model})


def _worst_backward(run: Run, world: int) -> str:
    moments = predict_rank(run, world, 0, device="cuda").by_phase
    return max(moments.keys() - {"forward", "optimizer"}, key=lambda name: moments[name])


def _of_all_blocks(few: Counted, more: Counted, n_few: int, n_more: int, n: int) -> Counted:
    held = ("parameters", "gradients", "optimizer", "gathered")
    sizes = {
        name: _on_line(getattr(few, name), getattr(more, name), n_few, n_more, n) for name in held
    }
    scaled = scaled_bytes(few, scaled_calls(few, more, n_few, n_more, n), n_few, n_more, n)
    return replace(scaled, **sizes)


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
