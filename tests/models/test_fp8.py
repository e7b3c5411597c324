"""Rounding against the formats' definition, the layer against plain quantised arithmetic."""

import math

import pytest
import torch
from torch.nn import functional as F

from stepwell.models.fp8 import (
    E4M3,
    E5M2,
    Fp8,
    G,
    W,
    X,
    fp8_linear,
    quantise,
    scale_for,
    scaled_product,
)

# dtype: (exponent bits, mantissa bits, bias, largest value)
DEFINITION = {E4M3: (4, 3, 7, 448.0), E5M2: (5, 2, 15, 57344.0)}
RECIPES = [("tensorwise", False), ("tensorwise", True), ("rowwise", False), ("rowwise", True),
           ("delayed", False), ("delayed", True)]  # fmt: skip


def value_of(code: int, dtype: torch.dtype) -> float:
    """What an 8-bit code means, from tables 1 of 2209.05433."""
    exponent_bits, mantissa_bits, bias, _ = DEFINITION[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & (2**mantissa_bits - 1)
    if exponent == 2**exponent_bits - 1:
        if dtype == E4M3 and mantissa == 7:
            return math.nan
        if dtype == E5M2:
            return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def finite_values(dtype: torch.dtype) -> list[float]:
    """The non-negative finite ones by code, which is also by size."""
    values = [value_of(code, dtype) for code in range(128)]
    return [v for v in values if math.isfinite(v)]


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float64 reference: the nearest code, of two equally near the even one, saturating."""
    table = torch.tensor(finite_values(dtype), dtype=torch.float64)
    size = x.double().abs().clamp(max=table[-1].item())
    above = torch.searchsorted(table, size).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    gap = (table[above] - size) - (size - table[below])
    up = (gap < 0) | ((gap == 0) & (above % 2 == 0))
    return torch.where(up, table[above], table[below]) * x.double().sign()


def in_8_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return quantise(x, dtype, torch.ones(())).values.double()


@pytest.mark.parametrize("dtype", DEFINITION)
def test_all_256_codes_mean_what_the_format_says(dtype):
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).double()
    wanted = torch.tensor([value_of(code, dtype) for code in range(256)], dtype=torch.float64)
    assert torch.equal(codes.isnan(), wanted.isnan())
    assert torch.equal(codes.nan_to_num(), wanted.nan_to_num())
    assert finite_values(dtype)[-1] == DEFINITION[dtype][3] == torch.finfo(dtype).max
    kept = wanted[wanted.isfinite()]
    assert torch.equal(in_8_bits(kept, dtype), kept)


@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", DEFINITION)
def test_rounding_is_to_nearest_ties_to_even(dtype, source):
    table = torch.tensor(finite_values(dtype), dtype=source)
    middles = (table[1:] + table[:-1]) / 2
    got = in_8_bits(middles, dtype)
    even = torch.arange(len(middles)) % 2 == 0  # the lower neighbour's code is even
    assert torch.equal(got, torch.where(even, table[:-1], table[1:]).double())
    just_below, just_above = (middles * (1 + sign * 1e-6) for sign in (-1, 1))
    assert torch.equal(in_8_bits(just_below, dtype), table[:-1].double())
    assert torch.equal(in_8_bits(just_above, dtype), table[1:].double())
    assert torch.equal(in_8_bits(-just_above, dtype), -table[1:].double())
    spread = torch.randn(4096, dtype=source) * torch.logspace(-8, 6, 4096, dtype=source)
    assert torch.equal(in_8_bits(spread, dtype), rounded(spread, dtype))


@pytest.mark.parametrize("dtype", DEFINITION)
def test_too_large_saturates_and_nan_stays(dtype):
    limit = DEFINITION[dtype][3]
    x = torch.tensor([limit * 1.01, limit * 1e6, -limit * 3, math.nan])
    got = in_8_bits(x, dtype)
    assert got[:3].tolist() == [limit, limit, -limit]
    assert got[3].isnan()


@pytest.mark.parametrize("dtype", DEFINITION)
def test_scale_is_the_largest_power_of_two_that_fits(dtype):
    limit = DEFINITION[dtype][3]
    amax = torch.cat([torch.logspace(-30, 30, 500), torch.tensor([limit, limit / 2, limit * 2])])
    scale = scale_for(amax, dtype)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    assert (amax.double() * scale <= limit).all()
    assert (amax.double() * scale * 2 > limit).all()
    assert scale_for(torch.tensor(limit), dtype) == 1
    edges = scale_for(torch.tensor([0.0, 1e-45, math.inf, math.nan]), dtype)
    assert edges[:2].tolist() == [2.0**126] * 2
    assert edges[2:].isnan().all()


def test_zeros_stay_zeros():
    x8 = quantise(torch.zeros(3, 4), E4M3, scale_for(torch.zeros(()), E4M3))
    assert not x8.dequantised(torch.bfloat16).any()


def operands(num_tokens=24, dtype=torch.bfloat16):
    """x (tokens, 32) with one large row, w (48, 32) with one large column, g (tokens, 48) small."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 32, generator=generator)
    w = torch.randn(48, 32, generator=generator)
    g = torch.randn(num_tokens, 48, generator=generator) * 1e-7
    x[3] *= 300
    w[:, 5] *= 100
    w = w.bfloat16().float()  # float64 products must see the weight that bfloat16 ones see
    return x.to(dtype).requires_grad_(), w.requires_grad_(), g.to(dtype)


def fp8_of(recipe, high_precision=False, scales=(0.0, 0.0, 0.0)):
    if recipe != "delayed":
        return Fp8(recipe, high_precision)
    return Fp8(recipe, high_precision, torch.tensor(scales), torch.zeros(3))


def run_layer(x, w, g, fp8, kernel=None):
    y = fp8_linear(x, w, fp8, kernel)
    return y, *torch.autograd.grad(y, (x, w), g)


def reference(x, w, g, fp8):
    """The same three products in float64, every operand rounded by the table, no fp8 dtype used."""
    x, w, g = (t.detach().to(torch.bfloat16).double() for t in (x, w, g))

    def q(t, role, dim):
        dtype = E5M2 if role == G else E4M3
        limit = DEFINITION[dtype][3]
        amax = t.abs().amax(dim, keepdim=True) if fp8.recipe == "rowwise" else t.abs().max()
        scale = 2.0 ** torch.floor(torch.log2(limit / amax))
        if fp8.scales is not None and fp8.scales[role] > 0:
            scale = fp8.scales[role].double()
        return rounded(t * scale, dtype) / scale

    y = q(x, X, 1) @ q(w, W, 1).T
    grad_x = q(g, G, 1) @ q(w, W, 0)
    grad_w = g.T @ x if fp8.wgrad_high_precision else q(g, G, 0).T @ q(x, X, 0)
    return y, grad_x, grad_w


@pytest.mark.parametrize(("recipe", "high_precision"), RECIPES)
def test_layer_equals_plain_quantised_arithmetic(recipe, high_precision):
    x, w, g = operands()
    for scales in [(0.0, 0.0, 0.0), *([(2.0, 0.5, 2.0**30)] if recipe == "delayed" else [])]:
        fp8 = fp8_of(recipe, high_precision, scales)
        wanted = reference(x, w, g, fp8)
        got = run_layer(x, w, g, fp8)
        assert [t.dtype for t in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
        exact = run_layer(x.detach().double().requires_grad_(), w, g.double(), fp8)
        for rounded_once, in_float64, want in zip(got, exact, wanted, strict=True):
            assert relative(rounded_once, want) < 3e-3
            # grad_w is float32, as w is.
            assert relative(in_float64, want) < 1e-7


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize(("recipe", "high_precision"), RECIPES)
@pytest.mark.parametrize("num_tokens", [32, 19])  # 19: the sum over tokens is padded
def test_emulation_equals_torchs_scaled_product(recipe, high_precision, num_tokens):
    x, w, g = operands(num_tokens)
    ours, kernel = (
        run_layer(x, w, g, fp8_of(recipe, high_precision), kernel=k) for k in (False, True)
    )
    for a, b in zip(ours, kernel, strict=True):
        # Both add exact products in float32; only the order of the sum may differ.
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3 * a.abs().max().item())
        assert (a == b).float().mean() > 0.95


@pytest.mark.gpu
@pytest.mark.parametrize(("recipe", "high_precision"), RECIPES)
@pytest.mark.parametrize("num_tokens", [32, 19])
def test_kernel_on_a_card_equals_the_emulation(recipe, high_precision, num_tokens):
    x, w, g = operands(num_tokens)
    ours = run_layer(x, w, g, fp8_of(recipe, high_precision), kernel=False)
    x, w = (t.detach().cuda().requires_grad_() for t in (x, w))
    fp8 = fp8_of(recipe, high_precision)
    if fp8.scales is not None and fp8.seen is not None:
        fp8 = Fp8(recipe, high_precision, fp8.scales.cuda(), fp8.seen.cuda())
    for a, b in zip(ours, run_layer(x, w, g.cuda(), fp8), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=2**-6, atol=2e-3 * a.abs().max().item())


def test_error_of_a_product_is_what_three_mantissa_bits_give():
    x, w = torch.randn(64, 128), torch.randn(96, 128)
    y = F.linear(x, w)
    error = ((fp8_linear(x, w, Fp8("tensorwise")) - y).norm() / y.norm()).item()
    assert 0.02 < error < 0.05


def test_rowwise_scales_save_rows_beside_a_large_one():
    """Where a row is 2^20 times the others, one scale a tensor flushes them to zero."""
    x, w = torch.randn(16, 32), torch.randn(16, 32)
    x[0] *= 2.0**20
    y = F.linear(x, w)[1:]
    errors = {
        recipe: ((fp8_linear(x, w, Fp8(recipe))[1:] - y).norm() / y.norm()).item()
        for recipe in ("tensorwise", "rowwise")
    }
    assert errors["rowwise"] < 0.06
    assert errors["tensorwise"] > 0.5


def test_delayed_records_maxima_once_a_step_and_only_in_training():
    x, w, g = operands()
    fp8 = fp8_of("delayed")
    assert fp8.seen is not None
    with torch.no_grad():
        fp8_linear(x, w, fp8)
    assert not fp8.seen.any()
    run_layer(x, w, g, fp8)
    wanted = [t.detach().bfloat16().abs().max().float() for t in (x, w, g)]
    assert torch.equal(fp8.seen, torch.stack(wanted))
    for _ in range(2):  # recomputation, and a smaller micro-batch
        run_layer(x.detach().div(2).requires_grad_(), w, g / 2, fp8)
    assert torch.equal(fp8.seen, torch.stack(wanted))
    assert fp8.scales is not None
    assert not fp8.scales.any()


def test_delayed_scales_are_used_and_saturate():
    x, w, g = operands()
    stale = run_layer(x, w, g, fp8_of("delayed", scales=(448.0, 0.0, 0.0)))
    fresh = run_layer(x, w, g, fp8_of("delayed"))
    x_clamped = x.detach().clamp(-1, 1)  # 448 / 448
    wanted = F.linear(x_clamped.float(), w)
    assert ((stale[0] - wanted).norm() / wanted.norm()).item() < 0.06
    assert ((fresh[0] - wanted).norm() / wanted.norm()).item() > 1
    assert torch.equal(stale[1], fresh[1])


@pytest.mark.parametrize(("recipe", "high_precision"), RECIPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(recipe, high_precision, bad):
    """A stale scale would turn an infinity into 448, and the guard would see nothing."""
    x, w, g = operands()
    fp8 = fp8_of(recipe, high_precision, (1.0, 1.0, 1.0))
    with torch.no_grad():
        x[2, 7] = bad
    assert not run_layer(x, w, g, fp8)[0][2].isfinite().any()
    x, w, g = operands()
    g[2, 7] = bad
    _, grad_x, grad_w = run_layer(x, w, g, fp8)
    assert not grad_x[2].isfinite().any()
    assert not grad_w[7].isfinite().any()


def test_high_precision_weight_gradient_is_the_plain_product():
    x, w, g = operands()
    grad_w = run_layer(x, w, g, Fp8("tensorwise", True))[2]
    assert torch.equal(grad_w, (g.t() @ x).float())
    assert not torch.equal(grad_w, run_layer(x, w, g, Fp8("tensorwise"))[2])


def test_saves_activations_in_8_bits_and_the_weight_as_it_is():
    x, w, _ = operands()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fp8_linear(x, w, Fp8("tensorwise"))
        tensorwise = [t.dtype for t in saved if t.shape == x.shape]
        saved.clear()
        fp8_linear(x, w, Fp8("tensorwise", True))
        high = [t.dtype for t in saved if t.shape == x.shape]
    assert tensorwise == [E4M3]
    assert high == [torch.bfloat16]
    assert any(t is w or t.data_ptr() == w.data_ptr() for t in saved)


def test_shapes_empty_input_and_frozen_weight():
    x, w, g = operands()
    x3 = x.detach().reshape(2, 12, 32).requires_grad_()
    y = fp8_linear(x3, w.detach(), Fp8("rowwise"))
    assert y.shape == (2, 12, 48)
    y.backward(g.reshape(2, 12, 48))
    assert x3.grad is not None
    empty = torch.zeros(0, 32, requires_grad=True)
    fp8_linear(empty, w, Fp8("tensorwise")).sum().backward()
    assert w.grad is not None
    assert not w.grad.any()


def test_scaled_product_keeps_float64():
    a = quantise(torch.randn(8, 16).double(), E4M3, torch.tensor(16.0))
    product = scaled_product(a, a.t(), torch.float64, kernel=False)
    values = a.values.double() / 16
    assert torch.equal(product, values @ values.t())
