"""Stepwell: pretraining on full rows."""

from __future__ import annotations

from contextlib import suppress

import torch

from benchmarks import workload as w
from benchmarks.ours.settings import build_run
from benchmarks.protocol import Clock, Finished
from stepwell.data.batch import Batch
from stepwell.sections.optim import LossConfig
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy


def main() -> None:
    args = w.arguments()
    clock = Clock()
    engine = Engine(build_run(bool(args.compile), w.ROWS, args.dtype))
    loss = cross_entropy(LossConfig())
    rows = w.token_rows()
    positions_BT = torch.arange(w.SEQ_LEN).expand(w.ROWS, -1)
    while True:
        clock.begin()
        window = next(rows)
        batch = Batch(
            tokens_BT=window[:, :-1],
            targets_BT=window[:, 1:],
            weights_BT=torch.ones(w.ROWS, w.SEQ_LEN),
            positions_BT=positions_BT,
            docs_BT=torch.zeros(w.ROWS, w.SEQ_LEN, dtype=torch.int32),
            sample_ids=tuple(range(w.ROWS)),
        )
        stats = engine.forward_backward(batch, loss)
        engine.optim_step()
        clock.end(loss=stats.loss, tokens=batch.tokens_BT.numel())


if __name__ == "__main__":
    with suppress(Finished):
        main()
