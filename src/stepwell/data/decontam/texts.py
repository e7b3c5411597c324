"""Which texts of a benchmark's items are looked for in documents, and as what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from string import ascii_uppercase
from typing import NamedTuple

from stepwell.data.decontam.benchmarks import Item
from stepwell.data.word_hashes import normalise

# Below this many words a text is no evidence by itself: GPT-3's smallest N.
MIN_WORDS = 8
# A shorter passage is the premise of its question; a longer one may be a public text.
PASSAGE_WORDS = 50
# A question of so many words is evidence even if several items ask it: GPT-3's largest N.
LONG_WORDS = 13
# What stands between a question and its answer, its choices or its premise in the common forms.
BEFORE_ANSWER = ("", "answer", "a")
BEFORE_CHOICES = ("", "options", "choices")
BEFORE_QUESTION = ("", "question")


class Part(IntEnum):
    """FOLLOWED_BY_...: a question that is weak evidence alone, with what follows it."""

    QUESTION = 0
    ANSWER = 1
    PASSAGE = 2
    FOLLOWED_BY_ANSWER = 3
    FOLLOWED_BY_CHOICES = 4


class ItemText(NamedTuple):
    """text: normalised. lead: so many words at its beginning must all be found."""

    part: Part
    text: str
    lead: int = 0


def texts_of_items(items: Sequence[Item]) -> Iterator[tuple[int, ItemText]]:
    """(number of the item, text) of all texts that are long enough to be looked for, and of all
    answers: whether one stands beside its question is asked too.

    A question counts by itself if it has MIN_WORDS words and no other item asks the same, or
    LONG_WORDS; else only with its answers or choices (plain and lettered) behind it. A short
    passage before it counts as its premise.
    """
    questions = [normalise(item.question) for item in items]
    times = Counter(questions)
    for i, (item, question) in enumerate(zip(items, questions, strict=True)):
        alone = _length(question) >= (MIN_WORDS if times[question] == 1 else LONG_WORDS)
        for one in _texts(item, question, alone):
            if one.part == Part.ANSWER or _length(one.text) >= MIN_WORDS:
                yield i, one


def _texts(item: Item, question: str, alone: bool) -> Iterator[ItemText]:
    passage = normalise(item.passage)
    answers = dict.fromkeys(text for answer in item.answers if (text := normalise(answer)))
    for answer in answers:
        yield ItemText(Part.ANSWER, answer)
    if alone:
        yield ItemText(Part.QUESTION, question)
    if _length(passage) >= PASSAGE_WORDS:
        yield ItemText(Part.PASSAGE, passage)
    elif passage:
        for word in BEFORE_QUESTION:
            yield ItemText(Part.QUESTION, _joined(passage, word, question))
    if question and not alone:
        yield from _with_what_follows(question, answers, item.choices)


def _with_what_follows(
    question: str, answers: Iterable[str], choices: Sequence[str]
) -> Iterator[ItemText]:
    for answer in answers:
        for word in BEFORE_ANSWER:
            yield _led(Part.FOLLOWED_BY_ANSWER, _joined(question, word), answer)
    plain = normalise(" ".join(choices))
    marked = zip(ascii_uppercase, choices, strict=False)
    lettered = normalise(" ".join(f"{letter} {choice}" for letter, choice in marked))
    if plain:
        for word in BEFORE_CHOICES:
            yield _led(Part.FOLLOWED_BY_CHOICES, _joined(question, word), plain)
            head, _, rest = lettered.partition(" ")
            yield _led(Part.FOLLOWED_BY_CHOICES, _joined(question, word, head), rest)


def _led(part: Part, before: str, after: str) -> ItemText:
    return ItemText(part, _joined(before, after), _length(before) + min(_length(after), MIN_WORDS))


def answer_window(item: Item) -> int:
    """Within how many words after a question its answer counts as given with it: 30, beside the
    choices and their letters."""
    return 30 + sum(_length(normalise(choice)) + 1 for choice in item.choices)


def _length(text: str) -> int:
    return len(text.split())


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
