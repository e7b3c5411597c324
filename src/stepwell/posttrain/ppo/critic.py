"""The critic: what it is built from, and its loss.

A value belongs to the state that a token was sampled in, so the score at the place whose target is
the token. B rows, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.models.transformer import TokenOutputs
from stepwell.sections.methods import PPO
from stepwell.sections.model import ModelConfig
from stepwell.train import run_checkpoints
from stepwell.train.losses import Loss, LossSums, masked_sum
from stepwell.train.weights import read_model
from stepwell.types import ConfigError

NAME = "critic"
VALUES = "values"  # the denominator's name
RETURNS, OLD_VALUES = "returns", "old_values"  # streams


def critic_run(run: Run) -> Run | None:
    """The run of a separate critic: the policy's, with a score in place of the head, starting from
    `method.critic_init` or the policy's first weights. None where the policy's trunk is shared.

    Its guard leaves out what is about nats of a loss, and skips a bad step where the policy's would
    go back. Raises CheckpointError for a critic_init that is no model.
    """
    method = run.method
    assert isinstance(method, PPO)
    if method.critic == "shared":
        return None
    guard = run.guard.model_copy(
        update={
            "loss_spike": 0.0,
            "action": "skip" if run.guard.action == "rewind" else run.guard.action,
        }
    )
    update: dict[str, Any] = {"name": f"{run.name}-{NAME}", "guard": guard}
    update["model"] = run.model.model_copy(update={"head": "score", "num_labels": 1})
    if method.critic_init is not None:
        update["model"] = _critic_model(run, method.critic_init)
        update["lora"] = run.lora.model_copy(update={"init": None})
    if method.critic_lr is not None:
        update["optim"] = run.optim.model_copy(update={"lr": method.critic_lr})
    # Copies are not validated: the method's rules are about its policy.
    return run.model_copy(update=update)


def _critic_model(run: Run, init: str) -> ModelConfig:
    """The dimensions of the model at `init` (a run's folder, a checkpoint, a Hugging Face folder,
    a .gguf file), with a score."""
    init = str(run_checkpoints.latest(init) or init)
    found = read_model(init, "method.critic_init")
    if found.has_score and found.num_labels != 1:
        raise ConfigError(
            f"method.critic_init={init!r} gives {found.num_labels} scores a token; a value is one"
        )
    longest = run.model.max_seq_len
    return found.model_copy(
        update={"init": init, "head": "score", "num_labels": 1, "max_seq_len": longest}
    )


def value_error(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Half the squared error, element-wise, and where the clip binds.

    With a clip c > 0 the larger of the errors of V and of V held within c of the old value, which
    keeps one update from moving values far (the released PPO; 2005.12729, section 3).
    """
    error = (values - returns).square()
    if not clip:
        return error / 2, torch.zeros_like(error, dtype=torch.bool)
    held = old_values + (values - old_values).clamp(-clip, clip)
    held_error = (held - returns).square()
    return torch.maximum(error, held_error) / 2, held_error > error


def value_count(batch: Batch) -> dict[str, float]:
    """The denominator: trained tokens, each counting the same whatever `aggregate` says."""
    return {VALUES: float((batch.weights_BT != 0).sum().item())}


def value_sums(method: PPO, outputs: TokenOutputs, batch: Batch) -> LossSums:
    """value_coef times the errors. The batch carries `old_values` and `returns`."""
    assert outputs.scores_BTC is not None
    values_BT = outputs.scores_BTC[..., 0]
    mask_BT = (batch.weights_BT != 0).to(values_BT.dtype)
    error_BT, clipped_BT = value_error(
        values_BT, batch.extra[OLD_VALUES], batch.extra[RETURNS], method.value_clip
    )
    total, count = masked_sum(error_BT, mask_BT), mask_BT.sum()
    with torch.no_grad():
        metrics = {
            "value_loss": (total.detach(), count),
            "value_clipped_share": (masked_sum(clipped_BT.to(mask_BT.dtype), mask_BT), count),
            "value": (masked_sum(values_BT.detach(), mask_BT), count),
        }
    return LossSums({VALUES: method.value_coef * total}, metrics)


def value_loss(method: PPO) -> Loss:
    """What a separate critic is trained with."""
    return Loss(
        frozenset({"scores"}),
        value_count,
        lambda outputs, batch: value_sums(method, outputs, batch),
    )
