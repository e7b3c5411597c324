"""Running sums modulo 10, a line a step, and a policy that errs at them in its own way: what a lab
of step rewards begins with.

A problem is "7+2+3+", its answer the sums so far, "7\\n9\\n2\\n". A step can be checked from the
line before and one digit of the problem: with terms up to 3 there are 30 cases. The policy learns
from chains whose author has errors of habit: in some cases a certain wrong digit, with a chance of
the case's own, from which the chain goes on consistently. So does the policy then, and it errs
alike in most of its answers to a problem.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepwell.config import Run
from stepwell.data.judged import Labelled, Stepwise
from stepwell.data.preference import IGNORED
from stepwell.eval.grade import Prompt, answer_seeds
from stepwell.generate import Request, Sampling
from stepwell.labs.symbols import tokenizer_of
from stepwell.models.flops import parameter_shapes
from stepwell.posttrain.reward_model.prm import hard_labels
from stepwell.posttrain.reward_model.search import Path as Answer
from stepwell.posttrain.sft import sft
from stepwell.train import checkpoint, run_checkpoints
from stepwell.train.engine import Engine
from stepwell.train.weights import TOKENIZER

TOKENIZER_OF_DIGITS = tokenizer_of([*"0123456789", "+", "\n"])
SEQ_LEN = 256
LARGEST = 3
# The share of the cases that have a habit, each with its own chance.
HABITS, LEAST, MOST = 0.4, 0.2, 0.8
# The share of wrong steps in judged chains.
SLIP = 0.15


class Habits(NamedTuple):
    """Of each sum so far (10 rows) and term: the wrong digit, and how often it is written."""

    digits: np.ndarray
    chances: np.ndarray


class World(NamedTuple):
    folder: Path
    seed: int
    num_steps: int
    model: dict[str, Any]

    def run(self, kind: str, name: str, **values: Any) -> Run:
        usual = {
            **self.model,
            "model.vocab_size": TOKENIZER_OF_DIGITS.vocab_size,
            "data.path": str(self.folder / "sft.jsonl"),
            "data.tokenizer": str(self.folder / "tokenizer"),
            "data.seq_len": SEQ_LEN,
            "dir": str(self.folder / name),
            "train.seed": self.seed,
            "optim.weight_decay": 0.0,
        }
        return Run.parse({"method": {"kind": kind}}, {**usual, **values})

    def engine(self, place: str) -> Engine:
        run = self.run("sft", "none")
        return Engine(run, checkpoint.load_weights(Path(place), parameter_shapes(run.model)))

    def sampling(self) -> Sampling:
        tokens = 2 * self.num_steps + 3  # a line more than it needs
        return Sampling(1.0, eos_ids=TOKENIZER_OF_DIGITS.stop_ids, max_new_tokens=tokens)

    def problems(self, count: int, purpose: int) -> list[tuple[int, ...]]:
        """The first term is any digit, others are 1 to LARGEST. purpose: other problems (some may
        be drawn for two)."""
        rng = np.random.default_rng([self.seed, purpose])
        found = rng.integers(1, LARGEST + 1, (count, self.num_steps))
        found[:, 0] = rng.integers(0, 10, count)
        return [tuple(row) for row in found.tolist()]

    def answers(self, policy: Engine, prompts: Sequence[Prompt], count: int) -> list[Answer]:
        """`count` to each prompt, one prompt's after another's."""
        owners = [tuple(prompt.ids) for prompt in prompts for _ in range(count)]
        seeds = [s for prompt in prompts for s in answer_seeds(self.seed, prompt.ids, count)]
        requests = [Request(i, ids, seed=seeds[i]) for i, ids in enumerate(owners)]
        found = policy.generate(requests, self.sampling(), tokenizer=TOKENIZER_OF_DIGITS)
        return [
            Answer(ids, tuple(c.token_ids), ended=c.finish_reason != "length")
            for ids, c in zip(owners, found, strict=True)
        ]


# --- the task ------------------------------------------------------------------------------------


def prompt_of(digits: Sequence[int]) -> Prompt:
    text = "".join(f"{digit}+" for digit in digits)
    return Prompt(text, tuple(TOKENIZER_OF_DIGITS.encode(text)), {"digits": tuple(digits)})


def right_totals(digits: Sequence[int]) -> list[int]:
    return (np.cumsum(digits) % 10).tolist()


def lines_of(totals: Sequence[int]) -> list[str]:
    return [f"{total}\n" for total in totals]


def first_wrong(digits: Sequence[int], lines: Sequence[str]) -> int | None:
    """The first line that the right ones don't have; where some are missing, the last."""
    right = lines_of(right_totals(digits))
    for i, line in enumerate(lines):
        if i >= len(right) or line != right[i]:
            return i
    return None if len(lines) == len(right) else len(lines) - 1


def final_digit(text: str) -> str:
    """What an answer says in the end."""
    return text.rstrip("\n").rpartition("\n")[2]


def is_right(digits: Sequence[int], text: str) -> bool:
    return final_digit(text) == str(sum(digits) % 10)


# --- the policy ----------------------------------------------------------------------------------


def make_policy(world: World, num_chains: int, steps: int) -> str:
    """The checkpoint of a policy with habits, fine-tuned on `num_chains`."""
    TOKENIZER_OF_DIGITS.save(world.folder / "tokenizer")
    rng = np.random.default_rng([world.seed, 0])
    habits = draw_habits(rng)
    rows = []
    for digits in world.problems(num_chains, 1):
        answer = "".join(lines_of(habitual_totals(digits, habits, rng)))
        rows.append({"prompt": prompt_of(digits).text, "completion": answer})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (world.folder / "sft.jsonl").write_text(text, "utf-8")
    values = {
        "train.steps": steps,
        "train.global_batch_rows": 6,
        "train.micro_batch_rows": 6,
        "optim.kind": "muon",
        "optim.muon_lr": 0.01,
        "optim.lr": 5e-3,
    }
    base = world.folder / "base"
    Engine(world.run("sft", "none")).save(base, {TOKENIZER: TOKENIZER_OF_DIGITS.fingerprint}).wait()
    run = world.run("sft", "policy", **{"model.init": str(base)}, **values)
    sft(run, TOKENIZER_OF_DIGITS)
    return str(run_checkpoints.latest(run.dir))


def draw_habits(rng: np.random.Generator) -> Habits:
    right = np.add.outer(np.arange(10), np.arange(10)) % 10
    digits = (right + rng.integers(1, 10, (10, 10))) % 10
    chances = np.zeros((10, LARGEST))
    chosen = rng.choice(chances.size, int(HABITS * chances.size), replace=False)
    chances.flat[chosen] = rng.uniform(LEAST, MOST, len(chosen))
    return Habits(digits, chances)


def habitual_totals(digits: Sequence[int], habits: Habits, rng: np.random.Generator) -> list[int]:
    totals = [digits[0]]
    for digit in digits[1:]:
        last = totals[-1]
        is_habit = rng.random() < habits.chances[last, digit - 1]
        totals.append(int(habits.digits[last, digit]) if is_habit else (last + digit) % 10)
    return totals


# --- judged chains -------------------------------------------------------------------------------


def slipped_totals(digits: Sequence[int], rng: np.random.Generator) -> list[int]:
    """A step is wrong by SLIP, all wrong digits being alike; what follows goes on from there."""
    totals, total = [], 0
    for digit in digits:
        off = int(rng.integers(1, 10)) if rng.random() < SLIP else 0
        total = (total + digit + off) % 10
        totals.append(total)
    return totals


def judged_rows(world: World, num_chains: int) -> tuple[list[Labelled], list[Stepwise]]:
    """The same chains twice: with the outcome, and with each step up to the first mistake."""
    rng = np.random.default_rng([world.seed, 2])
    outcomes, steps = [], []
    for digits in world.problems(num_chains, 3):
        ids = prompt_of(digits).ids
        lines = lines_of(slipped_totals(digits, rng))
        parts = tuple(tuple(TOKENIZER_OF_DIGITS.encode(line, special=False)) for line in lines)
        end = (TOKENIZER_OF_DIGITS.stop_ids[0],)
        whole = (*(i for part in parts for i in part), *end)
        outcomes.append(Labelled(ids, whole, is_right(digits, "".join(lines))))
        labels = hard_labels(len(lines), first_wrong(digits, lines))
        known = tuple(None if label == IGNORED else float(label) for label in labels)
        steps.append(Stepwise(ids, parts, known, end_ids=end))
    return outcomes, steps
