"""What a rank sends for a collective, by the ring algorithms that NCCL uses. No torch.

Of S bytes over n ranks, gathering and scattering send (n-1)/n * S, a reduction to all twice that,
an exchange (n-1)/n * S, a message S. (gloo's own algorithms may send more.)
"""

from __future__ import annotations

_ON_WIRE = {
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-reduce": 2.0,
    "all-to-all": 1.0,
    "broadcast": 1.0,
}


def wire_bytes(kind: str, num_bytes: float, num_ranks: int) -> float:
    """Of one call. num_bytes: the whole tensor (the gathered output, the input of a scatter). What
    is received ("recv") counts where it is sent. Raises KeyError for an unknown kind."""
    if kind == "send":
        return float(num_bytes)
    if kind == "recv":
        return 0.0
    return _ON_WIRE[kind] * num_bytes * (num_ranks - 1) / num_ranks
