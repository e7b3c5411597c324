"""Gopher's repetition rules against a plain reading of table A1."""

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.data.batches import to_batch
from stepwell.data.quality.repetition import (
    DUPLICATE,
    TOP,
    GopherRepetition,
    duplicates,
    gopher_repetition,
    gopher_repetition_verdicts,
    lines_of,
    paragraphs_of,
)
from stepwell.types import Document

WORDS = [f"{a}{b}" for a in ("stone", "water", "well", "deep", "cold") for b in "abcdefghijklmno"]


def by_definition(text: str, limits: GopherRepetition) -> str:
    size = len(text)
    if not size:
        return ""
    for name, pieces in (
        ("paragraph", re.split(r"\n{2,}", text.strip())),
        ("line", re.split(r"\n+", text)),
    ):
        again = [p for i, p in enumerate(pieces) if p in pieces[:i]]
        if len(again) / len(pieces) > getattr(limits, f"max_duplicate_{name}s"):
            return f"gopher_duplicate_{name}s"
        if sum(map(len, again)) / size > getattr(limits, f"max_duplicate_{name}_chars"):
            return f"gopher_duplicate_{name}_chars"
    words = text.split()
    for n in TOP:
        grams = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
        if grams:
            gram, count = Counter(grams).most_common(1)[0]
            if len(gram) * count / size > getattr(limits, f"max_top_{n}gram_chars"):
                return f"gopher_top_{n}gram_chars"
    for n in DUPLICATE:
        seen, chars, at = set(), 0, 0
        while at <= len(words) - n:
            gram = tuple(words[at : at + n])
            if gram in seen:
                chars += sum(map(len, gram))
            at += n if gram in seen else 1
            seen.add(gram)
        if chars / size > getattr(limits, f"max_duplicate_{n}gram_chars"):
            return f"gopher_duplicate_{n}gram_chars"
    return ""


PIECE = st.sampled_from(
    ["a", "b", "cc", "ddd", "eeee", "水", " ", "\n", "\n\n", "\n\n\n", "a b cc"]
)
TEXTS = st.lists(PIECE, max_size=60).map("".join) | st.lists(PIECE, max_size=60).map(" ".join)
LIMIT = st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0])


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=5), st.lists(LIMIT, min_size=13, max_size=13))
def test_verdicts_agree_with_the_definitions(texts, values):
    names = [name for name in GopherRepetition.model_fields if name.startswith("max_")]
    limits = GopherRepetition.model_validate(dict(zip(names, values, strict=True)))
    found = [v[0] if v else "" for v in gopher_repetition_verdicts(texts, limits)]
    assert found == [by_definition(text, limits) for text in texts]


@given(TEXTS)
def test_lines_and_paragraphs_are_those_of_the_patterns(text):
    lines, paragraphs = re.split(r"\n+", text), re.split(r"\n{2,}", text.strip())
    assert sorted(lines_of(text)) == sorted(lines if text else [])
    assert paragraphs_of(text) == (paragraphs if text.strip() else [])


def test_three_of_a_kind_are_two_duplicates():
    assert duplicates(["aa", "aa", "aa", "b"]) == (2, 4)
    assert duplicates(["a", "b"]) == (0, 0)


def prose(num: int, seed: int = 0) -> list[str]:
    return [WORDS[(7 * i * i + 13 * i + seed * i // 3) % len(WORDS)] + str(i) for i in range(num)]


LONG = " ".join(prose(200))
CASES = {
    "duplicate_paragraphs": ("\n\n".join([*["ab"] * 4, *prose(6)]) + "\n\n" + LONG, 0.5),
    "duplicate_paragraph_chars": (f"{LONG}\n\n{LONG}\n\nx\n\ny", 0.6),
    "duplicate_lines": ("\n".join([*["ab"] * 5, *prose(7)]) + " " + LONG, 0.4),
    "duplicate_line_chars": (f"{LONG}\n{LONG}\nx\ny", 0.6),
    "top_2gram_chars": (" ".join(f"ab cd {w}" for w in prose(60)), 0.4),
    "top_3gram_chars": (" ".join(f"ab cd ef {w} {w}x {w}y" for w in prose(60)), 0.25),
    "top_4gram_chars": (" ".join(f"a b c d {w} {w}x {w}y" for w in prose(60)), 0.5),
    **{
        f"duplicate_{n}gram_chars": (
            " ".join(
                prose(400)
                + [" ".join(["~~", *prose(400)[i : i + n]]) for i in range(20, 20 + n * 15, n)]
            ),
            0.4,
        )
        for n in DUPLICATE
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_rule_has_its_reason_and_its_knob(name):
    text, loose = CASES[name]
    others = {k: 1.0 for k in GopherRepetition.model_fields if k.startswith("max_")}
    only = GopherRepetition.model_validate({**others, f"max_{name}": 0.1})
    verdict = gopher_repetition(text, only)
    assert verdict is not None
    assert verdict[0] == f"gopher_{name}"
    value = float(verdict[1].split()[0])
    assert 0.1 < value < loose
    looser = GopherRepetition.model_validate({**others, f"max_{name}": loose})
    assert gopher_repetition(text, looser) is None


def test_published_limits():
    limits = GopherRepetition()
    assert [getattr(limits, f"max_duplicate_{n}gram_chars") for n in DUPLICATE] == [
        0.15, 0.14, 0.13, 0.12, 0.11, 0.10,
    ]  # fmt: skip
    assert [getattr(limits, f"max_top_{n}gram_chars") for n in TOP] == [0.20, 0.18, 0.16]
    assert gopher_repetition(LONG) is None
    assert gopher_repetition(f"{LONG} {LONG}") is not None


def test_the_limit_is_inclusive():
    ten = [f"{i}" for i in range(7)] + ["same"] * 4
    assert gopher_repetition("\n".join([*ten[:7], *ten[7:]]) + LONG) is None
    assert duplicates(["same"] * 4 + ["x"] * 0 + [str(i) for i in range(6)])[0] == 3
    text = "\n".join(["s"] * 4 + [f"{w}{w}" for w in prose(6)])
    assert (gopher_repetition(text) or ("",))[0] != "gopher_duplicate_lines"
    text = "\n".join(["s"] * 5 + [f"{w}{w}" for w in prose(6)])
    assert gopher_repetition(text) == ("gopher_duplicate_lines", "0.3636 > 0.3")


def test_texts_of_a_batch_know_nothing_of_each_other():
    texts = [LONG, "", LONG, " ", f"{LONG} {LONG}", LONG]
    docs = [Document(str(i), text, "web") for i, text in enumerate(texts)]
    whole = GopherRepetition()(to_batch(docs, 0))
    assert whole.kept["id"].to_pylist() == ["0", "1", "2", "3", "5"]
    alone = [GopherRepetition()(to_batch([doc], 0)).removed.num_rows for doc in docs]
    assert alone == [0, 0, 0, 0, 1, 0]
