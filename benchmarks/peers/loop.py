"""The plain training loop around a peer's model: autocast, clip, fused AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks import workload as w
from benchmarks.protocol import Clock, Finished


def build_adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=w.LR,
        betas=(w.BETA1, w.BETA2),
        eps=w.EPS,
        weight_decay=w.WEIGHT_DECAY,
        fused=True,
    )


def train(
    clock: Clock, model: nn.Module, dtype: str, loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """loss_fn(tokens_BT, targets_BT) runs the (perhaps compiled) model."""
    optimizer = build_adamw(model)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16")
    rows = w.token_rows()
    try:
        while True:
            clock.begin()
            window = next(rows)
            tokens_BT, targets_BT = window[:, :-1].contiguous(), window[:, 1:].contiguous()
            with autocast:
                loss = loss_fn(tokens_BT, targets_BT)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), w.CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            clock.end(loss=loss.item(), tokens=tokens_BT.numel())
    except Finished:
        pass
