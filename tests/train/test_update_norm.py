"""The predicted update norm against the difference that the step then makes."""

import math

import pytest
import torch

from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from stepwell.train.optim import clip, grad_norm, set_lr
from stepwell.train.update_norm import predicted_update_norm
from tests.oracle import base_run, global_batch
from tests.parallel.ranks import run_jobs

FLOAT32 = {"precision.compute": "fp32", "precision.param": "fp32", "precision.reduce": "fp32"}


def predicted_and_made(**overrides):
    """Over four steps: what was predicted, and the norm of what the weights changed by."""
    run = base_run(**{"optim.lr": 0.03, "optim.clip_norm": 0.5, **overrides})
    engine = Engine(run)
    parameters = [parameter for _, parameter in engine.named_parameters()]
    pairs = []
    for step in range(4):
        batch = global_batch() if engine.mesh.data_rank == 0 else global_batch().rows(0, 0)
        engine.forward_backward(batch, cross_entropy(run.loss))
        clip(parameters, 0.5, grad_norm(parameters, engine.mesh.pp_group))
        set_lr(engine.optimizer, 1.0 / (1 + step))
        before = engine.full_state_dict()
        found = predicted_update_norm(engine.optimizer, engine.mesh.pp_group)
        engine.optimizer.step()
        if engine.pipeline is not None:
            engine.pipeline.share_tied_weights()
        engine.drop_gradients()
        after = engine.full_state_dict()
        moved = {n: (after[n] - before[n]).double() for n in before if not left_out(n, run)}
        pairs.append((found, math.sqrt(sum(x.square().sum().item() for x in moved.values()))))
    return pairs


def left_out(name, run):
    matrix = name.startswith("blocks.") and "norm" not in name
    return run.optim.kind == "muon" and matrix


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_it_is_the_norm_of_the_step_that_follows(kind):
    for found, made in predicted_and_made(**{"optim.kind": kind}):
        assert found == pytest.approx(made, rel=1e-9)
        assert found > 0
    for found, made in predicted_and_made(**{"optim.kind": kind, **FLOAT32}):
        assert found == pytest.approx(made, rel=1e-4)  # the difference of weights is rounded


def test_on_the_host_too():
    for found, made in predicted_and_made(**{"offload.optimizer": True}):
        assert found == pytest.approx(made, rel=1e-9)


def test_with_8_bit_moments():
    pytest.importorskip("torchao")
    values = {**FLOAT32, "optim.kind": "adamw8bit", "model.d_model": 256, "optim.weight_decay": 0.5}
    pairs = predicted_and_made(**values)
    for found, made in pairs:
        assert found == pytest.approx(made, rel=1e-3)


def test_large_parameters_go_in_chunks(monkeypatch):
    monkeypatch.setitem(predicted_update_norm.__wrapped__.__globals__["CHUNK"], "cpu", 7)
    for found, made in predicted_and_made():
        assert found == pytest.approx(made, rel=1e-9)


def test_the_same_on_every_rank_of_every_layout():
    layouts = {
        "zero 3": {"layout.zero": 3},
        "zero 1": {"layout.zero": 1},
        "replicated": {"layout.dp_replicate": 2, "train.global_batch_rows": 8},
        "tensor": {"layout.tp": 2},
        "context": {"layout.cp": 2},
        "pipeline": {"layout.pp": 2, "train.micro_batch_rows": 2},
        "untied pipeline": {"layout.pp": 2, "train.micro_batch_rows": 2, "model.tied": False},
    }
    even = {"model.vocab_size": 64, "model.d_ff": 28}
    jobs = {name: (_found, {**even, **layout}) for name, layout in layouts.items()}
    tied, untied = _found(even), _found({**even, "model.tied": False})
    for name, (first, second) in run_jobs(2, **jobs).items():
        assert first == second, name
        assert first == pytest.approx(untied if "untied" in name else tied, rel=1e-9), name


def _found(overrides):
    return [found for found, _ in predicted_and_made(**overrides)]


def test_predicting_changes_nothing():
    run = base_run()
    engine = Engine(run)
    for _ in range(2):
        engine.forward_backward(global_batch(), cross_entropy(run.loss))
        state = {k: v.clone() for k, v in engine.optimizer.state_dict().items()}
        weights = engine.full_state_dict()
        gradients = [p.grad.clone() for _, p in engine.named_parameters() if p.grad is not None]
        predicted_update_norm(engine.optimizer)
        assert all(torch.equal(v, state[k]) for k, v in engine.optimizer.state_dict().items())
        assert all(torch.equal(v, weights[k]) for k, v in engine.full_state_dict().items())
        for (_, p), gradient in zip(engine.named_parameters(), gradients, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, gradient)
        engine.optim_step()
