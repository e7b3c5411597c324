"""Job arrays of Slurm over the same plan: an array for each stage, then a job that decides, and at
the end one that puts the result together. Each waits for the one before; `submit.sh` queues all.

How many tasks a stage has is known only when the one before has ended, so element i of n does every
task whose number is i modulo n.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepwell.curate.checks import check_recipe
from stepwell.curate.plan import Plan, make_plan, write_plan
from stepwell.curate.recipe import Recipe
from stepwell.curate.run import WORK, is_finished, remove_results
from stepwell.curate.tasks import decide, has_decision, num_tasks, run_task
from stepwell.files import write_text
from stepwell.train.lock import folder_lock
from stepwell.types import ConfigError

FOLDER, SUBMIT = "slurm", "submit.sh"
ELEMENTS = 16


@dataclass(frozen=True)
class Element:
    """What a job does: its share of a stage's tasks, or (share None) the decision after it."""

    work: Path
    stage: int
    share: tuple[int, int] | None


def write_scripts(
    recipe: Recipe, out: Path, elements: int | None = None, fresh: bool = False
) -> Path | None:
    """Writes the plan and the scripts into `out`; returns the script that queues them, or None
    where the curation is finished already.

    elements: of each array (16). Partition, account and limits are what SBATCH_PARTITION,
    SBATCH_ACCOUNT and SBATCH_TIMELIMIT say when submit.sh runs. Raises ConfigError as `curate`.
    """
    plan = make_plan(recipe)
    if is_finished(plan, out, fresh):
        return None
    check_recipe(recipe)
    work = out / WORK
    folder = work / FOLDER
    with folder_lock(out):
        if fresh and out.exists():
            remove_results(out)
        folder.mkdir(parents=True, exist_ok=True)
        write_plan(plan, work)
    # What the last job loads: the recipe with everything that the command line set.
    recipe.save(folder / "recipe.toml")
    for name, text in scripts(plan, out.absolute(), elements or ELEMENTS).items():
        write_text(folder / name, text)
        (folder / name).chmod(0o755)
    return folder / SUBMIT


def scripts(plan: Plan, out: Path, elements: int) -> dict[str, str]:
    work = out / WORK
    lines = ["#!/bin/bash", "set -euo pipefail", f"cd {shlex.quote(str(work / FOLDER))}", "after="]
    files: dict[str, str] = {}
    for stage in range(len(plan.stages) + 1):
        name = f"stage-{stage:02d}.sh"
        files[name] = _script(plan, work, stage, share=True)
        lines.append(_queue(name, f"--array=0-{elements - 1} "))
        if stage < len(plan.stages) and has_decision(plan, stage):
            name = f"decide-{stage:02d}.sh"
            files[name] = _script(plan, work, stage, share=False)
            lines.append(_queue(name))
    recipe = work / FOLDER / "recipe.toml"
    words = [sys.executable, "-m", "stepwell", "curate", str(recipe), "--out", str(out)]
    files["finish.sh"] = _job(plan, f"exec {shlex.join(words)}")
    lines += [_queue("finish.sh"), 'echo "queued; the last job is $job"']
    return {**files, SUBMIT: "\n".join(lines) + "\n"}


def run_array_element(argv: Sequence[str]) -> int:
    """`stepwell curate task --work FOLDER --stage K (--share I/N | --decide)`."""
    element = parse(argv)
    if element.share is None:
        decide(element.work, element.stage)
        return 0
    from stepwell.curate.plan import read_plan

    index, count = element.share
    total = num_tasks(read_plan(element.work), element.work, element.stage)
    for number in range(index, total, count):
        run_task(element.work, element.stage, number)
    return 0


def parse(argv: Sequence[str]) -> Element:
    """Raises ConfigError."""
    words = dict(zip(argv[::2], argv[1::2], strict=False))
    is_decision = "--decide" in argv
    try:
        work, stage = Path(words["--work"]), int(words["--stage"])
        index, _, count = words.get("--share", "0/1").partition("/")
        share = (int(index), int(count))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "a curation's task is --work FOLDER --stage K (--share I/N | --decide), not "
            f"{shlex.join(argv)}"
        ) from error
    if not 0 <= share[0] < share[1]:
        raise ConfigError(f"--share {share[0]}/{share[1]}: the first must be below the second")
    return Element(work, stage, None if is_decision else share)


def _script(plan: Plan, work: Path, stage: int, share: bool) -> str:
    words = [sys.executable, "-m", "stepwell", "curate", "task"]
    words += ["--work", str(work), "--stage", str(stage)]
    end = ' --share "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"' if share else " --decide"
    return _job(plan, f"exec {shlex.join(words)}{end}")


def _job(plan: Plan, line: str) -> str:
    head = "#!/bin/bash\n#SBATCH --requeue\n#SBATCH --output=%x-%A-%a.out\nset -e\n"
    return f"{head}cd {shlex.quote(plan.folder)}\n{line}\n"


def _queue(script: str, options: str = "") -> str:
    return (
        f"job=$(sbatch --parsable --kill-on-invalid-dep=yes ${{after:+--dependency=afterok:$after}}"
        f" {options}--job-name=curate-{script.removesuffix('.sh')} {script})\nafter=$job"
    )
