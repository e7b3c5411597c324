"""The rows that a reward model learns from, by objective: read, put in order, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.files import file_sha256
from stepwell.data.order import permute
from stepwell.data.packing import shortest
from stepwell.data.pair_packing import num_places, pack_labelled, pack_pairs, pack_steps
from stepwell.data.preference import (
    Labelled,
    Pair,
    Stepwise,
    load_labelled,
    load_pairs,
    load_steps,
)
from stepwell.data.sft_data import Drops
from stepwell.parallel.shared_prompts import shares_prompts
from stepwell.posttrain.reward_model.losses import MARGIN
from stepwell.sections.methods import RewardModel
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError

Rows = Sequence[Pair | Labelled | Stepwise]
# Rows that may be shorter than data.seq_len are so in steps of so many tokens.
ROUND = 64


def load_rows(run: Run, path: str, tokenizer: Tokenizer) -> tuple[Rows, Drops]:
    """The usable rows of a file, and why the others are not. Raises DataError where there are none,
    and with method.margins for pairs without a margin."""
    method, seq_len = run.method, run.data.seq_len
    assert isinstance(method, RewardModel)
    most, cut = method.max_rows, method.max_prompt_tokens
    if method.objective == "bradley-terry":
        pairs, drops = load_pairs(path, tokenizer, seq_len, cut, most, method.max_length)
        if method.margins:
            check_margins(pairs, path)
        return [trimmed_pair(pair) for pair in pairs], drops
    length = min(seq_len, method.max_length or seq_len)
    if method.objective == "process":
        return load_steps(path, tokenizer, length, cut, most, method.step_separator)
    kind = "number" if method.objective == "regression" else "class"
    classes = max(run.model.num_labels, 2)
    labelled, drops = load_labelled(path, tokenizer, length, cut, most, kind, classes)
    return [trimmed_answer(row) for row in labelled], drops


def rows_origin(run: Run, path: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the rows and their order depend on. Raises DataError for a file that cannot be read."""
    method = run.method
    assert isinstance(method, RewardModel)
    try:
        digest = file_sha256(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    shape = ("objective", "max_rows", "max_length", "max_prompt_tokens", "step_separator")
    return {
        "file": digest,
        "tokenizer": tokenizer.fingerprint,
        "chat template": tokenizer.chat_template,
        "data.seq_len": run.data.seq_len,
        **{f"method.{key}": getattr(method, key) for key in shape},
    }


def answer_length(mask: Sequence[float]) -> int:
    """The number of tokens up to the last trained one. Templates may put something after an answer
    (a line's end), which a sampled answer has not: a score is read before it."""
    return max((i + 1 for i, trained in enumerate(mask) if trained), default=0)


def trimmed_pair(pair: Pair) -> Pair:
    for side in ("chosen", "rejected"):
        ids, mask = getattr(pair, f"{side}_ids"), getattr(pair, f"{side}_mask")
        if mask is not None:
            stop = answer_length(mask)
            pair = replace(pair, **{f"{side}_ids": ids[:stop], f"{side}_mask": mask[:stop]})
    return pair


def trimmed_answer(row: Labelled) -> Labelled:
    if row.mask is None:
        return row
    stop = answer_length(row.mask)
    return replace(row, completion_ids=row.completion_ids[:stop], mask=row.mask[:stop])


def check_margins(pairs: Sequence[Pair], path: str) -> None:
    lacking = [pair.item for pair in pairs if pair.margin is None]
    if lacking:
        raise DataError(
            f"method.margins is set, but {len(lacking)} of {len(pairs)} pairs of {path} have no "
            f"number `margin` (the first is {lacking[0]}); add it, or leave method.margins out"
        )


def pack(rows: Rows, run: Run, pad_id: int, index: Sequence[int]) -> Batch:
    """A batch that has a weight wherever a score is read. index: the rows' numbers.

    Its rows are as `shortest` has them, where one rank has them whole and nothing is
    compiled for one length.
    """
    method, seq_len = run.method, run.data.seq_len
    assert isinstance(method, RewardModel)
    layout, shared = run.layout, shares_prompts(run)
    if not layout.compile and layout.cp == layout.tp == layout.pp == 1:
        seq_len = shortest([num_tokens(row, shared) for row in rows], seq_len, ROUND)
    if method.objective == "bradley-terry":
        pairs = [row for row in rows if isinstance(row, Pair)]
        margins = [(pair.margin or 0.0) if method.margins else 0.0 for pair in pairs]
        streams = {MARGIN: np.array(margins, np.float32)}
        return pack_pairs(pairs, seq_len, pad_id, streams, index, "last", shared)
    if method.objective == "process":
        answers = [row for row in rows if isinstance(row, Stepwise)]
        return pack_steps(answers, seq_len, pad_id, index=index)
    labelled = [row for row in rows if isinstance(row, Labelled)]
    return pack_labelled(labelled, seq_len, pad_id, index=index, read="last")


def num_tokens(row: Pair | Labelled | Stepwise, shared: bool) -> int:
    """Places that a row of data takes; shared: a pair's common beginning counts once."""
    if isinstance(row, Pair):
        return num_places(row, "last", shared)
    return len(row.ids if isinstance(row, Stepwise) else row.rendering[0])


def rows_of_step(run: Run, num_rows: int, position: int) -> list[int]:
    """The rows that the step takes which begins after `position` rows: each epoch goes through all
    of them, in an order of its own."""
    method = run.method
    assert isinstance(method, RewardModel)
    places = np.arange(position, position + method.rows_per_step)
    if run.data.order == "sequential":
        return (places % num_rows).tolist()
    epochs = places // num_rows
    return [
        int(row)
        for epoch in np.unique(epochs)
        for row in permute(places[epochs == epoch] % num_rows, num_rows, run.train.seed, int(epoch))
    ]
