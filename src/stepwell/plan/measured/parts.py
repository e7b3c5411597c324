"""What a traced step's seconds went to: computing by kind, messages by axis, copies, nothing. No
torch.

Where kernels overlap, the time is counted once: computing first, then copies, then messages, so
that a message counts only where nothing hides it. Messages' axes follow from their groups' names
(DeviceMesh's, Megatron's), else from which ranks they join.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, median
from typing import NamedTuple

from stepwell.parallel.wire import wire_bytes
from stepwell.plan.job import Arrangement
from stepwell.plan.measured.trace import Message, Piece, Trace, Window

Span = tuple[float, float]

# The first pattern that is found in a kernel's (or, on a CPU, an operator's) name decides.
CATEGORIES = {
    "memory-bound": r"triton_(poi|red|per|pointwise|reduction|persistent)_|fsdp::",
    "collectives": (
        r"nccl|gloo|all_?gather|all_?reduce|reduce_scatter|all_?to_?all|deep_ep|nvshmem"
        r"|memcpy ptop"
    ),
    "optimizer": r"adam|multi_tensor_apply|foreach|triton_for_",
    "attention": r"flash|fmha|attention|attn|sdpa",
    "products": (
        r"gemm|gemv|cutlass|cublas|nvjet|xmma|cijk_|matmul|(^|::|_)(add|b|ba|scaled_)?mm(\b|_)"
    ),
}
OTHER = "memory-bound"
HOST_COPY = r"memcpy (htod|dtoh)|memcpy.*(host|pageable|pinned)"
COMPUTING = ("products", "attention", "optimizer", OTHER)
COPIES = "copies to and from the host"
IDLE = "idle"
# An operator within one of these belongs to it.
OF_WHAT_CALLS = ("attention", "collectives", "optimizer")
# Axes in the order in which what overlaps is counted; a stage waits in its messages, so it is last.
AXES = ("tp", "cp", "ep", "data", "world", "other", "pp")
ORDER = (*COMPUTING, COPIES, *(f"exposed {axis}" for axis in AXES))
WORDS = (
    ("data", {"dp", "data", "fsdp", "hsdp", "ddp", "edp", "efsdp", "shard", "replicate"}),
    ("pp", {"pp", "pipeline", "pipe"}),
    ("tp", {"tp", "etp", "tensor"}),
    ("cp", {"cp", "context"}),
    ("ep", {"ep", "expert"}),
)
# What idles no longer than this waits for launches; longer, for something else on the host.
LONG_GAP_S = 1e-3
FASTEST = 0.1  # share of a size's messages by which the rate of the link is judged
# When products tell what messages beside them cost: kernels of one name and grid are equal if they
# last alike, alone and beside messages (the slowest tenth over the fastest), and are so many.
ALIKE, FEWEST_ALIKE = 1.25, 5
BESIDE = 0.9  # of a kernel's time


@cache
def category(name: str) -> str:
    lowered = name.lower()
    return next((c for c, pattern in CATEGORIES.items() if re.search(pattern, lowered)), OTHER)


def union(intervals: Iterable[Span]) -> list[Span]:
    """The same points as disjoint intervals in order."""
    merged: list[Span] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


class Messages(NamedTuple):
    """Of one axis, a step. busy_s: in which any of its messages is under way. exposed_s: of that,
    what nothing hides. link_s: what they would take if all of a size went as fast as its fastest
    tenth; the rest of their time they wait for other ranks, or for room on the device. wire_bytes:
    what this rank sends, 0 where the trace does not say. group: ranks of the largest group."""

    busy_s: float
    exposed_s: float
    link_s: float
    wire_bytes: float
    calls: float
    group: int

    @property
    def hidden_s(self) -> float:
        return self.busy_s - self.exposed_s

    @property
    def bytes_per_s(self) -> float | None:
        """What the link gives: of the fastest tenth."""
        return self.wire_bytes / self.link_s if self.wire_bytes and self.link_s else None


@dataclass(frozen=True)
class Measured:
    """A mean step. parts: seconds, which add up to step_s: products, attention, memory-bound,
    optimizer, copies to and from the host, exposed messages by axis, idle. launches_s: of what is
    idle, in pauses too short to be a wait; longest_gap_s: idle at a stretch; both while no
    optimiser steps. optimizer_idle_s: idle while it does. heaviest: of each kind of computing, the
    kernel that takes longest. slowed: share of computing's time beside messages that those cost it,
    None where no equal products ran both alone and beside them."""

    num_steps: int
    step_s: float
    parts: dict[str, float]
    messages: dict[str, Messages]
    launches_s: float
    longest_gap_s: float
    heaviest: dict[str, str]
    optimizer_idle_s: float = 0.0
    slowed: float | None = None

    @property
    def exposed_s(self) -> float:
        return sum(s for name, s in self.parts.items() if name.startswith("exposed "))


def parts_of(trace: Trace, layout: Arrangement) -> Measured:
    """The mean of a trace's whole steps. layout: says which axis a group of unknown name is of."""
    steps = [_step(trace, window, layout) for window in trace.steps]
    num = len(steps)
    names = dict.fromkeys(name for step in steps for name in step.parts)
    axes = dict.fromkeys(axis for step in steps for axis in step.messages)
    messages = {
        axis: _mean([step.messages[axis] for step in steps if axis in step.messages], num)
        for axis in axes
    }
    return Measured(
        num,
        sum(step.step_s for step in steps) / num,
        {name: sum(step.parts.get(name, 0.0) for step in steps) / num for name in names},
        messages,
        sum(step.launches_s for step in steps) / num,
        max(step.longest_gap_s for step in steps),
        steps[-1].heaviest,
        sum(step.optimizer_idle_s for step in steps) / num,
        mean(told) if (told := [s.slowed for s in steps if s.slowed is not None]) else None,
    )


def _mean(each: Sequence[Messages], num_steps: int) -> Messages:
    busy, exposed, link, wire, calls = (
        sum(getattr(one, name) for one in each) / num_steps for name in Messages._fields[:-1]
    )
    return Messages(busy, exposed, link, wire, calls, max(one.group for one in each))


def _step(trace: Trace, window: Window, layout: Arrangement) -> Measured:
    spans: dict[str, list[Span]] = {}
    sent: dict[str, list[tuple[Piece, Span]]] = {}
    by_name: dict[str, dict[str, float]] = {}
    products: list[tuple[Piece, Span]] = []
    for piece in trace.pieces:
        span = max(piece.start_s, window.start_s), min(piece.end_s, window.end_s)
        if span[0] >= span[1]:
            continue
        kind = part_of(piece, trace.optimizer)
        if kind == "collectives":
            axis = axis_of(piece.message, layout)
            kind = f"exposed {axis}"
            sent.setdefault(axis, []).append((piece, span))
        elif kind == "products":
            products.append((piece, span))
        names = by_name.setdefault(kind, {})
        names[piece.name] = names.get(piece.name, 0.0) + span[1] - span[0]
        spans.setdefault(kind, []).append(span)
    parts, covered = covered_once(spans, ORDER)
    parts[IDLE] = window.seconds - length(covered)
    clipped = ((max(a, window.start_s), min(b, window.end_s)) for a, b in trace.optimizer)
    gaps = gaps_of(union([*covered, *(span for span in clipped if span[0] < span[1])]), window)
    optimizer_idle = parts[IDLE] - sum(gaps)
    messages = {axis: _messages(pieces, parts[f"exposed {axis}"]) for axis, pieces in sent.items()}
    launches = sum(gap for gap in gaps if gap <= LONG_GAP_S)
    heaviest = {kind: max(names, key=names.__getitem__) for kind, names in by_name.items()}
    longest = max(gaps, default=0.0)
    busy = union(span for pieces in sent.values() for _, span in pieces)
    slowed = slowed_share(products, busy)
    return Measured(
        *(1, window.seconds, parts, messages, launches, longest, heaviest),
        *(max(0.0, optimizer_idle), slowed),
    )


def slowed_share(products: Iterable[tuple[Piece, Span]], busy: Sequence[Span]) -> float | None:
    """Of the time of products beside messages, the share that equal ones alone do not need.
    busy: disjoint spans in order, in which messages are under way."""
    alike: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for piece, (start, end) in products:
        beside = covered_s(busy, start, end) / (end - start)
        if beside == 0 or beside >= BESIDE:
            pair = alike.setdefault((piece.name, piece.grid), ([], []))
            pair[beside > 0].append(end - start)
    both = [pair for pair in alike.values() if all(map(_are_equal, pair))]
    times = sum(sum(beside) for _, beside in both)
    if not times:
        return None
    more = sum(sum(beside) * max(0.0, 1 - median(alone) / median(beside)) for alone, beside in both)
    return more / times


def _are_equal(times: list[float]) -> bool:
    if len(times) < FEWEST_ALIKE:
        return False
    few, ordered = len(times) // 10, sorted(times)
    return ordered[-1 - few] <= ALIKE * ordered[few]


def covered_s(spans: Sequence[Span], start: float, end: float) -> float:
    """Of start to end, what disjoint spans in order cover."""
    found = 0.0
    for at in range(max(0, bisect_right(spans, (start, start)) - 1), len(spans)):
        if spans[at][0] >= end:
            break
        found += max(0.0, min(end, spans[at][1]) - max(start, spans[at][0]))
    return found


def covered_once(
    spans: Mapping[str, Sequence[Span]], order: Iterable[str]
) -> tuple[dict[str, float], list[Span]]:
    """Seconds by kind, of each what no kind before it covers; and all that is covered."""
    taken: list[Span] = []
    parts, before = {}, 0.0
    for name in order:
        if name not in spans:
            continue
        taken = union([*taken, *spans[name]])
        now = length(taken)
        parts[name], before = now - before, now
    return parts, taken


def gaps_of(covered: Sequence[Span], window: Window) -> list[float]:
    edges = [window.start_s, *(t for span in covered for t in span), window.end_s]
    return [end - start for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]


def part_of(piece: Piece, optimizer: Sequence[Span] = ()) -> str:
    """Its category; what runs while the optimiser steps, but for messages, is the optimiser's."""
    if piece.message is not None:
        return "collectives"
    found = category(piece.name)
    for name in piece.within:
        above = category(name)
        if above in OF_WHAT_CALLS:
            found = above
            break
    if re.search(HOST_COPY, piece.name.lower()):
        return COPIES
    if found != "collectives" and any(a <= piece.start_s < b for a, b in optimizer):
        return "optimizer"
    return found


def axis_of(message: Message | None, layout: Arrangement) -> str:
    """One of AXES. A group's name decides, else its ranks, else what only one axis can be."""
    sizes = _sizes(layout)
    if message is None or not (message.group or message.num_ranks or message.ranks):
        return _only(axis for axis, _ in sizes)
    words = set(re.findall(r"[a-z]+", message.group.lower()))
    for axis, names in WORDS:
        if words & names:
            return axis
    if message.kind in ("send", "recv"):
        return "pp" if layout.pp > 1 else "cp" if layout.cp > 1 else "other"
    if len(message.ranks) > 1:
        step = message.ranks[1] - message.ranks[0]
        return next((axis for axis, s in sizes if s == (message.num_ranks, step)), "other")
    return _only(axis for axis, (size, _) in sizes if size == message.num_ranks)


def _only(axes: Iterable[str]) -> str:
    """The axis, if they are one beside the world."""
    found = dict.fromkeys(axes)
    few = [axis for axis in found if axis != "world"] or [*found]
    return few[0] if len(few) == 1 else "other"


def _sizes(layout: Arrangement) -> list[tuple[str, tuple[int, int]]]:
    """(ranks, how far apart) of the groups of more than one rank, by axis."""
    inner, shards = layout.tp * layout.cp, layout.dp_shard * layout.cp
    found = [
        ("tp", (layout.tp, 1)),
        ("cp", (layout.cp, layout.tp)),
        ("data", (shards, layout.tp)),
        ("data", (layout.dp_replicate, inner * layout.dp_shard)),
        ("data", (shards * layout.dp_replicate, layout.tp)),
        ("ep", (layout.ep, 1)),
        ("pp", (layout.pp, layout.num_gpus // layout.pp)),
        ("world", (layout.num_gpus, 1)),
    ]
    return [(axis, size) for axis, size in found if size[0] > 1]


def _messages(pieces: Sequence[tuple[Piece, Span]], exposed_s: float) -> Messages:
    alike: dict[tuple[str, int | None, int], list[float]] = {}
    wire, group = 0.0, 1
    for piece, span in pieces:
        sent = piece.message
        if sent is None or span[0] > piece.start_s:  # what a CPU does to send; another step's
            continue
        key = (sent.kind, sent.num_bytes, sent.num_ranks)
        alike.setdefault(key, []).append(piece.end_s - piece.start_s)
        group = max(group, sent.num_ranks)
        if sent.num_bytes and sent.kind and sent.num_ranks > 1:
            wire += wire_bytes(sent.kind, sent.num_bytes, sent.num_ranks)
    link = sum(len(times) * _fast(times) for times in alike.values())
    busy = length(union(span for _, span in pieces))
    calls = sum(map(len, alike.values()))
    return Messages(busy, exposed_s, min(link, busy), wire, calls, group)


def _fast(times: list[float]) -> float:
    """The median of the fastest tenth."""
    return median(sorted(times)[: max(1, round(FASTEST * len(times)))])
