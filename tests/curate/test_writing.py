import json

import numpy as np
import pytest

from stepwell.curate import writing
from stepwell.curate.executors.local import LocalExecutor
from stepwell.curate.plan import bundled, make_plan
from stepwell.curate.recipe import Recipe, StoreSpec
from stepwell.curate.run import curate
from stepwell.curate.writing import chosen_rows, portions, training_texts
from stepwell.data.batches import texts_of, to_batch
from stepwell.data.sources.spec import Piece
from stepwell.data.steps import write_table
from stepwell.data.store import TokenStore
from stepwell.tokenizer import Tokenizer
from stepwell.types import Document
from tests.curate import corpus


@pytest.fixture
def shard(tmp_path):
    docs = [Document(f"d{i}", corpus.text(i), "s") for i in range(200)]
    write_table(to_batch(docs, 0), tmp_path / "documents-00000.arrow")
    return tmp_path / "documents-00000.arrow"


def test_portions_are_small_and_nothing_is_lost(monkeypatch):
    monkeypatch.setattr(writing, "ENCODE_BYTES", 100)
    texts = ["x" * n for n in (0, 10, 95, 0, 5, 250, 1, 99, 100, 101, 0)]
    batch = to_batch([Document(str(i), t, "s") for i, t in enumerate(texts)], 0)
    parts = [texts_of(part) for part in portions(batch)]
    assert [text for part in parts for text in part] == texts
    assert all(sum(map(len, part[:-1])) < 100 for part in parts)
    assert all(parts)
    one = to_batch([Document("a", "", "s")], 0)
    assert [part.num_rows for part in portions(one)] == [1]


def test_a_share_of_documents_is_chosen_by_their_ids():
    batch = to_batch([Document(f"d{i}", "t", "s") for i in range(2000)], 0)
    held = np.array(chosen_rows(batch, 0.1))
    assert 0.07 < held.mean() < 0.13
    assert not any(chosen_rows(batch, 0.0))
    assert all(chosen_rows(batch, 1.0))
    # Whoever is held out for 5 % is so for 10 %, and another use of the ids chooses others.
    assert not np.any(np.array(chosen_rows(batch, 0.05)) & ~held)
    other = np.array(chosen_rows(batch, 0.1, "tokenizer"))
    assert 0.07 < other[held].mean() + other[~held].mean() < 0.4
    assert (other != held).any()


def test_a_tokenizer_is_trained_on_so_many_bytes_of_what_is_not_held_out(shard):
    every = list(training_texts(StoreSpec(vocab_size=300, heldout=0.2), [shard]))
    assert 140 <= len(every) <= 180
    size = sum(map(len, every))
    some = StoreSpec(vocab_size=300, heldout=0.2, tokenizer_bytes=size // 4)
    few = list(training_texts(some, [shard]))
    assert set(few) < set(every)
    assert 0.1 < sum(map(len, few)) / size < 0.35
    assert list(training_texts(StoreSpec(vocab_size=300, tokenizer_bytes=1), [shard])) == []
    all_bytes = StoreSpec(vocab_size=300, tokenizer_bytes=10**9)
    assert len(list(training_texts(all_bytes, [shard]))) == 200


def test_what_looks_like_a_special_token_is_text_and_scores_follow_their_documents(tmp_path):
    raw = tmp_path / "raw.jsonl"
    rows = [{"id": f"d{i}", "text": corpus.text(i)} for i in range(20)]
    rows[3]["text"] = "before <|eos|> after. " * 3
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "sources": [{"name": "s", "path": str(raw)}],
        "steps": [{"kind": "langid"}],
        "store": {"vocab_size": 400, "scores": "language_score"},
        "batch_bytes": 2000,
        "shard_bytes": 5000,
    }
    list(curate(make_plan(Recipe.parse(values)), tmp_path / "out", LocalExecutor(1)))
    tokenizer = Tokenizer.load(tmp_path / "out" / "store" / "tokenizer")
    store = TokenStore.open(tmp_path / "out" / "store" / "train" / "s", tokenizer)
    kept = corpus.rows(tmp_path / "out" / "documents")
    assert [tokenizer.decode(store.doc(i)[:-1]) for i in range(20)] == [r["text"] for r in kept]
    assert all((store.doc(i) == tokenizer.eos_id).sum() == 1 for i in range(20))
    lowest = min(row["language_score"] for row in kept if row["language_score"] is not None)
    expected = [lowest if r["language_score"] is None else r["language_score"] for r in kept]
    assert np.allclose(store.doc_scores(), expected)


def pieces(num_files, size_bytes):
    return [Piece("p", str(i), "text", size_bytes=size_bytes) for i in range(num_files)]


def test_small_files_are_read_by_many_tasks_and_large_ones_by_few():
    assert len(list(bundled(pieces(10_000, 1000), in_one=False))) == 10
    assert len(list(bundled(pieces(8, 64 << 20), in_one=False))) == 8
    assert len(list(bundled(pieces(10_000, 1000), in_one=True))) == 1
    parts = list(bundled(pieces(77, 1 << 20), in_one=False))
    assert [len(part) for part in parts] == [16, 16, 16, 16, 13]
    assert [p.name for part in parts for p in part] == [str(i) for i in range(77)]
