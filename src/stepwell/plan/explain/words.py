"""Numbers and parts of a step in words. No torch."""

from __future__ import annotations

PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "operations that only move memory",
    "quantisation": "quantisation",
    "host": "launches by the host",
    "recomputation": "recomputation",
    "exposed tp": "tensor ranks' messages",
    "exposed cp": "context ranks' messages",
    "exposed ep": "expert ranks' messages",
    "exposed pp": "messages between stages",
    "exposed data": "data ranks' messages",
    "exposed offload": "moving to and from the host",
    "exposed world": "sums over all ranks",
    "contention": "computing slowed by messages beside it",
    "bubble": "pipeline bubble",
    "gradient accumulation": "adding up micro-batches' gradients",
    "optimizer": "optimiser step",
    "straggling": "waiting for the slowest",
}


def part_text(name: str) -> str:
    return PARTS.get(name, name)


def change_text(after: float, before: float) -> str:
    share = after / before - 1
    return "the same" if abs(share) < 5e-4 else f"{100 * share:+.1f} %"


def count_text(count: int) -> str:
    """`8.0 billion`, `134.5 million`."""
    if count >= 10**9:
        return f"{count / 1e9:,.1f} billion"
    return f"{count / 1e6:,.1f} million"
