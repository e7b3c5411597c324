"""How `stepwell grpo` starts."""

from __future__ import annotations

from stepwell.commands.starts.inputs import tokenizer_of
from stepwell.commands.starts.prompts import check_rewards, prompts_of, report_drops
from stepwell.config import Run
from stepwell.posttrain.grpo import check_grpo, grpo
from stepwell.posttrain.ppo.placement import reference_warnings
from stepwell.sections.methods import GRPO


def check(run: Run) -> list[str]:
    method = run.method
    assert isinstance(method, GRPO)
    tokenizer = tokenizer_of(run)
    prompts, _ = prompts_of(run, tokenizer)
    check_grpo(run, prompts, tokenizer)
    found = check_rewards(run, prompts, tokenizer)
    return [*found, *(reference_warnings(run) if method.kl_coef else [])]


def start(run: Run) -> int:
    tokenizer = tokenizer_of(run)
    prompts, dropped = prompts_of(run, tokenizer)
    report_drops(run, dropped)
    return grpo(run, prompts, tokenizer, dropped=dropped)
