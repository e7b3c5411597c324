"""A batch: packed rows of tokens with everything a loss needs, one value a token.

B rows, T tokens a row, N = B*T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """tokens_BT, targets_BT: int64; targets are already shifted.
    weights_BT: float32, 0 where no loss is taken.
    positions_BT: int64, counted from the start of each document.
    docs_BT: int32, the document's number within its row; -1 is padding.
    sample_ids: a global id for each row.
    extra: further per-token streams of shape (B, T).
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    positions_BT: Tensor
    docs_BT: Tensor
    sample_ids: tuple[int, ...]
    extra: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.tokens_BT.shape[0]

    def rows(self, start: int, stop: int) -> Batch:
        """The rows from `start` up to `stop`."""
        return self._map(lambda x: x[start:stop], self.sample_ids[start:stop])

    def streams(self, choose: Callable[[Tensor], Tensor]) -> Batch:
        """The same rows with `choose` applied to every stream (B, T), e.g. to take some tokens."""
        return self._map(choose, self.sample_ids)

    def to(self, device: torch.device | str) -> Batch:
        return self._map(lambda x: x.to(device, non_blocking=True), self.sample_ids)

    def masked(self) -> Batch:
        """The same rows without any loss (a rank short of rows runs this to stay in step)."""
        return replace(self, weights_BT=torch.zeros_like(self.weights_BT))

    def cu_seqlens(self) -> Tensor:
        """int32 (documents + 1): borders of the documents in the flattened N tokens. Documents
        never cross rows; a row's padding counts as a document of its own."""
        B, T = self.docs_BT.shape
        starts_BT = torch.ones(B, T, dtype=torch.bool)
        docs_BT = self.docs_BT.cpu()
        starts_BT[:, 1:] = docs_BT[:, 1:] != docs_BT[:, :-1]
        borders = starts_BT.flatten().nonzero().flatten()
        return torch.cat([borders, borders.new_tensor([B * T])]).to(torch.int32)

    def _map(self, fn, sample_ids: tuple[int, ...]) -> Batch:
        tensors = {
            f.name: fn(getattr(self, f.name)) for f in fields(self) if f.name.endswith("_BT")
        }
        return Batch(
            **tensors,
            sample_ids=sample_ids,
            extra={name: fn(value) for name, value in self.extra.items()},
        )


def concat(batches: Sequence[Batch]) -> Batch:
    """Rows of several batches of one length, one after another."""
    first = batches[0]
    return Batch(
        **{
            f.name: torch.cat([getattr(b, f.name) for b in batches])
            for f in fields(first)
            if f.name.endswith("_BT")
        },
        sample_ids=tuple(i for b in batches for i in b.sample_ids),
        extra={name: torch.cat([b.extra[name] for b in batches]) for name in first.extra},
    )


def padding(num_rows: int, length: int, extra: dict[str, Tensor] | None = None) -> Batch:
    """Rows of nothing: no documents, no loss. `extra` names further streams to fill with zeros."""
    zeros_BT = torch.zeros(num_rows, length, dtype=torch.int64)
    return Batch(
        tokens_BT=zeros_BT,
        targets_BT=zeros_BT,
        weights_BT=zeros_BT.float(),
        positions_BT=zeros_BT,
        docs_BT=torch.full((num_rows, length), -1, dtype=torch.int32),
        sample_ids=(-1,) * num_rows,
        extra={k: zeros_BT.to(v.dtype) for k, v in (extra or {}).items()},
    )
