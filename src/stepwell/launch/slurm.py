"""A Slurm batch script that runs a training command on every GPU of its nodes. No torch.

One task a rank: the command joins by what `srun` puts into its environment, so there is no
rendezvous to set up. What the script does about ends:

- Before the time limit, Slurm sends the script SIGUSR1 (`--signal`). It passes it on to the tasks,
  which finish their step, save and end; then it puts the job into the queue again.
- On preemption, Slurm sends SIGTERM and, because of `--requeue`, queues the job again by itself,
  as it does when a node fails. `scancel` sends SIGTERM too, and such a job must not come back; so
  after SIGTERM the tasks save and the script queues nothing.
- `srun` answers SIGTERM by killing its tasks (SIGKILL) but forwards SIGUSR1: that is why the tasks
  get SIGUSR1 in both cases.
- When a rank dies, the others end (`launch/peers`) and all start again from the last checkpoint in
  the same allocation, `max_restarts` times.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.types import ConfigError

TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?$")
FORMS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm. gpus_per_node 0: no GPUs, tasks_per_node ranks on cores.

    time: in one of Slurm's forms. save_before_s: how long before that the run saves and queues
    itself again. more: further options of sbatch, as `--name=value`.
    """

    name: str
    nodes: int = 1
    gpus_per_node: int = 8
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    save_before_s: int = 300
    requeue: bool = True
    max_restarts: int = 3
    logs: str = "slurm-logs"
    more: tuple[str, ...] = ()

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or self.gpus_per_node or 1

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def check_job(job: Job) -> None:
    """Raises ConfigError, which names the nearest legal value."""
    least = {
        "nodes": 1, "gpus_per_node": 0, "tasks_per_node": 1, "cpus_per_task": 1,
        "save_before_s": 10, "max_restarts": 0,
    }  # fmt: skip
    for name, smallest in least.items():
        value = getattr(job, name)
        if value is not None and value < smallest:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} {value} must be at least {smallest}, the nearest legal value"
            )
    gpus, tasks = job.gpus_per_node, job.tasks_per_node
    if gpus and tasks not in (None, gpus):
        raise ConfigError(
            f"--tasks-per-node {tasks} must equal --gpus-per-node {gpus}: every rank has one GPU; "
            "leave it out"
        )
    if job.time is not None and job.save_before_s >= seconds(job.time):
        raise ConfigError(
            f"--save-before-s {job.save_before_s} must be less than --time {job.time}; the nearest "
            f"legal value is {seconds(job.time) - 1}"
        )
    for option in job.more:
        if not re.match(r"--[a-z][\w-]*(=\S+)?$", option):
            given = option.removeprefix("--")
            raise ConfigError(
                f"--sbatch {given!r} must look like name=value, or name alone for a switch"
            )


def seconds(time: str) -> int:
    """A time limit in Slurm's forms. Raises ConfigError."""
    found = TIME.match(time)
    days, a, b, c = found.groups() if found else (None, None, None, None)
    if a is None:
        raise ConfigError(f"--time {time!r} is no time limit; Slurm takes {FORMS}")
    first, second, third = int(a), int(b or 0), int(c or 0)
    if days is not None:
        total = int(days) * 86_400 + first * 3600 + second * 60 + third
    elif b is None:
        total = first * 60
    elif c is None:
        total = first * 60 + second
    else:
        total = first * 3600 + second * 60 + third
    if total <= 0:
        raise ConfigError(f"--time {time!r} must be longer than nothing; Slurm takes {FORMS}")
    return total


def batch_script(job: Job, command: Sequence[str], folder: str, notes: Sequence[str] = ()) -> str:
    """The script that runs `command` (words) as job.num_ranks ranks in `folder`; notes become
    comments."""
    head = ["#!/bin/bash", *(f"# {note}" for note in notes), *directives(job, folder)]
    gpu_words = " --gpu-bind=none" if job.gpus_per_node else ""
    words = {
        "@TASKS@": str(job.ranks_per_node),
        "@LOGS@": shlex.quote(job.logs),
        "@RESTARTS@": str(job.max_restarts),
        "@REQUEUE@": "1" if job.requeue else "",
        "@GPU_WORDS@": gpu_words,
        "@COMMAND@": shlex.join(command),
    }
    body = BODY
    for name, value in words.items():
        body = body.replace(name, value)
    return "\n".join(head) + "\n" + body


def directives(job: Job, folder: str) -> list[str]:
    options = [
        ("job-name", job.name),
        ("nodes", job.nodes),
        ("ntasks-per-node", job.ranks_per_node),
        ("gpus-per-node", job.gpus_per_node or None),
        ("cpus-per-task", job.cpus_per_task),
        ("time", job.time),
        ("partition", job.partition),
        ("account", job.account),
        ("chdir", folder),
        ("output", "slurm-%x-%j.out"),
        ("open-mode", "append"),
        ("signal", f"B:USR1@{job.save_before_s}"),
    ]
    lines = [f"--{name}={quoted(str(value))}" for name, value in options if value is not None]
    lines.append("--requeue" if job.requeue else "--no-requeue")
    return [f"#SBATCH {line}" for line in [*lines, *job.more]]


def quoted(value: str) -> str:
    """As Slurm reads it in a comment of the script: in double quotes where there are spaces."""
    if re.search(r"[\n\r\"\\]", value):
        raise ConfigError(f"{value!r} cannot stand in a Slurm script; use plain names")
    return f'"{value}"' if re.search(r"\s", value) else value


BODY = r"""
set -euo pipefail

logs=@LOGS@
max_restarts=@RESTARTS@
mkdir -p "$logs"

# An even share of the node's cores for every rank; srun does not take sbatch's by itself.
cores=${SLURM_CPUS_PER_TASK:-$(( ${SLURM_CPUS_ON_NODE:-@TASKS@} / @TASKS@ ))}
(( cores > 0 )) || cores=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores}

step=
heard=
saving=
requeue=
status=130
# shellcheck disable=SC2329
forward() {
    heard=1
    saving=1
    # srun passes SIGUSR1 on to the tasks; on SIGTERM it would kill them.
    if [[ -n $step ]]; then kill -USR1 "$step" 2>/dev/null || true; fi
}
# shellcheck disable=SC2329
on_time_limit() { requeue=@REQUEUE@; forward; }
trap on_time_limit USR1
trap forward TERM

restart=0
while [[ -z $saving ]]; do
    export STEPWELL_RESTART_COUNT=$restart
    echo "$(date '+%F %T') job ${SLURM_JOB_ID} on ${SLURM_JOB_NODELIST:-?}: start $restart" \
        "(queued again ${SLURM_RESTART_COUNT:-0} times); logs are $logs/*-${SLURM_JOB_ID}-RANK.log"
    [[ -z $saving ]] || break # a signal came since the last step
    srun --ntasks-per-node=@TASKS@ --cpus-per-task="$cores"@GPU_WORDS@ --distribution=block \
        --kill-on-bad-exit=0 --wait=120 --open-mode=append --output="$logs/%x-%j-%t.log" \
        @COMMAND@ &
    step=$!
    if [[ -n $saving ]]; then forward; fi # or before its number was known
    status=0
    wait "$step" || status=$?
    while [[ -n $heard ]]; do # a signal ended `wait`, not the step
        heard=
        again=0
        wait "$step" || again=$?
        (( again == 127 )) || status=$again
    done
    step=
    case $status in
        0 | 2 | 3 | 4 | 5) requeue=; break ;; # done, or an error that would only come again
        130) break ;; # saved and stopped
    esac
    (( restart < max_restarts )) || break
    restart=$(( restart + 1 ))
    echo "$(date '+%F %T') the ranks ended with $status; from the last checkpoint, start $restart" \
        "of $max_restarts more"
done

echo "$(date '+%F %T') ended with $status"
if [[ -n $requeue ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
