"""How `stepwell reward` starts."""

from __future__ import annotations

from stepwell.commands.inputs import counted
from stepwell.commands.starts.inputs import require_data, require_start, tokenizer_of
from stepwell.config import Run
from stepwell.posttrain.reward_model.rows import load_rows
from stepwell.posttrain.reward_model.train import reward
from stepwell.sections.methods import RewardModel
from stepwell.tokenizer import Tokenizer

ROWS = {
    "bradley-terry": "pairs (prompt, chosen, rejected)",
    "regression": "answers with a number `label`",
    "classification": "answers with a class `label`",
    "process": "answers in steps (prompt, completions, labels)",
}


def check(run: Run) -> list[str]:
    tokenizer = tokenizer_of(run)
    path = require_data(run, rows_wanted(run))
    require_start(run, tokenizer)
    paths = [path, *([run.data.heldout_path] if run.data.heldout_path else [])]
    return [line for each in paths for line in left_out(run, each, tokenizer)]


def start(run: Run) -> int:
    tokenizer = tokenizer_of(run)
    require_data(run, rows_wanted(run))
    require_start(run, tokenizer)
    return reward(run, tokenizer)


def rows_wanted(run: Run) -> str:
    method = run.method
    assert isinstance(method, RewardModel)
    return ROWS[method.objective]


def left_out(run: Run, path: str, tokenizer: Tokenizer) -> list[str]:
    drops = load_rows(run, path, tokenizer)[1]
    if not drops.total:
        return []
    reasons = ", ".join(f"{count} {reason}" for reason, count in drops.by_reason.items())
    return [f"{path}: {counted(drops.total, 'row')} left out ({reasons})"]
