"""`--check` of the methods that sample: the rewards are opened and tried before there is an
engine."""

import json
import os
from pathlib import Path

import pytest
from tests import runs
from tests.runs import settings, words, write_rows

from stepwell.cli import main
from stepwell.commands.starts.prompts import prompts_of
from stepwell.commands.training import with_weights
from stepwell.config import Run
from stepwell.posttrain.preference.online_dpo import online_dpo
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.weights import TOKENIZER
from stepwell.types import ConfigError

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
    known = {TOKENIZER: Tokenizer.load("tokenizer").fingerprint}
    kinds = {"rm": "bradley-terry", "steps": "process", "classes": "classification"}
    for name, objective in kinds.items():
        keys = {"method.objective": objective, "model.num_labels": 3 if name == "classes" else 1}
        run = Run.parse({"method": {"kind": "reward"}}, {**runs.MODEL, **keys, "dir": name})
        run.save(Path(name, "run.toml"))
        Engine(run).save(Path(name, "checkpoints", "step-00000001"), known).wait()
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
    model = '{name = "rm", source = "model:rm"}'
    for beside, code in (("exact", 0), ("exakt", 2)):
        terms = f'[{model}, {{name = "right", source = "{beside}"}}]'
        assert checked("grpo", **{"method.rewards": terms}) == code
        assert ("did you mean 'exact'" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("base", "base is no reward model (model.head='lm')"),
        ("rm,steps", "different objectives: rm (bradley-terry), steps (process)"),
        ("classes", "a reward is one number, but classes scores 3 classes"),
    ],
)
def test_models_that_cannot_be_one_reward_are_refused_before(
    world, method, models, message, capsys
):
    values = {"method.verifier": f"model:{models}", "method.self_test": "false"}
    assert checked(method, **values) == 2
    assert message in json.loads(capsys.readouterr().out)["fault"]
    start = {"data.path": "sums.jsonl", "data.seq_len": 48, **values}
    assert main(words(method, settings("grpo", "run", **start))) == 2
    assert message in capsys.readouterr().err
    assert not Path("run").exists(), "no engine was built"


def test_what_a_user_should_know_of_reward_models_is_told(world, capsys):
    for models, warned in (
        ("rm", ""),
        ("rm,rm", "not standardised"),
        ("steps", "scores the last token alone"),
    ):
        values = {"method.verifier": f"model:{models}", "method.self_test": "false"}
        assert checked("grpo", **values) == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        assert [warned in text for text in warnings] == [True] * bool(warned)


@pytest.mark.parametrize("method", METHODS)
def test_rows_without_an_answer_are_left_out_and_counted(world, method, capsys):
    """Nothing could be right there; another dimension may still say something of them."""
    rows = [json.loads(line) for line in Path("sums.jsonl").read_text().splitlines()]
    gaps = [{**row, "answer": answer} for row, answer in zip(rows, (None, "", " \n"), strict=False)]
    write_rows(Path("gaps.jsonl"), [*gaps, *rows])
    write_rows(Path("none.jsonl"), gaps)
    values = {"data.path": "gaps.jsonl", "method.verifier": "exact", "data.seq_len": 48}
    prompts = {"method.prompts_per_step": 10}
    assert checked(method, **values, **prompts) == 2
    assert "there are only 9 prompts" in capsys.readouterr().err
    assert checked(method, **values, **{"method.prompts_per_step": 9}) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    assert checked(method, **{**values, "data.path": "none.jsonl"}) == 3
    assert "null or blank in all 3 rows of none.jsonl" in capsys.readouterr().err
    run = with_weights(Run.parse({"method": {"kind": method}}, settings("grpo", "run", **values)))
    assert prompts_of(run, Tokenizer.load("tokenizer"))[1] == {"no_answer": 3}
    two = '[{name = "a", source = "exact"}, {name = "b", source = "repetition:2"}]'
    both = {"data.path": "gaps.jsonl", "method.rewards": two}
    assert checked(method, **both, **prompts) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert any("'answer' is null or blank in 3 of 12 rows" in text for text in warnings)


@pytest.mark.parametrize(("reward", "warns"), [("exact", True), ("model:rm", False)])
def test_an_alarm_that_nothing_sets_off_is_told(world, reward, warns, capsys):
    for key, value in (("overopt", "stop"), ("overopt_window", 20)):
        assert checked("grpo", **{"method.verifier": reward, f"method.{key}": value}) == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        text = f"method.{key}={value!r} changes nothing"
        assert [text in warning for warning in warnings] == ([True] if warns else [])


def test_a_function_checks_what_the_command_does(world):
    """An environment that cannot be had ends online_dpo() before anything is built."""
    values = {**settings("grpo", "run"), "method.environment": "calculater"}
    run = with_weights(Run.parse({"method": {"kind": "online-dpo"}}, values))
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        online_dpo(run, [], Tokenizer.load("tokenizer"))
    assert not Path("run").exists()


@pytest.mark.parametrize("method", ["sft", "dpo", "reward", *METHODS])
def test_what_is_not_named_is_told_at_once(world, method, capsys):
    """Before a header is printed or a process started."""
    named = {"model.init": "base", "data.path": "sums.jsonl", "data.tokenizer": "tokenizer"}
    for key in named:
        given = {k: v for k, v in named.items() if k != key}
        for more in ([], ["--nproc", "2"]):
            assert main([*words(method, {**given, "dir": "run"}), *more]) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"stepwell: {key} is not set")
            assert len(error.splitlines()) == 1


@pytest.mark.parametrize("method", ["sft", "dpo", "reward"])
def test_a_check_asks_for_the_model_that_a_start_needs(world, method, capsys):
    pairs = [{"prompt": "1+2=", "chosen": "3", "rejected": "4", "completion": "3"}] * 20
    write_rows(Path("pairs.jsonl"), pairs)
    values = {"data.path": "pairs.jsonl", "data.tokenizer": "tokenizer", "dir": "run"}
    for init, code in ({}, 2), ({"model.init": "base"}, 0):
        given = {**values, "model.vocab_size": 320, **init}
        assert main([*words(method, given), "--check", "--json"]) == code
        fault = json.loads(capsys.readouterr().out)["fault"]
        assert (fault is None) == (code == 0)
    Tokenizer.train(["another text " * 9], 280).save("other")
    given = {**values, "model.init": "base", "data.tokenizer": "other"}
    assert main([*words(method, given), "--check", "--json"]) == 2
    assert "trained with another tokenizer" in capsys.readouterr().err
