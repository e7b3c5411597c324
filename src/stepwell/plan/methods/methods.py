"""What a post-training method needs: each model's bytes on a GPU, the worst moment, a step's time,
and, if that is too much, the nearest placement that fits. No torch.

Bytes of models are `plan/memory/models`, of the training step `plan/footprint`, of sampling
`plan/methods/rollouts`. Every placement is a run that the engine's rules have been asked about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import Any

from stepwell.config import Run
from stepwell.models.flops import parameter_shapes
from stepwell.parallel.rules import check_run
from stepwell.plan.cluster import Cluster, cluster
from stepwell.plan.footprint.coefficients import SHIPPED
from stepwell.plan.footprint.footprint import footprint
from stepwell.plan.job import Arrangement, Dims, Job, Recompute, dims_of, job_of
from stepwell.plan.memory.ledger import method_bytes_per_parameter
from stepwell.plan.memory.models import ModelBytes, predict_models
from stepwell.plan.methods.placements import (
    SAMPLED,
    Placement,
    asked_of,
    changes,
    check_method,
    distance,
    only_separate,
    settings_of,
    variants,
)
from stepwell.plan.methods.rollouts import (
    Sampling,
    Workload,
    fewest_scoring_gpus,
    fewest_server_gpus,
    own_sampler,
    server,
    weight_bytes,
)
from stepwell.plan.search.checks import check_headroom, option, pins_text
from stepwell.plan.search.runs import short, values_of
from stepwell.plan.search.space import Pins
from stepwell.plan.steptime.step import StepTime, predict_step
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

REMAT: tuple[Recompute, ...] = ("none", "selective", "full")
MAX_GPUS = 16384
PINNED = ("tp", "max_tp", "recompute", "micro_batch_rows", "headroom_bytes")
NO_COPY = (
    "the engine, which packs a whole copy of the policy on every GPU before it samples, also for a "
    "server, would have to do without"
)
# Bytes a parameter of the block at work while the weights of a new version are packed: its tensors
# as they are gathered (float32 masters; of adapters' base, bf16).
GATHERED_TRAINED, GATHERED_FROZEN = 4, 2


@dataclass(frozen=True)
class Training:
    """A training step of the policy on `job`, and what every model takes on one of its GPUs, each
    apart. gathered: bytes of weights while a model scores."""

    job: Job
    models: dict[str, ModelBytes]
    allocated: float
    reserve: float
    outside: float
    host: float
    gathered: float

    @property
    def layout(self) -> Arrangement:
        return self.job.layout


@dataclass(frozen=True)
class Evaluated:
    """A placement on a number of GPUs. models: bytes on a training GPU. phases: bytes of its
    moments, with what the allocator and the driver take. times: seconds of a step by part. servers:
    GPUs beside those that train, by what they do. settings: keys of the run. lacks: what the engine
    would need for it; empty if it runs as it is. why_tp: what is gained by its tensor ranks."""

    placement: Placement
    num_gpus: int
    trainers: int
    servers: dict[str, int]
    layout: str
    models: dict[str, ModelBytes]
    phases: dict[str, float]
    limit: float
    host_of_machine: float
    host_limit: float | None
    sampling: Sampling | None
    times: dict[str, float]
    settings: dict[str, str | int | float]
    changes: tuple[str, ...] = ()
    distance: int = 0
    lacks: str = ""
    gpu: str = ""
    why_tp: str = ""

    @property
    def peak(self) -> float:
        return max(self.phases.values())

    @property
    def phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def fits(self) -> bool:
        host = self.host_limit is None or self.host_of_machine <= self.host_limit
        return self.peak <= self.limit and host

    @property
    def step_s(self) -> float:
        return sum(self.times.values())


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
    def state_bytes(self) -> float:
        """Of all models, each once."""
        return self.bytes_per_parameter * self.parameters

    def lines(self) -> list[str]:
        from stepwell.plan.methods.text import lines

        return lines(self)

    def as_json(self) -> dict[str, Any]:
        from stepwell.plan.methods.text import as_json

        return as_json(self)


@dataclass
class Question:
    """What is planned. reward: the reward model's dimensions. complaints: of the engine's rules,
    about layouts that were not looked at."""

    method: str
    model: ModelConfig
    dims: Dims
    cluster: Cluster
    workload: Workload
    reward: ModelConfig
    lora_rank: int
    trainings: dict[tuple[str, str, int], list[Training]] = field(default_factory=dict)
    apart: dict[tuple[str, str, int, int], dict[str, ModelBytes]] = field(default_factory=dict)
    steps: dict[Job, StepTime] = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)
    complaints: list[str] = field(default_factory=list)

    def step(self, training: Training) -> StepTime:
        if training.job not in self.steps:
            self.steps[training.job] = predict_step(training.job)
        return self.steps[training.job]


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
    models = placed_models(_apart(question, asked, alone), asked)
    return sum(model.total for model in models.values()) / P


# --- one placement ---------------------------------------------------------------------------


def evaluate(
    question: Question, asked: Placement, placement: Placement, num_gpus: int
) -> Evaluated | None:
    """With the fastest layout that fits, or the one that comes nearest to fitting. None if there
    are no GPUs left to train on, or no layout is legal."""
    servers = _servers(question, placement)
    if servers is None:
        return None
    trainers = num_gpus - sum(servers.values())
    choices = _trainings(question, placement, trainers) if trainers > 0 else []
    if not choices:
        return None
    best: Evaluated | None = None
    for copies in (True, False) if placement.sampler == "server" else (True,):
        found = [
            _placed(question, asked, placement, num_gpus, servers, training, copies)
            for training in choices
        ]
        fitting = [one for one in found if one.fits]
        if fitting:
            return _with_reason(min(fitting, key=lambda one: one.step_s), found)
        best = best or _with_reason(min(found, key=lambda one: one.peak), found)
    return best


def _with_reason(chosen: Evaluated, others: Sequence[Evaluated]) -> Evaluated:
    """With why its tensor ranks are better than none, if there was a choice."""
    tp = chosen.settings["layout.tp"]
    alone = [one for one in others if one.settings["layout.tp"] == 1]
    if tp == 1 or not alone:
        return chosen
    other = min(alone, key=lambda one: (not one.fits, one.step_s if one.fits else one.peak))
    if other.fits:
        why = f"is faster than TP 1, {other.step_s:,.1f} s"
    elif other.peak > other.limit:
        how = "because" if chosen.fits else "comes nearest:"
        why = f"{how} at TP 1 {other.phase} needs {other.peak / 1e9:,.1f} GB"
    else:
        why = "because at TP 1 the host has no room"
    return replace(chosen, why_tp=f"TP {tp} {why}")


def _servers(question: Question, placement: Placement) -> dict[str, int] | None:
    """GPUs beside those that train; None if a machine's fast links join too few for it."""
    found: dict[str, int | None] = {}
    if placement.sampler == "server":
        found["sampler"] = fewest_server_gpus(question.dims, question.workload, question.cluster)
    if placement.reward == "served":
        found["reward"] = fewest_scoring_gpus(dims_of(question.reward), question.cluster)
    if any(number is None for number in found.values()):
        return None
    return {name: number for name, number in found.items() if number}


def _placed(
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
    samples = placement.sampler != "none"
    copy = weight_bytes(question.dims) if samples and copies else 0
    sampling = _sampling(question, placement, training, servers)
    resting = sum(model.total - model.gradients for model in models.values())
    others = resting - (models["policy"].total - models["policy"].gradients)
    parked = models["reference"].host if "reference" in models else 0
    phases = {"training": training.allocated + others + copy}
    if copy:
        live = training.layout.num_gpus == 1 and placement.adapters == "none"
        gathered = 0 if live else _gathered(training.layout)
        phases["packing"] = resting + copy + gathered * _largest_part(question.dims)
    if samples:
        scores = parked + training.gathered
        phases["scoring"] = resting + copy + scores
        own = sampling.cache + sampling.workspace if sampling and not servers.get("sampler") else 0
        phases["sampling"] = resting + copy + own
    away = sum(model.host for name, model in models.items() if name != "policy")
    device = question.cluster.accelerator
    here = min(training.layout.num_gpus, question.cluster.gpus_per_node)
    return Evaluated(
        placement=placement,
        num_gpus=num_gpus,
        trainers=training.layout.num_gpus,
        servers=servers,
        layout=short(training.layout),
        models=models,
        phases={name: n * (1 + training.reserve) + training.outside for name, n in phases.items()},
        limit=device.memory_bytes * (1 - SHIPPED.margin) - question.pins.headroom_bytes,
        host_of_machine=here * (training.host + away),
        host_limit=question.cluster.host_memory_bytes,
        sampling=sampling,
        times=_times(question, placement, training, sampling),
        settings={
            **settings_of(question.method, placement, question.lora_rank),
            "layout.tp": training.layout.tp,
            "remat.mode": training.layout.recompute,
        },
        changes=changes(asked, placement),
        distance=distance(asked, placement),
        lacks="" if copies or not samples else NO_COPY,
        gpu=device.name,
    )


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


# --- the training step -----------------------------------------------------------------------


def _trainings(question: Question, placement: Placement, trainers: int) -> list[Training]:
    key = (placement.adapters, placement.offload, trainers)
    if key not in question.trainings:
        question.trainings[key] = list(_new_trainings(question, placement, trainers))
    return question.trainings[key]


def _new_trainings(question: Question, placement: Placement, trainers: int) -> Iterable[Training]:
    """Legal layouts: all GPUs shard, or tensor ranks as far as fast links and heads allow."""
    pins = question.pins
    sizes = (1, _widest(question, placement, trainers)) if pins.tp is None else (pins.tp,)
    for tp in dict.fromkeys(sizes):
        if trainers % tp:
            question.complaints.append(f"--tp {tp} must divide the {trainers} GPUs that train")
            continue
        for remat in REMAT if pins.recompute is None else (pins.recompute,):
            layout = Arrangement(
                seq_len=question.workload.seq_len,
                micro_batch_rows=pins.micro_batch_rows or 1,
                global_batch_rows=_rows(question, trainers // tp),
                tp=tp,
                dp_shard=trainers // tp,
                recompute=remat,
                compiled=False,
                offload_optimizer=placement.offload == "optimizer",
                offload_parameters=placement.offload == "parameters",
            )
            try:
                run = _run(question, placement, layout)
                check_run(run, trainers)
                job = job_of(run, trainers, question.cluster, question.dims.name)
                models = _apart(question, placement, layout)
            except ConfigError as refusal:
                question.complaints.append(str(refusal))
                continue
            yield _training(question, job, models)


def _widest(question: Question, placement: Placement, trainers: int) -> int:
    """Of tensor parallelism; a base in 4 bits has none."""
    if placement.adapters == "qlora":
        return 1
    tp = 1
    most = min(question.cluster.scaleup_gpus, question.model.num_kv_heads, trainers)
    most = min(most, question.pins.max_tp or most)
    while 2 * tp <= most and trainers % (2 * tp) == 0 and question.model.num_heads % (2 * tp) == 0:
        tp *= 2
    return tp


def _rows(question: Question, shares: int) -> int:
    work = question.workload
    rows = work.rows
    if question.method in SAMPLED:
        rows = ceil(work.trained_tokens / work.seq_len)
    return ceil(rows / shares) * shares


def _training(question: Question, job: Job, models: dict[str, ModelBytes]) -> Training:
    found = footprint(job)
    dims, layout = question.dims, job.layout
    block = dims.attention_parameters + dims.mlp_parameters(dims.d_ff)
    gathered = 2 * (2 * block + 2 * dims.embedding_parameters) / layout.tp
    return Training(
        job=job,
        models=models,
        allocated=found.allocated,
        reserve=found.fragmentation / found.allocated,
        outside=found.context + found.communicators,
        host=sum(found.host.values()),
        gathered=gathered,
    )


def _run(question: Question, placement: Placement, layout: Arrangement) -> Run:
    """A run whose steps have the rows of the training phase."""
    settings = settings_of("lora", placement, question.lora_rank)
    return Run.parse(values_of(question.model, layout, "planned"), settings)


def _apart(question: Question, placement: Placement, layout: Arrangement) -> dict[str, ModelBytes]:
    """What each of the method's models takes, none sharing with another."""
    key = (placement.adapters, placement.offload, layout.num_gpus, layout.tp)
    if key not in question.apart:
        values = values_of(question.model, layout, "planned")
        if question.method in ("ppo", "grpo", "dpo"):
            del values["train"]
        settings = settings_of(question.method, only_separate(placement), question.lora_rank)
        found = dict(predict_models(Run.parse(values, settings), layout.num_gpus))
        found["reward"] = ModelBytes(parameters=2 * _elements(question.reward))
        question.apart[key] = found
    return question.apart[key]


def _elements(model: ModelConfig) -> int:
    """Of a reward model with this trunk."""
    scores = model.model_copy(update={"head": "score", "num_labels": 1})
    return sum(prod(shape) for shape in parameter_shapes(scores).values())


# --- time ------------------------------------------------------------------------------------


def _times(
    question: Question, placement: Placement, training: Training, sampling: Sampling | None
) -> dict[str, float]:
    """Of one step. A model's forward pass over the answers takes a third of a training step without
    its optimiser and recomputation."""
    step, work = question.step(training), question.workload
    forward = forward_s(step)
    if sampling is None:
        scored = (
            {"reference": forward} if placement.reference in ("separate", "adapter-off") else {}
        )
        return {**scored, "training": step.total_s}
    times = {"reading prompts": sampling.prefill_s, "decoding": sampling.decode_s}
    times["new weights"] = _handing_over(question, training)
    scoring = 1  # of the policy, beside the sampler's
    scoring += placement.reference != "none"
    scoring += placement.reward in ("model", "served")
    scoring += placement.critic == "separate"
    times["scoring"] = scoring * forward
    times["training"] = work.updates * step.total_s
    if placement.critic == "separate":
        times["training the critic"] = work.updates * step.total_s
    return times


def forward_s(step: StepTime) -> float:
    parts = step.parts
    others = ("optimizer", "gradient accumulation", "recomputation")
    return (step.total_s - sum(parts.get(name, 0.0) for name in others)) / 3


def _largest_part(dims: Dims) -> int:
    """Parameters of a block, or of the embedding."""
    ends = dims.embedding_parameters * (1 if dims.tied else 2)
    return max((dims.parameters() - ends) // dims.num_layers, dims.embedding_parameters)


def _gathered(layout: Arrangement) -> int:
    return GATHERED_FROZEN if layout.adapters else GATHERED_TRAINED


def _handing_over(question: Question, training: Training) -> float:
    """The weights of a step, gathered on every GPU for sampling."""
    layout, machines = training.layout, question.cluster
    n = layout.num_gpus
    rate = (
        machines.network_bytes_per_s if machines.spans_network(n) else machines.scaleup_bytes_per_s
    )
    return _gathered(layout) * question.dims.parameters() * (n - 1) / n / rate
