"""Activation checkpointing: bytes that wait for the backward pass against FLOPs done twice.

One process, a decoder of n small blocks over many tokens, so that activations are most of what is
there. Memory is what torch's allocator hands out above the resting state at the worst moment of a
forward and backward pass; FLOPs are counted operator by operator. Both beside the closed forms
that the planner uses.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from stepwell.config import Run
from stepwell.hardware import device_kind, measure_peak_allocated
from stepwell.models.activations import block_bytes
from stepwell.models.flops import flops_per_token
from stepwell.parallel.remat import dtype_bytes, recomputed
from stepwell.parallel.rules import AxisSizes
from stepwell.plan.dryrun.dryrun import full_rows
from stepwell.plan.memory.ledger import predict_memory
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy

CLAIM = (
    "Groups of about sqrt(n) blocks that keep only their input need memory that grows as sqrt(n), "
    "for one more forward pass: a third more FLOPs. Selective recomputation lies between that and "
    "keeping everything, and does no product twice."
)
MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "selective": {"mode": "selective"},
    "every 2": {"mode": "every", "every": 2},
    "full": {"mode": "full"},
    "sqrt": {"mode": "sqrt"},
}


def measure(small: bool = False) -> dict[str, Any]:
    """`modes[mode][n]`: measured and predicted peak_bytes, and extra_flops as a fraction of forward
    and backward without recomputation."""
    blocks = (4, 16) if small else (4, 9, 16, 25, 36)
    modes: dict[str, dict[str, Any]] = {mode: {} for mode in MODES}
    for n in blocks:
        plain = 0
        for mode in MODES:
            row = _one(mode, n)
            plain = row["flops"] if mode == "none" else plain
            row["extra_flops"] = row["flops"] / plain - 1
            modes[mode][str(n)] = row
    a, w = dtype_bytes(_run("none", 1).precision)
    block = block_bytes(_run("none", 1).model, 1, a, w)
    return {"blocks": blocks, "block_over_input": block.all / block.input, "modes": modes}


def check(numbers: dict[str, Any]) -> list[str]:
    modes, few, many = numbers["modes"], str(min(numbers["blocks"])), str(max(numbers["blocks"]))
    at = {mode: rows[many] for mode, rows in modes.items()}
    growth = {m: rows[many]["peak_bytes"] / rows[few]["peak_bytes"] for m, rows in modes.items()}
    wanted = (int(many) / int(few)) ** 0.5
    wrong = []
    if abs(growth["sqrt"] / wanted - 1) > 0.15:
        wrong.append(f"sqrt grows {growth['sqrt']:.2f} times, not sqrt(n)'s {wanted:.2f}")
    if abs(growth["none"] / wanted**2 - 1) > 0.15:
        wrong.append(f"none grows {growth['none']:.2f} times, not n's {wanted**2:.2f}")
    if not 0.28 < at["sqrt"]["extra_flops"] < 1 / 3:
        wrong.append(f"sqrt costs {at['sqrt']['extra_flops']:.1%} more FLOPs, not about a third")
    if not 0 < at["full"]["extra_flops"] < at["sqrt"]["extra_flops"]:
        wrong.append(f"full costs {at['full']['extra_flops']:.1%} more FLOPs, not less than sqrt")
    if at["selective"]["extra_flops"] != 0:
        wrong.append(f"selective does {at['selective']['extra_flops']:.1%} of the products twice")
    sizes = {mode: row["peak_bytes"] for mode, row in at.items()}
    if not sizes["full"] < sizes["selective"] < sizes["none"]:
        wrong.append(f"selective is not between full and none: {sizes}")
    for mode, rows in modes.items():
        for n, row in rows.items():
            found = f"{mode}, {n} blocks: "
            if row["flops"] != row["predicted_flops"]:
                wrong.append(f"{found}{row['flops']} FLOPs, not {row['predicted_flops']}")
            if abs(row["peak_bytes"] / row["predicted_bytes"] - 1) > 0.1:
                wrong.append(f"{found}{row['peak_bytes']} bytes, not {row['predicted_bytes']}")
    return wrong


def plot(numbers: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    blocks = numbers["blocks"]
    for color, (mode, rows) in enumerate(numbers["modes"].items()):
        measured = [rows[str(n)]["peak_bytes"] / 2**20 for n in blocks]
        predicted = [rows[str(n)]["predicted_bytes"] / 2**20 for n in blocks]
        left.plot(blocks, measured, "o", color=f"C{color}", label=mode)
        left.plot(blocks, predicted, "-", color=f"C{color}", linewidth=1)
    left.set_xlabel("blocks")
    left.set_ylabel("MiB at the worst moment (line: the plan)")
    left.set_ylim(bottom=0)
    left.legend(fontsize="small")
    extra = [rows[str(blocks[-1])]["extra_flops"] * 100 for rows in numbers["modes"].values()]
    right.bar(list(numbers["modes"]), extra, color=[f"C{i}" for i in range(len(extra))])
    right.axhline(100 / 3, color="gray", linestyle=":", label="one more forward pass")
    right.set_ylabel(f"% more FLOPs ({blocks[-1]} blocks)")
    right.set_ylim(0, 40)
    right.legend(fontsize="small")
    return figure


# --- one measurement -------------------------------------------------------------------------


def _one(mode: str, num_blocks: int) -> dict[str, Any]:
    run = _run(mode, num_blocks)
    batch = full_rows(run, run.train.global_batch_rows)
    engine, loss = Engine(run), cross_entropy(run.loss)
    with FlopCounterMode(display=False) as counter:
        engine.forward_backward(batch, loss)  # the gradients are there afterwards
    peak_bytes = measure_peak_allocated(lambda: engine.forward_backward(batch, loss))
    blocks, attention = recomputed(run, AxisSizes())
    per_token = flops_per_token(run.model, run.data.seq_len)
    again = per_token.recomputed(blocks=blocks, attention=attention)
    return {
        "peak_bytes": peak_bytes,
        "predicted_bytes": _predicted_bytes(run),
        "flops": counter.get_total_flops(),
        "predicted_flops": round(batch.tokens_BT.numel() * (per_token.training + again)),
    }


def _predicted_bytes(run: Run) -> int:
    """Of a step's second micro-batch, above weights, moments and gradients."""
    rows = {"global_batch_rows": 2 * run.train.global_batch_rows}
    twice = run.model_copy(update={"train": run.train.model_copy(update=rows)})
    ledger = predict_memory(twice, device=device_kind())
    return ledger.peak_bytes - ledger.resting_bytes - ledger.gradient_bytes


def _run(mode: str, num_blocks: int) -> Run:
    return Run.parse(
        {
            "model": {
                "num_layers": num_blocks,
                "d_model": 64,
                "num_heads": 2,
                "num_kv_heads": 2,
                "head_dim": 32,
                "d_ff": 192,
                "vocab_size": 64,
            },
            "remat": MODES[mode],
            "precision": {"compute": "fp32"},
            "data": {"seq_len": 64},
            "train": {"global_batch_rows": 8, "micro_batch_rows": 8},
        }
    )
