from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.global_steps import documents_of, run_step

from stepwell.data.dedup import substring
from stepwell.data.dedup.anchors import BLOCK, find_anchors, gram_size
from stepwell.data.dedup.substring import SubstringDedup
from stepwell.data.dedup.suffix_array import SEPARATOR, equal_windows
from stepwell.data.sources.python_library import stdlib_prose
from stepwell.types import DataError, Document

W = 24  # min_bytes of most tests
STEP = SubstringDedup(min_bytes=W, min_kept_characters=0)
R = "this passage is found in more than one document of ours"


def text(seed: int, size: int = 80, letters: str = "abcdefghijklmnop ") -> str:
    return "".join(np.random.default_rng(seed).choice(list(letters), size))


def unexplained(before: bytes, spans: list[tuple[int, int]], kept: list[bytes], width: int) -> list:
    """Spans that are not covered by windows of `width` bytes that can be read in a kept text."""
    everything = b"\xff".join(kept)
    wrong = []
    for start, stop in spans:
        covered = np.zeros(len(before), bool)
        for p in range(max(0, start - width + 1), min(stop, len(before) - width + 1)):
            if before[p : p + width] in everything:
                covered[p : p + width] = True
        if not covered[start:stop].all():
            wrong.append((start, stop))
    return wrong


def byte_spans(before: str, edits: list[dict]) -> list[tuple[int, int]]:
    return [(len(before[: e["start"]].encode()), len(before[: e["stop"]].encode())) for e in edits]


# --- what is cut -----------------------------------------------------------------------------


def test_a_repeat_stays_where_it_came_first():
    docs = documents_of(f"A{text(1)}{R}{text(2)}", f"B{text(3)}{R}{text(4)}", f"C{R}{text(5)}")
    result = run_step(STEP, docs)
    assert list(result.kept.values()) == [
        docs[0].text, f"B{text(3)}{text(4)}", f"C{text(5)}",
    ]  # fmt: skip
    at = len(text(3)) + 1
    assert [(e["id"], e["start"], e["stop"], e["reason"]) for e in result.edits] == [
        ("0001", at, at + len(R), "substring_duplicate"),
        ("0002", 1, 1 + len(R), "substring_duplicate"),
    ]


def test_min_bytes_is_the_least_that_is_cut():
    docs = documents_of(f"{text(1)}[{R[:W]}]{text(2)}", f"{text(3)}<{R[:W]}>{text(4)}")
    assert run_step(STEP, docs).kept["s/0001"] == f"{text(3)}<>{text(4)}"
    longer = SubstringDedup(min_bytes=W + 1, min_kept_characters=0)
    assert run_step(longer, docs).edits == []


def test_a_repeat_within_a_document_and_an_overlapping_one():
    (kept,) = run_step(STEP, documents_of(f"{R}{text(1)}{R}{text(2)}")).kept.values()
    assert kept == f"{R}{text(1)}{text(2)}"
    # A run of one letter keeps the first W of it, never less.
    (kept,) = run_step(STEP, documents_of("a" * 1000)).kept.values()
    assert kept == "a" * W
    (kept,) = run_step(STEP, documents_of("ab" * 500 + "!")).kept.values()
    assert kept == "ab" * (W // 2) + "!"


def test_repeats_that_overlap_each_other():
    y, z = text(7, 40), text(8, 10)
    docs = documents_of(f"{text(1)}{y}{text(2)}", f"{text(3)}{y}{z}", f"{text(4)}{y}{z}{text(5)}")
    result = run_step(STEP, docs)
    # z is shorter than a window, so once y is gone from 1 nothing of y + z is left to point at.
    assert list(result.kept.values()) == [
        docs[0].text, f"{text(3)}{z}", f"{text(4)}{z}{text(5)}",
    ]  # fmt: skip


def test_the_next_whole_copy_stands_in_for_one_that_was_cut():
    a, s, t = text(1, 30), text(2, W - 6), text(3, 6)
    docs = documents_of(f"{a}{s}", f"{a}{s}{t}", f"{text(4)}{s}{t}{text(5)}", f"{text(6)}{s}{t}!")
    result = run_step(STEP, docs)
    assert result.kept["s/0001"] == t
    assert result.kept["s/0002"] == docs[2].text  # the first that still has s + t
    assert result.kept["s/0003"] == f"{text(6)}!"


def test_cyrillic_stays_strict_utf8_and_cuts_whole_characters():
    letters = "абвгдежзиклмнопрст "
    passage = text(1, 40, letters)
    # Ж and ж share their first byte, п and а theirs: a byte-wise cut would take half of them.
    docs = documents_of(
        f"{text(2, 40, letters)}Ж{passage}п{text(3, 40, letters)}",
        f"{text(4, 40, letters)}ж{passage}а{text(5, 40, letters)}",
    )
    kept = run_step(STEP, docs).kept["s/0001"]
    assert kept == f"{text(4, 40, letters)}жа{text(5, 40, letters)}"
    kept.encode("utf-8", "strict").decode("utf-8", "strict")


def test_nothing_matches_across_documents():
    half = len(R) // 2
    docs = documents_of(f"{text(1)}{R}", text(2) + R[:23], R[23:46] + text(3), "", "x")
    assert half > W
    assert run_step(STEP, docs).edits == []
    two = documents_of(text(1) + R[:20], R[20:] + text(2), text(3) + R[:20], R[20:] + text(4))
    assert [e["id"] for e in run_step(STEP, two).edits] == ["0003"]


def test_a_document_left_empty_is_removed_with_a_witness():
    step = SubstringDedup(min_bytes=W, min_kept_characters=9)
    docs = documents_of(f"{text(1)}{R}", f"{R} nine chr", f"{R} ten chars")
    result = run_step(step, docs)
    (row,) = result.removed
    assert (row["id"], row["reason"], row["witness"]) == ("0001", "substring_duplicates", "s/0000")
    assert row["text"] == docs[1].text
    assert result.kept["s/0002"] == " ten chars"


def test_what_was_cut_elsewhere_is_never_removed():
    new = text(9, 30)
    docs = documents_of(f"{text(1)}{R}", f"{R}{new}", f"{text(2)}{new}{text(3)}")
    step = SubstringDedup(min_bytes=W, min_kept_characters=50)
    result = run_step(step, docs)
    assert result.kept["s/0001"] == new
    assert result.kept["s/0002"] == f"{text(2)}{text(3)}"


def test_white_space_and_nul_are_bytes_as_any():
    docs = documents_of("a" + "\x00" * 60 + "b", "c" + "\n" * 60 + "d")
    kept = run_step(STEP, docs).kept
    assert kept == {"s/0000": "a" + "\x00" * W + "b", "s/0001": "c" + "\n" * W + "d"}


# --- bounds ----------------------------------------------------------------------------------


def test_more_than_fits_at_once_gives_the_same_in_parts(tmp_path):
    docs = list(islice((d for d in stdlib_prose() if isinstance(d, Document)), 30))
    whole = run_step(SubstringDedup(min_bytes=60), docs)
    parts = run_step(SubstringDedup(min_bytes=60, max_bytes_at_once=20_000), docs, 3)
    assert whole.edits
    assert (parts.kept, parts.edits, parts.removed) == (whole.kept, whole.edits, whole.removed)
    assert parts.summary["parts"] > 3 > whole.summary["parts"]


def test_an_anchor_that_does_not_fit_is_refused_with_the_number():
    docs = documents_of(*(f"{text(i, 30)}{R}" for i in range(100)))
    each = 2 * W - gram_size(W) + 1
    assert run_step(SubstringDedup(min_bytes=W, max_bytes_at_once=100 * each), docs).removed
    with pytest.raises(DataError, match=f"set it to {100 * each} "):
        run_step(SubstringDedup(min_bytes=W, max_bytes_at_once=100 * each - 1), docs)


def test_when_rounds_run_out_what_is_in_doubt_stays(monkeypatch):
    # Each document is the former one moved on: what one keeps hangs on what the last one lost.
    long = text(1, 600)
    docs = documents_of(*(long[i : i + 60] for i in range(0, 540, 9)))
    free = run_step(STEP, docs)
    monkeypatch.setattr(substring, "MAX_ROUNDS", 2)
    bounded = run_step(STEP, docs)
    for result in (free, bounded):
        check_justified(docs, result, W)
    assert free.summary["rounds"] > 2 == bounded.summary["rounds"]
    assert sum(map(len, free.kept.values())) <= sum(map(len, bounded.kept.values()))


# --- properties ------------------------------------------------------------------------------


def check_justified(docs, result, width):
    kept = [t.encode("utf-8", "strict") for t in result.kept.values()]
    for doc in docs:
        if f"s/{doc.id}" not in result.kept:
            continue
        edits = [e for e in result.edits if e["id"] == doc.id]
        assert unexplained(doc.text.encode(), byte_spans(doc.text, edits), kept, width) == []
        rest = doc.text
        for edit in reversed(edits):
            rest = rest[: edit["start"]] + rest[edit["stop"] :]
        assert rest == result.kept[f"s/{doc.id}"]


PIECES = st.sampled_from(
    [
        R,
        R[5:40],
        text(1, 30),
        text(2, 20),
        "ж" * 14,
        "жаворонок и щегол",
        "z" * 30,
        "q",
        "щ",
        "🙂🙃",
    ]
)
TEXTS = st.lists(st.lists(PIECES, max_size=5).map("".join), max_size=7)


@settings(deadline=None, max_examples=40)
@given(TEXTS, st.randoms(), st.integers(1, 5))
def test_cuts_are_justified_and_free_of_shards_and_order(texts, random, num_shards):
    docs = documents_of(*texts)
    result = run_step(STEP, docs)
    assert len(result.kept) == len(docs)
    check_justified(docs, result, W)
    shuffled = list(docs)
    random.shuffle(shuffled)
    small = SubstringDedup(min_bytes=W, min_kept_characters=0, max_bytes_at_once=2000)
    other = run_step(small, shuffled, num_shards)
    assert (other.kept, other.edits) == (result.kept, result.edits)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text("ab", max_size=60), max_size=5))
def test_every_far_repeat_is_found(texts):
    """Of all windows, those that a whole earlier one equals are gone."""
    width = 16
    docs = documents_of(*texts)
    result = run_step(SubstringDedup(min_bytes=width, min_kept_characters=0), docs)
    assert list(result.kept.values()) == naive(texts, width)


def naive(texts: list[str], width: int) -> list[str]:
    """One window after another, with what is cut so far."""
    cut = [[False] * len(t) for t in texts]
    for i, here in enumerate(texts):
        for p in range(len(here) - width + 1):
            for j, there in enumerate(texts[: i + 1]):
                last = p - width if j == i else len(there) - width
                for f in range(last + 1):
                    if there[f : f + width] == here[p : p + width] and not any(
                        cut[j][f : f + width]
                    ):
                        cut[i][p : p + width] = [True] * width
    return ["".join(c for c, gone in zip(t, g, strict=True) if not gone)
            for t, g in zip(texts, cut, strict=True)]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200).map(lambda b: bytes(c % 3 + 97 for c in b)), st.integers(4, 20))
def test_equal_windows_are_all_of_them(content, width):
    content = content[:90] + bytes([SEPARATOR]) + content[90:]
    positions, starts = equal_windows(np.frombuffer(content, np.uint8).copy(), width)
    found = {tuple(group.tolist()) for group in np.split(positions, starts[1:]) if len(group)}
    wanted: dict[bytes, list[int]] = {}
    for p in range(len(content) - width + 1):
        if SEPARATOR not in content[p : p + width]:
            wanted.setdefault(content[p : p + width], []).append(p)
    assert found == {tuple(group) for group in wanted.values() if len(group) > 1}


def test_every_window_has_its_anchor_wherever_it_stands():
    rng = np.random.default_rng(0)
    data = rng.integers(97, 101, BLOCK + 5000, dtype=np.uint8)
    ends = np.array([10, 40, 3000, BLOCK - 7, BLOCK + 2000, len(data)])
    positions, hashes = find_anchors(data, ends, W)
    num_grams = W - gram_size(W) + 1
    for start, end in zip(np.r_[0, ends[:-1]], ends, strict=True):
        inside = (positions >= start) & (positions < end)
        alone, same = find_anchors(data[start:end], np.array([end - start]), W)
        assert np.array_equal(alone + start, positions[inside])
        assert np.array_equal(same, hashes[inside])
        gaps = np.diff(np.r_[start - 1, alone + start, end - gram_size(W) + 1])
        assert end - start < W or gaps.max() <= num_grams
    assert len(positions) < 3 * len(data) / num_grams
