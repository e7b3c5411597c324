"""`stepwell problems SET --out FOLDER`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from stepwell.commands.inputs import check_least, counted, parse_options
from stepwell.commands.score import opened
from stepwell.types import ConfigError


@dataclass
class Problems:
    """Writes problems with known answers, for verifiable rewards: sft.jsonl (with completions),
    prompts.jsonl (to sample answers to) and heldout.jsonl (to measure with). No problem is in two
    of them."""

    problems: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SET")]
    """chain-sum (7 + 5 - 9 + 3), or gym:SET of reasoning-gym."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="PATH")]
    """The folder to write."""
    sft: int = 1000
    """Rows to fine-tune on."""
    prompts: int = 1000
    """Prompts to sample answers to."""
    heldout: int = 200
    """Held-out prompts."""
    terms: tuple[int, int] = (3, 5)
    """chain-sum: fewest and most numbers in a chain."""
    worked: float = 1.0
    """chain-sum: the share of completions that show their steps."""
    question: str = "State the final answer to this arithmetic problem: {} ="
    """chain-sum: how it is put; {} is the chain."""
    seed: int = 0
    """The same seed gives the same problems."""
    json: bool = False
    """Print the counts as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("problems", Problems, argv)
    names = ("sft", "prompts", "heldout", "seed")
    check_least(0, **{name: getattr(options, name) for name in names})
    counts = {}
    for part, rows in rows_of(options).items():
        with opened(str(Path(options.out) / f"{part}.jsonl")) as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        counts[part] = len(rows)
    if options.json:
        print(json.dumps(counts))
    else:
        listed = ", ".join(f"{part} {counted(number, 'row')}" for part, number in counts.items())
        print(f"{options.out}: {listed}")
    return 0


def rows_of(options: Problems) -> dict[str, list[dict]]:
    """Raises ConfigError for an unknown set, and for options of another one."""
    from stepwell.posttrain.problem_sets import CHAIN_SUM, Sizes, chain_sums, gym_problems

    sizes = Sizes(options.sft, options.prompts, options.heldout)
    if options.problems == CHAIN_SUM:
        return chain_sums(sizes, options.terms, options.worked, options.seed, options.question)
    kind, _, name = options.problems.partition(":")
    if kind != "gym" or not name:
        raise ConfigError(
            f"unknown problems {options.problems!r}; there are {CHAIN_SUM} and gym:SET"
        )
    for key in ("terms", "worked", "question"):
        if getattr(options, key) != getattr(Problems, key):
            raise ConfigError(f"--{key} belongs to {CHAIN_SUM}, not to {options.problems}")
    return gym_problems(name, sizes, options.seed)
