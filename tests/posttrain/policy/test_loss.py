"""GRPO's loss and gradient against formulas written out answer by answer, for every split."""

import pytest
import torch

from stepwell.posttrain.answers import answers_of
from stepwell.posttrain.policy.batch import pack_answers, with_advantages
from stepwell.posttrain.policy.loss import ADVANTAGES, OLD, SAMPLER, policy_loss
from stepwell.posttrain.sampling.gauge import Gauge
from stepwell.train.engine import Engine
from tests import oracle
from tests.oracle import assert_same
from tests.parallel.ranks import run_jobs
from tests.posttrain.policy_cases import (
    gradients,
    method_of,
    naive_gradients,
    policy_run,
    some_answers,
    some_rollouts,
)

KL = {"method.kl_coef": 0.3}
TWICE = {"method.updates_per_rollout": 2}  # bounds are refused where no step could meet them
CASES = {
    "clip, over tokens": {},
    "clip, over answers": {"method.aggregate": "sequence"},
    "clip, by a constant": {"method.aggregate": "constant", "method.advantage": "none"},
    "dual clip": {**TWICE, "method.dual_clip": 1.5, "method.advantage": "leave-one-out"},
    "cispo": {"method.objective": "cispo", "method.advantage": "maxrl"},
    "gspo": {
        **TWICE,
        "method.objective": "gspo",
        "method.aggregate": "sequence",
        "method.clip_low": 0.02,
    },
    "gspo, over tokens": {"method.objective": "gspo", "method.advantage": "reinforce++"},
    "k1": {**KL, "method.kl_estimator": "k1", "method.advantage": "batch-std"},
    "k2": {**KL, "method.kl_estimator": "k2", "method.aggregate": "sequence"},
    "k3": KL,
    "unbiased": {**KL, "method.kl_estimator": "unbiased"},
    "entropy": {"method.entropy_coef": 0.2, "method.importance_cap": 0.0},
    "masked": {"method.overlong": "mask", "method.aggregate": "sequence", **KL},
    "masked, over tokens": {"method.overlong": "mask"},
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_the_formula(case):
    run = policy_run(**{**CASES[case], "train.micro_batch_rows": 2})
    for temperature in (1.0, 0.7):
        got, wanted = gradients(run, temperature), naive_gradients(run, temperature)
        assert_same(got, wanted, 1e-9, case)


SPLIT = ("clip, over tokens", "clip, by a constant", "gspo", "unbiased", "masked")


def test_no_split_changes_the_gradient():
    """Micro-batches of one row, two ranks, and minibatches of a rollout."""
    runs = {name: policy_run(**{**CASES[name], "train.micro_batch_rows": 100}) for name in SPLIT}
    wanted = {name: gradients(run) for name, run in runs.items()}
    small, parts = {"train.micro_batch_rows": 1}, {"method.minibatches": 3}
    for name in SPLIT:
        got = gradients(policy_run(**{**CASES[name], **small}))
        assert_same(got, wanted[name], 1e-9, name)
        got = gradients(policy_run(**{**CASES[name], **small, **parts}))
        assert_same(got, wanted[name], 1e-9, f"{name} in minibatches")
    jobs = {
        name: (gradients, policy_run(**{**CASES[name], "train.micro_batch_rows": 2, **parts}))
        for name in SPLIT
    }
    seen = {
        f"{name} on context ranks": (gauged, policy_run(**{**CASES[name], "layout.cp": 2}))
        for name in ("clip, over tokens", "gspo")
    }
    found = run_jobs(2, **jobs, **seen)
    for name in SPLIT:
        for got in found[name]:
            assert_same(got, wanted[name], 1e-9, f"{name} on two ranks")
    alone = gauged(policy_run())
    for name in seen:
        for got in found[name]:
            assert got.num_tokens == alone.num_tokens, f"{name}: each token counts once"
            assert got.kl == pytest.approx(alone.kl, rel=1e-9), name


def gauged(run):
    """What the gauge says of all tokens; every rank is given all rows."""
    engine, method, gauge = Engine(run), method_of(run), Gauge()
    answers = with_advantages(some_answers(engine), method)
    batch = pack_answers(answers, method, oracle.LENGTH, pad_id=0)
    engine.forward_backward(batch, policy_loss(method, gauge))
    return gauge.read(engine.mesh)


def first_step(run):
    """An engine after the backward pass of a first step: old log-probabilities are NaN."""
    engine, method = Engine(run), method_of(run)
    answers = with_advantages(answers_of(some_rollouts()), method)
    answers = [a.adding(**{OLD: a.trained_L * float("nan")}) for a in answers]
    batch = pack_answers(answers, method, oracle.LENGTH, pad_id=0)
    return engine, engine.forward_backward(batch, policy_loss(method))


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_first_step_has_ratio_one(aggregate):
    """The loss is the mean of -A over tokens or answers; over answers it is 0, its gradient not."""
    run = policy_run(**{"method.aggregate": aggregate, "method.importance_cap": 0.0})
    engine, stats = first_step(run)
    assert stats.metrics["kl_old"] == stats.metrics["clipped_share"] == 0
    gradient = engine.decoder.get_parameter("blocks.0.attn.wq.weight").grad
    assert gradient is not None
    assert gradient.abs().max() > 1e-3
    answers = with_advantages(answers_of(some_rollouts()), method_of(run))
    tokens = torch.tensor([a.num_trained for a in answers], dtype=torch.float64)
    sums = -torch.tensor([a.streams[ADVANTAGES].sum() for a in answers])
    wanted = {
        "token": sums.sum() / tokens.sum(),
        "sequence": (sums / tokens).mean(),
        "constant": (sums / 8).mean(),
    }
    assert stats.loss == pytest.approx(wanted[aggregate].item(), abs=1e-7)
    assert (abs(stats.loss) < 1e-7) == (aggregate == "sequence")


def test_temperature_scales_logprobs_and_never_in_place():
    """T = .5, logits (2, 0): log p = -0.01815, not the -0.12693 of T = 1."""
    logits = torch.tensor([2.0, 0.0], dtype=torch.float64)
    assert (logits / 0.5).log_softmax(0)[0].item() == pytest.approx(-0.01815, abs=1e-5)
    run = policy_run()
    engine, method = Engine(run), method_of(run)
    batch = pack_answers(
        with_advantages(some_answers(engine), method), method, oracle.LENGTH, pad_id=0
    )
    plain = engine.logprobs(batch)
    sharp = engine.logprobs(batch, 0.5)
    assert (plain - sharp).abs().max() > 0.1
    assert torch.equal(engine.logprobs(batch), plain)


def test_all_masked_is_finite_and_zero():
    run = policy_run(**{"method.overlong": "mask"})
    engine, method = Engine(run), method_of(run)
    cut = [a for a in with_advantages(some_answers(engine), method) if a.truncated]
    assert cut
    batch = pack_answers(cut, method, oracle.LENGTH, pad_id=0)
    assert batch.weights_BT.count_nonzero() == 0
    stats = engine.forward_backward(batch, policy_loss(method))
    assert stats.loss == 0
    for _, parameter in engine.named_parameters():
        assert parameter.grad is None or parameter.grad.count_nonzero() == 0


def test_nan_outside_the_loss_stays_out():
    """In any stream, on tokens without a weight."""
    run = policy_run(**{**KL, "method.entropy_coef": 0.1, "method.objective": "gspo"})
    method, found = method_of(run), []
    for spoil in (False, True):
        engine = Engine(run)
        answers = with_advantages(some_answers(engine), method)
        batch = pack_answers(answers, method, oracle.LENGTH, pad_id=0)
        if spoil:
            for stream in batch.extra.values():
                stream[batch.weights_BT == 0] = float("nan")
        stats = engine.forward_backward(batch, policy_loss(method))
        grads = [(name, p.grad) for name, p in engine.named_parameters() if p.grad is not None]
        full = {name: oracle.full(gradient) for name, gradient in grads}
        found.append({"loss": torch.tensor(stats.loss).double(), **full})
    assert_same(found[1], found[0], 1e-12)


def test_metrics_and_gauge_say_what_tokens_saw():
    run = policy_run(**KL)
    engine, method, gauge = Engine(run), method_of(run), Gauge()
    answers = with_advantages(some_answers(engine), method)
    batch = pack_answers(answers, method, oracle.LENGTH, pad_id=0)
    now = engine.logprobs(batch)
    stats = engine.forward_backward(batch, policy_loss(method, gauge))
    seen = batch.weights_BT != 0
    old, reference, sampled = (batch.extra[k][seen] for k in (OLD, "reference_logprobs", SAMPLER))
    k3 = lambda log_ratio: (log_ratio.exp() - 1 - log_ratio).mean().item()
    assert stats.metrics["kl"] == pytest.approx(k3(reference - now[seen]), rel=1e-5)
    assert stats.metrics["kl_old"] == pytest.approx(k3(now[seen] - old), rel=1e-5)
    found = gauge.read(engine.mesh)
    assert found.max_abs == pytest.approx((old - sampled).abs().max().item(), rel=1e-6)
    assert found.kl == pytest.approx(k3(old - sampled), rel=1e-5)
    assert found.num_tokens == int(seen.sum())
