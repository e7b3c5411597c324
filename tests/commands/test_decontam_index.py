import gzip
import json
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from stepwell.cli import main
from stepwell.commands.decontam import short_names

QUESTION = "which of these rivers runs through the old town and under its stone bridge"
ROW = json.dumps({"question": QUESTION, "answer": "the Avon"}) + "\n"


def write(root: Path, *places: str, content: str = ROW) -> Path:
    for place in places:
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def index(tmp_path, capsys, *given) -> tuple[int, dict, str]:
    """(exit code, what was printed as JSON, errors)."""
    code = main(["decontam-index", *map(str, given), "--out", str(tmp_path / "index"), "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out) if code == 0 else {}, shown.err


def names(result: dict) -> list[str]:
    return [row["name"] for row in result["benchmarks"]]


def test_a_folder_stands_for_the_benchmarks_below_it(tmp_path, capsys):
    evals = write(tmp_path / "evals", "human/Human.jsonl", "lang/MMLU/test.jsonl")
    write(evals, "lang/PIQA/test.jsonl", "lang/PIQA/validation.jsonl")
    code, result, _ = index(tmp_path, capsys, evals)
    assert code == 0
    assert names(result) == ["Human", "MMLU-test", "PIQA-test", "PIQA-validation"]
    assert result["skipped"] == []


def test_files_of_one_name_from_several_folders(tmp_path, capsys):
    root = write(tmp_path, "a/test.jsonl", "b/test.jsonl", "c.jsonl")
    given = [root / "a/test.jsonl", root / "b/test.jsonl", root / "c.jsonl", root / "a"]
    code, result, _ = index(tmp_path, capsys, *given, f"mine={root / 'b/test.jsonl'}")
    assert code == 0
    assert names(result) == ["test", "mine", "c"]
    (tmp_path / "index").rename(tmp_path / "other")
    assert names(index(tmp_path, capsys, *given)[1]) == ["a-test", "b-test", "c"]


def test_what_is_no_benchmark_is_named_and_counted(tmp_path, capsys):
    root = write(tmp_path / "quiz", "rivers.jsonl")
    write(root, "README.md", content="read me")
    write(root, "empty.jsonl", content="")
    write(root, "labels.jsonl", content='{"file": "a.txt"}\n')
    write(root, "card.json", content='{\n  "name": "quiz"\n}\n')
    code, result, _ = index(tmp_path, capsys, root)
    assert code == 0
    assert names(result) == ["rivers"]
    reasons = {Path(each["file"]).name: each["reason"] for each in result["skipped"]}
    assert reasons.keys() == {"README.md", "empty.jsonl", "labels.jsonl", "card.json"}
    assert "no row has a question" in reasons["labels.jsonl"]
    assert "an object of many lines" in reasons["card.json"]
    assert main(["decontam-index", str(root), "--out", str(tmp_path / "again")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("skipped ") for line in shown) == 4
    assert "4 files without items of a benchmark skipped" in shown


@pytest.mark.parametrize("name", ["README.md", "empty.jsonl", "labels.jsonl"])
def test_what_is_no_benchmark_is_refused_when_named(tmp_path, capsys, name):
    write(tmp_path, "README.md", content="read me")
    write(tmp_path, "empty.jsonl", content="")
    write(tmp_path, "labels.jsonl", content='{"file": "a.txt"}\n')
    code, _, error = index(tmp_path, capsys, tmp_path / name)
    assert code == 3
    assert name.split(".")[0] in error
    assert not (tmp_path / "index").exists()


def test_damaged_files_end_it(tmp_path, capsys):
    root = write(tmp_path / "quiz", "rivers.jsonl")
    packed = gzip.compress((ROW * 50).encode())
    (root / "towns.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    code, _, error = index(tmp_path, capsys, root)
    assert code == 3
    assert "towns.jsonl.gz" in error


def test_folders_without_any(tmp_path, capsys):
    (tmp_path / "none").mkdir()
    assert "holds no benchmark" in index(tmp_path, capsys, tmp_path / "none")[2]
    write(tmp_path / "some", "README.md")
    assert "holds no benchmark; " in index(tmp_path, capsys, tmp_path / "some")[2]
    error = index(tmp_path, capsys, f"mine={tmp_path / 'some'}")[2]
    assert "leave the name out" in error


def test_short_names():
    paths = [
        Path(p) for p in ("/x/a/test.jsonl", "/y/a/test.jsonl", "/y/b/test.parquet", "/z.json")
    ]
    assert list(short_names(paths).values()) == ["x-a-test", "y-a-test", "b-test", "z"]
    twins = [Path("/x/a.jsonl"), Path("/x/a.parquet")]
    assert set(short_names(twins).values()) == {"x-a"}


def test_the_command_in_the_header_of_curate_mixed(tmp_path, capsys, monkeypatch):
    recipe = files("stepwell").joinpath("recipes/curate-mixed.toml").read_text("utf-8")
    (line,) = [line for line in recipe.splitlines() if "stepwell decontam-index" in line]
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "data/corpus/evals/a/test.jsonl", "data/corpus/evals/b/test.jsonl")
    assert main(line.removeprefix("#").split()[1:]) == 0
    assert capsys.readouterr().out.startswith("a-test: 1 item\nb-test: 1 item\n")
    steps = tomllib.loads(recipe)["steps"]
    (index,) = [step["index"] for step in steps if step["kind"] == "decontaminate"]
    assert (tmp_path / index / "manifest.json").exists()
