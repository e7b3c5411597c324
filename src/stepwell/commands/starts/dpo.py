"""How `stepwell dpo` starts."""

from __future__ import annotations

from stepwell.commands.starts.inputs import require_data, tokenizer_of
from stepwell.config import Run
from stepwell.posttrain.preference import dpo
from stepwell.posttrain.preference.rows import load_rows
from stepwell.train.weights import require_model


def check(run: Run) -> list[str]:
    _require(run)
    load_rows(run, tokenizer_of(run))
    return []


def start(run: Run) -> int:
    tokenizer = tokenizer_of(run)
    _require(run)
    require_model(run, None)
    return dpo.dpo(run, tokenizer)


def _require(run: Run) -> None:
    dpo.check(run)
    require_data(run, "pairs")
