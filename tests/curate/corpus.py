"""A small corpus with something for every step, and the recipe that cleans it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

TEXT = """
the of and to that have with be river stone garden letter morning window silver quiet market bridge
captain forest paper harbour winter music answer travel simple number country water engine leather
station summer village kitchen flower thunder meadow basket
"""
WORDS = TEXT.split()


def sentence(rng: random.Random) -> str:
    words = [rng.choice(WORDS) for _ in range(rng.randint(6, 14))]
    return " ".join(words).capitalize() + "."


def text(seed: int, num_sentences: int = 12) -> str:
    rng = random.Random(seed)
    return "\n".join(sentence(rng) for _ in range(num_sentences))


def write(folder: Path, num_docs: int = 40) -> None:
    """a.jsonl and b.jsonl: good documents; two of `b` repeat ones of `a`, one line is broken, one
    document is short."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, first in (("a", 0), ("b", 1000)):
        rows = [{"id": f"{name}{i}", "text": text(first + i)} for i in range(num_docs)]
        if name == "b":
            rows[3]["text"] = text(5)
            rows[7]["text"] = text(6).replace("\n", "  \n")
            rows[9]["text"] = "Too short."
        lines = [json.dumps(row) for row in rows]
        if name == "b":
            lines.insert(4, "{broken")
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def recipe(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "sources": [{"name": n, "path": str(folder / f"{n}.jsonl")} for n in ("a", "b")],
        "steps": [{"kind": "gopher-quality"}, {"kind": "exact-dedup"}],
        **more,
    }


def rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of the Parquet files of a folder."""
    return [r for path in sorted(folder.glob("*.parquet")) for r in pq.read_table(path).to_pylist()]


def result(out: Path) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """What was kept and what was removed, in an order that shards have no part in."""
    kept = sorted((r["source"], r["id"], r["text"]) for r in rows(out / "documents"))
    names = ("source", "id", "step", "reason", "witness", "text")
    return kept, sorted(tuple(r[n] for n in names) for r in rows(out / "removed"))
