"""How far the gradients of one step are from those of the same step in another arithmetic."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from stepwell.models.axes import AXES
from stepwell.parallel.mesh import Mesh
from stepwell.train.optim import local_and_groups

DIFFERENCE, COSINE = "precision/shadow_difference", "precision/shadow_cosine"


def kind_of(name: str) -> str:
    """The group of a parameter: its name without block number and suffix, e.g. "attn.wq"."""
    name = name.rsplit(".", 1)[0]
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


@torch.no_grad()
def compare(
    found: Mapping[str, Tensor | None],
    wanted: Mapping[str, Tensor | None],
    mesh: Mesh,
    among: Collection[str],
) -> dict[str, float]:
    """|found - wanted| / |wanted| and the cosine over the gradients of `among` together, and the
    first of each group of layers (`precision/shadow_difference.attn.wq`); the same on every rank.

    among: the weights in question. The others' gradients, of the embedding and the head above all,
    are often so much larger that the loss of all these would not be seen. Parameters without a
    gradient are left out. NaN where something is not finite, 0 / 0 is 0.
    """
    kinds = sorted({kind_of(pattern) for pattern in AXES})
    # The last row is that of `among`.
    squares_K3 = torch.zeros(len(kinds) + 1, 3, dtype=torch.float64)
    by_groups: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    for name, got in found.items():
        want = wanted[name]
        if got is None or want is None:
            continue
        got, groups = local_and_groups(got)
        want, _ = local_and_groups(want)
        row_K3 = by_groups.setdefault(groups, torch.zeros_like(squares_K3))
        squares_3 = _squares(got, want)
        row_K3[kinds.index(kind_of(name))] += squares_3
        if name in among:
            row_K3[-1] += squares_3
    for groups, part_K3 in by_groups.items():
        squares_K3 += _all_reduced(part_K3, groups, mesh)
    if mesh.pp_group is not None:
        squares_K3 = _all_reduced(squares_K3, (mesh.pp_group,), mesh)
    numbers = {DIFFERENCE: _difference(squares_K3[-1]), COSINE: _cosine(squares_K3[-1])}
    for kind, row_3 in zip(kinds, squares_K3[:-1], strict=True):
        if row_3[1:].any():
            numbers[f"{DIFFERENCE}.{kind}"] = _difference(row_3)
    return numbers


def worst(numbers: Mapping[str, float]) -> str:
    """The group of layers that differs most, a NaN most of all."""
    start = f"{DIFFERENCE}."
    groups = {k.removeprefix(start): v for k, v in numbers.items() if k.startswith(start)}
    return max(groups, key=lambda kind: math.inf if math.isnan(groups[kind]) else groups[kind])


def _squares(got: Tensor, want: Tensor) -> Tensor:
    """Of the difference, of wanted and of found."""
    parts = [got - want, want, got]
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) ** 2 for x in parts]).cpu()


def _all_reduced(part_K3: Tensor, groups: tuple[dist.ProcessGroup, ...], mesh: Mesh) -> Tensor:
    total = part_K3.to(mesh.device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.cpu()


def _difference(squares_3: Tensor) -> float:
    difference, wanted, _ = squares_3.tolist()
    if difference == 0.0:
        return 0.0
    return math.sqrt(difference / wanted) if wanted > 0 else math.nan


def _cosine(squares_3: Tensor) -> float:
    difference, wanted, found = squares_3.tolist()
    size = math.sqrt(wanted * found)
    return (wanted + found - difference) / (2 * size) if size > 0 else math.nan
