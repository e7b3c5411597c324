"""Problems with known answers, in files that have nothing in common: what to fine-tune on, what to
sample answers to, and what to measure with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import isnan
from typing import Any

from stepwell.posttrain import chain_sum
from stepwell.posttrain.verifiers.gym import gym_rows
from stepwell.types import ConfigError

CHAIN_SUM = "chain-sum"
QUESTION = "State the final answer to this arithmetic problem: {} ="
PARTS = ("sft", "prompts", "heldout")
# Of a reasoning-gym set so many rows are drawn at a time; and so many times as asked for at most.
GYM_ROWS, GYM_TRIES = 1000, 20


@dataclass(frozen=True)
class Sizes:
    """Rows of each part."""

    sft: int
    prompts: int
    heldout: int


def chain_sums(
    sizes: Sizes, num_terms: tuple[int, int], worked: float, seed: int, question: str = QUESTION
) -> dict[str, list[dict[str, Any]]]:
    """Rows by part. No two problems have the same numbers in whatever order. worked: the share of
    completions that show their steps. question: a text with {} for the chain, `7 + 5 - 9`. Raises
    ConfigError if there are too few problems."""
    if question.count("{}") != 1:
        raise ConfigError(
            f"question={question!r} must have one {{}} where the chain goes, such as {QUESTION!r}"
        )
    if not 0 <= worked <= 1:
        best = "" if isnan(worked) else f"; the nearest legal value is {min(max(worked, 0.0), 1.0)}"
        raise ConfigError(f"worked={worked:g} must be a share from 0 to 1{best}")
    train = chain_sum.problems(sizes.sft + sizes.prompts, "train", seed, num_terms)
    test = chain_sum.problems(sizes.heldout, "heldout", seed, num_terms)
    # The n-th is worked where the running total of shares passes a whole number.
    shown = [int((i + 1) * worked) > int(i * worked) for i in range(sizes.sft)]
    row = lambda problem, is_worked=True: _asked(problem.row(is_worked), problem, question)
    return {
        "sft": [row(p, w) for p, w in zip(train, shown, strict=False)],
        "prompts": [without_completion(row(p)) for p in train[sizes.sft :]],
        "heldout": [without_completion(row(p)) for p in test],
    }


def _asked(row: dict[str, Any], problem: chain_sum.Problem, question: str) -> dict[str, Any]:
    first, *others = problem.terms
    signs = ("-" if term < 0 else "+" for term in others)
    chain = " ".join([str(first), *(f"{s} {abs(t)}" for s, t in zip(signs, others, strict=True))])
    return {**row, "prompt": [{"role": "user", "content": question.replace("{}", chain)}]}


def gym_problems(name: str, sizes: Sizes, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of a reasoning-gym set by part, with its own row in `entry`; each question is in one
    part only, and once. Raises ConfigError for a set that is not allowed, that has too few
    different questions, or without the package."""
    wanted = {"train": sizes.sft + sizes.prompts, "heldout": sizes.heldout}
    found: dict[str, list[dict[str, Any]]] = {"train": [], "heldout": []}
    most = GYM_TRIES * (sum(wanted.values()) + GYM_ROWS)
    for row in islice(_different(name, seed), most):
        digest = hashlib.sha256(row["prompt"].encode()).digest()
        is_heldout = int.from_bytes(digest[:8]) / 2**64 < chain_sum.HELDOUT_SHARE
        part = "heldout" if is_heldout else "train"
        if len(found[part]) < wanted[part]:
            found[part].append(_as_messages(row))
        if all(len(found[k]) == n for k, n in wanted.items()):
            break
    for part, rows in found.items():
        if len(rows) < wanted[part]:
            raise ConfigError(
                f"gym:{name} gave only {len(rows)} different {part} problems of the "
                f"{wanted[part]} asked for; ask for fewer"
            )
    train = found["train"]
    return {
        "sft": train[: sizes.sft],
        "prompts": [without_completion(row) for row in train[sizes.sft :]],
        "heldout": [without_completion(row) for row in found["heldout"]],
    }


def _different(name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Rows with questions that have not been there; ends when a draw brings none."""
    seen: set[str] = set()
    draw, fresh = 0, True
    while fresh:
        fresh = False
        for row in gym_rows(name, GYM_ROWS, seed + draw * GYM_ROWS):
            if row["prompt"] not in seen:
                seen.add(row["prompt"])
                fresh = True
                yield row
        draw += 1


def _as_messages(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": f"answer: {row['answer']}"}],
        "answer": row["answer"],
        "entry": row["entry"],
    }


def without_completion(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "completion"}
