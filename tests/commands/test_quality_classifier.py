"""The command on rows of a file."""

import json

import pytest

from stepwell.cli import main
from stepwell.data.quality.classifier import read_classifier

FAST = ("--dim", "4", "--buckets", "1024", "--heldout", "0.3")


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


@pytest.fixture
def files(tmp_path):
    good = write(tmp_path / "good.jsonl", [{"text": f"clear water {i}"} for i in range(60)])
    bad = write(tmp_path / "bad.jsonl", [{"text": f"grey mud {i}"} for i in range(60)] + [{}])
    return good, bad


def test_positives_against_negatives(tmp_path, files, capsys):
    good, bad = files
    out = str(tmp_path / "model")
    command = ["train-quality-classifier", "--positives", good, "--negatives", bad, "--out", out]
    assert main([*command, *FAST]) == 0
    text = capsys.readouterr().out
    assert "precision" in text
    assert "roc auc" in text
    assert "left out: 1 " in text
    card = read_classifier(out).card
    assert card["metrics"]["f1"] > 0.9
    assert f"{card['metrics']['f1']:.4f}" in text
    assert card["settings"]["dim"] == 4
    assert main([*command, *FAST]) == 3
    assert "exists already" in capsys.readouterr().err


def test_scores_and_json(tmp_path, capsys):
    words = ["mud", "stone", "water"]
    rows = [{"body": f"{w} {w} {i}", "rating": n} for n, w in enumerate(words) for i in range(60)]
    rows += [{"body": "x", "rating": bad} for bad in (None, 6, -1, 2.5, "3", True)]
    path = write(tmp_path / "rows.jsonl", rows)
    out = str(tmp_path / "model")
    command = ["train-quality-classifier", "--labels", path, "--out", out, *FAST, "--json"]
    columns = ["--text-column", "body", "--score-column", "rating", "--threshold", "1"]
    assert main([*command, *columns]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["skipped"] == {"no_score": 6}
    assert card["metrics"]["threshold"] == 1
    assert card["metrics"]["accuracy"] > 0.9
    assert main([*command[:4], str(tmp_path / "b"), "--text-column", "body"]) == 3
    assert "--score-column" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--labels alone"),
        (["--positives", "a"], "--labels alone"),
        (["--positives", "a", "--negatives", "b", "--labels", "c"], "--labels alone"),
        (["--labels", "c", "--epochs", "0"], "epochs"),
        (["--labels", "c", "--heldout", "1.0"], "heldout"),
    ],
)
def test_what_is_refused_before_anything_is_read(tmp_path, capsys, words, message):
    assert main(["train-quality-classifier", *words, "--out", str(tmp_path / "m")]) == 2
    assert message in capsys.readouterr().err
