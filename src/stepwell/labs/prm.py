"""Outcome against process rewards: which finds the right one of n answers, on the same chains.

A policy writes running sums modulo 10, a step a line, and has errors of habit, so that the vote of
its answers is often wrong. The same generated chains are judged twice: whether they end right, and
each step up to the first mistake. From the policy's weights an outcome reward model (ORM) learns
the one, a process reward model (PRM) the other, in the same order and in as many steps. Both then
choose among answers of the policy to new problems, and the PRM leads a beam search by steps.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import rankdata

from stepwell.data.judged import Labelled, Stepwise
from stepwell.eval.score import bootstrap_interval
from stepwell.labs import digits
from stepwell.labs.digits import SEQ_LEN, TOKENIZER_OF_DIGITS, World
from stepwell.labs.letters import alone
from stepwell.labs.seeds import quiet
from stepwell.labs.sums import model
from stepwell.posttrain.best_of_n import best_of
from stepwell.posttrain.reward_model import search
from stepwell.posttrain.reward_model.losses import reward_loss
from stepwell.posttrain.reward_model.model import Scorer, open_scorer
from stepwell.posttrain.reward_model.prm import Aggregation
from stepwell.posttrain.reward_model.rows import pack
from stepwell.sections.methods import RewardModel
from stepwell.train.engine import Engine
from stepwell.train.weights import TOKENIZER, initial_weights

CLAIM = (
    "From the same chains, in as many steps, a process reward model finds the right one of many "
    "answers more often than an outcome reward model and than a majority vote, and its lead on the "
    "outcome model grows with n. With a quarter of the chains it still leads. (What a beam search "
    "that it guides adds to its best-of-n of as many tokens is measured, not claimed.)"
)
ROWS_PER_STEP = 64
HOWS: tuple[Aggregation, ...] = get_args(Aggregation)
ORM, PRM, VOTE, ANY = "orm", "prm", "vote", "any"
# Subsets of answers that a vote of n is a mean over.
NUM_VOTES = 20
# Chances that the PRM ranks an answer without a wrong step above another one.
LEARNT = 0.9


class Size(NamedTuple):
    """seeds: those of the whole size are none that settings were chosen by. chains: judged ones
    that reward models learn from, rising. candidates: to each problem. beams: (width, expand) of
    each search."""

    seeds: tuple[int, ...]
    num_steps: int
    d_model: int
    policy_chains: int
    policy_steps: int
    chains: tuple[int, ...]
    model_steps: int
    muon_lr: float
    problems: int
    candidates: int
    ns: tuple[int, ...]
    beams: tuple[tuple[int, int], ...]


FULL = Size(
    (0, 1, 2),
    8,
    64,
    3000,
    200,
    (500, 2000, 8000),
    600,
    0.007,
    150,
    64,
    (1, 2, 4, 8, 16, 32),
    ((2, 2), (4, 4), (8, 4)),
)
SMALL = Size((100,), 6, 64, 1500, 120, (3000,), 120, 0.04, 80, 16, (1, 4, 16), ((4, 4),))


def measure(small: bool = False) -> dict[str, Any]:
    """All accuracies are over the problems of all seeds, with a bootstrap interval over problems.

    `by_chains[chains]`: `heldout` (of the policy's own answers: how surely each model ranks one
    that ends right above one that does not, and the PRM one without a wrong step above others),
    `accuracy[way][n]`, a way being orm or prm-AGGREGATION, and `gain[n]`, prm-min's less orm's.
    `vote[n]`, `any[n]`: majority vote, and whether any of n is right. `beams`: by the PRM of most
    chains, with best-of-n (prm-min) of as many tokens or more. `policy`: its accuracy, the share of
    its answers without a wrong step, tokens of an answer."""
    size = SMALL if small else FULL
    found = [_seed(seed, size) for seed in size.seeds]
    by_chains = {}
    for chains in map(str, size.chains):
        rows = [row["by_chains"][chains] for row in found]
        ways = _joined([row["right"] for row in rows])
        by_chains[chains] = {
            "heldout": {
                name: [row["heldout"][name] for row in rows] for name in rows[0]["heldout"]
            },
            "accuracy": _told(ways),
            "gain": {
                n: _interval(prm, orm)
                for n, prm, orm in zip(
                    ways[ORM], ways[f"{PRM}-min"].values(), ways[ORM].values(), strict=True
                )
            },
        }
    plain = _told(_joined([row["plain"] for row in found]))
    return {
        "seeds": len(found),
        "num_steps": size.num_steps,
        "policy": {name: [row["policy"][name] for row in found] for name in found[0]["policy"]},
        "by_chains": by_chains,
        "vote": plain[VOTE],
        "any": plain[ANY],
        "beams": [_beam([row["beams"][i] for row in found]) for i in range(len(size.beams))],
    }


def check(numbers: dict[str, Any]) -> list[str]:
    wrong, sizes = [], list(numbers["by_chains"])
    most = numbers["by_chains"][sizes[-1]]
    n_few, n_many = list(numbers["any"])[1], list(numbers["any"])[-1]
    prm = f"{PRM}-min"
    worst = min(most["heldout"]["prm_all_steps_right"])
    if not worst > LEARNT:
        wrong.append(f"the PRM has not learnt to judge steps: it ranks {worst:.3f} rightly")
    gain = most["gain"]
    if not gain[n_many]["low"] > 0:
        wrong.append(f"of {n_many} the PRM finds {gain[n_many]['mean']:+.3f} more than the ORM")
    if not gain[n_many]["mean"] > gain[n_few]["mean"]:
        wrong.append(f"the gain of {n_few} is no smaller than that of {n_many}")
    for name, other in (("vote", numbers["vote"]), ("ORM", most["accuracy"][ORM])):
        found = most["accuracy"][prm][n_many]["mean"]
        if not found > other[n_many]["high"]:
            wrong.append(
                f"the best of {n_many} by the PRM is right in {found:.3f}, the {name} not less"
            )
    if len(sizes) > 1:
        fewer = numbers["by_chains"][sizes[-2]]["accuracy"][prm][n_many]
        orm = most["accuracy"][ORM][n_many]
        if not fewer["low"] > orm["high"]:
            wrong.append(
                f"the PRM of {sizes[-2]} chains ({fewer['mean']:.3f}) is not above the ORM of "
                f"{sizes[-1]} ({orm['mean']:.3f})"
            )
    return wrong


def plot(numbers: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    sizes = list(numbers["by_chains"])
    most = numbers["by_chains"][sizes[-1]]
    ways = {**most["accuracy"], VOTE: numbers["vote"], ANY: numbers["any"]}
    for colour, (way, by) in enumerate(ways.items()):
        style = ":" if way == ANY else "-"
        _line(left, [int(n) for n in by], list(by.values()), f"C{colour}", way, style)
    for colour, beam in enumerate(numbers["beams"]):
        name = f"beam {beam['width']} x {beam['expand']}"
        middle.plot([beam["tokens"]], [beam["accuracy"]["mean"]], f"C{colour + 1}s", label=name)
    length = float(np.mean(numbers["policy"]["tokens"]))
    best = most["accuracy"][f"{PRM}-min"]
    _line(middle, [int(n) * length for n in best], list(best.values()), "C0", "best of n")
    n = list(numbers["any"])[-1]
    for colour, way in enumerate((ORM, f"{PRM}-min")):
        rows = [numbers["by_chains"][size]["accuracy"][way][n] for size in sizes]
        _line(right, [int(size) for size in sizes], rows, f"C{colour}", way)
    for axis, label in ((left, "n"), (middle, "tokens a problem (PRM, min)"), (right, "chains")):
        axis.set_xscale("log", base=2)
        axis.set_xlabel(label)
        axis.set_ylabel("accuracy on new problems")
        axis.legend(fontsize="small")
    left.set_title(f"learnt from {sizes[-1]} chains")
    right.set_title(f"best of {n}")
    return figure


def _line(
    axis: Axes,
    xs: Sequence[float],
    rows: Sequence[dict[str, float]],
    colour: str,
    name: str,
    style: str = "-",
) -> None:
    axis.plot(xs, [row["mean"] for row in rows], f"o{style}", color=colour, label=name)
    low, high = ([row[end] for row in rows] for end in ("low", "high"))
    axis.fill_between(xs, low, high, color=colour, alpha=0.15)


def _joined(rows: Sequence[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, list[float]]]:
    """Problems of all seeds, one after another."""
    return {
        way: {n: [value for row in rows for value in row[way][n]] for n in rows[0][way]}
        for way in rows[0]
    }


def _told(ways: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    return {way: {n: _interval(values) for n, values in by.items()} for way, by in ways.items()}


def _interval(values: Sequence[float], other: Sequence[float] | None = None) -> dict[str, float]:
    low, high = bootstrap_interval(values, other=other)
    mean = float(np.mean(values)) - (0.0 if other is None else float(np.mean(other)))
    return {"mean": mean, "low": low, "high": high}


def _beam(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    beam = [value for row in rows for value in row["beam"]]
    best = [value for row in rows for value in row["best"]]
    return {
        "width": rows[0]["width"],
        "expand": rows[0]["expand"],
        "n": [row["n"] for row in rows],
        "tokens": float(np.mean([row["tokens"] for row in rows])),
        "best_tokens": float(np.mean([row["best_tokens"] for row in rows])),
        "accuracy": _interval(beam),
        "best_of_n": _interval(best),
        "gain": _interval(beam, best),
    }


# --- one seed ------------------------------------------------------------------------------------


def _seed(seed: int, size: Size) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stepwell-prm-") as name, quiet():
        sizes = model(2, size.d_model) | {"model.max_seq_len": SEQ_LEN, "model.rope_theta": 100.0}
        world = World(Path(name), seed, size.num_steps, sizes)
        first = digits.make_policy(world, size.policy_chains, size.policy_steps)
        policy = world.engine(first)
        judged = digits.judged_rows(world, size.chains[-1])
        drawn = _drawn(world, policy, size)
        by_chains, scorer = {}, None
        for chains in size.chains:
            outcome, process = (
                train(world, first, objective, rows[:chains], size)
                for objective, rows in zip(("classification", "process"), judged, strict=True)
            )
            by_chains[str(chains)] = _chosen(drawn, outcome, process, size)
            scorer = process
        assert scorer is not None
        beams = [_search(world, policy, drawn, scorer, *beam, seed) for beam in size.beams]
    told = {
        chains: {
            way: round(float(np.mean(by[str(size.ns[-1])])), 3) for way, by in row["right"].items()
        }
        for chains, row in by_chains.items()
    }
    sys.stderr.write(f"prm: seed {seed}, best of {size.ns[-1]} by chains: {told}\n")
    return {
        "policy": {
            "accuracy": float(drawn.right_PN.mean()),
            "all_steps_right": float(drawn.clean_PN.mean()),
            "tokens": float(drawn.tokens_PN.mean()),
        },
        "by_chains": by_chains,
        "plain": {
            VOTE: {str(n): votes(drawn, n, seed) for n in size.ns},
            ANY: {str(n): best_by_problem(drawn.right_PN, drawn.right_PN, n) for n in size.ns},
        },
        "beams": beams,
    }


class Drawn(NamedTuple):
    """The policy's answers to new problems. right_PN: ends right; clean_PN: no step is wrong.
    finals_PN: what an answer says in the end. P problems, N answers to each."""

    problems: list[tuple[int, ...]]
    answers: list[search.Path]
    right_PN: np.ndarray
    clean_PN: np.ndarray
    finals_PN: np.ndarray
    tokens_PN: np.ndarray


def _drawn(world: World, policy: Engine, size: Size) -> Drawn:
    problems = world.problems(size.problems, 4)
    prompts = [digits.prompt_of(problem) for problem in problems]
    answers = world.answers(policy, prompts, size.candidates)
    owners = [problem for problem in problems for _ in range(size.candidates)]
    texts = [answer.text(TOKENIZER_OF_DIGITS) for answer in answers]
    lines = [text.splitlines(keepends=True) for text in texts]
    both = list(zip(owners, texts, lines, strict=True))
    columns = (
        [float(digits.is_right(problem, text)) for problem, text, _ in both],
        [float(digits.first_wrong(problem, found) is None) for problem, _, found in both],
        [digits.final_digit(text) for text in texts],
        [len(answer.token_ids) for answer in answers],
    )
    shape = (size.problems, size.candidates)
    return Drawn(problems, answers, *(np.reshape(column, shape) for column in columns))


def train(
    world: World, first: str, objective: str, rows: Sequence[Labelled | Stepwise], size: Size
) -> Scorer:
    """From the policy's weights; the same chains in the same order whatever the objective."""
    values = {
        "model.init": first,
        "method.objective": objective,
        "train.steps": size.model_steps,
        "train.micro_batch_rows": ROWS_PER_STEP,
        "optim.kind": "muon",
        "optim.muon_lr": size.muon_lr,
        "optim.lr": 5e-3,
        "optim.schedule.kind": "linear",
        # Of few chains the gradients become so small that one row learnt last is a "spike".
        "guard.spike_factor": 1e6,
    }
    run = world.run("reward", f"{objective}-{len(rows)}", **values)
    assert isinstance(run.method, RewardModel)
    engine, loss = Engine(run, initial_weights(run.model, world.seed)), reward_loss(run.method, 1)
    rng = np.random.default_rng(world.seed)
    for _ in range(size.model_steps):
        chosen = rng.integers(0, len(rows), ROWS_PER_STEP).tolist()
        batch = pack([rows[i] for i in chosen], run, TOKENIZER_OF_DIGITS.pad_id, chosen)
        engine.forward_backward(batch, loss)
        engine.optim_step()
    engine.save(run.dir, {TOKENIZER: TOKENIZER_OF_DIGITS.fingerprint}).wait()
    return open_scorer([str(run.dir)], alone(), SEQ_LEN, compute="fp32")


# --- choosing ------------------------------------------------------------------------------------


def _chosen(drawn: Drawn, outcome: Scorer, process: Scorer, size: Size) -> dict[str, Any]:
    docs = [[*answer.prompt_ids, *answer.token_ids] for answer in drawn.answers]
    scores = {ORM: outcome.score(docs).tolist()}
    for how in HOWS:
        found = search.scored(drawn.answers, process.step_scores, TOKENIZER_OF_DIGITS, how=how)
        scores[f"{PRM}-{how}"] = [path.score for path in found]
    right, clean = drawn.right_PN.ravel(), drawn.clean_PN.ravel()
    return {
        "heldout": {
            "orm_right": ranked(scores[ORM], right),
            "prm_right": ranked(scores[f"{PRM}-min"], right),
            "orm_all_steps_right": ranked(scores[ORM], clean),
            "prm_all_steps_right": ranked(scores[f"{PRM}-min"], clean),
        },
        "right": {
            way: {
                str(n): best_by_problem(np.reshape(by, drawn.right_PN.shape), drawn.right_PN, n)
                for n in size.ns
            }
            for way, by in scores.items()
        },
    }


def ranked(scores: Sequence[float], good: np.ndarray) -> float:
    """The chance that a good answer scores above another one, ties being half (the area under the
    ROC curve)."""
    num_good, num_bad = int(good.sum()), int(len(good) - good.sum())
    ranks = rankdata(scores)[good == 1].sum()
    return float((ranks - num_good * (num_good + 1) / 2) / (num_good * num_bad))


def best_by_problem(scores_PN: np.ndarray, right_PN: np.ndarray, n: int) -> list[float]:
    """Of each problem the chance that the best of n is right: a mean over all sets of n."""
    return [best_of(s, n, r) for s, r in zip(scores_PN, right_PN, strict=True)]


def votes(drawn: Drawn, n: int, seed: int) -> list[float]:
    """Of each problem the chance that the commonest end of n answers is right; ties are drawn."""
    rng, found = np.random.default_rng(seed), []
    for finals_N, right_N in zip(drawn.finals_PN, drawn.right_PN, strict=True):
        shares = []
        for _ in range(NUM_VOTES):
            chosen = rng.choice(len(finals_N), n, replace=False)
            ends, counts = np.unique(finals_N[chosen], return_counts=True)
            winners = set(ends[counts == counts.max()].tolist())
            good = set(finals_N[chosen][right_N[chosen] == 1].tolist())
            shares.append(len(winners & good) / len(winners))
        found.append(float(np.mean(shares)))
    return found


def _search(
    world: World,
    policy: Engine,
    drawn: Drawn,
    scorer: Scorer,
    width: int,
    expand: int,
    seed: int,
) -> dict[str, Any]:
    """Beside it the best of the fewest answers that take as many tokens."""
    tokenizer = TOKENIZER_OF_DIGITS
    prompts = [digits.prompt_of(problem) for problem in drawn.problems]
    found = search.beam_search(
        policy,
        prompts,
        scorer.step_scores,
        world.sampling(),
        tokenizer,
        width,
        expand,
        seed=seed,
    )
    beam = [
        float(digits.is_right(problem, one.best.text(tokenizer)))
        for problem, one in zip(drawn.problems, found, strict=True)
    ]
    tokens, length = float(np.mean([one.num_tokens for one in found])), drawn.tokens_PN.mean()
    n = min(math.ceil(tokens / length), drawn.right_PN.shape[1])
    scores = [p.score for p in search.scored(drawn.answers, scorer.step_scores, tokenizer)]
    best = best_by_problem(np.reshape(scores, drawn.right_PN.shape), drawn.right_PN, n)
    return {
        "width": width,
        "expand": expand,
        "beam": beam,
        "tokens": tokens,
        "best": best,
        "n": n,
        "best_tokens": n * float(length),
    }
