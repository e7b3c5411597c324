"""What a source of a reward's dimension stands for, opened.

Graders that could hang run in processes of their own (`grader_pool`), programs that the model wrote
in the sandbox, reward models on the mesh, and the rest, whose time is linear, right here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from stepwell.eval.grade import Prompt, Verdict, required_columns
from stepwell.posttrain.rewards.composite import Scorer
from stepwell.posttrain.verifiers.find import KINDS as VERIFIERS
from stepwell.types import Completion, ConfigError, nearest

if TYPE_CHECKING:
    from stepwell.config import Run
    from stepwell.parallel.mesh import Mesh
    from stepwell.posttrain.reward_model.ensembles import Combination
    from stepwell.posttrain.sandbox.pool import Program
    from stepwell.tokenizer import Tokenizer

OTHERS = ("code", "tests", "model:FOLDER[,FOLDER]", "overlong:LIMIT:CACHE", "repetition:N")
KINDS = (*VERIFIERS, *OTHERS)


def open_scorer(
    source: str,
    timeout_s: float,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    run: Run | None = None,
    aggregate: Combination = "mean",
    k: float = 1.0,
) -> Scorer:
    """aggregate, k: what several reward models say together (`reward_ensembles.combine`).

    Raises ConfigError for a source that is unknown, cannot be read or lacks its package."""
    kind, _, detail = source.partition(":")
    if source == "exact":
        return _exact()
    if source == "code":
        return _code(timeout_s)
    if source == "tests":
        return _tests(timeout_s)
    if kind == "overlong" and detail:
        return _overlong(source, detail)
    if kind == "repetition" and detail:
        return _repetition(source, detail)
    if kind == "model" and detail:
        return _model(detail.split(","), tokenizer, mesh, run, aggregate, k)
    if source == "math" or (detail and kind in ("regex", "json", "gym", "python")):
        return _pooled(source, timeout_s)
    raise ConfigError(
        f"unknown reward source {source!r}{nearest(source, KINDS)}; known: {', '.join(KINDS)}"
    )


def _each(
    grade: Callable[[Prompt, Completion], Verdict],
) -> Callable[[Sequence[Prompt], Sequence[Completion]], list[Verdict]]:
    def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Verdict]:
        verdicts = []
        for prompt, completion in zip(prompts, completions, strict=True):
            try:
                verdicts.append(grade(prompt, completion))
            except (KeyError, TypeError, ValueError) as error:  # of the row
                verdicts.append(Verdict(None, "error", f"{type(error).__name__}: {error}"))
        return verdicts

    return score


def _exact() -> Scorer:
    from stepwell.posttrain.verifiers.exact import exact

    def grade(prompt: Prompt, completion: Completion) -> Verdict:
        (score,) = exact([prompt.text], [completion.text], answer=[prompt.columns["answer"]])
        return Verdict(score)

    return Scorer(_each(grade), tuple(required_columns(exact)))


def _overlong(source: str, detail: str) -> Scorer:
    from stepwell.posttrain.verifiers.shape import soft_overlong

    limit, cache = _whole_numbers(source, detail, 2, "overlong:LIMIT:CACHE, e.g. overlong:1024:256")
    if not 0 < cache <= limit:
        raise ConfigError(
            f"{source!r}: the cache of {cache} tokens must be at least 1 and at most the limit "
            f"{limit}; the nearest legal value is {min(max(cache, 1), limit)}"
        )
    return Scorer(
        _each(lambda _, c: Verdict(soft_overlong(sum(c.mask), limit, cache))), is_penalty=True
    )


def _repetition(source: str, detail: str) -> Scorer:
    from stepwell.posttrain.verifiers.shape import repeated_share

    (size,) = _whole_numbers(source, detail, 1, "repetition:N, e.g. repetition:3")
    if size < 1:
        raise ConfigError(f"{source!r}: n-grams have at least 1 word, which is the nearest value")
    return Scorer(_each(lambda _, c: Verdict(-repeated_share(c.text, size))), is_penalty=True)


def _whole_numbers(source: str, detail: str, count: int, form: str) -> list[int]:
    words = detail.split(":")
    if len(words) != count or not all(word.isascii() and word.isdigit() for word in words):
        raise ConfigError(f"{source!r} is not of the form {form}")
    return [int(word) for word in words]


def _pooled(source: str, timeout_s: float) -> Scorer:
    from stepwell.posttrain.rewards.grader_pool import GraderPool, usual_num_workers

    pool = GraderPool(source, timeout_s, usual_num_workers())

    def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Verdict]:
        return pool.score(
            [p.text for p in prompts],
            [c.text for c in completions],
            [p.columns for p in prompts],
        )

    return Scorer(score, pool.requires, close=pool.close)


def _code(timeout_s: float) -> Scorer:
    from stepwell.posttrain.verifiers.code import cases_of, judged, programs

    def prepare(prompt: Prompt, completion: Completion) -> tuple[Any, list[Program]] | None:
        cases = cases_of(prompt.columns)
        return None if cases is None else (cases, programs(completion.text, cases))

    return _sandboxed(timeout_s, prepare, judged, ("cases or answer",))


def _tests(timeout_s: float) -> Scorer:
    from stepwell.posttrain.verifiers.unit_tests import judged, program, tests_of

    def prepare(prompt: Prompt, completion: Completion) -> tuple[Any, list[Program]] | None:
        tests = tests_of(prompt.columns)
        if tests is None:
            return None
        found = program(prompt.text, completion.text, tests, prompt.columns)
        return None, [] if found is None else [found]

    return _sandboxed(
        timeout_s,
        prepare,
        lambda _, outcomes: judged(outcomes[0] if outcomes else None),
        ("tests or test or test_list",),
    )


def _sandboxed(
    timeout_s: float,
    prepare: Callable[[Prompt, Completion], tuple[Any, list[Program]] | None],
    judge: Callable[[Any, Any], Verdict],
    requires: tuple[str, ...],
) -> Scorer:
    """All programs of all answers go to the sandbox at once. timeout_s: of each program."""
    from stepwell.posttrain.rewards.grader_pool import usual_num_workers
    from stepwell.posttrain.sandbox.pool import Limits, Sandbox, SandboxBroken

    limits = Limits(wall_s=timeout_s, cpu_s=math.ceil(timeout_s))
    sandbox = Sandbox(limits, usual_num_workers())

    def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Verdict]:
        prepared: list[Any] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            try:
                prepared.append(prepare(prompt, completion))
            except ValueError as error:  # of the row: no answer's fault
                prepared.append(Verdict(None, "error", str(error)))
        found = [p for p in prepared if isinstance(p, tuple)]
        try:
            outcomes = iter(sandbox.run_many([one for _, programs in found for one in programs]))
        except SandboxBroken as error:
            failed = Verdict(None, "error", str(error))
            return [failed if isinstance(p, tuple) else p or Verdict(None) for p in prepared]
        return [
            judge(p[0], list(islice(outcomes, len(p[1])))) if isinstance(p, tuple) else
            p or Verdict(None)
            for p in prepared
        ]  # fmt: skip

    weak = (
        ""
        if sandbox.level == "namespaces"
        else (
            f"no namespaces for the sandbox ({sandbox.why}): programs are held back by Python's "
            "audit hook, which is no security boundary (docs/rewards.md)"
        )
    )
    return Scorer(score, requires, close=sandbox.close, warning=weak)


def _model(
    folders: Sequence[str],
    tokenizer: Tokenizer | None,
    mesh: Mesh | None,
    run: Run | None,
    aggregate: Combination,
    k: float,
) -> Scorer:
    if mesh is None or run is None:
        raise ConfigError(f"model:{','.join(folders)} needs a run, whose device it is scored on")
    from stepwell.posttrain.reward_model import model as reward_model
    from stepwell.posttrain.reward_model.objectives import check_reward

    remarks = check_reward(folders, aggregate, k, tokenizer)
    models = reward_model.open_scorer(
        folders,
        mesh,
        run.data.seq_len,
        aggregate,
        k,
        tokenizer=tokenizer,
        compute=run.precision.compute,
    )

    def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Verdict]:
        docs = [[*c.prompt_ids, *c.token_ids] for c in completions]
        found = models.judged(docs)
        verdicts = [_finite(value) for value in found.scores.tolist()]
        if len(folders) == 1:
            return verdicts
        return [
            replace(verdict, disagreement=spread, members=tuple(each))
            for verdict, spread, each in zip(
                verdicts, found.disagreement.tolist(), found.members.T.tolist(), strict=True
            )
        ]

    engines = tuple(member.engine for member in models.members)
    return Scorer(score, is_model=True, engines=engines, warning="; ".join(remarks))


def _finite(value: float) -> Verdict:
    if math.isfinite(value):
        return Verdict(value)
    return Verdict(None, "error", f"the reward model says {value}")
