import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import wordllama
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tests.global_steps import documents_of, run_step

from stepwell.data.dedup.embed import load_embedder
from stepwell.data.dedup.semantic import SemanticDedup, auto_clusters, k_means, similar_documents
from stepwell.types import ConfigError, DataError, Document

PACKAGE = Path(wordllama.__file__).parent
RIVER = (
    "The river rises in the mountains, crosses three countries and reaches the sea after a "
    "thousand miles. Ships carry grain and timber on it all year. In spring its floods cover the "
    "fields on both banks."
)
AGAIN = (
    "In spring the floods of it cover fields on both its banks. The river rises in mountains, "
    "crosses three countries and after a thousand miles reaches the sea. Ships carry timber and "
    "grain on it all the year."
)
BAKERY = "Knead flour, water, yeast and salt for ten minutes, let the dough rest, then bake it hot."
PARSER = "def parse(tokens): return [int(token) for token in tokens if token.isdigit()]"


def test_what_says_the_same_in_other_words_goes_and_names_its_witness():
    docs = documents_of(RIVER, BAKERY, AGAIN, PARSER)
    result = run_step(SemanticDedup(survivor=()), docs)
    (row,) = result.removed
    assert (row["id"], row["reason"], row["witness"]) == ("0002", "semantic_duplicate", "s/0000")
    a, b = load_embedder("wordllama").embed([RIVER, AGAIN])
    assert row["detail"] == f"cosine = {a @ b:.4f}"
    assert 0.98 <= a @ b < 1


def test_threshold_is_the_least_cosine_that_goes():
    a, b = load_embedder("wordllama").embed([RIVER, AGAIN])
    docs = documents_of(RIVER, AGAIN)
    for threshold, num_removed in ((float(a @ b) - 1e-5, 1), (float(a @ b) + 1e-5, 0)):
        step = SemanticDedup(threshold=threshold)
        assert len(run_step(step, docs).removed) == num_removed


def test_survivors_go_by_rule_then_by_name():
    assert len(AGAIN) > len(RIVER)
    docs = documents_of(AGAIN, RIVER)
    assert list(run_step(SemanticDedup(survivor=("longest",)), docs).kept) == ["s/0000"]
    assert list(run_step(SemanticDedup(survivor=("shortest",)), docs).kept) == ["s/0001"]
    assert list(run_step(SemanticDedup(survivor=()), docs).kept) == ["s/0000"]


def test_documents_without_tokens_stay_and_are_counted():
    result = run_step(SemanticDedup(), documents_of("", " \n", RIVER, RIVER))
    assert list(result.kept) == ["s/0000", "s/0001", "s/0002"]
    assert result.summary["num_without_tokens"] == 2
    assert run_step(SemanticDedup(), documents_of("")).removed == []


def test_clusters_are_few_unless_given():
    assert [auto_clusters(n) for n in (0, 1, 1024, 1025, 10**6, 10**8)] == [
        1, 1, 1, 2, 977, 10**4,
    ]  # fmt: skip
    docs = documents_of(*(f"{BAKERY} {i}" for i in range(10)))
    for number, used in ((None, 1), (2, 2)):
        result = run_step(SemanticDedup(clusters=number), docs)
        assert result.summary["k_means_clusters"] == used


def test_shards_and_order_change_nothing():
    rng = np.random.default_rng(0)
    parts = (RIVER + " " + BAKERY + " " + AGAIN).split()
    docs = documents_of(*(" ".join(rng.permutation(parts)[:65]) for _ in range(60)))
    step = SemanticDedup(threshold=0.9, clusters=8)
    here = run_step(step, docs)
    there = run_step(step, docs[::-1], 7)
    assert here.removed
    assert (here.kept, here.removed) == (there.kept, there.removed)
    vector = dict(zip([f"s/{d.id}" for d in docs],
                      load_embedder("wordllama").embed([d.text for d in docs]),
                      strict=True))  # fmt: skip
    for row in here.removed:
        assert row["witness"] in here.kept
        assert vector[f"s/{row['id']}"] @ vector[row["witness"]] >= 0.9


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 9), st.floats(0.3, 0.99))
def test_within_a_cluster_the_decision_is_the_greedy_one(seed, num, clusters, threshold):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(num, 3)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cluster = k_means(vectors, np.arange(num), clusters, 5, 1)
    witness, cosine = similar_documents(vectors, np.arange(num), cluster, threshold)
    kept: list[int] = []
    for i in range(num):
        rivals = [
            j for j in kept if cluster[j] == cluster[i] and vectors[j] @ vectors[i] >= threshold
        ]
        near = [abs(vectors[j] @ vectors[i] - threshold) < 1e-5 for j in kept]
        if any(near):
            return  # rounding decides
        if rivals:
            assert witness[i] == rivals[0]
            assert abs(cosine[i] - vectors[rivals[0]] @ vectors[i]) < 1e-5
        else:
            assert witness[i] == -1
            kept.append(i)


def test_k_means_finds_what_is_apart_and_is_the_same_each_time():
    rng = np.random.default_rng(3)
    centers = np.eye(4, 16, dtype=np.float32)
    truth = rng.integers(0, 4, 400)
    vectors = centers[truth] + rng.normal(scale=0.05, size=(400, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cluster = k_means(vectors, np.arange(400), 12, 20, 1)
    assert np.array_equal(cluster, k_means(vectors, np.arange(400), 12, 20, 1))
    assert not np.array_equal(cluster, k_means(vectors, np.arange(400), 12, 20, 2))
    assert all(len(np.unique(truth[cluster == c])) == 1 for c in np.unique(cluster))
    assert len(k_means(vectors, np.arange(3), 12, 20, 1)) == 3  # fewer documents than clusters


def test_iterations_move_centroids():
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(300, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    once, often = (k_means(vectors, np.arange(300), 10, i, 1) for i in (1, 20))
    assert not np.array_equal(once, often)


def test_embeddings_do_not_depend_on_neighbours_or_white_space():
    embedder = load_embedder("wordllama")
    alone = embedder.embed([RIVER])[0]
    assert np.array_equal(alone, embedder.embed([BAKERY, RIVER, "x" * 5000])[1])
    assert np.array_equal(alone, embedder.embed([RIVER.replace(" ", "\n\n   ")])[0])
    # the whole of a long text counts
    long = RIVER * 400
    assert embedder.embed([long + BAKERY * 400])[0] @ embedder.embed([long])[0] < 0.98


def test_an_embedder_of_ones_own(tmp_path):
    weights = load_file(PACKAGE / "weights" / "l2_supercat_256.safetensors")
    (vectors,) = weights.values()
    shutil.copy(PACKAGE / "tokenizers" / "l2_supercat_tokenizer_config.json",
                tmp_path / "tokenizer.json")  # fmt: skip
    with pytest.raises(ConfigError, match=re.escape("a folder with tokenizer.json")):
        load_embedder(str(tmp_path))
    save_file({"embeddings": np.ascontiguousarray(vectors[:, :8])}, tmp_path / "model.safetensors")
    assert load_embedder(str(tmp_path)).num_dimensions == 8
    save_file({"embeddings": np.ascontiguousarray(vectors[:, :4])}, tmp_path / "model.safetensors")
    assert load_embedder(str(tmp_path)).num_dimensions == 4
    save_file({"embeddings": np.ascontiguousarray(vectors[:, :8])}, tmp_path / "model.safetensors")
    docs = documents_of(RIVER, BAKERY, AGAIN)
    assert list(run_step(SemanticDedup(embedder=str(tmp_path), survivor=()), docs).kept) == [
        "s/0000",
        "s/0001",
    ]


def test_a_damaged_embedder_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match="no embedder that can be read"):
        load_embedder(str(tmp_path))


def test_documents_of_one_name_are_told_apart_by_text():
    docs = [Document("0", RIVER, "s"), Document("0", AGAIN, "s")]
    step = SemanticDedup(survivor=())
    assert run_step(step, docs).kept == run_step(step, docs[::-1]).kept


def test_more_clusters_than_documents_are_refused():
    docs = documents_of("apples are red", "the sky is blue", "trains run late", "...")
    run = run_step(SemanticDedup(clusters=3), docs[:3])
    assert run.summary["k_means_clusters"] == 3
    with pytest.raises(DataError, match="clusters=4 is more than the 3 documents.*set it to 3"):
        run_step(SemanticDedup(clusters=4), docs[:3])
    assert run_step(SemanticDedup(clusters=4), []).rows == []


def test_equal_vectors_have_a_cosine_of_1_whatever_their_rounding():
    vectors = np.random.default_rng(0).normal(size=(200, 256))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    twice = np.repeat(vectors, 2, axis=0)
    rows = np.arange(len(twice))
    witness, cosine = similar_documents(twice, rows, rows // 2, 1.0)
    assert witness.reshape(-1, 2).tolist() == [[-1, i] for i in range(0, len(twice), 2)]
    assert cosine[1::2] == pytest.approx(1, abs=1e-6)
