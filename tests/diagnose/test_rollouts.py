"""Headline curves and the table of answers before and after."""

import json
from pathlib import Path
from typing import Any

from stepwell.config import Run
from stepwell.diagnose.report import read_run, write_report
from stepwell.diagnose.rollouts import GREEDY_NOTE, SAMPLED_NOTE, headline_lines, read_changes
from stepwell.metrics import RunLog
from tests.diagnose.test_report import Page


def row(step: int, prompt: str, text: str, greedy: bool = False, **scores: float | None):
    reward = None if None in scores.values() else sum(s or 0.0 for s in scores.values())
    return {
        "step": step,
        "greedy": greedy,
        "prompt": prompt,
        "completion": text,
        "reward": reward,
        "scores": scores,
    }


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "samples.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


SAMPLED = [row(1, "1+1=", "5", right=0.0, form=1.0), row(9, "1+1=", "2", right=1.0, form=1.0)]
GREEDY = [
    row(0, "1+1=", "<b>7</b>", greedy=True, right=0.0, form=None),
    row(0, "2+2=", "4", greedy=True, right=1.0, form=1.0),
    row(9, "1+1=", "2", greedy=True, right=1.0, form=0.5),
    row(9, "2+2=", "4.", greedy=True, right=1.0, form=1.0),
]


def test_greedy_answers_of_start_and_end_are_compared(tmp_path):
    found = read_changes(write(tmp_path, GREEDY[:2] + SAMPLED + GREEDY[2:]))
    assert found.note == GREEDY_NOTE
    assert found.dimensions == ["right", "form"]
    assert [c.prompt for c in found.rows] == ["1+1=", "2+2="]
    first = found.rows[0]
    assert (first.before.step, first.before.text, first.before.reward) == (0, "<b>7</b>", None)
    assert (first.after.step, first.after.text, first.after.reward) == (9, "2", 1.5)


def test_a_run_without_an_end_shows_what_was_sampled(tmp_path):
    found = read_changes(write(tmp_path, GREEDY[:2] + SAMPLED))
    assert found.note == SAMPLED_NOTE
    assert [(c.before.text, c.after.text) for c in found.rows] == [("5", "2")]
    assert read_changes(write(tmp_path, GREEDY[:2] + SAMPLED[:1])).rows == ()
    assert read_changes(tmp_path / "none").rows == ()


def test_of_several_turns_is_shown_who_said_what(tmp_path):
    turns = [("assistant", "calc: 1+1"), ("tool", "2"), ("assistant", "answer: 2")]
    talk = {"turns": [{"role": role, "content": text} for role, text in turns]}
    rows = [GREEDY[0], {**GREEDY[2], **talk}]
    (change,) = read_changes(write(tmp_path, rows)).rows
    assert change.before.text == "<b>7</b>"
    assert change.after.text == "assistant: calc: 1+1\ntool: 2\nassistant: answer: 2"


def test_headline_is_reward_by_dimension_and_no_loss():
    rows = [
        {"step": s, "reward/mean": s, "reward/right/mean": 0.5, "reward/form/mean": 1.0}
        | {"train/entropy": 2.0, "reward/dead_groups": 0.25, "train/objective": 0.0}
        for s in (1, 2)
    ]
    lines = headline_lines(rows)
    assert [line.title for line in lines] == ["Reward", "Entropy", "Groups of equal rewards"]
    assert lines[0].values == [1, 2]
    assert [name for name, _, _ in lines[0].others] == ["form", "right"]
    assert lines[2].percent
    assert headline_lines([{"step": 1, "train/loss": 2.0}]) == []
    (only,) = headline_lines([{"step": 1, "reward/mean": 1.0, "reward/right/mean": 1.0}])
    assert not only.others


def test_the_page_has_the_table(tmp_path):
    Run.parse({"name": "sums", "method": {"kind": "grpo"}}).save(tmp_path / "run.toml")
    with RunLog(tmp_path, console=False) as log:
        log.log(1, {"reward/mean": 0.5, "rollout/length": 3.0})
    write(tmp_path, GREEDY)
    data = read_run(tmp_path)
    assert data.samples == []
    assert data.curves == []
    assert [curve.title for curve in data.rewards] == ["Reward", "Length of answers"]
    page = Page(write_report(tmp_path, tmp_path / "report.html").read_text("utf-8"))
    assert page.table("changes") == [
        ["1+1=", "<b>7</b>", "2", "–", "1.5", "0", "1", "–", "0.5"],
        ["2+2=", "4", "4.", "2", "2", "1", "1", "1", "1"],
    ]
    assert GREEDY_NOTE in page.words["changes"]
