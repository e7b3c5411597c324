"""Files as bounded streams of bytes: what is in them may be damaged, hostile, or no file at all."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stepwell.types import DataError

CHUNK_BYTES = 2**20
# What is lost before a fault in the middle of a gzip stream.
GZIP_STEP_BYTES = 2**13
# What 512 compressed bytes become is bounded: blocks of 128 KiB, of 4 bytes each at least.
ZSTD_STEP_BYTES = 512
ZSTD_WINDOW_BYTES = 2**27
# A file may always unpack to this much, whatever its ratio.
FREE_BYTES = 64 * 2**20
PACKED_SUFFIXES = (".gz", ".zst")
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PAR1": "Parquet",
}


class FileFault(DataError):
    """A file that cannot be read, or not to its end. reason: a short stable key."""

    def __init__(self, path: str | Path, reason: str, detail: str):
        super().__init__(f"{path} {detail}")
        self.reason = reason
        self.detail = detail


def shown_name(path: str | Path) -> str:
    """A path as text that is surely UTF-8; bytes that are not are written as `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def open_plain(path: str | Path) -> BinaryIO:
    """A regular file; opening never waits (a FIFO would) nor touches a device.

    Raises FileFault for anything else, and for what this user may not read.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise FileFault(path, "not_a_file", f"is {_kind_of_inode(mode)}, not a file")
        return open(path, "rb", buffering=0)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise FileFault(path, "unreadable_file", f"cannot be opened: {said}") from error


def chunks_of(path: str | Path, max_ratio: int | None = None, start: int = 0) -> Iterator[bytes]:
    """The file's bytes, unpacked if its name ends in .gz or .zst, in chunks of at most a few MiB.

    What was unpacked before a fault is handed out first. start: where a plain file begins. Raises
    FileFault: `truncated_file`, `damaged_file`, `decompression_bomb` (more than max_ratio times
    the file's size and FREE_BYTES), and those of `open_plain`.
    """
    name = str(path).lower()
    with open_plain(path) as file:
        if name.endswith(".gz"):
            unpacked = _gunzipped(path, file)
        elif name.endswith(".zst"):
            unpacked = _unzstd(path, file)
        else:
            file.seek(start)
            yield from _read_chunks(path, file)
            return
        size_bytes = os.fstat(file.fileno()).st_size
        limit = FREE_BYTES + max_ratio * size_bytes if max_ratio else None
        num_bytes = 0
        for chunk in unpacked:
            num_bytes += len(chunk)
            if limit is not None and num_bytes > limit:
                raise bomb(path, max_ratio or 0, size_bytes)
            yield chunk


def bomb(path: str | Path, max_ratio: int, size_bytes: int) -> FileFault:
    """What to raise for a file of size_bytes that unpacks to too much."""
    return FileFault(
        path,
        "decompression_bomb",
        f"unpacks to more than {FREE_BYTES:,} bytes and {max_ratio} times the {size_bytes:,} that "
        "it has; a larger max_compression_ratio reads on",
    )


def without_magic(path: str | Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same chunks, unless they begin as a packed file does: then FileFault."""
    first = next(chunks, b"")
    while 0 < len(first) < 8 and (more := next(chunks, b"")):
        first += more
    for magic, what in MAGIC.items():
        if first.startswith(magic):
            detail = f"holds {what}, which its name doesn't say, or says once too little"
            raise FileFault(path, "packed_content", detail)
    if first:
        yield first
    yield from chunks


def content_of(path: str | Path, max_bytes: int, max_ratio: int | None = None) -> bytes:
    """All of a file. Raises FileFault as `chunks_of` and `without_magic`, `too_large`, and
    `empty_file`."""
    parts: list[bytes] = []
    num_bytes = 0
    for chunk in without_magic(path, chunks_of(path, max_ratio)):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise FileFault(path, "too_large", f"holds more than {max_bytes:,} bytes")
        parts.append(chunk)
    if not num_bytes:
        raise FileFault(path, "empty_file", "is empty")
    return b"".join(parts)


class ChunkStream:
    """Chunks as a file that can be read and told, for libraries that want one."""

    def __init__(self, chunks: Iterator[bytes]):
        self.chunks = chunks
        self.rest = b""
        self.position = 0

    def read(self, size: int = CHUNK_BYTES) -> bytes:
        """At most `size` bytes, fewer where a chunk ends, none at the end."""
        while not self.rest:
            chunk = next(self.chunks, None)
            if chunk is None:
                return b""
            self.rest = chunk
        data, self.rest = self.rest[:size], self.rest[size:]
        self.position += len(data)
        return data

    def tell(self) -> int:
        return self.position


def _read_chunks(path: str | Path, file: BinaryIO, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    try:
        while chunk := file.read(size):
            yield chunk
    except OSError as error:
        raise FileFault(path, "unreadable_file", f"cannot be read: {error.strerror}") from error


def _gunzipped(path: str | Path, file: BinaryIO) -> Iterator[bytes]:
    """All members (RFC 1952); zeros after the last are padding."""
    member = zlib.decompressobj(wbits=31)
    begun = False
    for data in _read_chunks(path, file, GZIP_STEP_BYTES):
        while data:
            if not begun and not (data := data.lstrip(b"\0")):
                break
            begun = True
            try:
                chunk = member.decompress(data, CHUNK_BYTES)
            except zlib.error as error:
                raise FileFault(path, "damaged_file", f"is no sound gzip: {error}") from error
            if chunk:
                yield chunk
            data = member.unused_data if member.eof else member.unconsumed_tail
            if member.eof:
                member, begun = zlib.decompressobj(wbits=31), False
    if begun:
        raise FileFault(path, "truncated_file", "ends in the middle of its gzip stream")


def _unzstd(path: str | Path, file: BinaryIO) -> Iterator[bytes]:
    """All frames (RFC 8878)."""
    import zstandard

    def new_frame() -> zstandard.ZstdDecompressionObj:
        return zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()

    frame, begun = new_frame(), False
    for data in _read_chunks(path, file):
        start = 0
        while start < len(data):
            step = data[start : start + ZSTD_STEP_BYTES]
            begun = True
            try:
                chunk = frame.decompress(step)
            except zstandard.ZstdError as error:
                raise FileFault(path, "damaged_file", f"is no sound Zstandard: {error}") from error
            if chunk:
                yield chunk
            start += len(step)
            if frame.eof:
                start -= len(frame.unused_data)
                frame, begun = new_frame(), False
    if begun:
        raise FileFault(path, "truncated_file", "ends in the middle of its Zstandard stream")


def _kind_of_inode(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "something else")
