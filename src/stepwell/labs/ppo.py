"""PPO's four models: what they hold, by where they are; and what the leash to the reference does.

First four equal models (policy, critic, reference, reward model) make a step, in each placement,
and what their tensors take is held against what was reckoned beforehand. Then PPO optimises a
reward model that has learnt gold badly (`labs.letters`), without a leash, with a fixed coefficient,
and with one that a controller keeps at a target.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from stepwell.config import Run
from stepwell.labs.letters import MAX_TOKENS, NUM_PROMPTS, TOKENIZER_OF_LETTERS, World
from stepwell.labs.seeds import interval, quiet
from stepwell.metrics import read_events, read_lines
from stepwell.models.flops import parameter_shapes
from stepwell.plan.memory.models import predict_models
from stepwell.posttrain.ppo.placement import other_models
from stepwell.posttrain.ppo.ppo import ppo
from stepwell.sections.rewards import RewardTerm

CLAIM = (
    "Each of the four models holds what the ledger said before the run, byte for byte (with "
    "adapters within 1 %), in every placement. Four equal ones take 36 bytes a parameter (within "
    "5 %), a critic on the policy's trunk leaves 20, a reference on the host 34, and adapters "
    "without a reference of its own less than 10. Without a leash the proxy rises highest and "
    "gold falls below its peak by more than a tenth of what it had gained, with every seed; a "
    "fixed leash and an adaptive one keep the policy nearer and end with more gold, and the "
    "adaptive one ends within a third of its target."
)
SEPARATE, SHARED, HOST, ADAPTERS = (
    "four models",
    "critic on the policy's trunk",
    "reference on the host",
    "adapters, reference without them",
)
PLACEMENTS = {
    SEPARATE: {},
    SHARED: {"method.critic": "shared"},
    HOST: {"method.reference": "host"},
    ADAPTERS: {"method.reference": "adapter-off", "lora.rank": 2},
}
# Bytes a parameter on the device (2 frozen, 16 trained), and by what share they may differ.
EXPECTED, WITHIN = {SEPARATE: 36.0, SHARED: 20.0, HOST: 34.0}, 0.05
MOST_WITH_ADAPTERS = 10.0
# By what share a model may differ from the ledger: of a model with adapters the frozen norms are
# reckoned in the precision of the matrices, and held in float32.
UNEQUAL = {SEPARATE: 0.0, SHARED: 0.0, HOST: 0.0, ADAPTERS: 0.01}
TARGET = 3.0
MEASURED_ONLY = 1e-6  # a coefficient that holds nobody: without one there is no reference
NONE, FIXED, ADAPTIVE = "none", "fixed", "adaptive"
LEASHES = {
    NONE: {"method.kl_coef": MEASURED_ONLY},
    FIXED: {"method.kl_coef": 0.3},
    ADAPTIVE: {
        "method.kl_coef": 0.1,
        "method.kl_controller": "adaptive",
        "method.kl_target": TARGET,
        "method.kl_horizon": 500.0,
    },
}
LEAST_LOSS, NEAR = 0.1, 1 / 3
SMOOTH = 5


class Size(NamedTuple):
    """pairs, model_steps: of the reward model. group: answers to a prompt of a rollout."""

    seeds: tuple[int, ...]
    pairs: int
    model_steps: int
    group: int
    steps: int
    lr: float


FULL = Size((0, 1, 2), 640, 160, 16, 70, 4e-3)
SMALL = Size((0,), 320, 80, 8, 30, 0.01)


def measure(small: bool = False) -> dict[str, Any]:
    """`ledger[placement][model]`: bytes on the device and the host, predicted and measured.
    `parameters`: of the policy. `leash[name]`: by seed, what proxy, gold, KL (nats an answer) and
    the coefficient were at the end (means of SMOOTH rollouts), gold at its peak and at first, and
    the curves of the first seed."""
    size = SMALL if small else FULL
    found = [_seed(seed, size) for seed in size.seeds]
    return {
        "parameters": found[0]["parameters"],
        "ledger": found[0]["ledger"],
        "leash": {
            name: {
                **{
                    key: interval([row["leash"][name][key] for row in found])
                    for key in ("proxy", "gold", "peak", "first", "kl", "coef")
                },
                "curves": found[0]["leash"][name]["curves"],
            }
            for name in LEASHES
        },
    }


def check(numbers: dict[str, Any]) -> list[str]:
    return [*_ledger_faults(numbers), *_leash_faults(numbers["leash"])]


def _ledger_faults(numbers: dict[str, Any]) -> list[str]:
    wrong = []
    for placement, models in numbers["ledger"].items():
        for model, row in models.items():
            for place in ("device", "host"):
                wanted, held = row["predicted"][place], row["measured"][place]
                if abs(held - wanted) > UNEQUAL[placement] * wanted:
                    wrong.append(
                        f"{placement}: the {model} holds {held:,} bytes on the {place}, "
                        f"{wanted:,} were predicted"
                    )
    for placement, wanted in EXPECTED.items():
        held = bytes_per_parameter(numbers, placement)
        if abs(held / wanted - 1) > WITHIN:
            wrong.append(f"{placement}: {held:.1f} bytes a parameter, not {wanted:g}")
    held = bytes_per_parameter(numbers, ADAPTERS)
    if held > MOST_WITH_ADAPTERS:
        wrong.append(f"{ADAPTERS}: {held:.1f} bytes a parameter")
    return wrong


def _leash_faults(leash: dict[str, Any]) -> list[str]:
    wrong, free = [], leash[NONE]
    for seed, (first, peak, end) in enumerate(
        zip(*(free[key]["by_seed"] for key in ("first", "peak", "gold")), strict=True)
    ):
        if not peak - end > LEAST_LOSS * (peak - first) > 0:
            wrong.append(f"no leash, seed {seed}: gold from {first:.2f} by {peak:.2f} to {end:.2f}")
    for name in (FIXED, ADAPTIVE):
        for key, sign in (("kl", -1), ("proxy", -1), ("gold", 1)):
            pairs = zip(leash[name][key]["by_seed"], free[key]["by_seed"], strict=True)
            for seed, (held, loose) in enumerate(pairs):
                if not sign * (held - loose) > 0:
                    wrong.append(
                        f"{name} leash, seed {seed}: {key} {held:.2f}, without one {loose:.2f}"
                    )
    for seed, kl in enumerate(leash[ADAPTIVE]["kl"]["by_seed"]):
        if abs(kl / TARGET - 1) > NEAR:
            wrong.append(f"adaptive leash, seed {seed}: {kl:.2f} nats, the target is {TARGET:g}")
    return wrong


def bytes_per_parameter(numbers: dict[str, Any], placement: str) -> float:
    """On the device, of all models together, by the policy's number of parameters."""
    models = numbers["ledger"][placement].values()
    return sum(row["measured"]["device"] for row in models) / numbers["parameters"]


def plot(numbers: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    left, middle, right, last = figure.subplots(1, 4)
    colours: dict[str, str] = {}
    for place, models in enumerate(numbers["ledger"].values()):
        bottom = 0.0
        for model, row in models.items():
            new = model not in colours
            colour = colours.setdefault(model, f"C{len(colours)}")
            height = row["measured"]["device"] / numbers["parameters"]
            left.bar(place, height, bottom=bottom, color=colour, label=model if new else None)
            bottom += height
    names = [name.replace(" ", "\n") for name in numbers["ledger"]]
    left.set_xticks(range(len(names)), names, fontsize="x-small")
    left.set_ylabel("bytes a parameter of the policy, on the device")
    left.legend(fontsize="x-small")
    for axis, key, label in (
        (middle, "proxy", "proxy"),
        (right, "gold", "gold"),
        (last, "kl", "KL from the reference, nats an answer"),
    ):
        for name, row in numbers["leash"].items():
            axis.plot(row["curves"][key], label=f"leash: {name}")
        axis.set_xlabel("rollout (first seed)")
        axis.set_ylabel(label)
    last.axhline(TARGET, color="gray", linewidth=0.5, linestyle=":")
    middle.legend(fontsize="small")
    return figure


# --- one seed ------------------------------------------------------------------------------------


def _seed(seed: int, size: Size) -> dict[str, Any]:
    world = World(seed)
    with tempfile.TemporaryDirectory(prefix="stepwell-ppo-") as name:
        folder = Path(name)
        with quiet():
            world.train_model(str(folder / "reward"), 0, size.pairs, size.model_steps)
            ledger = {
                placement: _ledger(_run(world, folder, f"place{i}", size, **_in_bf16(more)), world)
                for i, (placement, more) in enumerate(PLACEMENTS.items())
            }
            leash = {
                name: _leashed(_run(world, folder, name, size, **more), world)
                for name, more in LEASHES.items()
            }
    for name, row in leash.items():
        sys.stderr.write(
            f"ppo: seed {seed}, leash {name}: proxy {row['proxy']:.2f}, gold {row['first']:.2f}, "
            f"at most {row['peak']:.2f}, at last {row['gold']:.2f}, {row['kl']:.2f} nats\n"
        )
    parameters = sum(math.prod(shape) for shape in parameter_shapes(world.run().model).values())
    return {"parameters": parameters, "ledger": ledger, "leash": leash}


def _run(world: World, folder: Path, name: str, size: Size, **more: Any) -> Run:
    term = RewardTerm(name="proxy", source=f"model:{folder / 'reward'}")
    values = {
        "dir": str(folder / name),
        "method.prompts_per_step": NUM_PROMPTS,
        "method.group_size": size.group,
        "method.max_new_tokens": MAX_TOKENS,
        "method.truncation_penalty": 0.0,
        "method.self_test": False,
        "method.overopt": "ignore",
        "guard.action": "none",  # where the proxy is exploited, gradients spike for good
        "method.value_coef": 1.0,
        "train.steps": size.steps,
        "train.micro_batch_rows": 16,
        "checkpoint.every_steps": 10_000,
        "optim.lr": size.lr,
        **more,
    }
    method = {"kind": "ppo", "rewards": (term.model_dump(exclude_none=True),)}
    return world.run(method, **values)


# --- what the models hold ------------------------------------------------------------------------


def _in_bf16(placement: dict[str, Any]) -> dict[str, Any]:
    return {**placement, "precision.compute": "bf16", "train.steps": 1}


def _ledger(run: Run, world: World) -> dict[str, Any]:
    critic, rewards = other_models(run)
    wanted = predict_models(run, 1, critic, rewards)
    ppo(run, world.prompts, TOKENIZER_OF_LETTERS, world.weights)
    (held,) = [event for event in read_events(run.dir) if event["event"] == "memory"]
    parts = ("parameters", "gradients", "master", "moments")
    return {
        model: {
            "predicted": {"device": row.total, "host": row.host},
            "measured": {
                "device": sum(held[model][part] for part in parts),
                "host": held[model]["host"],
            },
        }
        for model, row in wanted.items()
    }


# --- what the leash does -------------------------------------------------------------------------


def _leashed(run: Run, world: World) -> dict[str, Any]:
    ppo(run, world.prompts, TOKENIZER_OF_LETTERS, world.weights)
    lines = read_lines(Path(run.dir) / "metrics.jsonl")
    golds: dict[int, list[float]] = {}
    for row in read_lines(Path(run.dir) / "samples.jsonl"):
        if not row["greedy"]:
            ids = TOKENIZER_OF_LETTERS.encode(row["completion"])
            golds.setdefault(row["step"], []).append(world.gold(ids))
    curves = {
        "proxy": [line["reward/mean"] for line in lines],
        "gold": [statistics.fmean(values) for _, values in sorted(golds.items())],
        "kl": [line["kl/reference"] for line in lines],
        "coef": [line["kl/coef"] for line in lines],
    }
    ends = {key: statistics.fmean(values[-SMOOTH:]) for key, values in curves.items()}
    means = [
        statistics.fmean(curves["gold"][i : i + SMOOTH])
        for i in range(len(curves["gold"]) - SMOOTH + 1)
    ]
    return {**ends, "first": means[0], "peak": max(means), "curves": curves}
