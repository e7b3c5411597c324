"""The training step of a method's policy: its legal layouts, what each of the models takes on them,
and the seconds of a whole step. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import Any

from stepwell.config import Run
from stepwell.models.flops import parameter_shapes
from stepwell.parallel.rules import check_run
from stepwell.plan.cluster import Cluster
from stepwell.plan.comms.step import Sent
from stepwell.plan.footprint.footprint import footprint
from stepwell.plan.job import Arrangement, Dims, Job, Recompute, job_of
from stepwell.plan.memory.ledger import predict_memory
from stepwell.plan.memory.models import ModelBytes, predict_models
from stepwell.plan.methods.placements import SAMPLED, Placement, only_separate, settings_of
from stepwell.plan.methods.rollouts import Sampling, Workload
from stepwell.plan.search.runs import values_of
from stepwell.plan.search.space import Pins
from stepwell.plan.steptime.coefficients import SHIPPED
from stepwell.plan.steptime.flows import flows
from stepwell.plan.steptime.step import StepTime, predict_step
from stepwell.sections.methods import GRPO, PPO
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

REMAT: tuple[Recompute, ...] = ("none", "selective", "full")
# Bytes a parameter of the block at work while the weights of a new version are packed: its tensors
# as they are gathered (float32 masters; of adapters' base, bf16).
# Of an element: base, product of adapters and sum in float32, and its copies in 16 bits.
MERGED_BYTES = 16
SCORED_LOGIT_BYTES = 8  # float32, as they are and as they are summed up
GATHERED_TRAINED, GATHERED_FROZEN = 4, 2
MATRICES = 7  # of a block
LEAST_GAIN = 0.99  # of a step's time, that more rows at a time must save


@dataclass(frozen=True)
class Training:
    """A training step of the policy, `job` being that of `run`, and what every model takes on one
    of its GPUs, each apart. allocated: what the step's tensors take at most, by the closed form,
    or `exactly`. gathered, scored_logits: bytes of weights and of logits while a model scores."""

    run: Run
    job: Job
    models: dict[str, ModelBytes]
    allocated: float
    fragmentation: float
    outside: float
    host: dict[str, int]
    gathered: float
    scored_logits: float

    @property
    def layout(self) -> Arrangement:
        return self.job.layout

    @property
    def reserve(self) -> float:
        """What fragmentation adds to a byte of tensors."""
        return self.fragmentation / self.allocated

    def having(self, allocated: float) -> Training:
        return replace(self, allocated=allocated)


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
    apart: dict[tuple[Any, ...], dict[str, ModelBytes]] = field(default_factory=dict)
    peaks: dict[Arrangement, int] = field(default_factory=dict)
    steps: dict[Job, StepTime] = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)
    complaints: list[str] = field(default_factory=list)

    def step(self, training: Training) -> StepTime:
        if training.job not in self.steps:
            self.steps[training.job] = predict_step(training.job)
        return self.steps[training.job]


def trainings_of(question: Question, placement: Placement, trainers: int) -> list[Training]:
    key = (placement.adapters, placement.offload, trainers)
    if key not in question.trainings:
        question.trainings[key] = list(_new_trainings(question, placement, trainers))
    return question.trainings[key]


def _new_trainings(question: Question, placement: Placement, trainers: int) -> Iterable[Training]:
    """Legal layouts: all GPUs shard, or tensor ranks as far as fast links and heads allow; what is
    frozen may be on every machine, or every GPU, too. Of micro-batches those that are worth it."""
    pins = question.pins
    sizes = (1, _widest(question, placement, trainers)) if pins.tp is None else (pins.tp,)
    for tp in dict.fromkeys(sizes):
        if trainers % tp:
            question.complaints.append(f"--tp {tp} must divide the {trainers} GPUs that train")
            continue
        for shards in _shards(question, placement, trainers // tp, tp):
            for remat in REMAT if pins.recompute is None else (pins.recompute,):
                layout = Arrangement(
                    seq_len=question.workload.seq_len,
                    micro_batch_rows=pins.micro_batch_rows or 1,
                    global_batch_rows=rows_of(question, trainers // tp),
                    tp=tp,
                    dp_replicate=trainers // tp // shards,
                    dp_shard=shards,
                    recompute=remat,
                    compiled=False,
                    offload_optimizer=placement.offload == "optimizer",
                    offload_parameters=placement.offload == "parameters",
                )
                yield from _with_micro_batches(question, placement, layout)


def _shards(question: Question, placement: Placement, ranks: int, tp: int) -> list[int]:
    """Of so many data ranks, how many divide the model: all; with adapters also one, where little
    has to be summed up and nothing gathered, and those of a machine."""
    if placement.adapters == "none":
        return [ranks]
    machine = max(1, min(ranks, question.cluster.gpus_per_node // tp))
    return [*dict.fromkeys(n for n in (ranks, machine, 1) if ranks % n == 0)]


def _with_micro_batches(
    question: Question, placement: Placement, layout: Arrangement
) -> Iterable[Training]:
    """For as long as there is room, those that are faster than fewer rows at a time. None where the
    engine's rules refuse the layout."""
    fastest, rows = math.inf, layout.global_batch_rows // layout.data_ranks
    pinned = question.pins.micro_batch_rows
    try:
        run = _run(question, placement, layout)
        models = apart_of(question, placement, layout)
        for size in [pinned] if pinned else micro_batches(rows):
            train = run.train.model_copy(update={"micro_batch_rows": size})
            run = run.model_copy(update={"train": train})
            check_run(run, layout.num_gpus)
            job = job_of(run, layout.num_gpus, question.cluster, question.dims.name)
            found = training_of(question, run, job, models)
            step_s = question.step(found).total_s
            if step_s <= LEAST_GAIN * fastest:
                yield found
                fastest = step_s
            if found.allocated >= question.cluster.accelerator.memory_bytes:
                return
    except ConfigError as refusal:
        question.complaints.append(str(refusal))


def micro_batches(rows: int) -> list[int]:
    """Sizes that a rank's rows are gone through with: about 1, 2, 4, ... rows, as even as their
    number allows, so that none is nearly empty."""
    numbers = [ceil(rows / 2**power) for power in range((rows - 1).bit_length() + 1)]
    return list(dict.fromkeys(ceil(rows / number) for number in numbers))


def exactly(question: Question, training: Training) -> Training:
    """With what the run's own ledger says that its tensors take."""
    layout = training.layout
    if layout not in question.peaks:
        run = _as(question.method, training.run)
        ledger = predict_memory(run, layout.num_gpus, device="cuda")
        question.peaks[layout] = ledger.peak_bytes
    return training.having(question.peaks[layout])


def _as(method: str, run: Run) -> Run:
    """With the method's loss, in which entropy takes more."""
    losses = {"ppo": PPO, "grpo": GRPO}
    return run.model_copy(update={"method": losses[method]()}) if method in losses else run


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


def rows_of(question: Question, shares: int) -> int:
    work = question.workload
    rows = work.rows
    if question.method in SAMPLED:
        rows = ceil(work.trained_tokens / work.seq_len)
    return ceil(rows / shares) * shares


def training_of(question: Question, run: Run, job: Job, models: dict[str, ModelBytes]) -> Training:
    found = footprint(job)
    dims, layout = question.dims, job.layout
    block = dims.attention_parameters + dims.mlp_parameters(dims.d_ff)
    ends = dims.embedding_parameters * (1 if dims.tied else 2)
    at_once = min(layout.tokens_of_rank, layout.loss_chunk_tokens or layout.tokens_of_rank)
    return Training(
        run=run,
        job=job,
        models=models,
        allocated=found.allocated,
        fragmentation=found.fragmentation,
        outside=found.context + found.communicators,
        host=found.host.items,
        gathered=2 * (2 * block + ends) / layout.tp,
        scored_logits=SCORED_LOGIT_BYTES * at_once * dims.vocab_size / layout.tp,
    )


def _run(question: Question, placement: Placement, layout: Arrangement) -> Run:
    """A run whose steps have the rows of the training phase."""
    settings = settings_of("lora", placement, question.lora_rank)
    return Run.parse(values_of(question.model, layout, "planned"), settings)


def apart_of(
    question: Question, placement: Placement, layout: Arrangement
) -> dict[str, ModelBytes]:
    """What each of the method's models takes, none sharing with another."""
    ranks = (layout.dp_replicate, layout.dp_shard, layout.tp)
    key = (placement.adapters, placement.offload, *ranks)
    if key not in question.apart:
        values = values_of(question.model, layout, "planned")
        if question.method in ("ppo", "grpo", "dpo"):
            del values["train"]
        settings = settings_of(question.method, only_separate(placement), question.lora_rank)
        found = dict(predict_models(Run.parse(values, settings), layout.num_gpus))
        found["reward"] = ModelBytes(parameters=reward_bytes(question.reward))
        question.apart[key] = found
    return question.apart[key]


def reward_bytes(model: ModelConfig) -> int:
    """Of a reward model with this trunk, in 16 bits."""
    scores = model.model_copy(update={"head": "score", "num_labels": 1})
    return 2 * sum(prod(shape) for shape in parameter_shapes(scores).values())


# --- time ------------------------------------------------------------------------------------


def times_of(
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


def largest_part(dims: Dims) -> int:
    """Parameters of a block, or of the embedding."""
    ends = dims.embedding_parameters * (1 if dims.tied else 2)
    return max((dims.parameters() - ends) // dims.num_layers, dims.embedding_parameters)


def packing_bytes(dims: Dims, layout: Arrangement) -> int:
    """Beside the sampler's copy while it is made: the largest part as it is gathered; with adapters
    a block in 16 bits, and the matrix that is being merged."""
    gathered = gathered_of(layout) * largest_part(dims)
    if layout.adapters is None:
        return gathered
    block = dims.attention_parameters + dims.mlp_parameters(dims.d_ff)
    return max(gathered, 2 * block + MERGED_BYTES * dims.d_model * dims.d_ff)


def gathered_of(layout: Arrangement) -> int:
    return GATHERED_FROZEN if layout.adapters else GATHERED_TRAINED


def _handing_over(question: Question, training: Training) -> float:
    """The weights of a step, gathered on every GPU for sampling."""
    c = SHIPPED
    found = flows(handed_over(question.dims, training.layout), question.cluster)
    return sum(flow.seconds(c.scaleup, c.network, c.hop_s) for flow in found)


def handed_over(dims: Dims, layout: Arrangement) -> list[Sent]:
    """What a rank gathers, a matrix at a time: among its shards first where tensor ranks have rows
    of the matrix, too, among tensor ranks first where they have columns. A base in 4 bits is whole
    already."""
    ends = dims.embedding_parameters * (1 if dims.tied else 2)
    four = layout.adapters is not None and layout.adapters.quantized
    blocks = 0 if four else dims.parameters() - ends
    out = dims.num_layers * dims.d_model * (dims.num_heads * dims.head_dim + dims.d_ff)
    by_columns = 0 if four or layout.tp == 1 else out
    by_rows = blocks + ends - by_columns
    tp, shards = layout.tp, layout.dp_shard
    calls = MATRICES * dims.num_layers
    sizes = {
        ("dp_shard", shards, tp): by_columns + by_rows / tp,
        ("tp", tp, 1): by_columns / shards + by_rows,
    }
    return [
        Sent(
            "all-gather", axis, "new weights", "forward", ranks, stride,
            round(gathered_of(layout) * elements / calls), calls, layout.num_gpus,
        )
        for (axis, ranks, stride), elements in sizes.items()
        if ranks > 1
    ]  # fmt: skip
