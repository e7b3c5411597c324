"""The reference wherever it is, and the bytes of models as they really are."""

from typing import Any

import pytest
import torch

from stepwell.config import Run
from stepwell.plan.memory.models import predict_models
from stepwell.posttrain.ppo.critic import critic_run
from stepwell.posttrain.ppo.placement import (
    check_reference,
    gradient_bytes,
    measured,
    measured_reference,
    open_reference,
    reference_run,
    reference_warnings,
)
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from stepwell.types import ConfigError
from tests.oracle import base_run, global_batch
from tests.parallel.ranks import run_ranks

FP32 = {"precision.param": "fp32", "precision.reduce": "fp32", "precision.compute": "fp32"}


def run_of(**overrides: Any) -> Run:
    return base_run(**{"method.kind": "ppo", "method.max_new_tokens": 8, **FP32, **overrides})


def trained(run: Run) -> tuple[Engine, torch.Tensor]:
    """An engine after a step, and its log-probabilities before it."""
    engine, batch = Engine(run), global_batch()
    before = engine.logprobs(batch)
    engine.forward_backward(batch, cross_entropy(run.loss))
    engine.optim_step()
    return engine, before


@pytest.mark.parametrize("place", ["separate", "host"])
def test_a_reference_stays_what_the_policy_was(place):
    run = run_of(**{"method.reference": place, "optim.lr": 0.1})
    engine, before = trained(run)
    reference = open_reference(run, engine, engine.mesh)
    for _ in range(2):
        assert torch.equal(reference.logprobs(global_batch()), before)
        assert not torch.equal(engine.logprobs(global_batch()), before)
    warm = reference.logprobs(global_batch(), 0.5)
    assert not torch.equal(warm, before)


def test_weights_that_are_given_are_the_reference():
    run = run_of()
    engine, _ = trained(run)
    now = engine.logprobs(global_batch())
    reference = open_reference(run, engine, engine.mesh, list(engine.iter_state()))
    assert torch.equal(reference.logprobs(global_batch()), now)


def test_a_parked_reference_takes_nothing_of_the_device_between_rollouts():
    run = run_of(**{"method.reference": "host"})
    engine = Engine(run)
    reference = open_reference(run, engine, engine.mesh)
    whole = predict_models(run)["reference"].host
    for _ in range(2):
        assert measured_reference(reference).named() == {
            "parameters": 0, "gradients": 0, "master": 0, "moments": 0, "host": whole,
        }  # fmt: skip
        assert reference.parked is not None
        with reference.parked.used() as used:
            assert measured(used).parameters == whole
        reference.logprobs(global_batch())


def parked_logprobs(run: Run) -> tuple[torch.Tensor, int]:
    """Runs in each rank."""
    engine = Engine(run)
    reference = open_reference(run, engine, engine.mesh)
    share = global_batch().rows(engine.mesh.data_rank, engine.mesh.data_rank + 2)
    for _ in range(2):
        found = reference.logprobs(share)
    return found, measured_reference(reference).total


def test_a_sharded_reference_can_be_parked():
    keys = {"layout.dp_shard": 2, "layout.zero": 3}
    parked = run_ranks(parked_logprobs, 2, run_of(**keys, **{"method.reference": "host"}))
    alone = Engine(run_of())
    for rank, (found, num_bytes) in enumerate(parked):
        wanted = alone.logprobs(global_batch().rows(rank, rank + 2))
        assert (found - wanted).abs().max() < 1e-5
        assert num_bytes == 0


def test_a_reference_has_no_score_and_no_fresh_adapters():
    shared = run_of(**{"method.critic": "shared"})
    assert reference_run(shared).model.head == "lm"
    adapted = run_of(**{"lora.rank": 4})
    assert reference_run(adapted).lora.rank == 0
    quantised = run_of(**{"lora.rank": 4, "lora.quantize": "nf4"})
    assert reference_run(quantised).lora == quantised.lora
    further = run_of(**{"lora.rank": 4, "lora.init": "adapter"})
    assert reference_run(further).lora == further.lora


def test_references_that_cannot_be_had():
    off = {"method.reference": "adapter-off"}
    with pytest.raises(ConfigError, match="lora.rank=0; set lora.rank"):
        check_reference(run_of(**off))
    with pytest.raises(ConfigError, match="below the adapter 'adapter'"):
        check_reference(run_of(**off, **{"lora.rank": 4, "lora.init": "adapter"}))
    check_reference(run_of(**off, **{"lora.rank": 4}))
    check_reference(run_of())


def test_a_host_reference_on_the_host_is_told():
    host = run_of(**{"method.reference": "host"})
    if not torch.cuda.is_available():
        assert "saves nothing on a CPU" in reference_warnings(host)[0]
    assert reference_warnings(run_of()) == []


def test_adapters_off_are_the_reference():
    """The same bits as the base before training, for nothing."""
    run = run_of(**{"method.reference": "adapter-off", "lora.rank": 2, "optim.lr": 0.1})
    engine, before = trained(run)
    reference = open_reference(run, engine, engine.mesh)
    assert torch.equal(reference.logprobs(global_batch()), before)
    assert not torch.equal(engine.logprobs(global_batch()), before)
    assert measured_reference(reference).total == 0


WIDE = {"model.d_model": 64, "model.head_dim": 16, "model.d_ff": 128, "precision.compute": "bf16"}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"optim.kind": "muon"},
        {**WIDE, "lora.rank": 4, "lora.dora": True},
        {**WIDE, "lora.rank": 4, "lora.quantize": "nf4"},
        {**WIDE, "lora.rank": 4, "lora.quantize": "nf4", "lora.double_quantize": False},
    ],
)
def test_predicted_bytes_are_those_of_the_tensors(keys):
    """Policy and critic with their gradients at hand: within 5 %."""
    run = run_of(**keys)
    predicted = predict_models(run)
    for name, one in (("policy", run), ("critic", critic_run(run))):
        assert one is not None
        engine = Engine(one)
        if name == "policy":
            engine.forward_backward(global_batch(), cross_entropy(run.loss))
            found = measured(engine, gradient_bytes(engine))
            engine.optim_step()
            assert gradient_bytes(engine) == 0
        else:
            found = measured(engine, predicted[name].gradients)
        for part, num_bytes in predicted[name].named().items():
            assert found.named()[part] == pytest.approx(num_bytes, rel=0.05), (name, part)
