"""Where documents come from: text, JSONL, Parquet, trees of code, and Python's own library.

Every source is an iterator of Document | Dropped: a record that cannot be used becomes a Dropped
with its reason; a file that cannot be used at all raises DataError.
"""

from __future__ import annotations

import ast
import gzip
import importlib
import io
import json
import os
import sysconfig
import tokenize
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stepwell.types import DataError, Document, Dropped, nearest

Item = Document | Dropped

CODE_SUFFIXES = (
    ".c", ".cc", ".cpp", ".cs", ".go", ".h", ".hpp", ".java", ".js", ".jl", ".kt", ".lua", ".php",
    ".pl", ".py", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts",
)  # fmt: skip
TEXT_SUFFIXES = (".txt", ".md", ".rst")
ROW_SUFFIXES = (
    ".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz", ".parquet",
)  # fmt: skip
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
PARQUET_ROWS = 256


@dataclass(frozen=True)
class Record:
    """One row of a JSONL or Parquet file, with an id that names its place."""

    id: str
    values: Mapping[str, Any]


def text_files(paths: Iterable[str | Path], source: str | None = None) -> Iterator[Item]:
    """One document a UTF-8 file; a Python file is read in the encoding it declares. Raises
    DataError for a missing or empty file."""
    for path in map(Path, paths):
        content = _read_bytes(path)
        if not content:
            raise DataError(f"{path} is empty")
        yield _decoded(
            str(path), source or path.stem, content, _encoding(path, content), {"path": str(path)}
        )


def records(path: str | Path) -> Iterator[Record | Dropped]:
    """The rows of a `.jsonl`, `.jsonl.gz` or `.parquet` file.

    Raises DataError for a missing, empty or damaged file and an unknown kind of file.
    """
    path = Path(path)
    _check_file(path)
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from _parquet_records(path)
    elif name.endswith(ROW_SUFFIXES):
        yield from _json_records(path)
    else:
        raise DataError(
            f"{path} is of no known kind: rows are read from .jsonl, .jsonl.gz and .parquet, texts "
            f"from {', '.join(TEXT_SUFFIXES)} and source files such as .py"
        )


def rows(
    path: str | Path,
    text_column: str = "text",
    id_column: str = "id",
    source: str | None = None,
) -> Iterator[Item]:
    """Documents from JSONL or Parquet. The source's name is `source`, else the row's own
    `source` column, else the file's stem; other columns become the document's meta.

    Raises DataError as `records` does, and for a Parquet file without `text_column`.
    """
    path = Path(path)
    if path.name.lower().endswith(".parquet"):
        _check_file(path)
        _check_column(path, text_column)
    for record in records(path):
        if isinstance(record, Dropped):
            yield Dropped(record.id, source or record.source, record.reason, record.detail)
            continue
        yield _document(record, text_column, id_column, source, path)


def source_tree(
    root: str | Path,
    source: str | None = None,
    suffixes: Sequence[str] = CODE_SUFFIXES + TEXT_SUFFIXES,
    skip: frozenset[str] = SKIPPED_FOLDERS,
) -> Iterator[Item]:
    """One document a file of code or text below `root`, in sorted order; folders that are
    hidden or named in `skip` are passed over, as are links. A Python file is read in the encoding
    it declares.

    Raises DataError for a missing folder and one without such files.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"there is no folder {root}")
    name = source or root.name
    empty = True
    for path in _walk(root, skip):
        if path.suffix.lower() not in suffixes:
            continue
        empty = False
        relative = path.relative_to(root).as_posix()
        try:
            content = path.read_bytes()
        except OSError as error:
            yield Dropped(relative, name, "unreadable", str(error.strerror))
            continue
        yield _decoded(relative, name, content, _encoding(path, content), {"path": relative})
    if empty:
        raise DataError(
            f"{root} holds no files that end in {', '.join(suffixes)}; files of rows (.jsonl, "
            ".jsonl.gz, .parquet) are named one by one"
        )


def stdlib_code(source: str = "stdlib-code") -> Iterator[Item]:
    """The Python standard library's `.py` files without its tests and installed packages."""
    return source_tree(
        sysconfig.get_path("stdlib"), source, (".py",), SKIPPED_FOLDERS | TEST_FOLDERS
    )


def stdlib_prose(source: str = "stdlib-prose") -> Iterator[Item]:
    """Python's language reference as shipped for `help()` (`pydoc_data.topics`), a document a
    topic, then the docstrings of the standard library, a document a module."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for topic, text in sorted(topics.items()):
        yield checked(f"topics/{topic}", text, source, {"topic": topic})
    for item in stdlib_code(source):
        if isinstance(item, Dropped) or item.id == "pydoc_data/topics.py":
            continue  # stdlib_code says why it dropped a file
        module = item.id.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        try:
            text = docstrings(item.text, module)
        except (SyntaxError, ValueError, RecursionError) as error:
            yield Dropped(f"docstrings/{module}", source, "syntax_error", str(error))
            continue
        if text:
            yield checked(f"docstrings/{module}", text, source, {"module": module})
        else:
            yield Dropped(f"docstrings/{module}", source, "no_docstrings")


def docstrings(code: str, module: str) -> str:
    """The docstrings of a module, its classes and functions, each under its name, in order.

    Raises SyntaxError for what Python cannot parse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in other people's strings
        tree = ast.parse(code)
    parts: list[str] = []
    pending: list[tuple[str, ast.AST]] = [(module, tree)]
    while pending:
        name, node = pending.pop()
        text = ast.get_docstring(node)  # type: ignore[arg-type]
        if text and text.strip():
            parts.append(f"{name}\n\n{text.strip()}")
        inner = [
            (f"{name}.{child.name}", child)
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        pending += reversed(inner)
    return "\n\n\n".join(parts)


def kind_of(value: Any) -> str:
    """What a JSON or Parquet value is, in words."""
    words = {bool: "a truth value", int: "an integer", float: "a number", str: "text"}
    words |= {list: "a list", dict: "an object", type(None): "nothing (null)"}
    return words.get(type(value), f"of type {type(value).__name__}")


def checked(doc_id: str, text: Any, source: str, meta: Mapping[str, Any] | None = None) -> Item:
    """A document, or the reason why `text` cannot be one."""
    if not isinstance(text, str):
        return Dropped(doc_id, source, "wrong_type", f"the text is {kind_of(text)}")
    if not text.strip():
        return Dropped(doc_id, source, "empty")
    if "\x00" in text:
        return Dropped(doc_id, source, "nul_character", f"first at character {text.index(chr(0))}")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return Dropped(doc_id, source, "undecodable", str(error))
    return Document(doc_id, text, source, meta or {})


def _document(
    record: Record, text_column: str, id_column: str, source: str | None, path: Path
) -> Item:
    values = dict(record.values)
    name = source or values.get("source")
    name = name if isinstance(name, str) and name else _stem(path)
    own_id = values.pop(id_column, None)
    doc_id = record.id if own_id is None else str(own_id)
    if text_column not in values:
        hint = nearest(text_column, values) or f"; the row has {', '.join(values) or 'nothing'}"
        return Dropped(doc_id, name, "missing_column", f"no {text_column!r}{hint}")
    text = values.pop(text_column)
    values.pop("source", None)
    meta = values.pop("meta", None)
    meta = {**meta, **values} if isinstance(meta, Mapping) else values
    return checked(doc_id, text, name, meta)


def _json_records(path: Path) -> Iterator[Record | Dropped]:
    name = _stem(path)
    number = 0
    try:
        with _open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                yield _json_record(line, f"{path.name}:{number}", name)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read after line {number}: {error}") from error
    if number == 0:
        raise DataError(f"{path} is empty")


def _json_record(line: bytes, place: str, name: str) -> Record | Dropped:
    try:
        text = line.decode("utf-8-sig" if place.endswith(":1") else "utf-8")
    except UnicodeDecodeError as error:
        return Dropped(place, name, "undecodable", str(error))
    if not text.strip():
        return Dropped(place, name, "blank_line")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Dropped(place, name, "broken_json", str(error))
    if not isinstance(values, dict):
        return Dropped(place, name, "wrong_type", f"the line holds {kind_of(values)}")
    return Record(place, values)


def _parquet_records(path: Path) -> Iterator[Record | Dropped]:
    import pyarrow

    file = _parquet_file(path)
    number = 0
    try:
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            for values in batch.to_pylist():
                number += 1
                yield Record(f"{path.name}:{number}", values)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read after row {number}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} holds text that is not UTF-8 near row {number}") from error
    if number == 0:
        raise DataError(f"{path} holds no rows")


def _parquet_file(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is not a Parquet file that can be read: {error}") from error


def _check_column(path: Path, column: str) -> None:
    names = _parquet_file(path).schema_arrow.names
    if column not in names:
        raise DataError(
            f"{path} has no column {column!r}{nearest(column, names)}; it has {', '.join(names)}"
        )


def _decoded(
    doc_id: str, source: str, content: bytes, encoding: str | None, meta: Mapping[str, Any]
) -> Item:
    try:
        text = content.decode(encoding or "utf-8")
    except (UnicodeDecodeError, LookupError) as error:
        return Dropped(doc_id, source, "undecodable", str(error))
    return checked(doc_id, text.removeprefix("\ufeff"), source, meta)


def _encoding(path: Path, content: bytes) -> str | None:
    """UTF-8, or what a Python file declares (PEP 263)."""
    if path.suffix != ".py":
        return "utf-8"
    try:
        return tokenize.detect_encoding(io.BytesIO(content).readline)[0]
    except SyntaxError:
        return None


def _walk(root: Path, skip: frozenset[str]) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(d for d in subfolders if d not in skip and not d.startswith("."))
        for name in sorted(files):
            path = Path(folder) / name
            if not path.is_symlink():
                yield path


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name the file in it")
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _open_bytes(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _stem(path: Path) -> str:
    return path.name.split(".")[0]
