import pyarrow as pa
import pytest

from stepwell.data.batches import to_batch
from stepwell.data.quality.fineweb import FineWeb, fineweb_quality, fineweb_quality_verdicts
from stepwell.types import Document

LINES = [f"This is line number {i}, and it has words enough to be long." for i in range(20)]
GOOD = "\n".join(LINES)


def with_lines(num: int, line: str, total: int = 100) -> str:
    return "\n".join([line.format(i) for i in range(num)] +
                     [LINES[0] + f" It is {i}." for i in range(total - num)])  # fmt: skip


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (GOOD, None),
        (" \n\n ", ("fineweb_empty", "")),
        (with_lines(88, "no end to this line, which is long enough {}"), None),
        (with_lines(89, "no end to this line, which is long enough {}"),
         ("fineweb_unpunctuated_lines", "0.11 < 0.12")),
        (with_lines(67, "{:029}."), None),
        (with_lines(68, "{:029}."), ("fineweb_short_lines", "0.68 > 0.67")),
        (GOOD + "\n" + LINES[3], ("fineweb_duplicate_lines", "0.04723 > 0.01")),
        ("\n".join(f"One more {'x' * 30}{i}." for i in range(9)), None),
        ("\n".join(f"Few {'x' * 30}{i}." for i in range(9)),
         ("fineweb_newlines", "0.4444 > 0.3")),
        ("水是深的井里的水很冷石头在那里我们有水。\n", ("fineweb_short_lines", "1 > 0.67")),
    ],
)  # fmt: skip
def test_each_rule_has_its_reason_on_both_sides(text, verdict):
    assert fineweb_quality(text) == verdict


@pytest.mark.parametrize(
    ("text", "knobs"),
    [
        (with_lines(89, "no end to this line, which is long enough {}"),
         {"min_punctuated_lines": 0.11}),
        (with_lines(68, "{:029}."), {"max_short_lines": 0.68}),
        (with_lines(68, "{:029}."), {"short_line_chars": 29}),
        (GOOD + "\n" + LINES[3], {"max_duplicate_line_chars": 0.05}),
        ("\n".join(f"Few {'x' * 30}{i}." for i in range(9)), {"max_newlines_per_word": 0.5}),
    ],
)  # fmt: skip
def test_every_knob_changes_a_verdict(text, knobs):
    assert fineweb_quality(text) is not None
    assert fineweb_quality(text, FineWeb(**knobs)) is None


@pytest.mark.parametrize("limit", [0.0, 0.1, 1 / 3, 1.0])
@pytest.mark.parametrize("text", ["a\n", "a b c\n", "a\nb c\nd e f\n\n", "a b c d e f g h i j\n"])
def test_line_breaks_are_shared_among_words(text, limit):
    limits = FineWeb(min_punctuated_lines=0.0, max_short_lines=1.0, max_newlines_per_word=limit)
    is_broken = text.count("\n") / len(text.split()) > limit
    assert (fineweb_quality(text, limits) is not None) == is_broken


def test_a_verdict_does_not_depend_on_the_texts_beside_it():
    texts = [
        GOOD,
        "",
        with_lines(89, "no end {}"),
        " \n",
        "水。\n水。",
        GOOD + "\n" + LINES[3],
        "é",
    ]
    column = pa.array(texts, pa.large_string())
    assert fineweb_quality_verdicts(column) == [fineweb_quality(text) for text in texts]
    assert fineweb_quality_verdicts(column[2:5]) == [fineweb_quality(t) for t in texts[2:5]]
    assert fineweb_quality_verdicts(column[:0]) == []


def test_the_step():
    docs = [Document("0", GOOD, "web"), Document("1", "", "web")]
    outcome = FineWeb()(to_batch(docs, 0))
    assert outcome.kept["id"].to_pylist() == ["0"]
    assert outcome.removed["reason"].to_pylist() == ["fineweb_empty"]
