"""The gradient oracle: what one optimiser step does under a layout, next to one process.

A layout's result is every parameter's gradient, the norm before clipping, and all weights and
optimiser state after the step, as full tensors. Gradients are compared, never the loss alone:
Adam hides constant factors. Later layouts join `CASES` in tests/train/test_engine.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.loader import rank_rows
from stepwell.data.packing import pack_rows
from stepwell.parallel.mesh import init_distributed
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from stepwell.train.optim import grad_norm

VOCAB, LENGTH = 61, 16
# Where a rank's part of a tensor begins along each dim, and the part.
Piece = tuple[tuple[int, ...], np.ndarray]


@dataclass(frozen=True)
class Case:
    """One layout: ranks, rows a micro-batch, and dotted overrides of the base run."""

    name: str
    num_ranks: int = 1
    micro_batch_rows: int = 1
    overrides: dict[str, Any] = field(default_factory=dict)


def base_run(**overrides: Any) -> Run:
    """A small model of odd sizes (nothing divides evenly), float64, AdamW."""
    values = {
        "model.vocab_size": VOCAB,
        "model.num_layers": 2,
        "model.d_model": 20,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.head_dim": 6,
        "model.d_ff": 27,
        "model.init_std": 0.3,
        "precision.compute": "fp64",
        "precision.param": "fp64",
        "precision.reduce": "fp64",
        "data.seq_len": LENGTH,
        "train.steps": 10,
        "train.global_batch_rows": 7,
        "train.seed": 3,
        "optim.schedule.kind": "constant",
        "loss.z_loss": 1e-3,
        "loss.chunk_tokens": 5,
        "checkpoint.asynchronous": False,
    }
    values |= overrides
    if values.get("method.kind", "pretrain") not in ("pretrain", "sft"):
        for key in ("train.global_batch_rows", "loss.z_loss", "loss.label_smoothing"):
            values.pop(key, None)  # other methods refuse them
    return Run.parse({}, values)


def documents() -> list[tuple[list[int], list[int]]]:
    """Documents whose rows hold very different numbers of trained tokens; one row has none."""
    generator = torch.Generator().manual_seed(0)
    docs = []
    for length, trained in ((17, 16), (17, 1), (17, 0), (9, 8), (8, 2), (12, 7), (4, 3), (17, 9),
                            (6, 1)):  # fmt: skip
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        docs.append((ids, [0] * (length - trained) + [1] * trained))
    return docs


def global_batch() -> Batch:
    rows = [[0], [1], [2], [3, 4], [5, 6], [7], [8]]
    return pack_rows(documents(), LENGTH, rows=rows)


def one_step(run: Run) -> dict[str, torch.Tensor]:
    """Runs in each rank: one step on this rank's rows; full tensors under global names."""
    mesh = init_distributed(run.layout)
    batch = global_batch()
    share = rank_rows(batch.num_rows, mesh.data_rank, mesh.data_world)
    return take_step(Engine(run, mesh=mesh), batch.rows(share.start, share.stop))


def take_step(engine: Engine, batch: Batch) -> dict[str, torch.Tensor]:
    """What a step on this rank's rows finds and leaves."""
    stats = engine.forward_backward(batch, cross_entropy(engine.run.loss))
    found = {"loss": torch.tensor(stats.loss, dtype=torch.float64)}
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in engine.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, f"{name}: {parameter.grad}"
        if parameter.grad is not None:
            gradients[f"grad/{name}"] = parameter.grad
    found |= all_full(gradients)
    parameters = [parameter for _, parameter in engine.named_parameters()]
    found["norm"] = torch.tensor(grad_norm(parameters, engine.mesh.pp_group), dtype=torch.float64)
    info = engine.optim_step()
    assert not info.skipped
    assert info.grad_norm == found["norm"].item()
    apart = engine.iter_state(merged=False)
    found |= {f"weight/{name}": value for name, value in apart}
    return found | all_full({f"state/{k}": v for k, v in engine.optimizer.state_dict().items()})


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def all_full(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`full` of each, by one collective of all ranks instead of several a tensor: every rank's
    pieces are laid into place, its own last."""
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return {name: full(tensor) for name, tensor in tensors.items()}
    mine = {name: _piece(tensor) for name, tensor in tensors.items()}
    shares: list[dict[str, Piece]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, mine)
    found = {
        name: torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
        for name, tensor in tensors.items()
    }
    for share in (*shares, mine):
        for name, (starts, values) in share.items():
            if name in found:
                place = tuple(slice(a, a + n) for a, n in zip(starts, values.shape, strict=True))
                found[name][place] = torch.from_numpy(values)
    return found


def _piece(tensor: torch.Tensor) -> Piece:
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor.detach().numpy()
    assert not any(place.is_partial() for place in tensor.placements), tensor.placements
    _, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(starts), tensor.to_local().detach().numpy()


def assert_same(
    got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float, case: str = ""
) -> None:
    """Every tensor within `tolerance` of the largest entry of the wanted one; `case` is named where
    one is not."""
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        scale = max(want.abs().max().item(), 1e-3)
        difference = (got[name].double() - want.double()).abs().max().item()
        assert difference <= tolerance * scale, (
            f"{case}: {name} off by {difference:.3g} of {scale:.3g}"
        )
