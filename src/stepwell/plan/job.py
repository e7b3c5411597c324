"""What the planner reasons about: a model's dimensions, how its ranks are arranged, on what. No
torch.

A run of ours becomes a `Job` (`job_of`), and so does a run that somebody else has published
(`plan/calibration`), with what other programs do differently: the model's kind, where the masters
are, whether attention writes its scores to memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from stepwell.config import Run
from stepwell.models.flops import count_parameters, parameter_shapes
from stepwell.models.lora_shapes import adapter_shapes, target_shapes
from stepwell.parallel.rules import axis_sizes
from stepwell.plan.cluster import Cluster
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

Mlp = Literal["swiglu", "gelu", "squared_relu"]
Recompute = Literal["none", "selective", "full", "every", "sqrt", "budget"]
# Whose habits: where masters and gradients lie, what is kept for the backward pass.
Program = Literal["stepwell", "fsdp", "megatron"]


@dataclass(frozen=True)
class Experts:
    """d_ff: of one expert. num_shared: experts that see every token. num_dense_layers: first layers
    that have an ordinary MLP, of the model's d_ff."""

    num_experts: int
    top_k: int
    d_ff: int
    num_shared: int = 0
    num_dense_layers: int = 0


@dataclass(frozen=True)
class Dims:
    """learned_positions: rows of a table of positions, 0 with RoPE. biases: parameters a layer
    beside its matrices and norms. score_dim: width of a head in attention itself, where that is not
    head_dim (latent attention; the mean of keys' and values'). window: keys that a token sees at
    most, in num_window_layers of the layers (None: in all)."""

    name: str
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    mlp: Mlp = "swiglu"
    tied: bool = False
    learned_positions: int = 0
    biases: int = 0
    experts: Experts | None = None
    qk_norm: bool = False
    score_dim: int | None = None
    window: int | None = None
    num_window_layers: int | None = None

    def mean_keys(self, seq_len: int) -> float:
        """Keys that a token sees, over a sequence and the layers; as `models/flops` counts them:
        half of a sequence without a window."""
        window = min(self.window or seq_len, seq_len)
        near = window - window * window / (2 * seq_len)
        share = 1.0 if self.num_window_layers is None else self.num_window_layers / self.num_layers
        return share * near + (1 - share) * seq_len / 2

    @property
    def score_width(self) -> int:
        return self.num_heads * (self.score_dim or self.head_dim)

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Matrices of one layer's attention."""
        return 2 * self.d_model * (self.q_width + self.kv_width)

    def mlp_parameters(self, d_ff: int) -> int:
        """Matrices of one MLP, or expert, of width d_ff."""
        return (3 if self.mlp == "swiglu" else 2) * self.d_model * d_ff

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.experts.num_dense_layers if self.experts else 0

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.d_model

    def parameters(self, active: bool = False) -> int:
        """All of them, or those that one token meets."""
        dense_layers = self.num_layers - self.num_expert_layers
        total = self.num_layers * (self.attention_parameters + 2 * self.d_model + self.biases)
        total += dense_layers * self.mlp_parameters(self.d_ff)
        if self.experts:
            met = self.experts.top_k if active else self.experts.num_experts
            one = self.mlp_parameters(self.experts.d_ff)
            router = self.experts.num_experts * self.d_model
            total += self.num_expert_layers * (one * (met + self.experts.num_shared) + router)
        total += self.embedding_parameters * (1 if self.tied else 2)
        return total + (self.learned_positions + 1) * self.d_model


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of some of a block's matrices (`wq`); quantized: those are in 4 bits."""

    rank: int
    targets: tuple[str, ...]
    dora: bool = False
    quantized: bool = False


@dataclass(frozen=True)
class Arrangement:
    """How a step is divided, and what it keeps.

    Ranks are pp x dp_replicate x dp_shard x cp x tp, the last varying fastest; ep ranks (of
    dp_shard x cp x tp) divide the experts. stages_per_rank: of a pipeline (virtual stages).
    sequence_parallel: tensor ranks divide tokens between their products. zero, offload: as in
    LayoutConfig, OffloadConfig. precision: of products; recipe: of 8-bit scales. flash: attention
    does not write its scores to memory. overlap_tp: tensor ranks communicate beside their products.
    overlap_ep: experts' ranks beside another micro-batch's.
    overlap_data: data ranks beside the passes. attention_kernel:
    native: written for the device's generation (cuDNN); older: for Ampere (FlashAttention-2);
    triton: Triton's. shards_broadcast: each rank of zero 1 sends its weights to the others in turn.
    trained_share: of the parameters (adapters train few). state_precision: of masters and moments;
    gradient_precision: of gradients as they are summed; moment_precision: where it is not that of
    the masters. step_bytes: a parameter of a rank's part, that the optimiser holds only while it
    steps. bucket_elements: gradients that are copied together to be summed. compiled_loss: the loss
    is fused, too. partitioned_activations: tensor ranks divide what "full" keeps. imbalance: tokens
    of the busiest rank's experts over the mean; 1 where a benchmark forces it. loss_chunk_tokens:
    whose logits are there at once, None: all. prefetch: blocks gathered ahead. stage_blocks: of
    each pipeline stage, None: even. recompute_modules: of a block, by Megatron's names, with
    "selective". recompute_every: as remat.every. stages_checkpoint: a rank copies its part to the
    host before it is written (checkpoint.asynchronous).
    """

    seq_len: int
    micro_batch_rows: int
    global_batch_rows: int
    tp: int = 1
    sequence_parallel: bool = True
    cp: int = 1
    pp: int = 1
    stages_per_rank: int = 1
    schedule: str = "1f1b"
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    zero: int = 3
    reshard: Literal["always", "never", "node"] = "always"
    reduce_every_micro_batch: bool = True
    precision: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    recipe: str = "none"
    recompute: Recompute = "none"
    flash: bool = True
    compiled: bool = True
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_activations: bool = False
    overlap_tp: bool = False
    overlap_ep: bool = False
    overlap_data: bool = True
    attention_kernel: Literal["native", "older", "triton"] = "older"
    shards_broadcast: bool = False
    program: Program = "stepwell"
    trained_share: float = 1.0
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    state_precision: Literal["fp32", "bf16"] = "fp32"
    gradient_precision: Literal["fp32", "bf16"] = "fp32"
    moment_precision: Literal["fp32", "bf16"] | None = None
    step_bytes: int = 0
    bucket_elements: int = 0
    compiled_loss: bool = True
    partitioned_activations: bool = False
    imbalance: float = 1.3
    release_gradients: bool = False
    loss_chunk_tokens: int | None = None
    prefetch: int = 1
    stage_blocks: tuple[int, ...] | None = None
    recompute_modules: tuple[str, ...] = ()
    recompute_every: int = 2
    cp_method: Literal["ring", "ulysses"] = "ring"
    stages_checkpoint: bool = True
    adapters: Adapters | None = None

    def having(self, **changes: Any) -> Arrangement:
        """As `dataclasses.replace`, in a tenth of its time: a search makes tens of thousands."""
        assert changes.keys() <= self.__dict__.keys()
        other = object.__new__(Arrangement)
        other.__dict__.update(self.__dict__, **changes)
        return other

    @property
    def num_gpus(self) -> int:
        return prod((self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp))

    @property
    def data_ranks(self) -> int:
        """Ranks that see different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_imbalance(self) -> float:
        """Tokens of the busiest rank's experts over the mean. A rank that has all experts computes
        its own tokens, whichever of them they go to."""
        return self.imbalance if self.ep > 1 else 1.0

    @property
    def trains_base(self) -> bool:
        """Whether its matrices have gradients."""
        return self.adapters is None and self.trained_share > 0.5

    @property
    def num_micro_batches(self) -> int:
        rows = -(-self.global_batch_rows // self.data_ranks)
        return -(-rows // self.micro_batch_rows)

    @property
    def global_batch_tokens(self) -> int:
        return self.global_batch_rows * self.seq_len

    @property
    def tokens_of_rank(self) -> int:
        """Of a micro-batch, on one context rank; tensor ranks see the same ones."""
        return self.micro_batch_rows * self.seq_len // self.cp


@dataclass(frozen=True)
class Job:
    """One training step of a model on a cluster."""

    dims: Dims
    layout: Arrangement
    cluster: Cluster


def how_to_start(layout: Arrangement) -> str:
    """A sentence where a run needs more than its recipe to start as planned, else empty."""
    if layout.num_gpus == 1 and layout.offload_parameters:
        return "Start it with --nproc 1: FSDP2, which offloads parameters, needs a process group."
    return ""


def dims_of(model: ModelConfig, name: str = "") -> Dims:
    """The dimensions of one of our models."""
    counts = count_parameters(model)
    norms = (2 * model.num_layers + 1) * model.d_model
    return Dims(
        name=name or model.family,
        num_layers=model.num_layers,
        d_model=model.d_model,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        d_ff=model.d_ff,
        vocab_size=model.vocab_size,
        tied=model.tied,
        biases=(counts.norms_and_biases - norms) // model.num_layers,
        qk_norm=model.qk_norm,
        window=model.sliding_window,
    )


def job_of(run: Run, world: int, cluster: Cluster, name: str = "") -> Job:
    """`run` on `world` ranks. Raises ConfigError if its axes do not fill them."""
    axes, layout = axis_sizes(run.layout, world), run.layout
    if run.precision.compute == "fp64":
        raise ConfigError("precision.compute='fp64' has no rate on accelerators; plan for 'bf16'")
    reduce = layout.reduce_gradients
    every = layout.zero >= 2 if reduce == "auto" else reduce == "micro_batch"
    eight = run.precision.fp8.recipe != "none"
    arrangement = Arrangement(
        seq_len=run.data.seq_len,
        micro_batch_rows=run.train.micro_batch_rows,
        global_batch_rows=run.train.global_batch_rows,
        tp=axes.tp,
        cp=axes.cp,
        pp=axes.pp,
        stages_per_rank=layout.pp_stages_per_rank,
        schedule=layout.pp_schedule,
        dp_replicate=axes.dp_replicate,
        dp_shard=axes.dp_shard,
        zero=layout.zero,
        reshard=layout.reshard_after_forward if layout.zero == 3 else "never",
        reduce_every_micro_batch=every and axes.pp == 1,
        precision="fp8" if eight else run.precision.compute,
        recipe=run.precision.fp8.recipe,
        recompute=run.remat.mode,
        compiled=layout.compile,
        offload_optimizer=run.offload.optimizer,
        offload_parameters=run.offload.parameters,
        offload_activations=run.offload.activations,
        optimizer=run.optim.kind,
        release_gradients=run.optim.release_gradients,
        loss_chunk_tokens=run.loss.chunk_tokens,
        prefetch=layout.prefetch_forward,
        stage_blocks=layout.pp_layers,
        recompute_every=run.remat.every,
        gradient_precision="bf16" if run.precision.reduce == "bf16" else "fp32",
        cp_method=layout.cp_method,
        stages_checkpoint=run.checkpoint.asynchronous,
        adapters=_adapters_of(run),
        trained_share=_trained_share(run),
    )
    return Job(dims_of(run.model, name), arrangement, cluster)


def _trained_share(run: Run) -> float:
    if not run.lora.rank:
        return 1.0
    trained = sum(map(prod, adapter_shapes(run.model, run.lora).values()))
    return trained / sum(map(prod, parameter_shapes(run.model).values()))


def _adapters_of(run: Run) -> Adapters | None:
    """Those of the first block stand for all."""
    lora = run.lora
    if not lora.rank:
        return None
    of_first = [name for name in target_shapes(run.model, lora) if name.startswith("blocks.0.")]
    targets = tuple(name.rsplit(".", 1)[-1] for name in of_first)
    return Adapters(lora.rank, targets, lora.dora, lora.quantize == "nf4")
