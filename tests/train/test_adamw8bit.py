"""8-bit moments: near AdamW's trajectory, a quarter of its bytes, the same on any number of ranks.

torchao compiles its arithmetic, which takes many seconds; all but the slow test run it uncompiled.
"""

import sys

import pytest
import torch

from stepwell.parallel.mesh import init_distributed
from stepwell.sections.optim import OptimConfig
from stepwell.train.adamw8bit import BLOCK, AdamW8bit
from stepwell.train.engine import Engine
from stepwell.train.optim import build_optimizer
from stepwell.types import CheckpointError, ConfigError
from tests.oracle import base_run
from tests.parallel.ranks import run_jobs, run_ranks
from tests.trajectory import everything, train

# Most matrices have rows of one block, wo and w_down have not; 61 rows don't divide by ranks.
MODEL = {
    "model.num_layers": 1,
    "model.d_model": 256,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.d_ff": 32,
    "model.init_std": 0.05,
    "precision.compute": "fp32",
    "precision.param": "fp32",
    "precision.reduce": "fp32",
    "train.micro_batch_rows": 7,
}
EIGHT = {"optim.kind": "adamw8bit"}


def run_of(**overrides):
    return base_run(**{**MODEL, **overrides})


def train_here(run, steps, load=None, save=None):
    """Runs in each rank: everything after `steps` steps, whole."""
    with torch.compiler.set_stance("force_eager"):
        engine = Engine(run, mesh=init_distributed(run.layout))
        if load is not None:
            engine.load(load)
        loaded = everything(engine)
        norms = train(engine, steps)
        if save is not None:
            engine.save(save, {}).wait()
        return norms, loaded, everything(engine)


def distance(a, b, start):
    """|a - b| over |b - start|, all weights together."""
    names = [name for name in a if name.startswith("weight/")]
    away = torch.cat([(a[n] - b[n]).flatten() for n in names]).norm()
    return (away / torch.cat([(b[n] - start[n]).flatten() for n in names]).norm()).item()


def test_trajectory_is_near_adamws():
    _, start, eight = train_here(run_of(**EIGHT), 5)
    _, _, plain = train_here(run_of(), 5)
    assert 0 < distance(eight, plain, start) < 0.05


def test_state_is_a_quarter_of_the_bytes():
    engine = Engine(run_of(**EIGHT))
    with torch.compiler.set_stance("force_eager"):
        train(engine, 1)
    for name, parameter in engine.named_parameters():
        state = {
            k.removeprefix(f"{name}."): v
            for k, v in engine.optimizer.state_dict().items()
            if k.startswith(f"{name}.")
        }
        held = sum(v.nbytes for k, v in state.items() if k != "step")
        if parameter.dim() < 2 or parameter.shape[1] != BLOCK:
            assert held == 8 * parameter.numel()
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        else:
            assert held == 2 * parameter.numel() * (1 + 4 / BLOCK)
            assert state["exp_avg.codes"].dtype == torch.uint8
            assert state["exp_avg.codes"].unique().numel() > 50


def test_what_is_held_is_what_is_counted():
    """The live 8-bit tensors are those of `named_state`, plus a table of 256 values each."""
    weight = torch.nn.Parameter(torch.randn(64, 512))
    optimizer = build_optimizer([("a.weight", weight)], OptimConfig(kind="adamw8bit"))
    with torch.compiler.set_stance("force_eager"):
        weight.grad = torch.randn(64, 512)
        optimizer.step()
    part = optimizer.parts["adamw8bit"]
    assert isinstance(part, AdamW8bit)
    for slot in ("exp_avg", "exp_avg_sq"):
        moment = part.state[weight][slot]
        named = optimizer.state_dict()
        assert moment.codes.data_ptr() == named[f"a.weight.{slot}.codes"].data_ptr()
        assert moment.scale.data_ptr() == named[f"a.weight.{slot}.scale"].data_ptr()
        assert moment.qmap.numel() == 256
        live = moment.codes.nbytes + moment.scale.nbytes + moment.qmap.nbytes
        assert live < 0.3 * weight.nbytes


def test_moments_are_those_of_adamw_to_a_percent():
    weights = [torch.nn.Parameter(torch.zeros(16, 512)) for _ in range(2)]
    kinds = ("adamw", "adamw8bit")
    optimizers = [
        build_optimizer([("a.weight", w)], OptimConfig(kind=kind, weight_decay=0.3, lr=0.01))
        for kind, w in zip(kinds, weights, strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            gradient = torch.randn(16, 512, generator=generator)
            for optimizer, weight in zip(optimizers, weights, strict=True):
                weight.grad = gradient.clone()
                optimizer.step()
    plain = optimizers[0].state_dict()
    part = optimizers[1].parts["adamw8bit"]
    for slot in ("exp_avg", "exp_avg_sq"):
        wanted = plain[f"a.weight.{slot}"]
        got = part.state[weights[1]][slot].dequantize()
        assert (got - wanted).norm() / wanted.norm() < 0.015


def test_checkpoints_go_to_any_number_of_ranks(tmp_path):
    """Codes and scales arrive bit-equal on 1, 2 and 3 ranks, and training goes on alike."""
    run = run_of(**EIGHT)
    straight = train_here(run, 4)
    saved = train_here(run, 2, save=tmp_path / "two")
    found = {1: train_here(run, 2, load=tmp_path / "two")}
    jobs = {
        "back": (train_here, run, 2, tmp_path / "two", tmp_path / "four"),
        "alone": (train_here, run, 2),
    }
    two = run_jobs(2, **jobs)
    found[2] = two["back"][0]
    found[3] = run_ranks(train_here, 3, run, 2, tmp_path / "two")[0]
    for num_ranks, (_, loaded, _) in found.items():
        assert loaded.keys() == saved[2].keys(), num_ranks
        assert all(torch.equal(loaded[n], value) for n, value in saved[2].items()), num_ranks
    assert all(torch.equal(found[1][2][n], value) for n, value in straight[2].items())
    for num_ranks in (2, 3):
        assert distance(found[num_ranks][2], straight[2], straight[1]) < 5e-3
    assert distance(two["alone"][0][2], saved[2], saved[1]) < 5e-3


def test_checkpoints_of_adamw_are_refused_with_the_names(tmp_path):
    train_here(run_of(), 1, save=tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"missing.*exp_avg\.codes"):
        Engine(run_of(**EIGHT)).load(tmp_path / "plain")


def test_ranks_without_rows_hold_nothing():
    """A tensor of fewer rows than ranks."""
    weight = torch.nn.Parameter(torch.randn(0, 4096))
    optimizer = build_optimizer([("a.weight", weight)], OptimConfig(kind="adamw8bit"))
    weight.grad = torch.zeros(0, 4096)
    optimizer.step()
    assert all(v.numel() == 0 for k, v in optimizer.state_dict().items() if "step" not in k)


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"stepwell\[lowbit\]"):
        Engine(run_of(**EIGHT))


def test_float64_weights_are_refused():
    with pytest.raises(ConfigError, match="precision.param='fp64'"):
        Engine(base_run(**EIGHT))


@pytest.mark.slow
def test_compiled_arithmetic_is_the_same():
    run = run_of(**EIGHT)
    engine = Engine(run)
    start = everything(engine)
    train(engine, 3)
    _, _, eager = train_here(run, 3)
    assert distance(everything(engine), eager, start) < 0.01
