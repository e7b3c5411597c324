import hashlib
import json
import os
import resource
import subprocess
import sys
import textwrap
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.data.files import SPARE_FILES, open_file_limit
from stepwell.data.store import StoreWriter, TokenStore, build_store
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError, Document, Dropped

TEXTS = ["alpha beta gamma 123\n" * 9, "x", "delta <|eos|> epsilon", "日本語 and more"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS * 4, 300)


def write(folder, docs, vocab_size=1000, masks=None, **options):
    with StoreWriter(folder, "print", vocab_size, with_mask=masks is not None, **options) as writer:
        for i, doc in enumerate(docs):
            writer.add(doc, None if masks is None else masks[i])
    return TokenStore.open(folder, verify=True)


def leftovers(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@given(st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20), min_size=1, max_size=20))
@settings(max_examples=25, deadline=None)
def test_what_goes_in_comes_out(tmp_path_factory, docs):
    folder = tmp_path_factory.mktemp("store") / "s"
    store = write(folder, docs, shard_tokens=25, masks=[[t % 2 for t in doc] for doc in docs])
    stream = [t for doc in docs for t in doc]
    firsts = np.cumsum([0, *map(len, docs)])
    assert (store.num_docs, store.num_tokens) == (len(docs), len(stream))
    assert [store.doc(i).tolist() for i in range(len(docs))] == docs
    assert [store.doc_mask(i).tolist() for i in range(len(docs))] == [
        [t % 2 for t in doc] for doc in docs
    ]
    assert store.doc_lengths().tolist() == [len(doc) for doc in docs]
    for longest in (1, 5, 100):
        expected = [sum(t % 2 for t in doc[1:longest]) for doc in docs]
        assert store.trained_tokens(longest).tolist() == expected
    for start in range(0, len(stream), 3):
        for stop in range(start + 1, len(stream) + 1, 7):
            assert store.read(start, stop).tolist() == stream[start:stop]
            expected = [f for f, last in pairwise(firsts) if f < stop and last > start]
            assert store.doc_starts(start, stop).tolist() == expected


def test_dtype_follows_the_vocabulary(tmp_path):
    assert write(tmp_path / "a", [[0, 65_535]], vocab_size=65_536).doc(0).dtype == np.uint16
    assert write(tmp_path / "b", [[0, 65_536]], vocab_size=65_537).doc(0).dtype == np.uint32
    assert write(tmp_path / "c", [[151_935]], vocab_size=151_936).doc(0).tolist() == [151_935]


def test_a_store_without_masks_trains_on_everything(tmp_path):
    store = write(tmp_path / "a", [[1, 2, 3]])
    assert store.doc_mask(0).tolist() == [1, 1, 1]
    assert store.read_mask(0, 2).tolist() == [1, 1]
    assert store.trained_tokens(2).tolist() == [1]
    assert store.trained_tokens(9).tolist() == [2]


def test_build_store_ends_documents_and_leaves_special_names_as_text(tokenizer, tmp_path):
    docs = [Document(str(i), text, "test") for i, text in enumerate(TEXTS)]
    mixed = [docs[0], Dropped("x", "test", "why"), *docs[1:]]
    store = build_store(mixed, tokenizer, tmp_path / "s", batch_bytes=10)
    assert store.num_docs == len(TEXTS)
    for i, text in enumerate(TEXTS):
        ids = store.doc(i).tolist()
        assert ids[-1] == tokenizer.eos_id
        assert tokenizer.eos_id not in ids[:-1]
        assert tokenizer.decode(ids[:-1]) == text
    assert TokenStore.open(tmp_path / "s", tokenizer, verify=True).num_docs == len(TEXTS)


def test_manifest_lists_every_file(tokenizer, tmp_path):
    store = write(tmp_path / "s", [[1] * 10, [2] * 10, [3] * 30], shard_tokens=20)
    assert [s["tokens"] for s in store.manifest["shards"]] == [20, 30]
    names = set(leftovers(tmp_path / "s")) - {"manifest.json"}
    assert set(store.manifest["files"]) == names
    for name, entry in store.manifest["files"].items():
        content = (tmp_path / "s" / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_another_tokenizer_is_refused(tokenizer, tmp_path):
    build_store([Document("0", TEXTS[0], "t")], tokenizer, tmp_path / "s")
    other = Tokenizer.train(TEXTS * 4, 280)
    with pytest.raises(DataError, match="made with another tokenizer"):
        TokenStore.open(tmp_path / "s", other)


@pytest.mark.parametrize("name", ["tokens-00000.bin", "docs-00000.idx"])
def test_damage_is_found(tmp_path, name):
    write(tmp_path / "s", [[1, 2, 3], [4, 5]])
    path = tmp_path / "s" / name
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    for verify in (None, True):
        with pytest.raises(DataError, match=f"{name} is damaged: its sha256"):
            TokenStore.open(tmp_path / "s", verify=verify)
    assert TokenStore.open(tmp_path / "s", verify=False).num_docs == 2
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"{name} is damaged: {len(content) - 1} bytes where"):
        TokenStore.open(tmp_path / "s")
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        TokenStore.open(tmp_path / "s")


def test_a_store_above_the_limit_is_not_read_unless_told_to(tmp_path, monkeypatch):
    write(tmp_path / "s", [[1, 2, 3], [4, 5]])
    path = tmp_path / "s" / "tokens-00000.bin"
    path.write_bytes(bytes([7]) + path.read_bytes()[1:])
    monkeypatch.setattr("stepwell.data.store.VERIFIED_BYTES", 9)
    assert TokenStore.open(tmp_path / "s").num_docs == 2
    with pytest.raises(DataError, match="is damaged: its sha256"):
        TokenStore.open(tmp_path / "s", verify=True)


def test_ids_outside_the_vocabulary_are_found(tmp_path):
    store = write(tmp_path / "s", [[1, 2, 3], [4, 5]])
    values = store.manifest | {"vocab_size": 5}
    (tmp_path / "s" / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(
        DataError, match=r"tokens-00000.bin holds id 5, outside the vocabulary of 5"
    ):
        TokenStore.open(tmp_path / "s")


def test_bad_manifests(tmp_path):
    with pytest.raises(DataError, match="not a token store"):
        TokenStore.open(tmp_path)
    manifest = tmp_path / "manifest.json"
    for content, message in (("{", "cannot be read"), ("{}", "lacks"), ("[]", "lacks")):
        manifest.write_text(content)
        with pytest.raises(DataError, match=message):
            TokenStore.open(tmp_path)
    store = write(tmp_path / "s", [[1]])
    values = store.manifest | {"format": 99}
    (tmp_path / "s" / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match="format 99"):
        TokenStore.open(tmp_path / "s")


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([1, 1000], None, "id 1000, outside the vocabulary of 1000"),
        ([-1, 5], None, "id -1, outside"),
        ([], None, "no tokens"),
        ([1], [1], "with a mask"),
    ],
)
def test_bad_documents_leave_nothing(tmp_path, ids, mask, message):
    def fill():
        with StoreWriter(tmp_path / "s", "p", 1000) as writer:
            writer.add([1, 2])
            writer.add(ids, mask)

    with pytest.raises(DataError, match=message):
        fill()
    assert leftovers(tmp_path) == []


def test_mask_of_another_length(tmp_path):
    with (
        pytest.raises(DataError, match="mask of 1"),
        StoreWriter(tmp_path / "s", "p", 10, with_mask=True) as writer,
    ):
        writer.add([1, 2], [1])
    assert leftovers(tmp_path) == []


def test_no_documents_and_an_existing_folder(tmp_path):
    with pytest.raises(DataError, match="no documents"):
        write(tmp_path / "s", [])
    assert leftovers(tmp_path) == []
    write(tmp_path / "s", [[1]])
    with pytest.raises(DataError, match="exists already"):
        write(tmp_path / "s", [[2]])
    assert TokenStore.open(tmp_path / "s").doc(0).tolist() == [1]


FILL = """
    import resource, signal, sys
    from stepwell.data.store import StoreWriter
    from stepwell.types import DataError
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
    try:
        with StoreWriter(sys.argv[1] + "/s", "p", 1000) as writer:
            for _ in range(100):
                writer.add([7] * 50_000)
    except DataError as error:
        print(error)
"""


def test_a_disk_that_fills_up_gives_one_clean_message(tmp_path):
    """A real short write: the kernel refuses bytes past a limit, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FILL), str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "cannot write" in done.stdout
    assert "nothing was kept" in done.stdout
    assert done.stderr == ""
    assert leftovers(tmp_path) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 3_000_000


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    code = (
        "import os, sys; from stepwell.data.store import StoreWriter;"
        "w = StoreWriter(sys.argv[1] + '/s', 'p', 10); w.add([1]); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(leftovers(tmp_path)) == 1
    assert not (tmp_path / "s").exists()
    write(tmp_path / "s", [[1]])
    assert leftovers(tmp_path) == ["s"]


def test_a_writer_that_still_runs_keeps_its_folder(tmp_path):
    running = tmp_path / f".s.tmp{os.getppid()}"
    running.mkdir()
    write(tmp_path / "s", [[1]])
    assert running.exists()


def test_scores_come_back_through_shards(tmp_path):
    with StoreWriter(tmp_path / "s", "print", 100, shard_tokens=10, with_scores=True) as writer:
        for i in range(7):
            writer.add(np.arange(4), score=i / 3)
    store = TokenStore.open(tmp_path / "s", verify=True)
    assert len(store.manifest["shards"]) > 1
    assert store.doc_scores().dtype == np.float32
    assert np.array_equal(store.doc_scores(), np.arange(7, dtype=np.float32) / np.float32(3))
    path = tmp_path / "s" / "scores-00000.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match=r"scores-00000\.bin is damaged"):
        TokenStore.open(tmp_path / "s")


def test_scores_are_all_or_none_and_finite(tmp_path):
    with StoreWriter(tmp_path / "s", "print", 100, with_scores=True) as writer:
        with pytest.raises(DataError, match="comes without a score"):
            writer.add([1, 2])
        for bad in (float("nan"), float("inf"), 1e39):
            with pytest.raises(DataError, match="not a finite float32"):
                writer.add([1, 2], score=bad)
        writer.add([1, 2], score=3e38)
    with StoreWriter(tmp_path / "plain", "print", 100) as writer:
        with pytest.raises(DataError, match="comes with a score"):
            writer.add([1, 2], score=1.0)
        writer.add([1, 2])
    with pytest.raises(DataError, match="has no scores"):
        TokenStore.open(tmp_path / "plain").doc_scores()


def test_the_fingerprint_goes_by_content(tmp_path):
    def write(name, ids, score=None):
        with StoreWriter(tmp_path / name, "p", 100, with_scores=score is not None) as writer:
            writer.add(ids, score=score)
        return TokenStore.open(tmp_path / name).fingerprint

    prints = [write("a", [1, 2]), write("b", [1, 3]), write("c", [1, 2], 0.0)]
    assert len(set(prints)) == 3
    assert write("d", [1, 2]) == prints[0]


def test_more_shards_than_a_process_may_open_files(tmp_path):
    with StoreWriter(tmp_path / "s", "print", 9, with_mask=True, shard_tokens=4) as writer:
        for i in range(40):
            writer.add([i % 9] * 4, [1] * 4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
    try:
        store = TokenStore.open(tmp_path / "s")
        assert store.doc(39).tolist() == [3] * 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be():
    least = 100 + SPARE_FILES
    infinite = resource.RLIM_INFINITY
    assert open_file_limit(100, least, 5000) == least
    assert open_file_limit(100, least - 1, 5000) == least
    assert open_file_limit(100, 10, least) == least
    assert open_file_limit(100, 10, infinite) == least
    assert open_file_limit(100, infinite, infinite) == infinite
    with pytest.raises(DataError, match=rf"{least} files .* may have {least - 1}"):
        open_file_limit(100, 10, least - 1)
