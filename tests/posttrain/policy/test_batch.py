from itertools import chain

import numpy as np
import pytest
import torch

from stepwell.parallel.mesh import Mesh
from stepwell.parallel.rules import AxisSizes
from stepwell.posttrain.answers import answers_of
from stepwell.posttrain.policy.batch import minibatches, num_trained, penalised, with_advantages
from stepwell.posttrain.policy.loss import ADVANTAGES, OLD, REFERENCE, denominators
from tests import oracle
from tests.posttrain.policy_cases import method_of, policy_run, single, some_rollouts


def answers():
    return answers_of(some_rollouts())


def test_rollouts_are_packed_token_in_token_out():
    method = method_of(policy_run())
    known = with_advantages(answers(), method)
    (batch,) = minibatches(known, method, oracle.LENGTH, 0, single(), [0])
    found = []
    for row in range(batch.num_rows):
        for doc in batch.docs_BT[row].unique():
            if doc >= 0:
                at = (batch.docs_BT[row] == doc) & (batch.weights_BT[row] != 0)
                values = batch.extra[ADVANTAGES][row][at].unique().tolist()
                found.append((batch.targets_BT[row][at].tolist(), values))
    wanted = [
        (list(a.ids[-a.num_trained :]), [pytest.approx(a.streams[ADVANTAGES][-1])]) for a in known
    ]
    assert len(found) == len(wanted)
    assert all(pair in found for pair in wanted)
    trained = batch.weights_BT != 0
    assert batch.extra[OLD][trained].isnan().all()
    assert (batch.extra["sampler_logprobs"][trained] == -4).all()


@pytest.mark.parametrize("data_world", [1, 2])
def test_minibatches_hold_every_answer_once_an_update_in_another_order(data_world):
    method = method_of(policy_run(**{"method.minibatches": 3, "method.updates_per_rollout": 2}))
    known = [a.adding(**{OLD: a.trained_L * -1.0}) for a in with_advantages(answers(), method)]

    steps: list[list[int]] = []
    for rank in range(data_world):
        mesh = Mesh(data_world, rank, rank, torch.device("cpu"), AxisSizes(dp_shard=data_world))
        for i, batch in enumerate(minibatches(known, method, oracle.LENGTH, 0, mesh, [0])):
            if len(steps) <= i:
                steps.append([])
            steps[i] += batch.targets_BT[batch.weights_BT != 0].tolist()
            seen = batch.extra[OLD][batch.weights_BT != 0]
            assert seen.isnan().all() if i == 0 else (seen == -1).all()
    every = sorted(t for a in known for t in a.ids[-a.num_trained :])
    assert len(steps) == 6
    assert sorted(chain(*steps[:3])) == sorted(chain(*steps[3:])) == every
    assert [sorted(s) for s in steps[:3]] != [sorted(s) for s in steps[3:]]


def test_cut_answers_carry_no_loss_when_masked():
    keep, mask = (method_of(policy_run(**{"method.overlong": how})) for how in ("keep", "mask"))
    known = answers()
    cut = [a for a in known if a.truncated]
    assert cut
    assert all(num_trained(a, mask) == 0 < num_trained(a, keep) for a in cut)
    lengths = [num_trained(a, mask) for a in known]
    (batch,) = minibatches(with_advantages(known, mask), mask, oracle.LENGTH, 0, single(), [0])
    assert (batch.weights_BT != 0).sum() == sum(lengths)
    assert denominators(mask, lengths) == {"answers": sum(lengths)}
    sequence = method_of(policy_run(**{"method.aggregate": "sequence"}))
    assert denominators(sequence, lengths, 2) == {"answers": (12 - len(cut)) / 2}
    # The baseline still knows their rewards.
    assert [a.streams[ADVANTAGES].tolist() for a in with_advantages(known, mask)] == [
        a.streams[ADVANTAGES].tolist() for a in with_advantages(known, keep)
    ]


def test_divergence_in_the_reward_is_summed_over_an_answer():
    """k1 of a policy that gives e^-4 where the reference gives e^-3: -1 a token."""
    overrides = {"method.kl_coef": 0.5, "method.kl_in": "reward", "method.kl_estimator": "k1"}
    method = method_of(policy_run(**overrides))
    known = [a.adding(**{REFERENCE: a.trained_L * -3.0}) for a in answers()]
    for answer in known:
        wanted = None if answer.reward is None else answer.reward + 0.5 * answer.num_trained
        assert penalised(answer, method) == wanted
    # A dead group comes alive: its answers have different lengths.
    found = [a.streams[ADVANTAGES].sum() for a in with_advantages(known, method)[8:]]
    assert np.abs(found).min() > 0
    plain = [a.streams[ADVANTAGES].sum() for a in with_advantages(known, method_of(policy_run()))]
    assert plain[8:] == [0] * 4


def test_streams_survive_rows():
    """float32 numbers come back from rows as they went in."""
    method = method_of(policy_run(**{"method.minibatches": 2}))
    known = [
        a.adding(**{OLD: a.trained_L * -np.arange(len(a.ids))})
        for a in with_advantages(answers(), method)
    ]
    _, second = minibatches(known, method, oracle.LENGTH, 0, single(), [0])
    trained = second.weights_BT != 0
    ends = second.positions_BT[trained] + 1
    assert torch.equal(second.extra[OLD][trained], -ends.float())
