"""The prompts of methods that train on their own samples."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing

from stepwell.commands.inputs import counted
from stepwell.commands.starts.inputs import require_data
from stepwell.config import Run
from stepwell.eval.grade import Prompt
from stepwell.eval.items import load_prompts
from stepwell.sections.methods import OnlineDPO, SampledMethod
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


def check_rewards(run: Run, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[str]:
    """Opens the rewards that need no model and tries them as a start would, before any engine is
    built; what a user should know of these and of the reward models. Raises ConfigError for a
    source that cannot be opened, or that junk satisfies, for models that cannot be one reward, and
    DataError for prompts without a column that a source requires."""
    from stepwell.posttrain.rewards.composite import (
        check_models,
        open_rewards,
        reward_terms,
        unwatched,
    )
    from stepwell.posttrain.rewards.self_test import self_test

    method = run.method
    assert isinstance(method, SampledMethod)
    terms = [t for t in reward_terms(method) if t.source.partition(":")[0] != "model"]
    learnt = len(terms) < len(reward_terms(method))
    found = [*check_models(method, tokenizer), *unwatched(method, learnt)]
    if not terms:
        return found
    with closing(open_rewards(method.model_copy(update={"rewards": tuple(terms)}))) as rewards:
        rewards.check_columns(prompts)
        found += rewards.blanks(prompts)
        if not method.self_test:
            return found + rewards.warnings
        return found + self_test(rewards, prompts, tokenizer, method.max_new_tokens)


def prompts_of(run: Run, tokenizer: Tokenizer) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts of `data.path` that can be used, and how many of the others, by reason."""
    found, broken = load_prompts(require_data(run, "prompts"), tokenizer)
    known = with_answers(run, found)
    prompts = short_prompts(run, known)
    dropped = dict(Counter(drop.reason for drop in broken))
    if len(known) < len(found):
        dropped["no_answer"] = len(found) - len(known)
    if len(prompts) < len(known):
        dropped["too_long"] = len(known) - len(prompts)
    return prompts, dropped


def with_answers(run: Run, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Without those whose `answer` is null or blank, where all that scores is a comparison with it.
    Raises DataError if there are no others."""
    from stepwell.posttrain.rewards.composite import is_blank, reward_terms

    method = run.method
    assert isinstance(method, SampledMethod)
    compares = all(term.source in ("exact", "math") for term in reward_terms(method))
    if not compares or method.environment is not None:
        return list(prompts)
    known = [prompt for prompt in prompts if not is_blank(prompt, "answer")]
    if not known:
        raise DataError(
            f"the column 'answer' is null or blank in all {counted(len(prompts), 'row')} of "
            f"{run.data.path}, so nothing could be right"
        )
    return known


def short_prompts(run: Run, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Those that leave room for an answer (online-dpo: for two in a row). Raises DataError if there
    are none."""
    method, seq_len = run.method, run.data.seq_len
    assert isinstance(method, SampledMethod)
    pairs = isinstance(method, OnlineDPO)
    # A document of n tokens takes n - 1 places.
    room = min(seq_len // 2 + 1 if pairs else seq_len, run.model.max_seq_len)
    longest = room - method.max_new_tokens
    short = [prompt for prompt in prompts if len(prompt.ids) <= longest]
    if not short:
        least = min(len(prompt.ids) for prompt in prompts)
        most = max(len(prompt.ids) for prompt in prompts) + method.max_new_tokens
        whole = 2 * (most - 1) if pairs else most
        share = f"half of data.seq_len={seq_len}" if pairs else f"data.seq_len={seq_len}"
        raise DataError(
            f"all {counted(len(prompts), 'prompt')} of {run.data.path} are too long: the shortest "
            f"has {counted(least, 'token')}, but {share} less method.max_new_tokens="
            f"{method.max_new_tokens} leaves {longest}; raise data.seq_len to {whole}, which takes "
            "all of them, or lower method.max_new_tokens"
        )
    return short
