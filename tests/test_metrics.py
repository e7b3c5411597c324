import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stepwell.config import LogConfig
from stepwell.metrics import (
    RunLog,
    _open_wandb,
    clock_text,
    event_text,
    read_events,
    read_metrics,
    series,
    status_text,
)
from stepwell.types import ConfigError, DataError, StepwellError
from tests.disk import largest_file


def quiet(run_dir, **options):
    return RunLog(run_dir, console=False, **options)


def test_lines_are_flat_json_with_step_and_time(tmp_path):
    before = time.time()
    with quiet(tmp_path / "run") as log:
        log.log(1, {"train/loss": torch.tensor(2.5), "train/lr": np.float32(0.5), "n/a": 3})
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert before <= line.pop("time") <= time.time()
    assert line == {"step": 1, "train/loss": 2.5, "train/lr": 0.5, "n/a": 3}


def test_non_finite_values_stay_valid_json_and_come_back_as_floats(tmp_path):
    with quiet(tmp_path) as log:
        log.log(1, {"a/nan": math.nan, "a/inf": math.inf, "a/minus": torch.tensor(-math.inf)})
        log.event("skip", 1, reason="non-finite", norms=[math.nan, 1.0], ids=(1, 2))

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for name in ("metrics.jsonl", "events.jsonl"):
        json.loads((tmp_path / name).read_text(), parse_constant=refuse)
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["a/nan"])
    assert (row["a/inf"], row["a/minus"]) == (math.inf, -math.inf)
    (event,) = read_events(tmp_path)
    assert (event["event"], event["step"], event["reason"]) == ("skip", 1, "non-finite")
    assert math.isnan(event["norms"][0])
    assert event["ids"] == [1, 2]


def test_resume_cuts_the_steps_that_are_done_again(tmp_path):
    with quiet(tmp_path) as log:
        for step in range(1, 8):
            log.log(step, {"train/loss": float(step)})
        log.event("start")
        log.event("skip", 3, reason="spike")
        log.event("skip", 6, reason="spike")
    with quiet(tmp_path, last_step=4) as log:
        log.event("resume", 4)
        for step in range(5, 8):
            log.log(step, {"train/loss": -float(step)})
    steps, losses = series(read_metrics(tmp_path), "train/loss")
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert losses == [1, 2, 3, 4, -5, -6, -7]
    assert [(e["event"], e.get("step")) for e in read_events(tmp_path)] == [
        ("start", None),
        ("skip", 3),
        ("resume", 4),
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_last_step_minus_one_starts_afresh_and_none_keeps_all(tmp_path):
    for last_step, expected in [(None, [1]), (None, [1, 2]), (-1, [3])]:
        with quiet(tmp_path, last_step=last_step) as log:
            log.log(max(expected), {"a/b": 1})
        assert series(read_metrics(tmp_path), "a/b")[0] == expected


def test_half_a_line_is_dropped_on_reopening(tmp_path):
    with quiet(tmp_path) as log:
        log.log(1, {"a/b": 1.0})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 2, "a/b": 1')
    assert len(read_metrics(tmp_path)) == 1
    with quiet(tmp_path) as log:
        assert path.read_bytes() == whole
        log.log(2, {"a/b": 2.0})
    assert series(read_metrics(tmp_path), "a/b") == ([1, 2], [1.0, 2.0])


WRITER = """
import sys
from stepwell.metrics import RunLog
log = RunLog(sys.argv[1], console=False, last_step=int(sys.argv[2]))
step = int(sys.argv[2])
while True:
    step += 1
    log.log(step, {"train/loss": 1.0 / step, "pad/x": float("nan")})
    log.event("mark", step)
"""


def test_kill_9_twice_leaves_each_step_once(tmp_path):
    last = 0
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(last)])
        deadline = time.time() + 60
        path = tmp_path / "metrics.jsonl"
        while time.time() < deadline:
            if path.exists() and series(read_metrics(tmp_path), "train/loss")[0][-1:] > [last + 50]:
                break
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        reached = read_metrics(tmp_path)[-1]["step"]
        assert reached > last + 50
        last = reached - 20
    quiet(tmp_path, last_step=last).close()
    steps, losses = series(read_metrics(tmp_path), "train/loss")
    assert steps == list(range(1, last + 1))
    assert losses == [1.0 / step for step in steps]
    assert [e["step"] for e in read_events(tmp_path)] == steps


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path):
    code = (
        "import resource, signal, sys\n"
        "from stepwell.metrics import RunLog\n"
        "from stepwell.types import StepwellError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "log = RunLog(sys.argv[1], console=False)\n"
        "try:\n"
        "    for step in range(1, 1000): log.log(step, {'train/loss': 1.0})\n"
        "except StepwellError as error: print(step, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    failed_step, message = done.stdout.split(" ", 1)
    assert "metrics.jsonl: File too large" in message
    content = (tmp_path / "metrics.jsonl").read_bytes()
    assert content.endswith(b"\n")
    assert len(read_metrics(tmp_path)) == int(failed_step) - 1


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "\\NaN", "\\\\-Infinity", "+NaN"])
def test_a_text_that_reads_like_no_finite_number_stays_a_text(tmp_path, text):
    with quiet(tmp_path) as log:
        log.event("answer", 1, completion=text, scores=[text, math.inf, -math.inf], other=math.nan)
    (event,) = read_events(tmp_path)
    assert event["completion"] == text
    assert event["scores"] == [text, math.inf, -math.inf]
    assert math.isnan(event["other"])


def test_other_ranks_write_nothing(tmp_path):
    with RunLog(tmp_path / "run", rank=1) as log:
        log.log(1, {"a/b": 1.0})
        log.event("resume", 1)
    assert not (tmp_path / "run").exists()


def test_a_step_may_have_two_lines_but_no_key_twice(tmp_path):
    with quiet(tmp_path) as log:
        log.log(1, {"train/loss": 2.0})
        log.log(1, {"eval/loss": 3.0})
        with pytest.raises(ValueError, match="step 1 already has train/loss"):
            log.log(1, {"train/loss": 2.0})
        log.log(2, {"train/loss": 1.0})
        with pytest.raises(ValueError, match="step 1 comes after step 2"):
            log.log(1, {"train/loss": 2.0})
    with quiet(tmp_path) as log, pytest.raises(ValueError, match="last_step=0"):
        log.log(1, {"train/loss": 2.0})
    first, second = read_metrics(tmp_path)
    assert (first["train/loss"], first["eval/loss"], second["train/loss"]) == (2.0, 3.0, 1.0)


@pytest.mark.parametrize("values", [{"step": 1}, {"time": 1.0}])
def test_reserved_names_are_refused(tmp_path, values):
    with quiet(tmp_path) as log, pytest.raises(ValueError, match="the line has it already"):
        log.log(1, values)


def test_a_text_is_no_metric(tmp_path):
    with quiet(tmp_path) as log, pytest.raises(TypeError, match="a/b"):
        log.log(1, {"a/b": "three"})


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"a/b": 1}'])
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2 is damaged"):
        read_metrics(tmp_path)


def test_missing_metrics_are_an_error_and_missing_events_are_none(tmp_path):
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        read_metrics(tmp_path)
    assert read_events(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StepwellError, match="cannot make the run folder"):
        quiet(tmp_path / "file" / "run")


def test_plain_lines_when_not_a_terminal(tmp_path, capsys):
    with RunLog(tmp_path, name="sft", num_steps=30) as log:
        for step in range(1, 31):
            log.log(step, {"train/loss": 2.0, "speed/tokens_per_s": 12345.6, "speed/mfu": 0.312})
        log.event("skip", 30, reason="spike")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == "sft: step 1/30  loss 2  12,346 tok/s  MFU 31.2 %"
    assert lines[1].startswith("sft: step 30/30  loss 2")
    assert lines[1].endswith("0:00 left")
    assert lines[2] == "sft: [skip at step 30] reason=spike"


def test_events_show_what_they_hold():
    shown = event_text("data", 3, {"rows": 0, "dropped": {}, "more": [], "path": ""})
    assert shown == "[data at step 3] rows=0, path="
    assert event_text("data", None, {"dropped": {"x": 1}}) == "[data] dropped={'x': 1}"


def test_progress_on_a_terminal(tmp_path):
    code = (
        "import sys\nfrom stepwell.metrics import RunLog\n"
        "with RunLog(sys.argv[1], name='pretrain', num_steps=40) as log:\n"
        "    for step in range(1, 41): log.log(step, {'train/loss': 1.25, 'speed/mfu': .5})\n"
        "    log.event('skip', 40, reason='[spike]')\n"
    )
    controller, terminal = os.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stderr=terminal, env=env
    )
    os.close(terminal)
    seen = b""
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    assert process.wait() == 0
    text = seen.decode()
    assert "pretrain" in text
    assert "step 40/40  loss 1.25  MFU 50.0 %" in text
    assert "reason=[spike]" in text


def test_status_text_shows_only_what_is_known():
    assert status_text(7, None, {}, None) == "step 7"
    assert status_text(7, 9, {"reward/mean": 0.5}, 3725.2) == (
        "step 7/9  reward 0.500  1:02:05 left"
    )
    values = {"reward/mean": 0.5, "reward/accuracy": 0.25, "train/kl": 0.0123, "train/entropy": 1.5}
    values |= {"rollout/length": 41.7, "reward/dead_groups": 0.5, "train/objective": 0.1}
    assert status_text(7, None, values, None) == (
        "step 7  reward 0.500  right 25 %  KL 0.012  entropy 1.5  42 tokens an answer  "
        "dead groups 50 %"
    )
    values = {"rollout/length": 17.0, "rollout/environment_failures": 0}
    assert status_text(7, None, values, None) == "step 7  17 tokens an answer over all turns"
    assert (clock_text(5), clock_text(65), clock_text(59.7)) == ("0:05", "1:05", "1:00")


def test_tensorboard_gets_every_value(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with quiet(tmp_path, config=LogConfig(tensorboard=True)) as log:
        log.log(1, {"train/loss": 2.5})
        log.log(2, {"train/loss": 1.5})
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(s.step, s.value) for s in found.Scalars("train/loss")] == [(1, 2.5), (2, 1.5)]


def test_wandb_missing_names_the_extra(tmp_path):
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    with pytest.raises(ConfigError, match=r"stepwell\[wandb\]"):
        quiet(tmp_path / "run", config=LogConfig(wandb_project="p"))
    assert not (tmp_path / "run").exists()


def test_the_name_of_a_wandb_run_is_whole_or_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: given["id"]))
    with largest_file(0), pytest.raises(OSError, match="wandb_id"):
        _open_wandb(tmp_path, "p", "a run", 3, None)
    assert list(tmp_path.iterdir()) == []
    name = _open_wandb(tmp_path, "p", "a run", 3, None)
    assert name.startswith("a-run-")
    assert _open_wandb(tmp_path, "p", "a run", 4, None) == name


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with quiet(tmp_path, config=LogConfig(wandb_project="p"), settings={"a": 1}) as log:
        log.log(1, {"train/loss": 2.5})
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
