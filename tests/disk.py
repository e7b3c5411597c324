"""A disk that takes no more, for tests."""

import resource
from contextlib import contextmanager


@contextmanager
def largest_file(num_bytes):
    """No file of this process's grows beyond so many bytes; a write that would is an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
