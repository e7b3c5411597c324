"""One run at a time in a folder, and folders that cannot hold one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.train.folder import is_finished
from stepwell.train.lock import LOCK, folder_lock
from stepwell.train.start import open_session
from stepwell.types import CheckpointError, ConfigError
from tests.train.test_session import checkpoints, run_to, session_run

HOLD = """
import sys
from stepwell.train.lock import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    return child


def test_a_second_process_is_told_who_runs_there_until_that_one_is_gone(tmp_path):
    folder = tmp_path / "run"
    child = holder(folder)
    run = session_run(folder)
    with (
        pytest.raises(ConfigError, match=rf"a run is going on in {folder} \(pid {child.pid} on "),
        open_session(run, console=False),
    ):
        pass
    assert [path.name for path in folder.iterdir()] == [LOCK]
    child.kill()
    child.communicate()
    assert (folder / LOCK).exists()
    run_to(run, stop=10)
    assert checkpoints(folder) == [10]
    assert not (folder / LOCK).exists()


def test_a_lock_ends_with_its_block_and_leaves_nothing(tmp_path):
    folder = tmp_path / "run"
    mine = f"pid {os.getpid()} on"
    with folder_lock(folder), pytest.raises(ConfigError, match=mine), folder_lock(folder):
        pass
    assert not folder.exists()
    folder.mkdir()
    with folder_lock(folder):
        pass
    assert list(folder.iterdir()) == []


def test_paths_that_can_be_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with (
            pytest.raises(ConfigError, match=rf"{tmp_path / 'file'} is a file; choose another dir"),
            open_session(session_run(path), console=False),
        ):
            pass
    with (
        pytest.raises(ConfigError, match="cannot be a run's folder"),
        open_session(session_run(Path("/proc/stepwell")), console=False),
    ):
        pass


def test_a_failed_start_leaves_nothing(tmp_path):
    bad = session_run(tmp_path / "run", **{"checkpoint.branch_from": str(tmp_path)})
    with (
        pytest.raises(CheckpointError, match=r"checkpoint\.branch_from=.* is no checkpoint: give"),
        open_session(bad, console=False),
    ):
        pass
    assert not (tmp_path / "run").exists()
    good = session_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="first batch"), open_session(good, console=False):
        raise ConfigError("found out at the first batch")
    assert not (tmp_path / "run").exists()


def test_a_run_that_failed_later_stays(tmp_path):
    run_to(session_run(tmp_path), stop=10)
    more = session_run(tmp_path)
    with pytest.raises(ConfigError), open_session(more, console=False):
        raise ConfigError("x")
    assert (tmp_path / "run.toml").exists()
    assert (tmp_path / "metrics.jsonl").stat().st_size > 0


def test_a_branch_may_name_the_runs_folder(tmp_path):
    run_to(session_run(tmp_path / "trunk"))
    longer = {"train.steps": 12}
    with (
        pytest.raises(ConfigError, match=r"train\.steps.*checkpoint\.branch_from=.*trunk"),
        open_session(session_run(tmp_path / "trunk", **longer), console=False),
    ):
        pass
    point = {"checkpoint.branch_from": str(tmp_path / "trunk")}
    found, session = run_to(session_run(tmp_path / "branch", **longer, **point))
    assert found == {"place": 10}
    assert session.engine.step == 12


def test_finished_is_this_very_run_done(tmp_path):
    run = session_run(tmp_path)
    assert not is_finished(run)
    run_to(run, stop=10)
    assert is_finished(run)
    assert not is_finished(session_run(tmp_path, **{"optim.lr": 0.5}))


def test_another_tokenizer_is_refused_on_resume(tmp_path):
    run = session_run(tmp_path, **{"checkpoint.every_steps": 3})
    with open_session(run, console=False, tokenizer="a" * 64) as session:
        session.save({"place": 0})
    with (
        pytest.raises(ConfigError, match=r"fingerprint b{12}\).*fingerprint a{12}\)"),
        open_session(run, console=False, tokenizer="b" * 64),
    ):
        pass
    with open_session(run, console=False, tokenizer="a" * 64) as session:
        assert session.extra == {"place": 0}
