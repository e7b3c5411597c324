"""Stepwell: supervised fine-tuning, loss on the answers, rows packed to SEQ_LEN."""

from __future__ import annotations

import shutil
from contextlib import suppress

from benchmarks import workload as w
from benchmarks.ours.settings import build_run
from benchmarks.protocol import Clock, Finished
from stepwell.data.loader import packed_stream
from stepwell.data.sft_data import build_sft_store
from stepwell.sections.optim import LossConfig
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy

PACKED_ROWS = 4  # about 1,900 tokens: as many as 8 rows of a padded batch hold on average


def main() -> None:
    args = w.arguments()
    clock = Clock()
    tokenizer = Tokenizer.load(w.DATA)
    folder = w.SCRATCH / f"sft-{args.compile}"
    shutil.rmtree(folder, ignore_errors=True)
    store, _ = build_sft_store(w.DATA / "chat.jsonl", tokenizer, folder)
    engine = Engine(build_run(bool(args.compile), PACKED_ROWS, args.dtype))
    loss = cross_entropy(LossConfig())
    stream = packed_stream(
        store,
        seq_len=w.SEQ_LEN,
        rows_per_step=PACKED_ROWS,
        rank=0,
        world=1,
        seed=0,
        state=None,
        pad_id=tokenizer.pad_id,
    )
    while True:
        clock.begin()
        batch, _ = next(stream)
        stats = engine.forward_backward(batch, loss)
        engine.optim_step()
        clock.end(loss=stats.loss, tokens=stats.num_tokens, slots=batch.tokens_BT.numel())


if __name__ == "__main__":
    with suppress(Finished):
        main()
