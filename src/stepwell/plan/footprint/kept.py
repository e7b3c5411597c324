"""What recomputation leaves of a stage's blocks, in any program. No torch."""

from __future__ import annotations

from stepwell.parallel.remat import chosen_blocks
from stepwell.plan.footprint.activations import Block, Modules
from stepwell.plan.job import Arrangement


def kept_by(block: Block, blocks: range, layout: Arrangement) -> Modules:
    """What these blocks, alike and of one stage, keep of one micro-batch. budget: as "full", the
    least."""
    mode, number = layout.recompute, len(blocks)
    if mode == "none":
        return block.all.times(number)
    if mode == "selective":
        return block.products.times(number)
    if mode == "every":
        inputs = len(chosen_blocks(blocks, layout.recompute_every))
        return block.input.times(inputs).plus(block.all.times(number - inputs))
    return block.input.times(num_groups(number) if mode == "sqrt" else number)


def kept_before(block: Block, blocks: range, start: int, layout: Arrangement) -> Modules:
    """What a stage's first `start` blocks keep."""
    if layout.recompute == "every":
        return kept_by(block, blocks[:start], layout)
    num_blocks, groups = len(blocks), num_groups(len(blocks))
    return block.input.times(sum(num_blocks * g // groups < start for g in range(groups)))


def group_of(layout: Arrangement, number: int, num_blocks: int) -> range:
    """The blocks that are computed again together with block `number`: with "sqrt" its group."""
    if layout.recompute != "sqrt":
        return range(number, number + 1)
    groups = num_groups(num_blocks)
    borders = [num_blocks * g // groups for g in range(groups + 1)]
    place = max(g for g in range(groups) if borders[g] <= number)
    return range(borders[place], borders[place + 1])


def num_groups(number: int) -> int:
    return max(1, round(number**0.5)) if number else 0
