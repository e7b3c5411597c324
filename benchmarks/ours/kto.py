"""Stepwell: KTO, 8 labelled answers a step."""

from __future__ import annotations

from contextlib import suppress

from benchmarks.ours.preference import train
from benchmarks.protocol import Finished

if __name__ == "__main__":
    with suppress(Finished):
        train("kto", "rows")
