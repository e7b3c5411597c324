import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stepwell.data.batches import to_batch, with_column
from stepwell.data.quality.buckets import QualityBuckets, QualityThreshold, QualityTop, num_of_share
from stepwell.data.steps import GlobalStep, Shard, write_table
from stepwell.types import DataError, Document

Row = tuple[str, str, float | None]


def batch_of(rows: Sequence[Row], label: str = "quality", first: int = 0) -> pa.RecordBatch:
    docs = [Document(doc_id, f"text of {doc_id}", source) for source, doc_id, _ in rows]
    values = [score for *_, score in rows]
    return with_column(to_batch(docs, first), label, values, pa.float32())


def run(step: GlobalStep, rows: Sequence[Row], folder, num_shards: int = 1):
    """({source/id: row} of the kept, names of the removed, summary)."""
    folder.mkdir(parents=True)
    shards, batches = [], []
    for i in range(num_shards):
        batch = batch_of(rows[i::num_shards], first=1000 * i)
        batches.append(batch)
        shard = Shard(folder / f"d{i}.arrow", folder / f"s{i}.arrow")
        write_table(batch, shard.documents)
        write_table(pa.RecordBatch.from_pydict(dict(step.sketch(batch))), shard.sketch)
        shards.append(shard)
    decision = folder / "decision"
    decision.mkdir()
    step.decide(shards, decision)
    outcomes = [step.apply(batch, decision) for batch in batches]
    kept = {f"{r['source']}/{r['id']}": r for o in outcomes for r in o.kept.to_pylist()}
    removed = {f"{r['source']}/{r['id']}" for o in outcomes for r in o.removed.to_pylist()}
    return kept, removed, json.loads((decision / "summary.json").read_text("utf-8"))


def test_a_threshold_keeps_what_reaches_it():
    rows = [("a", "0", 0.25), ("a", "1", 0.5), ("a", "2", None), ("a", "3", 0.75)]
    outcome = QualityThreshold(min_score=0.5)(batch_of(rows))
    assert outcome.kept["id"].to_pylist() == ["1", "2", "3"]
    assert outcome.removed["reason"].to_pylist() == ["quality_below_threshold"]
    assert outcome.removed["detail"].to_pylist() == ["quality 0.25 < 0.5"]
    assert QualityThreshold(min_score=0.6)(batch_of(rows)).kept["id"].to_pylist() == ["2", "3"]
    other = QualityThreshold(min_score=0.5, label="good")
    assert other(batch_of(rows, "good")).kept.num_rows == 3
    with pytest.raises(DataError, match="needs the label 'good'"):
        other(batch_of(rows))


def test_a_label_cannot_replace_a_column():
    with pytest.raises(ValidationError, match="text_score"):
        QualityThreshold(min_score=0.5, label="text")


@pytest.mark.parametrize(
    ("num", "share", "kept"),
    [
        (30, 0.1, 3), (31, 0.1, 4), (1, 0.01, 1), (10, 1.0, 10), (7, 0.5, 4), (10, 1e-10, 1),
        (4_000_000_000, 0.5, 2_000_000_000), (3_000_000_000, 0.1, 300_000_000),
    ],
)  # fmt: skip
def test_shares_are_rounded_up(num, share, kept):
    assert num_of_share(num, share) == kept


def test_the_top_is_exact_and_ties_go_by_source_then_id(tmp_path):
    rows = [("b", "0", 0.5), ("a", "2", 0.5), ("a", "1", 0.5), ("b", "1", 0.9), ("a", "0", 0.1),
            ("c", "0", None)]  # fmt: skip
    kept, removed, summary = run(QualityTop(keep=0.5), rows, tmp_path / "x")
    assert set(kept) == {"b/1", "a/1", "a/2", "c/0"}
    assert removed == {"b/0", "a/0"}
    assert (summary["documents"], summary["kept"], summary["lowest_kept"]) == (5, 3, 0.5)
    assert summary["deciles"][0] == pytest.approx(0.1)


def test_the_top_of_each_source(tmp_path):
    rows = [("a", "0", 0.1), ("a", "1", 0.2), ("b", "0", 0.8), ("b", "1", 0.9)]
    assert set(run(QualityTop(keep=0.5), rows, tmp_path / "x")[0]) == {"b/0", "b/1"}
    kept, _, summary = run(QualityTop(keep=0.5, per_source=True), rows, tmp_path / "y")
    assert set(kept) == {"a/1", "b/1"}
    assert summary["by_source"]["a"]["lowest_kept"] == pytest.approx(0.2)


def test_nothing_to_decide(tmp_path):
    for i, rows in enumerate(([], [("a", "0", None), ("a", "1", float("nan"))])):
        kept, removed, summary = run(QualityTop(keep=0.5), rows, tmp_path / f"x{i}")
        assert (len(kept), removed, summary["documents"]) == (len(rows), set(), 0)
        kept, _, summary = run(QualityBuckets(), rows, tmp_path / f"y{i}")
        assert [row["quality_bucket"] for row in kept.values()] == [None] * len(rows)


SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, None]), min_size=1, max_size=30)


@settings(max_examples=25, deadline=None)
@given(SCORES, st.floats(0.05, 1.0), st.booleans(), st.randoms())
def test_shards_and_order_change_nothing(tmp_path_factory, scores, keep, per_source, random):
    folder = tmp_path_factory.mktemp("top")
    rows = [("ab"[i % 2], str(i), score) for i, score in enumerate(scores)]
    mixed = random.sample(rows, len(rows))
    top = QualityTop(keep=keep, per_source=per_source)
    one, gone, summary = run(top, rows, folder / "one")
    assert (set(one), gone, summary) == (
        lambda r: (set(r[0]), r[1], r[2])
    )(run(top, mixed, folder / "many", 3))  # fmt: skip
    buckets = QualityBuckets(num=4, per_source=per_source)
    one, _, summary = run(buckets, rows, folder / "b1")
    many, _, same = run(buckets, mixed, folder / "b3", 3)
    assert {k: r["quality_bucket"] for k, r in one.items()} == {
        k: r["quality_bucket"] for k, r in many.items()
    }
    assert summary == same


def test_buckets_by_quantiles(tmp_path):
    rows = [("a", str(i), i / 100) for i in range(100)]
    kept, _, summary = run(QualityBuckets(num=4), rows, tmp_path / "x")
    numbers = [kept[f"a/{i}"]["quality_bucket"] for i in range(100)]
    assert numbers == [i // 25 for i in range(100)]
    assert summary["buckets"] == [25] * 4
    tied = [("a", str(i), float(i > 70)) for i in range(100)]
    kept, _, summary = run(QualityBuckets(num=4, bucket="b"), tied, tmp_path / "y")
    assert summary["buckets"] == [0, 0, 71, 29]
    assert {kept[f"a/{i}"]["b"] for i in range(71)} == {2}


def test_buckets_by_edges_and_levels(tmp_path):
    rows = [("a", str(i), s) for i, s in enumerate([0.1, 0.5, 0.49, 0.9, 3.5, 4.6, -1.0])]
    edges = QualityBuckets(by="edges", edges=(0.5, 0.9))
    kept, _, summary = run(edges, rows, tmp_path / "x")
    # A float32 holds 0.9 a little too small.
    assert [row["quality_bucket"] for row in kept.values()] == [0, 1, 0, 1, 2, 2, 0]
    assert summary["edges"] == [0.5, 0.9]
    kept, _, _ = run(QualityBuckets(by="levels"), rows, tmp_path / "y")
    assert [row["quality_bucket"] for row in kept.values()] == [0, 1, 0, 1, 4, 5, 0]
    batch = batch_of(rows)
    assert (
        str(edges.apply(batch, tmp_path / "x/decision").kept.schema.field("quality_bucket").type)
        == "int32"
    )


def test_quantiles_of_each_source(tmp_path):
    rows = [("a", str(i), i / 10) for i in range(4)] + [("b", str(i), 5.0 + i) for i in range(4)]
    kept, _, _ = run(QualityBuckets(num=2, per_source=True), rows, tmp_path / "x")
    assert [row["quality_bucket"] for row in kept.values()] == [0, 0, 1, 1] * 2
    kept, _, _ = run(QualityBuckets(num=2), rows, tmp_path / "y")
    assert [row["quality_bucket"] for row in kept.values()] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"by": "edges"}, "give edges"),
        ({"edges": (0.5,)}, "give edges"),
        ({"by": "edges", "edges": (0.5, 0.2)}, r"nearest that do are \[0.2, 0.5\]"),
        ({"by": "levels", "per_source": True}, "take by='quantiles'"),
        ({"by": "levels", "num": 6}, "num=6 has no meaning with by='levels', which makes 6"),
        ({"by": "edges", "edges": (0.5,), "num": 10}, "which makes 2 buckets"),
        ({"num": 1}, "greater than or equal to 2"),
    ],
)
def test_buckets_that_make_no_sense_are_refused(knobs, message):
    with pytest.raises(ValidationError, match=message):
        QualityBuckets(**knobs)


def test_scores_of_float32_are_compared_as_they_are():
    rows = [("a", "0", float(np.float32(0.1)))]
    assert QualityThreshold(min_score=0.1)(batch_of(rows)).kept.num_rows == 1
    assert QualityThreshold(min_score=0.1000001)(batch_of(rows)).kept.num_rows == 0
