import json

import pyarrow.parquet as pq
import pytest
from tests.curate import corpus

from stepwell.cli import main


@pytest.fixture
def raw(tmp_path, monkeypatch):
    corpus.write(tmp_path / "raw")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "raw"


def run(capsys, *words):
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_dedup_names_what_stays_and_explains(raw, capsys):
    out = run(capsys, "dedup", "raw/a.jsonl", "raw/b.jsonl", "-o", "out", "--method", "exact")
    assert "dropped        2  1. exact-dedup: exact_duplicate" in out
    gone = [r for r in corpus.rows(raw.parent / "out" / "removed") if r["step"] == "1. exact-dedup"]
    assert {(row["id"], row["witness"]) for row in gone} == {("b3", "a/a5"), ("b7", "a/a6")}
    text = run(capsys, "dedup", "explain", "b3", "--in", "out")
    assert "a/a5" in text
    assert main(["dedup", "explain", "nobody", "--in", "out"]) == 3
    assert "nobody" in capsys.readouterr().err


def test_methods_join_by_commas_and_fields_reach_those_that_have_them(raw, capsys):
    words = ["dedup", "raw/a.jsonl", "-o", "out", "--method", "exact,fuzzy", "--json"]
    found = json.loads(run(capsys, *words, "--threshold", "0.7"))
    steps = found["fingerprint"]["recipe"]["steps"]
    assert [step["kind"] for step in steps] == ["exact-dedup", "fuzzy-dedup"]
    assert steps[1]["threshold"] == 0.7


def test_lists_have_one_line_for_what_is_wrong(raw, capsys):
    assert (
        main(["dedup", "raw/a.jsonl", "-o", "out", "--method", "fuzzy", "--survivor", "newst"]) == 2
    )
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("words", ["--thresholds en=1.0,de=0.4", "--thresholds.en 1.0"])
def test_a_table_is_given_as_pairs_or_by_its_keys(raw, capsys, words):
    assert main(["langid", "raw/a.jsonl", "-o", "out", "--json", *words.split()]) in (0, 3)
    said = capsys.readouterr()
    assert "language_uncertain" in said.out + said.err


def test_explain_has_help_and_json(raw, capsys):
    run(capsys, "dedup", "raw/a.jsonl", "raw/b.jsonl", "-o", "out", "--method", "exact")
    assert "usage: stepwell dedup explain ID --in FOLDER" in run(
        capsys, "dedup", "explain", "--help"
    )
    found = json.loads(run(capsys, "dedup", "explain", "b3", "--in", "out", "--json"))
    assert found["id"] == "b3"
    assert "a/a5" in found["explanation"]


def test_quality_rules_are_chosen(raw, capsys):
    out = run(
        capsys, "quality", "raw/b.jsonl", "-o", "out", "--rules", "gopher", "--min-words", "115"
    )
    assert "gopher_too_few_words" in out
    assert "fineweb" not in out


def test_langid_keeps_by_a_list(raw, capsys):
    run(capsys, "langid", "raw/a.jsonl", "-o", "out", "--keep", "de,fr,en", "--documents", "jsonl")
    lines = (raw.parent / "out" / "documents" / "part-00000.jsonl").read_text().splitlines()
    assert {json.loads(line)["meta"]["language"] for line in lines} == {"en"}


def test_pii_is_redacted(raw, capsys):
    rows = [{"id": "x", "text": "Please write to jane.roe@uni-bonn.de about the keys."}]
    (raw / "mail.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = run(capsys, "pii", "raw/mail.jsonl", "-o", "out")
    assert "changed        1  1. pii: pii_email" in out
    (kept,) = pq.read_table(raw.parent / "out" / "documents").to_pylist()
    assert "jane" not in kept["text"]
    (edit,) = corpus.rows(raw.parent / "out" / "edits")
    assert rows[0]["text"][edit["start"] : edit["stop"]] == "jane.roe@uni-bonn.de"
    assert "jane" not in str(edit)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dedup raw/a.jsonl", "needs -o FOLDER"),
        ("dedup raw/a.jsonl -o out --method fuzy", "did you mean 'fuzzy'?"),
        ("dedup raw/a.jsonl -o out --thresold .5", "did you mean '--threshold'?"),
        ("dedup raw/a.jsonl -o out --threshold", "--threshold needs a value"),
        ("dedup raw/a.jsonl -o out --threshold 7", "steps.1 (fuzzy-dedup)"),
        ("dedup -o out", "no input"),
        ("dedup explain", "usage: stepwell dedup explain ID --in FOLDER"),
        ("quality raw/a.jsonl -o out --min-words many", "min_words = 'many'"),
        ("langid raw/a.jsonl -o out --workers 0", "--workers 0 must be at least 1"),
        ("langid raw/a.jsonl -o out --workers x", "must be a whole number"),
        ("decontam raw/a.jsonl -o out", "index is missing"),
        ("pii raw/a.jsonl -o raw", "is no curation"),
        ("dedup raw/a.jsonl -o out --json=5", "--json takes no value"),
        ("dedup raw/a.jsonl -o out --method fuzzy,fuzzy", "names 'fuzzy' twice"),
        ("dedup raw/a.jsonl -o out --method fuzzy --against 2024", "2024 is no dedup index"),
        ("dedup raw/a.jsonl -o out --survivor newst", "did you mean 'newest'?"),
        ("dedup raw/a.jsonl -o out --min-bytes 5", "--min-bytes is an option of substring-dedup"),
        ("quality raw/a.jsonl -o out --rules c4 --min-words 5", "is an option of gopher-quality"),
        ("quality-filter raw/a.jsonl -o out --model m", "--keep is missing, which quality-top"),
        ("langid raw/a.jsonl -o out --thresholds de", "write pairs such as de=0.5"),
        ("langid raw/a.jsonl -o out --thresholds de=much", "thresholds"),
        ("langid raw/a.jsonl -o out --keep [de", """e.g. '["one", "two"]'"""),
        ("dedup explain x --in out --frsh 1", "unknown option --frsh"),
        ("dedup explain x --in out --fresh", "unknown option --fresh"),
    ],
)
def test_what_is_wrong_is_named(raw, capsys, words, message):
    assert main(words.split()) in (2, 3)
    assert message in capsys.readouterr().err
    assert not (raw.parent / "out").exists()


@pytest.mark.parametrize(
    "verb", ["dedup", "langid", "quality", "quality-filter", "pii", "decontam"]
)
def test_help_lists_every_field(capsys, verb):
    out = run(capsys, verb, "--help")
    assert f"usage: stepwell {verb} INPUT ... -o FOLDER" in out
    assert "PydanticUndefined" not in out
    assert "--outputs.KEY" in out
    assert "--steps.N.KEY" in out
