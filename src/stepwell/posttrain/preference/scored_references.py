"""What the reference says of answers: scored once and kept in a file, by a frozen copy, or by the
policy with its adapters left out.

D documents (ids and mask of a prompt with an answer), B rows, T tokens a row.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.loader import rank_rows
from stepwell.data.packing import pack_rows, shortest
from stepwell.data.preference import Rendering
from stepwell.files import whole_file
from stepwell.parallel.fsdp import DTYPES
from stepwell.parallel.mesh import Mesh, all_gather_objects, on_main
from stepwell.parallel.shared_prompts import length_step
from stepwell.train.engine import Engine
from stepwell.train.losses import document_index, document_sums
from stepwell.train.weights import initial_weights
from stepwell.types import CheckpointError, ConfigError

FILE = "reference.safetensors"
# Documents that are packed together and scored at a time, for each rank.
CHUNK_DOCS = 64
Score = Callable[[Batch], Tensor]  # (B, T) log-probabilities


class Key(NamedTuple):
    """What a document's sum depends on: sha256 of weights and of documents, and the precision."""

    weights: str
    documents: str
    precision: str


# --- scoring -----------------------------------------------------------------------------------


def score_documents(
    score: Score, docs: Sequence[Rendering], run: Run, pad_id: int, mesh: Mesh
) -> np.ndarray:
    """float64 (D,): each document's sum of log-probabilities over its trained tokens, in nats.

    Every rank calls it with all documents, scores its share, and has all sums.
    """
    sums = np.zeros(len(docs))
    size = CHUNK_DOCS * mesh.data_world
    # Documents of about one length fill rows better.
    order = sorted(range(len(docs)), key=lambda i: -len(docs[i][0]))
    for start in range(0, len(docs), size):
        chunk = order[start : start + size]
        share = rank_rows(len(chunk), mesh.data_rank, mesh.data_world)
        mine = chunk[share.start : share.stop]
        length = row_length([len(docs[i][0]) - 1 for i in mine], run)
        batch, places = pack_in_order([docs[i] for i in mine], length, pad_id)
        found = document_totals(score(batch), batch)
        parts = [(mine[p], v) for p, v in zip(places, found.tolist(), strict=True)]
        for part in all_gather_objects(parts if mesh.counts_rows else [], mesh):
            for i, value in part:
                sums[i] = value
    return sums


def row_length(lengths: Sequence[int], run: Run) -> int:
    """The shortest rows (in steps of `length_step`, at most data.seq_len) that units of these
    lengths take no more of than of full ones, so that little of a small batch is padding. Full ones
    where context ranks divide rows or code is compiled for their shape."""
    seq_len = run.data.seq_len
    if run.layout.cp > 1 or run.layout.compile or not lengths:
        return seq_len
    return shortest(lengths, seq_len, length_step(run))


def pack_in_order(docs: Sequence[Rendering], length: int, pad_id: int) -> tuple[Batch, list[int]]:
    """Documents packed by best fit, and which one is the batch's first, second, ... document."""
    batch = pack_rows(docs, length, pad_id, {"index": _numbers(docs)})
    index_BT, num_docs = document_index(batch)
    places = torch.zeros(num_docs + 1, dtype=torch.int64)
    places[index_BT.flatten()] = batch.extra["index"].flatten()
    return replace(batch, extra={}), places[:num_docs].tolist()


def _numbers(docs: Sequence[Rendering]) -> list[np.ndarray]:
    return [np.full(len(ids), i) for i, (ids, _) in enumerate(docs)]


def document_totals(logprobs_BT: Tensor, batch: Batch) -> Tensor:
    """float64 (D,): the sums over the trained tokens of a batch's documents."""
    return document_sums(logprobs_BT.double(), batch, batch.weights_BT.double())


def with_stream(batch: Batch, name: str, values_D: Tensor) -> Batch:
    """The batch with a stream that has a document's value at each of its tokens (float32)."""
    index_BT, _ = document_index(batch)
    values = torch.cat([values_D, values_D.new_zeros(1)]).float()
    return replace(batch, extra={**batch.extra, name: values[index_BT]})


# --- fingerprints ------------------------------------------------------------------------------


def documents_hash(docs: Iterable[Rendering]) -> str:
    digest = hashlib.sha256()
    for ids, mask in docs:
        digest.update(struct.pack("<q", len(ids)))
        digest.update(np.asarray(ids, dtype="<i8").tobytes())
        digest.update(np.asarray(mask, dtype="<f4").tobytes())
    return digest.hexdigest()


def weights_hash(engine: Engine) -> str:
    """sha256 of all weights in compute precision, under their names. Every rank must call it."""
    digest, dtype = hashlib.sha256(), DTYPES[engine.run.precision.compute]
    for name, tensor in engine.iter_state(dtype):
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- the file ----------------------------------------------------------------------------------


def save_scores(path: Path, key: Key, sums: np.ndarray) -> None:
    with whole_file(path) as temporary:
        save_file({"logps": sums}, temporary, metadata=key._asdict())


def read_scores(path: Path) -> tuple[Key, np.ndarray] | None:
    """None where there is no file. Raises CheckpointError for one that cannot be read."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="np") as file:
            return Key(**(file.metadata() or {})), file.get_tensor("logps")
    except (SafetensorError, OSError, TypeError) as error:
        raise CheckpointError(
            f"{path} holds no reference scores ({error}); remove it, and they are made anew"
        ) from error


def borrowed_scores(folder: str, key: Key) -> np.ndarray:
    """The sums that the run in `folder` keeps. Raises ConfigError if they are of other weights,
    pairs or precision."""
    path = Path(folder) / FILE
    found = read_scores(path)
    if found is None:
        raise ConfigError(
            f"method.reference_from={folder!r}: there is no {FILE}; name the folder of a dpo run "
            "with method.reference='cached', or leave it out"
        )
    stale = [name for name in Key._fields if getattr(found[0], name) != getattr(key, name)]
    if stale:
        raise ConfigError(
            f"method.reference_from={folder!r}: {path} was made with other {' and '.join(stale)}, "
            "so its scores are not this run's reference; leave it out, and the pairs are scored"
        )
    return found[1]


def cached_scores(
    run: Run,
    first: Callable[[], Engine],
    docs: Sequence[Rendering],
    pad_id: int,
    mesh: Mesh,
    weights: str | None,
) -> tuple[np.ndarray, str]:
    """The documents' sums under the weights that training began with, and these weights' hash.

    first: an engine with them. weights: their hash, if a checkpoint knows it. What is in the run's
    folder is taken if it is of these weights, documents and precision, and replaced if not.
    """
    engine = None
    if weights is None:
        engine = first()
        weights = weights_hash(engine)
    key = Key(weights, documents_hash(docs), run.precision.compute)
    path, source = Path(run.dir) / FILE, getattr(run.method, "reference_from", None)
    found = on_main(lambda: read_scores(path), mesh)
    if found is not None and found[0] == key:
        return found[1], weights
    if source is not None:
        sums = on_main(lambda: borrowed_scores(source, key), mesh)
    else:
        engine = engine or first()
        if weights_hash(engine) != weights:
            raise ConfigError(
                f"the first weights of {run.dir} are needed to score its pairs again ({path} is "
                f"gone), but model.init={run.model.init!r} holds others now; give back one of them"
            )
        sums = score_documents(engine.logprobs, docs, run, pad_id, mesh)
    on_main(lambda: save_scores(path, key, sums), mesh)
    return sums, weights


# --- engines -----------------------------------------------------------------------------------


def first_engine(
    run: Run, weights: Iterable[tuple[str, Tensor]] | None, mesh: Mesh, policy: Engine | None
) -> Engine:
    """A frozen engine with the weights that training began with.

    policy: the engine to copy, where it has not made a step yet. Else they are `weights`, or read
    from model.init. Raises ConfigError if neither is there.
    """
    if policy is not None:
        return Engine(run, policy.iter_state(), mesh, frozen=True)
    found = weights if weights is not None else initial_weights(run.model, run.train.seed)
    if found is None:
        raise ConfigError(
            f"the reference of {run.dir} is its first weights, which are no longer there: "
            "model.init is not set; start the run from a checkpoint, a Hugging Face folder or a "
            ".gguf file"
        )
    return Engine(run, with_adapters(run, found, mesh), mesh, frozen=True)


def with_adapters(
    run: Run, weights: Iterable[tuple[str, Tensor]] | None, mesh: Mesh
) -> Iterable[tuple[str, Tensor]] | None:
    """The weights of the policy that starts from these, for an engine without adapters: with those
    of `lora.init`, and a base in 4 bits rounded as the policy's is. Every rank must run through
    them together."""
    if run.lora.init is None and run.lora.quantize == "none":
        return weights
    return Engine(run, weights, mesh).iter_state()


def check_adapter_off(run: Run) -> None:
    """Raises ConfigError unless leaving the adapters out gives the policy's first distribution."""
    if run.lora.rank == 0 and run.lora.init is None:
        raise ConfigError(
            "method.reference='adapter-off' leaves adapters out, and lora.rank=0 means that there "
            "are none; set lora.rank (16 is usual), or take 'cached'"
        )
    if run.lora.init is not None:
        raise ConfigError(
            f"method.reference='adapter-off' is the model without adapters, but lora.init="
            f"{run.lora.init!r} starts from trained ones, which are the reference: take 'cached' "
            "or 'separate', which keep them"
        )
