"""Runs the workers of one job in turns and keeps what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workload import CACHE, ROOT

OURS = "stepwell"


@dataclass(frozen=True)
class Spec:
    """library: who; variant: how; env: folder under envs/ ("" is this environment)."""

    library: str
    variant: str
    env: str
    module: str
    args: tuple[str, ...] = ()

    def python(self, envs: Path) -> Path:
        return envs / self.env / "bin" / "python" if self.env else Path(sys.executable)


@dataclass
class Worker:
    spec: Spec
    process: subprocess.Popen
    ready: dict[str, Any]
    chunks: list[dict[str, Any]] = field(default_factory=list)

    def chunk(self) -> bool:
        """One timed chunk; False when the worker has died."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        line = self.process.stdout.readline() if self.process.stdout else ""
        if line:
            self.chunks.append(json.loads(line))
        return bool(line)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start(spec: Spec, envs: Path, settings: dict[str, str]) -> Worker | None:
    """A warmed-up worker, or None (with the reason printed) when it can't run."""
    python = spec.python(envs)
    label = f"{spec.library} {spec.variant}"
    if not python.exists():
        print(f"  {label}: left out, {python} does not exist (benchmarks/setup_peers.sh)")
        return None
    logs = CACHE / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{spec.module.rsplit('.', 1)[1]}-{spec.library}-{spec.variant}.err"
    started = time.monotonic()
    with log.open("w") as err:
        process = subprocess.Popen(
            [str(python), "-m", spec.module, *spec.args],
            cwd=ROOT,
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        print(f"  {label}: failed with exit code {process.wait()}, see {log}")
        return None
    print(f"  {label}: ready after {time.monotonic() - started:.0f} s", flush=True)
    return Worker(spec, process, json.loads(line))


def measure(
    specs: list[Spec], envs: Path, rounds: int, settings: dict[str, str], speed: str
) -> list[dict[str, Any]]:
    """Each library's variants are tried with one chunk and the fastest goes on; those then take
    turns for `rounds` rounds, starting with another one each round. speed: the chunks' entry to
    go by."""
    libraries = list(dict.fromkeys(s.library for s in specs))
    records: list[dict[str, Any]] = []
    best: list[Worker] = []
    for library in libraries:
        tried: list[Worker] = []
        for spec in (s for s in specs if s.library == library):
            worker = start(spec, envs, settings)
            if worker is not None and worker.chunk():
                tried.append(worker)
        tried.sort(key=lambda w: w.chunks[0][speed], reverse=True)
        for worker in tried[1:]:
            worker.stop()
            records.append(record(worker, trial=True))
        if tried:
            tried[0].chunks.clear()
            best.append(tried[0])
    for i in range(rounds):
        turn = i % max(len(best), 1)
        for worker in best[turn:] + best[:turn]:
            if not worker.chunk():
                print(f"  {worker.spec.library} {worker.spec.variant}: died in round {i + 1}")
    for worker in best:
        worker.stop()
        records.append(record(worker))
    return records


def record(worker: Worker, trial: bool = False) -> dict[str, Any]:
    """trial: a variant that lost its library's first comparison."""
    return {
        "library": worker.spec.library,
        "variant": worker.spec.variant,
        "trial": trial,
        "start_s": worker.ready["start_s"],
        "chunks": worker.chunks,
    }
