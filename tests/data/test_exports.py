"""Read back byte by byte as the formats are described; the slow tests read with their libraries."""

import functools
import itertools
import json
import operator
import struct

import numpy as np
import pytest

from stepwell.data.exports import write_litdata, write_mds, write_megatron
from stepwell.data.store import StoreWriter, TokenStore

DOCS = [[1, 2, 3], [300], list(range(70, 400)), [5, 6]]


@pytest.fixture(params=[512, 100_000])
def store(request, tmp_path):
    with StoreWriter(tmp_path / "store", "0" * 64, request.param) as writer:
        for ids in DOCS:
            writer.add(ids)
    return TokenStore.open(tmp_path / "store")


def test_megatron(store, tmp_path):
    write_megatron(store, tmp_path / "out")
    index = (tmp_path / "out" / "tokens.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, num_sequences, num_docs = struct.unpack_from("<QBQQ", index, 9)
    assert (version, num_sequences, num_docs) == (1, 4, 5)
    dtype = {8: "<u2", 4: "<i4"}[code]
    assert np.dtype(dtype).itemsize == store.doc(0).dtype.itemsize
    lengths = np.frombuffer(index, "<i4", 4, 34)
    pointers = np.frombuffer(index, "<i8", 4, 34 + 16)
    documents = np.frombuffer(index, "<i8", 5, 34 + 16 + 32)
    assert len(index) == 34 + 16 + 32 + 40
    assert documents.tolist() == [0, 1, 2, 3, 4]
    content = (tmp_path / "out" / "tokens.bin").read_bytes()
    found = [
        np.frombuffer(content, dtype, n, p).tolist() for n, p in zip(lengths, pointers, strict=True)
    ]
    assert found == DOCS


@pytest.mark.parametrize("shard_bytes", [600, 1 << 20])
def test_mds(store, tmp_path, shard_bytes):
    write_mds(store, tmp_path / "out", shard_bytes)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert (len(index["shards"]) > 1) == (shard_bytes == 600)
    found = []
    for shard in index["shards"]:
        content = (tmp_path / "out" / shard["raw_data"]["basename"]).read_bytes()
        assert len(content) == shard["raw_data"]["bytes"]
        (count,) = struct.unpack_from("<I", content)
        starts = np.frombuffer(content, "<u4", count + 1, 4)
        assert (count, starts[-1]) == (shard["samples"], len(content))
        for begin, end in itertools.pairwise(starts):
            sample = content[begin + 4 : end]
            assert struct.unpack_from("<I", content, begin) == (len(sample),)
            width = 1 << (sample[0] & 3)
            assert sample[0] >> 2 == 1
            assert int.from_bytes(sample[1 : 1 + width], "little") == (len(sample) - 1 - width) // 4
            found.append(np.frombuffer(sample, "<i4", offset=1 + width).tolist())
    assert found == DOCS


@pytest.mark.parametrize("chunk_bytes", [500, 1 << 20])
def test_litdata(store, tmp_path, chunk_bytes):
    write_litdata(store, tmp_path / "out", chunk_bytes)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert (len(index["chunks"]) > 1) == (chunk_bytes == 500)
    dtype = {"no_header_tensor:20": "<u2", "no_header_tensor:15": "<i4"}[
        index["config"]["data_format"][0]
    ]
    tokens = []
    for chunk in index["chunks"]:
        content = (tmp_path / "out" / chunk["filename"]).read_bytes()
        (count,) = struct.unpack_from("<I", content)
        starts = np.frombuffer(content, "<u4", count + 1, 4)
        assert (count, starts[-1]) == (chunk["chunk_size"], len(content))
        tokens.append(np.frombuffer(content, dtype, offset=starts[0]))
        assert len(tokens[-1]) == chunk["dim"]
    assert np.concatenate(tokens).tolist() == functools.reduce(operator.iadd, DOCS, [])


@pytest.mark.slow
def test_the_libraries_read_them(store, tmp_path):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    write_megatron(store, tmp_path / "megatron")
    dataset = megatron.IndexedDataset(str(tmp_path / "megatron" / "tokens"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCS


@pytest.mark.slow
def test_streaming_reads_mds(store, tmp_path):
    mds = pytest.importorskip("streaming.base.format.mds.reader")
    write_mds(store, tmp_path / "out", 600)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    found = []
    for shard in index["shards"]:
        reader = mds.MDSReader.from_json(str(tmp_path), "out", dict(shard))
        found += [reader[i]["tokens"].tolist() for i in range(shard["samples"])]
    assert found == DOCS


@pytest.mark.slow
def test_litdata_reads_chunks(store, tmp_path):
    litdata = pytest.importorskip("litdata")
    loader = pytest.importorskip("litdata.streaming.item_loader")
    write_litdata(store, tmp_path / "out")
    dataset = litdata.StreamingDataset(
        str(tmp_path / "out"), item_loader=loader.TokensLoader(block_size=48), shuffle=False
    )
    tokens = [int(t) for i in range(len(dataset)) for t in dataset[i]]
    whole = functools.reduce(operator.iadd, DOCS, [])
    assert tokens == whole[: len(whole) // 48 * 48]
