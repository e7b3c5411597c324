"""Packed attention against a plain masked softmax in float64."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stepwell.models.attention import _masked, attend, packed_attention


def naive(q, k, v, lengths, window):
    """Every document on its own, every head on its own."""
    groups = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for start, stop in itertools.pairwise(itertools.accumulate([0, *lengths])):
        for head in range(q.shape[1]):
            key, value = k[start:stop, head // groups], v[start:stop, head // groups]
            scores = q[start:stop, head] @ key.T / q.shape[-1] ** 0.5
            gap = torch.arange(stop - start)[:, None] - torch.arange(stop - start)[None, :]
            hidden = (gap < 0) | (
                gap >= window if window else torch.zeros_like(gap, dtype=torch.bool)
            )
            out[start:stop, head] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
    return out


def tensors(num_tokens, heads, kv_heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    make = lambda h: torch.randn(num_tokens, h, 16, generator=generator, dtype=dtype)
    return [x.requires_grad_() for x in (make(heads), make(kv_heads), make(kv_heads))]


@pytest.mark.parametrize("lengths", [[9], [4, 4, 4], [1, 7, 7, 2, 1, 0, 5]])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("path", ["packed", "masked"])
def test_equals_naive_attention_with_gradients(lengths, window, heads, kv_heads, path):
    q, k, v = tensors(sum(lengths), heads, kv_heads)
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    attention = attend if path == "packed" else _masked
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    got = attention(q, k, v, borders, window)
    grads = torch.autograd.grad((got * weights).sum(), (q, k, v))
    wanted = naive(q, k, v, lengths, window)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    for a, b in zip(grads, torch.autograd.grad((wanted * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_documents_do_not_see_each_other():
    q, k, v = tensors(10, 2, 2)
    borders = torch.tensor([0, 6, 10], dtype=torch.int32)
    before = attend(q, k, v, borders, None)
    k2 = k.detach().clone()
    k2[:6] = torch.nan
    after = attend(q, k2, v, borders, None)
    assert torch.equal(before[6:], after[6:])
    assert not torch.isclose(before[:6], after[:6]).any()


def test_operator_is_registered_soundly():
    q, k, v = tensors(7, 2, 1, torch.float32)
    borders = torch.tensor([0, 3, 7], dtype=torch.int32)
    torch.library.opcheck(packed_attention, (q, k, v, borders, 0))


def test_flops_are_counted():
    q, k, v = tensors(12, 4, 2, torch.float32)
    borders = torch.tensor([0, 4, 12], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v, borders, None).sum().backward()
    assert counter.get_total_flops() == (4 + 8) * 4 * 16 * (16 + 64) // 2
