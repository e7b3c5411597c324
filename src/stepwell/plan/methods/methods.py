"""What a post-training method needs: each model's bytes on a GPU, the worst moment, a step's time,
and, if that is too much, the nearest placement that fits. No torch.

Bytes of models are `plan/memory/models`, of the training step `plan/footprint`, of sampling
`plan/methods/rollouts`. Every placement is a run that the engine's rules have been asked about.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from stepwell.plan.cluster import Cluster, cluster
from stepwell.plan.job import Arrangement, dims_of
from stepwell.plan.memory.ledger import method_bytes_per_parameter
from stepwell.plan.methods.evaluated import Evaluated, evaluate, placed_models
from stepwell.plan.methods.placements import (
    SAMPLED,
    Placement,
    asked_of,
    check_method,
    variants,
)
from stepwell.plan.methods.rollouts import (
    Workload,
)
from stepwell.plan.methods.training import (
    Question,
    apart_of,
)
from stepwell.plan.search.checks import check_headroom, option, pins_text
from stepwell.plan.search.space import Pins
from stepwell.schema import explain
from stepwell.sections.methods import DPO, GRPO, PPO
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

MAX_GPUS = 16384
SECTIONS = {"ppo": PPO, "grpo": GRPO, "dpo": DPO}
# Fields of a workload, and the keys of a recipe's [method] that they become.
_SAMPLED_KEYS = {
    "prompts": "prompts_per_step",
    "group_size": "group_size",
    "answer_tokens": "max_new_tokens",
    "updates": "updates_per_rollout",
}
KEYS = {**dict.fromkeys(SAMPLED, _SAMPLED_KEYS), "dpo": {"rows": "pairs_per_step"}}
PINNED = ("tp", "max_tp", "recompute", "micro_batch_rows", "headroom_bytes")


@dataclass(frozen=True)
class MethodPlan:
    """asked: the method as it is usually drawn. nearest: what fits with the fewest changes, None if
    nothing does; others: more that fit, each faster than those before it. fewest_gpus: that `asked`
    fits on, None: no number up to 16,384; fewest_served: the same with servers for what would be
    whole on every GPU. elsewhere: the nearest that runs, on other GPUs, if none does on these.
    bytes_per_parameter: of one copy of all models. held_bytes: what the GPUs that train hold of
    `asked` together, some of it more than once. pins: what was held fixed."""

    method: str
    name: str
    gpu: str
    num_gpus: int
    parameters: int
    bytes_per_parameter: float
    workload: Workload
    asked: Evaluated
    nearest: Evaluated | None
    others: tuple[Evaluated, ...] = ()
    fewest_gpus: int | None = None
    fewest_served: int | None = None
    elsewhere: Evaluated | None = None
    held_bytes: float = 0
    gpu_bytes: int = 0
    pins: Pins = field(default_factory=Pins)

    @property
    def fits(self) -> bool:
        return self.asked.fits

    @property
    def chosen(self) -> Evaluated | None:
        """What was asked for if it fits, else the nearest that does."""
        return self.asked if self.fits else self.nearest

    @property
    def state_bytes(self) -> float:
        """Of all models, each once."""
        return self.bytes_per_parameter * self.parameters

    def lines(self) -> list[str]:
        from stepwell.plan.methods.text import lines

        return lines(self)

    def as_json(self) -> dict[str, Any]:
        from stepwell.plan.methods.text import as_json

        return as_json(self)


def plan_method(
    method: str,
    model: ModelConfig,
    cluster: Cluster,
    num_gpus: int,
    workload: Workload | None = None,
    name: str = "",
    reward: ModelConfig | None = None,
    lora_rank: int = 16,
    kl: bool = True,
    pins: Pins | None = None,
) -> MethodPlan:
    """method: ppo, grpo, dpo, lora or qlora. workload: by default 512 answers (to 64 prompts in
    grpo, to as many in ppo), or 64 rows. reward: by default as large as the policy. kl: whether
    grpo and ppo hold a reference. pins: of the training layout tp, max_tp, recompute and
    micro_batch_rows, and headroom_bytes.

    Raises ConfigError for an unknown method, for other pins, and for numbers that cannot be.
    """
    pins = pins or Pins()
    _check_pins(pins, cluster)
    check_method(method)
    if num_gpus < 1:
        raise ConfigError(f"--gpus {num_gpus} must be at least 1")
    usual = Workload(prompts=512, group_size=1) if method == "ppo" else Workload()
    work = workload or usual
    check_work(method, work)
    if method in SAMPLED:
        work = replace(work, seq_len=work.answer_row)
    question = Question(
        method, model, dims_of(model, name), cluster, work, reward or model, lora_rank, pins=pins
    )
    asked = asked_of(method, kl)
    first = evaluate(question, asked, asked, num_gpus)
    if first is None:
        held = f" with {pins_text(pins)}" if pins.given() else ""
        why = f": {question.complaints[0]}" if question.complaints else ""
        raise ConfigError(f"{num_gpus} GPUs have no layout for {name or model.family}{held}{why}")
    fewest = num_gpus if first.fits else _fewest_gpus(question, asked, num_gpus)
    fitting = _fitting(question, asked, num_gpus)
    runs = [found for found in fitting if not found.lacks]
    return MethodPlan(
        method=method,
        name=name or model.family,
        gpu=cluster.accelerator.name,
        num_gpus=num_gpus,
        parameters=question.dims.parameters(),
        bytes_per_parameter=_state_per_parameter(question, asked),
        workload=work,
        asked=first,
        nearest=(runs or fitting or [None])[0],
        others=tuple(_faster(runs or fitting)),
        fewest_gpus=fewest,
        fewest_served=_fewest_served(question, asked, num_gpus) if fewest is None else None,
        elsewhere=None if runs else _elsewhere(question, asked, num_gpus),
        gpu_bytes=cluster.accelerator.memory_bytes,
        held_bytes=sum(one.total for one in first.models.values()) * first.trainers,
        pins=pins,
    )


def check_work(method: str, work: Workload) -> None:
    """Raises ConfigError for what a recipe of the method may not say, with the option's name and
    the rule of the key that it becomes."""
    for name, key in KEYS.get(method, {}).items():
        value, section = getattr(work, name), SECTIONS[method]
        try:
            section.model_validate({key: value})
        except ValidationError as error:
            where = f"--{name.replace('_', '-')} {value}"
            raise ConfigError(explain(error, section, where)) from error


def _check_pins(pins: Pins, machines: Cluster) -> None:
    others = [key for key in pins.given() if key not in PINNED]
    if others:
        raise ConfigError(
            f"{option(others[0])} is not held fixed in a plan of a method; these can be: "
            f"{', '.join(map(option, PINNED[:-1]))}, --headroom"
        )
    if pins.tp is not None and pins.max_tp is not None and pins.tp > pins.max_tp:
        raise ConfigError(f"--tp {pins.tp} is more than --max-tp {pins.max_tp}; leave one out")
    check_headroom(pins, machines)


def _fitting(question: Question, asked: Placement, num_gpus: int) -> list[Evaluated]:
    """Nearest first; of those that are as near, the fastest."""
    found = []
    for placement in variants(question.method, asked):
        one = evaluate(question, asked, placement, num_gpus)
        if one is not None and one.fits:
            found.append(one)
    return sorted(found, key=lambda one: (bool(one.lacks), one.distance, one.step_s))


def _faster(found: Iterable[Evaluated], most: int = 3) -> list[Evaluated]:
    """Those after the first that are faster than all before."""
    chosen: list[Evaluated] = []
    best = float("inf")
    for one in found:
        if one.step_s < 0.95 * best:
            chosen.append(one)
            best = one.step_s
    return chosen[1 : most + 1]


def _fewest_gpus(question: Question, asked: Placement, above: int) -> int | None:
    """Whole machines, doubled until it fits, then halved between."""
    machine = question.cluster.gpus_per_node
    low, high = above, max(machine, above)
    while high <= MAX_GPUS:
        found = evaluate(question, asked, asked, high)
        if found is not None and found.fits:
            break
        low, high = high, 2 * high
    else:
        return None
    while high - low > machine:
        middle = (low + high) // 2 // machine * machine
        if middle <= low:
            break
        found = evaluate(question, asked, asked, middle)
        low, high = (low, middle) if found is not None and found.fits else (middle, high)
    return high


def _fewest_served(question: Question, asked: Placement, above: int) -> int | None:
    """With GPUs of their own for sampling and for a reward model."""
    if asked.sampler == "none":
        return None
    reward = "served" if asked.reward == "model" else asked.reward
    return _fewest_gpus(question, replace(asked, sampler="server", reward=reward), above)


def _elsewhere(question: Question, asked: Placement, num_gpus: int) -> Evaluated | None:
    """On GPUs with more memory, the smallest first."""
    for name in ("h200", "b200", "b300"):
        other = cluster(name)
        if other.accelerator.memory_bytes <= question.cluster.accelerator.memory_bytes:
            continue
        moved = replace(question, cluster=other, trainings={}, steps={})
        found = [one for one in _fitting(moved, asked, num_gpus) if not one.lacks]
        if found:
            return found[0]
    return None


def _state_per_parameter(question: Question, asked: Placement) -> float:
    """Bytes of all models, each once, a parameter of the policy: the known 36, 18 and 16, or, with
    adapters, what they come to on one GPU, where nothing is there twice."""
    if question.method in ("ppo", "grpo", "dpo"):
        same = question.reward == question.model
        if question.method != "ppo" or (same and asked.reference != "none"):
            return method_bytes_per_parameter(question.method, kl=asked.reference != "none")
    P = question.dims.parameters()
    alone = Arrangement(question.workload.seq_len, 1, 1, compiled=False)
    models = placed_models(apart_of(question, asked, alone), asked)
    return sum(model.total for model in models.values()) / P
