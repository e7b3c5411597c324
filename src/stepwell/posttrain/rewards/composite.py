"""The reward of an answer: named dimensions, each scored, logged and tested on its own.

The reward is the sum of weight times score over the dimensions that apply. A dimension that says
None does not apply and is left out of the sum; one whose grader failed or took too long makes the
whole reward None, because a sum without it would be another reward, and a zero would be a lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepwell.eval.grade import Prompt, Verdict
from stepwell.sections.methods import GRPO, SampledMethod
from stepwell.sections.rewards import RewardTerm
from stepwell.types import Completion, DataError, nearest

if TYPE_CHECKING:
    from stepwell.config import Run
    from stepwell.parallel.mesh import Mesh
    from stepwell.tokenizer import Tokenizer
    from stepwell.train.engine import Engine

PROGRAM_ENDS = ("timeout", "memory", "error")  # first words of a verdict's detail
Score = Callable[[Sequence[Prompt], Sequence[Completion]], list[Verdict]]


@dataclass(frozen=True)
class Scorer:
    """score: a verdict for each answer. requires: the columns that a row must have ("a or b": one
    of them). is_model: its scores are learnt, so junk may score anything. is_penalty: its best
    score is that of an answer with nothing wrong, also of an empty one. close: ends what it has
    started. warning: what a user should know about it. engines: the models that it scores with."""

    score: Score
    requires: tuple[str, ...] = ()
    is_model: bool = False
    is_penalty: bool = False
    close: Callable[[], None] = lambda: None
    warning: str = ""
    engines: tuple[Engine, ...] = ()


@dataclass(frozen=True)
class Dimension:
    term: RewardTerm
    scorer: Scorer

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Verdict]:
        """Clipped to the term's bounds, not yet weighted."""
        verdicts = self.scorer.score(prompts, completions)
        if len(verdicts) != len(completions):
            raise DataError(
                f"method.rewards: {self.term.name!r} gave {len(verdicts)} scores to "
                f"{len(completions)} answers; it must give one each"
            )
        return [_clipped(verdict, self.term) for verdict in verdicts]


@dataclass(frozen=True)
class Rewards:
    dimensions: tuple[Dimension, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(d.term.name for d in self.dimensions)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Verdict]:
        """The composite reward of each answer; `prompts[i]` is what `completions[i]` answers."""
        if len(prompts) != len(completions):
            raise DataError(f"{len(prompts)} prompts for {len(completions)} answers; give one each")
        terms = [d.term for d in self.dimensions]
        columns = [d.score(prompts, completions) for d in self.dimensions]
        return [composite(terms, verdicts) for verdicts in zip(*columns, strict=True)]

    def check_columns(self, prompts: Sequence[Prompt]) -> None:
        """Raises DataError if a row lacks a column that a dimension requires."""
        for dimension in self.dimensions:
            for name in dimension.scorer.requires:
                _check_column(dimension.term, name, prompts)

    def blanks(self, prompts: Sequence[Prompt]) -> list[str]:
        """Of each dimension, in how many rows what it requires is null or blank."""
        found = []
        for dimension in self.dimensions:
            for name in dimension.scorer.requires:
                empty = [p for p in prompts if is_blank(p, name)]
                if empty:
                    found.append(
                        f"reward {dimension.term.name!r}: the column {name!r} is null or blank in "
                        f"{len(empty)} of {len(prompts)} rows (first {empty[0].item}), whose "
                        "answers it cannot tell apart"
                    )
        return found

    @property
    def warnings(self) -> list[str]:
        """What a user should know before the run starts."""
        scorers = {d.term.name: d.scorer for d in self.dimensions}
        return [f"reward {name!r}: {s.warning}" for name, s in scorers.items() if s.warning]

    def close(self) -> None:
        for dimension in self.dimensions:
            dimension.scorer.close()


def composite(terms: Sequence[RewardTerm], verdicts: Sequence[Verdict]) -> Verdict:
    """One answer's verdicts, one a dimension, as one."""
    named = {term.name: verdict for term, verdict in zip(terms, verdicts, strict=True)}
    failures = {name: v.failure for name, v in named.items() if v.failure}
    details = {name: v.detail for name, v in named.items() if v.detail}
    weighted = [
        term.weight * v.reward
        for term, v in zip(terms, verdicts, strict=True)
        if v.reward is not None
    ]
    spreads = [
        abs(term.weight) * v.disagreement
        for term, v in zip(terms, verdicts, strict=True)
        if v.disagreement is not None
    ]
    return Verdict(
        reward=math.fsum(weighted) if weighted and not failures else None,
        failure=next(iter(failures.values()), ""),
        detail="; ".join(
            text if len(named) == 1 else f"{name}: {text}" for name, text in details.items()
        ),
        scores={name: v.reward for name, v in named.items()},
        failures=failures,
        details=details,
        disagreement=math.fsum(spreads) if spreads else None,
        members=next((v.members for v in verdicts if v.members), ()),
    )


def reward_metrics(names: Sequence[str], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Of all ranks' verdicts: each dimension's mean over the answers that it applies to, and how
    many it did not apply to or failed on. A dimension that applied to none has no mean. Of answers
    that were run as programs: how many ended in another way than with a wrong result."""
    metrics: dict[str, float] = {}
    for name in names:
        scores = [v.scores.get(name) for v in verdicts]
        known = [score for score in scores if score is not None]
        failures = [v.failures.get(name, "") for v in verdicts]
        if known:
            metrics[f"reward/{name}/mean"] = math.fsum(known) / len(known)
        metrics[f"reward/{name}/timeouts"] = failures.count("timeout")
        metrics[f"reward/{name}/errors"] = failures.count("error")
        metrics[f"reward/{name}/not_applicable"] = (
            len(scores) - len(known) - sum(map(bool, failures))
        )
        ends = [v.details.get(name, "").partition(":")[0] for v in verdicts if not v.failures]
        for end in PROGRAM_ENDS:
            if end in ends:
                metrics[f"reward/{name}/program_{end}"] = ends.count(end)
    return metrics


def reward_terms(method: SampledMethod) -> tuple[RewardTerm, ...]:
    """`method.rewards`, or `method.verifier` as the only dimension, of weight 1."""
    if method.rewards:
        return method.rewards
    kind = method.verifier.partition(":")[0]
    return (RewardTerm(name=kind, source=method.verifier),)


def with_overlong(method: SampledMethod) -> SampledMethod:
    """The method with GRPO's punishment of long answers among its rewards."""
    if not isinstance(method, GRPO) or not method.overlong_cache:
        return method
    source = f"overlong:{method.max_new_tokens}:{method.overlong_cache}"
    terms = (*reward_terms(method), RewardTerm(name="overlong", source=source))
    return method.model_copy(update={"rewards": terms})


def check_models(method: SampledMethod, tokenizer: Tokenizer | None = None) -> list[str]:
    """What a user should know of the reward models that a method names, before one is built. Raises
    what opening them would."""
    from stepwell.posttrain.reward_model.objectives import check_reward

    found = []
    for term in reward_terms(method):
        kind, _, folders = term.source.partition(":")
        if kind == "model" and folders:
            remarks = check_reward(folders.split(","), term.aggregate, term.k, tokenizer)
            found += [f"reward {term.name!r}: {remark}" for remark in remarks]
    return found


def unwatched(method: SampledMethod, learnt: bool) -> list[str]:
    """What is said of an alarm that nothing can set off. learnt: whether a model has learnt one of
    the rewards."""
    fields = type(method).model_fields
    keys = [k for k in ("overopt", "overopt_window") if getattr(method, k) != fields[k].default]
    if learnt or method.overopt == "ignore":
        return []
    return [
        f"method.{key}={getattr(method, key)!r} changes nothing: it is about rewards that a model "
        "has learnt (source model:FOLDER), and none of these is"
        for key in keys
    ]


def open_rewards(
    method: SampledMethod,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    run: Run | None = None,
) -> Rewards:
    """The dimensions of a method's reward, ready to score. Close them at the end.

    Raises ConfigError for a source that is unknown, cannot be read or lacks its package.
    """
    from stepwell.posttrain.rewards.sources import open_scorer

    dimensions: list[Dimension] = []
    try:
        for term in reward_terms(with_overlong(method)):
            scorer = open_scorer(
                term.source,
                method.reward_timeout_s,
                tokenizer,
                mesh,
                run,
                aggregate=term.aggregate,
                k=term.k,
            )
            dimensions.append(Dimension(term, scorer))
    except BaseException:
        Rewards(tuple(dimensions)).close()
        raise
    return Rewards(tuple(dimensions))


def _clipped(verdict: Verdict, term: RewardTerm) -> Verdict:
    score = verdict.reward
    if score is None:
        return verdict
    if not math.isfinite(score):
        return replace(verdict, reward=None, failure="error", detail=f"the score is {score}")
    if term.low is not None:
        score = max(score, term.low)
    if term.high is not None:
        score = min(score, term.high)
    return replace(verdict, reward=score)


def is_blank(prompt: Prompt, column: str) -> bool:
    """Whether the row has the column ("a or b": one of them), and nothing in it."""
    values = [prompt.columns[c] for c in column.split(" or ") if c in prompt.columns]
    return bool(values) and all(
        value is None or (isinstance(value, str) and not value.strip()) for value in values
    )


def _check_column(term: RewardTerm, name: str, prompts: Sequence[Prompt]) -> None:
    enough = name.split(" or ")
    lacking = [p for p in prompts if not any(column in p.columns for column in enough)]
    if not lacking:
        return
    there = ", ".join(repr(column) for column in lacking[0].columns) or "none"
    raise DataError(
        f"the verifier needs the column {' or '.join(map(repr, enough))}, which {len(lacking)} of "
        f"{len(prompts)} rows lack{nearest(enough[0], lacking[0].columns)}; beside the prompt they "
        f"have: {there} (reward {term.name!r}, source {term.source!r})"
    )
