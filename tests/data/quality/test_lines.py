from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.data.quality import lines as module
from stepwell.data.quality.lines import SPACES, groups, num_true_before, split_lines

# Every break and blank of Python's, characters of one to four bytes, and near relatives of both.
SIGNS = (
    [sign.decode() for sign in SPACES]
    + list("ab.\0\x0e\x1b\x7f¿éß…“、。あ水😀𝐀")
    + ["\r\n", "\n"] * 6
)  # fmt: skip
TEXTS = st.lists(st.lists(st.sampled_from(SIGNS), max_size=12).map("".join), min_size=1, max_size=6)


def column(texts: list[str]) -> pa.Array:
    return pa.array(texts, pa.large_string())


def by_text(lines: module.Lines, values) -> list[list]:
    return [list(values[first:last]) for first, last in pairwise(lines.first_D1)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXTS)
def test_lines_are_those_of_str_split(texts):
    lines = split_lines(column(texts))
    expected = [text.split("\n") for text in texts]
    contents = [lines.line(i) for i in range(len(lines.start_L))]
    assert by_text(lines, contents) == expected
    flat = [line for found in expected for line in found]
    assert lines.num_chars().tolist() == list(map(len, flat))
    assert lines.blank().tolist() == [not line.strip() for line in flat]
    assert lines.last_chars().tolist() == [ord(line[-1]) if line else 0 for line in flat]
    assert lines.num_newlines.tolist() == [text.count("\n") for text in texts]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXTS)
def test_universal_lines_are_those_of_str_splitlines(texts):
    lines = split_lines(column(texts), universal=True)
    contents = [lines.line(i) for i in range(len(lines.start_L))]
    raws = [lines.text(a, b) for a, b in zip(lines.start_L, lines.next_starts, strict=True)]
    # What begins behind a last break is no line there.
    with_breaks = [[raw for raw in part if raw] for part in by_text(lines, raws)]
    assert with_breaks == [text.splitlines(keepends=True) for text in texts]
    found = [line for line, raw in zip(contents, raws, strict=True) if raw]
    assert found == [line for text in texts for line in text.splitlines()]
    assert lines.blank().tolist() == [not line.strip() for line in contents]
    before = (
        lines.chars_before(lines.start_L) - lines.chars_before(lines.start_D)[lines.text_numbers]
    )
    for text, starts, pieces in zip(
        texts, by_text(lines, before), by_text(lines, raws), strict=True
    ):
        assert [text[at : at + len(raw)] for at, raw in zip(starts, pieces, strict=True)] == pieces


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXTS)
def test_words_are_those_of_str_split(texts):
    lines = split_lines(column(texts))
    assert lines.num_words().tolist() == [len(text.split()) for text in texts]


@given(st.lists(st.booleans(), max_size=40))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_counting_in_eights(values):
    places = np.arange(len(values) + 1)
    counted = num_true_before(np.array(values, bool), places).tolist()
    assert counted == [sum(values[:place]) for place in places]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.sampled_from(["", "a", "ab", "12345678" * 3, "12345678x2345678"
                                          "12345678", "12345678y234567812345678"]), max_size=8),
                min_size=1, max_size=4))  # fmt: skip
def test_repeats_are_exact_where_hashes_are_not(texts):
    """Three of the lines begin and end alike and are equally long."""
    lines = split_lines(column(["\n".join(found) for found in texts]))
    of_L = lines.lengths > 0
    expected = []
    for found in texts:
        seen: set[str] = set()
        for line in found or [""]:
            expected.append(line in seen)
            seen |= {line} if line else set()
    assert lines.repeats(of_L).tolist() == expected
    assert not lines.repeats(np.zeros_like(of_L)).any()


def test_a_repeated_line_without_a_line_feed_behind_it():
    lines = split_lines(column(["same\nother\nsame", "same"]))
    assert lines.repeats(lines.lengths > 0).tolist() == [False, False, True, False]


@pytest.mark.parametrize("group_bytes", [1, 7, 100])
def test_groups_keep_all_texts_in_order(monkeypatch, group_bytes):
    monkeypatch.setattr(module, "GROUP_BYTES", group_bytes)
    texts = ["", "abc", "", "äöü", "x" * 20, "", "y"]
    parts = list(groups(column(texts)[1:]))
    assert [text for part in parts for text in part.to_pylist()] == texts[1:]
    assert all(len(p) == 1 or sum(len(t.encode()) for t in p.to_pylist()) <= group_bytes
               for p in parts)  # fmt: skip
    found = [split_lines(part).line(0) for part in parts]
    assert found == [part[0].as_py() for part in parts]


def test_no_texts():
    assert list(groups(column([]))) == []
