"""Losses of scores against a naive float64 reference, and under every split of a batch."""

import math
import random

import pytest
import torch

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.loader import rank_rows
from stepwell.data.preference import Labelled, Pair, Stepwise
from stepwell.models.transformer import TokenOutputs
from stepwell.parallel.mesh import init_distributed
from stepwell.posttrain.reward_model.heldout import Scored, pair_metrics
from stepwell.posttrain.reward_model.losses import (
    at_places,
    binary_nll,
    bradley_terry_nll,
    class_nll,
    pair_square,
    reward_loss,
    step_chance,
    step_nll,
)
from stepwell.posttrain.reward_model.rows import pack
from stepwell.train.engine import Engine
from tests.oracle import VOCAB, assert_same, base_run, full
from tests.parallel.ranks import run_jobs
from tests.reward_rows import method_of

LENGTH = 24
CASES = {
    "pairs": {"method.margins": True, "method.centre_coef": 0.3},
    "regression": {"method.objective": "regression"},
    "binary": {"method.objective": "classification"},
    "classes": {"method.objective": "classification", "model.num_labels": 3},
    "steps": {"method.objective": "process"},
    "steps2": {"method.objective": "process", "model.num_labels": 2},
}


def run_of(case: str, **more) -> Run:
    values = {"method.kind": "reward", "model.head": "score", "data.seq_len": LENGTH}
    return base_run(**{**values, **CASES[case], **more})


def rows_of(run: Run) -> list:
    """Seven rows of very different lengths; labels that float32 holds exactly."""
    rng = random.Random(0)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(low, high)))

    def eighths() -> float:
        return rng.randrange(9) / 8

    objective = method_of(run).objective
    if objective == "bradley-terry":
        return [Pair(ids(1, 3), ids(1, 9), ids(1, 9), margin=eighths()) for _ in range(7)]
    if objective == "process":
        return [
            Stepwise(ids(1, 3), (ids(1, 4), ids(2, 4), ids(1, 3)), (1.0, None, eighths()))
            for _ in range(7)
        ]
    label = {"regression": lambda: rng.randrange(-9, 9) / 8}.get(objective)
    draw = label or (lambda: rng.randrange(max(run.model.num_labels, 2)))
    return [Labelled(ids(1, 3), ids(1, 20), draw()) for _ in range(7)]


def batch_of(run: Run) -> Batch:
    rows = rows_of(run)
    return pack(rows, run, 0, range(len(rows)))


# --- known values --------------------------------------------------------------------------------


def test_bradley_terry_of_known_scores():
    def nll(chosen, rejected, margin=0.0):
        return bradley_terry_nll(torch.tensor(chosen), torch.tensor(rejected), margin).item()

    assert nll(0.7, 0.7) == pytest.approx(math.log(2))
    assert nll(1.0, 2.0) == pytest.approx(1.313262, abs=1e-6)
    assert nll(2.0, 1.0, 2.0) == pytest.approx(1.313262, abs=1e-6)
    assert nll(0.0, 1000.0) == pytest.approx(1000.0)
    assert nll(1000.0, 0.0) == 0.0
    assert pair_square(torch.tensor(3.0), torch.tensor(-1.0)).item() == 4.0
    assert step_chance(torch.tensor([[2.0]])).item() == pytest.approx(0.880797, abs=1e-6)
    assert step_chance(torch.tensor([[1.5, 3.5]])).item() == pytest.approx(0.880797, abs=1e-6)


def test_the_fit_recovers_differences_only():
    """Scores from the exact chances of all pairs: right once both are centred, and any constant
    fits as well."""
    true = torch.tensor([1.5, -0.5, 0.2, 3.0], dtype=torch.float64)
    fitted = torch.full_like(true, 7.0).requires_grad_()
    i, j = torch.combinations(torch.arange(4)).T
    chance = (true[i] - true[j]).sigmoid()

    def loss(scores):
        gap = scores[i], scores[j]
        return (
            chance * bradley_terry_nll(*gap) + (1 - chance) * bradley_terry_nll(*gap[::-1])
        ).sum()

    optimizer = torch.optim.LBFGS([fitted], max_iter=200, tolerance_grad=1e-12)

    def closure():
        optimizer.zero_grad()
        value = loss(fitted)
        value.backward()
        return value

    optimizer.step(closure)
    found = fitted.detach()
    assert (found - true).abs().min() > 1  # the constant is that of the start
    torch.testing.assert_close(found - found.mean(), true - true.mean(), atol=1e-5, rtol=0)
    assert loss(found).item() == pytest.approx(loss(true + 100).item(), abs=1e-9)


def test_soft_labels_and_their_two_heads_agree():
    generator = torch.Generator().manual_seed(0)
    scores_MC = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    labels_M = torch.rand(9, generator=generator, dtype=torch.float64)
    gap_M = scores_MC[:, 1] - scores_MC[:, 0]
    torch.testing.assert_close(step_nll(scores_MC, labels_M), binary_nll(gap_M, labels_M))
    torch.testing.assert_close(step_chance(scores_MC), step_chance(gap_M[:, None]))
    hard_M = (labels_M > 0.5).long()
    torch.testing.assert_close(step_nll(scores_MC, hard_M.double()), class_nll(scores_MC, hard_M))


# --- against a naive reference -------------------------------------------------------------------


def naive(run: Run, rows: list, scores: list) -> torch.Tensor:
    """The mean loss of the rows, written out. scores: each row's, in the order of its places."""
    method, total, count = method_of(run), torch.zeros(()), 0
    for row, found in zip(rows, scores, strict=True):
        if isinstance(row, Pair):
            (chosen,), (rejected,) = found
            gap = chosen - rejected - row.margin
            total = total + torch.log1p(torch.exp(-gap))
            total = total + method.centre_coef * (chosen + rejected) ** 2
            count += 1
        elif isinstance(row, Labelled) and method.objective == "regression":
            total, count = total + (found[0][0] - row.label) ** 2, count + 1
        else:
            labels = (
                [row.label]
                if isinstance(row, Labelled)
                else [l for l in row.labels if l is not None]
            )
            for score, label in zip(found, labels, strict=True):
                if len(score) == 1:
                    score = torch.stack([torch.zeros_like(score[0]), score[0]])
                logp = score - score.exp().sum().log()
                if isinstance(row, Labelled):
                    total = total - logp[int(label)]
                else:
                    total = total - label * logp[1] - (1 - label) * logp[0]
                count += 1
    return total / count


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_equal_the_naive_reference(case):
    """Whatever stands elsewhere, NaN too, stays out."""
    run = run_of(case)
    rows, batch = rows_of(run), batch_of(run)
    loss = reward_loss(method_of(run), run.model.num_labels)
    shape = (*batch.tokens_BT.shape, run.model.num_labels)
    generator = torch.Generator().manual_seed(1)
    scores_BTC = torch.randn(shape, generator=generator, dtype=torch.float64)
    scores_BTC[batch.weights_BT == 0] = math.nan
    ours = scores_BTC.clone().requires_grad_()
    ((name, total),) = loss.fn(TokenOutputs(scores_BTC=ours), batch).sums.items()
    (total / loss.denominators(batch)[name]).backward()
    theirs = scores_BTC.clone().requires_grad_()
    index = at_places(batch.extra["index"], batch).tolist()
    at = at_places(theirs, batch)
    grouped = [[at[m] for m, i in enumerate(index) if i == row] for row in range(len(rows))]
    wanted = naive(run, rows, grouped)
    wanted.backward()
    assert (total / loss.denominators(batch)[name]).item() == pytest.approx(wanted.item(), 1e-9)
    shown, count = loss.fn(TokenOutputs(scores_BTC=ours), batch).metrics["loss"]
    assert (shown / count).item() == pytest.approx(wanted.item(), 1e-9), "what is trained"
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-9, rtol=1e-9)
    assert ours.grad is not None
    assert ours.grad[batch.weights_BT == 0].abs().max() == 0


def test_a_batch_of_nothing_is_finite_and_has_a_gradient():
    run = run_of("pairs")
    loss = reward_loss(method_of(run), 1)
    batch = batch_of(run).masked()
    scores = torch.randn(*batch.tokens_BT.shape, 1, requires_grad=True)
    found = loss.fn(TokenOutputs(scores_BTC=scores), batch)
    found.sums["pairs"].backward()
    assert found.sums["pairs"].item() == 0
    assert scores.grad is not None
    assert scores.grad.abs().max() == 0


def test_metrics_are_means_over_pairs():
    run = run_of("pairs")
    rows = [Pair((1,), (2, 3), (4,), margin=0.0), Pair((1,), (5,), (6,), margin=0.0)]
    coef = method_of(run).centre_coef
    batch = pack(rows, run, 0, [0, 1])
    scores_BTC = torch.zeros(*batch.tokens_BT.shape, 1)
    places = (batch.weights_BT != 0).nonzero()
    for (b, t), value in zip(places.tolist(), (3.0, 1.0, 0.5, 0.5), strict=True):
        scores_BTC[b, t] = value
    found = reward_loss(method_of(run), 1).fn(TokenOutputs(scores_BTC=scores_BTC), batch).metrics
    means = {name: (total / count).item() for name, (total, count) in found.items()}
    assert means["accuracy"] == 0.75  # a tie is half right
    assert means["margin"] == 1.0
    assert (means["score_chosen"], means["score_rejected"]) == (1.75, 0.75)
    nll = (math.log1p(math.exp(-2)) + math.log(2)) / 2
    assert means["nll"] == pytest.approx(nll)
    assert means["loss"] == pytest.approx(nll + coef * (4.0**2 + 1.0**2) / 2)
    plain = run_of("pairs", **{"method.centre_coef": 0.0})
    found = reward_loss(method_of(plain), 1).fn(TokenOutputs(scores_BTC=scores_BTC), batch).metrics
    assert "nll" not in found, "it is the loss"
    assert (found["loss"][0] / found["loss"][1]).item() == pytest.approx(nll)


def test_held_out_pairs_have_the_loss_that_is_trained():
    scores_MC = torch.tensor([[3.0], [1.0], [0.5], [0.5]], dtype=torch.float64)
    margins_M = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    scored = Scored(torch.tensor([0, 0, 1, 1]), scores_MC, margins_M)
    nll = (math.log1p(math.exp(-1)) + math.log(2)) / 2
    centred = pair_metrics(scored, 0.3)
    assert (centred["nll"], centred["loss"]) == pytest.approx((nll, nll + 0.3 * 17 / 2))
    assert pair_metrics(scored)["loss"] == pytest.approx(nll)


# --- under every split ---------------------------------------------------------------------------


def gradients(run: Run) -> dict[str, torch.Tensor]:
    """Runs in each rank: the gradients of this rank's rows of the batch."""
    mesh = init_distributed(run.layout)
    batch = batch_of(run)
    share = rank_rows(batch.num_rows, mesh.data_rank, mesh.data_world)
    engine = Engine(run, mesh=mesh)
    loss = reward_loss(method_of(run), run.model.num_labels)
    stats = engine.forward_backward(batch.rows(share.start, share.stop), loss)
    found = {n: full(p.grad) for n, p in engine.named_parameters() if p.grad is not None}
    return found | {f"metric/{n}": torch.tensor(v) for n, v in stats.metrics.items()}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_do_not_change_a_gradient(case):
    wanted = gradients(run_of(case, **{"train.micro_batch_rows": 99}))
    assert "score.weight" in wanted
    assert batch_of(run_of(case)).num_rows > 3
    for size in (1, 2, 3):
        got = gradients(run_of(case, **{"train.micro_batch_rows": size}))
        assert_same(got, wanted, 1e-9, f"{case} by {size}")


def test_ranks_do_not_change_a_gradient():
    """Data parallel for all; context parallel, which divides rows, for pairs and steps."""
    cases = {name: run_of(name) for name in CASES}
    cp = {f"{name}_cp": run_of(name, **{"layout.cp": 2}) for name in ("pairs", "steps")}
    jobs = {name: (gradients, run) for name, run in (cases | cp).items()}
    found = run_jobs(2, **jobs)
    for name, ranks in found.items():
        wanted = gradients(run_of(name.removesuffix("_cp"), **{"train.micro_batch_rows": 99}))
        for got in ranks:
            assert_same(got, wanted, 1e-9, name)
