"""Answers of a group with their prompt once in a row: the numbers of whole documents."""

import numpy as np
import pytest
import torch

from stepwell.data.shared_prompts import whole_lengths
from stepwell.posttrain.answers import answers_of, packed, places, scoring_rows, unpacked
from stepwell.posttrain.policy.batch import minibatches, with_advantages
from stepwell.posttrain.policy.loss import denominators, policy_loss
from stepwell.posttrain.ppo.loss import policy_loss as ppo_loss
from stepwell.posttrain.ppo.loss import shared as shared_denominators
from stepwell.posttrain.ppo.targets import ask, passes, with_targets
from stepwell.sections.methods import PPO
from stepwell.train.engine import Engine
from tests.oracle import LENGTH, assert_same, base_run, full
from tests.posttrain.policy_cases import (
    method_of,
    policy_run,
    single,
    some_answers,
    some_rollouts,
)

# Short rows divide the groups, long ones hold several.
LENGTHS = (LENGTH, 48)
STEP = 32


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_a_row_has_a_prompt_once(seq_len: int):
    answers = answers_of(some_rollouts())
    lengths = [len(a.ids) - 1 for a in answers]
    rows, length = places(answers, lengths, seq_len, STEP)
    assert sorted(place.number for row in rows for place in row) == list(range(len(answers)))
    assert length <= seq_len
    batch = packed(answers, seq_len, 0, step=STEP)
    assert batch.tokens_BT.shape == (len(rows), length)
    plain = packed(answers, seq_len, 0)
    assert sorted(whole_lengths(batch)) == sorted(whole_lengths(plain)) == sorted(lengths)
    assert batch.weights_BT.sum() == plain.weights_BT.sum()
    saved = sum(skipped for row in rows for _, skipped in row)
    assert (plain.docs_BT >= 0).sum() - (batch.docs_BT >= 0).sum() == saved
    # Prompts of 3, 4 and 5 tokens, whose last one every answer has, and the first answer all.
    if seq_len == 48:
        assert saved == 3 * (2 + 3 + 4)
    else:
        assert 0 < saved < 3 * (2 + 3 + 4)


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_what_a_pass_says_of_each_answer(seq_len: int):
    answers, engine = answers_of(some_rollouts()), Engine(policy_run())
    said = []
    for step in (0, STEP):
        batch, rows = scoring_rows(answers, seq_len, 0, step)
        said.append(unpacked(engine.logprobs(batch), answers, rows))
    for one, other in zip(said[0][0], said[1][0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    np.testing.assert_allclose(said[0][1], said[1][1], rtol=1e-6)
    assert any(said[0][1])


@pytest.mark.parametrize("objective", ["clip", "cispo", "gspo"])
@pytest.mark.parametrize("seq_len", LENGTHS)
def test_gradients_of_grpo(objective: str, seq_len: int):
    run = policy_run(**{"method.objective": objective, "method.overlong": "mask"})
    method, engine = method_of(run), Engine(run)
    answers = with_advantages(some_answers(engine), method)
    divisors = denominators(method, [a.num_trained for a in answers])
    found = []
    for step in (0, STEP):
        batch, *_ = minibatches(answers, method, seq_len, 0, single(), [0], step)
        engine.drop_gradients()
        engine.forward_backward(batch, policy_loss(method), denominators=divisors)
        found.append({n: full(p.grad) for n, p in engine.named_parameters() if p.grad is not None})
    assert_same(found[1], found[0], 1e-9, objective)


def test_gradients_of_ppo():
    """A shared trunk with groups: log-probabilities and values of one pass. The layout that needs
    whole documents says what they are."""
    keys = {"method.kind": "ppo", "method.critic": "shared", "model.head": "both"}
    keys |= {"method.max_new_tokens": 8}
    found = []
    for more in ({"lora.rank": 0}, {"layout.compile": True}):
        run = base_run(**{**keys, "method.updates_per_rollout": 2, "data.seq_len": 48})
        method, engine = run.method, Engine(run)
        assert isinstance(method, PPO)
        told = run.model_copy(
            update={"layout": run.layout.model_copy(update={"compile": "layout.compile" in more})}
        )
        answers = [a for a in answers_of(some_rollouts()) if a.reward is not None]
        answers, _ = with_targets(ask(answers, engine, None, None, 0), method, 0.1)
        loss = ppo_loss(method, 0.1)
        batch, divisors = next(iter(passes(answers, told, 0, single(), 0)))
        part = shared_denominators(divisors, loss, batch)
        engine.forward_backward(batch, loss, denominators=part)
        found.append({n: full(p.grad) for n, p in engine.named_parameters() if p.grad is not None})
        found[-1]["places"] = torch.tensor(float(batch.tokens_BT.numel()))
    assert found[0].pop("places") < found[1].pop("places")
    assert_same(found[0], found[1], 1e-9)
