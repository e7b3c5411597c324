"""Every scorer is tried on junk before a run starts: what a policy may find must not pay.

A scorer of rewards for right answers (exact, math, gym, code, tests, one's own function) is refused
if junk scores what a right answer does, and so is a function of one's own that scores all the same,
unless another dimension tells right from wrong. One of a form (regex, json) can be met by a wrong
answer, so only text without any content is held against it. Penalties are not tried. Reward models
are reported: their scores are learnt, and junk that they like is something to know, not a fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepwell.eval.grade import Prompt, Verdict
from stepwell.posttrain.rewards.composite import Dimension, Rewards, unwatched
from stepwell.posttrain.verifiers.exact import same_text
from stepwell.sections.methods import SampledMethod
from stepwell.tokenizer import Tokenizer
from stepwell.types import Completion, ConfigError, DataError

if TYPE_CHECKING:
    from stepwell.train.session import Session

NUM_ROWS = 8
# Without digits and words that some row's right answer may be.
EMPTY = {
    "nothing": "",
    "blanks": " \n\t \n ",
    "only the marker": "answer:",
    "an empty box": "\\boxed{}",
    "control characters": "\0\x01\x07\x1b[J\u200b\u202e\ufeff",
    "punctuation": "!?.,;:-()[]{}<>|/\\\"'",
    "a program that does nothing": "```python\npass\n```",
    "a program that leaves": "```python\nimport sys\nsys.exit()\n```",
    "an empty object": "{}",
    "very long": "the " * 5000,
}
SOLVED = 1.0
BOUNDED = ("exact", "math", "regex", "json", "code", "tests", "gym")
FORMS = ("regex", "json")
OWN = "python"
SHOWN = 60
# Answers that a grader is tried on first: if it takes too long for each, no others are.
NUM_PROBES = 4


@dataclass(frozen=True)
class Junk:
    """kind: empty (has no content at all), lucky (may be right by chance) or wrong (isn't)."""

    name: str
    text: str
    kind: str


@dataclass(frozen=True)
class Finding:
    """What a junk string scored in one dimension, on the rows where it was tried: scores as given
    (None: not applicable, or failed), right: what the row's own answer scores, None if not known,
    rows: their numbers.
    hits: on how many rows it scored as much as a right answer. failure: how the grader failed on
    the first row where it did. source: the kind of it, e.g. "python"."""

    dimension: str
    source: str
    junk: str
    text: str
    kind: str
    scores: tuple[float | None, ...]
    right: tuple[float | None, ...]
    rows: tuple[int, ...]
    hits: int
    num_failures: int
    refused: bool
    failure: str = ""


def self_test(
    rewards: Rewards,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 512,
) -> list[str]:
    """What is worth knowing, in sentences; tokenizer: reward models need it. Raises ConfigError if
    junk scores as much as a right answer, naming the string and the score."""
    findings = junk_scores(rewards, prompts, tokenizer, max_new_tokens)
    require_no_refusal(findings, rewards)
    return [*rewards.warnings, *reports(findings, rewards)]


def require_no_refusal(findings: Sequence[Finding], rewards: Rewards) -> None:
    """Raises ConfigError for the first finding that is refused."""
    for finding in findings:
        if finding.refused:
            dimension = next(d for d in rewards.dimensions if d.term.name == finding.dimension)
            raise ConfigError(_refusal(finding, dimension))
    for dimension in rewards.dimensions:
        own = _of(dimension, findings)
        same = blind_rows(own)
        if _is_blind(own) and max(same) > 0 and not _others_tell(dimension, findings, rewards):
            raise ConfigError(
                f"reward {dimension.term.name!r} (source {dimension.term.source!r}) gives no junk "
                f"less than the row's own answer on {len(same)} of {len(own[0].right)} rows (the "
                f"first scores {same[0]:g}), and nothing else in the reward tells right from "
                "wrong; a policy could learn nothing from it. Mend the scorer, or the column that "
                "says what is right; method.self_test=false starts all the same"
            )


def blind_rows(own: Sequence[Finding]) -> list[float]:
    """own: a dimension's. The scores of the rows' own answers where no junk scored less."""
    lowest: dict[int, float] = {}
    right: dict[int, float] = {}
    for finding in own:
        for row, score, best in zip(finding.rows, finding.scores, finding.right, strict=True):
            if score is not None:
                lowest[row] = min(score, lowest.get(row, score))
            if best is not None:
                right[row] = best
    return [best for row, best in right.items() if lowest.get(row, -math.inf) >= best]


def _is_blind(own: Sequence[Finding]) -> bool:
    """Whether a function of one's own tells no answer from junk on most of the rows that say what
    is right. Those of others have a bound to be held against, or are learnt."""
    if not own or own[0].source != OWN:
        return False
    known = sum(score is not None for score in own[0].right)
    return 2 * len(blind_rows(own)) > known


def _others_tell(dimension: Dimension, findings: Sequence[Finding], rewards: Rewards) -> bool:
    for other in rewards.dimensions:
        own = _of(other, findings)
        if other is dimension or not own or own[0].source in FORMS or not other.term.weight:
            continue
        if not _is_blind(own):
            return True
    return False


def _of(dimension: Dimension, findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.dimension == dimension.term.name]


def try_at_start(
    session: Session, rewards: Rewards, prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> None:
    """Before a run's first step, unless method.self_test is off; what it reports are events, and so
    are the rewards' warnings at every start.

    Raises DataError for prompts without a column that a dimension requires, and what `self_test`
    does.
    """
    rewards.check_columns(prompts)
    method = session.engine.run.method
    assert isinstance(method, SampledMethod)
    found = rewards.warnings
    if session.extra is None and method.self_test:
        found = self_test(rewards, prompts, tokenizer, method.max_new_tokens)
    if session.extra is None:
        learnt = any(d.scorer.is_model for d in rewards.dimensions)
        found = [*found, *rewards.blanks(prompts), *unwatched(method, learnt)]
    for text in found:
        session.log.event("reward_warning", text=text)


def junk_scores(
    rewards: Rewards,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 512,
) -> list[Finding]:
    """One for each dimension and junk string, over up to NUM_ROWS prompts of equal distances."""
    rows = [prompts[i * len(prompts) // NUM_ROWS] for i in range(min(NUM_ROWS, len(prompts)))]
    if len(prompts) < NUM_ROWS:
        rows = list(prompts)
    if not rows:
        raise ConfigError("there are no prompts to try the rewards on")
    junk = [junk_of(row, _another(row, rows), rows) for row in rows]
    right = [right_answers(row) for row in rows]
    findings = []
    for dimension in rewards.dimensions:
        if not is_penalty(dimension):
            texts = [*right[0], *(one.text for one in junk[0])]
            probe(dimension, rows[0], texts, tokenizer, max_new_tokens)
            scored = _scored(dimension, rows, junk, right, tokenizer, max_new_tokens)
            findings += _findings(dimension, *scored)
    return findings


def probe(
    dimension: Dimension,
    row: Prompt,
    texts: Sequence[str],
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 512,
) -> None:
    """Raises DataError if the grader takes too long for each of the first NUM_PROBES texts."""
    chosen = texts[:NUM_PROBES]
    completions = [_completion(row, text, tokenizer, max_new_tokens) for text in chosen]
    verdicts = dimension.scorer.score([row] * len(chosen), completions)
    require_in_time(dimension, verdicts)


def require_in_time(dimension: Dimension, verdicts: Sequence[Verdict]) -> None:
    """Raises DataError if all of them took too long."""
    if verdicts and all(verdict.failure == "timeout" for verdict in verdicts):
        raise DataError(
            f"reward {dimension.term.name!r} (source {dimension.term.source!r}) took too long for "
            f"each of the first {len(verdicts)} answers that it was tried on ({verdicts[0].detail})"
            "; no others were tried. Mend the grader, or give it more time "
            "(method.reward_timeout_s, --timeout-s)"
        )


def is_penalty(dimension: Dimension) -> bool:
    """Its best score is for an answer that has nothing wrong: built in, or a term that is bounded
    above by 0, or of negative weight."""
    term = dimension.term
    return dimension.scorer.is_penalty or term.weight < 0 or (term.high or 0) < 0 or term.high == 0


def junk_of(row: Prompt, other: str | None, rows: Sequence[Prompt]) -> list[Junk]:
    """The same names, in the same order, for every row of one set."""
    found = [Junk(name, text, "empty") for name, text in EMPTY.items()]
    found.append(Junk("the prompt itself", row.text, "lucky"))
    found.append(Junk("every letter", " ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), "lucky"))
    found.append(Junk("numbers", " ".join(map(str, range(101))), "lucky"))
    found.append(Junk("a tower of powers", "\\boxed{9^{9^{9^{9}}}}", "lucky"))
    found.append(Junk("an echo", "```python\nprint(input())\n```", "lucky"))
    truth = _truth(row)
    if truth is not None and other is not None:
        wrong = Junk("the answer of another row", f"answer: {other}", "lucky")
        many = Junk("many answers at once", f"answer: {other} or {truth} or {other}", "wrong")
        lines = [f"answer: {text}" for text in (other, truth, other)]
        found += [wrong, many, Junk("many answers in turn", "\n".join(lines), "lucky")]
    return found


def right_answers(row: Prompt) -> list[str]:
    """Texts of which one should be right, by the columns that say what is."""
    found = []
    truth = _truth(row)
    if truth is not None:
        found += [f"answer: {truth}", truth, f"\\boxed{{{truth}}}"]
        found += [f"<answer>{truth}</answer>", f"#### {truth}"]
    for name in ("solution", "canonical_solution", "completion", "code"):
        text = row.columns.get(name)
        if isinstance(text, str) and text.strip():
            found += [text, f"```python\n{text}\n```"]
    return found


def _truth(row: Prompt) -> str | None:
    columns: Mapping[str, Any] = row.columns
    value = columns.get("answer")
    if value is None and isinstance(columns.get("entry"), Mapping):
        value = columns["entry"].get("answer")
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def _another(row: Prompt, rows: Iterable[Prompt]) -> str | None:
    truth = _truth(row)
    others = [t for t in map(_truth, rows) if t is not None and not same_text(t, truth or "")]
    return others[len(others) // 2] if others else None


def _scored(
    dimension: Dimension,
    rows: Sequence[Prompt],
    junk: Sequence[Sequence[Junk]],
    right: Sequence[Sequence[str]],
    tokenizer: Tokenizer | None,
    max_new_tokens: int,
) -> tuple[list[tuple[Junk, Verdict, int]], list[float | None]]:
    """Each row's junk with its verdict and the row's number; each row's right score."""
    asked = [(row, text) for row, texts in zip(rows, right, strict=True) for text in texts]
    tried = [(row, one.text) for row, several in zip(rows, junk, strict=True) for one in several]
    both = [*asked, *tried]
    completions = [_completion(row, text, tokenizer, max_new_tokens) for row, text in both]
    verdicts = dimension.scorer.score([row for row, _ in both], completions)
    best: list[float | None] = []
    start = 0
    for texts in right:
        scores = [v.reward for v in verdicts[start : start + len(texts)] if v.reward is not None]
        best.append(max(scores, default=None))
        start += len(texts)
    flat = [(one, number) for number, several in enumerate(junk) for one in several]
    rest = verdicts[len(asked) :]
    return [(one, v, number) for (one, number), v in zip(flat, rest, strict=True)], best


def _completion(
    row: Prompt, text: str, tokenizer: Tokenizer | None, max_new_tokens: int
) -> Completion:
    ids = [0] * len(text.split()) if tokenizer is None else tokenizer.encode(text, special=False)
    ids = ids[:max_new_tokens] or ([] if tokenizer is None else [tokenizer.eos_id])
    return Completion(0, row.ids, tuple(ids), (0.0,) * len(ids), text, "stop")


def _findings(
    dimension: Dimension,
    tried: Sequence[tuple[Junk, Verdict, int]],
    right: Sequence[float | None],
) -> list[Finding]:
    kind = dimension.term.source.partition(":")[0]
    bars = []
    for row, score in enumerate(right):
        junk = [v.reward for _, v, number in tried if number == row and v.reward is not None]
        bars.append(_bar(kind, score, min(junk, default=None)))
    found = []
    for name in dict.fromkeys(one.name for one, _, _ in tried):
        of_name = [(one, v, number) for one, v, number in tried if one.name == name]
        reached = [
            (one, v)
            for one, v, number in of_name
            if v.reward is not None and (bar := bars[number]) is not None and v.reward >= bar
        ]
        first = reached[0][0] if reached else of_name[0][0]
        is_lucky = first.kind == "lucky" and 2 * len(reached) <= len(of_name)
        counts = first.kind == "empty" if kind in FORMS else not is_lucky
        found.append(
            Finding(
                dimension.term.name,
                kind,
                name,
                first.text,
                first.kind,
                tuple(v.reward for _, v, _ in of_name),
                tuple(right[number] for _, _, number in of_name),
                tuple(number for _, _, number in of_name),
                len(reached),
                sum(bool(v.failure) for _, v, _ in of_name),
                bool(reached) and counts and not dimension.scorer.is_model,
                next((f"{v.failure}: {v.detail}" for _, v, _ in of_name if v.failure), ""),
            )
        )
    return found


def _bar(kind: str, right: float | None, lowest: float | None) -> float | None:
    """What junk must stay below. Of a function of one's own this is the score of the row's answer,
    where it is known, and if it is above some junk's: otherwise the function does not know it for
    right (`blind_rows`)."""
    if kind in BOUNDED:
        return SOLVED
    if right is None or lowest is None or right <= lowest:
        return None
    return right


def _refusal(finding: Finding, dimension: Dimension) -> str:
    top = max(score for score in finding.scores if score is not None)
    return (
        f"reward {finding.dimension!r} (source {dimension.term.source!r}) gives {top:g} to junk "
        f"({finding.junk}: {_shown(finding.text)}) on {finding.hits} of {len(finding.scores)} "
        "rows, as much as to a right answer; a policy would learn to write that. Mend the scorer "
        "or the rows; if its best score is for having nothing wrong, say so with high = 0; "
        "method.self_test=false starts all the same"
    )


def reports(findings: Sequence[Finding], rewards: Rewards) -> list[str]:
    """What is no reason to refuse: own answers that don't score, graders that fail on junk, junk
    that is right by chance or that a reward model likes."""
    found = []
    for dimension in rewards.dimensions:
        own = _of(dimension, findings)
        if not own:
            continue
        name = f"reward {dimension.term.name!r}"
        kind = dimension.term.source.partition(":")[0]
        right = own[0].right
        unsolved = sum(score is not None and score < SOLVED for score in right)
        if unsolved and kind in BOUNDED and kind not in FORMS:
            found.append(
                f"{name}: the row's own answer does not score {SOLVED:g} on {unsolved} of "
                f"{len(right)} rows"
            )
        if kind == OWN and all(score is None for score in right):
            scores = {score for finding in own for score in finding.scores}
            only = scores.pop() if len(scores) == 1 else None
            same = "" if only is None else f", all of it {only:g}"
            found.append(
                f"{name}: no row says what is right, so junk was only seen to be scored{same}"
            )
        blind = blind_rows(own)
        if kind == OWN and blind:
            found.append(
                f"{name}: no junk scores less than the row's own answer on {len(blind)} of "
                f"{len(right)} rows (the first scores {blind[0]:g}), so it was not seen to tell "
                "right from wrong there; if it expects answers of another form, put one into a "
                "column `completion`"
            )
        failed = [finding for finding in own if finding.num_failures]
        if failed:
            first, others = failed[0], len(failed) - 1
            more = f", and with {others} other strings" if others else ""
            found.append(
                f"{name}: the grader fails on {first.num_failures} rows with junk ({first.junk}: "
                f"{_shown(first.text)}){more}; the first failure is {first.failure}"
            )
        for finding in own:
            junk = f"junk ({finding.junk}: {_shown(finding.text)})"
            if finding.hits and not finding.refused:
                as_much = (
                    "at least as much as the row's own answer"
                    if kind == "model"
                    else "as a right answer"
                )
                found.append(
                    f"{name}: {junk} scores {as_much} on {finding.hits} of "
                    f"{len(finding.scores)} rows"
                )
    return found


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
