"""`python -m benchmarks.loader`: tokens per CPU-second of the pretraining loader on one core, and
what an epoch's order holds in memory.

Two stores of random ids and documents of about 600 tokens (log-normal, as web text has), mixed 0.7
to 0.3, 32 rows a step. CPU time of this process; best of the rounds, because other load can only
slow it down.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from stepwell.data.loader import Order, RowOrder, pretrain_stream
from stepwell.data.store import StoreWriter, TokenStore

ORDERS = ("shuffled", "sequential", "quality-ascending")
SEQ_LENS = (256, 512, 2048, 8192)
ROWS_PER_STEP = 32
WEIGHTS = (0.7, 0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000_000, help="in each store")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="also write the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        stores = [make_store(Path(folder) / str(seed), options.tokens, seed) for seed in (0, 1)]
        rows = [
            measure(stores, seq_len, order, options.rounds)
            for order in ORDERS
            for seq_len in SEQ_LENS
        ]
    print("| order | seq_len | million tokens / CPU-second | order in memory, KiB |")
    print("|-|-|-|-|")
    for row in rows:
        print(
            f"| {row['order']} | {row['seq_len']} | {row['tokens_per_cpu_s'] / 1e6:.1f} "
            f"| {row['order_bytes'] / 1024:,.0f} |"
        )
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def make_store(folder: Path, num_tokens: int, seed: int) -> TokenStore:
    rng = np.random.default_rng(seed)
    left = num_tokens
    with StoreWriter(folder, "0" * 64, 50_000, with_scores=True) as writer:
        while left > 0:
            length = min(left, int(rng.lognormal(6.0, 0.9)) + 1)
            writer.add(rng.integers(0, 50_000, length, dtype=np.uint16), score=rng.random())
            left -= length
    return TokenStore.open(folder)


def measure(stores: list[TokenStore], seq_len: int, order: str, num_rounds: int) -> dict[str, Any]:
    """One row of the table."""
    kind = cast("Order", order)
    stream = pretrain_stream(
        list(zip(stores, WEIGHTS, strict=True)), seq_len, ROWS_PER_STEP, order=kind
    )
    num_steps = max(1, 2_000_000 // (seq_len * ROWS_PER_STEP))
    next(stream)
    best = 0.0
    for _ in range(num_rounds):
        start = time.process_time()
        for _ in range(num_steps):
            next(stream)
        seconds = time.process_time() - start
        best = max(best, num_steps * seq_len * ROWS_PER_STEP / seconds)
    return {
        "order": order,
        "seq_len": seq_len,
        "tokens_per_cpu_s": round(best),
        "order_bytes": order_bytes(stores[0], seq_len, kind),
    }


def order_bytes(store: TokenStore, seq_len: int, order: Order) -> int:
    """Memory at the worst moment while an epoch's order is walked 1,000 rows at a time."""
    tracemalloc.start()
    rows = RowOrder(store, seq_len, order, seed=0)
    for first in range(0, rows.num_rows - 1000, 1000):
        rows.at(np.arange(first, first + 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


if __name__ == "__main__":
    main()
