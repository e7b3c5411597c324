import os

import pytest

from stepwell.launch.environ import (
    first_host,
    is_rank,
    num_restarts,
    rank_environment,
    rank_timeout_s,
    threads_per_rank,
)
from stepwell.types import ConfigError

SLURM = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}


def test_a_slurm_task_joins():
    assert is_rank(SLURM)
    environ = rank_environment(SLURM)
    assert environ | {"MASTER_PORT": ""} == {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": "",
    }
    assert 20_000 <= int(environ["MASTER_PORT"]) < 30_000
    assert rank_environment(SLURM | {"SLURM_PROCID": "0"})["MASTER_PORT"] == environ["MASTER_PORT"]


def test_an_incomplete_slurm_step_names_what_is_missing():
    with pytest.raises(ConfigError, match="SLURM_LOCALID is not set; start it with srun"):
        rank_environment({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"})


def test_torchrun_and_single_processes_keep_their_environment():
    torchrun = {"RANK": "0", "WORLD_SIZE": "2"}
    assert is_rank(torchrun)
    assert rank_environment(torchrun | SLURM) == {}
    assert not is_rank({"SLURM_STEP_NUM_TASKS": "1"})
    assert rank_environment({}) == {}


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("node[07-09,12],login1", "node07"),
        ("gpu-a[3,5-6]", "gpu-a3"),
        ("rack[1-2]-b,x", "rack1-b"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_threads_are_shared_out():
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == cores
    assert threads_per_rank(cores) == 1
    assert threads_per_rank(10 * cores) == 1


def test_restarts_are_counted_whoever_makes_them():
    assert num_restarts({}) == 0
    assert num_restarts({"SLURM_RESTART_COUNT": "2", "STEPWELL_RESTART_COUNT": "1"}) == 3
    assert num_restarts({"TORCHELASTIC_RESTART_COUNT": "1", "SLURM_RESTART_COUNT": ""}) == 1


def test_the_time_limit_of_collectives():
    assert rank_timeout_s({}) == 600
    assert rank_timeout_s({"STEPWELL_RANK_TIMEOUT_S": "12.5"}) == 12.5
    for text in ("0", "-1", "soon", "nan", "inf"):
        with pytest.raises(ConfigError, match=f"--rank-timeout {text} must be .* at least 1"):
            rank_timeout_s({"STEPWELL_RANK_TIMEOUT_S": text})
