"""The rows that preference losses read: pairs of answers or labelled ones, trained on or held out,
and which of them make a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.order import permute
from stepwell.data.pair_packing import num_places, pack_labelled, pack_pairs
from stepwell.data.preference import Rendering, load_labelled, load_pairs
from stepwell.parallel.shared_prompts import shares_prompts
from stepwell.posttrain.preference.displacement import num_dropped
from stepwell.posttrain.preference.scored_references import row_length
from stepwell.sections.methods import DPO
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError

# Not the run's: runs of other seeds are then compared on the same pairs.
HELDOUT_SEED = 0


@dataclass(frozen=True)
class Rows:
    """Pairs, or labelled answers: the first `num_trained` are trained on, the rest held out."""

    items: Sequence[Any]
    num_trained: int
    labelled: bool

    @property
    def heldout(self) -> list[int]:
        return list(range(self.num_trained, len(self.items)))

    def documents(self, count: int | None = None) -> list[Rendering]:
        """Of the first `count` rows (all): one each, of pairs the chosen one and the rejected."""
        items = self.items[:count]
        if self.labelled:
            return [item.rendering for item in items]
        return [doc for item in items for doc in (item.chosen, item.rejected)]

    def without(self, kept: Sequence[int]) -> Rows:
        """Of those that are trained on only the `kept` ones."""
        items = [self.items[i] for i in (*kept, *self.heldout)]
        return replace(self, items=items, num_trained=len(kept))

    def batch(self, numbers: Sequence[int], run: Run, pad_id: int) -> Batch:
        """The rows of these numbers, packed no longer than they need."""
        items = [self.items[i] for i in numbers]
        if self.labelled:
            length = row_length([len(item.rendering[0]) - 1 for item in items], run)
            return pack_labelled(items, length, pad_id, index=list(numbers))
        shared = shares_prompts(run)
        both = [num_places(item, shared=shared) for item in items]
        length = row_length(both, run)
        return pack_pairs(items, length, pad_id, index=list(numbers), shared=shared)


def load_rows(run: Run, tokenizer: Tokenizer) -> tuple[Rows, dict[str, Any]]:
    """All rows, and what became of those of `data.path`. Raises ConfigError when a step takes more
    than there are."""
    method, data = run.method, run.data
    assert isinstance(method, DPO)
    assert data.path is not None
    labelled = method.loss.kind == "kto"
    read = partial(
        load_labelled if labelled else load_pairs,
        tokenizer=tokenizer,
        seq_len=data.seq_len,
        max_prompt_tokens=method.max_prompt_tokens,
    )
    items, drops = read(data.path, max_rows=method.max_rows)
    heldout: list[Any] = []
    if run.train.eval_every and data.heldout_path is not None:
        found, _ = read(data.heldout_path)
        order = permute(np.arange(len(found)), len(found), HELDOUT_SEED)
        heldout = [found[i] for i in order[: run.train.eval_rows]]
    rows = Rows([*items, *heldout], len(items), labelled)
    event = {
        "path": data.path,
        "rows": len(items) + drops.total,
        "kept": len(items),
        "dropped": dict(drops.by_reason),
        "truncated": sum(item.truncated for item in items),
    }
    left = num_kept(rows, method)
    if left < method.pairs_per_step:
        what = "labelled answers" if labelled else "pairs"
        after = f" after method.drop_ches={method.drop_ches:g}" if method.drop_ches else ""
        raise ConfigError(
            f"method.pairs_per_step={method.pairs_per_step} but {data.path} has only {left} usable "
            f"{what}{after}; the nearest legal value is {max(left, 1)}"
        )
    if labelled:
        check_labels(items, data.path)
    return rows, event


def check_labels(items: Sequence[Any], path: str) -> None:
    """Raises ConfigError if all answers have one label: nothing is preferred to anything."""
    labels = {bool(item.label) for item in items}
    if len(labels) == 1:
        raise ConfigError(
            f"all {len(items)} answers of {path} have the label {labels.pop()}; kto needs both "
            "desirable and undesirable ones (to learn from good answers alone, use `stepwell sft`)"
        )


def num_kept(rows: Rows, method: DPO) -> int:
    """How many pairs are trained on once method.drop_ches has left some out."""
    return rows.num_trained - num_dropped(rows.num_trained, method.drop_ches)


def step_numbers(num_items: int, per_step: int, seed: int, num_batches: int) -> list[int]:
    """Numbers of the global batch that follows `num_batches` others: each epoch is a permutation
    of all."""
    ordinals = np.arange(num_batches * per_step, (num_batches + 1) * per_step)
    epochs, places = np.divmod(ordinals, num_items)
    found = [
        permute(places[epochs == epoch], num_items, seed, int(epoch)) for epoch in np.unique(epochs)
    ]
    return np.concatenate(found).tolist()
