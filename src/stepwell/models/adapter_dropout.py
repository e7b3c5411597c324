"""Dropout of adapters that no layout changes: whether an element is dropped is a function of the
seed, the step, the layer, the in-feature and the token.

A token is known by what its document says and by its place in it: packing, ranks and micro-batches
change neither. Two equal documents of a step share their mask. N tokens, D in-features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepwell.models.counter_bits import ODD, hashed, mixed, random_bits, signed


def token_keys(
    tokens_N: Tensor, positions_N: Tensor, borders: Tensor, seed: int, step: int
) -> Tensor:
    """int64 (N,): a key of each token, for one step of a run. borders: of the documents, (documents
    + 1), as `Batch.cu_seqlens`."""
    places_N = positions_N * signed(ODD[1])
    own_N = mixed(tokens_N * signed(ODD[0]) + mixed(places_N))
    lengths = borders.long().diff()
    number_N = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    sums = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, number_N, own_N)
    document_N = mixed(sums + signed(hashed(f"{seed}\0{step}")))[number_N]
    return mixed(document_N ^ mixed(positions_N * signed(ODD[2])))


def drop(x_ND: Tensor, keys_N: Tensor, columns_D: Tensor, rate: float) -> Tensor:
    """x with the share `rate` of its elements at zero and the others over 1 - rate; which, is a
    function of the keys alone."""
    bits_ND = random_bits(keys_N, columns_D)
    kept_ND = bits_ND >= round(rate * 2**32) - 2**31
    return torch.where(kept_ND, x_ND / (1 - rate), 0)
