"""Reward models at work: what they refuse, and that packing and layouts change no score."""

from typing import Any

import pytest
import torch

from stepwell.config import Run
from stepwell.parallel.mesh import Mesh, init_distributed
from stepwell.posttrain.reward_model.model import open_scorer, pack_documents
from stepwell.posttrain.reward_model.rows import ROUND
from stepwell.sections.layout import LayoutConfig
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.weights import TOKENIZER
from stepwell.types import CheckpointError, ConfigError, DataError
from tests.parallel.ranks import run_ranks
from tests.runs import MODEL

ALONE = Mesh(1, 0, 0, torch.device("cpu"))
DOCS = [[5, 6, 7], [8], list(range(10, 60)), [9, 9, 9, 9]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoints of three reward models and of a language model."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer.train(["1+2=3 is the sum"] * 3, 320)
    for seed in range(3):
        values = {**MODEL, "model.init_std": 0.3, "train.seed": seed, "method.kind": "reward"}
        extra: dict[str, Any] = {TOKENIZER: tokenizer.fingerprint}
        if seed < 2:
            extra["metrics"] = {"eval/score_mean": 10.0 * seed, "eval/score_sd": 1.0 + seed}
        Engine(Run.parse({}, values)).save(folder / f"rm{seed}", extra).wait()
    Engine(Run.parse({}, MODEL)).save(folder / "lm", {}).wait()
    return folder, tokenizer


def scorer_of(folder, *names, **more):
    return open_scorer([str(folder / name) for name in names], ALONE, 64, compute="fp32", **more)


def test_packing_changes_no_score(models):
    folder, _ = models
    scorer = scorer_of(folder, "rm0")
    together = scorer.score(DOCS)
    assert together.shape == (4,)
    for i, doc in enumerate(DOCS):
        torch.testing.assert_close(scorer.score([doc])[0], together[i], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scorer.score(DOCS[::-1]).flip(0), together, atol=1e-5, rtol=1e-5)
    assert len({round(x, 3) for x in together.tolist()}) == 4
    assert scorer.score([]).shape == (0,)
    # What follows the place where it is read does not matter, what comes before does.
    (steps,) = scorer.step_scores([DOCS[2]], [[2, 49]])
    (early,) = scorer.step_scores([DOCS[2][:3]], [[2]])
    assert steps[0] == pytest.approx(early[0], abs=1e-6)
    assert steps[1] == pytest.approx(together[2].sigmoid().item(), abs=1e-6)


def test_rows_are_as_short_as_the_documents_allow():
    batch, order = pack_documents([[1, 2], [3]], [[1], [0]], 4096)
    assert batch.tokens_BT.shape == (1, ROUND)
    assert order.tolist() == [0, 1]
    batch, _ = pack_documents([[1] * ROUND, [3]], [[1], [0]], 4096)
    assert batch.tokens_BT.shape == (1, 2 * ROUND)
    assert pack_documents([[1] * 30] * 4, [[29]] * 4, 60)[0].tokens_BT.shape == (2, 60)
    assert pack_documents([[1]], [[0]], 4096, whole_rows=True)[0].tokens_BT.shape == (1, 4096)


def test_several_models_as_one(models):
    folder, _ = models
    alone = torch.stack([scorer_of(folder, f"rm{i}").score(DOCS) for i in range(3)])
    known = scorer_of(folder, "rm0", "rm1", aggregate="min")
    assert known.standardises
    moved = torch.stack([alone[0], (alone[1] - 10) / 2])
    torch.testing.assert_close(known.score(DOCS), moved.amin(0))
    torch.testing.assert_close(known.disagreement(DOCS), moved.std(0))
    unknown = scorer_of(folder, "rm0", "rm1", "rm2", aggregate="mean-k-sd", k=2.0)
    assert not unknown.standardises
    torch.testing.assert_close(unknown.score(DOCS), alone.mean(0) - 2 * alone.std(0))
    ends = [[len(doc) - 1] for doc in DOCS]
    steps = torch.tensor(unknown.step_scores(DOCS, ends))[:, 0]
    chances = alone.sigmoid()
    torch.testing.assert_close(steps, (chances.mean(0) - 2 * chances.std(0)).clamp(0, 1))


def test_what_is_refused(models, tmp_path):
    folder, tokenizer = models
    other = Tokenizer.train(["something else"] * 3, 300)
    assert scorer_of(folder, "rm0", tokenizer=tokenizer).score(DOCS).isfinite().all()
    with pytest.raises(ConfigError, match="ids would mean other tokens"):
        scorer_of(folder, "rm0", tokenizer=other)
    with pytest.raises(ConfigError, match="is no reward model"):
        scorer_of(folder, "lm")
    with pytest.raises(ConfigError, match="two or more"):
        scorer_of(folder, "rm0", aggregate="min")
    with pytest.raises(CheckpointError, match="is no model"):
        open_scorer([str(tmp_path)], ALONE, 64)
    scorer = scorer_of(folder, "rm0")
    assert scorer.score([[1] * 64]).shape == (1,)
    with pytest.raises(DataError, match="raise seq_len to 65"):
        scorer.score([[1] * 65])
    with pytest.raises(DataError, match="document 1 has no token"):
        scorer.score([[1], []])
    assert scorer.step_scores([[1, 2, 3]], [[0, 2]])
    for ends in ([], [0, 3], [-1], [1, 1], [2, 0]):
        with pytest.raises(DataError, match="must ascend"):
            scorer.step_scores([[1, 2, 3]], [ends])
    with pytest.raises(DataError, match="steps of 0"):
        scorer.step_scores([[1]], [])


def scored_by_ranks(folder: str, divided: bool) -> torch.Tensor:
    """Runs in each rank, of which rank 0 has more documents."""
    layout = LayoutConfig()
    mesh = init_distributed(layout)
    scorer = open_scorer([folder], mesh, 64, compute="fp32", layout=layout if divided else None)
    if not divided and mesh.rank == 1:
        return scorer.score([])
    return scorer.score(DOCS if mesh.rank == 0 else DOCS[:1])


def both_ways(folder: str) -> list[torch.Tensor]:
    return [scored_by_ranks(folder, divided) for divided in (False, True)]


def test_ranks_score_alone_or_share_a_divided_model(models):
    folder, _ = models
    wanted = scorer_of(folder, "rm0").score(DOCS)
    first, second = run_ranks(both_ways, 2, str(folder / "rm0"))
    for found in first:
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert second[0].shape == (0,)
    torch.testing.assert_close(second[1], wanted[:1], atol=1e-5, rtol=1e-5)
