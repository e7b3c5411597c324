"""NEFTune through the engine: it trains with noise, scores without, and no layout changes it."""

import pytest
import torch

from stepwell.parallel.mesh import init_distributed
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from tests.layouts import MODEL
from tests.oracle import assert_same, base_run, global_batch, take_step
from tests.parallel.ranks import run_ranks
from tests.train.test_layouts import batch, share

NOISE = {"method.kind": "sft", "method.neftune_alpha": 5.0, "train.micro_batch_rows": 4}


def run_of(**values):
    return base_run(**{**MODEL, **NOISE, **values})


def gradients(run, steps_before: int = 0) -> torch.Tensor:
    engine = Engine(run)
    engine.step = steps_before
    engine.forward_backward(global_batch(), cross_entropy(run.loss))
    return torch.cat([p.grad.flatten() for _, p in engine.named_parameters() if p.grad is not None])


def test_it_changes_training_at_every_step_and_nothing_else():
    with_noise, without = run_of(), run_of(**{"method.neftune_alpha": 0.0})
    assert not torch.equal(gradients(with_noise), gradients(without))
    assert torch.equal(gradients(with_noise), gradients(with_noise))
    assert not torch.equal(gradients(with_noise), gradients(with_noise, steps_before=1))
    assert torch.equal(gradients(without), gradients(without, steps_before=1))
    logprobs = [Engine(run).logprobs(global_batch()) for run in (with_noise, without)]
    assert torch.equal(*logprobs)


def test_no_noise_is_the_limit_of_little():
    base = gradients(run_of(**{"method.neftune_alpha": 0.0}))
    near, nearer = (
        (gradients(run_of(**{"method.neftune_alpha": alpha})) - base).norm()
        for alpha in (1e-3, 1e-4)
    )
    assert 0 < nearer < near
    assert near / nearer == pytest.approx(10, rel=0.1)


LAYOUTS = (
    {"layout.tp": 2},
    {"layout.cp": 2},
    {"layout.pp": 2},
    {"layout.zero": 3, "train.micro_batch_rows": 2, "remat.mode": "full"},
)


def steps_of():
    found = []
    for layout in LAYOUTS:
        run = run_of(**layout)
        found.append(
            take_step(Engine(run, mesh=(mesh := init_distributed(run.layout))), share(mesh))
        )
    return found


def test_no_layout_changes_it():
    run = run_of()
    wanted = take_step(Engine(run), batch())
    whole = take_step(Engine(run_of(**{"train.micro_batch_rows": 8})), batch())
    assert_same(whole, wanted, 1e-9, "one micro-batch")
    results = run_ranks(steps_of, 2)
    for i, layout in enumerate(LAYOUTS):
        for rank in results:
            assert_same(rank[i], {k: wanted[k] for k in rank[i]}, 1e-9, str(layout))
