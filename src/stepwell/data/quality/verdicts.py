"""Rules as values: what was measured of each text, the limit, and the first rule that is broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from stepwell.data.batches import Outcome, Removal, split

Verdict = tuple[str, str] | None


class Rule(NamedTuple):
    """A text breaks the rule when its value is on the `sign` side of the limit."""

    reason: str
    values: np.ndarray
    sign: Literal["<", ">"]
    limit: float


def first_broken(rules: Sequence[Rule], num_texts: int) -> list[Verdict]:
    """(reason, detail) of the first rule that each text breaks; None where it breaks none."""
    verdicts: list[Verdict] = [None] * num_texts
    for reason, values, sign, limit in rules:
        broken = values < limit if sign == "<" else values > limit
        for i, value in zip(np.flatnonzero(broken).tolist(), values[broken].tolist(), strict=True):
            verdicts[i] = verdicts[i] or (reason, detail(value, sign, limit))
    return verdicts


def detail(value: float, sign: str, limit: float) -> str:
    return f"{value:.4g} {sign} {limit:g}"


def share(count: np.ndarray, total: np.ndarray) -> np.ndarray:
    """count / total; 0 where there is nothing to share."""
    return np.divide(count, total, out=np.zeros(len(total)), where=total != 0)


def drop(batch: pa.RecordBatch, kind: str, verdicts: Sequence[Verdict]) -> Outcome:
    return split(batch, kind, [Removal(*v) if v else None for v in verdicts])
