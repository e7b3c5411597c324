"""What DPO learns, and what it loses: the implicit reward, and likelihood displacement.

Answers are strings of letters. First a judge whose reward is known prefers one of two strings by
the Bradley-Terry model; a policy is trained on his verdicts, and what it has learnt, beta times its
log-ratio to the reference, is held against his reward on strings that neither has seen. Then a
model that has begun to learn its answers is trained on pairs that differ in the first letter only,
on pairs that are nothing alike, and on both, with and without what repairs displacement
(2410.08847): leaving out the pairs with the highest CHES scores, DPO-positive, and a part of SFT.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from stepwell.config import Run
from stepwell.data.preference import load_pairs
from stepwell.labs.seeds import interval, quiet
from stepwell.labs.symbols import tokenizer_of
from stepwell.metrics import read_events, read_metrics
from stepwell.models.flops import parameter_shapes
from stepwell.posttrain.preference.displacement import LEAST_FALL
from stepwell.posttrain.preference.dpo import dpo
from stepwell.posttrain.preference.rows import Rows
from stepwell.posttrain.preference.scored_references import document_totals
from stepwell.posttrain.sft import sft
from stepwell.tokenizer import Tokenizer
from stepwell.train import checkpoint, run_checkpoints
from stepwell.train.engine import Engine
from stepwell.train.weights import TOKENIZER

CLAIM = (
    "DPO learns the judge's reward: on unseen strings beta times the policy's log-ratio orders "
    "them as he does (correlation above 0.9 with every seed). Trained on pairs that are nearly "
    "alike, or on a mix that is mostly of such pairs, the margin grows while chosen and rejected "
    "answers both fall, with every seed; the alarm fires wherever the chosen ones lose more than 9 "
    "nats, three times what it is set to. It is silent, and less than a third of the loss is left, "
    "on pairs that are nothing alike, with the highest CHES scores left out of the mix, with "
    "DPO-positive, and with a part of SFT; the margin grows there, too."
)
LETTERS = "abcdefgh"
DIGITS = "0123456789"
LENGTH = 6
BETA = 0.5  # of the first part
KEPT = 1 / 3  # of what is lost unrepaired, at most
LEAST_CORRELATION = 0.9
NEAR, FAR, MIXED = "near-identical", "unlike", "mixed"


class Arm(NamedTuple):
    """pairs: which file. settings: beside the usual ones."""

    pairs: str
    settings: dict[str, Any]


def arms_of(size: Size) -> dict[str, Arm]:
    share = size.num_near / (size.num_near + size.num_far) + 1e-6
    return {
        "unlike pairs": Arm(FAR, {}),
        "near-identical pairs": Arm(NEAR, {}),
        "near-identical, DPO-positive": Arm(NEAR, {"method.loss.kind": "dpop"}),
        "near-identical, SFT mixed in": Arm(NEAR, {"method.loss.sft_coef": 1.0}),
        "mixed pairs": Arm(MIXED, {}),
        "mixed, highest CHES left out": Arm(MIXED, {"method.drop_ches": share}),
    }


BENIGN = "unlike pairs"
# What chosen answers may lose (nats) without an alarm: it looks at the batches on the way, not at
# the whole. Of other seeds' arms that had lost more than LEAST_FALL it was silent in 2 of 15.
UNALARMED = 3 * LEAST_FALL
# An arm without displacement -> the one that it is held against.
REPAIRS = {
    BENIGN: "near-identical pairs",
    "near-identical, DPO-positive": "near-identical pairs",
    "near-identical, SFT mixed in": "near-identical pairs",
    "mixed, highest CHES left out": "mixed pairs",
}


class Size(NamedTuple):
    """seeds: those of the whole size are none that anything was chosen by. num_judged, num_heldout:
    pairs of the first part. num_near, num_far: of the mixed ones."""

    seeds: tuple[int, ...]
    num_judged: int
    num_heldout: int
    judged_steps: int
    num_near: int
    num_far: int
    steps: int


FULL = Size((30, 31, 32), 3000, 1000, 120, 120, 20, 50)
SMALL = Size((0,), 1200, 300, 40, 120, 20, 50)
WINDOW = 12
# Settings of every run.
SIDES = ("chosen", "rejected")
MODEL = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 16,
    "model.d_ff": 64,
    "model.init_std": 0.1,
    "precision.compute": "fp32",
    "data.seq_len": 64,
}


def measure(small: bool = False) -> dict[str, Any]:
    """`reward`: of the first part, by seed (slope: 1 where beta times the log-ratio is the judge's
    reward; judge_accuracy: how often his verdict has the better string). `arms[name]`: by seed, how
    many nats an answer the chosen and the rejected ones and the margin have gained, over all pairs
    that there were, and how often the alarm fired."""
    size = SMALL if small else FULL
    found = [_seed(seed, size) for seed in size.seeds]
    names = found[0]["reward"]
    return {
        "seeds": len(size.seeds),
        "reward": {name: interval([row["reward"][name] for row in found]) for name in names},
        "scatter": found[0]["scatter"],
        "arms": {
            arm: {
                **{
                    name: interval([row["arms"][arm][name] for row in found])
                    for name in found[0]["arms"][arm]
                    if name != "curve"
                },
                "curve": found[0]["arms"][arm]["curve"],
            }
            for arm in arms_of(size)
        },
    }


def check(numbers: dict[str, Any]) -> list[str]:
    wrong, arms = [], numbers["arms"]
    found = min(numbers["reward"]["correlation"]["by_seed"])
    if not found > LEAST_CORRELATION:
        wrong.append(f"the implicit reward correlates with the judge's by {found:.3f} only")
    for name in set(REPAIRS.values()):
        arm = arms[name]
        most = max(arm["chosen"]["by_seed"])
        if not most < 0:
            wrong.append(f"{name}: the chosen answers changed by {most:+.2f} nats with a seed")
        if not min(arm["margin"]["by_seed"]) > 0:
            wrong.append(f"{name}: the margin did not grow")
        for change, alarms in zip(arm["chosen"]["by_seed"], arm["alarms"]["by_seed"], strict=True):
            if change < -UNALARMED and not alarms:
                wrong.append(f"{name}: no alarm, though {-change:.2f} nats were lost")
        if not max(arm["rejected"]["by_seed"]) < 0:
            wrong.append(f"{name}: the rejected answers rose")
    for name, before in REPAIRS.items():
        pairs = zip(arms[name]["chosen"]["by_seed"], arms[before]["chosen"]["by_seed"], strict=True)
        worst = max(after / lost for after, lost in pairs)
        if not worst < KEPT:
            wrong.append(f"{name}: with a seed {worst:.0%} of the loss is left")
        if not min(arms[name]["margin"]["by_seed"]) > 0:
            wrong.append(f"{name}: the margin did not grow")
        if max(arms[name]["alarms"]["by_seed"]) > 0:
            wrong.append(f"{name}: an alarm")
    return wrong


def plot(numbers: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    reward = numbers["reward"]
    left.plot(*numbers["scatter"], ".", alpha=0.4)
    left.set_xlabel("the judge's reward of one answer less the other's")
    left.set_ylabel("implicit reward of one less the other's")
    mean = reward["correlation"]["mean"]
    left.set_title(f"unseen pairs: correlation {mean:.3f}")
    for colour, (name, arm) in enumerate(numbers["arms"].items()):
        middle.plot(arm["curve"]["chosen"], color=f"C{colour}", label=name)
        middle.plot(arm["curve"]["rejected"], color=f"C{colour}", linestyle=":")
    middle.set_xlabel("step")
    middle.set_ylabel("log-probability above the reference (nats)")
    middle.set_title("chosen (dotted: rejected), first seed")
    middle.legend(fontsize="x-small")
    names = list(numbers["arms"])
    for place, name in enumerate(names):
        right.plot(numbers["arms"][name]["chosen"]["by_seed"], [place] * numbers["seeds"], "o",
                   color=f"C{place}", alpha=0.6)  # fmt: skip
    right.axvline(0, color="gray", linewidth=0.5)
    right.axvline(-LEAST_FALL, color="gray", linewidth=0.5, linestyle=":")
    right.set_yticks(range(len(names)), names, fontsize="small")
    right.invert_yaxis()
    right.set_xlabel("what chosen answers gained (nats), a point a seed")
    return figure


# --- one seed ------------------------------------------------------------------------------------


def _seed(seed: int, size: Size) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stepwell-dpo-") as name:
        folder, tokenizer = Path(name), tokenizer_of(LETTERS + DIGITS + "=?")
        tokenizer.save(folder / "tokenizer")
        world = World(folder, tokenizer, seed)
        with quiet():
            learnt = implicit_reward(world, size)
            arms = displacement(world, size)
    for arm, row in arms.items():
        sys.stderr.write(
            f"dpo: seed {seed}, {arm}: chosen {row['chosen']:+.2f}, margin {row['margin']:+.2f} "
            f"nats, {row['alarms']} alarms\n"
        )
    return {**learnt, "arms": arms}


class World(NamedTuple):
    folder: Path
    tokenizer: Tokenizer
    seed: int

    def run(self, kind: str, name: str, data: str, **values: Any) -> Run:
        more = {
            **MODEL,
            "model.vocab_size": self.tokenizer.vocab_size,
            "data.tokenizer": str(self.folder / "tokenizer"),
            "data.path": str(self.folder / f"{data}.jsonl"),
            "dir": str(self.folder / name),
            "train.seed": self.seed,
        }
        return Run.parse({"method": {"kind": kind}}, {**more, **values})

    def write(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (self.folder / f"{name}.jsonl").write_text(text, "utf-8")

    def taught(
        self, name: str, rows: Sequence[dict[str, Any]], steps: int, lr: float = 0.01
    ) -> str:
        """A model after so many steps of SFT on these rows: its folder."""
        self.write(name, rows)
        base = self.folder / "base"
        if not base.exists():
            run = self.run("sft", "none", name)
            Engine(run).save(base, {TOKENIZER: self.tokenizer.fingerprint}).wait()
        more = {"train.steps": steps, "train.global_batch_rows": 8, "train.micro_batch_rows": 8}
        more |= {"optim.lr": lr, "optim.schedule.warmup_steps": 5, "model.init": str(base)}
        sft(self.run("sft", name, name, **more), self.tokenizer)
        return str(run_checkpoints.latest(self.folder / name))

    def totals(self, init: str, pairs: str) -> np.ndarray:
        """(pairs, 2): log-probabilities of chosen and rejected answers under a model."""
        run = self.run("dpo", "none", pairs)
        items, _ = load_pairs(self.folder / f"{pairs}.jsonl", self.tokenizer, run.data.seq_len)
        engine = Engine(
            run, checkpoint.load_weights(Path(init), parameter_shapes(run.model)), frozen=True
        )
        rows = Rows(items, len(items), labelled=False)
        found = []
        for start in range(0, len(items), 128):
            numbers = range(start, min(start + 128, len(items)))
            batch = rows.batch(list(numbers), run, self.tokenizer.pad_id)
            found.append(document_totals(engine.logprobs(batch), batch))
        return torch.cat(found).numpy().reshape(-1, 2)


def words(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Prompts and answers."""
    return [
        (f"{rng.randrange(1000):03d}=", "".join(rng.choices(LETTERS, k=LENGTH)))
        for _ in range(count)
    ]


# --- the implicit reward -------------------------------------------------------------------------


def gold(answer: str) -> float:
    """The judge's reward: letters are worth from -1 to 1, wherever they stand."""
    worth = np.linspace(-1, 1, len(LETTERS))
    return float(sum(worth[LETTERS.index(letter)] for letter in answer))


def judged(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Two answers each, of which the judge has chosen one: mostly the better one."""
    rows = []
    for prompt, one in words(rng, count):
        other = "".join(rng.choices(LETTERS, k=LENGTH))
        likely = 1 / (1 + np.exp(gold(other) - gold(one)))
        chosen, rejected = (one, other) if rng.random() < likely else (other, one)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def implicit_reward(world: World, size: Size) -> dict[str, Any]:
    rng = random.Random(world.seed)
    strings = [{"prompt": p, "completion": c} for p, c in words(rng, size.num_judged)]
    reference = world.taught("strings", strings, size.judged_steps, 0.002)
    world.write("judged", judged(rng, size.num_judged))
    heldout = judged(rng, size.num_heldout)
    world.write("unseen", heldout)
    values = {
        "model.init": reference,
        "method.loss.beta": BETA,
        "method.pairs_per_step": 32,
        "train.steps": size.judged_steps,
        "train.micro_batch_rows": 32,
        "optim.lr": 0.005,
    }
    dpo(world.run("dpo", "learnt", "judged", **values), world.tokenizer)
    before = world.totals(reference, "unseen")
    after = world.totals(str(run_checkpoints.latest(world.folder / "learnt")), "unseen")
    implicit = BETA * ((after - before)[:, 0] - (after - before)[:, 1])
    wanted = np.array([gold(row["chosen"]) - gold(row["rejected"]) for row in heldout])
    # Which answer was chosen would tell; which came first does not.
    flip = np.array([rng.choice((-1, 1)) for _ in heldout])
    shown = slice(300)
    return {
        "reward": {
            "correlation": float(np.corrcoef(wanted * flip, implicit * flip)[0, 1]),
            "slope": float(implicit @ wanted / (wanted @ wanted)),
            "accuracy": float((implicit > 0).mean()),
            "judge_accuracy": float((wanted > 0).mean() + (wanted == 0).mean() / 2),
        },
        "scatter": [(wanted * flip)[shown].tolist(), (implicit * flip)[shown].tolist()],
    }


# --- displacement --------------------------------------------------------------------------------


def displacement(world: World, size: Size) -> dict[str, dict[str, Any]]:
    rng = random.Random(world.seed)
    answers = words(rng, size.num_near + size.num_far)
    near = [
        {
            "prompt": p,
            "chosen": c,
            "rejected": rng.choice([x for x in LETTERS if x != c[0]]) + c[1:],
        }
        for p, c in answers
    ]
    far = [
        {"prompt": p, "chosen": c, "rejected": "".join(rng.choices(DIGITS, k=LENGTH))}
        for p, c in answers
    ]
    world.write(NEAR, near)
    world.write(FAR, far)
    world.write(MIXED, near[: size.num_near] + far[size.num_near :])
    # Both answers of an unlike pair are what the first weights would say.
    said = [{"prompt": r["prompt"], "completion": r[side]} for r in far for side in SIDES]
    taught = world.taught("taught", said, 60)
    return {
        name: _arm(world, f"arm{number}", arm, taught, size)
        for number, (name, arm) in enumerate(arms_of(size).items())
    }


def _arm(world: World, name: str, arm: Arm, taught: str, size: Size) -> dict[str, Any]:
    values = {
        "model.init": taught,
        "train.steps": size.steps,
        "train.micro_batch_rows": 16,
        "optim.lr": 0.0025,
        "method.pairs_per_step": 16,
        "method.displacement_window": WINDOW,
        "guard.action": "none",  # displacement is to be seen to its end, also where it explodes
        **arm.settings,
    }
    run = world.run("dpo", name, arm.pairs, **values)
    dpo(run, world.tokenizer)
    before = world.totals(taught, arm.pairs)
    after = world.totals(str(run_checkpoints.latest(run.dir)), arm.pairs)
    gained, lines = after - before, read_metrics(run.dir)
    return {
        "chosen": float(gained[:, 0].mean()),
        "rejected": float(gained[:, 1].mean()),
        "margin": float((gained[:, 0] - gained[:, 1]).mean()),
        "alarms": sum(event["event"] == "displacement" for event in read_events(run.dir)),
        "curve": {side: [line[f"train/logps/{side}_shift"] for line in lines] for side in SIDES},
    }
