"""Which pipelines cannot be. No torch. Lines of `rules.RULES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepwell.config import Run
from stepwell.parallel.remedies import Complaint, Way, change, only, other_sizes, values_of
from stepwell.parallel.schedules import (
    ZERO_BUBBLE,
    fewest_micro_batches,
    num_stages,
    split_blocks,
)
from stepwell.sections.layout import LayoutConfig

if TYPE_CHECKING:
    from stepwell.parallel.rules import AxisSizes


def stages(run: Run, sizes: AxisSizes) -> list[Complaint]:
    layout, blocks = run.layout, run.model.num_layers
    v, schedule = layout.pp_stages_per_rank, layout.pp_schedule
    if sizes.pp == 1:
        if v == 1 and layout.pp_layers is None and schedule == "1f1b":
            return []
        said = (
            f"layout.pp_schedule={schedule!r}, pp_stages_per_rank={v} and pp_layers="
            f"{layout.pp_layers} are of a pipeline, and layout.pp=1 is none"
        )
        plain = {"pp_schedule": "1f1b", "pp_stages_per_rank": 1, "pp_layers": None}
        other = {f"layout.{k}": v for k, v in plain.items() if getattr(layout, k) != v}
        return [Complaint(said, ((other,), other_sizes("pp", sizes)))]
    one, two = schedule in ("gpipe", "1f1b"), schedule in ZERO_BUBBLE
    if (one and v != 1) or (two and v != 2) or v + one < 2:
        legal = "1" if one else "2" if two else "2 or more"
        said = (
            f"layout.pp_stages_per_rank={v} does not fit layout.pp_schedule={schedule!r}, which "
            f"has {legal} a rank"
        )
        fits = only(layout__pp_schedule="1f1b" if v == 1 else "interleaved-1f1b")
        return [Complaint(said, (only(layout__pp_stages_per_rank=1 if one else 2), fits))]
    number = num_stages(layout)
    if layout.pp_layers is not None:
        return _given_stages(layout.pp_layers, number, blocks, layout)
    if number <= blocks + 2:
        return []
    said = (
        f"layout.pp={sizes.pp} x pp_stages_per_rank={v} = {number} stages are more than the "
        f"model has parts: model.num_layers={blocks} blocks, the embedding and the head"
    )
    fewer = values_of("layout.pp_stages_per_rank", range(v - 1, 0, -1))
    alone = {"layout.pp": 1, "layout.pp_schedule": "1f1b", "layout.pp_stages_per_rank": 1}
    return [Complaint(said, ((*other_sizes("pp", sizes), alone), fewer))]


def _given_stages(
    counts: tuple[int, ...], number: int, blocks: int, layout: LayoutConfig
) -> list[Complaint]:
    said = f"layout.pp_layers={list(counts)}"
    if len(counts) != number:
        said += f" has {len(counts)} numbers for {number} stages"
    elif sum(counts) != blocks:
        said += f" adds up to {sum(counts)}, not to model.num_layers={blocks}"
    elif 0 in counts[1:-1]:
        said += (
            ": only the first stage (which has the embedding) and the last one (which has the "
            "head) can be without blocks"
        )
    else:
        return []
    split = split_blocks(blocks, layout.model_copy(update={"pp_layers": None}))
    return [Complaint(said, (only(layout__pp_layers=[len(part) for part in split]),))]


def micro_batches(run: Run, sizes: AxisSizes) -> list[Complaint]:
    if sizes.pp == 1 or not run.method.row_steps:  # rows are not known beforehand
        return []
    if run.optim.release_gradients:  # one micro-batch; another rule refuses that
        return []
    train, shares = run.train, sizes.dp_replicate * sizes.dp_shard
    rows = -(-train.global_batch_rows // shares)
    number, fewest = -(-rows // train.micro_batch_rows), fewest_micro_batches(run.layout)
    if number >= fewest:
        return []
    share = f" / {shares} shares" if shares > 1 else ""
    said = (
        f"train.global_batch_rows={train.global_batch_rows}{share} in pieces of "
        f"train.micro_batch_rows={train.micro_batch_rows} make {number} micro-batches, fewer than "
        f"the {fewest} that layout.pp_schedule={run.layout.pp_schedule!r} needs on layout.pp="
        f"{sizes.pp} ranks"
    )
    enough = [n for n in range(rows, 0, -1) if -(-rows // n) >= fewest]
    # pieces of equal size first
    enough.sort(key=lambda n: (rows % n > 0, -n))
    more_rows = {"train.global_batch_rows": fewest * shares, "train.micro_batch_rows": 1}
    ways = (values_of("train.micro_batch_rows", enough[:32]),) if enough else ((more_rows,),)
    return [Complaint(said, ways)]


def gradients(run: Run, sizes: AxisSizes) -> list[Complaint]:
    layout = run.layout
    if sizes.pp == 1 or (layout.zero != 2 and layout.reduce_gradients != "micro_batch"):
        return []
    said = (
        f"layout.pp={sizes.pp} sums gradients over the ranks once a step, which layout.zero="
        f"{layout.zero} with reduce_gradients={layout.reduce_gradients!r} does after every "
        "micro-batch"
    )
    ways: tuple[Way, ...] = (only(layout__reduce_gradients="auto"),)
    if layout.zero == 2:
        ways = only(layout__zero=1), only(layout__zero=3)
        if layout.reduce_gradients == "micro_batch":  # which both would refuse
            auto = {"layout__reduce_gradients": "auto"}
            ways = only(layout__zero=1, **auto), only(layout__zero=3, **auto)
    return [Complaint(said, ways)]


def zero_bubble(run: Run, sizes: AxisSizes) -> list[Complaint]:
    layout, found = run.layout, []
    if sizes.pp == 1 or layout.pp_schedule not in ZERO_BUBBLE:
        return []
    said = f"layout.pp_schedule={layout.pp_schedule!r} computes gradients of inputs and of weights "
    other = only(layout__pp_schedule="interleaved-1f1b")
    if layout.zero == 3 and layout.reshard_after_forward != "never":
        said_of_weights = (
            f"{said}apart, and would lose those of weights that were given back between (layout."
            f"zero=3, reshard_after_forward={layout.reshard_after_forward!r})"
        )
        zero = (change(layout__zero=1), change(layout__zero=1, layout__reduce_gradients="auto"))
        ways = only(layout__reshard_after_forward="never"), zero, other
        found.append(Complaint(said_of_weights, ways, "weights"))
    if layout.compile:
        found.append(
            Complaint(
                f"{said}apart, and compiled blocks compute them together",
                (only(layout__compile=False), other),
                "compile",
            )
        )
    return found


def release(run: Run, sizes: AxisSizes) -> list[Complaint]:
    if sizes.pp == 1 or not run.optim.release_gradients:
        return []
    said = (
        "optim.release_gradients=true steps within the backward pass of a step's only micro-batch, "
        f"and layout.pp={sizes.pp} needs at least {fewest_micro_batches(run.layout)}"
    )
    return [Complaint(said, (only(optim__release_gradients=False),))]
