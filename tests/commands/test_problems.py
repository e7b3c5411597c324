"""`stepwell problems`: its files are those that sft, grpo and eval read."""

import json

import pytest

from stepwell.cli import main
from stepwell.types import ConfigError


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_three_files(tmp_path, capsys):
    words = ("problems", "chain-sum", "--sft", "30", "--prompts", "20", "--heldout", "10")
    assert main([*words, "--out", str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"sft": 30, "prompts": 20, "heldout": 10}
    assert set(lines(tmp_path / "a/sft.jsonl")[0]) >= {"prompt", "completion", "answer"}
    assert set(lines(tmp_path / "a/heldout.jsonl")[0]) == {"prompt", "answer", "num_terms"}
    assert main([*words, "-o", str(tmp_path / "b"), "--seed", "1"]) == 0
    assert "heldout 10 rows" in capsys.readouterr().out
    assert lines(tmp_path / "a/sft.jsonl") != lines(tmp_path / "b/sft.jsonl")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sums",), "unknown problems 'sums'"),
        (("gym:",), "unknown problems 'gym:'"),
        (("gym:gcd", "--worked", "0.5"), "--worked belongs to chain-sum"),
        (("chain-sum", "--sft", "-1"), "--sft -1 must be at least 0"),
        (("chain-sum", "--terms", "2", "2", "--sft", "90", "--prompts", "0"), "found only"),
    ],
)
def test_what_cannot_be_is_refused(words, said, tmp_path, capsys):
    assert main(["problems", *words, "--out", str(tmp_path / "x")]) == ConfigError.exit_code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
