"""Rows for tests of reward models, and runs on them within a world of `tests.runs`."""

from __future__ import annotations

import random
from typing import Any

from stepwell.config import Run
from stepwell.data.sft_data import Drops
from stepwell.posttrain.reward_model.rows import load_rows
from stepwell.sections.methods import RewardModel
from stepwell.tokenizer import Tokenizer
from tests.runs import MODEL


def pair_rows(seed: int, count: int) -> list[dict[str, Any]]:
    """The chosen answer ends in `is`, the rejected one in `sum`; lengths say nothing."""
    rng = random.Random(seed)

    def digits() -> str:
        return "".join(str(rng.randrange(10)) for _ in range(rng.randint(1, 6)))

    return [
        {
            "prompt": f"{digits()}+",
            "chosen": f"{digits()} is",
            "rejected": f"{digits()} sum",
            "margin": rng.choice([0.0, 1.0]),
        }
        for _ in range(count)
    ]


def step_rows(seed: int, count: int) -> list[dict[str, Any]]:
    """A step is right that ends in `is`; labels are truth values, with -100 among them."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        right = [rng.random() < 0.5 for _ in range(rng.randint(1, 4))]
        rows.append(
            {
                "prompt": "1+2=",
                "completions": [f"{rng.randrange(99)} {'is' if ok else 'sum'}" for ok in right],
                "labels": [-100 if rng.random() < 0.2 else ok for ok in right],
            }
        )
        if all(label == -100 for label in rows[-1]["labels"]):
            rows[-1]["labels"][0] = right[0]
    return rows


def settings(folder: str, rows: str = "pairs", /, **more: Any) -> dict[str, Any]:
    return {
        **MODEL,
        "model.init": "base",
        "data.path": f"{rows}.jsonl",
        "data.tokenizer": "tokenizer",
        "dir": folder,
        "data.seq_len": 64,
        "train.micro_batch_rows": 2,
        "train.steps": 30,
        "method.rows_per_step": 8,
        "optim.lr": 0.02,
        "optim.schedule.kind": "constant",
        "precision.compute": "fp32",
        **more,
    }


def run_of(folder: str, rows: str = "pairs", /, **more: Any) -> Run:
    return Run.parse({"method": {"kind": "reward"}}, settings(folder, rows, **more))


def method_of(run: Run) -> RewardModel:
    assert isinstance(run.method, RewardModel)
    return run.method


def usable_rows(run: Run, path: str, tokenizer: Tokenizer) -> tuple[Any, Drops]:
    """`load_rows`, of whatever kind the run wants."""
    return load_rows(run, path, tokenizer)
