"""Tiny runs for tests: data, settings, and `stepwell ...` in a process of its own.

The processes are forked from the server of `tests.parallel.ranks`, which has torch imported: they
are real processes (they can be killed) without a second and a half of start-up each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stepwell import cli
from stepwell.config import Run
from stepwell.data.store import StoreWriter
from stepwell.metrics import read_lines
from stepwell.models.flops import parameter_shapes
from stepwell.tokenizer import Tokenizer
from stepwell.train.checkpoint import load_weights
from stepwell.train.engine import Engine
from stepwell.train.run_checkpoints import latest
from stepwell.train.weights import TOKENIZER
from tests.parallel.ranks import FORKSERVER

# What depends on the clock; everything else in metrics.jsonl must repeat itself.
CLOCK = {
    "time",
    "time/step_s",
    "time/rollout_wait_s",
    "time/sampling_s",
    "speed/tokens_per_s",
    "speed/mfu",
    "speed/hfu",
    "memory/peak_bytes",
}
MODEL = {
    "model.vocab_size": 320,
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 16,
    "model.d_ff": 64,
    "model.init_std": 0.1,
}


def write_store(folder: Path, seed: int, num_docs: int = 40, fingerprint: str = "f" * 64) -> Path:
    """Documents of 5 to 40 random ids below 320."""
    generator = torch.Generator().manual_seed(seed)
    with StoreWriter(folder, fingerprint, 320) as writer:
        for _ in range(num_docs):
            length = int(torch.randint(5, 41, (1,), generator=generator))
            writer.add(torch.randint(0, 320, (length,), generator=generator).numpy())
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_world(folder: Path) -> Path:
    """Stores `store`, `best` and `heldout`; `tokenizer`; the untrained model `base`; `chat.jsonl`,
    `heldout.jsonl` and `problems.jsonl`."""
    sums = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    tokenizer = Tokenizer.train([f"{a}+{b}={a + b} is the sum" for a, b in sums], 320)
    tokenizer.save(folder / "tokenizer")
    Engine(Run.parse({}, MODEL)).save(folder / "base", {TOKENIZER: tokenizer.fingerprint}).wait()
    for seed, name in enumerate(("store", "best", "heldout")):
        write_store(folder / name, seed, fingerprint=tokenizer.fingerprint)
    chats = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in sums]
    write_rows(folder / "chat.jsonl", chats[:48])
    write_rows(folder / "heldout.jsonl", chats[48:])
    write_rows(folder / "problems.jsonl", [{"prompt": f"{a}+{b}=", "answer": "x"} for a, b in sums])
    return folder


def settings(method: str, folder: str, **more: Any) -> dict[str, Any]:
    """Dotted keys of a tiny run of `method` in `folder`; paths are within a world."""
    data = {
        "pretrain": {"data.sources": '[{path = "store"}]'},
        "sft": {"model.init": "base", "data.path": "chat.jsonl", "data.tokenizer": "tokenizer"},
        "grpo": {
            "model.init": "base",
            "data.path": "problems.jsonl",
            "data.tokenizer": "tokenizer",
            "method.prompts_per_step": 2,
            "method.group_size": 3,
            "method.max_new_tokens": 6,
            # About half of what an untrained model says.
            "method.verifier": "regex:[a-m]",
            "method.self_test": "false",  # anything meets the pattern
        },
    }[method]
    if "method.rewards" in more:
        del data["method.verifier"]
    return {
        **MODEL,
        **data,
        "dir": folder,
        "data.seq_len": 32,
        **({} if method == "grpo" else {"train.global_batch_rows": 4}),
        "train.micro_batch_rows": 2,
        "train.steps": 6,
        "optim.lr": 0.01,
        **more,
    }


def words(method: str, values: dict[str, Any]) -> list[str]:
    """The command line of these settings."""
    return [method, *(w for key, value in values.items() for w in (f"--{key}", str(value)))]


def start(arguments: list[str], cwd: Path, log: Path) -> Any:
    process = FORKSERVER.Process(target=_main, args=(arguments, str(cwd), str(log)), daemon=True)
    process.start()
    return process


def finish(arguments: list[str], cwd: Path, log: Path, timeout_s: float = 60.0) -> tuple[int, str]:
    """Exit code, and what the command wrote to stdout and stderr."""
    process = start(arguments, cwd, log)
    process.join(timeout_s)
    assert process.exitcode is not None, log.read_text()
    return process.exitcode, log.read_text()


def stop_after(
    arguments: list[str], cwd: Path, log: Path, metrics: Path, num_lines: int, number: int
) -> int:
    """Sends signal `number` once metrics.jsonl has so many lines; returns the exit code."""
    process = start(arguments, cwd, log)
    deadline = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= num_lines:
            os.kill(process.pid, number)
            break
        time.sleep(0.001)
    process.join(60)
    assert process.exitcode is not None, log.read_text()
    return process.exitcode


def killed(arguments: list[str], cwd: Path, log: Path, folder: Path, num_lines: int) -> None:
    code = stop_after(arguments, cwd, log, folder / "metrics.jsonl", num_lines, signal.SIGKILL)
    assert code == -signal.SIGKILL, log.read_text()


def measured(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl but for what the clock says."""
    return [
        {key: value for key, value in line.items() if key not in CLOCK}
        for line in read_lines(folder / "metrics.jsonl")
    ]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    last = latest(folder)
    assert last is not None
    return dict(load_weights(last, parameter_shapes(Run.load(folder / "run.toml").model)))


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


def _main(arguments: list[str], cwd: str, log: str) -> None:
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        os.chdir(cwd)
        torch.set_num_threads(1)
        code = cli.main(arguments)
        sys.stdout.flush()
    raise SystemExit(code)
