"""How the C library keeps freed memory, for training on the CPU.

glibc hands freed blocks back to the system and takes them anew: every temporary of some megabytes
then costs a page fault for each 4 KiB that it touches.
"""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's names for them (malloc.h)
KEPT_BYTES = 256 * 2**20
LARGEST_KEPT_BYTES = 32 * 2**20  # glibc takes no larger one
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Lets this process keep up to KEPT_BYTES that it has freed, and blocks of up to
    LARGEST_KEPT_BYTES among them. Whether that was done: not where the environment has settings of
    its own (CHOSEN), or where the C library is another one."""
    library = ctypes.CDLL(None)
    if any(name in os.environ for name in CHOSEN) or not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = {TRIM_THRESHOLD: KEPT_BYTES, MMAP_THRESHOLD: LARGEST_KEPT_BYTES}
    return min(library.mallopt(key, value) for key, value in settings.items()) == 1
