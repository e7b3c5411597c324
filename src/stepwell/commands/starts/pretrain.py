"""How `stepwell pretrain` starts."""

from __future__ import annotations

from stepwell.config import Run
from stepwell.train.pretrain import open_data, pretrain


def check(run: Run) -> list[str]:
    return open_data(run).warnings


def start(run: Run) -> int:
    return pretrain(run)
