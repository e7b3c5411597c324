import json

import numpy as np
import pyarrow as pa
import pytest

from stepwell.data.batches import to_batch, with_column
from stepwell.data.quality.perplexity import (
    PerplexityBuckets,
    bucket_name,
    out_of_limits,
    thirds,
)
from stepwell.data.steps import Shard, write_table
from stepwell.types import Document


def run(step, values, languages, folder, order):
    folder.mkdir()
    shards, batches = [], []
    for n, rows in enumerate((order[: len(order) // 2], order[len(order) // 2 :])):
        batch = to_batch([Document(str(i), f"text {i}", "s") for i in rows], 100 * n)
        batch = with_column(batch, "perplexity", [values[i] for i in rows], pa.float32())
        batch = with_column(batch, "language", [languages[i] for i in rows], pa.string())
        shard = Shard(folder / f"d{n}.arrow", folder / f"s{n}.arrow")
        write_table(batch, shard.documents)
        write_table(pa.RecordBatch.from_pydict(dict(step.sketch(batch))), shard.sketch)
        shards.append(shard)
        batches.append(batch)
    step.decide(shards, folder)
    rows = [row for b in batches for row in step.apply(b, folder).kept.to_pylist()]
    return {int(row["id"]): row for row in rows}, json.loads((folder / "summary.json").read_text())


def test_thirds_by_hand():
    assert thirds(np.array([9.0, 1.0, 2.0, 3.0, 4.0, 5.0])) == (2.0, 4.0)
    assert thirds(np.array([7.0])) == (7.0, 7.0)
    assert [bucket_name(x, (2.0, 4.0)) for x in (2.0, 2.1, 4.0, 4.1)] == [
        "head", "middle", "middle", "tail",
    ]  # fmt: skip


def test_buckets_of_each_language_whatever_the_order(tmp_path):
    values = [1.0, 2.0, 3.0, 10.0, 20.0, 30.0, None]
    languages = ["en"] * 3 + ["de"] * 3 + ["en"]
    step = PerplexityBuckets(by="language")
    rows, summary = run(step, values, languages, tmp_path / "a", list(range(7)))
    names = [rows[i]["perplexity_bucket"] for i in range(7)]
    assert names == ["head", "middle", "tail"] * 2 + [None]
    assert summary["de"]["buckets"] == {"head": 1, "middle": 1, "tail": 1}
    assert summary["en"]["head_up_to"] == 1.0
    again, same = run(step, values, languages, tmp_path / "b", [6, 3, 0, 5, 1, 4, 2])
    assert [again[i]["perplexity_bucket"] for i in range(7)] == names
    assert same == summary
    rows, _ = run(
        PerplexityBuckets(bucket="third"), values, languages, tmp_path / "c", list(range(7))
    )
    assert [rows[i]["third"] for i in range(6)] == ["head"] * 2 + ["middle"] * 2 + ["tail"] * 2


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (5.0, None, None, None),
        (5.0, 5.0, 5.0, None),
        (4.9, 5.0, None, ("ppl_too_low", "4.9 < 5")),
        (5.1, None, 5.0, ("ppl_too_high", "5.1 > 5")),
    ],
)
def test_limits_are_inclusive(value, low, high, verdict):
    assert out_of_limits("ppl", value, low, high) == verdict
