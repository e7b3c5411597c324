"""`stepwell.ranks` with what the tests need imported beforehand, and several jobs in one launch.

A launch costs a tenth of a second a rank and the first step in a new process half a second, so
tests that need the same number of ranks share one where they can: `run_jobs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from stepwell import ranks

PRELOAD = (
    *ranks.PRELOAD,
    "pytest",
    "stepwell.posttrain.grpo",
    "stepwell.posttrain.preference.online_dpo",
    "stepwell.posttrain.reward_model.train",
    "stepwell.posttrain.sft",
)
FORKSERVER = ranks.forkserver(PRELOAD)


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 100.0
) -> list[Any]:
    """Each rank's return value, in rank order; RanksFailed with every rank's traceback.

    About one launch in some hundred has a rank that crashes inside torch, or whose heap glibc finds
    damaged there. That one is tried again, once and with a warning that says where it was; a crash
    of ours comes back.
    """
    launch = partial(
        ranks.run_ranks, function, num_ranks, *args, timeout_s=timeout_s, preload=PRELOAD
    )
    try:
        return launch()
    except ranks.RanksFailed as failure:
        if not any(f"({name})" in str(failure) for name in ("SIGSEGV", "SIGABRT")):
            raise
        warnings.warn(f"a rank crashed, tried again: {failure}", stacklevel=2)
        return launch()


def run_jobs(num_ranks: int, **jobs: tuple[Any, ...]) -> dict[str, list[Any]]:
    """Several (function, *args) one after another in one launch: name -> each rank's value."""
    results = run_ranks(_each, num_ranks, list(jobs.values()))
    return {name: [rank[i] for rank in results] for i, name in enumerate(jobs)}


def _each(jobs: list[tuple[Any, ...]]) -> list[Any]:
    return [function(*args) for function, *args in jobs]
