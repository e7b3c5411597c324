"""Where a curation's parts lie in its work folder, and which of them are done.

s00/00003/ is task 3 of stage 0, d00/ the decision after it. Both are there in whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from stepwell.data.files import remove_leftovers


def stage_folder(work: Path, stage: int) -> Path:
    return work / f"s{stage:02d}"


def decision_folder(work: Path, stage: int) -> Path:
    return work / f"d{stage:02d}"


def task_folder(work: Path, stage: int, number: int) -> Path:
    return stage_folder(work, stage) / f"{number:05d}"


def shards_of(work: Path, stage: int) -> list[Path]:
    """What a stage has written, in reading order: the tasks of the next one."""
    tasks = sorted(stage_folder(work, stage).glob("[0-9]*"), key=lambda path: int(path.name))
    return [path for task in tasks for path in sorted(task.glob("documents-*.arrow"))]


def is_done(work: Path, stage: int, number: int) -> bool:
    return task_folder(work, stage, number).exists()


def beside(documents: Path, name: str) -> Path:
    """The file of another name that belongs to a file of documents."""
    return documents.with_name(documents.name.replace("documents", name))


class whole:
    """A folder that gets its name when the block has ended well. Another process may have been
    faster: its output is the same."""

    def __init__(self, target: Path):
        self._target = target
        self._temporary = target.with_name(f".{target.name}.tmp{os.getpid()}")

    def __enter__(self) -> Path:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            try:
                os.rename(self._temporary, self._target)
                return
            except OSError:
                if not self._target.exists():
                    raise
        shutil.rmtree(self._temporary, ignore_errors=True)


def remove_unfinished(work: Path) -> None:
    """Removes what killed processes of this machine left under temporary names."""
    for path in [*work.glob(".*.tmp*"), *work.glob("s[0-9]*/.*.tmp*")]:
        remove_leftovers(path.with_name(path.name[1:].rpartition(".tmp")[0]))
