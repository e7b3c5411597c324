import os
import subprocess
from pathlib import Path

import pytest

from stepwell.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text('name = "tiny"\n[train]\nglobal_batch_rows = 64\n')
    return tmp_path


def launch(words: str) -> int:
    return main(["launch", *words.split()])


def test_a_script_for_a_recipe_that_ships(folder, capsys):
    asked = "--slurm llama3-8b-pretrain --nodes 8 --time 1-0 -o job.sh --sbatch qos=high"
    assert launch(f"{asked} --sbatch exclusive -- --optim.lr 1e-4 --resume") == 0
    said = capsys.readouterr().out
    assert "8 nodes x 8 GPUs = 64 ranks: pp 1 x dp_replicate 1 x dp_shard 64 x cp 1 x tp 1" in said
    script = Path("job.sh").read_text()
    assert sorted(os.listdir(folder)) == ["a.toml", "job.sh"]
    assert os.access("job.sh", os.X_OK)
    assert "-m stepwell pretrain llama3-8b-pretrain --optim.lr 1e-4 --resume" in script
    assert f"#SBATCH --chdir={folder}\n" in script
    assert "#SBATCH --qos=high\n#SBATCH --exclusive\n" in script
    assert "#SBATCH --job-name=llama3-8b-pretrain\n" in script


def test_a_script_on_standard_output(capsys):
    assert launch("--slurm a.toml --no-requeue --max-restarts 0 --name other") == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n")
    assert "#SBATCH --no-requeue\n" in script
    assert "#SBATCH --job-name=other\n" in script
    assert "max_restarts=0\n" in script
    assert "requeue=1" not in script
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a.toml", "say what to launch with: --slurm"),
        ("--slurm b.toml", "no recipe 'b.toml'"),
        (
            "--slurm a.toml --nodes 3 -- --layout.tp 7",
            "3 nodes x 8 GPUs = 24 ranks: layout.tp=7 must divide the number of ranks, 24; the "
            "nearest",
        ),
        (
            "--slurm a.toml --nodes 2 -- --layout.dp-shard 8",
            "2 nodes x 8 GPUs = 16 ranks: layout.dp_shard=8 x the other axes' 1 = 8 must equal",
        ),
        (
            "--slurm a.toml --nodes 16",
            "128 ranks exceed train.global_batch_rows=64, so some would have no row; the nearest "
            "legal value is 64 ranks",
        ),
        ("--slurm a.toml -- --optim.lrr 1", "did you mean"),
        ("--slurm a.toml -- --nproc 2", "have no place after `--`"),
        ("--slurm a.toml -- b.toml", "after `--` come options only, not 'b.toml'"),
        ("--slurm a.toml --nodes 0", "--nodes 0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(folder, capsys, words, message):
    cut = words.find(" -- ")
    words = f"{words} -o job.sh" if cut < 0 else f"{words[:cut]} -o job.sh{words[cut:]}"
    assert launch(words) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(folder) == ["a.toml"]
