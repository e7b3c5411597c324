"""Signals that ask a run to stop, and what is left when it ends at once. No torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

# What lets the step end, saves and stops. SIGUSR1 is what a Slurm script can send through srun.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# A terminal's Ctrl-C reaches a whole group, and a parent passes it on: one request comes twice.
SAME_REQUEST_S = 1.0


class Requests:
    """The signals that came: `first` asks to save and stop, `at_once` not to wait for that.

    A Slurm script's SIGUSR1 may come beside Slurm's own SIGTERM: that is one request too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.first: int | None = None
        self.at_once = False
        self._clock, self._time = clock, 0.0

    def take(self, number: int) -> None:
        now = self._clock()
        if self.first is None or (self.first == signal.SIGUSR1 != number):
            self.first, self._time = number, now
        elif now - self._time >= SAME_REQUEST_S and number != signal.SIGUSR1:
            self.at_once = True


def last_saved(folder: str | Path) -> tuple[int, Path | None]:
    """Step and folder of a run's last checkpoint; 0 and None without any."""
    found = [path.parent for path in Path(folder).glob("checkpoints/step-*/state.json")]
    steps = {int(p.name.removeprefix("step-")): p for p in found if p.name[5:].isdecimal()}
    last = max(steps, default=0)
    return last, steps.get(last)


def what_is_saved(folder: str | Path) -> str:
    """For a run that ends at once: "the last checkpoint is DIR/checkpoints/step-00000020 ..."."""
    path = last_saved(folder)[1]
    if path is None:
        return f"nothing is saved in {folder}"
    return f"the last checkpoint is {path}; the same command goes on from there"
