"""Optimiser offload changes where the optimiser is, and nothing else."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from stepwell.hardware import live_tensor_bytes
from stepwell.parallel.mesh import init_distributed
from stepwell.sections.optim import OptimConfig
from stepwell.train.engine import Engine
from stepwell.train.host_optim import HostOptimizer
from stepwell.types import ConfigError
from tests.oracle import base_run
from tests.parallel.ranks import run_ranks
from tests.trajectory import assert_equal, everything, train, trajectories

OFFLOAD = {"offload.optimizer": True}
BF16 = {"precision.compute": "bf16", "precision.param": "fp32", "precision.reduce": "fp32"}
# Accumulation and clipping are in force in all of them.
SETTINGS = {
    "fp64": {"optim.clip_norm": 0.05, "train.micro_batch_rows": 2},
    "bf16": {"optim.clip_norm": 0.05, "train.micro_batch_rows": 1, **BF16},
    "zero 1": {"optim.clip_norm": 0.05, "train.micro_batch_rows": 2, "layout.zero": 1},
}


def pairs():
    """Each setting with and without."""
    plain = [base_run(**setting) for setting in SETTINGS.values()]
    return plain + [base_run(**setting, **OFFLOAD) for setting in SETTINGS.values()]


@pytest.mark.parametrize("num_ranks", [0, 1, 2])
def test_norms_weights_and_state_are_bit_equal(num_ranks):
    """0: one process without a group (plain tensors)."""
    runs = pairs()
    ranks = run_ranks(trajectories, num_ranks, runs) if num_ranks else [trajectories(runs)]
    for found in ranks:
        for i, name in enumerate(SETTINGS):
            assert_equal(found[len(SETTINGS) + i], found[i], name)
        assert min(found[0][0]) > 0.05, "clipping is not in force"


def bytes_of(run):
    """(device, host, parameters) bytes and elements after a step."""
    engine = Engine(run, mesh=init_distributed(run.layout))
    train(engine, 1)
    parameters = [parameter for _, parameter in engine.named_parameters()]
    assert all(parameter.grad is None for parameter in parameters)
    elements = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    optimizer = engine.optimizer
    assert isinstance(optimizer, HostOptimizer)
    state = [v for k, v in optimizer.state_dict().items() if not k.endswith(".step")]
    on_host = [w.master for w in optimizer.weights] + [w.buffer for w in optimizer.weights]
    device = live_tensor_bytes(parameters)
    total = live_tensor_bytes([*parameters, *state, *on_host])
    return device, total - device, elements


def test_bytes_of_device_and_host():
    """4 bytes a parameter on the device between steps, 16 on the host; no storage is shared."""
    run = base_run(**OFFLOAD, **BF16, **{"model.vocab_size": 64, "model.d_ff": 28})
    for device, host, elements in [bytes_of(run), *run_ranks(bytes_of, 2, run)]:
        assert elements > 0
        assert device == 4 * elements
        assert host == 16 * elements


def save_and_go_on(folder, first, second):
    """Two steps, then a fresh engine that loads and takes two more."""
    engine = Engine(first, mesh=init_distributed(first.layout))
    norms = train(engine, 2)
    engine.save(folder, {}).wait()
    later = Engine(second, mesh=engine.mesh)
    later.load(folder)
    return norms + train(later, 2), everything(later)


def all_ways(folder):
    runs = {"plain": base_run(), "offload": base_run(**OFFLOAD)}
    return [
        save_and_go_on(folder / f"{a}-{b}", first, second)
        for a, first in runs.items()
        for b, second in runs.items()
    ]


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_checkpoints_with_and_without_are_the_same(tmp_path, num_ranks):
    ranks = run_ranks(all_ways, num_ranks, tmp_path) if num_ranks else [all_ways(tmp_path)]
    for found in ranks:
        for other in found[1:]:
            assert_equal(other, found[0])


def test_weights_that_are_loaded_reach_the_masters():
    plain, offloaded = Engine(base_run(**{"train.seed": 1})), Engine(base_run(**OFFLOAD))
    offloaded.load_weights(plain.full_state_dict().items())
    norms = train(plain, 2), train(offloaded, 2)
    assert norms[0] == norms[1]
    assert_equal(([], everything(offloaded)), ([], everything(plain)))


def test_a_refused_step_leaves_master_and_device_alone():
    engine = Engine(base_run(**OFFLOAD))
    train(engine, 1)
    before = everything(engine)
    for _, parameter in engine.named_parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    engine._last_loss = 1.0
    assert engine.optim_step().skipped
    assert_equal(([], everything(engine)), ([], before))


def test_a_parameter_without_gradient_does_not_move():
    a, b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = HostOptimizer([("a.weight", a), ("b.weight", b)], OptimConfig(lr=0.1))
    a.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(b, torch.ones(3))
    assert not torch.equal(a, torch.ones(3))
    assert optimizer.state_dict()["a.weight.step"].item() == 1
    assert optimizer.state_dict()["b.weight.step"].item() == 0


@pytest.mark.parametrize("kind", ["muon", "adamw8bit"])
def test_other_optimisers_are_refused(kind):
    weight = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ConfigError, match=kind):
        HostOptimizer([("a.weight", weight)], OptimConfig(kind=kind))


@pytest.mark.gpu
def test_device_copies_are_right_on_a_card():
    """Pinned, on side streams: the trajectory still is that of AdamW on the host's weights."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2048, 512, generator=generator)
    gradients = [torch.randn(2048, 512, generator=generator) for _ in range(4)]
    card, host = torch.nn.Parameter(start.cuda()), torch.nn.Parameter(start.clone())
    config = OptimConfig(lr=0.1)
    ours = HostOptimizer([("a.weight", card)], config)
    reference = HostOptimizer([("a.weight", host)], config)
    for gradient in gradients:
        card.grad, host.grad = gradient.cuda(), gradient
        for optimizer in (ours, reference):
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal((card + 0).cpu(), host)
