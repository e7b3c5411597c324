"""Gradients that are stepped and freed within the backward pass leave the same weights."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from stepwell.data.batch import concat
from stepwell.hardware import live_tensor_bytes
from stepwell.parallel.mesh import init_distributed
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from stepwell.types import ConfigError, TrainingError
from tests.oracle import base_run, global_batch
from tests.parallel.ranks import run_ranks
from tests.trajectory import assert_equal, train, trajectories

# What it needs: one micro-batch, no clipping, nobody who judges.
ALONE = {"train.micro_batch_rows": 7, "optim.clip_norm": 0.0, "guard.action": "none"}
SCHEDULE = {"optim.schedule.kind": "linear", "optim.schedule.warmup_steps": 2}
RELEASE = {"optim.release_gradients": True}
SETTINGS = {
    "fp64": {**ALONE, **SCHEDULE},
    "untied": {**ALONE, "model.tied": False, "remat.mode": "full"},
    "zero 1": {**ALONE, "layout.zero": 1},
}


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_norms_weights_and_state_are_bit_equal(num_ranks):
    runs = [
        base_run(**setting, **extra) for setting in SETTINGS.values() for extra in ({}, RELEASE)
    ]
    ranks = run_ranks(trajectories, num_ranks, runs) if num_ranks else [trajectories(runs)]
    for found in ranks:
        for i, name in enumerate(SETTINGS):
            assert_equal(found[2 * i + 1], found[2 * i], name)


def peaks(run):
    """This rank's peak of gradient bytes; bytes of the largest parameter, of the largest block and
    of the rest; of all; whether any gradient was left."""
    engine = Engine(run, mesh=init_distributed(run.layout))
    train(engine, 1)
    assert engine.release is not None
    units: dict[str, list[torch.Tensor]] = {}
    for name, parameter in engine.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "rest"
        assert parameter.grad is None
        units.setdefault(unit, []).append(parameter)
    sizes = {unit: live_tensor_bytes(parameters) for unit, parameters in units.items()}
    all_parameters = [p for parameters in units.values() for p in parameters]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in all_parameters]
    largest = max(p.nbytes for p in local)
    return engine.release.peak_gradient_bytes, largest, max(sizes.values()), sum(sizes.values())


def test_one_process_holds_one_gradient_at_a_time():
    peak, largest, _, whole = peaks(base_run(**ALONE, **RELEASE, **{"model.num_layers": 6}))
    assert peak == largest
    assert peak < whole / 8


def test_fsdp_holds_the_gradients_of_one_unit_at_a_time():
    run = base_run(**ALONE, **RELEASE, **{"model.num_layers": 6, "model.vocab_size": 64})
    for peak, _, unit, whole in run_ranks(peaks, 2, run):
        assert unit <= peak <= 1.1 * unit  # uneven shards are padded
        assert peak < whole / 5


def test_a_second_micro_batch_or_step_is_refused():
    run = base_run(**{**ALONE, **RELEASE, "train.micro_batch_rows": 7})
    engine = Engine(run)
    loss = cross_entropy(run.loss)
    engine.forward_backward(global_batch(), loss)
    with pytest.raises(TrainingError, match="optim_step"):
        engine.forward_backward(global_batch(), loss)
    info = engine.optim_step()
    assert (info.step, engine.updates) == (1, 1)
    assert info.grad_norm > 0
    more = global_batch().rows(0, 7)
    with pytest.raises(TrainingError, match="one micro-batch, not 2"):
        engine.forward_backward(concat([more, more]), loss)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"optim.clip_norm": 1.0}, "optim.clip_norm=1"),
        ({"optim.kind": "muon"}, "optim.kind='muon'"),
        ({"train.micro_batch_rows": 3}, "train.micro_batch_rows=3"),
        ({"offload.optimizer": True}, "offload.optimizer"),
        ({"guard.action": "skip"}, "guard.action='skip'"),
        ({"method.kind": "grpo", "method.max_new_tokens": 4}, "method.kind='grpo'"),
        (
            {"precision.param": "fp32", "precision.compute": "fp16", "precision.reduce": "fp32"},
            "precision.compute='fp16'",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(override, named):
    with pytest.raises(ConfigError, match=named):
        Engine(base_run(**{**ALONE, **RELEASE, **override}))
