"""Rollouts for tests of policy gradients, and GRPO's loss written out answer by answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.eval.grade import Prompt, Verdict
from stepwell.models.transformer import ForwardOptions
from stepwell.parallel.mesh import Mesh
from stepwell.posttrain.answers import Answer, answers_of, split
from stepwell.posttrain.policy.batch import (
    num_parts,
    num_trained,
    pack_answers,
    with_advantages,
)
from stepwell.posttrain.policy.loss import (
    OLD,
    REFERENCE,
    SAMPLER,
    denominators,
    policy_loss,
)
from stepwell.posttrain.rollout import Group, Rollouts
from stepwell.sections.methods import GRPO
from stepwell.train.engine import Engine
from stepwell.types import Completion
from tests import oracle
from tests.oracle import base_run

F64 = torch.float64


def policy_run(**overrides: Any) -> Run:
    values = {"method.kind": "grpo", "method.max_new_tokens": 8, "method.group_size": 4}
    return base_run(**{**values, "optim.clip_norm": 0.0, **overrides})


def method_of(run: Run) -> GRPO:
    assert isinstance(run.method, GRPO)
    return run.method


def some_rollouts() -> Rollouts:
    """Three groups of answers of very different lengths; one answer has no reward, one group is
    dead, some answers are cut off."""
    generator = torch.Generator().manual_seed(1)
    rewards: list[list[float | None]] = [[1, 0, 0, 0], [0.5, None, 2, 0.25], [1, 1, 1, 1]]
    groups = []
    for number, group in enumerate(rewards):
        ids = torch.randint(0, oracle.VOCAB, (3 + number,), generator=generator).tolist()
        completions = []
        for answer in range(4):
            length = 1 + (3 * answer + number) % 8
            tokens = torch.randint(0, oracle.VOCAB, (length,), generator=generator).tolist()
            ended = "length" if length > 6 else "stop"
            completions.append(
                Completion(answer, tuple(ids), tuple(tokens), (-4.0,) * length, "", ended)
            )
        verdicts = tuple(Verdict(reward) for reward in group)
        groups.append(Group(Prompt("", tuple(ids)), tuple(completions), verdicts))
    return Rollouts(tuple(groups))


def some_answers(engine: Engine, temperature: float = 1.0) -> list[Answer]:
    """The rollouts' answers with streams that differ from the engine's log-probabilities by a few
    tenths, in numbers that float32 holds."""
    generator = np.random.default_rng(2)
    found = []
    for answer in answers_of(some_rollouts()):
        now_L = token_logprobs(engine, answer, temperature).detach().numpy()
        near = {
            name: np.float32(now_L + generator.normal(0, spread, len(now_L))) * answer.trained_L
            for name, spread in ((OLD, 0.3), (SAMPLER, 0.5), (REFERENCE, 0.4))
        }
        found.append(answer.adding(**{k: v.astype(np.float64) for k, v in near.items()}))
    return found


def token_logprobs(engine: Engine, answer: Answer, temperature: float) -> Tensor:
    """(L,), 0 for the first token; differentiable."""
    return token_outputs(engine, answer, temperature)[0]


def token_outputs(engine: Engine, answer: Answer, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (L,) of one answer alone, 0 for its first token."""
    decoder: Any = engine.decoder
    ids = torch.tensor(answer.ids)
    num_tokens = len(ids) - 1
    options = ForwardOptions(needs=frozenset({"logits"}), dtype=F64)
    logits = decoder(
        ids[None, :-1],
        torch.arange(num_tokens)[None],
        torch.tensor([0, num_tokens], dtype=torch.int32),
        options=options,
    ).logits_BTV[0]
    every = (logits / temperature).log_softmax(-1)
    picked = every[torch.arange(num_tokens), ids[1:]]
    entropy = -(every.exp() * every).sum(-1)
    zero = torch.zeros(1, dtype=F64)
    return torch.cat([zero, picked]), torch.cat([zero, entropy])


def gradients(run: Run, temperature: float = 1.0) -> dict[str, Tensor]:
    """Runs in each rank: the mean gradient of a pass's minibatches, at the same weights."""
    engine, method = Engine(run), method_of(run)
    mesh: Mesh = engine.mesh
    answers = with_advantages(given(run, temperature), method)
    parts = num_parts(answers, method)
    lengths = [num_trained(answer, method) for answer in answers]
    value = 0.0
    for part in split(len(answers), parts, [5]):
        chosen = [answers[i] for i in part[mesh.data_rank :: mesh.data_world]]
        batch = pack_answers(chosen, method, oracle.LENGTH, pad_id=0)
        divisors = denominators(method, lengths, parts)
        stats = engine.forward_backward(batch, policy_loss(method), temperature, divisors)
        value += stats.loss / parts
    found = {"loss": torch.tensor(value, dtype=F64)}
    for name, parameter in engine.named_parameters():
        assert parameter.grad is not None
        found[name] = oracle.full(parameter.grad) / parts
    return found


def given(run: Run, temperature: float) -> list[Answer]:
    """`some_answers` of one process's engine, which every layout is held against."""
    plain = {"method": run.method.model_dump(), "train": {"seed": run.train.seed}}
    alone = base_run(**{f"method.{k}": v for k, v in plain["method"].items() if k != "rewards"})
    return some_answers(Engine(alone, mesh=single()), temperature)


def single() -> Mesh:
    return Mesh(1, 0, 0, torch.device("cpu"))


def naive_gradients(run: Run, temperature: float = 1.0) -> dict[str, Tensor]:
    """Plain autograd, each answer alone, formulas written out."""
    engine, m = Engine(run), method_of(run)
    answers = with_advantages(some_answers(engine, temperature), m)
    total, count = torch.zeros((), dtype=F64), 0.0
    for answer in answers:
        mask = torch.from_numpy(answer.trained_L != 0)
        if m.overlong == "mask" and answer.truncated:
            continue
        n = int(mask.sum())
        logprobs, entropies = (x[mask] for x in token_outputs(engine, answer, temperature))
        old, sampled, reference, advantages = (
            torch.from_numpy(answer.streams[k])[mask]
            for k in (OLD, SAMPLER, REFERENCE, "advantages")
        )
        advantage = np.float32(advantages[0].item()).item()
        loss = naive_objective(m, logprobs, old, advantage)
        if m.kl_coef and m.kl_in == "loss":
            loss = loss + m.kl_coef * naive_kl(m.kl_estimator, logprobs, reference, old)
        if m.importance_cap:
            loss = loss * (old - sampled).exp().clamp(max=m.importance_cap)
        loss = loss - m.entropy_coef * entropies
        weight = {"token": 1.0, "sequence": 1 / n, "constant": 1 / m.max_new_tokens}[m.aggregate]
        total = total + np.float32(weight).item() * loss.sum()
        count += n if m.aggregate == "token" else 1
    (total / count).backward()
    found = {name: p.grad for name, p in engine.decoder.named_parameters() if p.grad is not None}
    return {"loss": (total / count).detach(), **found}


def naive_objective(m: GRPO, logprobs: Tensor, old: Tensor, advantage: float) -> Tensor:
    ratio = (logprobs - old).exp()
    if m.objective == "gspo":
        # The token form: with equal weights its gradient is the sequence form's (test_objectives).
        ratio = (logprobs - old).mean().exp().detach() * (logprobs - logprobs.detach()).exp()
    low, high = 1 - m.clip_low, 1 + m.clip_high
    if m.objective == "cispo":
        return -ratio.detach().clamp(low, high) * advantage * logprobs
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(low, high) * advantage)
    if m.dual_clip and advantage < 0:
        loss = torch.minimum(loss, torch.full_like(loss, -m.dual_clip * advantage))
    return loss


def naive_kl(kind: str, logprobs: Tensor, reference: Tensor, old: Tensor) -> Tensor:
    ratio = (reference - logprobs).exp()
    return {
        "k1": logprobs - reference,
        "k2": (logprobs - reference) ** 2 / 2,
        "k3": ratio - 1 - (reference - logprobs),
        "unbiased": (logprobs - old).exp() * (ratio - 1 - (reference - logprobs)),
    }[kind]
