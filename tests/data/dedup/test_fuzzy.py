import json
import random
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.global_steps import Result, plain_documents, run_step

from stepwell.data.dedup.fuzzy import FuzzyDedup
from stepwell.data.dedup.verify import jaccard_of_texts
from stepwell.types import DataError, Document

# Finds every pair that shares a shingle (all but surely).
EXHAUSTIVE = FuzzyDedup(bands=128, rows=1, bucket_cap=1000)
TEMPLATE = [f"t{i}" for i in range(200)]


def words(rng: random.Random, num_words: int) -> list[str]:
    return [f"w{rng.randrange(10_000)}" for _ in range(num_words)]


def edited(text: list[str], num_edits: int, rng: random.Random) -> list[str]:
    """Replaces so many words, spaced so that each costs `ngram` shingles."""
    text = list(text)
    for place in range(0, 10 * num_edits, 10):
        text[place] = f"x{rng.randrange(10**9)}"
    return text


def planted(rng: random.Random, num_originals: int, num_copies: int) -> list[Document]:
    """Texts of 200 words with copies whose similarity lies between .5 and 1."""
    docs = []
    for i in range(num_originals):
        text = words(rng, 200)
        docs.append(Document(f"{i}-0", " ".join(text), f"source-{i % 3}"))
        for copy in range(1, num_copies + 1):
            again = " ".join(edited(text, rng.randrange(12), rng))
            docs.append(Document(f"{i}-{copy}", again, f"source-{(i + copy) % 3}"))
    return docs


def check(result: Result, docs: list[Document], threshold: float = 0.8) -> None:
    """Nothing is lost; each removed document has a kept witness, by plain arithmetic."""
    kept = {f"{row['source']}/{row['id']}": row["text"] for row in result.rows}
    assert len(kept) + len(result.removed) == len(docs)
    for row in result.removed:
        assert row["reason"] == "fuzzy_duplicate"
        assert plain_jaccard(row["text"], kept[row["witness"]]) >= threshold


def plain_jaccard(a: str, b: str, ngram: int = 5) -> float:
    sets = []
    for text in (a, b):
        found = text.lower().split()
        sets.append({tuple(found[i : i + ngram]) for i in range(max(len(found) - ngram + 1, 1))})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_near_duplicates_go_for_a_kept_witness(tmp_path):
    docs = planted(random.Random(0), 40, 3)
    result = run_step(FuzzyDedup(), docs)
    check(result, docs)
    kept = [row["text"] for row in result.rows]
    left = sum(plain_jaccard(a, b) >= 0.8 for a, b in combinations(kept, 2))
    assert left == 0
    assert 0 < result.summary["num_removed"] == len(result.removed) < 120


@pytest.mark.parametrize("num_shards", [1, 7, 64])
def test_shards_and_order_change_nothing(tmp_path, num_shards):
    rng = random.Random(1)
    docs = planted(rng, 30, 3)
    whole = run_step(FuzzyDedup(), docs, batch_docs=1000)
    rng.shuffle(docs)
    other = run_step(FuzzyDedup(), docs, num_shards)
    assert other.removals == whole.removals
    assert other.summary == whole.summary


# Few words, so that texts resemble each other in every way.
SMALL = st.lists(st.sampled_from(["a", "b", "c"]), max_size=8).map(" ".join)


@settings(max_examples=30, deadline=None)
@given(st.lists(SMALL, max_size=12), st.sampled_from([0.3, 0.5, 0.8, 1.0]), st.randoms())
def test_any_texts(texts, threshold, rng):
    step = EXHAUSTIVE.model_copy(update={"threshold": threshold, "ngram": 2})
    docs = [Document(str(i), text, "s") for i, text in enumerate(texts)]
    result = run_step(step, docs)
    rng.shuffle(docs)
    other = run_step(step, docs, num_shards=3)
    assert other.removals == result.removals
    assert len(result.rows) + len(result.removed) == len(docs)
    blank = {row["id"] for row in result.removed if row["reason"] == "blank"}
    assert blank == {doc.id for doc in docs if not doc.text}
    kept = {f"s/{row['id']}": row["text"] for row in result.rows}
    for row in result.removed:
        if row["reason"] != "blank":
            assert plain_jaccard(row["text"], kept[row["witness"]], 2) >= threshold
    for a, b in combinations(kept.values(), 2):
        assert plain_jaccard(a, b, 2) < threshold


def test_known_answers(tmp_path):
    assert run_step(FuzzyDedup(), plain_documents("A", "A", "A", "B")).kept_ids == [
        "0",
        "3",
    ]
    short = run_step(FuzzyDedup(), plain_documents("Short text", "Short text"))
    assert short.kept_ids == ["0"]
    assert short.removed[0]["detail"] == "J = 1.000"
    mixed = run_step(FuzzyDedup(), plain_documents("", "...", "...", " \n", "!!"))
    assert mixed.kept_ids == ["1", "4"]
    assert sorted(row["reason"] for row in mixed.removed) == ["blank", "blank", "fuzzy_duplicate"]
    paragraphs = run_step(FuzzyDedup(), plain_documents("one\n\none\n\none"))
    assert paragraphs.removed == []
    nothing = run_step(FuzzyDedup(), [])
    assert nothing.rows == nothing.removed == []


def test_integer_id_zero_survives(tmp_path):
    docs = [Document(str(i), "some text that is repeated here", "s") for i in (0, 1)]
    result = run_step(FuzzyDedup(), docs)
    assert result.kept_ids == ["0"]
    assert result.removed[0]["witness"] == "s/0"


def test_case_punctuation_and_layout_do_not_count(tmp_path):
    docs = plain_documents(
        "The cat sat on the mat, and SLEPT.", "the cat\r\nsat on the mat and slept"
    )
    assert len(run_step(FuzzyDedup(), docs).removed) == 1


def test_chinese_is_compared_by_character(tmp_path):
    text = "".join(chr(0x4E00 + i) for i in range(100))
    docs = plain_documents(text, text[:-2] + "天地", text[:50] + "玄黄" * 25)
    result = run_step(FuzzyDedup(), docs)
    assert [row["id"] for row in result.removed] == ["1"]


def test_candidates_are_verified(tmp_path):
    """With one band of one slot most candidates are none: nothing false goes."""
    rng = random.Random(2)
    docs = plain_documents(*(" ".join(edited(TEMPLATE, 18, rng)) for _ in range(60)))
    result = run_step(EXHAUSTIVE, docs)
    assert result.removed == []
    assert result.summary["num_candidates"] == 60 * 59 / 2
    assert result.summary["precision_of_candidates"] == 0


def test_pages_of_a_template_cost_no_more_each(tmp_path):
    """Pages that resemble each other at .6 all share buckets, and none is a duplicate."""
    rng = random.Random(3)
    # 6 words of every 200, far apart, cost 60 of 196 shingles on both sides.
    texts = [" ".join(edited(TEMPLATE, 6, rng)) for _ in range(600)]
    assert jaccard_of_texts(texts[0], texts[1]) < 0.8
    step = FuzzyDedup(bucket_cap=4)
    work = {}
    for num_docs in (300, 600):
        docs = plain_documents(*texts[:num_docs])
        result = run_step(step, docs, batch_docs=100)
        assert result.removed == []
        assert result.summary["num_not_compared"] > 0
        work[num_docs] = np.array(
            [result.summary["num_candidates"], result.summary["num_compared"]]
        )
    assert (work[600] < 2.2 * work[300]).all()
    # Without a cap the work would grow fourfold.
    whole = step.model_copy(update={"bucket_cap": 1000})
    result = run_step(whole, plain_documents(*texts), batch_docs=100)
    assert result.summary["num_compared"] > 20 * work[600][1]
    assert result.summary["num_not_compared"] == 0


def test_a_template_bucket_still_finds_duplicates(tmp_path):
    rng = random.Random(4)
    pages = [edited(TEMPLATE, 6, rng) for _ in range(300)]
    copies = [[*page[:-1], "end"] for page in pages[:20]]
    docs = plain_documents(*(" ".join(page) for page in [*pages, *copies]))
    result = run_step(FuzzyDedup(bucket_cap=8), docs, batch_docs=100)
    check(result, docs)
    assert len(result.removed) == 20


TEXT = " ".join(f"v{i}" for i in range(60))
# Equal shingles, other lengths.
VARIANTS = [TEXT, TEXT + "!", TEXT + " ..."]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ((), "0"),
        (("longest",), "2"),
        (("shortest",), "0"),
        (("quality",), "1"),
        (("newest",), "0"),
        (("oldest",), "2"),
        (("quality", "longest"), "1"),
        (("longest", "quality"), "2"),
    ],
)
def test_who_survives(tmp_path, rules, kept):
    dates = ["2024-05-01T00:00:00Z", "2021", None]
    docs = [
        Document(str(i), text, "s", {"date": date} if date else {"date": 86400 * 365})
        for i, (text, date) in enumerate(zip(VARIANTS, dates, strict=True))
    ]
    labels = {"quality": ([0.1, 0.9, None], pa.float32())}
    result = run_step(FuzzyDedup(survivor=rules), docs, labels=labels)
    assert result.kept_ids == [kept]


def test_labels_and_dates_by_other_names(tmp_path):
    docs = [Document(str(i), TEXT, "s", {"when": f"200{i}-01-01"}) for i in range(3)]
    by_date = FuzzyDedup(survivor=("newest",), date="when")
    assert run_step(by_date, docs).kept_ids == ["2"]
    labels = {"score": ([1, 3, 2], pa.int32())}
    by_label = FuzzyDedup(quality="score")
    assert run_step(by_label, docs, labels=labels).kept_ids == ["1"]
    words_label = {"score": (["high", "low", "low"], pa.string())}
    with pytest.raises(DataError, match="needs a number"):
        run_step(by_label, docs, labels=words_label)


def test_ties_go_by_source_then_id_then_text(tmp_path):
    docs = [Document("2", TEXT, "b"), Document("3", TEXT, "a"), Document("10", TEXT, "a")]
    result = run_step(FuzzyDedup(), docs)
    assert [(row["source"], row["id"]) for row in result.rows] == [("a", "10")]
    same = [Document("1", TEXT.upper(), "a"), Document("1", TEXT, "a")]
    kept = [run_step(FuzzyDedup(), docs).rows[0]["text"] for docs in (same, same[::-1])]
    assert kept[0] == kept[1]


def test_cluster_sizes_are_labelled_and_summed_up(tmp_path):
    docs = [*plain_documents(*[TEXT] * 4), Document("x", "another text of a few words", "s")]
    result = run_step(FuzzyDedup(), docs)
    assert {row["id"]: row["cluster_size"] for row in result.rows} == {"0": 4, "x": 1}
    assert result.summary["cluster_sizes"] == {"4": 1}
    assert result.summary["largest_clusters"] == [
        {"kept": "s/0", "size": 4, "removed": ["s/1", "s/2", "s/3"]}
    ]
    assert result.summary["num_equal"] == 3


@pytest.mark.parametrize(
    ("knob", "value", "removed"),
    [("threshold", 0.9, 0), ("threshold", 0.8, 1), ("ngram", 1, 1), ("ngram", 12, 0)],
)
def test_knobs_of_similarity(tmp_path, knob, value, removed):
    rng = random.Random(5)
    text = words(rng, 100)
    docs = plain_documents(" ".join(text), " ".join(edited(text, 2, rng)))
    assert 0.8 < jaccard_of_texts(docs[0].text, docs[1].text) < 0.9
    step = FuzzyDedup.model_validate({knob: value})
    assert len(run_step(step, docs).removed) == removed


def test_bands_rows_and_seed_change_candidates(tmp_path):
    docs = planted(random.Random(6), 40, 3)
    counts = {
        name: run_step(step, docs).summary["num_candidates"]
        for name, step in {
            "default": FuzzyDedup(),
            "more bands": FuzzyDedup(bands=42),
            "more rows": FuzzyDedup(rows=8),
        }.items()
    }
    assert counts["more bands"] > counts["default"] > counts["more rows"]
    sketches = [
        FuzzyDedup(seed=seed).sketch(pa.RecordBatch.from_pylist(batch_rows()))["signature"]
        for seed in (1, 1, 2)
    ]
    assert sketches[0] == sketches[1] != sketches[2]


def batch_rows() -> list[dict]:
    return [{"key": 0, "id": "0", "source": "s", "text": TEXT, "meta": "{}"}]


def test_bands_that_would_miss_are_refused():
    with pytest.raises(ValidationError, match=r"which takes bands=60 at this many rows"):
        FuzzyDedup(bands=59, rows=20)
    assert FuzzyDedup(bands=60, rows=20).bands == 60
    with pytest.raises(ValidationError):
        FuzzyDedup(threshold=0.0)
    with pytest.raises(ValidationError):
        FuzzyDedup(threshold=1.01)


def test_knobs_survive_json():
    step = FuzzyDedup(survivor=("oldest",), against=("a",), save_index="b")
    assert FuzzyDedup.model_validate(json.loads(step.model_dump_json())) == step
