"""What labs share that repeat themselves with several seeds."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from scipy.stats import t as student

LEVEL = 0.95


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean, and Student's interval of it: what the mean over all seeds would be. One value has no
    interval (low and high are None)."""
    mean, count = statistics.fmean(values), len(values)
    found = {"mean": mean, "low": None, "high": None, "by_seed": list(values)}
    if count > 1:
        error = statistics.stdev(values) / math.sqrt(count)
        half = float(student.ppf((1 + LEVEL) / 2, count - 1)) * error
        found |= {"low": mean - half, "high": mean + half}
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A run's own progress is not the lab's."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
