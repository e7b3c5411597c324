"""Stepwell: 128 new tokens after each of 16 prompts."""

from __future__ import annotations

from contextlib import suppress

import torch

from benchmarks import workload as w
from benchmarks.ours.settings import build_run
from benchmarks.protocol import Clock, Finished
from stepwell.generate import Request, Sampling, generate
from stepwell.models.decode import DecodeWeights
from stepwell.models.transformer import Decoder


def main() -> None:
    args = w.arguments(temperature=0.0)
    clock = Clock()
    torch.manual_seed(0)
    model = build_run(False, w.ROWS).model
    state = {
        name: parameter if parameter.dim() == 1 else torch.nn.init.normal_(parameter, std=0.02)
        for name, parameter in Decoder(model).named_parameters()
    }
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    weights = DecodeWeights.pack(model, state.items(), dtype)
    del state
    prompts = [tuple(row["ids"]) for row in w.json_rows("prompts")[: w.PROMPTS]]
    sampling = Sampling(temperature=args.temperature, max_new_tokens=w.NEW_TOKENS)
    while True:
        clock.begin()
        requests = [Request(i, ids, seed=i) for i, ids in enumerate(prompts)]
        completions = generate(weights, requests, sampling)
        new = sum(len(c.token_ids) for c in completions)
        assert new == w.PROMPTS * w.NEW_TOKENS, new
        clock.end(tokens=new)


if __name__ == "__main__":
    with suppress(Finished):
        main()
