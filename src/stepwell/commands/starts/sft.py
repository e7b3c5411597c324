"""How `stepwell sft` starts."""

from __future__ import annotations

from stepwell.commands.starts.inputs import require_data, tokenizer_of
from stepwell.config import Run
from stepwell.posttrain.sft import sft


def check(run: Run) -> list[str]:
    tokenizer_of(run)
    require_data(run, "chat rows")
    return []


def start(run: Run) -> int:
    return sft(run, tokenizer_of(run))
