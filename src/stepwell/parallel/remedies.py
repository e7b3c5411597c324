"""What is wrong with a run, and the changes that might mend it, nearest first. No torch.

A rule proposes; whether a change leaves the rest of the run legal is tried in `rules.check_run`,
which names the first that does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepwell.parallel.rules import AxisSizes

# In a change, the number of processes; every other key is one of the run.
RANKS = "ranks"
Change = Mapping[str, Any]
Way = tuple[Change, ...]


@dataclass(frozen=True)
class Complaint:
    """said: what is wrong, with the values and the rule. ways: for each way out the changes to try,
    the best first. about: tells complaints of one rule apart. advice: what can be done besides, in
    words."""

    said: str
    ways: tuple[Way, ...] = ()
    about: str = ""
    advice: str = ""

    @property
    def keys(self) -> set[str]:
        return {key for way in self.ways for change in way for key in change}


def told(complaint: Complaint, legal: Iterable[Change]) -> str:
    """The message: what is wrong, and the changes that were found legal."""
    found = [shown(change) for change in legal]
    if found:
        values = "value is" if len(found) == 1 else "values are"
        way_out = f"; the nearest legal {values} {', or '.join(found)}"
    elif complaint.ways:
        tried = sorted(complaint.keys)
        way_out = f"; no value of {' or '.join(tried)} alone mends that in this run"
    else:
        way_out = ""
    return f"{complaint.said}{way_out}{complaint.advice}"


def shown(change: Change) -> str:
    """`layout.tp=2`, `layout.zero=1 with layout.reduce_gradients='auto'`, `--nproc`'s "6 ranks"."""
    return " with ".join(
        f"{value} ranks" if key == RANKS else f"{key}={_text(value)}"
        for key, value in change.items()
    )


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)


def change(**values: Any) -> Change:
    """Keys with `__` for the dot."""
    return {key.replace("__", "."): value for key, value in values.items()}


def only(**values: Any) -> Way:
    """A way with a single change."""
    return (change(**values),)


def values_of(key: str, values: Iterable[Any]) -> Way:
    return tuple({key: value} for value in values)


def other_sizes(axis: str, sizes: AxisSizes) -> Way:
    """Other sizes of a layout axis for the same ranks, nearest first."""
    return values_of(f"layout.{axis}", divisors(math.prod(sizes), getattr(sizes, axis))[1:])


def divisors(number: int, wanted: int) -> list[int]:
    """All of `number`, those nearest to `wanted` first."""
    found = [d for d in range(1, number + 1) if number % d == 0]
    return sorted(found, key=lambda d: (abs(d - wanted), d))


def multiples(of: int, wanted: int, count: int = 32) -> list[int]:
    """The `count` positive multiples that are nearest to `wanted`, nearest first, of two the larger
    (a smaller vocabulary may lack tokens)."""
    middle = max(1, round(wanted / of))
    first = max(1, middle - count // 2)
    found = [of * i for i in range(first, first + count)]
    return sorted(found, key=lambda n: (abs(n - wanted), -n))
