"""Freed memory stays with the process: temporaries cost no page faults."""

import os
import subprocess
import sys

import pytest

# A fixed threshold first: by itself glibc raises it as blocks are freed, and how many faults that
# leaves depends on where the top of the heap happens to be.
CODE = """
import ctypes
import resource
import torch
from stepwell.train.heap import MMAP_THRESHOLD, keep_freed_memory

ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 128 * 1024)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def pages():
    before = faults()
    for _ in range(8):
        a, b = torch.ones(6 << 18), torch.ones(6 << 18)  # 6 MiB each
        del a, b
    return faults() - before

pages()
before = pages()
done = keep_freed_memory()
pages()
print(done, before, pages())
"""


def counted(**environment: str) -> tuple[bool, int, int]:
    found = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    done, before, after = found.stdout.split()
    return done == "True", int(before), int(after)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_temporaries_cost_no_page_faults():
    done, before, after = counted()
    assert done
    assert after < 100
    assert before > 10 * max(after, 1)


def test_settings_of_the_environment_stay():
    done, before, after = counted(MALLOC_MMAP_THRESHOLD_="131072")
    assert not done
    assert after >= before / 2 > 0
