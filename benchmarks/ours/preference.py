"""Stepwell: steps of 8 pairs (or labelled answers) against cached scores of the reference, as
`stepwell dpo` makes them."""

from __future__ import annotations

import json
from functools import partial

from benchmarks import workload as w
from benchmarks.ours.settings import build_run
from benchmarks.protocol import Clock
from stepwell.config import Run
from stepwell.posttrain.preference.losses import preference_loss
from stepwell.posttrain.preference.reference import open_reference, with_reference
from stepwell.posttrain.preference.rows import load_rows, step_numbers
from stepwell.sections.methods import DPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine

# A pair's answers share a row: twice what a peer's answer may have.
ROW_TOKENS = 2 * w.SEQ_LEN


def train(kind: str, unit: str) -> None:
    args = w.arguments()
    clock = Clock()
    tokenizer = Tokenizer.load(w.DATA)
    values = {
        "method.pairs_per_step": w.PAIRS,
        "method.loss.kind": kind,
        "data.path": str(labelled() if kind == "kto" else w.DATA / "pairs.jsonl"),
        "data.seq_len": ROW_TOKENS,
        "method.max_rows": w.PREFERENCE_PAIRS * (2 if kind == "kto" else 1),
        "train.steps": 40,  # kto's mismatches are scored for these
        "optim.lr": w.PREFERENCE_LR,
    }
    plain = build_run(bool(args.compile), w.PAIRS, args.dtype)
    kept = plain.model_dump(
        exclude={"method": True, "train": {"global_batch_rows"}}, exclude_unset=True
    )
    run = Run.parse(kept | {"method": {"kind": "dpo"}}, values)
    assert isinstance(run.method, DPO)
    w.SCRATCH.joinpath("run").mkdir(parents=True, exist_ok=True)
    engine, loss = Engine(run), preference_loss(run.method.loss)
    rows, _ = load_rows(run, tokenizer)
    numbers_of = partial(step_numbers, rows.num_trained, w.PAIRS, run.train.seed)
    pad_id = tokenizer.pad_id
    reference = open_reference(run, rows, numbers_of, lambda copy: engine, engine, pad_id, None)
    step = 0
    while True:
        clock.begin()
        numbers = numbers_of(step)
        batch = rows.batch(numbers, run, pad_id)
        batch = with_reference(batch, numbers, rows, reference, engine, pad_id)
        stats = engine.forward_backward(batch, loss)
        engine.optim_step()
        counts = {unit: w.PAIRS, "tokens": stats.num_tokens, "slots": batch.tokens_BT.numel()}
        clock.end(loss=stats.loss, **counts)
        step += 1


def labelled():
    """The pairs as two labelled rows each."""
    path = w.SCRATCH / "labelled.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in w.labelled_rows()))
    return path
