"""`stepwell pairs`: what it writes is what the methods read."""

import json
import os
import re
from pathlib import Path

import pytest
from tests import runs

from stepwell.cli import main
from stepwell.config import Run
from stepwell.data.preference import load_pairs
from stepwell.data.sft_data import render_row
from stepwell.eval.items import load_prompts
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.weights import TOKENIZER

DIGIT = "regex:[5-9]"
SHORT = ("--max-new-tokens", "12", "--dtype", "fp32", "--keep-cut", "--seed", "3")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def pairs(*words: str) -> int:
    given = ["pairs", "base", "problems.jsonl", "--tokenizer", "tokenizer", *words]
    return main(given)


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def test_pairs_are_those_that_dpo_reads(world, capsys):
    wanted = ("--rewards", DIGIT, "--num", "4", "--limit", "20", *SHORT)
    assert pairs(*wanted, "-o", "made.jsonl", "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = lines("made.jsonl")
    assert summary["rows"] == len(rows) > 3
    assert summary["prompts"] == 20
    assert summary["rows"] + sum(summary["prompts_without"].values()) == 20
    assert summary["answers"] == 80
    for row in rows:
        assert any(digit in row["chosen"] for digit in "56789")
        assert not any(digit in row["rejected"] for digit in "56789")
        assert (row["score_chosen"], row["score_rejected"], row["margin"]) == (1.0, 0.0, 1.0)
        assert row["answer"] == "x"
    tokenizer = Tokenizer.load("tokenizer")
    asked = {prompt.text: prompt.ids for prompt in load_prompts("problems.jsonl", tokenizer)[0]}
    found, drops = load_pairs("made.jsonl", tokenizer, 256)
    assert drops.total == 0
    assert [pair.prompt_ids for pair in found] == [asked[row["prompt"]] for row in rows]
    # The same seed, other neighbours in a batch: the same file.
    assert pairs(*wanted, "-o", "again.jsonl", "--batch-size", "3") == 0
    assert Path("again.jsonl").read_bytes() == Path("made.jsonl").read_bytes()
    assert "pairs of 20 prompts" in capsys.readouterr().out


def test_right_answers_are_those_that_sft_reads(world, capsys):
    assert pairs("--rewards", DIGIT, "--num", "3", "--sft", *SHORT, "--out", "right.jsonl") == 0
    assert "right.jsonl: " in capsys.readouterr().out
    tokenizer = Tokenizer.load("tokenizer")
    for row in lines("right.jsonl"):
        assert any(digit in row["completion"] for digit in "56789")
        ids, mask = render_row(tokenizer, row)
        assert 0 < sum(mask) < len(ids)


def test_a_reward_model_prefers(world, capsys):
    """Scores are numbers of any size; the larger is chosen, and almost nothing ties."""
    keys = {**runs.MODEL, "model.head": "score", "method.kind": "reward", "train.seed": 5}
    known = {TOKENIZER: Tokenizer.load("tokenizer").fingerprint}
    Engine(Run.parse({}, keys)).save("rm", known).wait()
    wanted = ("--num", "2", "--limit", "6", "--out", "judged.jsonl")
    assert pairs("--rewards", "model:rm", *wanted, *SHORT) == 0
    shown = capsys.readouterr()
    assert "right" not in shown.out, "of learnt scores none is"
    assert "right" not in shown.err
    rows = lines("judged.jsonl")
    assert len(rows) >= 4
    for row in rows:
        assert row["score_chosen"] - row["score_rejected"] == row["margin"] > 0
    low, high = map(float, re.findall(r"\((\S+) to (\S+)\)", shown.out)[0])
    assert low <= min(row["score_rejected"] for row in rows) + 1e-3
    assert high >= max(row["score_chosen"] for row in rows) - 1e-3
    for asked in (["--sft"], ["--pairing", "right-wrong"]):
        words = ("--rewards", "model:rm", *asked, *wanted, *SHORT)
        assert pairs(*words) == 2
        assert "say with --right-at from which one on" in capsys.readouterr().err
        assert pairs(*words, "--right-at", f"{(low + high) / 2}", "--json") == 0
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert 0 < summary["right"] < 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--num", "1"], 2, "--num 1 must be at least 2"),
        (["--num", "0", "--sft"], 2, "--num 0 must be at least 1"),
        (["--temperature", "0"], 2, "greedy answers are all the same"),
        (["--most", "0"], 2, "--most 0 must be at least 1"),
        (["--timeout-s", "0"], 2, "--timeout-s 0 must be above 0"),
        (["--sft", "--pairing", "right-wrong"], 2, "--sft makes none"),
        (["--rewards", "exakt"], 2, "did you mean 'exact'"),
        (["--rewards", "tests"], 3, "which 64 of 64 rows lack"),
        (["--rewards", "regex:.*"], 2, "to junk"),
        (["--limit", "2", "--max-new-tokens", "1"], 3, "no row comes of 16 answers to 2 prompts"),
    ],
)
def test_refusals_leave_no_file(world, words, code, message, capsys):
    given = words if "--rewards" in words else ["--rewards", "exact", *words]
    assert pairs(*given, "--out", "none.jsonl") == code
    assert message in capsys.readouterr().err
    assert not list(Path().glob("*none.jsonl*"))
