"""`stepwell launch --slurm RECIPE [-- --dotted.key value ...]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from stepwell.commands.inputs import Place, parse_options
from stepwell.commands.ranks import check_rows, layout_text
from stepwell.commands.run_arguments import find_recipe, load_run, parse
from stepwell.config import Run
from stepwell.data.files import clean_disk_errors
from stepwell.files import whole_file
from stepwell.launch.slurm import Job, batch_script, check_job
from stepwell.parallel.rules import AxisSizes, check_run
from stepwell.types import ConfigError

Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
Number = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]


@dataclass
class Launch:
    """Writes a Slurm batch script that runs a recipe with one rank on every GPU of its nodes. It
    saves and queues itself again before its time is over, and starts all ranks again when one dies.
    What follows `--` are options and keys of the training command: -- --optim.lr 1e-4"""

    recipe: Positional[str]
    """A TOML file, or the name of a recipe that ships."""
    slurm: bool = False
    """For Slurm. (On one machine, --nproc of the training command needs no script.)"""
    nodes: int = 1
    """How many nodes."""
    gpus_per_node: int = 8
    """GPUs of each, and so ranks; 0 for a run without any."""
    tasks_per_node: Number = None
    """Ranks on each node, where there are no GPUs; without it, one."""
    cpus_per_task: Number = None
    """Cores of each rank; without it, an even share of the node's."""
    time: Text = None
    """Time limit, as Slurm writes it: 90, 12:00:00, 2-00."""
    partition: Text = None
    """Partition."""
    account: Text = None
    """Account."""
    name: Text = None
    """Name of the job; without it, the recipe's."""
    save_before_s: int = 300
    """How many seconds before its end the run saves and queues itself again."""
    no_requeue: bool = False
    """Never queue the job again: not after preemption, not when its time is over."""
    max_restarts: int = 3
    """How often all ranks start again in the same allocation when one dies."""
    logs: str = "slurm-logs"
    """Folder for what each rank writes."""
    sbatch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A further option of sbatch, as name=value; may be given several times."""
    out: Annotated[Place, tyro.conf.arg(aliases=["-o"])] = None
    """The file to write; without it, standard output."""


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    options = parse_options("launch", Launch, words[:cut])
    if not options.slurm:
        raise ConfigError(
            "say what to launch with: --slurm writes a batch script; on one machine no script is "
            "needed, give the training command --nproc N"
        )
    path = find_recipe(options.recipe)
    run = checked_run(path, words[cut + 1 :])
    job = job_of(options, run)
    check_job(job)
    command = [sys.executable, "-m", "stepwell", run.method.kind, options.recipe]
    notes = [f"{described(job)}: {layout_text(check_layout(run, job))}"]
    script = batch_script(job, [*command, *words[cut + 1 :]], os.getcwd(), notes)
    if options.out is None:
        print(script, end="")
        return 0
    write(Path(options.out), script)
    print(f"{options.out}: {notes[0]}\nsbatch {options.out}")
    return 0


def checked_run(recipe: Path, words: Sequence[str]) -> Run:
    """The run that the training command will read from the recipe and these words."""
    arguments = parse(words)
    if arguments.recipe is not None:
        raise ConfigError(f"after `--` come options only, not {arguments.recipe!r}")
    if arguments.num_procs is not None or arguments.max_restarts is not None or arguments.check:
        raise ConfigError(
            "--nproc, --max-restarts and --check have no place after `--`: the script starts the "
            "ranks; give `stepwell launch` its own --max-restarts"
        )
    arguments.recipe = str(recipe)
    return load_run(Run.load(recipe).method.kind, arguments)


def job_of(options: Launch, run: Run) -> Job:
    return Job(
        name=options.name or run.name,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        tasks_per_node=options.tasks_per_node,
        cpus_per_task=options.cpus_per_task,
        time=options.time,
        partition=options.partition,
        account=options.account,
        save_before_s=options.save_before_s,
        requeue=not options.no_requeue,
        max_restarts=options.max_restarts,
        logs=options.logs,
        more=tuple(f"--{option}" for option in options.sbatch),
    )


def check_layout(run: Run, job: Job) -> AxisSizes:
    """Raises ConfigError unless the layout fills the job's ranks and each has work."""
    try:
        check_rows(run, job.num_ranks, "{} ranks")
        return check_run(run, job.num_ranks)
    except ConfigError as error:
        raise ConfigError(f"{described(job)}: {error}") from None


def described(job: Job) -> str:
    """ "2 nodes x 8 GPUs = 16 ranks"."""
    what = "GPUs" if job.gpus_per_node else "tasks"
    return f"{job.nodes} nodes x {job.ranks_per_node} {what} = {job.num_ranks} ranks"


def write(path: Path, script: str) -> None:
    """Whole or not at all, and executable."""
    with clean_disk_errors(path), whole_file(path) as temporary:
        temporary.write_text(script, "utf-8")
        temporary.chmod(0o755)
