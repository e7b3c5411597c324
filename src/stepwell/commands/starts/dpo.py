"""How `stepwell dpo` starts."""

from __future__ import annotations

from stepwell.commands.starts.inputs import require_data, require_start, tokenizer_of
from stepwell.config import Run
from stepwell.posttrain.preference import dpo
from stepwell.posttrain.preference.rows import load_rows


def check(run: Run) -> list[str]:
    tokenizer = tokenizer_of(run)
    _require(run)
    require_start(run, tokenizer)
    load_rows(run, tokenizer)
    return []


def start(run: Run) -> int:
    tokenizer = tokenizer_of(run)
    _require(run)
    require_start(run, tokenizer)
    return dpo.dpo(run, tokenizer)


def _require(run: Run) -> None:
    dpo.check(run)
    require_data(run, "pairs")
