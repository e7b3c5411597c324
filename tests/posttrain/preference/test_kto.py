"""kto's KL term: which answers meet which prompts, and its value over ranks."""

import math

import pytest
import torch

from stepwell.data.preference import Labelled
from stepwell.parallel.mesh import init_distributed
from stepwell.posttrain.preference.kto import (
    batch_kl,
    kl_term,
    known_sums,
    mismatched,
    mismatched_document,
    step_mismatches,
)
from stepwell.posttrain.preference.scored_references import document_totals
from stepwell.train.engine import Engine
from stepwell.types import ConfigError
from tests.oracle import base_run
from tests.parallel.ranks import run_ranks


def test_no_prompt_meets_an_answer_of_its_own():
    prompts = ["a", "a", "b", "c", "c", "c", "d"]
    answers = ["1", "2", "3", "4", "5", "6", "1"]
    partners = mismatched(prompts, answers)
    assert partners == [2, 2, 3, 6, 6, 6, 1]
    for i, j in enumerate(partners):
        assert prompts[i] != prompts[j]
        assert answers[i] != answers[j]


def test_a_batch_without_partners_is_refused():
    with pytest.raises(ConfigError, match="the fewest is 2"):
        mismatched(["a"], ["1"])
    assert mismatched(["a", "b"], ["1", "2"]) == [1, 0]
    with pytest.raises(ConfigError, match="all have its prompt"):
        mismatched(["a", "a"], ["1", "2"])
    with pytest.raises(ConfigError, match="all have its prompt"):
        mismatched(["a", "b"], ["1", "1"])


def test_the_term_is_at_least_zero_and_a_number():
    ratios = torch.tensor([-3.0, 1.0], requires_grad=True)
    assert kl_term(ratios) == 0.0
    assert kl_term(-ratios) == 1.0
    assert isinstance(kl_term(ratios), float)
    with pytest.raises(ConfigError, match="the fewest is 2"):
        kl_term(torch.ones(1))


ROWS = [
    Labelled((1, 2), (5, 6, 7), True),
    Labelled((1, 3, 4), (8, 9), False),
    Labelled((2,), (10, 11, 12, 13), True),
    Labelled((7, 7), (14,), False),
    Labelled((9,), (15, 16), False),
]


def test_a_document_is_cut_to_the_rows_length():
    assert mismatched_document(ROWS, (1, 2), 20) == (
        (1, 3, 4, 10, 11, 12, 13),
        (0, 0, 0, 1, 1, 1, 1),
    )
    assert mismatched_document(ROWS, (1, 2), 5) == ((1, 3, 4, 10, 11), (0, 0, 0, 1, 1))


def measured_kl(micro_batch_rows: int) -> float:
    run = base_run(**{"train.micro_batch_rows": micro_batch_rows})
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    mismatches = step_mismatches(ROWS, [0, 2, 4, 1, 3])
    sums = {m: -12.0 - 3 * m[0] for m in mismatches}
    reference = known_sums(sums, lambda: engine.logprobs)
    return batch_kl(engine.logprobs, reference, ROWS, mismatches, run, 0, mesh)


def test_the_term_is_that_of_the_global_batch():
    run = base_run()
    engine = Engine(run)
    total = 0.0
    for mismatch in step_mismatches(ROWS, [0, 2, 4, 1, 3]):
        ids, mask = mismatched_document(ROWS, mismatch, 16)
        tokens = torch.tensor([ids])
        from stepwell.data.packing import pack_rows

        batch = pack_rows([(ids, mask)], 16)
        assert tokens.shape[1] == len(ids)
        total += document_totals(engine.logprobs(batch), batch).item() + 12.0 + 3 * mismatch[0]
    wanted = max(0.0, total / 5)
    assert wanted > 0
    assert measured_kl(1) == pytest.approx(wanted, rel=1e-6)
    assert measured_kl(9) == pytest.approx(wanted, rel=1e-6)
    for found in run_ranks(measured_kl, 2, 1):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_what_was_not_foreseen_is_scored():
    from stepwell.data.packing import pack_rows

    batch = pack_rows([mismatched_document(ROWS, (0, 1), 16)], 16)
    known = known_sums({(0, 1): -1.5}, lambda: pytest.fail("needless"))
    assert known([(0, 1)], batch).tolist() == [-1.5]
    later = known_sums({}, lambda: lambda batch: torch.full(batch.weights_BT.shape, -2.0))
    assert later([(0, 1)], batch).tolist() == [-4.0]
    assert math.isfinite(later([(0, 1)], batch).item())
