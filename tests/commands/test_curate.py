import json

from tests.curate import corpus

from stepwell.cli import main


def test_a_terminal_sees_rate_and_time_left(tmp_path, monkeypatch, capsys):
    corpus.write(tmp_path / "raw")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    words = ["curate", str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(words) == 0
    shown = capsys.readouterr()
    for part in ("read, gopher-quality", "exact-dedup: deciding", "writing", "publishing"):
        assert part in shown.err
    assert "MB/s" in shown.err
    assert "1/1" in shown.err
    assert "kept 77 documents" in shown.out


def test_without_a_terminal_only_the_result_is_printed(tmp_path, capsys):
    corpus.write(tmp_path / "raw")
    words = ["curate", str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*words, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    values = json.loads(shown.out)
    assert values["out"] == str(tmp_path / "out")
    assert sum(docs for docs, _ in values["kept"].values()) == 77
    assert values["tally"]["cpu"]["read"] > 0
