"""The engine's laws, by the gradient oracle and on real gloo ranks."""

import dataclasses
import json
import math

import pytest
import torch

from stepwell.data.batch import concat, padding
from stepwell.train.engine import Engine
from stepwell.train.losses import Loss, LossSums, cross_entropy, masked_sum, token_count
from stepwell.types import CheckpointError, TrainingError
from tests import oracle
from tests.oracle import Case, assert_same, base_run, global_batch, one_step
from tests.parallel.ranks import run_ranks

CASES = [
    Case("one process, 2 rows at a time", micro_batch_rows=2),
    Case("one process, all rows at once", micro_batch_rows=7),
    Case("one process, logits kept", overrides={"loss.keep_logits": "always"}),
    Case("one process, logits computed twice", overrides={"loss.keep_logits": "never"}),
    Case("fsdp 2", num_ranks=2),
    Case("fsdp 2, accumulation", num_ranks=2, micro_batch_rows=2),
    Case("fsdp 3, uneven", num_ranks=3, micro_batch_rows=2),
    Case("fsdp 4", num_ranks=4, micro_batch_rows=7),
    Case("fsdp 2, no reshard", num_ranks=2, overrides={"layout.reshard_after_forward": "never"}),
    Case(
        "hsdp 2x2", num_ranks=4, overrides={"layout.dp_replicate": 2, "train.global_batch_rows": 8}
    ),
    Case("more ranks than some have rows", num_ranks=4, micro_batch_rows=1),
]
MODELS = {
    "tied": {},
    "untied, qwen3": {"model.tied": False, "model.family": "qwen3", "model.qk_norm": True},
    "qwen2": {"model.family": "qwen2", "model.qkv_bias": True},
}


# Each model with clipping in force, the first one without it too.
SETTINGS = [("tied", 0.0), *((model, 0.05) for model in MODELS)]


@pytest.fixture(scope="module")
def references():
    return {
        (model, clip): one_step(
            base_run(**MODELS[model], **{"optim.clip_norm": clip, "train.micro_batch_rows": 1})
        )
        for model, clip in SETTINGS
    }


@pytest.mark.parametrize("num_ranks", sorted({case.num_ranks for case in CASES}))
def test_a_layout_never_changes_the_numbers(num_ranks, references):
    cases = [case for case in CASES if case.num_ranks == num_ranks]
    runs = [
        base_run(
            **MODELS[model],
            **{"optim.clip_norm": clip, "train.micro_batch_rows": case.micro_batch_rows},
            **case.overrides,
        )
        for case in cases
        for model, clip in SETTINGS
    ]
    names = [f"{case.name}, {setting}" for case in cases for setting in SETTINGS]
    results = [one_step_each(runs)] if num_ranks == 1 else run_ranks(one_step_each, num_ranks, runs)
    for rank_results in results:
        for name, got, wanted in zip(
            names, rank_results, [*references.values()] * len(cases), strict=True
        ):
            assert_same(got, wanted, 1e-9, name)


def one_step_each(runs):
    return [one_step(run) for run in runs]


def test_clipping_is_in_force(references):
    """The oracle's clip bound really binds, and shrinks nothing but the step."""
    free, clipped = references["tied", 0.0], references["tied", 0.05]
    assert free["norm"].item() > 0.5
    assert free["norm"] == clipped["norm"]
    name = "state/blocks.0.mlp.w_up.weight.exp_avg"
    ratio = (clipped[name] / free[name]).nanmedian().item()
    assert ratio == pytest.approx(0.05 / free["norm"].item(), rel=1e-4)


def test_gradient_equals_a_plain_loop_over_documents():
    """One process against the naive reference: each document alone, plain log-softmax, float64."""
    run = base_run(**{"train.micro_batch_rows": 2})
    engine = Engine(run)
    engine.forward_backward(global_batch(), cross_entropy(run.loss))
    got = {n: p.grad for n, p in engine.decoder.named_parameters()}
    engine.optimizer.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    from stepwell.models.transformer import ForwardOptions

    options = ForwardOptions(needs=frozenset({"logits"}), dtype=torch.float64)
    for ids, mask in oracle.documents():
        tokens, targets = torch.tensor([ids[:-1]]), torch.tensor(ids[1:])
        borders = torch.tensor([0, len(ids) - 1], dtype=torch.int32)
        positions = torch.arange(len(ids) - 1)[None]
        logits = engine.decoder(tokens, positions, borders, options=options).logits_BTV[0]
        lse = logits.logsumexp(-1)
        nll = lse - logits[torch.arange(len(targets)), targets] + run.loss.z_loss * lse**2
        total = total + (nll * torch.tensor(mask[1:])).sum()
        count += sum(mask[1:])
    (total / count).backward()
    for name, parameter in engine.decoder.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=0, atol=1e-12)


def constant_loss(values_BT):
    """A loss whose value is known: the given number at each token (times one, differentiably)."""

    def fn(outputs, batch):
        keep = values_BT[list(batch.sample_ids)] + 0 * outputs.logprobs_BT
        return LossSums({"tokens": masked_sum(keep, batch.weights_BT)}, {})

    return Loss(frozenset({"logprobs"}), token_count, fn)


@pytest.mark.parametrize("rows", [1, 2])
def test_token_weighted_mean_known_answer(rows):
    """100 tokens at 2.0 and 900 at 0.5 give 0.65, never 1.25, for any split."""
    run = base_run(
        **{"model.max_seq_len": 1000, "data.seq_len": 900, "train.micro_batch_rows": rows}
    )
    batch = padding(2, 900)
    weights = torch.zeros(2, 900)
    weights[0, :100] = weights[1, :] = 1
    batch = dataclasses.replace(
        batch, weights_BT=weights, docs_BT=torch.zeros_like(batch.docs_BT), sample_ids=(0, 1)
    )
    values = torch.full((2, 900), 0.5)
    values[0] = 2.0
    assert Engine(run).forward_backward(batch, constant_loss(values)).loss == pytest.approx(0.65)


def test_all_masked_batch_is_finite_and_zero():
    run = base_run()
    engine = Engine(run)
    batch = dataclasses.replace(global_batch(), weights_BT=torch.zeros(7, oracle.LENGTH))
    stats = engine.forward_backward(batch, cross_entropy(run.loss))
    assert stats.loss == 0.0
    assert stats.num_loss_tokens == 0
    for parameter in engine.decoder.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_displayed_loss_and_tokens_are_counted():
    run = base_run(**{"loss.z_loss": 0.0, "train.micro_batch_rows": 3})
    engine = Engine(run)
    batch = global_batch()
    lp_BT = engine.logprobs(batch)
    stats = engine.forward_backward(batch, cross_entropy(run.loss))
    weights = batch.weights_BT
    assert stats.metrics["loss"] == pytest.approx(-(lp_BT * weights).sum().item() / weights.sum())
    assert stats.loss == pytest.approx(stats.metrics["loss"])
    assert stats.num_loss_tokens == int(weights.sum()) == 47
    assert stats.num_tokens == sum(len(ids) - 1 for ids, _ in oracle.documents())


def poisoned_step(value: float):
    """A good step, then one whose gradient is `value` times too large."""
    run = base_run(**{"guard.min_history": 1, "guard.max_skips_in_a_row": 2})
    engine = Engine(run)
    plain = cross_entropy(run.loss)
    engine.forward_backward(global_batch(), plain)
    engine.optim_step()

    def scaled(outputs, batch):
        found = plain.fn(outputs, batch)
        return LossSums({k: v * value for k, v in found.sums.items()}, found.metrics)

    return engine, Loss(plain.needs, plain.denominators, scaled)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e6])
def test_bad_step_changes_nothing_and_too_many_stop(value):
    engine, bad = poisoned_step(value)
    before = everything(engine)
    engine.forward_backward(global_batch(), bad)
    info = engine.optim_step()
    assert info.skipped
    assert info.reason
    after = everything(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert engine.step == 2
    assert engine.updates == 1
    engine.forward_backward(global_batch(), bad)
    assert engine.optim_step().skipped
    engine.forward_backward(global_batch(), bad)
    with pytest.raises(TrainingError, match="in a row"):
        engine.optim_step()


def test_nan_weight_in_a_masked_row_stays_out():
    """Only a document without loss holds the token whose embedding is NaN."""
    run = base_run(**{"train.micro_batch_rows": 7, "model.tied": False})
    engine = Engine(run)
    docs = [([5, 5, 5, 5], [0, 0, 0, 0]), ([1, 2, 3, 4], [0, 1, 1, 1])]
    from stepwell.data.packing import pack_rows

    batch = pack_rows(docs, oracle.LENGTH, rows=[[0, 1]])
    with torch.no_grad():
        engine.decoder.get_parameter("embed.weight")[5] = torch.nan
    stats = engine.forward_backward(batch, cross_entropy(run.loss))
    assert math.isfinite(stats.loss)


def test_bf16_compute_keeps_float32_masters_and_follows_float32():
    single = {"precision.param": "fp32", "precision.reduce": "fp32"}
    results = [one_step(base_run(**single, **{"precision.compute": c})) for c in ("bf16", "fp32")]
    assert all(v.dtype == torch.float32 for k, v in results[0].items() if k.startswith("weight/"))
    name = "grad/blocks.1.mlp.w_down.weight"
    cosine = torch.cosine_similarity(*(r[name].flatten() for r in results), dim=0)
    assert cosine > 0.99
    assert not torch.equal(results[0][name], results[1][name])


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_scoring_computes_what_training_does_to_the_last_bit(compute):
    """So that a policy that is its reference has a ratio of exactly 1 to it."""
    single = {"precision.param": "fp32", "precision.reduce": "fp32", "precision.compute": compute}
    engine, batch = Engine(base_run(**single)), global_batch()
    seen = []

    def fn(outputs, micro):
        seen.append(outputs.logprobs_BT.detach())
        return LossSums({"all": masked_sum(outputs.logprobs_BT, micro.weights_BT)}, {})

    scored_BT = engine.logprobs(batch)
    engine.forward_backward(batch, Loss(frozenset({"logprobs"}), lambda _: {"all": 1.0}, fn))
    found_BT = torch.cat(seen)
    assert torch.equal(found_BT, scored_BT)
    assert found_BT.min() < -1


def test_two_runs_are_bit_equal():
    first, second = (one_step(base_run(**{"layout.deterministic": True})) for _ in range(2))
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


def train_some(run, folder, steps, resume):
    """Two or more steps, saving; or loading first."""
    engine = Engine(run)
    if resume is not None:
        assert engine.load(folder / resume) == {"place": resume}
    loss, batch = cross_entropy(run.loss), global_batch()
    world, rank = engine.mesh.data_world, engine.mesh.data_rank
    from stepwell.data.loader import rank_rows

    share = rank_rows(batch.num_rows, rank, world)
    losses = []
    for _ in range(steps):
        losses.append(engine.forward_backward(batch.rows(share.start, share.stop), loss).loss)
        engine.optim_step()
    name = f"at{engine.step}"
    engine.save(folder / name, {"place": name}).wait()
    return losses, everything(engine)


def everything(engine):
    """All weights and optimiser state, copied."""
    state = {k: oracle.full(v) for k, v in engine.optimizer.state_dict().items()}
    return {**engine.full_state_dict(), **state}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_resume_is_bit_exact(tmp_path, kind):
    run = base_run(**{"optim.kind": kind})
    straight, end = train_some(run, tmp_path / "a", 4, None)
    first, _ = train_some(run, tmp_path / "b", 2, None)
    second, resumed = train_some(run, tmp_path / "b", 2, "at2")
    assert first + second == straight
    assert all(torch.equal(end[name], resumed[name]) for name in end)


def test_checkpoint_of_four_ranks_goes_on_on_two_and_one(tmp_path):
    run = base_run(**{"layout.reshard_after_forward": "always"})
    straight, end = train_some(run, tmp_path / "a", 3, None)
    losses = run_ranks(train_some, 4, run, tmp_path / "b", 1, None)[0][0]
    losses += run_ranks(train_some, 2, run, tmp_path / "b", 1, "at1")[0][0]
    last, resumed = train_some(run, tmp_path / "b", 1, "at2")
    assert losses + last == pytest.approx(straight, rel=1e-9)
    for name in end:
        torch.testing.assert_close(resumed[name], end[name], rtol=0, atol=1e-9)


def test_checkpoint_of_another_architecture_is_refused(tmp_path):
    train_some(base_run(), tmp_path, 1, None)
    with pytest.raises(CheckpointError, match="num_layers"):
        Engine(base_run(**{"model.num_layers": 1})).load(tmp_path / "at1")


def test_guard_state_is_in_the_checkpoint(tmp_path):
    run = base_run()
    train_some(run, tmp_path, 3, None)
    engine = Engine(run)
    engine.load(tmp_path / "at3")
    assert engine.guard.state() == json.loads(json.dumps(engine.guard.state()))
    fresh = Engine(run)
    assert engine.guard.state() != fresh.guard.state()


def test_weights_are_loaded_strictly():
    engine = Engine(base_run())
    state = engine.full_state_dict()
    missing = dict(list(state.items())[:-1])
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        engine.load_weights(missing.items())
    with pytest.raises(CheckpointError, match="surplus"):
        engine.load_weights({**state, "surplus": torch.zeros(1)}.items())
    with pytest.raises(CheckpointError, match="shape"):
        engine.load_weights({**state, "norm.weight": torch.zeros(3)}.items())


def test_step_without_gradients_is_refused():
    with pytest.raises(TrainingError, match="forward_backward"):
        Engine(base_run()).optim_step()


def test_concat_and_rows_are_inverse():
    batch = global_batch()
    again = concat([batch.rows(0, 3), batch.rows(3, 7)])
    assert torch.equal(again.tokens_BT, batch.tokens_BT)
    assert again.sample_ids == batch.sample_ids


@pytest.mark.parametrize(("keep", "wanted"), [("always", 0), ("never", 47), ("auto", 0)])
def test_logits_computed_twice_are_counted(keep, wanted):
    run = base_run(**{"loss.keep_logits": keep})
    stats = Engine(run).forward_backward(global_batch(), cross_entropy(run.loss))
    assert stats.num_twice_tokens == wanted
