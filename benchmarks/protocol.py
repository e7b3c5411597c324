"""How a worker is driven, and its clock.

A worker trains or generates in a plain loop, with `clock.begin()` and `clock.end(...)` around each
step. After the warm-up it prints one JSON line and waits; each line "go" on stdin is answered by
one timed chunk of steps and one JSON line. The end of stdin ends the worker. So a driver can let
many libraries take turns within one run, while those that wait cost nothing.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any


class Finished(Exception):
    """The driver wants no more chunks."""


class Clock:
    """warmup, steps: how many steps before the first chunk and in each one."""

    def __init__(self) -> None:
        self.warmup = int(os.environ.get("BENCH_WARMUP", "3"))
        self.steps = int(os.environ.get("BENCH_STEPS", "5"))
        self.taken = 0
        self.counts: dict[str, float] = {}
        self.start = self.busy = self.own = 0.0
        # Whatever a library prints goes to stderr: stdout belongs to the protocol.
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def begin(self) -> None:
        if self.taken >= self.warmup and (self.taken - self.warmup) % self.steps == 0:
            if self.taken == self.warmup:
                self._emit({"ready": True, "start_s": round(process_age_s(), 1)})
            if sys.stdin.readline().strip() != "go":
                raise Finished
            wait_until_quiet(float(os.environ.get("BENCH_QUIET_S", "20")))
            reset_peak_rss()
            self.counts = {}
            self.busy, self.own = machine_busy_s(), own_cpu_s()
            self.start = time.perf_counter()

    def end(self, loss: float | None = None, **counts: float) -> None:
        """counts: what this step did, e.g. tokens=4096."""
        self.taken += 1
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0) + value
        done = self.taken - self.warmup
        if done > 0 and done % self.steps == 0:
            wall_s = time.perf_counter() - self.start
            own_s = own_cpu_s() - self.own
            others = max(0.0, machine_busy_s() - self.busy - own_s) / wall_s
            self._emit(
                {
                    "step_s": round(wall_s / self.steps, 4),
                    **{f"{k}_per_s": round(v / wall_s, 1) for k, v in self.counts.items()},
                    **{f"{k}_per_cpu_s": round(v / own_s, 1) for k, v in self.counts.items()},
                    **self.counts,
                    "loss": None if loss is None else round(float(loss), 4),
                    "peak_rss_mb": round(peak_rss_mb(), 1),
                    "other_cores": round(others, 2),
                }
            )

    def _emit(self, values: dict[str, Any]) -> None:
        self.out.write(json.dumps(values) + "\n")
        self.out.flush()


def process_age_s() -> float:
    ticks = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def machine_busy_s() -> float:
    """CPU seconds that all processes of the machine have used (user, nice, system)."""
    line = Path("/proc/stat").read_text().split("\n", 1)[0]
    return sum(int(x) for x in line.split()[1:4]) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    used = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def wait_until_quiet(limit_s: float, most_cores: float = 0.15) -> None:
    """Until nobody else computes, at most limit_s seconds."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before = machine_busy_s()
        time.sleep(0.5)
        if (machine_busy_s() - before) / 0.5 <= most_cores:
            return
        time.sleep(0.5)


def reset_peak_rss() -> None:
    """Starts the kernel's high-water mark of this process anew (Linux: clear_refs 5)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss_mb() -> float:
    """The largest resident memory since `reset_peak_rss`, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
