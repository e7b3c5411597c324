"""Stepwell: whole PPO steps. 32 prompts of 32 tokens, 64 new tokens each, scored by a reward model;
policy and critic trained, a reference held."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from benchmarks import workload as w
from benchmarks.ours.settings import build_run
from benchmarks.protocol import Clock, Finished
from stepwell.config import Run
from stepwell.eval.grade import Prompt, Verdict
from stepwell.generate import Sampling
from stepwell.posttrain.answers import answers_of
from stepwell.posttrain.ppo.critic import critic_run
from stepwell.posttrain.ppo.loss import policy_loss, shared
from stepwell.posttrain.ppo.placement import open_reference
from stepwell.posttrain.ppo.ppo import critic_step
from stepwell.posttrain.ppo.targets import ask, passes, with_targets
from stepwell.posttrain.reward_model.model import Member, Scorer
from stepwell.posttrain.rollout import collect
from stepwell.sections.methods import PPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.types import Completion

ANSWERS, NEW_TOKENS = 32, 64
SEQ_LEN = 96  # an answer a row: nothing is padded


class ByModel:
    """The reward is a model's score at the last token."""

    def __init__(self, engine: Engine):
        self.scorer = Scorer([Member("", engine)], SEQ_LEN, "mean", 1.0)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Verdict]:
        docs = [[*c.prompt_ids, *c.token_ids] for c in completions]
        return [Verdict(value) for value in self.scorer.score(docs).tolist()]


def ppo_run(compiled: bool, dtype: str) -> Run:
    method = {
        "method.kind": "ppo",
        "method.prompts_per_step": ANSWERS,
        "method.max_new_tokens": NEW_TOKENS,
        "optim.lr": 1e-5,
        "data.seq_len": SEQ_LEN,
    }
    plain = build_run(compiled, ANSWERS, dtype)
    return Run.parse(
        plain.model_dump(
            exclude={"method": True, "train": {"global_batch_rows"}}, exclude_unset=True
        ),
        method,
    )


def main() -> None:
    args = w.arguments()
    clock = Clock()
    run = ppo_run(bool(args.compile), args.dtype)
    method, alone = run.method, critic_run(run)
    assert isinstance(method, PPO)
    assert alone is not None
    policy = Engine(run)
    mesh = policy.mesh
    critic, judge = Engine(alone, mesh=mesh), Engine(alone, mesh=mesh, frozen=True)
    reference = open_reference(run, policy, mesh, list(policy.iter_state()))
    rewards, tokenizer = ByModel(judge), Tokenizer.load(w.DATA)
    prompts = [Prompt("", tuple(row["ids"])) for row in w.json_rows("prompts")]
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    loss, number = policy_loss(method, method.kl_coef), 0
    while True:
        clock.begin()
        first = number * ANSWERS % len(prompts)
        chosen = prompts[first : first + ANSWERS]
        rollouts = collect(policy, chosen, 1, sampling, rewards, tokenizer, seed=number)
        answers = ask(answers_of(rollouts), policy, critic, reference, tokenizer.pad_id)
        answers, _ = with_targets(answers, method, method.kl_coef)
        for batch, divisors in passes(answers, run, number, mesh, tokenizer.pad_id):
            critic_step(critic, method, batch, divisors, {})
            part = shared(divisors, loss, batch)
            stats = policy.forward_backward(batch, loss, method.temperature, part)
            policy.optim_step()
        new = sum(a.num_trained for a in answers)
        assert new == ANSWERS * NEW_TOKENS, new
        number += 1
        clock.end(loss=stats.loss, tokens=new)


if __name__ == "__main__":
    with suppress(Finished):
        main()
