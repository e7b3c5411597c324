"""A dimension of a reward: an entry of `method.rewards`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import model_validator

from stepwell.schema import AtLeast0, Number, Section


class RewardTerm(Section):
    """A dimension of the reward: `weight` times what `source` says is added up.

    source: exact, math, regex:PATTERN, json:SCHEMA_FILE, code, tests, gym:SET,
    model:FOLDER[,FOLDER], overlong:LIMIT:CACHE, repetition:N, or python:FILE.py:FUNCTION. low,
    high: bounds that it is clipped to. aggregate, k: of several models, whether their mean counts,
    the lowest score, or the mean less k standard deviations (2310.02743). Answers for which it says
    None are left out of this dimension.
    """

    name: str
    source: str
    weight: Number = 1.0
    low: Number | None = None
    high: Number | None = None
    aggregate: Literal["mean", "min", "mean-k-sd"] = "mean"
    k: AtLeast0 = 1.0

    @model_validator(mode="after")
    def _rules(self) -> RewardTerm:
        if not re.fullmatch(r"[\w.-]+", self.name):
            legal = re.sub(r"[^\w.-]+", "-", self.name) or "reward"
            raise ValueError(
                f"method.rewards: the name {self.name!r} must be of letters, digits, '_', '.' and "
                f"'-', because metrics are named by it; the nearest legal value is {legal!r}"
            )
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(
                f"method.rewards: {self.name!r} has low={self.low:g} above high={self.high:g}; "
                "exchange them"
            )
        kind, _, detail = self.source.partition(":")
        if self.aggregate != "mean" and (kind != "model" or "," not in detail):
            raise ValueError(
                f"method.rewards: {self.name!r} has aggregate={self.aggregate!r}, which compares "
                f"several reward models, but its source {self.source!r} is not of the form "
                "model:FOLDER,FOLDER; leave it at 'mean'"
            )
        if self.k != 1.0 and self.aggregate != "mean-k-sd":
            raise ValueError(
                f"method.rewards: {self.name!r} has k={self.k:g}, which belongs to aggregate "
                f"'mean-k-sd', not {self.aggregate!r}; leave it out"
            )
        return self
