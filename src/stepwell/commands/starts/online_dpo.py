"""How `stepwell online-dpo` starts."""

from __future__ import annotations

from stepwell.commands.starts.inputs import tokenizer_of
from stepwell.commands.starts.prompts import check_rewards, prompts_of, report_drops
from stepwell.config import Run
from stepwell.posttrain.ppo.placement import reference_warnings
from stepwell.posttrain.preference.online_dpo import check_online_dpo, online_dpo


def check(run: Run) -> list[str]:
    tokenizer = tokenizer_of(run)
    prompts, _ = prompts_of(run, tokenizer)
    check_online_dpo(run, prompts, tokenizer)
    return [*check_rewards(run, prompts, tokenizer), *reference_warnings(run)]


def start(run: Run) -> int:
    tokenizer = tokenizer_of(run)
    prompts, dropped = prompts_of(run, tokenizer)
    report_drops(run, dropped)
    return online_dpo(run, prompts, tokenizer, dropped=dropped)
