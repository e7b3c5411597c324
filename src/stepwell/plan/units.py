"""Bytes, seconds and tokens in words, each in a unit that leaves digits to read. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from stepwell.hardware import GIB

MIB, KIB = 2**20, 2**10


def size_text(num_bytes: float, like: float | None = None) -> str:
    """`35.9 GiB`, `12.5 MiB`. like: another number, whose unit is taken (rows of a table)."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if abs(num_bytes if like is None else like) >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / KIB:,.1f} KiB"


def in_gib(num_bytes: float) -> str:
    """`35.9` where GiB are told behind it, `12.5 MiB` where that would leave no digit."""
    return f"{num_bytes / GIB:,.1f}" if abs(num_bytes) >= GIB / 20 else size_text(num_bytes)


def seconds_text(seconds: float, like: float | None = None, sign: bool = False) -> str:
    """`9.13 s`, `20.4 ms`, `7.5 us`. like: another number, whose unit is taken."""
    size, plus = abs(seconds if like is None else like), "+" if sign else ""
    if size >= 0.1:
        return f"{seconds:{plus}.2f} s"
    if size >= 1e-4:
        return f"{1e3 * seconds:{plus}.{1 if size >= 0.01 else 2}f} ms"
    return f"{1e6 * seconds:{plus}.1f} us"


def count_of(number: int, noun: str) -> str:
    """`1 row`, `2,048 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def tokens_text(num_tokens: int) -> str:
    """`16M`, `1.5M`, `64k`, `1,000`: with the units that the command line reads, where that is
    exact to a thousandth."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        rounded = round(num_tokens / unit, 3)
        if rounded >= 1 and abs(rounded * unit - num_tokens) <= num_tokens / 1000:
            return f"{rounded:g}{name}"
    return f"{num_tokens:,}"


def nearest_of(wanted: float, legal: Iterable[int]) -> str:
    """`the nearest legal value is 4`; both, where two are as near."""
    values = sorted(set(legal))
    least = min(abs(value - wanted) for value in values)
    near = [f"{value}" for value in values if abs(value - wanted) == least]
    if len(near) == 1:
        return f"the nearest legal value is {near[0]}"
    return f"the nearest legal values are {' and '.join(near)}"
