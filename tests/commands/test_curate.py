import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.curate import corpus

from stepwell.cli import main
from stepwell.commands.curate import progress_lines, source_names
from stepwell.curate.run import Progress


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


def test_without_a_terminal_each_part_has_a_line(tmp_path, capsys):
    corpus.write(tmp_path / "raw")
    words = ["curate", str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*words, "--json"]) == 0
    shown = capsys.readouterr()
    parts = [line.split(": ")[1] for line in shown.err.splitlines()]
    assert parts[0] == parts[1] == "read, gopher-quality"
    assert {"writing", "publishing documents", "publishing datasheet"} <= set(parts)
    assert "done, 1 of 1 task, " in shown.err
    values = json.loads(shown.out)
    assert values["out"] == str(tmp_path / "out")
    assert sum(docs for docs, _ in values["kept"].values()) == 77
    assert values["tally"]["cpu"]["read"] > 0


def test_lines_come_at_both_ends_and_seldom_between():
    seconds = iter([0, 10, 20, 31, 40, 62, 70, 71, 72])
    steps = [Progress("read", done, 6, done * 10**6, 6 * 10**6) for done in range(7)]
    steps += [Progress("deciding", 0, 1), Progress("deciding", 1, 1)]
    lines = list(progress_lines(steps, 30.0, lambda: next(seconds)))
    assert lines == [
        "stepwell: read: 0 of 6 tasks done",
        "stepwell: read: 3 of 6 tasks done, 31 s, 0.1 MB/s",
        "stepwell: read: 5 of 6 tasks done, 62 s, 0.1 MB/s",
        "stepwell: read: done, 6 of 6 tasks, 70.0 s, 0.1 MB/s",
        "stepwell: deciding: 0 of 1 task done",
        "stepwell: deciding: done, 1 of 1 task, 1.0 s",
    ]


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (["data/web/*.jsonl"], ["web"]),
        (["data/web/**/*.jsonl", "data/web"], ["web", "web-2"]),
        (["a.jsonl", "b/a.parquet", "stdlib-code"], ["a", "a-2", "stdlib-code"]),
    ],
)
def test_sources_are_called_by_what_is_fixed(inputs, names):
    assert source_names(inputs) == names


def test_slurm_takes_fresh_and_json_and_knows_what_is_done(tmp_path, capsys):
    corpus.write(tmp_path / "raw")
    words = ["curate", str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(words) == 0
    capsys.readouterr()
    slurm = [*words, "--executor", "slurm", "--json"]
    assert main(slurm) == 0
    assert sum(n for n, _ in json.loads(capsys.readouterr().out)["kept"].values()) == 77
    assert main([*slurm, "--no-dedup"]) == 2
    assert "add --fresh" in capsys.readouterr().err
    assert main([*slurm, "--no-dedup", "--fresh"]) == 0
    submit = json.loads(capsys.readouterr().out)["submit"]
    assert os.access(submit, os.X_OK)


def test_an_interrupt_before_anything_is_begun_is_answered_too(tmp_path):
    os.mkfifo(tmp_path / "recipe.toml")
    words = [sys.executable, "-m", "stepwell", "curate", str(tmp_path / "recipe.toml")]
    process = subprocess.Popen(
        [*words, "--out", str(tmp_path / "out")], stderr=subprocess.PIPE, text=True
    )
    with (tmp_path / "recipe.toml").open("w"):
        # A signal between Python's last look at it and the read that waits would be seen only with
        # the next one: nobody's Ctrl-C comes within those microseconds, but this one could.
        while state(process.pid) != "S":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert said == "stepwell: interrupted\n"


def state(pid):
    """S: asleep."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
