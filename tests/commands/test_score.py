"""`stepwell score`, and `stepwell export` of reward models."""

import json
import os
from pathlib import Path

import pytest
import torch
from tests import runs
from tests.reward_rows import pair_rows, run_of, settings, step_rows, usable_rows
from tests.runs import words, write_rows

from stepwell.cli import main
from stepwell.models.hf_reward import NOTES
from stepwell.parallel.mesh import Mesh
from stepwell.posttrain.reward_model.model import open_scorer
from stepwell.posttrain.reward_model.prm import aggregate
from stepwell.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
ALONE = Mesh(1, 0, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Runs `rm` of pairs and `prm` of steps, of a few steps each."""
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    for name, rows in (("pairs", pair_rows), ("steps", step_rows)):
        write_rows(Path(f"{name}.jsonl"), rows(0, 40))
    held = {"data.heldout_path": "pairs.jsonl", "train.eval_every": 8, "train.steps": 8}
    assert main(words("reward", settings("rm", **held))) == 0
    steps = {"method.objective": "process", "train.steps": 3}
    assert main(words("reward", settings("prm", "steps", **steps))) == 0
    yield folder
    os.chdir(before)


def score(*arguments: str) -> list[dict]:
    assert main(["score", *arguments, "--dtype", "fp32", "--out", "scored.jsonl"]) == 0
    return [json.loads(line) for line in Path("scored.jsonl").read_text().splitlines()]


def test_pairs_have_both_scores_and_a_summary(world, capsys):
    capsys.readouterr()
    rows = score("rm", "pairs.jsonl", "--json")
    summary = json.loads(capsys.readouterr().out)
    tokenizer = Tokenizer.load("tokenizer")
    pairs, _ = usable_rows(run_of("x"), "pairs.jsonl", tokenizer)
    scorer = open_scorer(["rm"], ALONE, 64, compute="fp32")
    wanted = scorer.score([pair.rejected[0] for pair in pairs]).tolist()
    assert [row["score_rejected"] for row in rows] == pytest.approx(wanted, abs=1e-5)
    for row, given in zip(rows, pair_rows(0, 40), strict=True):
        assert given.items() <= row.items()
        gap = row["score_chosen"] - row["score_rejected"]
        assert row["score_margin"] == pytest.approx(gap, abs=1e-6)
    right = sum(row["score_margin"] > 0 for row in rows) / 40
    assert summary["accuracy"] == pytest.approx(right)
    assert summary["interval"][0] <= right <= summary["interval"][1]
    assert (summary["rows"], summary["scored"], summary["dropped"]) == (40, 40, {})
    assert (summary["temperature"] is None) == ("no_temperature" in summary)


def test_answers_and_rows_that_cannot_be_scored(world, capsys):
    answer = {"prompt": "1+2=", "completion": "3", "more": [1]}
    chat = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
    write_rows(Path("mixed.jsonl"), [answer, {"prompt": "1"}, chat, answer | {"more": 2}])
    first, broken, second, third = score("rm,rm", "mixed.jsonl", "--aggregate", "min")
    assert first["score"] == third["score"] != second["score"]
    assert first["disagreement"] == 0
    assert (first["more"], third["more"]) == ([1], 2)
    assert "score" not in broken
    assert "dropped" in broken
    assert "3 rows scored, 1 " in capsys.readouterr().err
    # A template's line end after the answer is not read: the answer's own last token is.
    tokenizer = Tokenizer.load("tokenizer")
    scorer = open_scorer(["rm", "rm"], ALONE, 64, compute="fp32")
    from stepwell.data.chat import render_chat

    ids, mask = render_chat(tokenizer, chat["messages"])
    last = max(i for i, trained in enumerate(mask) if trained)
    assert last < len(ids)
    found = scorer.score([ids[: last + 1]]).item()
    assert second["score"] == pytest.approx(found, abs=1e-5)
    long = {"prompt": "1+2=" * 40, "completion": "3"}
    write_rows(Path("mixed.jsonl"), [long])
    (row,) = score("rm", "mixed.jsonl", "--seq-len", "16")
    assert row["truncated"]
    (row,) = score("rm", "mixed.jsonl")
    assert "truncated" not in row


@pytest.mark.parametrize("how", ["product", "min", "last", "mean"])
def test_steps_are_scored_and_aggregated(world, how):
    row = {"prompt": "1=", "completions": ["a is", "b sum", "c"]}
    split = {"prompt": "1=", "completion": "a is\nb sum\nc"}
    write_rows(Path("stepped.jsonl"), [row, split, {"prompt": "1=", "completion": " "}])
    first, second, blank = score("prm", "stepped.jsonl", "--steps", how)
    assert len(first["step_scores"]) == 3
    assert first["step_scores"] == pytest.approx(second["step_scores"], abs=1e-6)
    assert first["score"] == pytest.approx(aggregate(first["step_scores"], how))  # type: ignore
    assert blank["dropped"] == "empty_completion"


def test_an_exported_reward_model_scores_the_same(world):
    before = score("rm", "pairs.jsonl")
    assert main(["export", "rm", "--out", "hf", "--dtype", "fp32"]) == 0
    after = score("hf", "pairs.jsonl")
    for key in ("score_chosen", "score_rejected"):
        assert [r[key] for r in after] == pytest.approx([r[key] for r in before], abs=1e-5)
    model = transformers.AutoModelForSequenceClassification.from_pretrained("hf")
    tokenizer = Tokenizer.load("tokenizer")
    (pair, *_), _ = usable_rows(run_of("x"), "pairs.jsonl", tokenizer)
    with torch.no_grad():
        theirs = model(torch.tensor([pair.chosen[0]])).logits.item()
    assert theirs == pytest.approx(before[0]["score_chosen"], abs=1e-5)
    # What is known of its scores goes along, so that it can be one of several.
    (mine,), (other,) = (open_scorer([name], ALONE, 64).members for name in ("rm", "hf"))
    assert (mine.mean, mine.sd) == (other.mean, other.sd)
    assert mine.sd is not None


def test_a_model_of_steps_is_exported_as_a_token_classifier(world):
    assert main(["export", "prm", "--out", "hf_steps", "--dtype", "fp32"]) == 0
    config = json.loads(Path("hf_steps/config.json").read_text())
    assert config["architectures"] == ["LlamaForTokenClassification"]
    write_rows(Path("stepped.jsonl"), [{"prompt": "1=", "completions": ["a is", "b sum"]}])
    (ours,), (theirs,) = (
        score(name, "stepped.jsonl", "--steps", "min") for name in ("prm", "hf_steps")
    )
    assert ours["step_scores"] == pytest.approx(theirs["step_scores"], abs=1e-5)


def test_what_score_refuses(world, capsys):
    def refused(*arguments: str, code: int) -> str:
        capsys.readouterr()
        assert main(["score", *arguments]) == code
        return capsys.readouterr().err

    assert "is no reward model" in refused(
        "base", "pairs.jsonl", "--tokenizer", "tokenizer", code=2
    )
    assert "name a file with --out" in refused("rm", "pairs.jsonl", "--json", code=2)
    assert "two or more" in refused("rm", "pairs.jsonl", "--aggregate", "min", code=2)
    write_rows(Path("empty.jsonl"), [{"prompt": "1"}])
    message = refused("rm", "empty.jsonl", "--out", "none.jsonl", code=3)
    assert "no row of empty.jsonl can be scored" in message
    assert not Path("none.jsonl").exists()
    assert not list(Path().glob(".none*"))


def test_models_of_different_objectives_are_not_one(world, capsys):
    write_rows(Path("one.jsonl"), [{"prompt": "1+2=", "completion": "3"}])
    for names in ("prm,rm", "rm,prm"):
        assert main(["score", names, "one.jsonl"]) == 2
        error = capsys.readouterr().err
        assert "different objectives" in error
        assert "prm (process)" in error
        assert "rm (bradley-terry)" in error
    score("prm", "one.jsonl")
    assert "--steps min scores the steps" in capsys.readouterr().err
    score("rm", "one.jsonl")
    assert "warning" not in capsys.readouterr().err


def test_scores_that_are_not_standardised_are_told(world, capsys):
    write_rows(Path("one.jsonl"), [{"prompt": "1+2=", "completion": "3"}])
    score("rm,rm", "one.jsonl", "--aggregate", "mean-k-sd")
    assert "standardised" not in capsys.readouterr().err
    assert main(["export", "rm", "--out", "bare", "--dtype", "fp32"]) == 0
    config = json.loads(Path("bare/config.json").read_text())
    assert config.pop(NOTES)["score_sd"] > 0
    Path("bare/config.json").write_text(json.dumps(config))
    score("rm,bare", "one.jsonl", "--aggregate", "mean-k-sd")
    assert "not standardised: no mean and deviation on held-out data are known of bare" in (
        capsys.readouterr().err
    )
