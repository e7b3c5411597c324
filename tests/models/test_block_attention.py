"""Attention by blocks of queries against plain attention, and the rule that chooses it."""

import math

import pytest
import torch

from stepwell.models import block_attention
from stepwell.models.attention import attend


def plain(q, k, v):
    """(B, T, H, E) in the inputs' dtype."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bthe,bshe->bhts", q, k) / math.sqrt(q.shape[-1])
    T = q.shape[1]
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v)


def tensors(B, T, H, K, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    make = lambda h: torch.randn(B, T, h, 16, generator=generator, dtype=torch.float64) * scale
    return [make(h).to(dtype) for h in (H, K, K, H)]


def by_blocks(q, k, v, grad):
    out = torch.empty_like(q)
    grad_N, q_N, k_N, v_N, out_N = (x.flatten(0, 1) for x in (grad, q, k, v, out))
    docs = [block_attention.Doc(i * q.shape[1], q.shape[1]) for i in range(q.shape[0])]
    block_attention.forward_packed(q_N, k_N, v_N, out_N, docs)
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    block_attention.backward_packed(grad_N, q_N, k_N, v_N, [x.flatten(0, 1) for x in grads], docs)
    return out, *grads


@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("B", [1, 5])
def test_equals_plain_attention_with_gradients(B, T, H, K, monkeypatch):
    monkeypatch.setattr(block_attention, "SCORES_BYTES", 2 * 4 * H * 64 * max(T, 64))
    q, k, v, grad = tensors(B, T, H, K, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = plain(*leaves)
    wanted = (out, *torch.autograd.grad((out * grad).sum(), leaves))
    for a, b in zip(by_blocks(q.detach(), k.detach(), v.detach(), grad), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_bfloat16_errs_no_more_than_the_flash_kernel():
    q, k, v, grad = tensors(2, 192, 4, 2, torch.bfloat16, scale=2.0)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out = plain(*wide)
    wanted = (out, *torch.autograd.grad((out * grad.double()).sum(), wide))

    def error(found):
        return [
            ((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)
        ]

    by_head = [x.transpose(1, 2) for x in (q, k, v, grad)]
    flash, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*by_head[:3], 0.0, True)
    flash_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        by_head[3], *by_head[:3], flash, lse, 0.0, True
    )
    theirs = error([x.transpose(1, 2) for x in (flash, *flash_grads)])
    found = by_blocks(q, k, v, grad)
    for ours, other in zip(error(found), theirs, strict=True):
        assert ours < max(2 * other, 6e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_and_short_documents_mix(dtype):
    """One packed call crosses the rule's border; a document alone gives the same bits."""
    lengths = [300, 300, 5, 140]
    q, k, v, grad = (x[0] for x in tensors(1, sum(lengths), 4, 2, dtype))
    borders = torch.tensor([0, 300, 600, 605, 745], dtype=torch.int32)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, borders, None)
    grads = torch.autograd.grad((out * grad).sum(), (q, k, v))
    for start, stop in ((600, 605), (605, 745)):
        alone = [x[start:stop].detach().clone().requires_grad_() for x in (q, k, v)]
        found = attend(
            alone[0], alone[1], alone[2], torch.tensor([0, stop - start], dtype=torch.int32), None
        )
        assert torch.equal(found, out[start:stop])
        for a, b in zip(
            torch.autograd.grad((found * grad[start:stop]).sum(), alone), grads, strict=True
        ):
            assert torch.equal(a, b[start:stop])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_nobody_asks_for_is_left_out(dtype):
    """From each document's first wanted token on nothing changes, nor any gradient, if nothing
    comes back from the tokens before."""
    lengths, firsts = [300, 310, 20, 290, 256], [0, 100, 20, 256, 256]
    q, k, v, grad = (x[0] for x in tensors(1, sum(lengths), 4, 2, dtype))
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    wanted = torch.cat([torch.arange(n) >= f for n, f in zip(lengths, firsts, strict=True)])
    grad = torch.where(wanted[:, None, None], grad, 0)
    found = []
    for some in (None, torch.tensor(firsts)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(leaves[0], leaves[1], leaves[2], borders, None, some)
        assert out.isfinite().all()
        found.append([out[wanted], *torch.autograd.grad(out, leaves, grad)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 if dtype == torch.float64 else 0)
    # Whole blocks of the last documents but one and two were left out.
    assert out[630 : 630 + 256].eq(0).all()
    assert out[920 : 920 + 256].eq(0).all() == (firsts[-1] == 256)
    assert out[:300].ne(0).all(-1).all()
