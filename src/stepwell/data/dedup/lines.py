"""Line and paragraph deduplication: what many documents repeat is kept in the first of them only.

As CCNet (1911.00359, section 3.1, paragraphs by 64-bit hashes), C4 (1910.10683, spans of three
sentences), RefinedWeb (2306.01116, line-wise corrections) and Dolma (2402.00159, paragraphs) do.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import xxhash

from stepwell.data.batches import Outcome, texts_of
from stepwell.data.dedup.counting import (
    document_order,
    found_at,
    names_at,
    repeated_hashes,
)
from stepwell.data.dedup.cuts import Cuts, cut_out, merged
from stepwell.data.dedup.exact import normalise
from stepwell.data.dedup.survivor import rank_columns
from stepwell.data.steps import GlobalStep, Shard, read_batches, read_table, write_table
from stepwell.schema import NonNegative, Positive

Mode = Literal["line", "paragraph"]
Matching = Literal["spaces", "ccnet"]

BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
DIGIT = re.compile(r"\d")
PUNCTUATION = str.maketrans("", "", string.punctuation + "’‘“”«»„…–—·•¿¡、。，：；！？「」")


class LineDedup(GlobalStep):
    """Cuts the lines or paragraphs that more than `max_documents` documents hold from all of them
    but the first by (source, id), which keeps every copy of its own.

    max_documents counts documents, not occurrences: what one document repeats is left alone.
    min_characters: of a line after normalising; shorter ones (`}`, `return None`) are never cut.
    match: `spaces` compares with white space collapsed, `ccnet` also without case, accents and
    punctuation and with every digit as 0.
    min_kept_characters: a document that lost something and holds fewer is removed, unless what it
    holds was cut elsewhere because it's here (so no text is lost).
    """

    kind: Literal["line-dedup"] = "line-dedup"
    mode: Mode = "paragraph"
    max_documents: Positive = 1
    min_characters: NonNegative = 40
    match: Matching = "spaces"
    min_kept_characters: NonNegative = 50

    def sketch(self, batch: pa.RecordBatch) -> Mapping[str, np.ndarray | pa.Array]:
        """units: the distinct hashes of a document's lines or paragraphs."""
        hashes = [np.unique(self._hashes(text)[1]) for text in texts_of(batch)]
        offsets = np.cumsum([0, *map(len, hashes)])
        values = np.concatenate([np.empty(0, np.uint64), *hashes])
        units = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))
        return {**rank_columns(batch, ()), "units": units}

    def decide(self, shards: Sequence[Shard], folder: Path) -> None:
        """Writes the hashes to cut with the key of the document that keeps them, and its name."""
        order = document_order(shards)
        columns = [[b["units"] for b in read_batches(shard.sketch)] for shard in shards]
        total = sum(len(column.flatten()) for one in columns for column in one)
        chunks = (
            (column.flatten().to_numpy(), np.repeat(ranks, column.value_lengths().to_numpy()))
            for one, all_ranks in zip(columns, order.ranks, strict=True)
            for column, ranks in zip(one, _cut(all_ranks, list(map(len, one))), strict=True)
        )
        hashes, counts, firsts = repeated_hashes(chunks, total, folder)
        many = counts > self.max_documents
        owners, owner = np.unique(firsts[many], return_inverse=True)
        decision = {"hash": hashes[many], "owner": owner.astype(np.uint32)}
        write_table(pa.table(decision), folder / "cut.arrow")
        names = pa.table({"key": order.key[owners], "name": names_at(shards, order, owners)})
        write_table(names, folder / "owners.arrow")
        summary = {
            "distinct_repeated": int(many.sum()),
            "copies_cut": int((counts[many] - 1).sum()),
            "documents": len(order.key),
        }
        (folder / "summary.json").write_text(json.dumps(summary), "utf-8")

    def apply(self, batch: pa.RecordBatch, folder: Path) -> Outcome:
        table, owners = read_table(folder / "cut.arrow"), read_table(folder / "owners.arrow")
        cut_hashes, owner_of = table["hash"].to_numpy(), table["owner"].to_numpy()
        owner_keys = owners["key"].to_numpy()
        cuts: list[Cuts | None] = []
        for key, text in zip(batch["key"].to_pylist(), texts_of(batch), strict=True):
            spans, hashes = self._hashes(text)
            at = found_at(hashes, cut_hashes)
            found = np.flatnonzero(at >= 0)
            owner = owner_of[at[found]]
            own = owner_keys[owner] == key
            gone = found[~own]
            witness = owners["name"][int(owner[~own][0])].as_py() if len(gone) else ""
            lost = merged([spans[i] for i in gone])
            cuts.append(Cuts(lost, is_needed=bool(own.any()), witness=witness))
        return cut_out(batch, self.kind, self.mode, cuts, self.min_kept_characters)

    def _hashes(self, text: str) -> tuple[list[tuple[int, int]], np.ndarray]:
        return unit_hashes(text, self.mode, self.min_characters, self.match)


def unit_hashes(
    text: str, mode: Mode, min_characters: int, match: Matching = "spaces"
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """(start, stop) of the lines or paragraphs of at least min_characters, with what ends them, and
    their hashes (uint64). Two different ones among n share a hash with probability n^2 / 2^65."""
    spans, hashes = [], []
    for start, stop in units(text, mode):
        unit = normalise(text[start:stop])
        unit = unit if match == "spaces" else ccnet_normalise(unit)
        if unit and len(unit) >= min_characters:
            spans.append((start, stop))
            hashes.append(xxhash.xxh3_64_intdigest(unit.encode()))
    return spans, np.array(hashes, np.uint64)


def units(text: str, mode: Mode) -> list[tuple[int, int]]:
    """(start, stop) of each line with its line feed, or of each paragraph with the blank lines
    after it; together they are the whole text."""
    ends = BLANK_LINES.finditer(text) if mode == "paragraph" else re.finditer("\n", text)
    borders = [0, *(end.end() for end in ends), len(text)]
    return [(a, b) for a, b in pairwise(borders) if a < b]


def ccnet_normalise(text: str) -> str:
    """Lower case, digits as 0, without accents and punctuation (CCNet's `normalize`)."""
    text = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if not _is_accent(c))
    return " ".join(DIGIT.sub("0", text).translate(PUNCTUATION).split())


def _is_accent(character: str) -> bool:
    return unicodedata.category(character) == "Mn"


def _cut(values: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1]) if sizes else []
