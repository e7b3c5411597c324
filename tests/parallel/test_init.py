import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from stepwell.parallel import init
from stepwell.parallel.init import global_name, init_parameters, normal_, standard_normal
from stepwell.parallel.mesh import init_distributed
from stepwell.sections.layout import LayoutConfig
from tests.parallel.ranks import run_ranks

SHAPES = {"embed.weight": (67, 33), "blocks.0.wq.weight": (101, 33), "norm.weight": (7,)}


def test_values_are_standard_normal():
    x = standard_normal(torch.arange(4_000_000), init.stream_keys(0, "embed.weight"))
    n = x.numel()
    assert abs(x.mean().item()) < 4 / math.sqrt(n)
    assert abs(x.std().item() - 1) < 4 / math.sqrt(2 * n)
    assert abs((x**3).mean().item()) < 4 * math.sqrt(15 / n)
    assert abs((x**4).mean().item() - 3) < 4 * math.sqrt(96 / n)
    assert 4.5 < x.abs().max().item() < 7
    assert x.unique().numel() == n
    inside = (x.abs() < 1).double().mean().item()
    assert abs(inside - 0.6826894921) < 4 * math.sqrt(0.22 / n)


def test_rows_names_and_seeds_are_independent():
    index = torch.arange(1 << 18)
    streams = [
        standard_normal(index, init.stream_keys(seed, name))
        for seed, name in [(0, "a"), (0, "b"), (1, "a"), (0, "blocks.0.w"), (0, "blocks.1.w")]
    ]
    bound = 5 / math.sqrt(index.numel())
    for i, a in enumerate(streams):
        for lag in (1, 2, 64, 576):
            assert abs((a[lag:] * a[:-lag]).mean().item()) < bound
        for b in streams[:i]:
            assert abs((a * b).mean().item()) < bound
    rows = streams[0].view(512, 512)
    off_diagonal = torch.corrcoef(rows) - torch.eye(512)
    assert off_diagonal.abs().max().item() < 6.5 / math.sqrt(512)


def test_generator_is_splitmix64_bit_for_bit():
    mask, (first, second) = (1 << 64) - 1, init.stream_keys(3, "x")

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    for index in (0, 1, 12345, 2**40 + 7):
        state = (index * 0x9E3779B97F4A7C15 + first) & mask
        uniform = ((mix(mix(state) ^ (second & mask)) >> 12) + 0.5) * 2.0**-52
        expected = math.sqrt(2) * torch.tensor(2 * uniform - 1, dtype=torch.float64).erfinv()
        assert standard_normal(torch.tensor([index]), (first, second)).item() == expected.item()


def test_extreme_bits_stay_finite():
    for bits in (0, (1 << 52) - 1):
        uniform = (torch.tensor([bits]).double() + 0.5) * 2.0**-52
        assert torch.erfinv(uniform * 2 - 1).isfinite().all()


def test_chunks_do_not_show(monkeypatch):
    whole = normal_(torch.empty(101, 33), 5, "w", 0.02)
    monkeypatch.setitem(init._CHUNK_ELEMENTS, "cpu", 97)
    assert torch.equal(normal_(torch.empty(101, 33), 5, "w", 0.02), whole)
    transposed = normal_(torch.empty(33, 101).t(), 5, "w", 0.02)
    assert torch.equal(transposed, whole)


def test_float64_starts_from_the_same_weights():
    single = normal_(torch.empty(9, 9), 0, "w", 0.02)
    double = normal_(torch.empty(9, 9, dtype=torch.float64), 0, "w", 0.02)
    assert torch.equal(single.double(), double)


def test_rule_decides_and_wrappers_do_not_change_names():
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    seen = {}

    def rule(name, shape):
        seen[name] = tuple(shape)
        if name == "1.weight":
            return "ones"
        return "zeros" if name.endswith("bias") else ("normal", 0.5)

    init_parameters(model, 1, rule)
    assert seen == {"0.weight": (6, 4), "0.bias": (6,), "1.weight": (6,), "1.bias": (6,)}
    assert model[1].weight.tolist() == [1.0] * 6
    assert model[0].bias.tolist() == [0.0] * 6
    assert torch.equal(model[0].weight, normal_(torch.empty(6, 4), 1, "0.weight", 0.5))
    with pytest.raises(ValueError, match="unknown rule 'triangular'"):
        init_parameters(model, 1, lambda name, shape: ("triangular", 1.0))
    assert global_name("blocks.0._checkpoint_wrapped_module._orig_mod.w") == "blocks.0.w"


def _sharded():
    mesh = init_distributed(LayoutConfig()).device_mesh
    assert mesh is not None
    mesh = mesh["fsdp"]
    full = {}
    for name, shape in SHAPES.items():
        for dim in range(len(shape)):
            parameter: Any = distribute_tensor(torch.empty(shape), mesh, [Shard(dim)])
            normal_(parameter, 7, name, 0.02)
            full[name, dim] = parameter.full_tensor()
    return full


def _sharded_twice():
    mesh = init_distributed(LayoutConfig(dp_replicate=2)).device_mesh
    assert mesh is not None
    mesh = mesh["dp_replicate", "fsdp"]
    full = {}
    for name, placements in [
        ("embed.weight", [Shard(0), Shard(1)]),
        ("blocks.0.wq.weight", [Shard(1), Shard(0)]),
        ("embed.weight", [Shard(0), Shard(0)]),
    ]:
        parameter: Any = distribute_tensor(torch.empty(SHAPES[name]), mesh, placements)
        normal_(parameter, 7, name, 0.02)
        full[name, str(placements)] = parameter.full_tensor()
    return full


def _both():
    return _sharded() | _sharded_twice()


@pytest.mark.parametrize(("num_ranks", "job"), [(2, _sharded), (3, _sharded), (4, _both)])
def test_every_sharding_gives_the_same_bits(num_ranks, job):
    """Over one axis, and on 4 ranks over two."""
    for full in run_ranks(job, num_ranks):
        for (name, placements), value in full.items():
            expected = normal_(torch.empty(SHAPES[name]), 7, name, 0.02)
            assert torch.equal(value, expected), placements
