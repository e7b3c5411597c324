"""Which of a step's messages nothing hides, and what those cost that something does. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from stepwell.plan.job import Arrangement
from stepwell.plan.steptime.coefficients import Coefficients
from stepwell.plan.steptime.flows import Flow
from stepwell.plan.steptime.rates import Seconds

# Share of tensor ranks' communication, and of experts' exchanges, that products hide where a
# program overlaps them: Megatron's kernels; PyTorch's, which divide products into smaller ones.
TENSOR_HIDDEN = {"megatron": 0.6, "fsdp": 0.35, "stepwell": 0.35}
# Share of their time that hidden messages cost at most: at all of it they had better not hide.
MOST_SLOWED = 0.95


def exposed_of(
    found: Iterable[Flow],
    layout: Arrangement,
    c: Coefficients,
    forward: Seconds,
    backward: Seconds,
    again: Seconds,
) -> tuple[dict[str, float], dict[str, float]]:
    """Communication by axis that nothing hides, and how much the rest slows what hides it: kernels
    of messages occupy processors as long as they wait, and the memory for what they move. What is
    slowed lasts longer, and hides more.

    Weights are gathered and gradients reduced beside the passes that need them, or, where
    gradients are summed first, beside one micro-batch's. Tensor and expert ranks wait for each
    other, and attention for exchanges of heads (Ulysses); the keys of context ranks in a ring
    travel beside it; stages' messages beside the next pass where a rank has several.

    What a ring hides is not charged: with the charge of data ranks' messages the 79 rows that have
    context ranks are predicted 6.9 % off, without 5.9 %.

    Beside it, by phase, what of the messages is hidden and crosses GPUs' PCIe links: seconds there.
    """
    m = layout.num_micro_batches
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    slowed_s, beside = 0.0, TENSOR_HIDDEN[layout.program]
    windows = _windows(layout, m, forward, backward, again)
    for flow in found:
        seconds = flow.seconds(c.scaleup, c.network, c.hop_s)
        if flow.axis == "tp":
            open_s = seconds * (1 - beside if layout.overlap_tp else 1)
        elif flow.axis == "cp" and layout.cp_method == "ulysses":
            open_s = seconds
        elif flow.axis == "cp":
            open_s = max(0.0, seconds - m * (forward.attention + backward.attention) / 2)
        elif flow.axis == "ep":
            open_s = seconds * (1 - beside if layout.overlap_ep else 1)
        elif flow.axis == "world":
            open_s = seconds
        elif flow.axis == "pp":
            open_s = seconds / (2 if layout.stages_per_rank > 1 else 1)
        else:
            window_s, slow = windows.get(flow.phase, 0.0), _slowed(flow, seconds, c)
            hidden_s = min(seconds, window_s / (1 - slow))
            windows[flow.phase] = window_s - (1 - slow) * hidden_s
            open_s = seconds - hidden_s
            slowed_s += slow * hidden_s
        if seconds:
            # What the optimiser hands out travels beside the next forward pass.
            phase = "forward" if flow.phase == "optimizer" else flow.phase
            hidden[phase] = hidden.get(phase, 0.0) + (1 - open_s / seconds) * flow.pcie_s
        axis = flow.axis if flow.axis in ("tp", "cp", "ep", "pp", "world") else "data"
        exposed[f"exposed {axis}"] = exposed.get(f"exposed {axis}", 0.0) + open_s
    exposed["contention"] = slowed_s
    return exposed, hidden


def _slowed(flow: Flow, seconds: float, c: Coefficients) -> float:
    """Share of its own time by which a flow slows what hides it."""
    moved = flow.moved_s / c.scaleup / seconds if seconds else 0.0
    return min(c.contention * (1 + moved), MOST_SLOWED)


def _windows(layout: Arrangement, m: int, forward: Seconds, backward: Seconds, again: Seconds):
    """Seconds of computing beside which data ranks communicate, by phase."""
    if not layout.overlap_data:
        return {}
    gathers = m if layout.zero == 3 and layout.reshard != "never" else 1
    reduces = m if layout.reduce_every_micro_batch else 1
    # The first block's weights and the last one's gradients have nothing beside them.
    share = 0.95
    return {
        "forward": share * gathers * forward.total,
        "backward": share * reduces * (backward.total + again.total),
        "optimizer": 0.0 if layout.shards_broadcast else share * forward.total,
    }
