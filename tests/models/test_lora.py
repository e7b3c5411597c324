"""Adapted layers against naive arithmetic: values, gradients, merging, dropout."""

import pytest
import torch
from torch.nn import functional as F

from stepwell.models.adapter_dropout import drop, token_keys
from stepwell.models.axes import axes_of
from stepwell.models.counter_bits import column_keys
from stepwell.models.layers import Linear
from stepwell.models.lora import LoraLinear, merged_weight, row_squares, without_adapters
from stepwell.models.lora_shapes import (
    adapter_shapes,
    is_adapter,
    layer_of,
    linear_shapes,
    scaling,
    target_shapes,
)
from stepwell.models.quantize import dequantise_nf4, quantise_nf4
from stepwell.sections.model import LoraConfig, ModelConfig
from stepwell.types import ConfigError
from tests.oracle import base_run

N, D, M, R, S = 7, 10, 6, 3, 1.7
CFG: ModelConfig = base_run().model


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def layer(dora: bool = False, dropout: float = 0.0, bias: bool = True) -> LoraLinear:
    base = Linear(D, M, bias=bias, dtype=torch.float64)
    base.weight.data = random(M, D, seed=1)
    if bias:
        base.bias.data = random(M, seed=7)
    made = LoraLinear(base, R, S, dropout, dora).double()
    made.lora_a.weight.data, made.lora_b.weight.data = random(R, D, seed=2), random(M, R, seed=3)
    if made.lora_magnitude is not None:
        made.lora_magnitude.data = random(M, seed=4).abs() + 0.5
    made.weight.requires_grad_(False)
    made.column_keys = column_keys("blocks.0.attn.wq", D)
    return made


def naive(made: LoraLinear, x: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    """The formulas of the papers, with the weight spelled out."""
    update = S * made.lora_b.weight @ made.lora_a.weight
    bias = 0 if made.bias is None else made.bias
    if made.lora_magnitude is None:
        return x @ made.weight.t() + dropped @ update.t() + bias
    whole = made.weight + update
    gain = made.lora_magnitude / whole.detach().norm(dim=1)
    directed = dropped @ (gain[:, None] * whole).t()
    return x @ made.weight.t() - dropped @ made.weight.t() + directed + bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("dora", [False, True])
def test_values_and_every_gradient_are_the_papers(dora, dropout, bias):
    made = layer(dora, dropout, bias)
    keys = token_keys(torch.arange(N), torch.arange(N), torch.tensor([0, N]), 0, 0)
    grad = random(N, M, seed=6)
    trained = [p for p in made.parameters() if p.requires_grad]
    results = []
    for own in (True, False):
        x = random(N, D, seed=5).requires_grad_()
        if own:
            y = made(x, keys if dropout else None)
        else:
            assert made.column_keys is not None
            dropped = drop(x, keys, made.column_keys, dropout) if dropout else x
            y = naive(made, x, dropped)
        results.append([y, *torch.autograd.grad(y, [x, *trained], grad)])
    for found, wanted in zip(*results, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-12)
    assert len(trained) == 2 + dora + bias


@pytest.mark.parametrize("dora", [False, True])
def test_the_base_in_4_bits_computes_with_its_restored_weight(dora):
    made, plain = layer(dora), layer(dora)
    quantised = quantise_nf4(made.weight)
    plain.weight.data = dequantise_nf4(quantised, torch.float64)
    made.quantised = quantised
    made.weight = None  # pyright: ignore[reportAttributeAccessIssue]
    x, grad = random(N, D, seed=5), random(N, M, seed=6)
    found, wanted = (torch.autograd.grad(m(x), m.lora_a.weight, grad)[0] for m in (made, plain))
    assert torch.allclose(made(x), plain(x), rtol=1e-12)
    assert torch.allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("dora", [False, True])
def test_merged_weights_compute_the_same(dora):
    made = layer(dora)
    x = random(N, D, seed=5)
    a, b = made.lora_a.weight, made.lora_b.weight
    whole = merged_weight(made.weight, a, b, S, made.lora_magnitude)
    assert torch.allclose(F.linear(x, whole, made.bias), made(x), rtol=1e-11, atol=1e-12)


def test_merging_is_in_the_widest_precision():
    narrow = [random(4, 4, seed=s).bfloat16() for s in range(3)]
    wide = [x.double() for x in narrow]
    merged = merged_weight(narrow[0], narrow[1], narrow[2], 1.0)
    assert merged.dtype == torch.float32
    assert torch.allclose(merged.double(), wide[0] + wide[2] @ wide[1], atol=1e-6)


def test_row_squares_are_lengths_of_rows():
    weight, a, b = random(M, D, seed=1), random(R, D, seed=2), random(M, R, seed=3)
    wanted = (weight + S * b @ a).square().sum(1)
    assert torch.allclose(row_squares(weight, a, b, S), wanted, rtol=1e-12)


def test_adapters_off_leave_the_base_and_come_back_after_a_failure():
    made = layer(dora=True)
    x = random(N, D, seed=5)
    before = made(x)
    with without_adapters([torch.nn.Sequential(made)]):
        base = made(x)
    with pytest.raises(RuntimeError), without_adapters([made]):
        made(x[:, :1])
    assert torch.equal(base, F.linear(x, made.weight) + made.bias)
    assert torch.equal(made(x), before)


# --- dropout -------------------------------------------------------------------------------------


def keys_of(documents: list[list[int]], seed: int = 0, step: int = 0) -> list[torch.Tensor]:
    """Of documents packed one after the other."""
    tokens = torch.tensor([t for document in documents for t in document])
    places = torch.cat([torch.arange(len(document)) for document in documents])
    lengths = [len(document) for document in documents]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    return list(token_keys(tokens, places, borders, seed, step).split(lengths))


def test_a_tokens_key_does_not_depend_on_what_it_is_packed_with():
    one, two, three = [1, 2, 3], [4, 5], [1, 2, 9, 4]
    together = keys_of([one, two, three])
    alone = [keys_of([document])[0] for document in (one, two, three)]
    turned = keys_of([three, one, two])
    for place, other in ((0, 1), (1, 2), (2, 0)):
        assert torch.equal(together[place], alone[place])
        assert torch.equal(together[place], turned[other])
    everything = torch.cat(together)
    assert everything.unique().numel() == everything.numel()  # also of the common beginning
    assert not torch.equal(keys_of([one], step=1)[0], alone[0])
    assert not torch.equal(keys_of([one], seed=1)[0], alone[0])
    assert not torch.equal(keys_of([[2, 1, 3]])[0].sort().values, alone[0].sort().values)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate_in_rows_columns_and_layers(rate):
    tokens = torch.arange(400)
    keys = token_keys(tokens, tokens, torch.tensor([0, 400]), 0, 0)
    x = torch.ones(400, 300, dtype=torch.float64)
    first, other = (drop(x, keys, column_keys(n, 300), rate) for n in ("blocks.0.a", "blocks.1.a"))
    kept = first != 0
    assert torch.allclose(first[kept], torch.tensor(1 / (1 - rate), dtype=torch.float64))
    spread = (rate * (1 - rate)) ** 0.5
    assert abs(kept.double().mean().item() - (1 - rate)) < 4 * spread / 120_000**0.5
    for dim, count in ((0, 400), (1, 300)):
        error = (kept.double().mean(dim) - (1 - rate)).abs().max().item()
        assert error < 5 * spread / count**0.5
    both = (kept & (other != 0)).double().mean().item()
    assert both == pytest.approx((1 - rate) ** 2, abs=4 / 120_000**0.5)


def test_a_part_of_the_features_is_dropped_as_in_the_whole():
    tokens = torch.arange(50)
    keys = token_keys(tokens, tokens, torch.tensor([0, 50]), 3, 7)
    x = random(50, 24)
    whole = drop(x, keys, column_keys("n", 24), 0.3)
    part = drop(x[:, 8:16], keys, column_keys("n", 8, start=8), 0.3)
    assert torch.equal(whole[:, 8:16], part)


def test_what_is_dropped_stays_out_even_where_it_is_nan():
    tokens = torch.arange(50)
    keys = token_keys(tokens, tokens, torch.tensor([0, 50]), 3, 7)
    x = random(50, 24)
    kept = drop(x, keys, column_keys("n", 24), 0.3) != 0
    spoiled = torch.where(kept, x, torch.nan).requires_grad_()
    y = drop(spoiled, keys, column_keys("n", 24), 0.3)
    (grad,) = torch.autograd.grad(y.sum(), spoiled)
    assert y.isfinite().all()
    assert torch.equal(grad != 0, kept)


# --- shapes --------------------------------------------------------------------------------------


def test_targets_are_whole_names_in_the_models_order():
    lora = LoraConfig(rank=2, targets=(r"blocks\.1\.attn\.w[qv]", r"blocks\.\d\.mlp\.w_down"))
    wanted = ["blocks.0.mlp.w_down", "blocks.1.attn.wq", "blocks.1.attn.wv", "blocks.1.mlp.w_down"]
    assert list(target_shapes(CFG, lora)) == wanted
    assert target_shapes(CFG, LoraConfig()) == {}
    assert target_shapes(CFG, LoraConfig(rank=1)) == linear_shapes(CFG)


@pytest.mark.parametrize("pattern", ["attn.wq", r"blocks\.7\.attn\.wq", "blocks.0.attn.wz"])
def test_a_pattern_that_matches_nothing_names_the_nearest(pattern):
    with pytest.raises(ConfigError, match=r"matches no linear layer.*blocks\.0\.attn\.wq"):
        target_shapes(CFG, LoraConfig(rank=2, targets=(pattern,)))


def test_every_parameter_has_axes_that_fit_its_layer():
    lora = LoraConfig(rank=2, dora=True)
    shapes, linears = adapter_shapes(CFG, lora), linear_shapes(CFG)
    assert len(shapes) == 3 * len(linears)
    for name, shape in shapes.items():
        assert is_adapter(name)
        rows, columns = axes_of(f"{layer_of(name)}.weight")
        wanted = {"a": ("rank", columns), "b": (rows, "rank"), "magnitude": (rows,)}
        kind = name.split(".lora_")[1].removesuffix(".weight")
        assert axes_of(name) == wanted[kind]
        assert len(shape) == len(axes_of(name))
    assert not any(is_adapter(f"{name}.weight") for name in linears)
    assert layer_of("blocks.0.attn.wq.bias") == layer_of("blocks.0.attn.wq.weight")


@pytest.mark.parametrize(("rslora", "wanted"), [(False, 2.0), (True, 8.0)])
def test_scaling(rslora, wanted):
    assert scaling(LoraConfig(rank=16, alpha=32, rslora=rslora)) == wanted
