"""What moves to the host, how many bytes, and that nothing else changes."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from stepwell.config import Run
from stepwell.data.packing import pack_rows
from stepwell.models.activations import saved_per_layer
from stepwell.parallel.lever_rules import host_bytes, host_shortage
from stepwell.parallel.mesh import init_distributed
from stepwell.parallel.offload import ActivationOffload
from stepwell.parallel.rules import AxisSizes
from stepwell.train.engine import Engine
from stepwell.types import ConfigError
from tests.layouts import MODEL
from tests.oracle import base_run
from tests.parallel.ranks import run_ranks
from tests.trajectory import assert_equal, everything, train, trajectories, trajectory

CPU = torch.device("cpu")
# Every tensor that a block saves for 2 rows has more than 64 KiB, but for the numbers per row.
WIDE = {
    "model.d_model": 64,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 16,
    "model.d_ff": 128,
    "data.seq_len": 128,
    "precision.compute": "fp32",
    "precision.param": "fp32",
    "precision.reduce": "fp32",
    "train.micro_batch_rows": 2,
    "train.global_batch_rows": 4,
}
ACTIVATIONS = {"offload.activations": True}


def wide(*settings):
    values = dict(WIDE)
    for setting in settings:
        values.update(setting)
    return base_run(**values)


def wide_batch():
    generator = torch.Generator().manual_seed(0)
    docs = [(torch.randint(0, 61, (129,), generator=generator).tolist(), [1] * 129)] * 4
    return pack_rows(docs, 128, rows=[[i] for i in range(4)])


def wide_trajectories(runs):
    return [trajectory(run, 2, wide_batch()) for run in runs]


REMAT = {"remat.mode": "full"}
BF16 = {"precision.compute": "bf16"}


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_activation_offload_is_bit_equal(num_ranks):
    settings = [BF16, REMAT]
    plain = [wide(setting) for setting in settings]
    runs = plain + [wide(setting, ACTIVATIONS) for setting in settings]
    ranks = (
        run_ranks(wide_trajectories, num_ranks, runs) if num_ranks else [wide_trajectories(runs)]
    )
    for found in ranks:
        for i, setting in enumerate(settings):
            assert_equal(found[len(settings) + i], found[i], str(setting))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_bytes_moved_are_the_planners(compute):
    """Down and up once each: what a block saves, but for its numbers per row (1/rms, log-sum-exp)
    that are too small to move."""
    run = wide(ACTIVATIONS, {"precision.compute": compute})
    engine = Engine(run)
    offload = engine.activation_offload
    assert offload is not None
    offload.min_bytes = 16 * 2**10
    train(engine, 1, wide_batch())
    a, tokens = (4, 256) if compute == "fp32" else (2, 256)
    cfg = run.model
    small = 2 * 4 * tokens + 4 * tokens * cfg.num_heads
    per_layer = saved_per_layer(cfg, tokens, a, 4) - small
    num_micro_batches = 2
    assert offload.bytes_to_host == num_micro_batches * cfg.num_layers * per_layer
    assert offload.bytes_to_device == offload.bytes_to_host
    assert offload.peak_host_bytes == cfg.num_layers * per_layer
    gc.collect()
    assert offload.host_bytes == 0


def test_remat_moves_the_inputs_of_blocks_only():
    run = wide(ACTIVATIONS, REMAT)
    engine = Engine(run)
    train(engine, 1, wide_batch())
    assert engine.activation_offload is not None
    assert engine.activation_offload.bytes_to_host == 2 * run.model.num_layers * 256 * 64 * 4


def test_nothing_moves_without_gradients():
    engine = Engine(wide(ACTIVATIONS))
    engine.logprobs(wide_batch())
    assert engine.activation_offload is not None
    assert engine.activation_offload.bytes_to_host == 0


AXES = {
    "tp": {"layout.tp": 2},
    "cp": {"layout.cp": 2},
    "1f1b": {"layout.pp": 2},
    "zbv": {
        "layout.pp": 2,
        "layout.pp_schedule": "zbv",
        "layout.pp_stages_per_rank": 2,
        "layout.reshard_after_forward": "never",
    },
}


def along_each_axis():
    """Axis -> two trajectories, without and with everything moved that is saved; bytes moved."""
    found = {}
    for axis, settings in AXES.items():
        shape = {**MODEL, **settings, "train.micro_batch_rows": 4}
        run = base_run(**shape)
        moving = base_run(**shape, **ACTIVATIONS)
        engine = Engine(moving, mesh=init_distributed(run.layout))
        offload = engine.activation_offload
        assert offload is not None
        offload.min_bytes = 1
        norms = train(engine, 2)
        moved = offload.bytes_to_host, offload.bytes_to_device
        found[axis] = trajectory(run, 2), (norms, everything(engine)), moved
    return found


def test_activation_offload_along_each_axis():
    for rank in run_ranks(along_each_axis, 2):
        for axis, (plain, offloaded, (down, up)) in rank.items():
            assert_equal(offloaded, plain, axis)
            assert 0 < down <= up, axis


class Toy(nn.Module):
    """Saves views, transposes, the same tensor twice, an expanded tensor, a cast weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(48, 48)
        self.second = nn.Linear(48, 48, bias=False)
        self.norm = nn.LayerNorm(48)
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x):
        h = self.first(x)
        a, b = h.chunk(2, dim=1)
        h = torch.cat([a.sin() * b, (a.T * b.T).T.tanh()], dim=1)
        h = F.linear(h.double(), self.second.weight.double()).float()
        h = h * h * h.T.contiguous().T
        return self.norm(h + F.silu(h[:, None].expand(-1, 2, -1)).sum(1))


@pytest.mark.parametrize("prefetch", [0, 1, 100])
def test_every_kind_of_saved_tensor_returns_bit_equal(prefetch):
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(1))
    plain, moved = Toy(), Toy()
    offload = ActivationOffload(CPU, min_bytes=1, prefetch_copies=prefetch).attach(moved)
    for model in (plain, moved):
        for _ in range(2):
            model(x).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), moved.parameters(), strict=True):
        assert a.grad is not None, name
        assert a.grad.isfinite().all(), name
        assert_close(b.grad, a.grad, rtol=0, atol=0, msg=name)
    assert offload.bytes_to_host > 0


def test_what_is_saved_twice_moves_once_and_weights_stay():
    x = torch.randn(8, 48, requires_grad=True)

    class Twice(Toy):
        def forward(self, x):
            h = x * 2
            return self.norm(self.first(h) + self.second(h))

    model = Twice()
    offload = ActivationOffload(CPU, min_bytes=1).attach(model)
    model(x).sum().backward()
    assert offload.bytes_to_host == 8 * 48 * 4


def test_memory_that_is_given_away_and_reused_is_not_taken_for_the_same():
    """As FSDP2 does with gathered weights: the storage of a living tensor is emptied."""

    class Emptied(Toy):
        def forward(self, x):
            for i in range(6):
                factor = torch.full((64, 64), float(i + 1))
                x = x * factor
                factor.untyped_storage().resize_(0)
            return x

    model = Emptied()
    x = torch.ones(64, 64, requires_grad=True)
    ActivationOffload(CPU, min_bytes=1).attach(model)
    model(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((64, 64), 720.0))


def test_what_every_block_saves_moves_once():
    class Layers(Toy):
        def forward(self, x):
            angles = torch.ones(8, 48)
            for _ in range(20):
                x = x.sin() * angles
            return self.norm(x)

    model = Layers()
    offload = ActivationOffload(CPU, min_bytes=1).attach(model)
    model(torch.ones(8, 48, requires_grad=True)).sum().backward()
    # sin's input (the first one is a leaf), and the angles
    assert offload.bytes_to_host == (19 + 1) * 8 * 48 * 4


def test_a_graph_that_is_walked_twice():
    x = torch.randn(8, 48)
    model = Toy()
    ActivationOffload(CPU, min_bytes=1).attach(model)
    loss = model(x).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_error_within_the_forward_ends_the_moving():
    model = Toy()
    offload = ActivationOffload(CPU, min_bytes=1).attach(model)
    with pytest.raises(RuntimeError):
        model(torch.zeros(3, 5))
    before = offload.bytes_to_host
    (torch.ones(50, requires_grad=True) * 2).square().sum().backward()
    assert offload.bytes_to_host == before


# --- parameters ------------------------------------------------------------------------------

PARAMETERS = {"offload.parameters": True}


def parameter_trajectories(settings):
    runs = [base_run(**setting, **extra) for setting in settings for extra in ({}, PARAMETERS)]
    return trajectories(runs, 3)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_parameter_offload_is_bit_equal(num_ranks):
    settings = [
        {"optim.clip_norm": 0.05, "train.micro_batch_rows": 2},
        {"layout.zero": 2, "optim.kind": "muon"},
    ]
    for found in run_ranks(parameter_trajectories, num_ranks, settings):
        for i in range(len(settings)):
            assert_equal(found[2 * i + 1], found[2 * i], str(settings[i]))


def test_parameter_offload_needs_fsdp():
    with pytest.raises(ConfigError, match="process group"):
        Engine(base_run(**PARAMETERS))


@pytest.mark.gpu
def test_activation_offload_on_a_card():
    x = torch.randn(512, 48, generator=torch.Generator().manual_seed(1)).cuda()
    plain, moved = Toy().cuda(), Toy().cuda()
    device = torch.device("cuda", torch.cuda.current_device())
    offload = ActivationOffload(device, min_bytes=1).attach(moved)
    for model in (plain, moved):
        for _ in range(3):
            model(x).square().sum().backward()
    for a, b in zip(plain.parameters(), moved.parameters(), strict=True):
        assert_close(b.grad, a.grad, rtol=0, atol=0)
    assert offload.bytes_to_host > 0


# --- host memory -----------------------------------------------------------------------------


def test_host_memory_is_counted_before_anything_is_built():
    run = base_run(**{"offload.optimizer": True, "precision.param": "fp64"})
    num = sum(p.numel() for _, p in Engine(base_run()).named_parameters())
    assert host_bytes(run, AxisSizes()) == {"optimizer": 4 * 8 * num}
    assert host_bytes(run, AxisSizes(dp_shard=2)) == {"optimizer": 4 * 8 * num // 2}
    run = wide(ACTIVATIONS)
    saved = host_bytes(run, AxisSizes())["activations"]
    per_layer = saved_per_layer(run.model, 256, 4, 4)
    assert saved == 2 * per_layer
    inputs = host_bytes(wide(ACTIVATIONS, REMAT), AxisSizes())["activations"]
    assert inputs == 2 * 256 * 64 * 4


def test_offload_without_host_memory_is_refused_with_numbers():
    run = Run.parse({}, {"offload.optimizer": True})
    needed = host_bytes(run, AxisSizes())["optimizer"]
    assert host_shortage(run, AxisSizes(), 2, 2 * needed) is None
    message = host_shortage(run, AxisSizes(), 2, 2 * needed - 1)
    assert message is not None
    assert f"{2 * needed / 2**30:.2f} GiB" in message
    huge = Run.parse({}, {"offload.optimizer": True, "model.d_ff": 2**24, "model.num_layers": 9999})
    with pytest.raises(ConfigError, match=r"GiB of host memory.*available"):
        Engine(huge)
