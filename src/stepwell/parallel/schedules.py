"""Where the stages of a pipeline are, what each holds, and what a schedule costs. No torch.

p pipeline ranks, v stages a rank, S = p*v stages, m micro-batches. Stage s is on rank s % p, or,
for the V-shaped schedules, on rank s going down and back up: both ends are then on rank 0.

gpipe: 1811.06965. 1f1b: PipeDream-Flush, 2006.09503. interleaved-1f1b: 2104.04473. zbv: zero
bubble, V-shaped, 2401.10241. dualpipev: the V-shaped half of DualPipe (DeepSeek-V3, 2412.19437).
"""

from __future__ import annotations

from itertools import accumulate

from stepwell.sections.layout import LayoutConfig

# Their backward pass is in two halves: gradients of the inputs (B), of the weights (W) later.
ZERO_BUBBLE = ("zbv", "dualpipev")


def num_stages(layout: LayoutConfig) -> int:
    return layout.pp * layout.pp_stages_per_rank


def rank_of_stage(stage: int, layout: LayoutConfig) -> int:
    """The pipeline rank that a stage is on."""
    turn, place = divmod(stage, layout.pp)
    back = layout.pp_schedule in ZERO_BUBBLE and turn % 2
    return layout.pp - 1 - place if back else place


def stages_of_rank(rank: int, layout: LayoutConfig) -> list[int]:
    """The stages of a pipeline rank, in the model's order."""
    return [s for s in range(num_stages(layout)) if rank_of_stage(s, layout) == rank]


def split_blocks(num_layers: int, layout: LayoutConfig) -> list[range]:
    """The blocks of each stage: layout.pp_layers, or an even split in which the embedding and the
    head count as a block each; what is left over goes to the first stages."""
    counts = layout.pp_layers
    if counts is None:
        stages = num_stages(layout)
        each, over = divmod(num_layers + 2, stages)
        units = [each + (s < over) for s in range(stages)]
        counts = [n - (s == 0) - (s == stages - 1) for s, n in enumerate(units)]
    ends = accumulate(counts)
    return [range(end - n, end) for end, n in zip(ends, counts, strict=True)]


def fewest_micro_batches(layout: LayoutConfig) -> int:
    """What keeps every rank busy at least once, and what the schedule's own order demands."""
    return num_stages(layout) if layout.pp_schedule == "dualpipev" else layout.pp


def next_micro_batches(wanted: int, layout: LayoutConfig) -> int:
    """The smallest number of micro-batches, at least `wanted`, that the schedule can run."""
    m = max(wanted, fewest_micro_batches(layout))
    if layout.pp_schedule == "interleaved-1f1b":
        while m % (m // layout.pp):  # rounds of equal length
            m += 1
    return m


def micro_batches_of(rows: int, at_a_time: int, num_shares: int, layout: LayoutConfig) -> int:
    """Of a step of so many rows, which num_shares data ranks share."""
    wanted = -(-rows // (num_shares * at_a_time))
    return next_micro_batches(wanted, layout) if layout.pp > 1 else wanted


def most_in_flight(schedule: str, p: int, m: int, v: int = 1, pp_rank: int = 0) -> int:
    """Forward passes, each of one of a rank's v stages, that wait at once for their backward ones.

    gpipe: all. 1f1b: p - rank (2006.09503). interleaved-1f1b: its warm-up and the one at work
    (2104.04473), in m // (m // p) micro-batches a round. zbv: 2p; dualpipev: one more.
    """
    if schedule == "gpipe":
        return v * m
    if schedule == "1f1b":
        return min(m, p - pp_rank)
    if schedule == "interleaved-1f1b":
        per_round = m // max(1, m // p)
        return min(v * m, (v - 1) * per_round + 2 * (p - pp_rank - 1) + 1)
    return min(v * m, 2 * p + (schedule == "dualpipev"))


def bubble_fraction(schedule: str, p: int, m: int, v: int = 1) -> float:
    """Idle time of a rank over the time of its work, in one step whose messages take no time and
    whose forward passes take half as long as its backward passes.

    (p-1)/m; interleaved (p-1)/(v m) (2104.04473, 2.2). Zero bubble, with halves of equal length for
    inputs and weights: p-1 to 6m units of work, while the pipeline fills; with fewer than 2p-1
    micro-batches two units for each that is missing, if that is more. dualpipev: twice that, for
    what the first of an overlapped pair computes is sent after the second.
    """
    if schedule == "dualpipev":
        return 2 * (p - 1) / (6 * m)
    if schedule in ZERO_BUBBLE:
        return max(p - 1, 2 * (2 * p - 1 - m)) / (6 * m)
    return (p - 1) / ((v if schedule == "interleaved-1f1b" else 1) * m)
