"""The prompts of methods that train on their own samples."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from stepwell.commands.inputs import counted
from stepwell.commands.starts.inputs import require_data
from stepwell.config import Run
from stepwell.eval.grade import Prompt
from stepwell.eval.items import load_prompts
from stepwell.sections.methods import SampledMethod
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError


def report_drops(run: Run, dropped: Mapping[str, int]) -> None:
    """Says which prompts are left out, on one rank."""
    if dropped and os.environ.get("RANK", "0") == "0":
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        print(
            f"{run.data.path}: left out {counted(sum(dropped.values()), 'prompt')} ({reasons})",
            file=sys.stderr,
        )


def prompts_of(run: Run, tokenizer: Tokenizer) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts of `data.path` that can be used, and how many of the others, by reason."""
    found, broken = load_prompts(require_data(run, "prompts"), tokenizer)
    prompts = short_prompts(run, found)
    dropped = dict(Counter(drop.reason for drop in broken))
    if len(prompts) < len(found):
        dropped["too_long"] = len(found) - len(prompts)
    return prompts, dropped


def short_prompts(run: Run, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Those that leave room for an answer. Raises DataError if there are none."""
    method = run.method
    assert isinstance(method, SampledMethod)
    longest = min(run.data.seq_len, run.model.max_seq_len) - method.max_new_tokens
    short = [prompt for prompt in prompts if len(prompt.ids) <= longest]
    if not short:
        least = min(len(prompt.ids) for prompt in prompts)
        most = max(len(prompt.ids) for prompt in prompts)
        raise DataError(
            f"all {counted(len(prompts), 'prompt')} of {run.data.path} are too long: the shortest "
            f"has {counted(least, 'token')}, but data.seq_len={run.data.seq_len} less "
            f"method.max_new_tokens={method.max_new_tokens} leaves {longest}; raise data.seq_len "
            f"to {most + method.max_new_tokens}, which takes all of them, or lower "
            "method.max_new_tokens"
        )
    return short
