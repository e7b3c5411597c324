"""How tokens of answers of different lengths add up to one loss.

token: the mean over all tokens (DAPO, 2503.14476, equation 8): long answers count for more.
sequence: the mean over answers of their means (GRPO, 2402.03300, equation 3): a token of a long
answer counts for less. constant: the mean over answers of their sums, over one constant length
(Dr. GRPO, 2503.20783): every token counts the same, whatever the lengths around it.

Each is a weighted sum over one denominator that is counted over the whole rollout. B rows, T
tokens, D documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepwell.types import ConfigError, nearest

KINDS = ("token", "sequence", "constant")


def token_weight(num_tokens: int, kind: str, constant_tokens: int | None = None) -> float:
    """The weight of each of an answer's num_tokens trained tokens; 0 for an answer without any.

    constant_tokens: the length that `constant` divides by. Raises ConfigError for an unknown kind,
    and for `constant` without a length.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"method.aggregate={kind!r} is unknown{nearest(kind, KINDS)}; known are "
            f"{', '.join(KINDS)}"
        )
    if num_tokens == 0:
        return 0.0
    if kind == "token":
        return 1.0
    if kind == "sequence":
        return 1.0 / num_tokens
    if not constant_tokens or constant_tokens < 1:
        raise ConfigError(f"a constant length of {constant_tokens} must be at least 1")
    return 1.0 / constant_tokens


def denominator(lengths: Sequence[float], kind: str) -> float:
    """What the weighted sum over all answers is divided by: their tokens (token), or their number
    (sequence, constant). lengths: trained tokens of each; an answer without any does not count."""
    token_weight(1, kind, constant_tokens=1)
    return float(sum(lengths) if kind == "token" else sum(n > 0 for n in lengths))


def document_means(values_BT: Tensor, mask_BT: Tensor, docs_BT: Tensor) -> Tensor:
    """At each token, the mean of `values_BT` over the tokens of its document where mask_BT is not
    0; zero for documents without any, and in the padding (document -1). Needs whole rows."""
    B = docs_BT.shape[0]
    num_docs = int(docs_BT.max()) + 1 if docs_BT.numel() else 0
    rows_B1 = torch.arange(B, device=docs_BT.device)[:, None]
    index_BT = rows_B1 * (num_docs + 1) + docs_BT.long() + 1  # 0: the row's padding
    counted_BT = (mask_BT != 0) & (docs_BT >= 0)
    sums_D = values_BT.new_zeros(B * (num_docs + 1))
    counts_D = torch.zeros_like(sums_D)
    flat = index_BT.flatten()
    selected_BT = torch.where(counted_BT, values_BT, torch.zeros_like(values_BT))
    sums_D = sums_D.index_add(0, flat, selected_BT.flatten())
    counts_D = counts_D.index_add(0, flat, counted_BT.flatten().to(counts_D))
    return (sums_D / counts_D.clamp(min=1))[index_BT]
