"""Why a document of a curation is not in its output, in words for people.

Reads what a curation leaves: `removed/*.parquet` (REMOVED, with or without texts), `documents/` and
`recipe.toml`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from stepwell.data.batches import name_of
from stepwell.data.dedup.verify import jaccard_of_texts
from stepwell.types import DataError, nearest

pc: Any = pyarrow.compute
DEFAULT_NGRAM = 5
# Of a comparison: words read, words shown beside a difference, differences shown.
WINDOW_WORDS, CONTEXT_WORDS, NUM_DIFFERENCES = 2000, 6, 6
EXCERPT_CHARACTERS, NUM_LISTED = 300, 20
NUM_IDS = 10_000

Row = dict[str, Any]


def explain(folder: str | Path, doc_id: str) -> str:
    """What became of the documents with this id (or `source/id`) and, for a duplicate, what it
    repeats: the kept document, their similarity now, and where they differ.

    Raises DataError when the folder holds no curation, or the id is nowhere in it.
    """
    folder = Path(folder)
    if not (folder / "removed").is_dir():
        raise DataError(f"{folder} has no folder `removed`; name the output of a curation")
    removed = _rows(sorted((folder / "removed").glob("*.parquet")), doc_id)
    if removed:
        return "\n\n".join(_why(row, folder) for row in removed)
    kept = _kept_rows(folder, doc_id)
    if not kept:
        near = nearest(doc_id, islice(_ids(folder), NUM_IDS))
        raise DataError(f"no document of {folder} has the id {doc_id!r}{near}")
    return "\n\n".join(_stands_for(row, folder) for row in kept)


def differences(text: str, other: str) -> list[str]:
    """Where the words of two texts part: lines that begin with `-` (text), `+` (other) or blanks
    (both), from the first difference on, at most NUM_DIFFERENCES of them."""
    a, b = text.split(), other.split()
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    start = max(same - CONTEXT_WORDS, 0)
    a, b = a[start : start + WINDOW_WORDS], b[start : start + WINDOW_WORDS]
    changes = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    lines, shown = [], 0
    for kind, a_from, a_to, b_from, b_to in changes:
        if kind == "equal":
            lines.append(f"  {_abridged(a[a_from:a_to])}")
            continue
        if shown == NUM_DIFFERENCES:
            lines.append("  (and more)")
            break
        shown += 1
        lines += [f"- {_abridged(a[a_from:a_to])}"] * (a_to > a_from)
        lines += [f"+ {_abridged(b[b_from:b_to])}"] * (b_to > b_from)
    return lines if shown else ["  (the same words)"]


def _why(row: Row, folder: Path) -> str:
    name = name_of(row["source"], row["id"])
    detail = f" ({row['detail']})" if row["detail"] else ""
    lines = [f"{name} was removed by {row['step']}: {row['reason']}{detail}"]
    if not row["witness"]:
        return "\n".join([*lines, *_excerpt(row.get("text"))])
    lines.append(f"it repeats {row['witness']}")
    kept = [r for r in _kept_rows(folder, row["witness"]) if _name(r) == row["witness"]]
    gone = _rows(sorted((folder / "removed").glob("*.parquet")), row["witness"])
    gone = [r for r in gone if _name(r) == row["witness"]]
    if kept:
        lines.append("which was kept")
    elif gone:
        lines.append(f"which stayed then, and was removed later by {gone[0]['step']}: "
                     f"{gone[0]['reason']}")  # fmt: skip
    else:
        return "\n".join([*lines, "which is not in this folder (it is of an index or benchmark)"])
    text, other = row.get("text"), (kept or gone)[0].get("text")
    if text is None or other is None:
        return "\n".join([*lines, "(the texts were not kept, so they can't be compared)"])
    ngram = _ngram(folder)
    similarity = jaccard_of_texts(text, other, ngram)
    lines.append(f"as both are stored, J = {similarity:.3f} on {ngram}-grams of words")
    return "\n".join([*lines, f"- {name}", f"+ {row['witness']}", *differences(text, other)])


def _stands_for(row: Row, folder: Path) -> str:
    """A document that was kept."""
    name = _name(row)
    gone = []
    for path in sorted((folder / "removed").glob("*.parquet")):
        table = pq.read_table(path, columns=["id", "source", "step", "detail", "witness"])
        gone += table.filter(pc.equal(table["witness"], name)).to_pylist()
    if not gone:
        return f"{name} was kept; nothing was removed for its sake"
    lines = [f"{name} was kept; {len(gone)} removed documents repeat it:"]
    lines += [f"  {_name(r)} by {r['step']} ({r['detail']})" for r in gone[:NUM_LISTED]]
    more = len(gone) - NUM_LISTED
    return "\n".join([*lines, *([f"  and {more} more"] if more > 0 else [])])


def _kept_rows(folder: Path, doc_id: str) -> list[Row]:
    documents = folder / "documents"
    rows = _rows(sorted(documents.glob("*.parquet")), doc_id)
    for path in sorted(documents.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            rows += [row for row in map(json.loads, lines) if doc_id in (row["id"], _name(row))]
    return rows


def _rows(paths: Sequence[Path], doc_id: str) -> list[Row]:
    """The rows with this id or `source/id`; texts are read only of files that have one."""
    found = []
    for path in paths:
        names = pq.read_table(path, columns=["id", "source"])
        full = pc.binary_join_element_wise(names["source"], names["id"], "/")
        hit = pc.or_(pc.equal(names["id"], doc_id), pc.equal(full, doc_id))
        if pc.any(hit).as_py():
            found += pq.read_table(path).filter(hit).to_pylist()
    return found


def _ids(folder: Path) -> Iterator[str]:
    for path in sorted((folder / "removed").glob("*.parquet")):
        ids: pa.Table = pq.read_table(path, columns=["id"])
        yield from ids["id"].to_pylist()


def _ngram(folder: Path) -> int:
    """Of the recipe's fuzzy dedup."""
    path = folder / "recipe.toml"
    if not path.exists():
        return DEFAULT_NGRAM
    steps = tomllib.loads(path.read_text("utf-8")).get("steps", [])
    ngrams = [step.get("ngram", DEFAULT_NGRAM) for step in steps if step["kind"] == "fuzzy-dedup"]
    return ngrams[0] if ngrams else DEFAULT_NGRAM


def _name(row: Row) -> str:
    return name_of(row["source"], row["id"])


def _abridged(words: Sequence[str]) -> str:
    if len(words) <= 2 * CONTEXT_WORDS:
        return " ".join(words)
    head, tail = words[:CONTEXT_WORDS], words[-CONTEXT_WORDS:]
    return f"{' '.join(head)} [{len(words) - 2 * CONTEXT_WORDS} words] {' '.join(tail)}"


def _excerpt(text: str | None) -> list[str]:
    if not text or not text.strip():
        return []
    plain = " ".join(text[: 2 * EXCERPT_CHARACTERS].split())
    more = "..." if len(text) > EXCERPT_CHARACTERS else ""
    return [f"it begins: {plain[:EXCERPT_CHARACTERS]}{more}"]
