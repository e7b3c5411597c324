import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stepwell.parallel.mesh import init_distributed
from stepwell.sections.layout import LayoutConfig
from stepwell.sections.optim import OptimConfig
from stepwell.train.optim import build_optimizer, clip, grad_norm, set_lr
from stepwell.types import CheckpointError, ConfigError
from tests.parallel.ranks import run_ranks


class Tiny(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6, dtype=dtype)
        self.blocks = nn.ModuleList([nn.Linear(6, 5, dtype=dtype), nn.Linear(5, 6, dtype=dtype)])
        self.norm = nn.LayerNorm(6, bias=False, dtype=dtype)
        self.head = nn.Linear(6, 11, bias=False, dtype=dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(self.blocks[1](self.blocks[0](x).tanh())))


def _backward(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (16,), generator=generator)
    targets = torch.randint(0, 11, (16,), generator=generator)
    nn.functional.cross_entropy(model(tokens), targets).backward()


def _weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_decay_groups():
    model = Tiny()
    optimizer = build_optimizer(model.named_parameters(), OptimConfig(weight_decay=0.3))
    decay = {name: v["weight_decay"] for name, v in optimizer.hyperparameters().items()}
    assert decay == {
        "embed.weight": 0.3,
        "blocks.0.weight": 0.3,
        "blocks.1.weight": 0.3,
        "head.weight": 0.3,
        "blocks.0.bias": 0.0,
        "blocks.1.bias": 0.0,
        "norm.weight": 0.0,
    }


def test_adamw_is_torchs_adamw_and_materialising_its_state_changes_nothing():
    ours, materialised, plain = Tiny(), Tiny(), Tiny()
    config = OptimConfig(lr=0.02, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-6)
    a = build_optimizer(ours.named_parameters(), config)
    b = build_optimizer(materialised.named_parameters(), config)
    before = _weights(materialised)
    state = b.state_dict()
    assert all(value.abs().sum() == 0 for value in state.values())
    torch.testing.assert_close(_weights(materialised), before, rtol=0, atol=0)
    matrices = [p for p in plain.parameters() if p.dim() >= 2]
    vectors = [p for p in plain.parameters() if p.dim() < 2]
    c = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.02,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    for step in range(3):
        for model, optimizer in ((ours, a), (materialised, b), (plain, c)):
            _backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(_weights(materialised), _weights(ours), rtol=0, atol=0)
        torch.testing.assert_close(_weights(ours), _weights(plain), rtol=1e-5, atol=1e-7)
    assert b.state_dict()["head.weight.step"].item() == 3


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_after_a_load_equals_the_step_without(kind):
    config = OptimConfig(kind=kind)
    model, other = Tiny(), Tiny()
    optimizer = build_optimizer(model.named_parameters(), config)
    set_lr(optimizer, 0.5)
    for step in range(2):
        _backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    loaded = build_optimizer(other.named_parameters(), OptimConfig(kind=kind, lr=9.0))
    other.load_state_dict(model.state_dict())
    for name, value in loaded.state_dict().items():
        value.copy_(optimizer.state_dict()[name])
    loaded.load_hyperparameters(optimizer.hyperparameters())
    assert loaded.hyperparameters() == optimizer.hyperparameters()
    for m, o in ((model, optimizer), (other, loaded)):
        _backward(m, 7)
        o.step()
    torch.testing.assert_close(_weights(other), _weights(model), rtol=0, atol=0)


def test_muon_takes_hidden_matrices_only_and_each_kind_has_its_rate():
    model = Tiny()
    config = OptimConfig(kind="muon", lr=1e-3, muon_lr=0.02)
    optimizer = build_optimizer(model.named_parameters(), config)
    set_lr(optimizer, 0.25)
    rates = {name: v["lr"] for name, v in optimizer.hyperparameters().items()}
    hidden = {"blocks.0.weight", "blocks.1.weight"}
    assert {name for name, rate in rates.items() if rate == 0.005} == hidden
    assert {name for name, rate in rates.items() if rate == 0.00025} == set(rates) - hidden
    slots = optimizer.state_dict()
    assert "blocks.0.weight.momentum_buffer" in slots
    assert "blocks.0.weight.exp_avg" not in slots
    assert "embed.weight.exp_avg_sq" in slots


def test_muon_update_is_nearly_orthogonal():
    model: Any = Tiny()
    config = OptimConfig(kind="muon", muon_lr=1.0, weight_decay=0.0)
    before = _weights(model)["blocks.0.weight"]
    optimizer = build_optimizer(model.named_parameters(), config)
    _backward(model)
    optimizer.step()
    update = before - model.blocks[0].weight.detach()
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.3
    assert singular.max() < 1.4


def test_nothing_trainable_is_refused_and_frozen_parameters_stay():
    model = Tiny().requires_grad_(False)
    with pytest.raises(ConfigError, match="trainable"):
        build_optimizer(model.named_parameters(), OptimConfig())
    model.head.requires_grad_(True)
    optimizer = build_optimizer(model.named_parameters(), OptimConfig())
    assert set(optimizer.hyperparameters()) == {"head.weight"}


def test_hyperparameters_that_do_not_fit_are_named():
    optimizer = build_optimizer(Tiny().named_parameters(), OptimConfig())
    values = optimizer.hyperparameters()
    with pytest.raises(CheckpointError, match=r"embed\.weight"):
        optimizer.load_hyperparameters({k: v for k, v in values.items() if k != "embed.weight"})
    values["head.weight"] = values["head.weight"] | {"lr": 7.0}
    with pytest.raises(CheckpointError, match=r"head\.weight.*7\.0"):
        optimizer.load_hyperparameters(values)


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_norm_and_clip_equal_torchs_on_one_process(max_norm):
    ours, theirs = Tiny(), Tiny()
    _backward(ours)
    _backward(theirs)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm).item()
    norm = grad_norm(ours.parameters())
    assert norm == pytest.approx(expected, rel=1e-6)
    clip(ours.parameters(), max_norm, norm)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_clip_zero_means_no_clipping():
    model = Tiny()
    _backward(model)
    norm = grad_norm(model.parameters())
    clip(model.parameters(), 0.0, norm)
    assert grad_norm(model.parameters()) == norm


def test_norm_of_a_large_float32_gradient_is_exact():
    parameter = nn.Parameter(torch.empty(3_000_001))
    parameter.grad = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    assert grad_norm([parameter]) == pytest.approx(parameter.grad.double().norm().item(), rel=1e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norm_shows_non_finite_gradients(value):
    parameter = nn.Parameter(torch.zeros(10_000))
    parameter.grad = torch.zeros(10_000)
    parameter.grad[77] = value
    norm = grad_norm([parameter])
    assert math.isnan(norm) if math.isnan(value) else math.isinf(norm)


def test_no_gradient_counts_as_zero():
    assert grad_norm(Tiny().parameters()) == 0.0


def _several_meshes():
    init_distributed(LayoutConfig())
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    flat = init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(5)
    fulls = [torch.randn(shape, generator=generator) for shape in [(7, 5), (9,), (6, 3), (4, 4)]]
    places = [(two, [Replicate(), Shard(0)]), (flat, [Shard(0)]), (two, [Shard(1), Shard(0)])]
    parameters = []
    for full, place in zip(fulls, [*places, None], strict=True):
        local = full if place is None else distribute_tensor(full, *place)
        parameter = nn.Parameter(torch.zeros_like(local))
        parameter.grad = local
        parameters.append(parameter)
    expected = math.sqrt(sum(full.double().square().sum().item() for full in fulls))
    norm = grad_norm(parameters)
    clip(parameters, 0.5, norm)
    return norm, expected, grad_norm(parameters)


def test_norm_over_several_meshes_and_plain_tensors():
    results = run_ranks(_several_meshes, 4)
    for norm, expected, clipped in results:
        assert norm == pytest.approx(expected, rel=1e-7)
        assert clipped == pytest.approx(0.5, rel=1e-5)
    assert len({norm for norm, _, _ in results}) == 1
