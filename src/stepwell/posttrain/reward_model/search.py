"""Search with a process reward model: step by step with a beam, or over whole answers.

A step of an answer ends at a separator (`prm.split_steps`), and its score is the chance that it is
right. D documents of a prompt and (the beginning of) an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stepwell.data.preference import SEPARATOR
from stepwell.eval.grade import Prompt, answer_seeds
from stepwell.generate import Request, Sampling
from stepwell.posttrain.reward_model.prm import Aggregation, aggregate
from stepwell.posttrain.sampling.episodes import Sampler
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError

# (documents, places of their steps' last tokens) -> the chance of each step;
# `reward_model.Scorer.step_scores` is one.
StepScores = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], list[list[float]]]


@dataclass(frozen=True)
class Path:
    """token_ids: what was sampled, with the token that ends it. step_ends: places of the steps'
    last tokens among them. chances: of each step. score: their aggregate. ended: by the policy
    itself, not cut off."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    step_ends: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    score: float = 0.0
    ended: bool = False
    cut: bool = False

    def text(self, tokenizer: Tokenizer) -> str:
        return tokenizer.decode([i for i in self.token_ids if i not in tokenizer.stop_ids])


class Found(NamedTuple):
    """paths: of one prompt, those that ended first, each kind by falling score; none twice.
    num_tokens: that were sampled for it."""

    paths: tuple[Path, ...]
    num_tokens: int

    @property
    def best(self) -> Path:
        return self.paths[0]


def beam_search(
    engine: Sampler,
    prompts: Sequence[Prompt],
    step_scores: StepScores,
    sampling: Sampling,
    tokenizer: Tokenizer,
    width: int = 4,
    expand: int = 4,
    max_steps: int = 32,
    separator: str = SEPARATOR,
    how: Aggregation = "min",
    seed: int = 0,
) -> list[Found]:
    """Step-level beam search (2408.03314, section 5.1): width * expand first steps, of which the
    `width` best go on with `expand` next steps each, until all have ended or have max_steps steps.

    Answers that have ended keep their place in the beam and compete by their scores. All prompts
    are searched at once. A step's seeds are drawn from (seed, what stands before it), so a prompt's
    result does not depend on its neighbours. sampling.max_new_tokens is for the whole answer.

    Raises ConfigError for numbers below 1, stop strings (the separator is the only one), and an
    unknown aggregation.
    """
    _check(sampling, separator, how, width=width, expand=expand, max_steps=max_steps)
    one_step = replace(sampling, stop=(separator,))
    beams = [[Path(tuple(prompt.ids))] for prompt in prompts]
    spent = [0] * len(prompts)
    for round_ in range(max_steps):
        count = expand if round_ else width * expand
        going = [(p, path) for p, beam in enumerate(beams) for path in beam if is_open(path)]
        if not going:
            break
        grown = _sample(engine, [path for _, path in going], count, one_step, tokenizer, seed)
        grown = scored(grown, step_scores, tokenizer, separator, how)
        for p, beam in enumerate(beams):
            kept = [path for path in beam if not is_open(path)]
            beams[p] = kept if round_ else []
        for i, path in enumerate(grown):
            p, before = going[i // count]
            spent[p] += len(path.token_ids) - len(before.token_ids)
            beams[p].append(path)
        beams = [best_first(beam)[:width] for beam in beams]
    return [
        Found(_ended_first(beam), num_tokens) for beam, num_tokens in zip(beams, spent, strict=True)
    ]


def best_of_n(
    engine: Sampler,
    prompts: Sequence[Prompt],
    n: int,
    step_scores: StepScores,
    sampling: Sampling,
    tokenizer: Tokenizer,
    separator: str = SEPARATOR,
    how: Aggregation = "min",
    seed: int = 0,
) -> list[Found]:
    """n whole answers to each prompt, ranked by the aggregate of their steps' chances. Raises
    ConfigError as `beam_search` does."""
    _check(sampling, separator, how, n=n)
    starts = [Path(tuple(prompt.ids)) for prompt in prompts]
    paths = _sample(engine, starts, n, sampling, tokenizer, seed)
    paths = scored(paths, step_scores, tokenizer, separator, how)
    cuts = range(0, len(paths), n)
    return [
        Found(
            _ended_first(best_first(paths[a : a + n])),
            sum(len(path.token_ids) for path in paths[a : a + n]),
        )
        for a in cuts
    ]


def step_ends(
    token_ids: Sequence[int], tokenizer: Tokenizer, separator: str = SEPARATOR
) -> list[int]:
    """Places of the last token of each step: the token that completes a separator, and that of what
    follows the last one. Steps of blanks alone go with the one before, as in `prm.split_steps`;
    tokens that end the answer belong to no step. Empty for an answer of blanks."""
    return _steps(token_ids, tokenizer, separator)[0]


def _steps(
    token_ids: Sequence[int], tokenizer: Tokenizer, separator: str
) -> tuple[list[int], bool]:
    """`step_ends`, and whether the last of these tokens completes a separator."""
    ends: list[int] = []
    text, last, closed = "", -1, False
    for place, token in enumerate(token_ids):
        if token in tokenizer.stop_ids:
            continue
        text, last = text + tokenizer.decode([token]), place
        closed = separator in text
        if closed:
            _end(ends, place, text)
            text = text.rpartition(separator)[2]
    if text and not closed:
        _end(ends, last, text)
    return ends, closed


def scored(
    paths: Sequence[Path],
    step_scores: StepScores,
    tokenizer: Tokenizer,
    separator: str = SEPARATOR,
    how: Aggregation = "min",
) -> list[Path]:
    """The paths with their steps, chances and scores; an answer of blanks scores 0.

    A reward model of steps reads a step's score after its separator, so a last step without one is
    given it, in what the model reads only.
    """
    added = tokenizer.encode(separator, special=False)
    found, docs, ends = [], [], []
    for path in paths:
        places, closed = _steps(path.token_ids, tokenizer, separator)
        found.append(replace(path, step_ends=tuple(places)))
        if not places:
            continue
        words = path.token_ids[: places[-1] + 1]
        docs.append([*path.prompt_ids, *words, *([] if closed else added)])
        shifted = [len(path.prompt_ids) + place for place in places]
        shifted[-1] += 0 if closed else len(added)
        ends.append(shifted)
    every = iter(step_scores(docs, ends) if docs else [])
    done = []
    for path in found:
        chances = tuple(next(every)) if path.step_ends else ()
        score = aggregate(chances, how) if chances else 0.0
        done.append(replace(path, chances=chances, score=score))
    return done


def best_first(paths: Sequence[Path]) -> list[Path]:
    """By falling score, of equal ones the earlier first; none twice."""
    distinct = list({path.token_ids: path for path in reversed(paths)}.values())[::-1]
    return sorted(distinct, key=lambda path: -path.score)


def is_open(path: Path) -> bool:
    return not path.ended and not path.cut


def _sample(
    engine: Sampler,
    paths: Sequence[Path],
    count: int,
    sampling: Sampling,
    tokenizer: Tokenizer,
    seed: int,
) -> list[Path]:
    """`count` continuations of each path, one after another."""
    requests, owners = [], []
    for path in paths:
        ids = (*path.prompt_ids, *path.token_ids)
        left = sampling.max_new_tokens - len(path.token_ids)
        for one in answer_seeds(seed, ids, count):
            requests.append(Request(len(requests), ids, one, max_new_tokens=left))
            owners.append(path)
    grown = []
    found = engine.generate(requests, sampling, tokenizer=tokenizer)
    for path, completion in zip(owners, found, strict=True):
        tokens = (*path.token_ids, *completion.token_ids)
        ended = completion.token_ids[-1] in sampling.eos_ids
        full = completion.finish_reason == "length" or len(tokens) >= sampling.max_new_tokens
        grown.append(replace(path, token_ids=tokens, ended=ended, cut=full and not ended))
    return grown


def _ended_first(paths: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(sorted(paths, key=lambda path: not path.ended))


def _end(ends: list[int], place: int, text: str) -> None:
    """Ends a step at this token; one of blanks alone moves the end of the one before."""
    if text.strip():
        ends.append(place)
    elif ends:
        ends[-1] = place


def _check(sampling: Sampling, separator: str, how: Aggregation, **counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name}={value}: the nearest legal value is 1")
    if sampling.stop:
        raise ConfigError(
            f"stop={sampling.stop!r}: a search ends steps at their separator {separator!r} and "
            "answers at eos_ids; leave stop strings out"
        )
    if not separator:
        raise ConfigError(f"the separator of steps is empty; {SEPARATOR!r} is usual")
    aggregate([1.0], how)
