"""The questions of the decision tree about one layout, and the values that could be instead. No
torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stepwell.plan.job import Arrangement
from stepwell.plan.search.runs import data_text, offloaded, recompute_text, state_text
from stepwell.plan.search.space import KINDS, OFFLOADS, Task, default_precision

# (label, changes, pins) of a value that could be instead.
Other = tuple[str, dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """others: values that could be instead."""

    axis: str
    question: str
    value: str
    others: tuple[Other, ...]
    lead: str = ""


def questions(task: Task, now: Arrangement) -> Iterator[Question]:
    yield Question(
        "zero",
        "How much of the state do data ranks divide?",
        state_text(now),
        tuple(
            (f"ZeRO-{z}", _zero(now, z), {"zero": z})
            for z in (0, 1, 2, 3)
            if z != now.zero and not (z > 1 and now.pp > 1) and now.dp_shard * now.cp > 1
        ),
        _zero_lead(now),
    )
    yield _sized(task, now, "tp", "Tensor ranks within the scale-up domain?", "TP")
    yield _sized(task, now, "pp", "Pipeline stages across machines?", "PP")
    if now.pp > 1:
        yield _schedules(now)
    yield _sized(task, now, "cp", "Context ranks for long rows?", "CP")
    if task.dims.experts:
        yield _sized(task, now, "ep", "Expert ranks?", "EP")
    yield _replicas(task, now)
    rows = now.micro_batch_rows
    yield Question(
        "micro_batch_rows",
        "How many rows at a time?",
        f"micro-batch {rows}",
        tuple(
            (f"micro-batch {n}", {"micro_batch_rows": n}, {"micro_batch_rows": n})
            for n in ([rows // 2] if rows > 1 else []) + [2 * rows]
            if n * now.data_ranks <= task.rows
        ),
    )
    yield Question(
        "recompute",
        "What is computed again?",
        recompute_text(now),
        tuple(_recomputations(now)),
    )
    yield _precisions(task, now)
    yield _offloads(now)


def _recomputations(now: Arrangement) -> Iterator[Other]:
    for mode, every in (("none", 2), ("selective", 2), ("every", 4), ("full", 2), ("sqrt", 2)):
        if mode != now.recompute:
            other = now.having(recompute=mode, recompute_every=every)
            changes: dict[str, Any] = {"recompute": mode, "recompute_every": every}
            if mode == "sqrt":  # several blocks are computed again together
                changes["compiled"] = False
            yield recompute_text(other), changes, {"recompute": mode}


def _precisions(task: Task, now: Arrangement) -> Question:
    """Products in 8 bits beside those in 16: each alters the numbers of the other."""
    device, asked, others = task.cluster.accelerator, task.pins.precision, ()
    lead = f"{device.name} has no products in 8 bits."
    if device.fp8_flops_per_s:
        value = "fp8" if now.precision != "fp8" else default_precision(task.cluster)
        recipe = "tensorwise" if value == "fp8" else "none"
        others = ((value, {"precision": value, "recipe": recipe}, {"precision": value}),)
        lead = "8 bits alter the numbers, so they are taken only if asked for (--precision fp8, or"
        lead += " --precision any to search both)."
        if asked is not None:
            both = "both were searched" if asked == "any" else f"--precision {asked}"
            lead = f"As asked for ({both}); 8 bits alter the numbers."
    return Question("precision", "Products in how many bits?", now.precision, others, lead)


def _offloads(now: Arrangement) -> Question:
    """To the host: it leans on memory and links that the planner knows little of."""
    has = tuple(offloaded(now))
    lead = (
        "To the hosts goes only what is asked for (--offload LIST, or --offload any for whichever "
        "is the fastest), or what nothing fits without."
    )
    value = f"offload {' and '.join(has)}" if has else "no offload"
    others = tuple(
        (
            f"offload {' and '.join(kinds)}" if kinds else "no offload",
            {f"offload_{kind}": kind in kinds for kind in KINDS},
            {"offload": kinds},
        )
        for kinds in ((), *OFFLOADS)
        if kinds != has
    )
    return Question("offload", "What goes to the host?", value, others, lead)


def _zero(now: Arrangement, zero: int) -> dict[str, Any]:
    once = zero < 2 or now.pp > 1
    reshard = "always" if zero == 3 and now.pp == 1 else "never"
    return {"zero": zero, "reshard": reshard, "reduce_every_micro_batch": not once}


def _zero_lead(now: Arrangement) -> str:
    ranks = now.dp_shard * now.cp
    if ranks == 1:
        return "There is one data rank, and so nothing to divide."
    divided = {
        0: "Each data rank has all of its stage's state.",
        1: f"Masters and moments are divided among {ranks:,} ranks; weights and gradients are "
        "whole on each.",
        2: f"Masters, moments and gradients are divided among {ranks:,} ranks.",
        3: f"Masters, moments, gradients and weights are divided among {ranks:,} ranks; a block's "
        "weights are gathered when it is at work.",
    }
    if now.pp == 1:
        return divided[now.zero]
    gathered = " With a pipeline weights stay gathered and gradients are reduced once a step, so "
    return divided[min(now.zero, 1)] + gathered + "ZeRO-2 and 3 are the same as ZeRO-1."


def _sized(task: Task, now: Arrangement, axis: str, question: str, name: str) -> Question:
    size = getattr(now, axis)
    wanted = {size // 2, 2 * size} if size > 1 else {2}
    if axis == "pp" and size > 2:
        wanted.add(1)
    if axis == "tp" and size > 2:
        wanted.add(1)
    if axis == "cp" and size == 1 and task.seq_len < 4096:
        wanted = set()
    leads = {
        "tp": f"Every layer is computed by {size} neighbours, which exchange activations around "
        "each of its halves and hide nothing of it."
        if size > 1
        else "Layers are not divided.",
        "pp": f"The blocks are divided among {size} stages, which pass activations on."
        if size > 1
        else "No pipeline, so no bubble.",
        "cp": f"Each row's tokens are divided among {size} ranks."
        if size > 1
        else f"Rows of {task.seq_len:,} tokens stay whole.",
        "ep": f"The experts are divided among {size} ranks."
        if size > 1
        else "Every rank has all experts.",
    }
    return Question(
        axis,
        question,
        f"{name} {size}",
        tuple((f"{name} {n}", {axis: n}, {axis: n}) for n in sorted(wanted)),
        leads[axis],
    )


def _schedules(now: Arrangement) -> Question:
    kinds = [("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4), ("zbv", 2)]
    others = []
    for schedule, v in kinds:
        if (schedule, v) == (now.schedule, now.stages_per_rank):
            continue
        changes: dict[str, Any] = {"schedule": schedule, "stages_per_rank": v}
        label = schedule + (f" with {v} stages a rank" if v > 1 else "")
        others.append((label, changes, changes))
    value = now.schedule + (
        f", {now.stages_per_rank} stages a rank" if now.stages_per_rank > 1 else ""
    )
    idle = f"{now.num_micro_batches} micro-batches pass through {now.pp} ranks."
    return Question("schedule", "In what order?", value, tuple(others), idle)


def _replicas(task: Task, now: Arrangement) -> Question:
    ranks, here = now.data_ranks, max(1, task.cluster.gpus_per_node // (now.tp * now.cp))
    wanted = {1, ranks // here if ranks % here == 0 else 1, 2} - {now.dp_replicate}
    wanted = {n for n in wanted if ranks % n == 0 and n < ranks * now.cp}
    others = tuple(
        (
            f"{n} replicas" if n > 1 else "no replicas",
            {"dp_replicate": n, "dp_shard": ranks // n},
            {"dp_replicate": n, "dp_shard": ranks // n},
        )
        for n in sorted(wanted)
    )
    m = now.num_micro_batches
    shared = (
        f"{ranks:,} share{'s' if ranks > 1 else ''} of the batch, {m:,} "
        f"micro-batch{'es' if m > 1 else ''}{' each' if ranks > 1 else ''}."
    )
    return Question(
        "data", "And the rest: how are data ranks arranged?", data_text(now), others, shared
    )
