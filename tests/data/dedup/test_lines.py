from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.global_steps import documents_of, run_step

from stepwell.data.dedup.counting import repeated_hashes
from stepwell.data.dedup.lines import LineDedup, ccnet_normalise, units
from stepwell.data.sources.python_library import stdlib_prose
from stepwell.types import Document

A = "The first paragraph tells of a river that runs through three countries."
B = "The second paragraph tells of a mountain which nobody has climbed so far."
C = "The third paragraph is about the sea, and about the ships that cross it."
D = "The fourth paragraph returns to the river and follows it to the harbour."


def test_a_repeated_paragraph_stays_in_the_first_document_only():
    docs = documents_of(f"{A}\n\n{B}", f"{C}\n\n{B}\n\n{D}", f"{B}\n\n{A}\n\n{D}\n\n{C[:-1]}?")
    result = run_step(LineDedup(), docs)
    assert list(result.kept.values()) == [f"{A}\n\n{B}", f"{C}\n\n{D}", f"{C[:-1]}?"]
    assert result.removed == []
    assert [(e["id"], e["start"], e["stop"], e["reason"]) for e in result.edits] == [
        ("0001", len(C) + 2, len(C) + len(B) + 4, "paragraph_duplicate"),
        ("0002", 0, len(B) + len(A) + len(D) + 6, "paragraph_duplicate"),
    ]


def test_one_unique_document_loses_nothing_in_any_mode():
    docs = documents_of(f"{A}\n\n{B}\n\n{C}")
    for mode in ("line", "paragraph"):
        result = run_step(LineDedup(mode=mode, min_characters=0), docs)
        assert list(result.kept.values()) == [docs[0].text]
    one = documents_of(A)  # the document is its only paragraph
    assert len(run_step(LineDedup(), one).kept) == 1


def test_a_document_of_nothing_else_is_removed_and_names_who_keeps_it():
    result = run_step(LineDedup(), documents_of(f"{A}\n\n{B}", f"{B}\n\nshort"))
    (row,) = result.removed
    assert (row["id"], row["reason"], row["witness"]) == ("0001", "paragraph_duplicates", "s/0000")
    assert row["text"] == f"{B}\n\nshort"
    kept = run_step(LineDedup(min_kept_characters=5), documents_of(f"{A}\n\n{B}", f"{B}\n\nshort"))
    assert kept.kept["s/0001"] == "short"


def test_what_was_cut_elsewhere_is_never_removed():
    # 1 loses A and is short without it, but C was cut from 2 because 1 has it.
    docs = documents_of(f"{A}\n\n{B}", f"{A}\n\n{C}", f"{C}\n\n{D}")
    result = run_step(LineDedup(min_kept_characters=75), docs)
    assert result.kept["s/0001"] == C
    assert result.gone == {"s/0002": "paragraph_duplicates"}


def test_code_lines_are_cut_only_when_asked():
    code = documents_of(*(f"function f{i}() {{\n    return {i};\n}}\n" for i in range(5)))
    assert run_step(LineDedup(mode="line"), code).edits == []
    asked = run_step(LineDedup(mode="line", min_characters=1, min_kept_characters=0), code)
    assert asked.kept["s/0000"] == code[0].text
    assert asked.kept["s/0003"] == "function f3() {\n    return 3;\n"


def test_max_documents_counts_documents_not_occurrences():
    line = "Subscribe to our newsletter for more stories like this one!\n"
    texts = [f"{line}{i} {A}\n{line}{i} {B}\n" for i in range(3)]
    docs = documents_of(*texts)
    assert run_step(LineDedup(mode="line", max_documents=3), docs).edits == []
    result = run_step(LineDedup(mode="line", max_documents=2), docs)
    assert result.kept["s/0000"] == texts[0]  # every copy of its own
    assert result.kept["s/0001"] == f"1 {A}\n1 {B}\n"
    assert len(result.edits) == 4


def test_min_characters_counts_after_normalising():
    docs = documents_of(f"x  y\n\n{A}", f"x y\n\n{B}")
    assert run_step(LineDedup(min_characters=4), docs).edits == []
    assert len(run_step(LineDedup(min_characters=3), docs).edits) == 1


def test_matching_as_ccnet_sees_through_case_digits_and_accents():
    docs = documents_of(f"{A}\n\n{B} On 3 May, café.", f"{B.upper()} on 7 may: CAFE\n\n{C}")
    assert run_step(LineDedup(), docs).edits == []
    assert run_step(LineDedup(match="ccnet"), docs).kept["s/0001"] == C
    assert ccnet_normalise("Č: 19,5 Straße!") == "c 000 straße"


def test_wrapping_and_line_ends_do_not_hide_a_paragraph():
    docs = documents_of(f"{A}\n\n{B}", f"{A.replace(' ', chr(13) + chr(10))}\r\n\r\n{C}")
    assert run_step(LineDedup(), docs).kept["s/0001"] == C


def test_units_are_the_whole_text():
    text = "\n\na\n  b\n \n\n  c\r\n\r\nd\n"
    for mode in ("line", "paragraph"):
        assert "".join(text[a:b] for a, b in units(text, mode)) == text
    assert [text[a:b] for a, b in units(text, "paragraph")] == [
        "\n\n", "a\n  b\n \n\n", "  c\r\n\r\n", "d\n",
    ]  # fmt: skip


def test_counting_in_many_parts_gives_the_same(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**63, 500, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    hashes, ranks = rng.choice(values, 2000), np.arange(2000)
    whole = repeated_hashes([(hashes, ranks)], 2000, tmp_path)
    parts = repeated_hashes(
        [(hashes[1000:], ranks[1000:]), (hashes[:1000], ranks[:1000])], 2000, tmp_path, 100
    )
    for one, other in zip(whole, parts, strict=True):
        assert np.array_equal(one, other)
    found, counts, firsts = whole
    assert counts.tolist() == [int((hashes == h).sum()) for h in found]
    assert firsts.tolist() == [int(np.flatnonzero(hashes == h)[0]) for h in found]
    assert list(tmp_path.iterdir()) == []


PARAGRAPHS = st.sampled_from([A, B, C, D, "short", "Ж" * 45, "  " + "é" * 40, ""])
TEXTS = st.lists(st.lists(PARAGRAPHS, max_size=4).map("\n\n".join), max_size=9)


@settings(deadline=None, max_examples=40)
@given(TEXTS, st.randoms(), st.integers(1, 7), st.integers(1, 3))
def test_sharding_and_order_change_nothing_and_nothing_is_lost(texts, random, num_shards, limit):
    docs = documents_of(*texts)
    step = LineDedup(max_documents=limit)
    result = run_step(step, docs)
    shuffled = list(docs)
    random.shuffle(shuffled)
    other = run_step(step, shuffled, num_shards)
    assert (other.kept, other.removed, other.edits) == (result.kept, result.removed, result.edits)
    assert len(result.kept) + len(result.removed) == len(docs)
    left = "\n\n".join(result.kept.values())
    for edit in result.edits:
        for paragraph in docs[int(edit["id"])].text[edit["start"] : edit["stop"]].split("\n\n"):
            assert paragraph in left


def test_order_is_by_source_then_id():
    docs = [Document("0", f"{A}\n\n{B}", "z"), Document("9", f"{A}\n\n{C}", "a")]
    assert run_step(LineDedup(), docs).kept == {"z/0": B, "a/9": f"{A}\n\n{C}"}


def test_documents_of_one_name_are_ordered_by_text():
    docs = [Document("0", f"{A}\n\n{B}", "s"), Document("0", f"{A}\n\n{C}", "s")]
    here, there = run_step(LineDedup(), docs), run_step(LineDedup(), docs[::-1])
    assert here.edits == there.edits


def test_real_prose_loses_only_what_is_elsewhere():
    docs = list(islice((d for d in stdlib_prose() if isinstance(d, Document)), 120))
    result = run_step(LineDedup(), docs, 3)
    left = {" ".join(p.split()) for t in result.kept.values() for p in t.split("\n\n")}
    texts = {f"{d.source}/{d.id}": d.text for d in docs}
    assert result.edits
    for edit in result.edits:
        cut = texts[f"{edit['source']}/{edit['id']}"][edit["start"] : edit["stop"]]
        assert {" ".join(p.split()) for p in cut.split("\n\n")} - {""} <= left
