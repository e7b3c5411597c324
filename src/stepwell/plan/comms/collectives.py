"""What a rank sends in one step, collective by collective, before it runs. No torch.

Ours is counted as the engine issues it (`plan/dryrun` counts the same from the program itself); of
other programs, what their published designs send: Megatron-LM's tensor parallelism with sequence
parallelism (2205.05198), its distributed optimiser and expert parallelism, PyTorch's FSDP
(2304.11277). Weights and gradients are in `plan/comms/gathers`, activations in
`plan/comms/activations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stepwell.plan.cluster import Cluster
from stepwell.plan.comms.activations import activations_sent
from stepwell.plan.comms.gathers import state_sent
from stepwell.plan.comms.step import Sent, Step, distinct_ranks
from stepwell.plan.job import Job
from stepwell.types import ConfigError


class Total(NamedTuple):
    """Of one rank and step."""

    calls: int
    wire_bytes: float
    num_messages: int


def collectives(job: Job, pp_rank: int | None = None) -> list[Sent]:
    """A step's collectives on one rank of the pipeline, by default the one that sends the most.

    Raises ConfigError for a pp_rank that is not there.
    """
    layout = job.layout
    if pp_rank is not None and not 0 <= pp_rank < layout.pp:
        raise ConfigError(
            f"pp_rank={pp_rank} is not among the {layout.pp} ranks of the pipeline; the nearest "
            f"is {min(max(pp_rank, 0), layout.pp - 1)}"
        )
    if pp_rank is not None:
        return _of_rank(job, pp_rank)
    ranks = distinct_ranks(job)
    found = [_of_rank(job, rank) for rank in ranks]
    if len(ranks) == 1:
        return found[0]
    return max(found, key=lambda sent: sum(one.calls * one.wire_bytes for one in sent))


def totals(
    sent: Iterable[Sent], cluster: Cluster, by: tuple[str, ...] = ("axis", "link")
) -> dict[tuple[str, ...], Total]:
    """Sums by any of axis, link, kind, purpose and phase."""
    table: dict[tuple[str, ...], Total] = {}
    for one in sent:
        key = tuple(one.link(cluster) if name == "link" else getattr(one, name) for name in by)
        calls, num_bytes, messages = table.get(key, Total(0, 0.0, 0))
        table[key] = Total(
            calls + one.calls,
            num_bytes + one.calls * one.wire_bytes,
            messages + one.calls * one.num_messages,
        )
    return table


def lines(sent: Iterable[Sent], cluster: Cluster) -> list[str]:
    """A table by axis and link, in the order of first use."""
    rows = [f"{'axis':<14}{'link':<10}{'calls':>8}{'messages':>12}{'GiB sent':>12}"]
    for (axis, link), total in totals(sent, cluster).items():
        sent_gib = total.wire_bytes / 2**30
        rows.append(
            f"{axis:<14}{link:<10}{total.calls:>8}{total.num_messages:>12}{sent_gib:>12.3f}"
        )
    return rows


def _of_rank(job: Job, pp_rank: int) -> list[Sent]:
    step = Step.of(job, pp_rank)
    parts = [_counts(step), state_sent(step), activations_sent(step), _norms(step)]
    return [sent for part in parts for sent in part if sent is not None]


def _counts(step: Step) -> Iterator[Sent | None]:
    """Denominators, numbers of micro-batches and the step's sums: a few numbers each."""
    if step.layout.program != "stepwell":
        return
    yield step.one("all-reduce", "world", "count tokens", "forward", 8, 1)
    yield step.one("all-reduce", "world", "count micro-batches", "forward", 8, 1)
    yield step.one("all-reduce", "world", "sum up the loss", "optimizer", 8 * 6, 1)
    yield step.one("all-reduce", "pp", "agree on shapes", "pipeline", 8 * 4, 1)


def _norms(step: Step) -> Iterator[Sent | None]:
    """The gradient norm, and the guard's of the update: one number for each set of axes that
    divides parameters."""
    sets = 2 if step.layout.tp > 1 else 1
    for axis, numbers in (("dp_shard", sets), ("tp", 1), ("pp", 1)):
        yield step.one("all-reduce", axis, "norms", "optimizer", 8, 2 * numbers)
