"""Each loss against a naive float64 reference, in closed forms, and over every split of a batch."""

import math

import pytest
import torch

from stepwell.data.loader import rank_rows
from stepwell.data.pair_packing import pack_labelled, pack_pairs
from stepwell.data.preference import Labelled, Pair
from stepwell.models.transformer import ForwardOptions, TokenOutputs
from stepwell.parallel.mesh import init_distributed
from stepwell.posttrain.preference.losses import (
    KL,
    REFERENCE,
    ROUNDING,
    PairLogps,
    bounded_exp,
    dpo,
    dpo_positive,
    hinge,
    implicit_reward,
    ipo,
    kto,
    log_odds,
    orpo,
    pair_losses,
    preference_loss,
    robust_dpo,
    simpo,
    wins,
)
from stepwell.posttrain.preference.scored_references import with_stream
from stepwell.sections.preference import PreferenceLoss
from stepwell.train.engine import Engine
from stepwell.train.losses import document_sums
from stepwell.types import ConfigError
from tests.oracle import VOCAB, base_run, full
from tests.parallel.ranks import run_ranks

D = torch.float64
SEQ_LEN, NUM = 24, 7
CONFIGS = {
    "dpo": {},
    "smoothed": {"label_smoothing": 0.1},
    "mean": {"length_normalised": True, "beta": 2.0},
    "robust": {"kind": "robust", "label_smoothing": 0.2},
    "ipo": {"kind": "ipo"},
    "ipo-mean": {"kind": "ipo", "length_normalised": True},
    "hinge": {"kind": "hinge", "beta": 0.3},
    "simpo": {"kind": "simpo", "beta": 2.0, "margin": 1.0},
    "cpo": {"kind": "cpo", "beta": 0.2},
    "cpo-free": {"kind": "cpo", "sft_coef": 0.0},
    "orpo": {"kind": "orpo", "beta": 0.3},
    "dpop": {"kind": "dpop", "positive_coef": 5.0},
    "rpo": {"sft_coef": 0.7},
    "forward-kl": {"divergence": "forward-kl"},
    "js": {"divergence": "js", "beta": 0.5},
    "alpha": {"divergence": "alpha", "alpha": 0.3},
}


def grad_of(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad


def naive(config: PreferenceLoss, policy, reference, lengths) -> torch.Tensor:
    """One pair, in scalars, as the papers write it. policy, reference: (chosen, rejected) sums."""

    def cost(x):
        """-log(1 / (1 + exp(-x)))"""
        return torch.log(1 + torch.exp(-x.abs())) + torch.clamp(-x, min=0)

    w, l = policy
    rw, rl = reference
    mean_w, mean_l = w / lengths[0], l / lengths[1]
    sft = -mean_w
    beta, e = config.beta, config.label_smoothing
    coef = config.sft_coef
    if config.kind == "simpo":
        loss = cost(beta * mean_w - beta * mean_l - config.margin)
        return loss + (coef or 0) * sft
    if config.kind == "orpo":
        pw, pl = torch.exp(mean_w), torch.exp(mean_l)
        ratio = (pw / (1 - pw)) / (pl / (1 - pl))
        return sft + beta * cost(torch.log(ratio))
    if config.kind == "cpo":
        return cost(beta * w - beta * l) + (1.0 if coef is None else coef) * sft
    if config.length_normalised:
        w, l, rw, rl = mean_w, mean_l, rw / lengths[0], rl / lengths[1]
    u, v = torch.exp(w - rw), torch.exp(l - rl)
    slope = {
        "reverse-kl": lambda u: torch.log(u) + 1,
        "forward-kl": lambda u: -1 / u,
        "js": lambda u: torch.log(2 * u / (1 + u)),
        "alpha": lambda u: (1 - u**-config.alpha) / config.alpha,
    }[config.divergence]
    m = beta * (slope(u) - slope(v))
    if config.kind == "ipo":
        return ((w - rw) - (l - rl) - 1 / (2 * beta)) ** 2 + (coef or 0) * sft
    if config.kind == "hinge":
        return torch.clamp(1 - m, min=0)
    if config.kind == "dpop":
        penalty = config.positive_coef * torch.clamp(torch.log(1 / u), min=0)
        return cost(beta * (torch.log(u / v) - penalty))
    good, bad = cost(m), cost(-m)
    if config.kind == "robust":
        return ((1 - e) * good - e * bad) / (1 - 2 * e)
    return (1 - e) * good + e * bad + (coef or 0) * sft


@pytest.mark.parametrize("name", CONFIGS)
def test_pure_losses_are_the_papers(name):
    config = PreferenceLoss(**CONFIGS[name])
    generator = torch.Generator().manual_seed(1)
    lengths = PairLogps(*torch.randint(2, 9, (2, 40), generator=generator).to(D))
    values = -0.5 * torch.rand(4, 40, dtype=D, generator=generator) * torch.stack([*lengths] * 2)
    mine = values.clone().requires_grad_()
    theirs = values.clone().requires_grad_()
    got = pair_losses(config, PairLogps(*mine[:2]), PairLogps(*mine[2:].detach()), lengths)
    wanted = torch.stack(
        [
            naive(config, theirs[:2, i], theirs[2:, i].detach(), (lengths[0][i], lengths[1][i]))
            for i in range(40)
        ]
    )
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    (g,) = torch.autograd.grad(got.sum(), mine)
    (h,) = torch.autograd.grad(wanted.sum(), theirs)
    torch.testing.assert_close(g, h, rtol=1e-9, atol=1e-10)


# --- closed forms --------------------------------------------------------------------------------


def test_dpo_in_closed_form():
    assert dpo(torch.zeros(1, dtype=D)).item() == pytest.approx(math.log(2), abs=1e-12)
    ratio = torch.tensor(0.5, dtype=D, requires_grad=True)
    loss = dpo(0.1 * (ratio - torch.tensor(-1.0, dtype=D)))
    assert loss.item() == pytest.approx(0.620957, abs=5e-7)
    loss.backward()
    assert grad_of(ratio).item() == pytest.approx(-0.046257, abs=5e-7)
    margin = torch.tensor([-200.0, 200.0, -1e4], requires_grad=True)  # float32
    losses = dpo(margin)
    assert losses.tolist() == [200.0, 0.0, 1e4]
    losses.sum().backward()
    assert grad_of(margin).tolist() == [-1.0, 0.0, -1.0]


def test_the_others_at_the_start():
    zero = torch.zeros(3, dtype=D)
    assert ipo(zero, 0.1).tolist() == pytest.approx([25.0] * 3)
    assert hinge(zero).tolist() == [1.0] * 3
    assert robust_dpo(zero, 0.2).tolist() == pytest.approx([math.log(2)] * 3)
    assert simpo(PairLogps(zero, zero), 2.0, 0.0).tolist() == pytest.approx([math.log(2)] * 3)
    good = torch.tensor([True, False, True])
    found = kto(zero, good, 0.0, 0.1, 2.0, 3.0)
    assert found.tolist() == [1.0, 1.5, 1.0]


def test_robust_is_unbiased():
    """With a share e of labels swapped its mean is DPO's loss on the right ones."""
    m, e = torch.linspace(-3, 3, 7, dtype=D), 0.3
    mixed = (1 - e) * robust_dpo(m, e) + e * robust_dpo(-m, e)
    torch.testing.assert_close(mixed, dpo(m), rtol=1e-12, atol=1e-12)


def test_smoothed_dpo_has_its_minimum_where_the_labels_say():
    """sigmoid(m) = 1 - e."""
    m = torch.tensor(math.log(0.9 / 0.1), dtype=D, requires_grad=True)
    dpo(m, 0.1).backward()
    assert abs(grad_of(m).item()) < 1e-12


def test_dpo_positive_punishes_only_a_fall_of_the_chosen():
    reference = PairLogps(torch.tensor([-5.0]), torch.tensor([-5.0]))
    risen = PairLogps(torch.tensor([-4.0]), torch.tensor([-6.0]))
    fallen = PairLogps(torch.tensor([-6.0]), torch.tensor([-8.0]))
    plain = dpo(torch.tensor([0.2]))
    assert torch.allclose(dpo_positive(risen, reference, 0.1, 50.0), plain)
    assert dpo_positive(fallen, reference, 0.1, 0.0).item() < math.log(2)
    assert dpo_positive(fallen, reference, 0.1, 50.0).item() > 4.0


@pytest.mark.parametrize("compute", ROUNDING)
def test_dpo_positive_charges_nothing_for_rounding(compute):
    """Its charge has a kink where training starts: below the reference it is 51 times as steep."""
    config = PreferenceLoss(kind="dpop")
    reference = PairLogps(torch.tensor([-20.0], dtype=D), torch.tensor([-30.0], dtype=D))
    free = 20 * ROUNDING[compute]

    def slope(fall: float) -> float:
        chosen = (reference.chosen - fall).requires_grad_()
        policy = PairLogps(chosen, reference.rejected)
        lengths = PairLogps(torch.ones(1, dtype=D), torch.ones(1, dtype=D))
        pair_losses(config, policy, reference, lengths, ROUNDING[compute]).sum().backward()
        return grad_of(chosen).item()

    plain = -0.1 / 2
    assert slope(0.0) == pytest.approx(plain)
    assert slope(0.9 * free) == pytest.approx(plain, rel=0.1)
    assert slope(1.1 * free) == pytest.approx(51 * plain, rel=0.5)


def test_the_kl_tilted_optimum():
    """DPO on infinite Bradley-Terry data with r = (1, 0), beta .5 and a fair reference ends at
    sigmoid(2)."""
    logit = torch.zeros((), dtype=D, requires_grad=True)
    right = torch.sigmoid(torch.tensor(1.0, dtype=D))
    for _ in range(400):
        logp = torch.nn.functional.logsigmoid(torch.stack([logit, -logit]))
        margin = 0.5 * ((logp[0] - math.log(0.5)) - (logp[1] - math.log(0.5)))
        loss = right * dpo(margin) + (1 - right) * dpo(-margin)
        (grad,) = torch.autograd.grad(loss, logit)
        logit = (logit - 10.0 * grad).detach().requires_grad_()
    assert torch.sigmoid(logit).item() == pytest.approx(0.880797, abs=1e-6)


@pytest.mark.parametrize("divergence", ["forward-kl", "js", "alpha"])
@pytest.mark.parametrize("far", [-300.0, 300.0])
def test_divergences_stay_finite_far_from_the_reference(divergence, far):
    x = torch.tensor(far, requires_grad=True)
    loss = dpo(0.1 * (implicit_reward(x, divergence, 0.5) - implicit_reward(-x, divergence, 0.5)))
    loss.backward()
    assert loss.isfinite()
    assert grad_of(x).isfinite()
    assert (grad_of(x) <= 0) if far < 0 else (grad_of(x).abs() < 1e-3)


def test_the_bounded_exponential_on_both_sides_of_its_bound():
    x = torch.tensor([29.0, 30.0, 32.0], dtype=D, requires_grad=True)
    y = bounded_exp(x)
    assert y.tolist() == pytest.approx([math.exp(29), math.exp(30), 3 * math.exp(30)])
    y.sum().backward()
    assert grad_of(x).tolist() == pytest.approx([math.exp(29), math.exp(30), math.exp(30)])


def test_log_odds_at_both_ends():
    x = torch.tensor([-50.0, -1.0, -math.log(2), -1e-3, 0.0], dtype=D, requires_grad=True)
    odds = log_odds(x)
    assert odds[0].item() == pytest.approx(-50)
    assert odds[2].item() == pytest.approx(0, abs=1e-15)
    assert odds[3].item() == pytest.approx(math.log(math.exp(-1e-3) / (1 - math.exp(-1e-3))))
    odds.sum().backward()
    assert grad_of(x).isfinite().all()
    assert orpo(PairLogps(x[:1], x[4:])).isfinite().all()


def test_a_tie_is_half_a_win():
    assert wins(torch.tensor([2.0, 1.0, 0.0]), torch.ones(3)).tolist() == [1.0, 0.5, 0.0]


# --- through the engine --------------------------------------------------------------------------


def pairs() -> list[Pair]:
    generator = torch.Generator().manual_seed(5)

    def ids(low, high):
        count = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())

    return [Pair(ids(1, 5), ids(1, 7), ids(1, 7)) for _ in range(NUM)]


def batches(kind: str):
    """The global batch, and what is known of its documents."""
    generator = torch.Generator().manual_seed(6)
    found = pairs()
    sums = -20 * torch.rand(NUM, 2, generator=generator)
    if kind != "kto":
        return pack_pairs(found, SEQ_LEN, streams={REFERENCE: sums.numpy()})
    rows = [Labelled(p.prompt_ids, p.chosen_ids, i % 3 == 0) for i, p in enumerate(found)]
    kl = torch.full((NUM,), 0.7)
    return pack_labelled(rows, SEQ_LEN, streams={REFERENCE: sums[:, 0].numpy(), KL: kl.numpy()})


def gradients(engine: Engine, batch, config: PreferenceLoss) -> dict[str, torch.Tensor]:
    stats = engine.forward_backward(batch, preference_loss(config))
    found = {"loss": torch.tensor(stats.loss, dtype=D)}
    found |= {f"metric/{k}": torch.tensor(v, dtype=D) for k, v in stats.metrics.items()}
    found |= {k: full(grad_of(p)) for k, p in engine.named_parameters()}
    engine.drop_gradients()
    return found


ALL = {**CONFIGS, "kto": {"kind": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5}}


def all_gradients(micro_batch_rows: int) -> dict[str, dict[str, torch.Tensor]]:
    """Of this rank's rows of each loss's batch."""
    run = base_run(**{"data.seq_len": SEQ_LEN, "train.micro_batch_rows": micro_batch_rows})
    mesh = init_distributed(run.layout)
    engine, found = Engine(run, mesh=mesh), {}
    for name, values in ALL.items():
        batch = batches(values.get("kind", "dpo"))
        share = rank_rows(batch.num_rows, mesh.data_rank, mesh.data_world)
        config = PreferenceLoss(**values)
        found[name] = gradients(engine, batch.rows(share.start, share.stop), config)
    return found


@pytest.fixture(scope="module")
def whole():
    return all_gradients(99)


def assert_same(got, wanted, tolerance=1e-9):
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        for key, want in values.items():
            scale = max(want.abs().max().item(), 1e-3)
            off = (got[name][key].double() - want).abs().max().item()
            assert off <= tolerance * scale, f"{name}: {key} off by {off:.3g} of {scale:.3g}"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_micro_batches_change_nothing(whole, rows):
    assert_same(all_gradients(rows), whole)


@pytest.mark.parametrize("ranks", [2])
def test_ranks_change_nothing(whole, ranks):
    for got in run_ranks(all_gradients, ranks, 1):
        assert_same(got, whole)


def test_the_batch_is_the_mean_of_naive_pairs(whole):
    """Each answer by itself, unpacked, through plain softmax; gradients by autograd."""
    engine = Engine(base_run(**{"data.seq_len": SEQ_LEN}))
    weights = dict(engine.named_parameters())
    sums = -20 * torch.rand(NUM, 2, generator=torch.Generator().manual_seed(6))

    def logp(ids, mask):
        tokens = torch.tensor([ids])
        outputs = engine.decoder(
            tokens[:, :-1],
            torch.arange(len(ids) - 1)[None],
            torch.tensor([0, len(ids) - 1], dtype=torch.int32),
            options=ForwardOptions(needs=frozenset({"logits"}), dtype=D),
        )
        table = torch.log(torch.softmax(outputs.logits_BTV[0], -1))
        taken = table[torch.arange(len(ids) - 1), tokens[0, 1:]]
        return (taken * torch.tensor(mask[1:], dtype=D)).sum()

    for name, values in ALL.items():
        config, total = PreferenceLoss(**values), torch.zeros((), dtype=D)
        for i, pair in enumerate(pairs()):
            reference = sums[i].double()
            chosen, rejected = logp(*pair.chosen), logp(*pair.rejected)
            lengths = sum(pair.chosen[1]), sum(pair.rejected[1])
            if config.kind == "kto":
                gap = config.beta * (chosen - reference[0] - torch.tensor(0.7).double())
                good, weight = (1, 1.5) if i % 3 == 0 else (-1, 0.5)
                total = total + weight * (1 - 1 / (1 + torch.exp(-good * gap)))
            else:
                total = total + naive(config, (chosen, rejected), reference, lengths)
        wanted = torch.autograd.grad(total / NUM, list(weights.values()))
        got = whole[name]
        assert got["loss"].item() == pytest.approx(total.item() / NUM, rel=1e-9), name
        for key, want in zip(weights, wanted, strict=True):
            scale = max(want.abs().max().item(), 1e-3)
            assert (got[key] - want).abs().max() <= 1e-8 * scale, f"{name}: {key}"


def test_metrics_are_what_they_say():
    """beta is in the rewards once; the margin is their difference; ratios are in nats."""
    run = base_run(**{"data.seq_len": SEQ_LEN})
    engine, batch = Engine(run), batches("dpo")
    config = PreferenceLoss(beta=0.25)
    seen = engine.forward_backward(batch, preference_loss(config)).metrics
    engine.drop_gradients()
    logprobs = engine.logprobs(batch).double()
    totals = {}
    for b in range(batch.num_rows):
        for d in range(int(batch.docs_BT[b].max()) + 1):
            at = (batch.docs_BT[b] == d) & (batch.weights_BT[b] != 0)
            number = int(batch.extra["index"][b][at][0])
            reference = float(batch.extra[REFERENCE][b][at][0])
            totals[number, d % 2] = float(logprobs[b][at].sum()), reference, int(at.sum())
    chosen, rejected = ([totals[i, side] for i in range(NUM)] for side in (0, 1))
    mean = lambda values: sum(values) / NUM
    shift = [mean([a - r for a, r, _ in side]) for side in (chosen, rejected)]
    assert seen["logps/chosen"] == pytest.approx(mean([a for a, _, _ in chosen]), rel=1e-6)
    assert seen["logps/chosen_shift"] == pytest.approx(shift[0], rel=1e-5)
    assert seen["rewards/chosen"] == pytest.approx(0.25 * shift[0], rel=1e-5)
    assert seen["rewards/rejected"] == pytest.approx(0.25 * shift[1], rel=1e-5)
    assert seen["rewards/margin"] == pytest.approx(0.25 * (shift[0] - shift[1]), rel=1e-5)
    tokens = sum(n for _, _, n in rejected)
    assert seen["logps/rejected_per_token"] == pytest.approx(
        sum(a for a, _, _ in rejected) / tokens, rel=1e-6
    )
    won = mean([float(c[0] - c[1] > r[0] - r[1]) for c, r in zip(chosen, rejected, strict=True)])
    assert seen["rewards/accuracy"] == pytest.approx(won)


def test_nan_outside_the_answers_stays_out():
    batch, config = batches("dpo"), PreferenceLoss()
    values = torch.where(batch.weights_BT != 0, -1.0, torch.nan).requires_grad_()
    outputs = TokenOutputs(logprobs_BT=values)
    sums = preference_loss(config).fn(outputs, batch).sums["pairs"]
    sums.backward()
    assert sums.isfinite()
    assert grad_of(values).isfinite().all()


# --- rules of the section ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kind": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
        ({"kind": "simpo", "length_normalised": True}, "always takes means"),
        ({"kind": "ipo", "divergence": "js"}, "divergence"),
        ({"kind": "dpo", "margin": 1.0}, "margin"),
        ({"kind": "dpo", "positive_coef": 5.0}, "positive_coef"),
        ({"kind": "kto", "sft_coef": 1.0}, "sft_coef"),
        ({"kind": "dpo", "desirable_weight": 2.0}, "desirable_weight"),
        ({"kind": "dpo", "alpha": 0.3}, "alpha"),
        ({"kind": "robust"}, "label_smoothing=0.0"),
    ],
)
def test_a_key_without_effect_is_refused(values, named):
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        PreferenceLoss(**values)


def test_rules_between_the_keys_of_dpo():
    from stepwell.config import Run

    def parse(**values):
        return Run.parse({"method": {"kind": "dpo"}}, {f"method.{k}": v for k, v in values.items()})

    with pytest.raises(ConfigError, match="the nearest legal value is 2"):
        parse(**{"loss.kind": "kto", "pairs_per_step": 1})
    parse(**{"loss.kind": "kto", "pairs_per_step": 2})
    with pytest.raises(ConfigError, match="drop_ches"):
        parse(**{"loss.kind": "kto", "drop_ches": 0.1})
    with pytest.raises(ConfigError, match="compares with no reference"):
        parse(**{"loss.kind": "simpo", "reference": "separate"})
    with pytest.raises(ConfigError, match="reference_from"):
        parse(reference_from="x", reference="separate")
    with pytest.raises(ConfigError, match="displacement_window"):
        parse(displacement_window=3)
    parse(displacement_window=4)


def test_dpo_positive_begins_as_dpo_where_the_reference_is_off_by_a_rounding():
    """The first step, in float32: the sums of a frozen model a little above the policy's own."""
    norms = {}
    for kind in ("dpo", "dpop"):
        config = PreferenceLoss(kind=kind)
        run = base_run(
            **{"precision.compute": "fp32", "precision.param": "fp32", "data.seq_len": SEQ_LEN},
            **{"method.kind": "dpo", "precision.reduce": "fp32"},
        )
        engine = Engine(run)
        plain = pack_pairs(pairs(), SEQ_LEN)
        logps = document_sums(engine.logprobs(plain), plain, plain.weights_BT)
        sums = logps * (1 - 1e-7)
        batch = with_stream(plain, REFERENCE, sums)
        stats = engine.forward_backward(batch, preference_loss(config, run.precision.compute))
        assert stats.loss == pytest.approx(math.log(2), rel=1e-4)
        norms[kind] = engine.optim_step().grad_norm
    assert norms["dpop"] == pytest.approx(norms["dpo"], rel=1e-3)
