"""Stepwell: whole GRPO steps. 4 prompts of 32 tokens, 8 answers each of 64 new tokens, a trivial
reward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from benchmarks import workload as w
from benchmarks.ours.settings import build_run
from benchmarks.protocol import Clock, Finished
from stepwell.config import Run
from stepwell.eval.grade import Prompt, Verdict
from stepwell.generate import Sampling
from stepwell.parallel.shared_prompts import shares_prompts
from stepwell.posttrain.answers import answers_of
from stepwell.posttrain.policy.batch import minibatches, num_trained, with_advantages
from stepwell.posttrain.policy.loss import denominators, policy_loss
from stepwell.posttrain.rollout import collect
from stepwell.posttrain.sampling.gauge import Gauge
from stepwell.sections.methods import GRPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.types import Completion

PROMPTS, GROUP, NEW_TOKENS = 4, 8, 64
PACKED_ROWS, ROW_LEN = 4, 760  # eight answers a row leave no padding


class DistinctWords:
    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Verdict]:
        return [Verdict(float(len(set(c.text.split())))) for c in completions]


def grpo_run(compiled: bool, dtype: str) -> Run:
    method = {
        "method.kind": "grpo",
        "method.prompts_per_step": PROMPTS,
        "method.group_size": GROUP,
        "method.max_new_tokens": NEW_TOKENS,
        "data.seq_len": ROW_LEN,
        "optim.lr": 1e-5,
    }
    plain = build_run(compiled, PACKED_ROWS, dtype)
    return Run.parse(
        plain.model_dump(
            exclude={"method": True, "train": {"global_batch_rows"}}, exclude_unset=True
        ),
        method,
    )


def main() -> None:
    args = w.arguments()
    clock = Clock()
    run = grpo_run(bool(args.compile), args.dtype)
    method = run.method
    assert isinstance(method, GRPO)
    engine, tokenizer, rewards = Engine(run), Tokenizer.load(w.DATA), DistinctWords()
    prompts = [Prompt("", tuple(row["ids"])) for row in w.json_rows("prompts")]
    sampling, number = Sampling(max_new_tokens=NEW_TOKENS), 0
    while True:
        clock.begin()
        first = number * PROMPTS % len(prompts)
        chosen = prompts[first : first + PROMPTS]
        rollouts = collect(engine, chosen, GROUP, sampling, rewards, tokenizer, seed=number)
        answers = with_advantages(answers_of(rollouts), method)
        lengths = [num_trained(answer, method) for answer in answers]
        divisors = denominators(method, lengths)
        for batch in minibatches(
            answers,
            method,
            run.data.seq_len,
            tokenizer.pad_id,
            engine.mesh,
            [number],
            shares_prompts(run),
        ):
            gauge = Gauge()
            loss = policy_loss(method, gauge)
            stats = engine.forward_backward(batch, loss, method.temperature, divisors)
            gauge.read(engine.mesh)
            engine.optim_step()
        assert sum(lengths) == PROMPTS * GROUP * NEW_TOKENS, sum(lengths)
        number += 1
        clock.end(loss=stats.loss, tokens=sum(lengths))


if __name__ == "__main__":
    with suppress(Finished):
        main()
