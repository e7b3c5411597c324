"""Whether a trace is of what is planned: its device, and what its ranks sent. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from stepwell.hardware import match_accelerator
from stepwell.plan.comms.collectives import collectives
from stepwell.plan.job import Arrangement, Job
from stepwell.plan.measured.trace import Trace
from stepwell.types import ConfigError

UNLIKE_BYTES = 0.2  # by which a trace's bytes and the plan's may differ
UNPLANNED_BYTES = 0.01  # of all that is planned, below which other messages are not worth a word
ALIKE_BYTES = 0.05  # within which another layout is taken to be the one that was measured


def axis_name(axis: str) -> str:
    return axis if axis in ("tp", "cp", "ep", "pp", "world") else "data"


def check_ranks(trace: Trace, world: int) -> None:
    """Raises ConfigError for a trace of another number of ranks than `world`. One that does not say
    how many they were is of one if it sends nothing, else of as many as its largest group or
    more."""
    sizes = [piece.message.num_ranks for piece in trace.pieces if piece.message is not None]
    if trace.world is not None:
        told = "one rank" if trace.world == 1 else f"{trace.world:,} ranks"
        fewest, fits = trace.world, trace.world == world
    elif sizes:
        fewest = max(2, *sizes)
        told, fits = f"{fewest:,} ranks or more", fewest <= world
    else:
        fewest, told, fits = 1, "one rank, for it sends nothing", world == 1
    if not fits:
        are = "is" if world == 1 else "are"
        raise ConfigError(
            f"--measured: the trace is of {told}, and {world:,} {are} planned; give --gpus {fewest}"
        )


def other_device(trace: Trace, job: Job) -> str:
    """Why the trace cannot be of the device that is planned; empty if it may be."""
    planned = job.cluster.accelerator.name
    if not trace.on_device:
        return (
            f"the trace has no kernels: it is of a CPU, and {planned} is planned; what gains on it "
            "is told from a trace of it"
        )
    device = match_accelerator(trace.device)
    if device is None or device.name == planned:
        return ""
    return (
        f"the trace is of {trace.device} ({device.name}), and {planned} is planned; for what gains "
        f"there, give --gpu {device.name}"
    )


def doubts_of(
    trace: Trace, sent: Mapping[str, tuple[float | None, float]], job: Job
) -> Iterator[str]:
    """sent: bytes a step by axis, in the trace (0 where it has messages and not their sizes, None
    where it has none) and as planned."""
    if other := other_device(trace, job):
        yield other
    planned = sum(wanted for _, wanted in sent.values())
    for axis, (found, wanted) in sent.items():
        if not wanted and (found or 0.0) >= UNPLANNED_BYTES * planned:
            size = f" ({found / 2**30:,.2f} GiB a step)" if found else ""
            yield f"messages of {axis} are in the trace{size}, and the plan has none"
        if found is None and "other" not in sent:
            yield (
                f"the trace has no messages of {axis}, and the plan {wanted / 2**30:,.2f} GiB a "
                "step: was it recorded without them, or with another layout"
            )
        if axis != "world" and found and wanted and abs(found / wanted - 1) > UNLIKE_BYTES:
            yield (
                f"messages of {axis} are {found / 2**30:,.2f} GiB a step in the trace, and "
                f"{wanted / 2**30:,.2f} as planned: is the layout or the batch another"
            )


def sent_like(data_bytes: float, job: Job) -> Job:
    """The job with weights and gradients kept or given away such that its data ranks send
    data_bytes a step, where its own way does not: what a trace tells and no option does."""
    own = _unlikeness(data_bytes, job)
    if not data_bytes or own <= UNLIKE_BYTES:
        return job
    others = [replace(job, layout=layout) for layout in _arranged(job.layout)]
    best = min(others, key=lambda other: _unlikeness(data_bytes, other), default=job)
    return best if _unlikeness(data_bytes, best) <= ALIKE_BYTES else job


def _unlikeness(data_bytes: float, job: Job) -> float:
    sent = sum(s.wire_bytes * s.calls for s in collectives(job) if axis_name(s.axis) == "data")
    return abs(sent / data_bytes - 1) if data_bytes else 0.0


def _arranged(layout: Arrangement) -> Iterator[Arrangement]:
    """What a run of ZeRO-3 may do with its weights and its gradients after each micro-batch."""
    if layout.zero != 3 or layout.pp > 1:
        return
    for reshard in ("always", "never"):
        for each in (True, False):
            yield replace(layout, reshard=reshard, reduce_every_micro_batch=each)
