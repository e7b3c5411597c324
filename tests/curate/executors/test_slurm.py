"""The scripts are run by a stand-in for sbatch, which runs each job at once: it shows that they are
right as scripts and in their order, not what Slurm makes of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.curate.executors.local import LocalExecutor
from stepwell.curate.executors.slurm import parse, run_array_element, write_scripts
from stepwell.curate.plan import make_plan
from stepwell.curate.recipe import Recipe
from stepwell.curate.run import curate
from stepwell.types import ConfigError, DataError
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


def submit(tmp_path, script):
    """Runs it with the stand-in, from another folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH.format(python=sys.executable))
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "JOBS": str(tmp_path / "jobs")}
    return subprocess.run([script], env=env, capture_output=True, text=True, cwd="/")


def test_arrays_and_decisions_in_turn_give_the_same_result(tmp_path, monkeypatch):
    """Sources and output are relative to where the command was given."""
    monkeypatch.chdir(tmp_path)
    corpus.write(Path("raw"))
    recipe = Recipe.parse(corpus.recipe(Path("raw"), batch_bytes=900, shard_bytes=6000))
    list(curate(make_plan(recipe), Path("local"), LocalExecutor(1)))
    out = Path("out")
    assert write_scripts(recipe, out, 2) == out / ".work" / "slurm" / "submit.sh"
    done = submit(tmp_path, str(tmp_path / "out" / ".work" / "slurm" / "submit.sh"))
    assert done.returncode == 0, done.stderr
    jobs = (tmp_path / "jobs").read_text().splitlines()
    stages = ["stage-00.sh 2", "decide-00.sh 1", "stage-01.sh 2", "stage-02.sh 2"]
    assert jobs == [*stages, "finish.sh 1"]
    assert corpus.result(out) == corpus.result(tmp_path / "local")


def test_a_finished_curation_is_not_queued_again_unless_made_anew(tmp_path):
    raw, out = tmp_path / "raw", tmp_path / "out"
    corpus.write(raw)
    recipe = Recipe.parse(corpus.recipe(raw))
    list(curate(make_plan(recipe), out, LocalExecutor(1)))
    assert write_scripts(recipe, out) is None
    assert not (out / ".work").exists()
    other = Recipe.parse(corpus.recipe(raw, shard_bytes=1000))
    with pytest.raises(ConfigError, match="add --fresh"):
        write_scripts(other, out)
    assert write_scripts(other, out, fresh=True) is not None
    assert not (out / "curation.json").exists()


def test_a_decision_waits_for_its_stage(tmp_path):
    corpus.write(tmp_path / "raw")
    write_scripts(Recipe.parse(corpus.recipe(tmp_path / "raw")), tmp_path / "out", 2)
    words = ["--work", str(tmp_path / "out" / ".work"), "--stage", "0"]
    with pytest.raises(DataError, match="2 of its tasks are missing, the first is 0"):
        run_array_element([*words, "--decide"])
    run_array_element(words)
    assert run_array_element([*words, "--decide"]) == 0


def test_a_decision_without_documents_says_so(tmp_path):
    corpus.write(tmp_path / "raw")
    values = corpus.recipe(tmp_path / "raw")
    values["steps"][0]["min_words"] = 5000
    write_scripts(Recipe.parse(values), tmp_path / "out", 2)
    words = ["--work", str(tmp_path / "out" / ".work"), "--stage", "0"]
    run_array_element(words)
    with pytest.raises(DataError, match="stage 0 of .*out left no document to decide about"):
        run_array_element([*words, "--decide"])


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
