"""Why a document of a curation is not in its output, in words for people.

Reads what a curation leaves: `removed/*.parquet` (REMOVED, with or without texts), `documents/`,
`edits/*.parquet` (EDITS) and `recipe.toml`.
"""

from __future__ import annotations

import json
import re
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
from stepwell.data.decontam.index import item_text
from stepwell.data.dedup.index import document_names
from stepwell.data.dedup.verify import jaccard_of_texts
from stepwell.types import DataError, nearest

pc: Any = pyarrow.compute
DEFAULT_NGRAM = 5
# Of a comparison: words read, words shown beside a difference, differences shown.
WINDOW_WORDS, CONTEXT_WORDS, NUM_DIFFERENCES = 2000, 6, 6
EXCERPT_CHARACTERS, NUM_LISTED = 300, 20
NUM_IDS = 10_000
NUM_PLACES = 5

Row = dict[str, Any]


def explain(folder: str | Path, doc_id: str) -> str:
    """What became of all documents with this id (or `source/id`): for one that was removed what it
    repeats, their similarity now, and where they differ; for one that was kept which ones it
    stands for, and for both what was cut out of them.

    Raises DataError when the folder holds no curation, or the id is nowhere in it.
    """
    folder = Path(folder)
    if not (folder / "removed").is_dir():
        raise DataError(f"{folder} has no folder `removed`; name the output of a curation")
    removed, kept = _removed_rows(folder, doc_id), _kept_rows(folder, doc_id)
    if not removed and not kept:
        near = nearest(doc_id, islice(_ids(folder), NUM_IDS))
        raise DataError(f"no document of {folder} has the id {doc_id!r}{near}")
    parts = [_why(row, folder) for row in removed] + [_stands_for(row, folder) for row in kept]
    edits = _edits(folder, doc_id)
    if edits:
        parts.append("\n".join(edits))
    if len(removed) + len(kept) > 1:
        parts.insert(0, f"{len(removed) + len(kept)} documents have the id {doc_id!r}:")
    return "\n\n".join(parts)


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
    """A document that was removed."""
    detail = f" ({row['detail']})" if row["detail"] else ""
    lines = [f"{_name(row)} was removed by {row['step']}: {row['reason']}{detail}"]
    witness = row["witness"]
    if not witness:
        return "\n".join([*lines, *_excerpt(row.get("text"))])
    if row["reason"].startswith("contaminated_"):
        lines.append(f"it holds the item {witness} of a benchmark")
        return "\n".join([*lines, *_item(row, folder)])
    lines.append(f"it repeats {witness}")
    found = [(r, "which was kept") for r in _kept_rows(folder, witness) if _name(r) == witness]
    found += [
        (r, f"which stayed then, and was removed later by {r['step']}: {r['reason']}")
        for r in _removed_rows(folder, witness)
        if _name(r) == witness and r != row
    ]
    if not found:
        return "\n".join([*lines, f"which is not in this folder{_of_index(witness, folder)}"])
    texts = [other for other, _ in found if other.get("text") is not None]
    if row.get("text") is None or not texts:
        lines += [fate for _, fate in found]
        return "\n".join([*lines, "(the texts were not kept, so they can't be compared)"])
    ngram = _ngram(folder)
    values = [jaccard_of_texts(row["text"], other.get("text") or "", ngram) for other, _ in found]
    best = _fitting(values, row["detail"])
    if len(found) > 1:
        lines.append(f"of {len(found)} documents with this id the one whose similarity fits best,")
    lines.append(found[best][1])
    lines.append(f"as both are stored, J = {values[best]:.3f} on {ngram}-grams of words")
    shown = differences(row["text"], found[best][0].get("text") or "")
    return "\n".join([*lines, f"- {_name(row)}", f"+ {witness}", *shown])


def _fitting(values: Sequence[float], detail: str) -> int:
    """Which similarity is nearest to the one that was found when the document went (`J = 0.9`),
    else which is greatest."""
    told = re.fullmatch(r"J = (\d\.\d+)", detail)
    wanted = float(told[1]) if told else 1.0
    return min(range(len(values)), key=lambda i: abs(values[i] - wanted))


def _item(row: Row, folder: Path) -> list[str]:
    """What the item asks, if an index of the recipe can be read."""
    paths = [step["index"] for step in _steps(folder) if step["kind"] == "decontaminate"]
    told = []
    for path in paths:
        try:
            text = item_text(path, row["witness"])
        except DataError as error:
            told.append(f"(its text can't be shown: {error})")
            continue
        if text is not None:
            return [f"its text: {_shortened(text)}"]
    return told


def _of_index(witness: str, folder: Path) -> str:
    """Which index of the recipe has a document of this name."""
    for step in _steps(folder):
        for path in step.get("against", []):
            try:
                names = document_names(path)
            except DataError:
                continue
            if witness in names:
                return f": it is of the index {path}"
    return " (nor in an index of its recipe that can be read)"


def _edits(folder: Path, doc_id: str) -> list[str]:
    """What was cut out of documents with this id, a line for each step and reason."""
    spans: dict[tuple[str, str, str], list[Row]] = {}
    for row in _rows(sorted((folder / "edits").glob("*.parquet")), doc_id):
        spans.setdefault((_name(row), row["step"], row["reason"]), []).append(row)
    lines = []
    for (name, step, reason), rows in spans.items():
        rows.sort(key=lambda row: row["start"])
        cut = sum(row["stop"] - row["start"] for row in rows)
        put = sum(len(row["replacement"]) for row in rows)
        places = ", ".join(f"{row['start']} to {row['stop']}" for row in rows[:NUM_PLACES])
        places += f" and {len(rows) - NUM_PLACES} more" if len(rows) > NUM_PLACES else ""
        instead = f" and got {put} instead" if put else ""
        lines.append(
            f"{name} lost {cut} characters{instead} by {step}: {reason} (characters {places} of "
            "its text then)"
        )
    return lines


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


def _removed_rows(folder: Path, doc_id: str) -> list[Row]:
    return _rows(sorted((folder / "removed").glob("*.parquet")), doc_id)


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
    ngrams = [s.get("ngram", DEFAULT_NGRAM) for s in _steps(folder) if s["kind"] == "fuzzy-dedup"]
    return ngrams[0] if ngrams else DEFAULT_NGRAM


def _steps(folder: Path) -> list[Row]:
    """Of the recipe."""
    path = folder / "recipe.toml"
    return tomllib.loads(path.read_text("utf-8")).get("steps", []) if path.exists() else []


def _name(row: Row) -> str:
    return name_of(row["source"], row["id"])


def _abridged(words: Sequence[str]) -> str:
    if len(words) <= 2 * CONTEXT_WORDS:
        return " ".join(words)
    head, tail = words[:CONTEXT_WORDS], words[-CONTEXT_WORDS:]
    return f"{' '.join(head)} [{len(words) - 2 * CONTEXT_WORDS} words] {' '.join(tail)}"


def _excerpt(text: str | None) -> list[str]:
    return [f"it begins: {_shortened(text)}"] if text and text.strip() else []


def _shortened(text: str) -> str:
    plain = " ".join(text[: 2 * EXCERPT_CHARACTERS].split())
    return plain[:EXCERPT_CHARACTERS] + ("..." if len(text) > EXCERPT_CHARACTERS else "")
