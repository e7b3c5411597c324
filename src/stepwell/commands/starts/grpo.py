"""How `stepwell grpo` starts."""

from __future__ import annotations

from stepwell.commands.starts.inputs import tokenizer_of
from stepwell.commands.starts.prompts import prompts_of, report_drops
from stepwell.config import Run
from stepwell.posttrain.grpo import grpo
from stepwell.posttrain.verifiers.find import find_verifier
from stepwell.sections.methods import GRPO
from stepwell.train.weights import require_model


def check(run: Run) -> list[str]:
    prompts_of(run, tokenizer_of(run))
    return []


def start(run: Run) -> int:
    method = run.method
    assert isinstance(method, GRPO)
    verifier = find_verifier(method.verifier)
    tokenizer = tokenizer_of(run)
    require_model(run, None)
    prompts, dropped = prompts_of(run, tokenizer)
    report_drops(run, dropped)
    return grpo(run, prompts, verifier, tokenizer, dropped=dropped)
