"""What is published of each shard of kept documents: a file of documents, and the ids of their
tokens. Done shard by shard, by as many processes as curate; `outputs` puts it together.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stepwell.curate.folders import decision_folder
from stepwell.curate.plan import read_json, write_json
from stepwell.curate.tally import Tally, count_cpu
from stepwell.data.batches import documents, pc, text_bytes, texts_of
from stepwell.data.steps import read_batches
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError, nearest

if TYPE_CHECKING:
    from stepwell.curate.plan import Plan
    from stepwell.curate.recipe import StoreSpec

DOCUMENTS, TOKENIZER, SCORES, PLACES = "documents", "tokenizer", "scores.json", "places.json"
TRAIN, HELDOUT = "train", "heldout"
# Of documents whose label has no value.
NO_VALUE = "none"
NAME_CHARACTERS = 48
MAX_STORES = 1000
# Text that is encoded at once: an encoding takes some 100 bytes a token.
ENCODE_BYTES = 1 << 20


def prepare(spec: StoreSpec, shards: Sequence[Path], folder: Path) -> None:
    """The decision before shards are written: the tokenizer, and the score of what has none.
    Raises ConfigError for a column that isn't there."""
    for column in (spec.by, *([spec.scores] if spec.scores else [])):
        _check_column(column, shards)
    check_values(spec.by, shards)
    tokenizer = (
        Tokenizer.load(spec.tokenizer)
        if spec.tokenizer is not None
        else Tokenizer.train(training_texts(spec, shards), spec.vocab_size or 0)
    )
    tokenizer.save(folder / TOKENIZER)
    lowest = min_of(spec.scores, shards) if spec.scores else 0.0
    write_json(folder / SCORES, {"lowest": lowest})


def check_values(column: str, shards: Sequence[Path]) -> None:
    """Raises ConfigError where stores would be too many."""
    values: set[Any] = set()
    for batch in (batch for path in shards for batch in read_batches(path)):
        values |= set(batch[column].unique().to_pylist())
        if len(values) > MAX_STORES:
            raise ConfigError(
                f"store.by = {column!r} has more than {MAX_STORES:,} values, and each would be a "
                "store; take a label with fewer, such as a bucket, or 'source'"
            )


def training_texts(spec: StoreSpec, shards: Sequence[Path]) -> Iterator[str]:
    """The text of documents that aren't held out, about tokenizer_bytes of it, chosen by id."""
    size = sum(text_bytes(b).sum().as_py() or 0 for path in shards for b in read_batches(path))
    share = min(1.0, spec.tokenizer_bytes / size) if size else 1.0
    for path in shards:
        for batch in read_batches(path):
            held = chosen_rows(batch, spec.heldout)
            taken = chosen_rows(batch, share, "tokenizer") if share < 1 else [True] * len(held)
            rows = np.flatnonzero(np.array(taken, bool) & ~np.array(held, bool))
            yield from batch["text"].take(pa.array(rows)).to_pylist()


def write_shard(plan: Plan, work: Path, path: Path, folder: Path, tally: Tally) -> None:
    """documents.parquet or documents.jsonl, and with a store tokens-0.npy, lengths-0.npy,
    scores-0.npy ... of each of places.json."""
    begin = time.process_time()
    write_documents(path, folder / f"{DOCUMENTS}.{plan.recipe.outputs.documents}")
    count_cpu(tally, "write documents", time.process_time() - begin)
    if plan.recipe.store is not None:
        begin = time.process_time()
        decision = decision_folder(work, len(plan.stages) - 1)
        write_tokens(plan.recipe.store, path, decision, folder)
        count_cpu(tally, "tokenise", time.process_time() - begin)


def write_documents(path: Path, target: Path) -> None:
    """Parquet: id, source, text, meta and labels; JSON lines: labels in `meta`."""
    batches = read_batches(path)
    if target.suffix == ".parquet":
        with pq.ParquetWriter(target, batches[0].schema, compression="zstd") as file:
            for batch in batches:
                file.write_batch(batch)
        return
    with target.open("w", encoding="utf-8") as lines:
        for doc in (doc for batch in batches for doc in documents(batch)):
            values = {"id": doc.id, "source": doc.source, "text": doc.text, "meta": dict(doc.meta)}
            lines.write(json.dumps(values, ensure_ascii=False, default=str) + "\n")


def write_tokens(spec: StoreSpec, path: Path, decision: Path, folder: Path) -> None:
    tokenizer = _tokenizer(decision / TOKENIZER)
    lowest = read_json(decision / SCORES)["lowest"]
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    rows: dict[str, list[np.ndarray]] = {}
    scores: dict[str, list[float]] = {}
    value_of: dict[str, str | int | None] = {}
    for batch in (part for whole in read_batches(path) for part in portions(whole)):
        held = chosen_rows(batch, spec.heldout)
        values = batch[spec.by].to_pylist()
        marks = batch[spec.scores].to_pylist() if spec.scores else [None] * len(values)
        ids_of_docs = tokenizer.encode_batch(texts_of(batch), special=False)
        for ids, value, score, is_held in zip(ids_of_docs, values, marks, held, strict=True):
            place = f"{HELDOUT if is_held else TRAIN}/{file_name(value)}"
            value_of[place] = value
            rows.setdefault(place, []).append(_with_ends(ids, tokenizer, dtype))
            if spec.scores:
                scores.setdefault(place, []).append(lowest if score is None else score)
    for i, (place, arrays) in enumerate(rows.items()):
        np.save(folder / f"tokens-{i}.npy", np.concatenate(arrays))
        np.save(folder / f"lengths-{i}.npy", np.array([*map(len, arrays)], np.int64))
        if spec.scores:
            np.save(folder / f"scores-{i}.npy", np.array(scores[place]))
    write_json(folder / PLACES, [[place, value_of[place]] for place in rows])


def portions(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Slices of about ENCODE_BYTES of text."""
    sizes = text_bytes(batch).to_numpy(zero_copy_only=False)
    numbers = (np.cumsum(sizes) - sizes) // ENCODE_BYTES
    borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
    for start, stop in zip(borders, [*borders[1:], batch.num_rows], strict=True):
        yield batch.slice(start, stop - start)


def chosen_rows(batch: pa.RecordBatch, share: float, salt: str = "") -> list[bool]:
    """Chosen by the document's source and id, so that another run of the recipe chooses the same
    ones."""
    if not share:
        return [False] * batch.num_rows
    pairs = zip(batch["source"].to_pylist(), batch["id"].to_pylist(), strict=True)
    return [_fraction(f"{salt}{source}/{doc_id}") < share for source, doc_id in pairs]


def file_name(value: str | int | None) -> str:
    """A label's value as the name of a folder: as it is where it can be, else with what tells it
    from other values of that name."""
    if value is None:
        return NO_VALUE
    text = str(value)
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in text)[:NAME_CHARACTERS]
    if plain == text and plain.strip(".-") and plain != NO_VALUE:
        return plain
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{plain.strip('.-') or 'value'}-{digest}"


def min_of(column: str, shards: Sequence[Path]) -> float:
    values = (pc.min(batch[column]).as_py() for path in shards for batch in read_batches(path))
    return min((value for value in values if value is not None), default=0.0)


def _with_ends(
    ids: Sequence[int], tokenizer: Tokenizer, dtype: type[np.unsignedinteger]
) -> np.ndarray:
    head = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return np.array([*head, *ids, tokenizer.eos_id], dtype)


def _check_column(name: str, shards: Sequence[Path]) -> None:
    found = [set(read_batches(path)[0].schema.names) for path in shards]
    names = sorted(set[str]().union(*found))
    if any(name not in own for own in found):
        raise ConfigError(
            f"store.by and store.scores take `source` or a label that a step adds, and {name!r} is "
            f"none of these documents'{nearest(name, names)}; they have {', '.join(names)}"
        )


def _fraction(name: str) -> float:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)
