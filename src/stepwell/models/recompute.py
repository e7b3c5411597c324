"""Activation checkpointing: what a part of the forward pass keeps, and computing the rest again.

Non-reentrant (torch.utils.checkpoint): the part runs a second time when the backward pass first
asks for something that it saved, and stops as soon as all of that is there, so the last product of
a part is never computed twice. Nothing in a block is drawn in order (the dropout of adapters is a
function of keys), so the state of random generators is not kept. Which blocks do what is decided in
`parallel/remat.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from stepwell.models.activations import Keep

# What `products` keeps: matrix products, attention (its log-sum-exp too), what came from other
# ranks, and choices, which a recomputation could make differently. Names, because not every build
# has all.
KEPT_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "stepwell::packed_attention",
    "stepwell::ring_attention",
    "torch_attn::_varlen_attn",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
    "aten::topk",
    "aten::sort",
    "aten::argsort",
    "aten::argmax",
    "aten::max.dim",
)


def checkpointed(part: Callable[..., Tensor], keep: Keep, x_ND: Tensor, *args: Any) -> Tensor:
    """part(x_ND, *args), of which the backward pass finds only what `keep` says. Without gradients,
    it is just that."""
    if keep == "all" or not torch.is_grad_enabled():
        return part(x_ND, *args)
    more: dict[str, Any] = {}
    if keep == "products":
        more["context_fn"] = partial(create_selective_checkpoint_contexts, _kept_operators())
    return checkpoint(part, x_ND, *args, use_reentrant=False, preserve_rng_state=False, **more)


def _kept_operators() -> list[torch._ops.OpOverload]:
    found = (_operator(name) for name in KEPT_OPERATORS)
    return [operator for operator in found if operator is not None]


def _operator(name: str) -> torch._ops.OpOverload | None:
    """None where this build of torch does not have it."""
    namespace, rest = name.split("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return None if found is None else getattr(found, overload or "default", None)
