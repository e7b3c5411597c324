"""What the ranks of a local launch write, kept in files that have no name and so end with us."""

from __future__ import annotations

import tempfile
from typing import IO


class UnnamedLogs:
    """Standard output and error of every rank but 0, which writes to the console."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[IO[bytes], IO[bytes]]] = {}

    def streams(self, rank: int) -> tuple[IO[bytes] | None, IO[bytes] | None]:
        """Where a rank writes; None: where this process does."""
        if rank == 0:
            return None, None
        files = self._files[rank] = _unnamed(), _unnamed()
        return files

    def written(self, rank: int) -> list[str]:
        """The lines of this rank's standard output, then of its standard error."""
        text = b""
        for file in self._files.get(rank, ()):
            file.seek(0)
            text += file.read()
        return text.decode("utf-8", "replace").splitlines()


def _unnamed() -> IO[bytes]:
    return tempfile.TemporaryFile()
