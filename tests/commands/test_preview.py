import io
import json

import pytest
from rich.console import Console
from tests.runs import MODEL

from stepwell.cli import main
from stepwell.commands.preview import as_values, look, print_preview, take_option
from stepwell.config import Run
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.types import ConfigError

CHAT = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3"}]
ROWS = [
    {"messages": CHAT},
    {"question": "1"},
    {"prompt": "1 + 2 =", "completion": " 3\x1b[31m"},
    {"messages": CHAT[:1]},
    {"messages": CHAT * 3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preview")
    Tokenizer.train(["how much is 1 + 2 then? 3. " * 20], 300).save(folder / "tokenizer")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "bad.jsonl").write_text(json.dumps(ROWS[3]))
    return folder


def words(folder, *more, rows="rows.jsonl"):
    return ["sft", "--preview", *more, "--data.path", str(folder / rows), "--data.tokenizer",
            str(folder / "tokenizer"), "--dir", str(folder / "run")]  # fmt: skip


def run_of(folder, **values) -> Run:
    paths = {"data.path": str(folder / "rows.jsonl"), "data.tokenizer": str(folder / "tokenizer")}
    return Run.parse({"method": {"kind": "sft"}}, {**paths, **values})


def test_json_says_what_is_trained_and_why_rows_are_refused(folder, capsys):
    assert main([*words(folder, "2"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["kept"], found["more_rows"]) == (5, 3, False)
    assert found["dropped"] == {"missing_column": 1, "mask_all_zeros": 1}
    assert [row["id"] for row in found["shown"]] == ["rows.jsonl:1", "rows.jsonl:3"]
    first = found["shown"][0]
    assert first["parts"] == [
        {"text": "<|user|>1 + 2?<|end|><|assistant|>", "trained": False},
        {"text": "3<|end|>", "trained": True},
    ]
    tokenizer = Tokenizer.load(folder / "tokenizer")
    lengths = [len(tokenizer.encode(part["text"])) for part in first["parts"]]
    assert (first["tokens"], first["trained_tokens"]) == (sum(lengths), lengths[1])
    assert found["trained_share"] == found["trained_tokens"] / found["tokens"]
    assert not (folder / "run").exists(), "a preview writes nothing"


def test_colour_only_on_a_terminal(folder, capsys):
    found = look(run_of(folder), 3)
    terminal = io.StringIO()
    print_preview(found, Console(file=terminal, force_terminal=True, color_system="standard"))
    assert "\x1b[1;32m3<|end|>" in terminal.getvalue()
    assert "⟦" not in terminal.getvalue()
    assert main(words(folder)) == 0
    shown = capsys.readouterr().out
    assert "<|user|>1 + 2?<|end|><|assistant|>⟦3<|end|>⟧" in shown
    assert "dropped: 1 x mask_all_zeros, e.g. rows.jsonl:4" in shown


def test_the_data_cannot_steer_the_terminal(folder, capsys):
    assert main(words(folder)) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "␛[31m" in shown


def test_settings_of_the_run_count(folder):
    found = look(run_of(folder, **{"method.train_on": ["user"], "method.max_rows": 1}), 3)
    assert [text for text, is_trained in found.shown[0].parts if is_trained] == ["1 + 2?<|end|>"]
    assert found.rows == 1
    short = look(run_of(folder, **{"data.seq_len": 8}), 3)
    assert short.truncated == 3
    assert short.too_long == 2, "their answers lie behind the cut"
    assert short.shown[0].cut
    assert as_values(short)["too_long"] == 2


def test_the_first_token_is_not_trained(folder, capsys):
    """Nothing predicts it."""
    everything = {"method.train_on": ["user", "assistant"]}
    plain = {**everything, "data.path": str(folder / "plain.jsonl")}
    (folder / "plain.jsonl").write_text(json.dumps({"prompt": "1 + 2", "completion": "3"}))
    found = look(run_of(folder, **plain), 1)
    (row,) = found.shown
    assert row.num_trained == row.num_tokens - 1 == found.trained_tokens == found.tokens - 1
    assert row.parts[0] == ("1", False)
    chat = look(run_of(folder, **everything), 1).shown[0]
    answers = [text for text, is_trained in chat.parts if is_trained]
    assert answers == ["1 + 2?<|end|>", "3<|end|>"], "its first token was none before"


def test_examples_of_reasons_that_say_all(folder, capsys):
    (folder / "gaps.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n\n{x\n")
    assert main(words(folder, rows="gaps.jsonl")) == 0
    shown = capsys.readouterr().out
    assert "dropped: 1 x blank_line, e.g. gaps.jsonl:2\n" in shown
    assert "dropped: 1 x broken_json, e.g. gaps.jsonl:3: " in shown


def test_nothing_to_train_on_fails(folder, capsys):
    assert main(words(folder, rows="bad.jsonl")) == 3
    output = capsys.readouterr()
    assert "none of the rows of" in output.err
    assert "method.train_on" in output.err
    assert "--preview" not in output.err, "this is the preview"
    assert "dropped: 1 x mask_all_zeros" in output.out
    assert main([*words(folder), "--data.seq_len", "2"]) == 3
    assert "raise data.seq_len=2" in capsys.readouterr().err


def test_the_option_is_read():
    assert take_option(["a.toml"]) == (["a.toml"], None)
    assert take_option(["--preview", "a.toml", "--json"]) == (["a.toml", "--json"], 3)
    assert take_option(["--preview", "7", "a.toml"]) == (["a.toml"], 7)
    assert take_option(["a.toml", "--preview=1"]) == (["a.toml"], 1)
    for wrong in (["--preview", "0"], ["--preview=x"], ["--preview", "-2"], ["--preview="]):
        with pytest.raises(ConfigError, match="at least 1"):
            take_option(wrong)
    with pytest.raises(ConfigError, match="twice"):
        take_option(["--preview", "--preview", "2"])


def test_missing_data_or_tokenizer_is_refused(folder):
    for key in ("data.path", "data.tokenizer"):
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            look(run_of(folder, **{key: None}), 1)


def test_a_check_looks_at_the_rows(folder, capsys):
    Engine(Run.parse({}, MODEL)).save(folder / "base", {}).wait()
    options = ["--model.init", str(folder / "base"), "--check"]
    plain = ["sft", *words(folder)[2:], *options]
    assert main(plain) == 0
    shown = capsys.readouterr().out
    assert "2 of 5 rows cannot be used (1 x missing_column, 1 x mask_all_zeros)" in shown
    assert main(["sft", *words(folder, rows="bad.jsonl")[2:], *options]) == 3
    assert "can be trained on: 1 x mask_all_zeros" in capsys.readouterr().err
