"""What each ZeRO stage shards: bytes that a rank holds and sends, counted beside the formulas.

ZeRO (1910.02054, figure 1 and section 7) counts, per trained parameter in mixed precision, 2 bytes
of weight, 2 of gradient and 12 of float32 master and two moments. Here a step of two micro-batches
is stopped between the second forward and backward pass, where weights as used and gradients of the
first micro-batch are both there, and every tensor is counted. n ranks, P parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from matplotlib.figure import Figure

from stepwell.config import Run
from stepwell.data.batch import Batch, padding
from stepwell.parallel.init import local_part
from stepwell.parallel.mesh import init_distributed
from stepwell.parallel.traffic import Collective, count_collectives
from stepwell.plan.memory.ledger import zero_bytes_per_parameter, zero_volume_in_parameters
from stepwell.ranks import run_ranks
from stepwell.train.engine import Engine
from stepwell.train.losses import Loss, cross_entropy

CLAIM = (
    "Per trained parameter, ZeRO stages 0 to 3 hold 16, 4 + 12/n, 2 + 14/n and 16/n bytes on each "
    "of n ranks, and send 2, 2, 2 and 3 times the parameters for a micro-batch. (Stage 2 keeps its "
    "gradient shards in float32 here: 2 + 16/n.)"
)
STAGES = (0, 1, 2, 3)
NUM_MICRO_BATCHES = 2
PARTS = ("master and moments", "weights as used", "whole gradients", "gradient shards")


def measure(small: bool = False) -> dict[str, Any]:
    """`ranks[n][stage]`: bytes a parameter by part, `wire` in parameters sent a rank and step."""
    sizes = (1, 2) if small else (1, 2, 4)
    ranks = {
        str(n): {str(s): row for s, row in zip(STAGES, run_ranks(_all_stages, n)[0], strict=True)}
        for n in sizes
    }
    return {"num_micro_batches": NUM_MICRO_BATCHES, "ranks": ranks}


def check(numbers: dict[str, Any]) -> list[str]:
    wrong = []
    for n_text, stages in numbers["ranks"].items():
        n = int(n_text)
        for stage_text, row in stages.items():
            stage = int(stage_text)
            held, wanted = row["bytes_per_parameter"], expected_bytes(stage, n)
            if abs(held - wanted) > 1e-3 * wanted:
                wrong.append(f"stage {stage} on {n} ranks holds {held:.4f} bytes, not {wanted:.4f}")
            sent, wanted = row["wire"], expected_volume(stage, n, numbers["num_micro_batches"])
            if abs(sent - wanted) > 1e-3 * max(wanted, 1):
                wrong.append(f"stage {stage} on {n} ranks sends {sent:.4f} P, not {wanted:.4f} P")
    return wrong


def expected_bytes(stage: int, n: int) -> float:
    """ZeRO's figure; stage 2's gradient shard has 4 bytes instead of 2."""
    return zero_bytes_per_parameter(stage, n) + (2 / n if stage == 2 else 0)


def expected_volume(stage: int, n: int, num_micro_batches: int) -> float:
    """Parameters that a rank sends a step. Each gather, each scatter is (n-1)/n, an all-reduce two.

    Stages 0 and 1 reduce once a step. Stage 2 gathers once and scatters every micro-batch, stage
    3 gathers twice and scatters once every micro-batch.
    """
    m = num_micro_batches
    per_step = {0: 2, 1: 2, 2: 1 + m, 3: zero_volume_in_parameters(3) * m}[stage]
    return per_step * (n - 1) / n


def plot(numbers: dict[str, Any]) -> Figure:
    ranks = numbers["ranks"]
    figure = Figure(figsize=(3.2 * len(ranks), 3.4), layout="constrained")
    axes = figure.subplots(1, len(ranks), sharey=True, squeeze=False)[0]
    for axis, (n, stages) in zip(axes, ranks.items(), strict=True):
        bottom = [0.0] * len(stages)
        for part in PARTS:
            heights = [row["parts"][part] for row in stages.values()]
            axis.bar(list(stages), heights, bottom=bottom, label=part, width=0.6)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        formula = [zero_bytes_per_parameter(int(stage), int(n)) for stage in stages]
        axis.plot(list(stages), formula, "k_", markersize=22, label="ZeRO's formula")
        axis.set_title(f"{n} rank{'s' if n != '1' else ''}")
        axis.set_xlabel("stage")
    axes[0].set_ylabel("bytes a parameter")
    axes[-1].legend(fontsize="small")
    return figure


# --- on each rank ----------------------------------------------------------------------------


def _all_stages() -> list[dict[str, Any]]:
    return [_one_stage(stage) for stage in STAGES]


def _one_stage(stage: int) -> dict[str, Any]:
    run = Run.parse(
        {},
        {
            "layout.zero": stage,
            # At stage 3 everything is in the blocks, whose copies are given back at once.
            "model.num_layers": 4,
            "model.d_model": 128,
            "model.d_ff": 512,
            "model.vocab_size": 16,
            "model.num_heads": 2,
            "model.num_kv_heads": 2,
            "precision.reduce": "bf16",
            "data.seq_len": 8,
            "train.global_batch_rows": 16,
            "train.micro_batch_rows": 1,
        },
    )
    engine = Engine(run, mesh=init_distributed(run.layout))
    masters = dict(engine.named_parameters())
    parts: dict[str, int] = {}
    plain = cross_entropy(run.loss)
    seen: list[int] = []

    def look(outputs: Any, batch: Batch) -> Any:
        seen.append(1)
        if len(seen) == NUM_MICRO_BATCHES:
            parts.update(_held(engine, masters))
        return plain.fn(outputs, batch)

    batch = _batch(NUM_MICRO_BATCHES, run.data.seq_len, run.model.vocab_size)
    engine.forward_backward(batch, plain)
    engine.optim_step()  # so that the optimiser's state is there
    with count_collectives() as found:
        engine.forward_backward(batch, Loss(plain.needs, plain.denominators, look))
    blocks = sum(p.numel() for name, p in engine.named_parameters() if name.startswith("blocks."))
    in_blocks = {part: num_bytes / blocks for part, num_bytes in parts.items()}
    return {
        "bytes_per_parameter": sum(in_blocks.values()),
        "parts": in_blocks,
        "wire": _parameters_sent(found, engine, blocks),
    }


def _batch(num_rows: int, length: int, vocab_size: int) -> Batch:
    tokens_BT = torch.arange(num_rows * length).view(num_rows, length) % vocab_size
    return dataclasses.replace(
        padding(num_rows, length),
        tokens_BT=tokens_BT,
        targets_BT=tokens_BT.roll(-1, 1),
        weights_BT=torch.ones(num_rows, length),
        docs_BT=torch.zeros(num_rows, length, dtype=torch.int32),
    )


def _held(engine: Engine, masters: dict[str, torch.nn.Parameter]) -> dict[str, int]:
    """Bytes of the blocks' tensors on this rank, now. The modules show their weights as used."""
    own = [p for name, p in masters.items() if name.startswith("blocks.")]
    states = engine.optimizer.state_dict()
    moments = [value for key, value in states.items() if key.startswith("blocks.") and value.dim()]
    known = {id(p) for p in masters.values()}
    used = [p for p in engine.decoder.blocks.parameters() if id(p) not in known]
    return {
        "master and moments": _bytes([*own, *moments]),
        "weights as used": _bytes(used),
        "whole gradients": _bytes([p.grad for p in used if p.grad is not None]),
        "gradient shards": _bytes([p.grad for p in own if p.grad is not None]),
    }


def _bytes(tensors: list[Any]) -> int:
    storages = {}
    for tensor in tensors:
        local = local_part(tensor)
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def _parameters_sent(found: list[Collective], engine: Engine, blocks: int) -> float:
    """The blocks' share of what was sent, in parameters: weights and gradients have 2 bytes here.
    The root's parameters and the counts of the step are told apart by their sizes."""
    of_block = blocks // len(engine.decoder.blocks)
    return sum(one.wire_bytes / 2 for one in found if one.num_bytes == 2 * of_block) / blocks
