"""What the ranks of a local launch write, kept in files that have no name and so end with us."""

from __future__ import annotations

import os
import tempfile
from typing import IO

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs


class UnnamedLogs(LogsSpecs):
    """Standard output and error of every rank but 0, which writes to the console."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[tuple[int, str], IO[bytes]] = {}

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        console, nowhere = dict.fromkeys(envs, ""), dict.fromkeys(envs, os.devnull)
        for environ in envs.values():
            environ["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(
            stdouts=console | {rank: self._path(rank, "stdout") for rank in envs if rank},
            stderrs=console | {rank: self._path(rank, "stderr") for rank in envs if rank},
            error_files=nowhere,
        )

    def written(self, rank: int) -> list[str]:
        """The lines of this rank's standard output, then of its standard error."""
        text = b""
        for stream in ("stdout", "stderr"):
            file = self._files.get((rank, stream))
            if file is not None:
                file.seek(0)
                text += file.read()
        return text.decode("utf-8", "replace").splitlines()

    def _path(self, rank: int, stream: str) -> str:
        file = self._files[rank, stream] = tempfile.TemporaryFile()  # noqa: SIM115
        return f"/dev/fd/{file.fileno()}"
