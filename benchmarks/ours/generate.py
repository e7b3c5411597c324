"""Stepwell: 128 new tokens after each of 16 prompts."""

from __future__ import annotations

from contextlib import suppress

from benchmarks import workload as w
from benchmarks.ours.settings import build_run
from benchmarks.protocol import Clock, Finished
from stepwell.generate import Request, Sampling
from stepwell.train.engine import Engine


def main() -> None:
    args = w.arguments(temperature=0.0)
    clock = Clock()
    engine = Engine(build_run(False, w.ROWS, args.dtype))
    prompts = [tuple(row["ids"]) for row in w.json_rows("prompts")[: w.PROMPTS]]
    sampling = Sampling(temperature=args.temperature, max_new_tokens=w.NEW_TOKENS)
    while True:
        clock.begin()
        requests = [Request(i, ids, seed=i) for i, ids in enumerate(prompts)]
        completions = engine.generate(requests, sampling)
        new = sum(len(c.token_ids) for c in completions)
        assert new == w.PROMPTS * w.NEW_TOKENS, new
        clock.end(tokens=new)


if __name__ == "__main__":
    with suppress(Finished):
        main()
