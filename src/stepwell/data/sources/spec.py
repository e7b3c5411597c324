"""What to read, and in which pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from stepwell.schema import Positive, Section

Kind = Literal["auto", "text", "code", "rows", "html", "warc"]
MIB = 2**20


class SourceSpec(Section):
    """name: the documents' `source`. path: files, folders or globs (`**` goes into folders), or
    stdlib-code and stdlib-prose for Python's own library. kind: how files are read; auto goes by
    their suffix. text_column, id_column: of rows. split: of a Hugging Face folder: the one to read,
    or "all". encoding: of text and code that is neither UTF-8 nor starts with a byte order mark.
    max_docs: documents to read, in reading order; none: all. about, licence: what the source is,
    and on which terms; a datasheet shows them.

    max_document_bytes: a line, record, page or file above it is dropped, and never held whole.
    max_compression_ratio: a file that unpacks to more than this many times its size (and to more
    than 64 MiB) is read as far as that.
    """

    name: Annotated[str, Field(strict=True, min_length=1)]
    path: str | tuple[str, ...]
    kind: Kind = "auto"
    text_column: str = "text"
    id_column: str = "id"
    split: str | None = None
    encoding: str | None = None
    max_docs: Positive | None = None
    about: str | None = None
    licence: str | None = None
    max_document_bytes: Positive = 64 * MIB
    max_compression_ratio: Positive = 250

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str | None) -> str | None:
        try:
            "".encode(value or "utf-8")
        except LookupError:
            raise ValueError(
                f"{value!r} is no encoding that Python knows; latin-1 and utf-16 are two"
            ) from None
        return value

    @model_validator(mode="after")
    def _split_needs_rows(self) -> Self:
        if self.split is not None and self.kind not in ("auto", "rows"):
            raise ValueError(
                f"split = {self.split!r} chooses among files of rows, and kind = {self.kind!r} "
                "reads none; leave one of them out, or set kind = 'rows'"
            )
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


@dataclass(frozen=True)
class Piece:
    """Part of a source that can be read by itself, in any process.

    path: the file. name: what its documents' ids begin with, unique within the source. kind: how it
    is read (`jsonl`, `parquet`, `text`, `code`, `html`, `warc`, `stdlib-code`, `stdlib-prose`), or
    `dropped` for a file that is not read. start, stop: which part: bytes of a plain `.jsonl` file,
    row groups of a `.parquet` file, else all of it. reason, detail: why it is dropped.
    """

    path: str
    name: str
    kind: str
    start: int = 0
    stop: int = 0
    size_bytes: int = 0
    reason: str = ""
    detail: str = ""
