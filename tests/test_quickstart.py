"""The small quickstart as a user runs it: killed twice on its way, then finished, then repeated."""

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stepwell.metrics import read_events, read_metrics
from stepwell.posttrain.chain_sum import Problem
from stepwell.quickstart.main import claim, main
from stepwell.quickstart.state import SMALL
from stepwell.types import ConfigError

COMMAND = [sys.executable, "-m", "stepwell.cli", "quickstart", "--small", "--dir"]


def start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def kill_when(root: Path, reached) -> None:
    """kill -9 as soon as `reached(root)` holds."""
    process = start(root)
    deadline = time.monotonic() + 200
    while not reached(root):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def last_step(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    if not path.exists() or not path.read_text().endswith("\n"):
        return 0
    return json.loads(path.read_text().splitlines()[-1])["step"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("quickstart") / "run"
    kill_when(root, lambda r: last_step(r / "pretrain") >= 8)
    kill_when(root, lambda r: last_step(r / "grpo") >= 1)
    process = start(root)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    assert "[1/8] curate" not in output
    assert "[3/8] pretrain" not in output
    return root


def results(root: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in (root / "done").glob("*.json")}


@pytest.mark.timeout(600)
def test_every_stage_ran_to_its_end_and_no_step_twice(finished):
    found = results(finished)
    assert set(found) == {"curate", "tokenizer", "pretrain", "sft", "grpo", "evaluate", "export",
                          "report"}  # fmt: skip
    for stage in ("pretrain", "sft", "grpo"):
        steps = [row["step"] for row in read_metrics(finished / stage)]
        assert steps == list(range(1, SMALL.overrides[stage]["train.steps"] + 1))


@pytest.mark.timeout(600)
def test_the_guard_has_nothing_to_say(finished):
    """Healthy runs, from their first steps on."""
    for stage in ("pretrain", "sft", "grpo"):
        kinds = {event["event"] for event in read_events(finished / stage)}
        assert not kinds & {"skip", "stop", "rewind"}, stage


def test_no_heldout_problem_is_trained_on(finished):
    keys = {}
    for name in ("train", "prompts", "heldout"):
        lines = (finished / "problems" / f"{name}.jsonl").read_text().splitlines()
        prompts = [json.loads(line)["prompt"][0]["content"] for line in lines]
        terms = [re.findall(r"[+-]?\d+", prompt.removesuffix("=?")) for prompt in prompts]
        keys[name] = {Problem(tuple(map(int, t))).key for t in terms}
    assert not keys["heldout"] & (keys["train"] | keys["prompts"])
    assert not keys["train"] & keys["prompts"]
    assert len(keys["heldout"]) == SMALL.num_heldout


@pytest.mark.timeout(600)
def test_the_export_gives_the_same_logits_in_transformers(finished):
    transformers = pytest.importorskip("transformers")
    from stepwell.tokenizer import Tokenizer

    folder = finished / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "def main():\n    return 1+2"
    assert tokenizer(text)["input_ids"] == Tokenizer.load(finished / "tokenizer").encode(text)
    assert results(finished)["export"]["largest_logit_difference"] < 1e-4
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.timeout(600)
def test_the_report_shows_what_was_measured(finished):
    page = html.unescape((finished / "report.html").read_text())
    found = results(finished)
    evaluation = found["evaluate"]
    assert evaluation["summary"] in page
    for stage in evaluation["stages"].values():
        assert f"{100 * stage['accuracy']:.1f}" in page
        assert f"{100 * stage['accuracy_sampled']:.1f} % after" in page
    assert f"{evaluation['stages']['pretrain']['bits_per_byte']:.3f}" in page
    for reason, count in found["curate"]["dropped"].items():
        assert reason in page
        assert f"{count:,}" in page
    for sample in evaluation["samples"]:
        assert sample["prompt"] in page
    tokens = sum(row["train/tokens"] for row in read_metrics(finished / "pretrain"))
    assert found["pretrain"]["tokens"] == tokens
    assert f"{int(tokens):,}" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.timeout(600)
def test_predicted_memory_is_what_was_measured(finished):
    for predicted, measured in (
        found for name, found in results(finished)["pretrain"]["memory"].items() if name != "items"
    ):
        assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.timeout(600)
def test_a_finished_quickstart_says_so_and_redoes_nothing(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert main(["--small", "--dir", str(finished)]) == 0
    assert "finished before" in capsys.readouterr().err
    after = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert after == before


def test_another_quickstart_or_foreign_files_are_refused(tmp_path):
    claim(tmp_path / "a", {"small": True})
    claim(tmp_path / "a", {"small": True})
    with pytest.raises(ConfigError, match="fresh"):
        claim(tmp_path / "a", {"small": False})
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        claim(tmp_path, {"small": True})
    with pytest.raises(ConfigError, match="left alone"):
        main(["--fresh", "--dir", str(tmp_path)])
    assert (tmp_path / "mine.txt").exists()
