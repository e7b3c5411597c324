"""How one's own function is called, whatever it calls its parameters."""

import sys

import pytest

from stepwell.eval.grade import columns_for, required_columns
from stepwell.posttrain.verifiers.python_file import python_function
from stepwell.types import ConfigError


@pytest.fixture
def function(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def made(signature: str):
        file = tmp_path / "mine.py"
        names = "{k: v for k, v in locals().items() if v not in ({}, ())}"
        file.write_text(f"def f({signature}):\n    return {names}\n")
        return python_function(f"{file}:f")

    return made


ROW = {"answer": "7", "other": 1}
BOTH = {"prompts": ["p"], "completions": ["c"]}


@pytest.mark.parametrize(
    ("signature", "seen", "required"),
    [
        ("prompts, completions", BOTH, []),
        ("prompts, completions, answer", {**BOTH, "answer": ["7"]}, ["answer"]),
        ("prompts, completions, /, answer=None", {**BOTH, "answer": ["7"]}, []),
        ("questions, texts, answer", {"questions": ["p"], "texts": ["c"], "answer": ["7"]}, None),
        ("*, prompts, completions, answer", {**BOTH, "answer": ["7"]}, ["answer"]),
        ("*, prompts, completions, **k", {**BOTH, "k": {"answer": ["7"], "other": [1]}}, []),
        ("completions, prompts", BOTH, []),
        ("completions, answer", {"completions": ["c"], "answer": ["7"]}, ["answer"]),
        ("completions, **k", {"completions": ["c"], "k": "all"}, []),
        ("prompts, *, completions", BOTH, []),
        ("prompts, answer, completions", {**BOTH, "answer": ["7"]}, ["answer"]),
        ("**k", {"k": "all"}, []),
        ("*both", {"both": (["p"], ["c"])}, []),
    ],
)
def test_every_way_to_take_prompts_and_completions(function, signature, seen, required):
    verifier = function(signature)
    wanted = {**seen}
    if wanted.get("k") == "all":
        left = {k: v for k, v in BOTH.items() if k not in signature}
        wanted["k"] = {**left, "answer": ["7"], "other": [1]}
    assert verifier(["p"], ["c"], **columns_for(verifier, ROW)) == wanted
    assert required_columns(verifier) == (["answer"] if required is None else required)


def test_columns_named_like_the_first_two_are_left_out(function):
    row = {**ROW, "prompts": 1, "completions": 2}
    verifier = function("*, prompts, completions, **k")
    assert verifier(["p"], ["c"], **columns_for(verifier, row))["completions"] == ["c"]
    verifier = function("texts, answers, completions")
    assert required_columns(verifier) == ["completions"]
    assert verifier(["p"], ["c"], **columns_for(verifier, row))["completions"] == [2]


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("", r"takes \(nothing\), but is called as f\(prompts, completions, \*\*columns\)"),
        ("text", r"takes \(text\)"),
        ("prompts", r"takes \(prompts\)"),
        ("a, b, c, /", "'c' can be given by position only"),
        ("completions, prompts, /", "'completions' can be given by position only"),
    ],
)
def test_what_could_not_be_called_is_refused(function, signature, message):
    with pytest.raises(ConfigError, match=message):
        function(signature)
