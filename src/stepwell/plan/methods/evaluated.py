"""One placement of a method's models on so many GPUs: bytes of its moments, seconds of its step. No
torch.

Bytes of models are `plan/memory/models`, of the training step `plan/footprint`, of sampling
`plan/methods/rollouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from stepwell.plan.footprint.coefficients import SHIPPED
from stepwell.plan.job import Arrangement, Job, dims_of
from stepwell.plan.memory.models import ModelBytes
from stepwell.plan.methods.placements import (
    OTHER_TRAINING,
    Placement,
    changes,
    distance,
    settings_of,
)
from stepwell.plan.methods.rollouts import (
    Sampling,
    fewest_scoring_gpus,
    fewest_server_gpus,
    own_sampler,
    server,
    weight_bytes,
)
from stepwell.plan.methods.training import (
    Question,
    Training,
    exactly,
    packing_bytes,
    times_of,
    trainings_of,
)
from stepwell.plan.search.runs import short
from stepwell.plan.units import seconds_text, size_text

NO_COPY = (
    "the engine, which packs a whole copy of the policy on every GPU before it samples, also for a "
    "server, would have to do without"
)

OPEN = 0.9  # of what the closed form says; the exact ledger is within that
NUM_LEAST = 3  # of the leanest, by the closed form, that the exact ledger is asked about

# What a GPU holds beside models.
COPY, CACHE = "the sampler's copy", "keys and values"
ACTIVATIONS, GATHERED = "activations and workspace", "gathered weights"
OUTSIDE = "driver, communicators, fragmentation"


@dataclass(frozen=True)
class Evaluated:
    """A placement on a number of GPUs, of which those that train have the layout of `job`. models:
    bytes on a training GPU. parts: bytes of its moments, by what they are; OUTSIDE is what the
    allocator and the driver take. times: seconds of a step by part. servers: GPUs beside those that
    train, by what they do. settings: keys of the run. lacks: what the engine would need for it;
    empty if it runs as it is. served_reward: bytes of a reward model on other GPUs. why_tp: what is
    gained by its tensor ranks. host_limit: of a machine, where nobody says, as is usual."""

    placement: Placement
    num_gpus: int
    servers: dict[str, int]
    job: Job
    models: dict[str, ModelBytes]
    parts: dict[str, dict[str, float]]
    limit: float
    host_of_machine: float
    host_limit: float
    sampling: Sampling | None
    times: dict[str, float]
    settings: dict[str, str | int | float]
    changes: tuple[str, ...] = ()
    distance: int = 0
    lacks: str = ""
    gpu: str = ""
    served_reward: float = 0.0
    why_tp: str = ""

    @property
    def trainers(self) -> int:
        return self.job.layout.num_gpus

    @property
    def layout(self) -> str:
        return short(self.job.layout)

    @property
    def phases(self) -> dict[str, float]:
        """Bytes of its moments."""
        return {name: sum(parts.values()) for name, parts in self.parts.items()}

    @property
    def peak(self) -> float:
        return max(self.phases.values())

    @property
    def phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit and self.host_of_machine <= self.host_limit

    @property
    def host_text(self) -> str:
        """What a machine has."""
        known = self.job.cluster.host_memory_bytes is not None
        return size_text(self.host_limit) + ("" if known else " as is usual")

    @property
    def host_shortage(self) -> str:
        """In words, if a machine has too little memory of its own."""
        if self.host_of_machine <= self.host_limit:
            return ""
        needs = size_text(self.host_of_machine)
        return f"a machine's memory would hold {needs} and has {self.host_text}"

    @property
    def sampled_alike(self) -> int:
        """GPUs that sample the same answers to the same prompts: the engine's tensor, context and
        pipeline ranks of one data rank; 1 where a server samples."""
        if self.sampling is None or "sampler" in self.servers:
            return 1
        return self.trainers // self.job.layout.data_ranks

    @property
    def trains_the_same(self) -> bool:
        return self.distance < OTHER_TRAINING

    @property
    def step_s(self) -> float:
        return sum(self.times.values())

    def as_json(self) -> dict[str, Any]:
        read = (
            "peak",
            "phase",
            "phases",
            "fits",
            "step_s",
            "layout",
            "trainers",
            "trains_the_same",
            "sampled_alike",
        )
        return {
            **{name: value for name, value in asdict(self).items() if name != "job"},
            **{name: getattr(self, name) for name in read},
        }


def evaluate(
    question: Question, asked: Placement, placement: Placement, num_gpus: int
) -> Evaluated | None:
    """With the fastest layout that fits, or the one that comes nearest to fitting. None if there
    are no GPUs left to train on, or no layout is legal."""
    servers = servers_of(question, placement)
    if servers is None:
        return None
    trainers = num_gpus - sum(servers.values())
    choices = trainings_of(question, placement, trainers) if trainers > 0 else []
    if not choices:
        return None
    best: Evaluated | None = None
    for copies in (True, False) if placement.sampler == "server" else (True,):
        at = partial(placed, question, asked, placement, num_gpus, servers, copies=copies)
        found = _fastest(question, choices, at, placement == asked)
        if found.fits:
            return found
        best = best or found
    return best


def _fastest(
    question: Question,
    choices: Sequence[Training],
    at: Callable[[Training], Evaluated],
    told: bool,
) -> Evaluated:
    """The fastest that fits, else what comes nearest, and why its tensor ranks. The exact ledger is
    only asked where the closed form leaves it open. told: also if it does not fit."""
    roughly = {id(training): at(training) for training in choices}
    fastest = sorted(choices, key=lambda training: roughly[id(training)].step_s)
    chosen = _first(question, fastest, roughly, at)
    if chosen is None and not told:
        return min(roughly.values(), key=lambda one: one.peak)
    chosen = chosen or _least(question, choices, roughly, at)
    if chosen.job.layout.tp == 1:
        return chosen
    alone = [training for training in fastest if training.layout.tp == 1]
    if not alone:
        return chosen
    other = _first(question, alone, roughly, at) or _least(question, alone, roughly, at)
    return _with_reason(chosen, other)


def _first(
    question: Question,
    choices: Sequence[Training],
    roughly: Mapping[int, Evaluated],
    at: Callable[[Training], Evaluated],
) -> Evaluated | None:
    """Of choices, the first that fits."""
    for training in choices:
        if OPEN * roughly[id(training)].peak > roughly[id(training)].limit:
            continue
        found = at(exactly(question, training))
        if found.fits:
            return found
    return None


def _least(
    question: Question,
    choices: Sequence[Training],
    roughly: Mapping[int, Evaluated],
    at: Callable[[Training], Evaluated],
) -> Evaluated:
    """Of choices, the one that needs the least."""
    least = sorted(choices, key=lambda training: roughly[id(training)].peak)[:NUM_LEAST]
    return min((at(exactly(question, one)) for one in least), key=lambda one: one.peak)


def _with_reason(chosen: Evaluated, other: Evaluated) -> Evaluated:
    """other: the best without tensor ranks."""
    tp = chosen.job.layout.tp
    if other.fits:
        why = f"is faster than TP 1, {seconds_text(other.step_s)}"
    elif other.peak > other.limit:
        how = "because" if chosen.fits else "comes nearest:"
        why = f"{how} at TP 1 {other.phase} needs {size_text(other.peak)}"
    else:
        why = "because at TP 1 the host has no room"
    return replace(chosen, why_tp=f"TP {tp} {why}")


def servers_of(question: Question, placement: Placement) -> dict[str, int] | None:
    """GPUs beside those that train; None if a machine's fast links join too few for it."""
    found: dict[str, int | None] = {}
    if placement.sampler == "server":
        found["sampler"] = fewest_server_gpus(question.dims, question.workload, question.cluster)
    if placement.reward == "served":
        found["reward"] = fewest_scoring_gpus(dims_of(question.reward), question.cluster)
    if any(number is None for number in found.values()):
        return None
    return {name: number for name, number in found.items() if number}


def placed(
    question: Question,
    asked: Placement,
    placement: Placement,
    num_gpus: int,
    servers: dict[str, int],
    training: Training,
    copies: bool,
) -> Evaluated:
    """copies: whether every GPU that trains has the policy's weights a second time, to sample."""
    models = placed_models(training.models, placement)
    sampling = _sampling(question, placement, training, servers)
    parts = _parts(question, placement, training, models, sampling, servers, copies)
    away = sum(model.host for name, model in models.items() if name != "policy")
    device = question.cluster.accelerator
    here = min(training.layout.num_gpus, question.cluster.gpus_per_node)
    return Evaluated(
        placement=placement,
        num_gpus=num_gpus,
        servers=servers,
        job=training.job,
        models=models,
        parts={name: _with_outside(held, training) for name, held in parts.items()},
        limit=device.memory_bytes * (1 - SHIPPED.margin) - question.pins.headroom_bytes,
        host_of_machine=_host(training, placement) + here * away,
        host_limit=question.cluster.host_room_bytes(num_gpus),
        sampling=sampling,
        times=times_of(question, placement, training, sampling),
        settings={
            **settings_of(question.method, placement, question.lora_rank),
            **_of_layout(training.layout),
        },
        changes=changes(asked, placement),
        distance=distance(asked, placement),
        lacks="" if copies or placement.sampler == "none" else NO_COPY,
        gpu=device.name,
        served_reward=training.models["reward"].total if "reward" in servers else 0.0,
    )


def _of_layout(layout: Arrangement) -> dict[str, str | int]:
    found: dict[str, str | int] = {"layout.tp": layout.tp, "remat.mode": layout.recompute}
    if layout.dp_replicate > 1:
        found |= {
            "layout.dp_replicate": layout.dp_replicate,
            "layout.dp_shard": layout.dp_shard,
        }
    return {**found, "train.micro_batch_rows": layout.micro_batch_rows}


def _parts(
    question: Question,
    placement: Placement,
    training: Training,
    models: dict[str, ModelBytes],
    sampling: Sampling | None,
    servers: dict[str, int],
    copies: bool,
) -> dict[str, dict[str, float]]:
    """Tensors of each moment. Only one model has gradients and activations at a time."""
    policy = models["policy"]
    resting: dict[str, float] = {n: model.total - model.gradients for n, model in models.items()}
    state = min(policy.total, training.allocated)
    copy = {COPY: weight_bytes(question.dims)} if sampling is not None and copies else {}
    step = {"policy": state, ACTIVATIONS: training.allocated - state}
    parts = {"training": {**resting, **step, **copy}}
    if sampling is None:
        return parts
    if copy:
        live = training.layout.num_gpus == 1 and placement.adapters == "none"
        gathered = 0 if live else packing_bytes(question.dims, training.layout)
        parts["packing"] = {**resting, **copy, GATHERED: gathered}
    parked = models["reference"].host if "reference" in models else 0
    scored = {GATHERED: parked + training.gathered, ACTIVATIONS: training.scored_logits}
    parts["scoring"] = {**resting, **copy, **scored}
    parts["sampling"] = {**resting, **copy}
    if not servers.get("sampler"):
        parts["sampling"] |= {CACHE: sampling.cache, ACTIVATIONS: sampling.workspace}
    return parts


def _host(training: Training, placement: Placement) -> int:
    """Of a machine, for what trains; a critic of its own has as much again, but for parameters,
    which `models` has."""
    both = ("checkpoint", "offload.optimizer") if placement.critic == "separate" else ()
    host = training.host
    return sum(host.values()) + sum(host.get(key, 0) for key in both)


def _with_outside(parts: dict[str, float], training: Training) -> dict[str, float]:
    outside = sum(parts.values()) * training.reserve + training.outside
    return {**{name: n for name, n in parts.items() if n}, OUTSIDE: outside}


def placed_models(apart: dict[str, ModelBytes], placement: Placement) -> dict[str, ModelBytes]:
    """What each model takes where it is."""
    found = {"policy": apart["policy"]}
    if placement.critic == "separate":
        found["critic"] = apart["critic"]
    elif placement.critic == "shared":
        found["critic"] = ModelBytes()
    if placement.reference == "separate":
        found["reference"] = apart["reference"]
    elif placement.reference == "host":
        found["reference"] = ModelBytes(host=apart["reference"].parameters)
    elif placement.reference != "none":
        found["reference"] = ModelBytes()
    if placement.reward == "model":
        found["reward"] = apart["reward"]
    elif placement.reward != "none":
        found["reward"] = ModelBytes()
    return found


def _sampling(
    question: Question, placement: Placement, training: Training, servers: dict[str, int]
) -> Sampling | None:
    if placement.sampler == "none":
        return None
    if placement.sampler == "server":
        return server(question.dims, question.workload, question.cluster, servers["sampler"])
    shares = training.layout.data_ranks
    return own_sampler(question.dims, question.workload, question.cluster, shares)
