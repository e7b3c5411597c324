"""A table of measured runs as a file: its columns, its rows, and why some cannot be used. No torch.

The form is that of `data/published_runs.csv` (docs/planner-calibration.md). A bad table is refused
whole, a bad row is kept with its reason.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib import resources
from io import StringIO
from pathlib import Path

from stepwell.plan.calibration.cells import Cells
from stepwell.plan.calibration.facts import FACTS, OTHERS
from stepwell.plan.calibration.published import MEASURED, OPTIONAL, Published, read_row
from stepwell.types import ConfigError, DataError, nearest

REQUIRED = (
    "id", "model_name", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "mlp_kind",
    "vocab", "seq_len", "gpu", "n_gpus", "tp", "pp", "cp", "ep", "micro_batch",
    "global_batch_sequences", "precision", "activation_checkpointing", "attention",
)  # fmt: skip
# Of the shipped table, for people: nothing follows from them.
FOR_PEOPLE = (
    "source", "tflops_per_gpu", "mfu_pct", "flops_convention", "attn_flops", "recompute_counted",
)  # fmt: skip
READ = {*REQUIRED, *MEASURED, *FOR_PEOPLE, *OPTIONAL, *FACTS, *OTHERS}
NO_TEXT = "is no text in UTF-8; save it as CSV in UTF-8"
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True)
class Table:
    """`skipped`: row id -> why it cannot be used. unread: columns that nothing looks at."""

    runs: tuple[Published, ...]
    skipped: dict[str, str]
    unread: tuple[str, ...] = ()

    def reasons(self) -> dict[str, int]:
        """Reason -> number of rows; values in reasons are left out, so that like adds up. `skipped`
        has them whole."""
        return dict(Counter(like(why) for why in self.skipped.values()))


def like(text: str) -> str:
    """Without its values: quoted words, and numbers that are no part of a name."""
    return re.sub(r"(?<![\w.-])\d+(?:[.,]\d+)*(?:e[+-]?\d+)?(?![\w-])", "…", unquoted(text))


def unquoted(text: str) -> str:
    return re.sub(r"'[^']*'", "…", text)


def shipped_table() -> Path:
    """The table that the planner's coefficients were fitted to."""
    return Path(
        str(resources.files("stepwell.plan.calibration").joinpath("data", "published_runs.csv"))
    )


def measurement(run: Published) -> Hashable:
    """What was run, and what it gave: equal ones are one measurement, whatever they are called."""
    return run.job, run.step_s, run.peak_bytes


def shipped_measurements() -> set[Hashable]:
    return {measurement(run) for run in read_runs(shipped_table())}


def read_runs(path: str | Path) -> list[Published]:
    """The rows of `read_table` that can be used."""
    return list(read_table(path).runs)


def read_table(path: str | Path) -> Table:
    """Raises DataError if the file is not there, is not text, has no rows, or lacks columns, naming
    them. Names of columns may be in capitals. A row that is there twice, cell by cell, counts
    once."""
    lines = _lines(path)
    if not lines:
        raise DataError(f"{path} is empty; the first line must name the columns")
    columns = [name.strip().casefold() for name in lines[0][1]]
    _check_columns(str(path), columns)
    if len(lines) == 1:
        raise DataError(f"{path} has columns but no rows")
    runs, skipped = list[Published](), dict[str, str]()
    names, known = set[str](), dict[tuple[str, ...], int]()
    for number, line in lines[1:]:
        cells = {name: cell.strip() for name, cell in zip(columns, line, strict=False)}
        row_id = cells.get("id") or f"line {number}"
        if row_id in names:
            row_id = f"{row_id} (line {number})"
        names.add(row_id)
        first = known.setdefault(tuple(cells.values()), number)
        try:
            if first != number:
                raise DataError(f"the row of line {first} once more")
            runs.append(_row(cells, row_id, columns, line))
        except (ConfigError, DataError) as error:
            skipped[row_id] = str(error)
    unread = [name for name in columns if name and name not in READ]
    return Table(tuple(runs), skipped, tuple(unread))


def _lines(path: str | Path) -> list[tuple[int, list[str]]]:
    """With their numbers."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            text = file.read()
        if "\0" in text:
            raise DataError(f"{path} {NO_TEXT}")
        reader = csv.reader(StringIO(text, newline=""))
        return [(reader.line_num, line) for line in reader if line]
    except FileNotFoundError as error:
        raise DataError(f"there is no table {path}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} {NO_TEXT}") from error
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error


def _row(cells: Cells, row_id: str, columns: Sequence[str], line: Sequence[str]) -> Published:
    if len(line) != len(columns):
        raise DataError(f"cells: {len(line)}, columns: {len(columns)}")
    return read_row(cells, row_id)


def _check_columns(path: str, columns: Sequence[str]) -> None:
    for separator, words in OTHER_SEPARATORS.items():
        if len(columns) == 1 and separator in columns[0]:
            raise DataError(f"{path} separates its columns by {words}; commas are needed")
    if twice := [name for name, times in Counter(columns).items() if name and times > 1]:
        raise DataError(f"{path} has the columns {', '.join(twice)} twice")
    unknown = [name for name in columns if name not in READ]
    if missing := [name for name in REQUIRED if name not in columns]:
        named = ", ".join(f"{name}{nearest(name, unknown)}" for name in missing)
        raise DataError(f"{path} lacks the columns {named}")
    if not any(name in columns for name in MEASURED):
        raise DataError(f"{path} has no measured column: one of {', '.join(MEASURED)} is needed")
