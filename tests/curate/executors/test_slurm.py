"""The scripts are run by a stand-in for sbatch, which runs each job at once: it shows that they are
right as scripts and in their order, not what Slurm makes of them."""

import os
import subprocess
import sys

import pytest

from stepwell.curate.executors.local import LocalExecutor
from stepwell.curate.executors.slurm import parse, write_scripts
from stepwell.curate.plan import make_plan
from stepwell.curate.recipe import Recipe
from stepwell.curate.run import curate
from stepwell.types import ConfigError
from tests.curate import corpus

SBATCH = """#!{python}
import os, pathlib, re, subprocess, sys

log = pathlib.Path(os.environ["JOBS"])
jobs = log.read_text().splitlines() if log.exists() else []
words = sys.argv[1:]
script = words[-1]
array = next((w.removeprefix("--array=") for w in words if w.startswith("--array=")), "0-0")
after = next((w.rpartition(":")[2] for w in words if w.startswith("--dependency=afterok:")), None)
assert after == (str(len(jobs)) if jobs else None), (after, jobs)
last = int(array.partition("-")[2])
for i in range(last + 1):
    env = dict(os.environ, SLURM_ARRAY_TASK_ID=str(i), SLURM_ARRAY_TASK_COUNT=str(last + 1))
    subprocess.run(["bash", script], check=True, env=env, stdout=subprocess.DEVNULL)
log.write_text("\\n".join([*jobs, f"{{script}} {{last + 1}}"]) + "\\n")
print(len(jobs) + 1)
"""


def test_arrays_and_decisions_in_turn_give_the_same_result(tmp_path):
    raw, out = tmp_path / "raw", tmp_path / "out"
    corpus.write(raw)
    recipe = Recipe.parse(corpus.recipe(raw, batch_bytes=900, shard_bytes=6000))
    list(curate(make_plan(recipe), tmp_path / "local", LocalExecutor(1)))
    assert "submit.sh" in write_scripts(recipe, out, 2)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH.format(python=sys.executable))
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "JOBS": str(tmp_path / "jobs")}
    done = subprocess.run(
        [str(out / ".work" / "slurm" / "submit.sh")], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    jobs = (tmp_path / "jobs").read_text().splitlines()
    stages = ["stage-00.sh 2", "decide-00.sh 1", "stage-01.sh 2", "stage-02.sh 2"]
    assert jobs == [*stages, "finish.sh 1"]
    assert corpus.result(out) == corpus.result(tmp_path / "local")


def test_scripts_pass_shellcheck(tmp_path):
    corpus.write(tmp_path / "raw")
    write_scripts(Recipe.parse(corpus.recipe(tmp_path / "raw")), tmp_path / "out", 3)
    scripts = sorted(map(str, (tmp_path / "out" / ".work" / "slurm").glob("*.sh")))
    assert len(scripts) == 6
    checker = os.path.join(os.path.dirname(sys.executable), "shellcheck")
    done = subprocess.run([checker, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "words",
    ["--work x", "--work x --stage a", "--work x --stage 0 --share 2/2", "--stage 0 --decide"],
)
def test_a_task_that_is_none_is_refused(words):
    with pytest.raises(ConfigError, match="--share"):
        parse(words.split())
