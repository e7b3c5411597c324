"""Losses against naive references, and the laws of sums and masks."""

import math

import pytest
import torch

from stepwell.data.batch import padding
from stepwell.models.transformer import TokenOutputs
from stepwell.sections.optim import LossConfig
from stepwell.train.losses import cross_entropy, masked_sum, select, token_count

B, T, V = 2, 5, 13


def outputs(logits):
    targets = torch.zeros(B, T, dtype=torch.int64)
    lse = logits.logsumexp(-1)
    return TokenOutputs(
        logprobs_BT=logits.gather(-1, targets[..., None])[..., 0] - lse,
        lse_BT=lse,
        mean_logit_BT=logits.mean(-1),
    )


def batch(weights):
    empty = padding(B, T)
    return type(empty)(**{**vars(empty), "weights_BT": weights})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_equals_naive_reference(smoothing, z_loss):
    logits = torch.randn(B, T, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([[1.0, 0, 2, 1, 0], [0, 0, 0, 0.5, 1]], dtype=torch.float64)
    loss = cross_entropy(LossConfig(label_smoothing=smoothing, z_loss=z_loss))
    got = loss.fn(outputs(logits), batch(weights)).sums["tokens"] / weights.sum()
    wanted = torch.nn.functional.cross_entropy(
        logits.view(-1, V), torch.zeros(B * T, dtype=torch.int64),
        reduction="none", label_smoothing=smoothing,
    ) + z_loss * logits.view(-1, V).logsumexp(-1) ** 2  # fmt: skip
    assert got.item() == pytest.approx(
        ((wanted * weights.view(-1)).sum() / weights.sum()).item(), abs=1e-12
    )


def test_metric_is_the_plain_loss_whatever_is_added():
    logits = torch.zeros(B, T, V)
    loss = cross_entropy(LossConfig(label_smoothing=0.2, z_loss=0.1))
    found = loss.fn(outputs(logits), batch(torch.ones(B, T))).metrics
    total, count = found["loss"]
    assert (total / count).item() == pytest.approx(math.log(V), abs=1e-5)
    total, count = found["z_loss"]
    assert (total / count).item() == pytest.approx(0.1 * math.log(V) ** 2, abs=1e-5)


def test_needs_ask_for_no_more_than_the_loss_reads():
    assert cross_entropy(LossConfig()).needs == {"logprobs"}
    assert cross_entropy(LossConfig(z_loss=1e-4)).needs == {"logprobs", "lse"}


def test_masking_is_selection():
    values = torch.tensor([1.0, torch.nan, torch.inf, 3.0], requires_grad=True)
    total = masked_sum(values, torch.tensor([1.0, 0, 0, 2]))
    assert total.item() == 7.0
    (grad,) = torch.autograd.grad(total, values)
    assert grad.tolist() == [1.0, 0.0, 0.0, 2.0]
    assert select(values, torch.zeros(4)).tolist() == [0, 0, 0, 0]


def test_two_rows_one_masked_out():
    """Two 10-token rows with loss 1 a token, one masked out: 1.0, not 0.5."""
    weights = torch.zeros(B, T)
    weights[0] = 1
    out = TokenOutputs(logprobs_BT=-torch.ones(B, T))
    sums = cross_entropy(LossConfig()).fn(out, batch(weights)).sums
    assert sums["tokens"].item() / token_count(batch(weights))["tokens"] == 1.0
