"""Where each model of a post-training method can be, and how far that is from what was asked. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from stepwell.types import ConfigError, nearest

METHODS = ("ppo", "grpo", "dpo", "lora", "qlora")
SAMPLED = ("ppo", "grpo")


@dataclass(frozen=True)
class Placement:
    """adapters: what of the policy is trained. critic: a model of its own, or a head on the
    policy's trunk. reference: as method.reference. reward: a model that every GPU holds whole, one
    that other GPUs serve (source python:FILE), or a program. offload: as [offload]. sampler: the
    engine's, on every GPU, or a server on other GPUs (method.server)."""

    adapters: Literal["none", "lora", "qlora"] = "none"
    critic: Literal["separate", "shared", "none"] = "none"
    reference: Literal["separate", "host", "adapter-off", "cached", "none"] = "none"
    reward: Literal["model", "served", "program", "none"] = "none"
    offload: Literal["none", "optimizer", "parameters"] = "none"
    sampler: Literal["engine", "server", "none"] = "none"


OTHER_TRAINING = 11  # more than all else together
# How much another place changes the run, from nothing but time (1) to another training.
CHANGES: dict[tuple[str, str], tuple[int, str]] = {
    ("reference", "host"): (1, "the reference lives on the host between rollouts"),
    ("reference", "cached"): (1, "the reference's scores are computed once and kept"),
    ("reference", "adapter-off"): (0, "the reference is the policy without its adapters"),
    ("reference", "none"): (OTHER_TRAINING, "no reference (method.kl_coef=0)"),
    ("critic", "shared"): (2, "the critic is a head on the policy's trunk"),
    ("offload", "optimizer"): (
        2,
        "the optimiser steps on the host, which holds masters and moments",
    ),
    ("offload", "parameters"): (3, "weights, masters, moments and gradients live on the host"),
    ("reward", "served"): (2, "the reward model is served by GPUs of its own"),
    ("sampler", "server"): (2, "a server on GPUs of its own samples"),
    ("adapters", "lora"): (OTHER_TRAINING, "only adapters are trained"),
    ("adapters", "qlora"): (
        OTHER_TRAINING + 1,
        "only adapters are trained, on a base in 4 bits",
    ),
}


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ConfigError(
            f"--method {method!r} cannot be planned{nearest(method, METHODS)}; these can: "
            f"{', '.join(METHODS)}"
        )


def asked_of(method: str, kl: bool = True) -> Placement:
    """The method as its paper has it: every model there, and whole."""
    check_method(method)
    reference = "separate" if kl else "none"
    if method == "ppo":
        return Placement("none", "separate", reference, "model", "none", "engine")
    if method == "grpo":
        return Placement("none", "none", reference, "program", "none", "engine")
    if method == "dpo":
        return Placement(reference="separate")
    return Placement(adapters="lora" if method == "lora" else "qlora")


def variants(method: str, asked: Placement) -> Iterator[Placement]:
    """Every other placement that the engine knows, nearest first."""
    choices: dict[str, list[Any]] = {
        "adapters": ["none", "lora", "qlora"],
        "critic": ["separate", "shared"],
        "reference": ["separate", "host", "adapter-off"],
        "reward": ["model", "served"],
        "offload": ["none", "optimizer", "parameters"],
        "sampler": ["engine", "server"],
    }
    if method == "dpo":
        choices["reference"] = ["separate", "cached", "adapter-off"]
    if asked.reference == "none":
        choices["reference"] = ["none"]
    for key in choices:
        value = getattr(asked, key)
        if value == "none" and key not in ("adapters", "offload"):
            choices[key] = ["none"]
        if value in ("program",):
            choices[key] = [value]
        if key == "adapters":  # what was asked for, and what takes less
            choices[key] = choices[key][choices[key].index(value) :]
    found = [
        Placement(**dict(zip(choices, values, strict=True)))
        for values in product(*choices.values())
    ]
    yield from sorted(filter(_possible, found), key=lambda placement: distance(asked, placement))


def _possible(placement: Placement) -> bool:
    if placement.reference == "adapter-off" and placement.adapters == "none":
        return False
    # Adapters have few moments; and what is frozen isn't offloaded by the optimiser.
    return placement.adapters == "none" or placement.offload == "none"


def distance(asked: Placement, other: Placement) -> int:
    return sum(weight for weight, _ in _changed(asked, other))


def changes(asked: Placement, other: Placement) -> tuple[str, ...]:
    """In words."""
    return tuple(said for _, said in _changed(asked, other))


def _changed(asked: Placement, other: Placement) -> list[tuple[int, str]]:
    keys = asked.__dataclass_fields__
    return [
        CHANGES[key, getattr(other, key)]
        for key in keys
        if getattr(asked, key) != getattr(other, key)
    ]


def settings_of(method: str, placement: Placement, rank: int) -> dict[str, str | int | float]:
    """The keys of a run that is placed so."""
    found: dict[str, str | int | float] = {}
    if placement.adapters != "none":
        found["lora.rank"] = rank
    if placement.adapters == "qlora":
        found["lora.quantize"] = "nf4"
    if placement.offload != "none":
        found[f"offload.{placement.offload}"] = True
    if method in ("lora", "qlora"):
        return {**found, "method.kind": "sft"}
    found["method.kind"] = method
    if placement.critic == "shared":
        found["method.critic"] = "shared"
    if placement.reference not in ("none", "separate") or method == "dpo":
        found["method.reference"] = placement.reference
    if method == "grpo" and placement.reference != "none":
        found["method.kl_coef"] = 0.001
    if method == "ppo" and placement.reference == "none":
        found["method.kl_coef"] = 0.0
    return found


def only_separate(placement: Placement) -> Placement:
    """With each model apart: what `plan/memory/models` is asked for once for all places."""
    return replace(
        placement,
        critic="separate" if placement.critic != "none" else "none",
        reference="separate" if placement.reference != "none" else "none",
    )
