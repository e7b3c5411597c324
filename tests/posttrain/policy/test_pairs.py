"""Pairs of a policy's own answers: which are made, and that no split changes their gradient."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from stepwell.posttrain.answers import Answer
from stepwell.posttrain.policy.pairs import (
    REFERENCE_TOKENS,
    SAMPLER,
    Chosen,
    denominators,
    divergence,
    gauged,
    minibatches,
    packed,
    paired,
)
from stepwell.posttrain.sampling.gauge import Gauge
from stepwell.train.engine import Engine
from tests import oracle
from tests.oracle import assert_same, base_run
from tests.parallel.ranks import run_ranks
from tests.posttrain.policy_cases import F64, policy_run, single, some_answers, token_logprobs

BETA, LENGTH = 0.3, 40


def run_of(**overrides):
    values = {
        "method.kind": "online-dpo",
        "method.max_new_tokens": 8,
        "method.loss.beta": BETA,
        "data.seq_len": LENGTH,
        "optim.clip_norm": 0.0,
    }
    return base_run(**{**values, **overrides})


def some_pairs(engine: Engine, temperature: float) -> tuple[list[Answer], tuple[Chosen, ...]]:
    """Of 12 answers of very different lengths; the third group is a tie."""
    answers = some_answers(engine, temperature)
    names = {SAMPLER: "sampler_logprobs", REFERENCE_TOKENS: "reference_logprobs"}
    kept = [a.adding(**{new: a.streams[old] for new, old in names.items()}) for a in answers]
    # Another pairing of the third group, so that parts differ in size.
    return kept, (*paired(kept, 4, LENGTH).pairs, Chosen(9, 8))


def gradients(run, temperature: float) -> dict[str, torch.Tensor]:
    """Runs in each rank: the mean gradient of a rollout's minibatches, at the same weights."""
    alone = Engine(policy_run(), mesh=single())
    answers, pairs = some_pairs(alone, temperature)
    engine, method = Engine(run), run.method
    divisors, value, count = denominators(pairs, method), 0.0, 0
    for batch in minibatches(answers, pairs, run, 0, engine.mesh, 5):
        loss = gauged(method.loss, Gauge())
        value += engine.forward_backward(batch, loss, temperature, divisors).loss
        count += 1
    found = {"loss": torch.tensor(value / count, dtype=F64)}
    for name, parameter in engine.named_parameters():
        assert parameter.grad is not None
        found[name] = oracle.full(parameter.grad) / count
    return found


def naive(temperature: float) -> dict[str, torch.Tensor]:
    engine = Engine(policy_run(), mesh=single())
    answers, pairs = some_pairs(engine, temperature)
    total = torch.zeros((), dtype=F64)
    for pair in pairs:
        shifts = []
        for answer in (answers[pair.chosen], answers[pair.rejected]):
            mask = torch.from_numpy(answer.trained_L != 0)
            logp = token_logprobs(engine, answer, temperature)[mask].sum()
            shifts.append(logp - np.float32(answer.streams[REFERENCE_TOKENS].sum()).item())
        total = total - logsigmoid(BETA * (shifts[0] - shifts[1])) / len(pairs)
    total.backward()
    found = {n: p.grad for n, p in engine.decoder.named_parameters() if p.grad is not None}
    return {"loss": total.detach(), **found}


SPLITS = {
    "whole": {"train.micro_batch_rows": 100},
    "micro-batches": {"train.micro_batch_rows": 1},
    "minibatches": {"method.minibatches": 2, "method.updates_per_rollout": 2},
}


@pytest.mark.parametrize("split", SPLITS)
def test_the_gradient_is_that_of_the_formula_for_every_split(split):
    assert_same(gradients(run_of(**SPLITS[split]), 0.7), naive(0.7), 1e-9, split)


@pytest.mark.parametrize("num_ranks", [2])
def test_two_ranks_have_the_same_gradient(num_ranks):
    """Also where one of them has no pair of a minibatch."""
    run = run_of(**{"method.minibatches": 2})
    wanted = naive(1.0)
    for rank, got in enumerate(run_ranks(gradients, num_ranks, run, 1.0)):
        assert_same(got, wanted, 1e-9, f"rank {rank}")


def answer(reward: float | None, ids: tuple[int, ...], trained: int = 1) -> Answer:
    mask = np.array([0.0] * (len(ids) - trained) + [1.0] * trained)
    streams = {SAMPLER: -mask, REFERENCE_TOKENS: -2 * mask}
    return Answer(ids, mask, reward, False, streams)


def test_which_pairs_are_made_and_why_others_are_not():
    groups = [
        [answer(0.5, (1, 2)), answer(2.0, (1, 3)), answer(-1.0, (1, 4)), answer(None, (1, 5))],
        [answer(1.0, (1, 2)), answer(1.0, (1, 3)), answer(1.0, (1, 4)), answer(1.0, (1, 5))],
        [answer(1.0, (1, 2)), answer(None, (1, 3)), answer(None, (1, 4)), answer(None, (1, 5))],
        [answer(1.0, (1, 2)), answer(0.0, (1, 2)), answer(0.5, (1, 2)), answer(0.5, (1, 2))],
        [answer(9.0, (1, 2), 0), answer(1.0, (1, 3)), answer(0.0, (1, 4)), answer(0.5, (1, 2))],
        [answer(1.0, (1, 2, 3)), answer(0.0, (1, 4, 5, 6)), *[answer(0.5, (1, 2))] * 2],
    ]
    answers = [one for group in groups for one in group]
    found = paired(answers, 4, 4)
    assert found.pairs == (Chosen(1, 2), Chosen(17, 18))
    assert found.without == Counter(tie=1, too_few=1, same_text=1, too_long=1)
    assert len(paired(answers, 4, 5).pairs) == 3
    assert found.metrics(answers) == {
        "pairs/made": 2,
        "pairs/tie": 1,
        "pairs/too_few": 1,
        "pairs/same_text": 1,
        "pairs/too_long": 1,
        "pairs/reward_gap": 2.0,
    }


def test_the_divergence_is_of_all_answers():
    found = divergence([answer(1.0, (1, 2, 3), 2), answer(0.0, (1, 2), 1)])
    assert found == {"kl/reference": 1.5, "kl/token": 1.0}


def test_a_pair_stays_in_one_row():
    pairs = [(answer(1.0, (1,) * n), answer(0.0, (2,) * m)) for n, m in ((9, 8), (3, 2), (8, 9))]
    batch = packed(pairs, run_of(**{"data.seq_len": 18}), 0)
    assert batch.num_rows == 2
    for docs_T, tokens_T in zip(batch.docs_BT, batch.tokens_BT, strict=True):
        for doc in range(int(docs_T.max()) + 1):
            assert set(tokens_T[docs_T == doc].tolist()) == {1 + doc % 2}
