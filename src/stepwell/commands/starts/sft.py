"""How `stepwell sft` starts."""

from __future__ import annotations

from stepwell.commands.preview import look, require_usable, warnings_of
from stepwell.commands.starts.inputs import require_data, require_start, tokenizer_of
from stepwell.config import Run
from stepwell.posttrain.sft import sft


def check(run: Run) -> list[str]:
    """Looks at the first rows; refused are files whose every row is unusable."""
    tokenizer = tokenizer_of(run)
    require_data(run, "chat rows")
    require_start(run, tokenizer)
    found = look(run, 1)
    if not found.more:
        require_usable(found, run.data.seq_len)
    return warnings_of(found)


def start(run: Run) -> int:
    return sft(run, tokenizer_of(run))
