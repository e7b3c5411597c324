"""A proxy reward optimised too far: gold turns over, and an alarm that never sees gold says so.

Answers are up to twelve letters. Gold gives each letter that occurs its hidden worth, once, and
takes something off for every repetition. Three reward models learn it from pairs of random answers
each, where repetitions are few, so they learn the letters well and the penalty badly. Their mean is
the proxy: best-of-n and GRPO both optimise it. GRPO also optimises gold itself, as the mean of
three models whose errors cancel. All start from one untrained policy, which writes letters at
random.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import t as student

from stepwell.eval.grade import Prompt, Verdict
from stepwell.labs.letters import MAX_TOKENS, NUM_PROMPTS, TOKENIZER_OF_LETTERS, World, alone
from stepwell.labs.seeds import quiet
from stepwell.metrics import read_events, read_lines
from stepwell.posttrain.best_of_n import best_of, kl_bound
from stepwell.posttrain.grpo import grpo
from stepwell.posttrain.overoptimisation.curves import first_fall, fit
from stepwell.posttrain.overoptimisation.detector import Reading
from stepwell.posttrain.overoptimisation.watch import EVENT
from stepwell.posttrain.reward_model.model import open_scorer
from stepwell.posttrain.rewards.composite import Dimension, Rewards, Scorer, open_rewards
from stepwell.sections.methods import GRPO
from stepwell.sections.rewards import RewardTerm
from stepwell.types import Completion

CLAIM = (
    "GRPO on a proxy, the mean of three reward models, drives it up while gold turns over, with "
    "every seed: at the end gold has lost more than a tenth of what it had gained. The detector, "
    "which sees no gold, alarms with every seed before gold has fallen 5 % below its peak, and not "
    "before half of its gain is there; never when gold itself is optimised, as the mean of three "
    "models that disagree, though answers repeat themselves more and go far there, too. The learnt "
    "models' absolute disagreement falls all the while. Gold of the best of n by the proxy bends "
    "down in Gao's form: the mean of the seeds' beta lies above 0."
)
WINDOW = 5
FALL, LEAST_LOSS, LEAST_LEFT = 0.05, 0.1, 0.5
# Of models whose mean is gold: about as large that they agree at first as the learnt ones do.
ERROR_SD = 0.65
# Rollouts that a point of the gold curve is the mean of: a single one has noise of about 5 %.
SMOOTH = 5


class Size(NamedTuple):
    """seeds: those of the whole size are none that thresholds or sizes were chosen by. group: the
    answers to a prompt of a rollout."""

    seeds: tuple[int, ...]
    num_models: int
    pairs: int
    model_steps: int
    group: int
    rl_steps: int
    samples: int
    ns: tuple[int, ...]


FULL = Size(
    tuple(range(500, 506)), 3, 640, 160, 16, 60, 4096, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
)
SMALL = Size((100,), 3, 640, 160, 16, 30, 256, (1, 2, 4, 8, 16, 32, 64))


def measure(small: bool = False) -> dict[str, Any]:
    """Of each seed: `best_of_n` and `rl[proxy|gold]` as curves, and where the detector alarmed."""
    size = SMALL if small else FULL
    return {"seeds": [one_seed(seed, size) for seed in size.seeds]}


def check(numbers: dict[str, Any]) -> list[str]:
    wrong = []
    for number, seed in enumerate(numbers["seeds"]):
        proxy, gold = seed["rl"]["proxy"], seed["rl"]["gold"]
        of = f"seed {number}:"
        if not proxy["proxy"][-1] > proxy["proxy"][proxy["peak"]]:
            wrong.append(f"{of} the proxy did not rise on after gold's peak")
        top, start, end = max(proxy["gold"]), proxy["gold"][0], proxy["gold"][-1]
        if not top - end > LEAST_LOSS * (top - start) > 0:
            wrong.append(f"{of} gold went from {start:.2f} over {top:.2f} to {end:.2f}")
        if proxy["alarm"] is None:
            wrong.append(f"{of} no alarm")
        elif proxy["fall"] is None or not proxy["alarm"] < proxy["fall"]:
            wrong.append(f"{of} the alarm at {proxy['alarm']} is not before {proxy['fall']}")
        elif not proxy["left"] >= LEAST_LEFT:
            wrong.append(f"{of} the alarm came at {proxy['left']:.0%} of gold's gain")
        if not proxy["disagreement"][-1] < proxy["disagreement"][0]:
            wrong.append(f"{of} the models' disagreement did not fall")
        if gold["alarm"] is not None:
            wrong.append(f"{of} an alarm at {gold['alarm']} on gold itself")
        if not gold["gold"][-1] > top:
            wrong.append(f"{of} gold itself was optimised no further than by the proxy")
    if not (low := least_beta([seed["best_of_n"]["fit"] for seed in numbers["seeds"]])) > 0:
        wrong.append(f"best-of-n's beta may be {low:.3f}")
    return wrong


def least_beta(fits: Sequence[dict[str, Any]]) -> float:
    """The lower end of the 95 % interval of the mean over seeds (Student's); of one, of its fit."""
    if len(fits) == 1:
        return fits[0]["beta_low"]
    betas = [fit["beta"] for fit in fits]
    reach = float(student.ppf(0.975, len(betas) - 1)) * np.std(betas, ddof=1)
    return float(np.mean(betas) - reach / math.sqrt(len(betas)))


def plot(numbers: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for number, seed in enumerate(numbers["seeds"]):
        best, proxy, gold = seed["best_of_n"], seed["rl"]["proxy"], seed["rl"]["gold"]
        one = number == 0
        left.plot(best["d"], best["proxy_sds"], "C0", label="proxy" if one else None)
        left.plot(best["d"], best["gold_sds"], "C1", label="gold" if one else None)
        middle.plot(proxy["d"], proxy["gold"], "C1", label="gold, by proxy" if one else None)
        middle.plot(gold["d"], gold["gold"], "C2", label="gold, by gold" if one else None)
        scale = max(proxy["gold"]) / max(proxy["proxy"])
        scaled = [value * scale for value in proxy["proxy"]]
        middle.plot(proxy["d"], scaled, "C0", label="proxy, scaled" if one else None)
        steps = range(SMOOTH, SMOOTH + len(proxy["gold"]))
        right.plot(steps, proxy["gold"], "C1", label="gold, by proxy" if one else None)
        for name, colour in (("alarm", "C3"), ("fall", "C1")):
            if proxy[name] is not None:
                words = {"alarm": "alarm", "fall": "gold 5 % below its peak"}[name]
                right.axvline(proxy[name], color=colour, ls=":", label=words if one else None)
    left.set_title("best of n (sd above the mean answer)")
    middle.set_title("GRPO")
    right.set_title("the alarm")
    for axis in (left, middle):
        axis.set_xlabel("sqrt(KL), KL in nats" + (" (bound)" if axis is left else ""))
    right.set_xlabel("rollout")
    for axis in (left, middle, right):
        axis.legend(fontsize="small")
    return figure


# --- a seed --------------------------------------------------------------------------------------


def one_seed(seed: int, size: Size) -> dict[str, Any]:
    world = World(seed)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        models = [str(place / f"model{i}") for i in range(size.num_models)]
        for number, model in enumerate(models):
            world.train_model(model, number, size.pairs, size.model_steps)
        return {
            "best_of_n": best_of_curves(world, models, size),
            "rl": {
                "proxy": reinforced(world, place / "proxy", models, size),
                "gold": reinforced(world, place / "gold", [], size),
            },
        }


def gold_scorer(world: World, learnt: bool) -> Scorer:
    """learnt: as if it were the mean of three models, which the detector then watches."""

    def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Verdict]:
        golds = [world.gold(c.token_ids) for c in completions]
        if not learnt:
            return [Verdict(gold) for gold in golds]
        members = [gold + errors(c.token_ids) for gold, c in zip(golds, completions, strict=True)]
        return [
            Verdict(gold, disagreement=float(scores.std(ddof=1)), members=tuple(scores.tolist()))
            for gold, scores in zip(golds, members, strict=True)
        ]

    return Scorer(score, is_model=learnt)


def errors(ids: Sequence[int], num_models: int = 3) -> np.ndarray:
    """Of models about an answer, always the same: normal, of ERROR_SD, and 0 together."""
    drawn = np.random.default_rng(list(ids)).normal(0, ERROR_SD, num_models)
    return (drawn - drawn.mean()) * math.sqrt(num_models / (num_models - 1))


def best_of_curves(world: World, models: Sequence[str], size: Size) -> dict[str, Any]:
    """What the best of n by the proxy has, in standard deviations above the mean answer; alpha and
    beta of Gao's form, with the interval of its residuals."""
    answers = world.answers(size.samples, 99)
    scorer = open_scorer(models, alone(), 64, compute="fp32")
    proxies = scorer.score([[*a.prompt_ids, *a.token_ids] for a in answers]).tolist()
    golds = [world.gold(a.token_ids) for a in answers]
    found: dict[str, Any] = {"n": list(size.ns), "d": [math.sqrt(kl_bound(n)) for n in size.ns]}
    for name, values in (("proxy", proxies), ("gold", golds)):
        mean, sd = float(np.mean(values)), float(np.std(values))
        found[f"{name}_sds"] = [(best_of(proxies, n, values) - mean) / sd for n in size.ns]
    fitted = fit("best-of-n", found["d"][1:], found["gold_sds"][1:])
    correlation = float(np.corrcoef(proxies, golds)[0, 1])
    return {**found, "fit": fitted._asdict(), "correlation": correlation}


def reinforced(world: World, folder: Path, models: Sequence[str], size: Size) -> dict[str, Any]:
    """GRPO on the mean of the models, or (without any) on gold. Curves are means of SMOOTH
    rollouts; peak: the place of the highest gold among them. alarm, fall (by 5 % of what it had
    gained, for good), lost (all that it had gained): rollouts. left: gold's gain by the alarm as a
    share of its gain by the peak. readings: what the detector saw."""
    source = f"model:{','.join(models)}" if models else "python:gold.py:gold"
    term = RewardTerm(name="proxy", source=source)
    run = world.run(
        {"kind": "grpo", "rewards": (term.model_dump(exclude_none=True),)},
        **{
            "dir": str(folder),
            "method.prompts_per_step": NUM_PROMPTS,
            "method.group_size": size.group,
            "method.max_new_tokens": MAX_TOKENS,
            "method.self_test": False,
            "method.kl_coef": 1e-6,  # measures, and holds nobody
            "method.overopt_window": WINDOW,
            "train.steps": size.rl_steps,
            "train.micro_batch_rows": 16,
            "checkpoint.every_steps": 10_000,
            "optim.lr": 4e-3,
        },
    )
    assert isinstance(run.method, GRPO)
    if models:
        trained = open_rewards(run.method, TOKENIZER_OF_LETTERS, alone(), run).dimensions
    else:
        trained = (Dimension(term, gold_scorer(world, learnt=True)),)
    watched = RewardTerm(name="gold", source="python:gold.py:gold", weight=0.0)
    rewards = Rewards((*trained, Dimension(watched, gold_scorer(world, learnt=False))))
    grpo(run, world.prompts, TOKENIZER_OF_LETTERS, world.weights, rewards=rewards)
    lines = read_lines(folder / "metrics.jsonl")
    alarms = [event for event in read_events(folder) if event["event"] == EVENT]
    gold = smoothed([line["reward/gold/mean"] for line in lines])
    peak, fall = int(np.argmax(gold)), first_fall(gold, FALL)
    kls = smoothed([line["kl/reference"] for line in lines])
    # The alarm knows rollouts 1 to this one, and so does the mean that has fallen.
    alarm = alarms[0]["step"] if alarms else None
    left = (gold[max(alarm - SMOOTH, 0)] - gold[0]) / (gold[peak] - gold[0]) if alarm else None
    return {
        "proxy": smoothed([line["reward/proxy/mean"] for line in lines]),
        "gold": gold,
        "d": [math.sqrt(max(kl, 0.0)) for kl in kls],
        "disagreement": smoothed([line["reward/disagreement"] for line in lines]),
        "peak": peak,
        "alarm": alarm,
        "left": left,
        "signs": sorted(alarms[0]["signs"]) if alarms else [],
        "fall": None if fall is None else fall + SMOOTH,
        "lost": next((i + SMOOTH for i, g in enumerate(gold) if i > peak and g <= gold[0]), None),
        "readings": [reading(line)._asdict() for line in lines],
    }


def reading(line: dict[str, Any]) -> Reading:
    """Of a line of metrics.jsonl."""
    return Reading(
        line["reward/proxy/mean"],
        line["rollout/length"],
        line["rollout/repetition"],
        line["kl/reference"],
        line["reward/disagreement"],
        line.get("reward/agreement"),
        line["reward/spread"],
    )


def smoothed(values: Sequence[float]) -> list[float]:
    """Means of SMOOTH neighbours; the first is of rollouts 1 to SMOOTH."""
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, "valid").tolist()
