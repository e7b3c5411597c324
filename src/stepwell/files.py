"""Files that are whole or as they were: written under a temporary name, then renamed. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to, which takes its name when the block ends without error.
    Otherwise it is removed, and `path` is as it was. An OSError always names a file: a full disk's
    does not by itself."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """The file with this text, in UTF-8, or as it was before."""
    with whole_file(path) as temporary:
        temporary.write_text(text, "utf-8")
