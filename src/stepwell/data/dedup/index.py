"""What a finished corpus is remembered by, so that later documents that repeat it can go.

A folder: `index.json` (how the sketches were made, checksums) and `sketches.arrow` (a row for each
document that stayed: its name, signature, shingles and set digest).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from stepwell.data.files import file_sha256, new_folder, remove_leftovers, temporary_name
from stepwell.data.steps import read_batches
from stepwell.types import ConfigError, DataError

VERSION = 2
FORMAT = "stepwell dedup index"
ABOUT, SKETCHES = "index.json", "sketches.arrow"


def index_schema(slots: int) -> pa.Schema:
    return pa.schema(
        [
            ("name", pa.string()),
            ("signature", pa.list_(pa.uint32(), slots)),
            ("shingles", pa.large_list(pa.uint64())),
            ("set_digest", pa.binary(16)),
        ]
    )


def save_index(
    path: str | Path, batches: Iterable[pa.RecordBatch], made_with: dict[str, Any]
) -> None:
    """Writes an index, in place of an index of that name (so that a decision can be taken again).

    batches: of `index_schema`; made_with: `FuzzyDedup.made_with`. Raises DataError if something
    else has that name.
    """
    target = check_target(path)
    new, old = target.with_name(f"{target.name}.new"), temporary_name(target)
    remove_leftovers(target)
    for left in (new, old):
        if left.exists():
            shutil.rmtree(left)
    with new_folder(new) as folder:
        num_docs = _write(folder / SKETCHES, batches, index_schema(made_with["slots"]))
        about = {
            "format": FORMAT,
            "version": VERSION,
            "num_docs": num_docs,
            "made_with": made_with,
            "sha256": file_sha256(folder / SKETCHES),
        }
        about["digest"] = _digest(about)
        (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
    if target.exists():  # renamed first: half of an index is none, and would stay in the way
        os.rename(target, old)
    os.rename(new, target)
    if old.exists():
        shutil.rmtree(old)


def check_target(path: str | Path) -> Path:
    """Raises DataError if something that is no index has that name."""
    target = Path(path)
    if target.exists() and not (target / ABOUT).exists():
        raise DataError(
            f"{target} exists and is no dedup index (it has no {ABOUT}); choose another name"
        )
    return target


def load_index(path: str | Path, made_with: dict[str, Any]) -> list[pa.RecordBatch]:
    """The batches, memory-mapped.

    Raises DataError for a folder that is no index or a damaged one, ConfigError where it was made
    otherwise than `made_with`: signatures and shingles could not be compared.
    """
    folder = Path(path)
    if not (folder / ABOUT).is_file() or not (folder / SKETCHES).is_file():
        raise DataError(
            f"against: {folder} is no dedup index; a fuzzy-dedup step with save_index writes one"
        )
    about = _checked(folder)
    for key, value in made_with.items():
        if about["made_with"].get(key) != value:
            raise ConfigError(
                f"against: the index {folder} was made with {key} = "
                f"{about['made_with'].get(key)!r}, the step has {value!r}; set the step's {key} to "
                "the index's, or make the index again"
            )
    return read_batches(folder / SKETCHES)


def document_names(path: str | Path) -> set[str]:
    """`source/id` of the documents of an index. Raises DataError as `load_index` does."""
    return {name for batch in load_index(path, {}) for name in batch["name"].to_pylist()}


def free_name(path: Path) -> str:
    """A name beside `path` that nothing has."""
    return next(
        str(name) for n in count(2) if not (name := path.with_name(f"{path.name}-{n}")).exists()
    )


def _checked(folder: Path) -> dict[str, Any]:
    """What `index.json` says, if all of the index is as it was written."""
    try:
        about = json.loads((folder / ABOUT).read_bytes())
    except ValueError as error:
        raise _damaged(folder / ABOUT) from error
    if not isinstance(about, dict):
        raise _damaged(folder / ABOUT)
    if about.get("version") != VERSION:
        raise DataError(
            f"{folder} is an index of version {about.get('version')!r}, this is version {VERSION}; "
            "make it again from its documents"
        )
    if about.pop("digest", "") != _digest(about):
        raise _damaged(folder / ABOUT)
    if file_sha256(folder / SKETCHES) != about["sha256"]:
        raise _damaged(folder / SKETCHES)
    return about


def _damaged(path: Path) -> DataError:
    return DataError(f"against: {path} is damaged; make the index again from its documents")


def _digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _write(path: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> int:
    num_docs = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write(batch)
            num_docs += batch.num_rows
    return num_docs
