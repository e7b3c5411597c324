"""What `stepwell pretrain | sft | grpo` say about a command line, a folder and their data."""

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests import runs
from tests.runs import settings, words, write_rows

from stepwell.cli import main
from stepwell.commands.evaluate import result_text
from stepwell.commands.inputs import counted
from stepwell.commands.training import clear_folder
from stepwell.metrics import read_events
from stepwell.tokenizer import Tokenizer
from stepwell.train.lock import LOCK, folder_lock


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def test_one_is_no_plural(world, capsys):
    assert [counted(n, "step") for n in (0, 1, 2, 1000)] == [
        "0 steps", "1 step", "2 steps", "1,000 steps",
    ]  # fmt: skip
    assert main(words("pretrain", settings("pretrain", "once", **{"train.steps": 1}))) == 0
    assert "run: 1 step done; " in capsys.readouterr().out
    result = {"accuracy": 1.0, "interval": (1.0, 1.0), "items": 1}
    assert result_text(result) == "100.0 % (100.0 to 100.0; 1 item)"


def test_the_closing_line_of_a_run_that_went_on(world, capsys):
    more = {"train.steps": 5, "checkpoint.every_steps": 2, "checkpoint.keep_last": 9}
    values = settings("pretrain", "again", **more)
    assert main(words("pretrain", values)) == 0
    assert "run: 5 steps done; everything is in again" in capsys.readouterr().out
    for step in (4, 5):
        shutil.rmtree(f"again/checkpoints/step-{step:08}")
    assert main(words("pretrain", values)) == 0
    assert "run: 5 steps done, 3 of them now; everything is in again" in capsys.readouterr().out
    assert main([*words("pretrain", {**values, "dir": "json"}), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5


@pytest.mark.parametrize("number", ["0", "-1"])
@pytest.mark.parametrize("command", ["pretrain", "sft", "grpo", "replay run --step 1"])
def test_no_ranks_are_no_run(command, number, capsys):
    assert main([*command.split(), "--nproc", number]) == 2
    assert f"--nproc {number} must be at least 1" in capsys.readouterr().err


# Folders


def test_fresh_respects_a_run_that_is_going_on(world, capsys):
    command = words("pretrain", settings("pretrain", "busy", **{"train.steps": 1}))
    assert main(command) == 0
    with folder_lock("busy"):
        assert main([*command, "--fresh"]) == 2
    assert f"a run is going on in busy (pid {os.getpid()} on " in capsys.readouterr().err
    assert list(Path("busy/checkpoints").iterdir())
    assert main([*command, "--fresh"]) == 0


def test_fresh_takes_what_a_failed_start_or_a_kill_left(tmp_path):
    (tmp_path / LOCK).write_text("pid 1")
    clear_folder(tmp_path)
    for folder in ("data", "traces", "tensorboard"):
        (tmp_path / folder).mkdir()
    traces = ("traces/step-3-rank-0.json.gz", "wandb_id")
    for name in ("data.origin.json", "data/manifest.json", *traces, "notes.txt"):
        (tmp_path / name).write_text("{}")
    clear_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("more", [[], ["--fresh"], ["--nproc", "1"]])
def test_a_file_is_no_folder(world, capfd, more):
    Path("file").write_text("x")
    assert main([*words("pretrain", settings("pretrain", "file")), *more]) == 2
    assert capfd.readouterr().err.count("dir='file' cannot be a run's folder: file is a file") == 1
    assert Path("file").read_text() == "x"


@contextmanager
def powerless():
    """Root may write everywhere, so it becomes another user (whose imports are done before)."""
    if os.geteuid():
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_read_only_folders(world, capsys):
    values = settings("pretrain", "done", **{"train.steps": 1})
    command = words("pretrain", values)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        shutil.copytree(world / "store", place / "store")
        os.chdir(place)
        try:
            assert main(command) == main(command) == 0
            for folder in (place / "done", place):
                folder.chmod(0o555)
            capsys.readouterr()
            with powerless():
                assert main(command) == 0
                assert "finished before (done); nothing to do" in capsys.readouterr().out
                for changed in (
                    words("pretrain", {**values, "optim.lr": 0.5}),
                    words("pretrain", {**values, "dir": "new"}),
                    [*command, "--fresh"],
                ):
                    assert main(changed) == 2
                    message = capsys.readouterr().err
                    assert "cannot be a run's folder: permission denied" in message
        finally:
            os.chdir(world)
            for folder in (place, place / "done"):
                folder.chmod(0o755)
        left = sorted(path.name for path in (place / "done").iterdir())
        assert left == ["checkpoints", "events.jsonl", "metrics.jsonl", "run.toml"]


# Prompts, verifiers and tokenizers


def test_left_out_prompts_are_noted(world, capsys):
    rows = [{"prompt": p, "answer": "x"} for p in ("1+1=", "2+2=", "1+1=" * 40)]
    write_rows(Path("some.jsonl"), [*rows, {"answer": "x"}])
    values = settings("grpo", "noted", **{"data.path": "some.jsonl", "train.steps": 1})
    assert main(words("grpo", values)) == 0
    assert "left out 2 prompts (1 bad_prompt, 1 too_long)" in capsys.readouterr().err
    (event,) = (e for e in read_events("noted") if e["event"] == "data")
    assert (event["rows"], event["kept"]) == (4, 2)
    assert event["dropped"] == {"bad_prompt": 1, "too_long": 1}


def test_prompts_that_are_all_too_long_have_a_message_of_their_own(world, capsys):
    write_rows(Path("long.jsonl"), [{"prompt": "1+1=" * 40, "answer": "x"}])
    assert main(words("grpo", settings("grpo", "long", **{"data.path": "long.jsonl"}))) == 3
    message = capsys.readouterr().err
    num_ids = len(Tokenizer.load("tokenizer").encode("1+1=" * 40, special=False))
    assert f"all 1 prompt of long.jsonl are too long: the shortest has {num_ids} tok" in message
    assert "data.seq_len=32 less method.max_new_tokens=6 leaves 26" in message
    assert f"raise data.seq_len to {num_ids + 6}" in message
    assert not Path("long").exists()


def test_a_column_that_the_verifier_needs_is_asked_for_first(world, capsys):
    write_rows(Path("named.jsonl"), [{"prompt": "1+1=", "answr": "2", "id": 1}] * 4)
    values = settings("grpo", "named", **{"data.path": "named.jsonl"})
    values["method.verifier"] = "exact"
    assert main(words("grpo", values)) == 3
    message = capsys.readouterr().err
    assert "needs the column 'answer', which 4 of 4 rows lack (did you mean 'answr'?)" in message
    assert "'answr', 'id'" in message
    assert not Path("named").exists()
    command = ["eval", "base", "--tokenizer", "tokenizer", "--prompts", "named.jsonl"]
    assert main(command) == 3
    assert "needs the column 'answer'" in capsys.readouterr().err


def test_a_verifier_that_junk_satisfies_is_refused(world, capsys):
    values = settings("grpo", "any", **{"method.self_test": "true"})
    assert main(words("grpo", values)) == 2
    message = capsys.readouterr().err
    assert "source 'regex:[a-m]') gives 1 to junk (only the marker: 'answer:')" in message
    assert not (Path("any") / "metrics.jsonl").exists()


def test_a_verifier_that_always_fails_is_an_error(world, capsys):
    """The scorer of reasoning-gym raises for an entry that is none of its own."""
    write_rows(Path("junk.jsonl"), [{"prompt": "1+1=", "entry": 5}] * 4)
    values = settings("grpo", "junk", **{"data.path": "junk.jsonl"})
    values["method.verifier"] = "gym:gcd"
    assert main(words("grpo", values)) == 5
    message = capsys.readouterr().err
    assert "the verifier failed on every one of the 6 answers of the first rollout" in message
    assert "the first failure is error: TypeError" in message
    command = ["eval", "base", "--tokenizer", "tokenizer", "--prompts", "junk.jsonl"]
    command += ["--verifier", "gym:gcd", "--max-new-tokens", "4", "--json"]
    assert main(command) == 3
    captured = capsys.readouterr()
    assert "none of the 4 answers could be scored; the first: error: TypeError" in captured.err
    assert captured.out == ""


def test_another_tokenizer_than_the_models_is_refused(world, capsys):
    Tokenizer.train(["something else entirely " * 9], 300).save("other")
    for method in ("sft", "grpo"):
        values = settings(method, "mixed", **{"data.tokenizer": "other"})
        assert main(words(method, values)) == 2
        assert "tokenizer other (fingerprint" in (message := capsys.readouterr().err)
        assert "does not fit the model base" in message
        none = {**values, "data.tokenizer": "tokenizer", "model.init": "none"}
        assert main(words(method, none)) == 2
        assert f"model.init is not set, and {method} needs" in capsys.readouterr().err
    assert not Path("mixed").exists()
    assert main(["eval", "base", "--tokenizer", "other", "--text", "chat.jsonl"]) == 2
    assert "the tokenizer other (fingerprint" in capsys.readouterr().err


def test_every_stage_hands_its_tokenizer_on(world):
    fingerprint = Tokenizer.load("tokenizer").fingerprint
    for method in ("pretrain", "sft", "grpo"):
        folder = Path(f"on-{method}")
        assert main(words(method, settings(method, str(folder), **{"train.steps": 1}))) == 0
        state = json.loads((folder / "checkpoints/step-00000001/state.json").read_text())
        assert state["extra"]["tokenizer"] == fingerprint
