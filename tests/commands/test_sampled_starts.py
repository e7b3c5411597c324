"""`--check` of the methods that sample: the rewards are opened and tried before there is an
engine."""

import json
import os
from pathlib import Path

import pytest
from tests import runs
from tests.runs import settings, words, write_rows

from stepwell.cli import main

METHODS = ("grpo", "ppo", "online-dpo")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    pays = (
        "def f(prompts, completions, answer):\n    return [float(len(c) > 0) for c in completions]"
    )
    Path("junk.py").write_text(pays)
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in (1, 2, 3) for b in (4, 5, 60)]
    write_rows(Path("sums.jsonl"), sums)
    write_rows(Path("bare.jsonl"), [{"prompt": row["prompt"]} for row in sums])
    yield folder
    os.chdir(before)


def checked(method: str, **values) -> int:
    """`--check --json`; the self-test is on."""
    usual = {"data.path": "sums.jsonl", "data.seq_len": 48, "method.self_test": "true"}
    if method == "ppo":
        usual["method.group_size"] = 1
    return main(
        [*words(method, settings("grpo", "run", **{**usual, **values})), "--check", "--json"]
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_reward_that_tells_right_from_wrong_passes(world, method, capsys):
    assert checked(method, **{"method.verifier": "exact"}) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fault"] is None
    assert not Path("run").exists()


@pytest.mark.parametrize("method", METHODS)
def test_what_a_start_would_refuse_is_refused_before(world, method, capsys):
    for values, code, message in (
        ({"method.verifier": "exakt"}, 2, "did you mean 'exact'"),
        ({"method.verifier": "exact", "data.path": "bare.jsonl"}, 3, "which 9 of 9 rows lack"),
        ({"method.verifier": "python:junk.py:f"}, 2, "to junk"),
    ):
        assert checked(method, **values) == code
        out, err = capsys.readouterr()
        assert message in err
        assert message in json.loads(out)["fault"]
        # A start says the same; nothing is left of it.
        start = {
            "data.path": "sums.jsonl",
            "method.self_test": "true",
            "data.seq_len": 48,
            **values,
        }
        assert main(words(method, settings("grpo", "run", **start))) == code
        assert message in capsys.readouterr().err
        assert not Path("run/run.toml").exists()


def test_without_the_self_test_it_is_not_made(world, capsys):
    off = {"method.verifier": "python:junk.py:f", "method.self_test": "false"}
    assert checked("grpo", **off) == 0
    assert json.loads(capsys.readouterr().out)["fault"] is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"method.verifier": "model:nowhere"},
            "the reward model 'nowhere' is no model: give the folder of a run of `stepwell reward`",
        ),
        ({"method.critic_init": "nowhere"}, "method.critic_init='nowhere' is no model"),
    ],
)
def test_a_folder_without_a_model_is_named_by_what_it_is_for(world, values, message, capsys):
    assert checked("ppo", **values) == 4
    assert message in capsys.readouterr().err


def test_a_reward_model_is_not_opened_and_the_term_beside_it_is_tried(world, capsys):
    model = '{name = "rm", source = "model:base"}'
    for beside, code in (("exact", 0), ("exakt", 2)):
        terms = f'[{model}, {{name = "right", source = "{beside}"}}]'
        assert checked("grpo", **{"method.rewards": terms}) == code
        assert ("did you mean 'exact'" in capsys.readouterr().err) == bool(code)
