"""Text and code: one document a file."""

from __future__ import annotations

import codecs
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stepwell.data.sources.opening import PACKED_SUFFIXES, content_of, shown_name
from stepwell.data.sources.spec import Piece, SourceSpec
from stepwell.types import DataError, Document, Dropped

Item = Document | Dropped

CODE_SUFFIXES = (
    ".c", ".cc", ".cpp", ".cs", ".go", ".h", ".hpp", ".java", ".js", ".jl", ".kt", ".lua", ".php",
    ".pl", ".py", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts",
)  # fmt: skip
TEXT_SUFFIXES = (".txt", ".md", ".rst")
# Of names and literals, not of texts; some take quadratic time.
NO_TEXT_CODECS = {"idna", "punycode", "unicode_escape", "raw_unicode_escape", "unicode-escape"}
# Longer marks first: UTF-32's begins as UTF-16's does.
MARKS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"), (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip


def text_files(paths: Iterable[str | Path], source: str | None = None) -> Iterator[Item]:
    """One document a UTF-8 file; a Python file is read in the encoding it declares. Raises
    DataError for a missing or empty file."""
    for path in map(Path, paths):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        if not content:
            raise DataError(f"{path} is empty")
        name = shown_name(path)
        yield decoded(
            name, source or path.stem, content, declared_encoding(path, content), {"path": name}
        )


def read_text(piece: Piece, spec: SourceSpec) -> Iterator[Item]:
    """The document of one file of text or code. Raises FileFault."""
    content = content_of(piece.path, spec.max_document_bytes, spec.max_compression_ratio)
    encoding = spec.encoding or declared_encoding(Path(piece.path), content)
    yield decoded(piece.name, spec.name, content, encoding, {"path": piece.name})


def decoded(
    doc_id: str, source: str, content: bytes, encoding: str | None, meta: Mapping[str, Any]
) -> Item:
    """A document of what a file holds. Its byte order mark goes before `encoding`, which goes
    before UTF-8; line ends become those of Unix."""
    mark, marked = next(((m, e) for m, e in MARKS if content.startswith(m)), (b"", None))
    try:
        text = content[len(mark) :].decode(marked or encoding or "utf-8")
    except (UnicodeError, LookupError) as error:
        return Dropped(doc_id, source, "undecodable", str(error))
    return checked(doc_id, unix_lines(text), source, meta)


def unix_lines(text: str) -> str:
    """Line ends of Windows become those of Unix, and so do lone carriage returns where there is no
    other line end (as on Macs of before 2001); beside others they overwrite a line, and stay."""
    text = text.replace("\r\n", "\n")
    return text if "\n" in text else text.replace("\r", "\n")


def declared_encoding(path: Path, content: bytes) -> str | None:
    """What a Python file declares (PEP 263); None: nothing."""
    if unpacked_name(path.name).endswith(".py"):
        try:
            return text_codec(tokenize.detect_encoding(io.BytesIO(content).readline)[0])
        except SyntaxError:
            return None
    return None


def text_codec(label: str | None) -> str | None:
    """The codec that a label means; None where it means none that a text would be written in."""
    try:
        codec = codecs.lookup(label or "")
        "".encode(codec.name)
    except (LookupError, UnicodeError, ValueError):
        return None
    return None if codec.name in NO_TEXT_CODECS else codec.name


def unpacked_name(name: str) -> str:
    """A file's name in lower case, without the .gz or .zst at its end."""
    name = name.lower()
    for suffix in PACKED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


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
