"""Stepwell: a reward model on pairs, as `stepwell reward` trains it."""

from __future__ import annotations

from contextlib import suppress

from benchmarks import workload as w
from benchmarks.ours.settings import build_run
from benchmarks.protocol import Clock, Finished
from stepwell.config import Run
from stepwell.posttrain.reward_model.losses import reward_loss
from stepwell.posttrain.reward_model.rows import load_rows, pack, rows_of_step
from stepwell.sections.methods import RewardModel
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine

SEQ_LEN = 2048  # of a row, which holds several pairs


def main() -> None:
    args = w.arguments()
    clock = Clock()
    tokenizer = Tokenizer.load(w.DATA)
    plain = build_run(bool(args.compile), 8, args.dtype)
    kept = plain.model_dump(
        exclude={"method": True, "train": {"global_batch_rows"}}, exclude_unset=True
    )
    values = kept | {"method": {"kind": "reward"}}
    more = {"model.head": "score", "data.seq_len": SEQ_LEN, "method.rows_per_step": w.PAIRS}
    more |= {"method.max_length": w.SEQ_LEN}
    run = Run.parse(values, more)
    method = run.method
    assert isinstance(method, RewardModel)
    rows, _ = load_rows(run, str(w.DATA / "pairs.jsonl"), tokenizer)
    engine = Engine(run)
    loss = reward_loss(method, run.model.num_labels)
    position = 0
    while True:
        clock.begin()
        mine = rows_of_step(run, len(rows), position)
        position += len(mine)
        batch = pack([rows[i] for i in mine], run, tokenizer.pad_id, mine)
        stats = engine.forward_backward(batch, loss)
        engine.optim_step()
        clock.end(
            loss=stats.loss,
            tokens=stats.num_tokens,
            pairs=w.PAIRS,
            slots=batch.tokens_BT.numel(),
        )


if __name__ == "__main__":
    with suppress(Finished):
        main()
