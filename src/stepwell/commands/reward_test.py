"""`stepwell reward-test SOURCE ROWS`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import tyro

from stepwell.commands.inputs import check_least, counted, parse_options
from stepwell.types import Completion, ConfigError, DataError

if TYPE_CHECKING:
    from stepwell.eval.grade import Prompt
    from stepwell.posttrain.rewards.composite import Rewards
    from stepwell.posttrain.rewards.self_test import Finding

AT_ONCE = 64  # answers that are scored before any of them is shown


@dataclass
class RewardTest:
    """Tries a reward's source on rows: on the answers that they hold, on what they say is right,
    and on junk. Fails (exit code 2) if junk scores what a right answer does, and (3) if the grader
    fails on everything."""

    source: tyro.conf.Positional[str]
    """exact, math, regex:PATTERN, json:SCHEMA_FILE, code, tests, gym:SET, overlong:LIMIT:CACHE,
    repetition:N, or python:FILE.py:FUNCTION."""
    rows: tyro.conf.Positional[str]
    """JSONL or Parquet with `prompt` and the source's columns; `completion` or `completions` are
    scored as answers."""
    limit: int | None = None
    """The first so many rows only."""
    timeout_s: float = 10.0
    """For each answer, in seconds."""
    json: bool = False
    """Print the result as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("reward-test", RewardTest, argv)
    check(options)
    from stepwell.posttrain.rewards.composite import open_rewards
    from stepwell.posttrain.rewards.self_test import (
        is_penalty,
        junk_scores,
        reports,
        require_no_refusal,
    )
    from stepwell.sections.methods import GRPO
    from stepwell.sections.rewards import RewardTerm

    prompts, num_dropped = prompts_of(options.rows, options.limit)
    term = RewardTerm(name="reward", source=options.source)
    rewards = open_rewards(GRPO(rewards=(term,), reward_timeout_s=options.timeout_s))
    try:
        rewards.check_columns(prompts)
        say = (lambda line: None) if options.json else partial(print, flush=True)
        dropped = f", {counted(num_dropped, 'row')} dropped" if num_dropped else ""
        say(f"{options.source} on {counted(len(prompts), 'row')}{dropped}")
        answers = []
        for answer in scored_answers(rewards, prompts):
            answers.append(answer)
            say(answer_line(answer))
        findings = junk_scores(rewards, prompts)
        result = {
            "source": options.source,
            "rows": len(prompts),
            "dropped": num_dropped,
            "penalty": is_penalty(rewards.dimensions[0]),
            "answers": answers,
            "junk": [asdict(finding) for finding in findings],
            "warnings": [*rewards.warnings, *reports(findings, rewards)],
        }
        print(json.dumps(result) if options.json else "\n".join(junk_lines(result, findings)))
        require_no_refusal(findings, rewards)
        require_a_score(answers, findings)
    finally:
        rewards.close()
    return 0


def check(options: RewardTest) -> None:
    """Raises ConfigError for options that cannot be."""
    if options.source.startswith("model:"):
        raise ConfigError(
            f"{options.source!r} is a reward model, whose scores are learnt: "
            "`stepwell score` scores rows with it"
        )
    check_least(limit=options.limit)
    if options.timeout_s <= 0:
        raise ConfigError(f"--timeout-s {options.timeout_s:g} must be above 0, e.g. 10")


def prompts_of(path: str, limit: int | None) -> tuple[list[Prompt], int]:
    """Rows as prompts without ids, and how many rows are none. Raises DataError if all are."""
    from stepwell.data.sources.rows import Record, records
    from stepwell.eval.grade import Prompt

    prompts, num_dropped = [], 0
    for row in records(path):
        text = _text(row.values.get("prompt")) if isinstance(row, Record) else None
        if text is None or not isinstance(row, Record):
            num_dropped += 1
            continue
        columns = {name: value for name, value in row.values.items() if name != "prompt"}
        prompts.append(Prompt(text, (), columns, row.id))
        if len(prompts) == limit:
            break
    if not prompts:
        raise DataError(
            f"{path} has no row with a `prompt`, a text or a list of messages "
            f"({counted(num_dropped, 'row')} without)"
        )
    return prompts, num_dropped


def _text(value: Any) -> str | None:
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    return value if isinstance(value, str) else None


def answers_of(prompt: Prompt) -> list[str]:
    """`completion`, or each of `completions`."""
    several = prompt.columns.get("completions")
    values = several if isinstance(several, list) else [prompt.columns.get("completion")]
    return [text for value in values if (text := _text(value)) is not None]


def scored_answers(rewards: Rewards, prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
    """As they are scored, the first few by themselves. Raises DataError if the grader takes too
    long for each of those."""
    from stepwell.posttrain.rewards.self_test import NUM_PROBES, require_in_time

    asked = [(prompt, text) for prompt in prompts for text in answers_of(prompt)]
    starts = [0, *range(NUM_PROBES, len(asked), AT_ONCE)]
    for start, stop in pairwise([*starts, len(asked)]):
        part = asked[start:stop]
        completions = [
            Completion(0, (), (0,) * len(text.split()), (0.0,) * len(text.split()), text, "stop")
            for _, text in part
        ]
        verdicts = rewards.score([prompt for prompt, _ in part], completions)
        for (prompt, text), verdict in zip(part, verdicts, strict=True):
            yield {
                "row": prompt.item,
                "completion": text,
                "score": verdict.reward,
                "failure": verdict.failure,
                "detail": verdict.detail,
            }
        if start == 0:
            require_in_time(rewards.dimensions[0], verdicts)


def require_a_score(answers: Sequence[dict[str, Any]], findings: Sequence[Finding]) -> None:
    """Raises DataError if the grader failed on everything that it was tried on."""
    failures = [f"{a['failure']}: {a['detail']}" for a in answers if a["failure"]]
    failures += [finding.failure for finding in findings if finding.num_failures]
    all_of_them = all(a["failure"] for a in answers) and all(
        finding.num_failures == len(finding.scores) for finding in findings
    )
    if failures and all_of_them:
        raise DataError(
            f"the grader failed on all {counted(len(answers), 'answer')} and on all junk, so a run "
            f"could learn nothing; the first failure is {failures[0]}"
        )


def answer_line(answer: dict[str, Any]) -> str:
    detail = f"  ({' '.join(answer['detail'].split())})" if answer["detail"] else ""
    score = answer["failure"] or _shown(answer["score"])
    return f"  {score:>8}  {_cut(answer['completion'])}{detail}"


def junk_lines(result: dict[str, Any], findings: Sequence[Finding]) -> list[str]:
    if result["penalty"]:
        return ["a penalty: its best score is for having nothing wrong; junk is not tried"]
    lines = ["", f"  {'right':>8} {'junk':>8} {'hits':>6} {'failed':>6}  junk"]
    for finding in findings:
        right = [score for score in finding.right if score is not None]
        junk = [score for score in finding.scores if score is not None]
        verdict = "  REFUSED" if finding.refused else ""
        lines.append(
            f"  {_shown(max(right, default=None)):>8} {_shown(max(junk, default=None)):>8} "
            f"{finding.hits:>2} of {len(finding.scores):<2} {finding.num_failures:>5}  "
            f"{finding.junk}: {_cut(finding.text)}{verdict}"
        )
    return [*lines, *(f"warning: {' '.join(text.split())}" for text in result["warnings"])]


def _shown(score: float | None) -> str:
    return "n/a" if score is None else f"{score:.4g}"


def _cut(text: str) -> str:
    return repr(text if len(text) <= 50 else f"{text[:50]}...")
