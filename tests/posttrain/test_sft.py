"""`stepwell sft` as real processes, and what the loop reads."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from stepwell.cli import main
from stepwell.config import Run
from stepwell.data.loader import packing_report
from stepwell.data.store import TokenStore
from stepwell.metrics import read_events
from stepwell.posttrain.epochs import with_epochs
from stepwell.posttrain.sft import sft
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.weights import known_tokenizer
from stepwell.types import ConfigError, DataError
from tests import runs
from tests.runs import final_weights, finish, killed, measured, settings, words, write_rows


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def test_killed_twice_it_ends_as_if_undisturbed(world):
    """Several epochs, so that a resume lies past an epoch's end."""
    values = {
        "train.steps": 40,
        "checkpoint.every_steps": 9,
        "train.eval_every": 20,
        "data.heldout_path": "heldout.jsonl",
    }
    straight = words("sft", settings("sft", "straight", **values))
    assert finish(straight, world, world / "log")[0] == 0
    broken = words("sft", settings("sft", "broken", **values))
    for num_lines in (14, 31):
        killed(broken, world, world / "log", world / "broken", num_lines)
    assert finish(broken, world, world / "log")[0] == 0
    got, wanted = (measured(world / name) for name in ("broken", "straight"))
    assert got == wanted
    assert [line["step"] for line in got if "train/loss" in line] == list(range(1, 41))
    assert [line["step"] for line in got if "eval/loss" in line] == [20, 40]
    runs.assert_equal(final_weights(world / "broken"), final_weights(world / "straight"))
    code, output = finish(broken, world, world / "log")
    assert code == 0
    assert "nothing to do" in output
    assert measured(world / "broken") == wanted


def test_the_first_sigterm_saves_and_the_same_command_goes_on(world):
    values = {"train.steps": 80, "checkpoint.every_steps": 999}
    command = words("sft", settings("sft", "stopped", **values))
    metrics = world / "stopped" / "metrics.jsonl"
    assert runs.stop_after(command, world, world / "log", metrics, 9, signal.SIGTERM) == 130
    assert "the same command goes on from there" in (world / "log").read_text()
    done = len(measured(world / "stopped"))
    code, output = finish(command, world, world / "log")
    assert code == 0
    assert f"run: 80 steps done, {80 - done} of them now" in output
    assert [line["step"] for line in measured(world / "stopped")] == list(range(1, 81))


def test_epochs_bound_the_steps(world):
    values = settings("sft", "epochs", **{"method.epochs": 2, "train.steps": 1000})
    run, tokenizer = Run.parse({"method": {"kind": "sft"}}, values), Tokenizer.load("tokenizer")
    steps = sft(run, tokenizer)
    (event,) = (e for e in read_events("epochs") if e["event"] == "data")
    assert (event["rows"], event["kept"], event["dropped"]) == (48, 48, {})
    shown = sum(line["train/loss_tokens"] for line in measured(world / "epochs"))
    # The last step may read on into a third epoch.
    assert 2 * event["trained_tokens"] <= shown < 2.5 * event["trained_tokens"]
    assert Run.load("epochs/run.toml").train.steps == steps < 1000
    rows = packing_report(TokenStore.open("epochs/data"), run.data.seq_len)["rows"]
    assert with_epochs(run, rows).train.steps == steps


def test_only_answers_are_trained_and_the_loss_is_theirs(world):
    """The first step's loss is the mean over the answers' tokens under the first weights."""
    values = settings("sft", "masked", **{"train.steps": 1, "precision.compute": "fp32"})
    run, tokenizer = Run.parse({"method": {"kind": "sft"}}, values), Tokenizer.load("tokenizer")
    assert sft(run, tokenizer) == 1
    from stepwell.data.loader import packed_stream
    from stepwell.data.store import TokenStore

    store = TokenStore.open("masked/data", tokenizer)
    batch, _ = next(packed_stream(store, 32, 4, pad_id=tokenizer.pad_id))
    answers = {chr(digit) for digit in b"0123456789"}
    trained = [
        tokenizer.decode([int(t)])
        for t, w in zip(batch.targets_BT.flatten(), batch.weights_BT.flatten(), strict=True)
        if w and int(t) not in tokenizer.stop_ids
    ]
    assert set(trained) <= answers
    lp_BT = Engine(run).logprobs(batch)
    expected = -(lp_BT * batch.weights_BT).sum() / batch.weights_BT.sum()
    assert measured(world / "masked")[0]["train/loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_changed_rows_are_rendered_anew_or_refused(world, capsys):
    write_rows(Path("mine.jsonl"), [{"prompt": f"{i}=", "completion": "7"} for i in range(30)])
    values = settings("sft", "changed", **{"data.path": "mine.jsonl", "train.steps": 2})
    assert main(words("sft", values)) == 0
    assert main([*words("sft", values), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps_done"] == 0
    write_rows(Path("mine.jsonl"), [{"prompt": f"{i}=", "completion": "8"} for i in range(30)])
    assert main(words("sft", values)) == 2
    assert "was trained on rows of another file" in capsys.readouterr().err
    shutil.rmtree("changed/checkpoints")
    os.link("changed/data.origin.json", "origin-before.json")
    before = Path("origin-before.json").read_text()
    assert main(words("sft", values)) == 0
    assert Path("origin-before.json").read_text() == before, "replaced as a whole, not written over"
    tokenizer = Tokenizer.load("tokenizer")
    from stepwell.data.store import TokenStore

    assert "8" in tokenizer.decode(TokenStore.open("changed/data").doc(0).tolist())
    assert main([*words("sft", values), "--fresh"]) == 0


def test_how_rows_are_read_and_masked_is_part_of_a_run(world, capsys):
    turns = [("me", "1+2="), ("you", "3"), ("me", "2+2="), ("you", "4")]
    row = {"dialog": [{"who": who, "says": says} for who, says in turns], "id": 0}
    write_rows(Path("dialogs.jsonl"), [row] * 8)
    names = {"columns.messages": "dialog", "columns.role": "who", "columns.content": "says",
             "roles.user": "me", "roles.assistant": "you"}  # fmt: skip
    values = settings("sft", "named", **{"data.path": "dialogs.jsonl", "train.steps": 1})
    values |= {f"method.{key}": name for key, name in names.items()}
    assert main(words("sft", values)) == 0
    tokenizer = Tokenizer.load("tokenizer")
    from stepwell.data.store import TokenStore

    def trained() -> str:
        store = TokenStore.open("named/data")
        return tokenizer.decode(store.doc(0)[store.doc_mask(0).astype(bool)])

    assert trained() == "3<|end|>4<|end|>"
    values["method.last_turn_only"] = True
    assert main(words("sft", values)) == 2
    assert "was trained on rows of another last_turn_only" in capsys.readouterr().err
    assert main([*words("sft", values), "--fresh"]) == 0
    assert trained() == "4<|end|>"
    values["method.train_on"] = '["user"]'
    assert main([*words("sft", values), "--fresh"]) == 0
    assert trained() == "2+2=<|end|>"


def test_rows_without_anything_to_train_on_are_refused(world, capsys):
    write_rows(Path("asked.jsonl"), [{"messages": [{"role": "user", "content": "1+2="}]}] * 3)
    values = settings("sft", "asked", **{"data.path": "asked.jsonl", "train.steps": 1})
    assert main(words("sft", values)) == 3
    message = capsys.readouterr().err
    assert "3 x mask_all_zeros" in message
    assert "stepwell sft RECIPE --preview" in message
    assert not Path("asked/data").exists()


def test_a_folder_that_is_not_ours_is_left_alone(world):
    (world / "theirs" / "data").mkdir(parents=True)
    (world / "theirs" / "data" / "precious.txt").write_text("x")
    run = Run.parse({"method": {"kind": "sft"}}, settings("sft", "theirs"))
    with pytest.raises(DataError, match="exists"):
        sft(run, Tokenizer.load("tokenizer"))
    assert (world / "theirs" / "data" / "precious.txt").read_text() == "x"


def test_what_cannot_be_trained_on_is_refused(world):
    tokenizer = Tokenizer.load("tokenizer")
    values = settings("sft", "refused")
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        sft(Run.parse({"method": {"kind": "sft"}}, {**values, "data.path": "none"}), tokenizer)
    small = {**values, "model.vocab_size": 100}
    with pytest.raises(ConfigError, match=r"model\.vocab_size=100"):
        sft(Run.parse({"method": {"kind": "sft"}}, small), tokenizer)
    with pytest.raises(DataError, match=r"cannot read nowhere\.jsonl"):
        sft(
            Run.parse({"method": {"kind": "sft"}}, {**values, "data.path": "nowhere.jsonl"}),
            tokenizer,
        )
    write_rows(Path("bad.jsonl"), [{"prompt": "a"}])
    with pytest.raises(DataError, match="missing_column"):
        sft(Run.parse({"method": {"kind": "sft"}}, {**values, "data.path": "bad.jsonl"}), tokenizer)
    assert not Path("refused/data").exists()


def test_a_model_of_its_own_tokenizer_is_needed(world):
    tokenizer = Tokenizer.load("tokenizer")
    values = settings("sft", "refused")
    without = Run.parse({"method": {"kind": "sft"}}, {**values, "model.init": "none"})
    with pytest.raises(ConfigError, match=r"model\.init is not set, and sft needs a model"):
        sft(without, tokenizer)
    other = Tokenizer.train(["something else entirely " * 9], 300)
    with pytest.raises(ConfigError, match="tokenizer tokenizer .* does not fit the model base"):
        sft(Run.parse({"method": {"kind": "sft"}}, values), other)
    assert not Path("refused").exists()
    given = Run.parse(without.model_dump(), {"dir": "given", "train.steps": 1})
    assert sft(given, tokenizer, Engine(given).iter_state()) == 1
    assert known_tokenizer("given") == tokenizer.fingerprint


def test_rows_longer_than_a_row_of_the_batch_are_counted(world, capsys):
    prompts = {"1+1=": "2", "1+1=" * 40: "2", "2+2=": "4" * 60}
    write_rows(Path("long.jsonl"), [{"prompt": p, "completion": c} for p, c in prompts.items()])
    values = settings("sft", "long", **{"data.path": "long.jsonl", "train.steps": 1})
    assert main(words("sft", values)) == 0
    (event,) = (e for e in read_events("long") if e["event"] == "data")
    assert (event["rows"], event["kept"], event["truncated"]) == (3, 2, 1)
    assert event["dropped"] == {"too_long": 1}
    from stepwell.data.store import TokenStore

    store = TokenStore.open("long/data")
    reached = sum(int(store.doc_mask(i)[1:32].sum()) for i in range(3))
    assert event["trained_tokens"] == reached < store.trained_tokens(1000).sum()
    # None at all: the user's file and the needed value are named, and nothing stays behind.
    write_rows(Path("longer.jsonl"), [{"prompt": "1+1=" * 40, "completion": "2"}])
    values |= {"data.path": "longer.jsonl", "dir": "longer"}
    assert main(words("sft", values)) == 3
    message = capsys.readouterr().err
    needed = int(store.doc_lengths()[1])
    assert "of longer.jsonl are too long: within data.seq_len=32 tokens" in message
    assert f"raise data.seq_len to {needed}," in message
    assert not Path("longer").exists()
    assert main(words("sft", {**values, "data.seq_len": needed})) == 0
    # Started anew (as after a kill before the first checkpoint), the counts are told again.
    shutil.rmtree("longer/checkpoints")
    assert main(words("sft", {**values, "data.seq_len": needed})) == 0
    (event,) = (e for e in read_events("longer") if e["event"] == "data")
    assert (event["rows"], event["kept"], event["dropped"]) == (1, 1, {})
    # Rendered before, and then cut shorter.
    shutil.rmtree("longer/checkpoints")
    assert main(words("sft", {**values, "data.seq_len": 16})) == 3
    assert "raise data.seq_len to" in capsys.readouterr().err
