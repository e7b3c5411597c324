"""Scores, whole rows, shared denominators and frozen engines, on one process and on several."""

import shutil

import pytest
import torch

from stepwell.data.loader import rank_rows
from stepwell.generate import Request, Sampling
from stepwell.models.flops import count_parameters, parameter_shapes
from stepwell.parallel.mesh import init_distributed
from stepwell.train import run_checkpoints
from stepwell.train.engine import Engine
from stepwell.train.forward import forward
from stepwell.train.losses import (
    Loss,
    LossSums,
    cross_entropy,
    document_counts,
    document_index,
    document_sums,
    per_document,
    select,
    token_count,
)
from stepwell.train.start import open_session
from stepwell.train.weights import initial_weights, resolve
from stepwell.types import CheckpointError, ConfigError, TrainingError
from tests.layouts import MODEL
from tests.oracle import assert_same, base_run, full, global_batch
from tests.parallel.ranks import run_ranks
from tests.train.test_layouts import batch

LAYOUTS = [
    {},
    {"layout.cp": 2},
    {"layout.cp": 2, "layout.cp_method": "ulysses"},
    {"layout.tp": 2},
    {"layout.pp": 2, "layout.pp_layers": (2, 2)},
    {"layout.zero": 1, "train.micro_batch_rows": 3},
]


def squares() -> Loss:
    """Relates all tokens of a document: the square of its score at the last trained token, less
    half its log-probability."""

    def fn(outputs, batch):
        last_BT = last_trained(batch)
        scores_D = document_sums(outputs.scores_BTC[..., 1], batch, last_BT)
        logprobs_D = document_sums(outputs.logprobs_BT, batch, batch.weights_BT)
        counts_D = document_counts(batch)
        value_D = torch.where(counts_D > 0, (scores_D - logprobs_D / 2).square(), 0)
        return LossSums(
            {"docs": value_D.sum()}, {"value": (value_D.detach().sum(), (counts_D > 0).sum())}
        )

    def count(batch):
        return {"docs": float((document_counts(batch) > 0).sum())}

    return Loss(frozenset({"scores", "logprobs"}), count, fn, whole_rows=True)


def last_trained(batch):
    """1 on each document's last token with a weight."""
    index_BT, num_docs = document_index(batch)
    places_BT = torch.arange(index_BT.numel(), device=index_BT.device).view_as(index_BT)
    places_BT = torch.where(batch.weights_BT != 0, places_BT, -1)
    last_D = torch.full((num_docs + 1,), -1, device=index_BT.device)
    last_D = last_D.scatter_reduce(0, index_BT.flatten(), places_BT.flatten(), "amax")
    return (places_BT == last_D[index_BT]).float() * (batch.weights_BT != 0)


def run_of(**overrides):
    """Both heads; with three labels, which no method has beside a head for next tokens."""
    run = base_run(**{**MODEL, "model.head": "both", "method.kind": "ppo",
                      "method.critic": "shared", "method.max_new_tokens": 8,
                      **overrides})  # fmt: skip
    return run.model_copy(update={"model": run.model.model_copy(update={"num_labels": 3})})


def step(engine, rows, denominators=None):
    stats = engine.forward_backward(rows, squares(), denominators=denominators)
    found = {name: full(p.grad) for name, p in engine.named_parameters()}
    return found | {
        "loss": torch.tensor(stats.loss),
        "value": torch.tensor(stats.metrics["value"]),
    }


def each(layouts):
    found = []
    for overrides in layouts:
        run = run_of(**overrides)
        mesh = init_distributed(run.layout)
        engine = Engine(run, mesh=mesh)
        share = rank_rows(batch().num_rows, mesh.data_rank, mesh.data_world)
        mine = batch().rows(share.start, share.stop)
        scores = engine.scores(mine)
        found.append((step(engine, mine), scores, (share.start, share.stop)))
    return found


def test_a_loss_over_whole_documents_is_the_same_under_every_layout():
    alone = Engine(run_of())
    scores = alone.scores(batch())
    wanted = step(alone, batch())
    assert wanted["score.weight"].abs().max() > 1e-3
    for rank in run_ranks(each, 2, LAYOUTS, timeout_s=120):
        for overrides, (found, mine, (start, stop)) in zip(LAYOUTS, rank, strict=True):
            assert set(found) <= set(wanted)
            assert_same(found, {k: wanted[k] for k in found}, 1e-9, str(overrides))
            torch.testing.assert_close(mine, scores[start:stop], atol=1e-6, rtol=1e-5)


def test_a_score_is_the_last_hidden_state_times_its_weight():
    engine = Engine(run_of())
    rows = global_batch()
    needs = frozenset({"hidden"})
    outputs = forward(engine.decoder, None, rows, engine.run, engine.mesh, needs, 1.0)
    weight_CD = dict(engine.named_parameters())["score.weight"]
    wanted = torch.where(rows.weights_BT[..., None] != 0, outputs.hidden_BTD @ weight_CD.t(), 0)
    torch.testing.assert_close(engine.scores(rows), wanted.float().detach())
    assert engine.scores(rows).abs().max() > 0.01


def test_documents_are_summed_and_read_by_their_number():
    rows = global_batch()
    index_BT, num_docs = document_index(rows)
    naive = {}
    for b in range(rows.num_rows):
        for t in range(rows.tokens_BT.shape[1]):
            if rows.docs_BT[b, t] >= 0:
                naive.setdefault((b, int(rows.docs_BT[b, t])), []).append((b, t))
    assert num_docs == len(naive)
    values_BT = torch.randn(rows.tokens_BT.shape, dtype=torch.float64)
    values_BT[rows.docs_BT < 0] = torch.nan  # padding stays out
    sums = [sum(values_BT[b, t].item() for b, t in naive[key]) for key in sorted(naive)]
    wanted = torch.tensor(sums, dtype=torch.float64)
    torch.testing.assert_close(document_sums(values_BT, rows), wanted)
    stream_BT = torch.where(rows.docs_BT >= 0, index_BT * 10.0, 7.0)
    assert per_document(stream_BT, rows).tolist() == [10.0 * i for i in range(num_docs)]


def test_parts_of_a_batch_share_its_denominators():
    """Half the sum over two halves' gradients is the whole's gradient, when each is given half the
    denominator of the whole."""
    run = run_of(**{"optim.clip_norm": 0.0})
    whole = step(Engine(run), batch())
    engine = Engine(run)
    half = {k: v / 2 for k, v in engine.count(batch(), squares()).items()}
    parts = []
    for rows in (batch().rows(0, 3), batch().rows(3, 8)):
        parts.append(step(engine, rows, half))
        engine.drop_gradients()
    for name in whole:
        if name != "value":
            mean = (parts[0][name] + parts[1][name]) / 2
            torch.testing.assert_close(mean, whole[name], atol=1e-12, rtol=1e-9)


def test_a_frozen_engine_holds_two_bytes_a_parameter_and_trains_nothing():
    run = base_run(**{"precision.compute": "bf16", "precision.param": "fp32",
                      "precision.reduce": "fp32"})  # fmt: skip
    engine, frozen = Engine(run), Engine(run, frozen=True)
    num_bytes = sum(p.numel() * p.element_size() for _, p in frozen.named_parameters())
    assert num_bytes == 2 * count_parameters(run.model).total
    torch.testing.assert_close(
        frozen.logprobs(global_batch()), engine.logprobs(global_batch()), atol=1e-6, rtol=0
    )
    assert not any(p.requires_grad for _, p in frozen.named_parameters())
    with pytest.raises(TrainingError, match="no optimiser"):
        frozen.optimizer  # noqa: B018


def test_a_reward_model_has_no_head_for_tokens_and_cannot_sample():
    run = base_run(**{"method.kind": "reward", "model.tied": False})
    assert run.model.head == "score"
    shapes = parameter_shapes(run.model)
    assert "head.weight" not in shapes
    assert shapes["score.weight"] == (1, run.model.d_model)
    engine = Engine(run)
    with pytest.raises(ValueError, match="has no"):
        engine.forward_backward(global_batch(), cross_entropy(run.loss))
    with pytest.raises(ConfigError, match="nothing to sample"):
        engine.generate([Request(0, (1, 2))], Sampling())


def test_a_method_and_its_head_fit():
    with pytest.raises(ConfigError, match="leave it out"):
        base_run(**{"method.kind": "reward", "model.head": "lm"})
    with pytest.raises(ConfigError, match="leave it out"):
        base_run(**{"model.head": "score"})
    assert base_run(**{"method.kind": "ppo", "method.max_new_tokens": 8}).model.head == "lm"


def weights_of(run, seed):
    weights = initial_weights(run.model, seed)
    assert weights is not None
    return dict(weights)


def test_a_reward_model_starts_from_a_language_model_with_a_drawn_score(tmp_path):
    lm = Engine(base_run(**{"model.tied": False}))
    lm.save(tmp_path / "lm", {}).wait()
    run = resolve(base_run(**{"method.kind": "reward", "model.tied": False,
                              "method.objective": "classification",
                              "train.seed": 9,
                              "model.num_labels": 2,
                              "model.init": str(tmp_path / "lm")}))  # fmt: skip
    drawn = weights_of(run, 9)
    assert drawn["score.weight"].std() > 0
    assert not torch.equal(drawn["score.weight"], weights_of(run, 10)["score.weight"])
    engine = Engine(run, drawn.items())
    for name, value in engine.iter_state():
        if name != "score.weight":
            torch.testing.assert_close(value, lm.full_state_dict()[name])
    engine.save(tmp_path / "rm", {}).wait()
    again = resolve(base_run(**{"method.kind": "reward", "method.objective": "classification",
                                "model.init": str(tmp_path / "rm"),
                                "model.tied": False}))  # fmt: skip
    assert again.model.num_labels == 2
    kept = weights_of(again, 11)
    assert torch.equal(kept["score.weight"], engine.full_state_dict()["score.weight"])
    with pytest.raises(CheckpointError, match="gives scores only"):
        initial_weights(lm.run.model.model_copy(update={"init": str(tmp_path / "rm")}))


def test_an_engine_trained_along_is_saved_and_goes_on_with_the_run(tmp_path):
    def runs():
        common = {
            "dir": str(tmp_path / "run"),
            "train.steps": 4,
            "checkpoint.every_steps": 1,
            **{f"precision.{key}": "fp32" for key in ("compute", "param", "reduce")},
        }
        return base_run(**common), base_run(**{**common, "method.kind": "reward", "train.seed": 4})

    def train(until):
        run, critic = runs()
        with open_session(run, console=False, others={"critic": (critic, None)}) as session:
            other = session.others["critic"]
            start = session.engine.step, other.step
            while session.engine.step < until:
                other.forward_backward(global_batch(), score_loss())
                other.optim_step()
                session.step(global_batch(), cross_entropy(run.loss))
                session.after_step({})
            return start, other.full_state_dict()

    def score_loss():
        def fn(outputs, batch):
            return LossSums(
                {"tokens": select(outputs.scores_BTC[..., 0], batch.weights_BT).sum()}, {}
            )

        return Loss(frozenset({"scores"}), token_count, fn)

    assert train(2)[0] == (0, 0)
    start, resumed = train(4)
    assert start == (2, 2)
    shutil.rmtree(tmp_path / "run")
    _, straight = train(4)
    for name in straight:
        assert torch.equal(resumed[name], straight[name]), name
    steps = run_checkpoints.steps_of(tmp_path / "run")
    assert run_checkpoints.steps_of(tmp_path / "run" / "critic") == steps
