"""Clean and dirty scores, from a leaked benchmark to the command line."""

import json
import math
import textwrap
from pathlib import Path

import pytest

from stepwell.cli import main
from stepwell.data.batches import to_batch
from stepwell.data.decontam.benchmarks import Item, Keys, keys_of
from stepwell.data.decontam.index import open_index
from stepwell.data.decontam.report import contamination_report, write_report
from stepwell.data.decontam.step import Decontaminate
from stepwell.eval.contamination import (
    dirty_items,
    find_items,
    keys_of_file,
    read_contamination,
    split_scores,
)
from stepwell.eval.items import load_choices
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError, Document

THINGS = ["apples", "bridges", "candles", "drums", "engines", "feathers", "goats", "hammers"]


def question(thing: str) -> str:
    return (
        f"In the village by the lake there are many {thing}, and every spring the people count "
        f"all {thing} again; what do they do with broken {thing}?"
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with a benchmark of 8 items, an index, three leaked questions in training data, its
    report, and a small random model."""
    folder = tmp_path_factory.mktemp("world")
    rows = [
        {"context": question(t), "choices": [f"mend the {t}", "nothing"], "answer": i % 2}
        for i, t in enumerate(THINGS)
    ]
    prompts = [{"prompt": question(t), "answer": "nothing"} for t in THINGS]
    for name, lines in (("village", rows), ("asked", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    files = [str(folder / "village.jsonl"), f"open={folder / 'asked.jsonl'}"]
    assert main(["decontam-index", *files, "--out", str(folder / "index"), "--json"]) == 0
    leaked = [
        "\r\n".join(textwrap.wrap(question(thing), 30)).upper()
        for thing in ("bridges", "drums", "hammers")
    ]
    docs = [Document(str(i), f"Once.\r\n{text}\r\nEnd.", "web") for i, text in enumerate(leaked)]
    docs.append(Document("3", "A walk by the lake in spring, and all the people sang.", "web"))
    for action in ("drop", "report"):
        step = Decontaminate(index=str(folder / "index"), action=action)
        outcome = step(to_batch(docs, 0))
        index = open_index(folder / "index")
        (folder / action).mkdir()
        report = contamination_report([outcome.removed], index, [outcome.kept])
        write_report(report, folder / action / "contamination.json")
    make_model(folder)
    return folder


def make_model(folder: Path) -> None:
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": question(t)}) + "\n" for t in THINGS))
    Tokenizer.train([question(t) for t in THINGS], 300).save(folder / "tokenizer")
    encode = ["tokenizer", "encode", str(text), "--tokenizer", str(folder / "tokenizer"), "--json"]
    assert main([*encode, "--out", str(folder / "store")]) == 0
    dims = {"vocab_size": 300, "num_layers": 1, "d_model": 16, "num_heads": 2, "num_kv_heads": 1,
            "head_dim": 8, "d_ff": 32}  # fmt: skip
    words = [word for key, value in dims.items() for word in (f"--model.{key}", str(value))]
    words += ["--data.sources", f'[{{path = "{folder / "store"}"}}]', "--data.seq_len", "64"]
    words += ["--data.tokenizer", str(folder / "tokenizer"), "--train.steps", "1"]
    words += ["--train.global_batch_rows", "2", "--train.micro_batch_rows", "2", "--json"]
    assert main(["pretrain", *words, "--dir", str(folder / "run")]) == 0


def evaluated(world: Path, capsys, *words: str) -> dict:
    capsys.readouterr()
    choices, prompts = str(world / "village.jsonl"), str(world / "asked.jsonl")
    command = ["eval", str(world / "run"), "--choices", choices, "--prompts", prompts, "--json"]
    assert main([*command, "--dtype", "fp32", "--max-new-tokens", "2", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    return {"choices": found[choices], "prompts": found[prompts]}


def test_clean_and_dirty_counts(world, capsys):
    found = evaluated(world, capsys, "--contamination", str(world / "report"))
    for kind, name in (("choices", "village"), ("prompts", "open")):
        parts = found[kind]["contamination"]
        assert (parts["benchmarks"], parts["on"], parts["in"]) == ([name], "question", "all")
        assert [parts[p]["items"] for p in ("all", "clean", "dirty")] == [8, 5, 3]
        assert parts["only_in_removed"] == 0
        assert parts["all"]["accuracy"] == pytest.approx(found[kind]["accuracy"])
        total = 5 * parts["clean"]["accuracy"] + 3 * parts["dirty"]["accuracy"]
        assert total == pytest.approx(8 * parts["all"]["accuracy"])
        low, high = parts["clean"]["interval"]
        assert low <= parts["clean"]["accuracy"] <= high


def test_what_was_removed_is_dirty_only_in_all(world, capsys):
    file = ["--contamination", str(world / "drop" / "contamination.json")]
    parts = evaluated(world, capsys, *file)["choices"]["contamination"]
    assert (parts["dirty"]["items"], parts["only_in_removed"]) == (3, 3)
    kept = evaluated(world, capsys, *file, "--contaminated-in", "kept")["choices"]["contamination"]
    assert (kept["clean"]["items"], kept["dirty"]["items"]) == (8, 0)
    assert kept["dirty"]["accuracy"] is None
    both = evaluated(world, capsys, *file, "--contaminated-on", "question+answer")
    assert both["choices"]["contamination"]["dirty"]["items"] == 0


def test_a_limit_cuts_both(world, capsys):
    words = ["--contamination", str(world / "report"), "--limit", "4"]
    parts = evaluated(world, capsys, *words)["choices"]["contamination"]
    assert [parts[p]["items"] for p in ("all", "clean", "dirty")] == [4, 2, 2]


def test_side_by_side_on_a_terminal(world, capsys):
    command = ["eval", str(world / "run"), "--choices", str(world / "village.jsonl")]
    assert main([*command, "--contamination", str(world / "drop")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("  clean: ")
    assert "5 items)" in lines[-2]
    assert lines[-1].startswith("  dirty: ")
    assert lines[-1].endswith("3 items), 3 found only in documents that were removed")
    assert main(command) == 0
    assert "clean" not in capsys.readouterr().out


def test_what_does_not_fit_is_refused(world, tmp_path, capsys):
    other = tmp_path / "village.jsonl"
    other.write_text((world / "village.jsonl").read_text().replace("lake", "sea"))
    command = ["eval", str(world / "run"), "--choices", str(other), "--contamination"]
    assert main([*command, str(world / "report")]) == 3
    assert "none of the 8 items of" in capsys.readouterr().err
    assert main([*command, str(tmp_path)]) == 3
    assert "give a contamination.json" in capsys.readouterr().err


def test_reports_of_other_kinds(tmp_path):
    path = tmp_path / "contamination.json"
    for text, message in (
        ("{", "cannot read"),
        ("[]", "is no contamination report"),
        ('{"format": "x"}', "is no contamination report"),
        ('{"format": "stepwell contamination report", "version": 9}', "version 9"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_contamination(path)


def report_of(*sets: list[str], leaked: str = "") -> dict:
    """Benchmarks a, b, ... with these questions, of which those with `leaked` leaked."""
    rows = []
    for name, questions in zip("abc", sets, strict=False):
        keys = [keys_of(Item("", q, ("x", "y"))) for q in questions]
        items = {
            str(i): {"number": i, "part": "question", "kept": 1}
            for i, q in enumerate(questions)
            if leaked and leaked in q
        }
        rows.append(
            {
                "name": name,
                "keys": "".join(k.whole for k in keys),
                "question_keys": "".join(k.question for k in keys),
                "items": items,
            }
        )
    return {"benchmarks": rows}


def wanted(*questions: str, choices: tuple[str, ...] = ("x", "y")) -> dict[str, Keys]:
    return {f"n{i}": keys_of(Item("", q, choices)) for i, q in enumerate(questions)}


def test_items_are_known_by_their_text():
    report = report_of(["one?", "two?"], ["three?", "four 3 + 4?"], leaked="two")
    known = find_items(report, wanted("TWO?", " three?\n", "four 3 - 4?"), "set")
    assert known.places == {"n0": (0, 1), "n1": (1, 0)}
    assert known.names == ("a", "b")
    assert dirty_items(report, known) == {"n0"}
    with pytest.raises(DataError, match="none of the 1 items of set; it has a, b"):
        find_items(report, wanted("five?"), "set")


def test_a_question_without_the_choices_is_known_where_it_is_asked_once():
    report = report_of(["one?", "two?", "two?"])
    assert find_items(report, wanted("one?", "two?", choices=()), "set").places == {"n0": (0, 0)}
    assert find_items(report, wanted("one?", choices=("x", "z")), "set").places == {"n0": (0, 0)}
    with pytest.raises(DataError, match="none of the 1 items"):
        find_items(report, wanted("two?", choices=("x", "z")), "set")


def test_ids_are_those_of_the_index(tmp_path):
    path = tmp_path / "set.jsonl"
    items = [{"context": question(t), "choices": ["x", "y"], "answer": 0} for t in THINGS[:3]]
    lines = [json.dumps(items[0]), "", "{broken", json.dumps({"context": 1}), json.dumps(items[1])]
    path.write_text("\n".join(lines) + "\n")
    assert [item.id for item in load_choices(path)[0]] == ["1", "5"]
    assert list(keys_of_file(path)) == ["1", "5"]
    path.write_text("\n".join(json.dumps({**x, "id": f"n{i}"}) for i, x in enumerate(items)))
    assert [item.id for item in load_choices(path)[0]] == ["n0", "n1", "n2"]
    assert list(keys_of_file(path)) == ["n0", "n1", "n2"]


def test_dirty_by_part_and_place():
    report = report_of(["one?", "two?", "three?", "four?"])
    report["benchmarks"][0]["items"] = {
        "a": {"number": 0, "part": "question+answer", "kept": 1},
        "b": {"number": 1, "part": "question", "kept": 0},
        "c": {"number": 2, "part": "passage", "kept": 2},
    }
    known = find_items(report, wanted("one?", "two?", "three?", "four?"), "set")
    assert dirty_items(report, known) == {"n0", "n1"}
    assert dirty_items(report, known, "question+answer") == {"n0"}
    assert dirty_items(report, known, "any") == {"n0", "n1", "n2"}
    assert dirty_items(report, known, "any", "kept") == {"n0", "n2"}


def test_split_scores():
    values, ids = [1.0, 0.0, None, 1.0, 0.0], ["a", "b", "c", "d", "e"]
    parts = split_scores(values, ids, {"a", "b", "c", "d"}, {"b", "c"})
    assert (parts["all"]["accuracy"], parts["all"]["items"]) == (0.5, 4)
    assert (parts["clean"]["accuracy"], parts["clean"]["items"]) == (1.0, 2)
    assert (parts["dirty"]["accuracy"], parts["dirty"]["items"]) == (0.0, 1)
    assert (parts["unknown"]["accuracy"], parts["unknown"]["items"]) == (0.0, 1)
    assert split_scores([1.0], ["a"], {"a"}, set())["dirty"] == {
        "accuracy": None, "interval": None, "items": 0,
    }  # fmt: skip
    assert not math.isnan(parts["all"]["interval"][0])


def test_another_name_and_other_ids_are_the_same_items(world, tmp_path, capsys):
    """Reordered, renamed, with ids of their own and two new items: each is what its text says."""
    rows = [json.loads(line) for line in (world / "village.jsonl").read_text().splitlines()]
    extra = [{**rows[0], "context": question(thing)} for thing in ("ropes", "stones")]
    # Had an id stood for the item, "2" and "4" would be the leaked bridges and drums.
    renamed = [{**row, "id": str(i)} for i, row in enumerate([*extra, *rows[::-1]])]
    path = tmp_path / "village.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in renamed))
    command = ["eval", str(world / "run"), "--choices", str(path)]
    assert main([*command, "--contamination", str(world / "report"), "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)[str(path)]["contamination"]
    counts = [parts[p]["items"] for p in ("all", "clean", "dirty", "unknown")]
    assert counts == [10, 5, 3, 2]
    assert main([*command, "--contamination", str(world / "report")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("  unknown: ")
    assert last.endswith("the report has no item with the text of 2 of 10 items")
    found = keys_of_file(path)
    expected = [t for t in THINGS[::-1] if t in ("bridges", "drums", "hammers")]
    report = read_contamination(world / "report")
    dirty = dirty_items(report, find_items(report, found, "x"))
    assert [THINGS[::-1][int(i) - 2] for i in sorted(dirty, key=int)] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "x", "--contamination", "r"], "--contamination r does nothing without"),
        (["--choices", "x", "--contaminated-in", "kept"], "does nothing without --contamination"),
        (["--choices", "x", "--contaminated-on", "any"], "does nothing without --contamination"),
        (["--choices", "x", "--samples", "2"], "--samples 2 does nothing without --prompts"),
        (["--choices", "x", "--verifier", "gym:x"], "does nothing without --prompts"),
        (["--prompts", "x", "--normalise", "none"], "does nothing without --choices"),
    ],
)
def test_an_option_that_does_nothing_is_refused(capsys, words, message):
    assert main(["eval", "nowhere", *words]) == 2
    assert message in capsys.readouterr().err
