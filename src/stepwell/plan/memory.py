"""What a run will hold in memory, item by item, before it starts. No torch.

N tokens of a micro-batch, D d_model, H heads, K key/value heads, E head_dim, F d_ff, V vocabulary,
C tokens of a loss chunk. `a` is the size of the compute dtype, `w` of the wide one (at least
float32) that norms and the loss are computed in.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod

from stepwell.config import ModelConfig, Run
from stepwell.models.flops import parameter_shapes
from stepwell.parallel.rules import axis_sizes
from stepwell.types import ConfigError

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
KEEP_LOGITS_BYTES = 256 * 2**20
LOSS_SLICE_BYTES = 2 * 2**20  # of logits, widened, at a time (models.logits)


# --- closed forms ----------------------------------------------------------------------------


def state_bytes_per_parameter(trained: bool = True) -> int:
    """Mixed-precision Adam: bf16 weight and gradient, float32 master and two moments are 16 bytes
    (ZeRO, 1910.02054, section 3.1); a frozen bf16 weight is 2."""
    return 2 + 2 + 4 + 4 + 4 if trained else 2


def method_bytes_per_parameter(method: str, kl: bool = True) -> int:
    """State of all the models of a method, each of one size, per parameter.

    pretrain, sft: the model. dpo: with its reference. grpo: with a reference if `kl`. ppo: policy
    and critic trained, reference and reward model frozen.
    """
    trained = {"pretrain": 1, "sft": 1, "dpo": 1, "grpo": 1, "ppo": 2}
    frozen = {"pretrain": 0, "sft": 0, "dpo": 1, "grpo": int(kl), "ppo": 2}
    if method not in trained:
        raise ConfigError(f"unknown method {method!r}; known are {', '.join(trained)}")
    frozen_bytes = frozen[method] * state_bytes_per_parameter(trained=False)
    return trained[method] * state_bytes_per_parameter() + frozen_bytes


def zero_bytes_per_parameter(stage: int, num_ranks: int) -> float:
    """Per rank, of the 16: stage 1 shards master and moments, 2 the gradient too, 3 all
    (ZeRO, 1910.02054, figure 1)."""
    sharded = {0: 0, 1: 12, 2: 14, 3: 16}
    if stage not in sharded:
        raise ConfigError(f"ZeRO has no stage {stage!r}; its stages are 0, 1, 2 and 3")
    if num_ranks < 1:
        raise ConfigError(f"num_ranks={num_ranks} must be at least 1")
    return 16 - sharded[stage] + sharded[stage] / num_ranks


def zero_volume_in_parameters(stage: int, reshard_after_forward: bool = True) -> int:
    """Elements that a rank sends per step, in units of the parameters, for many ranks: an
    all-reduce is 2; stage 3 gathers for forward and, if resharded, for backward, and scatters
    (1910.02054, section 7)."""
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"ZeRO has no stage {stage!r}; its stages are 0, 1, 2 and 3")
    return 3 if stage == 3 and reshard_after_forward else 2


def nf4_bytes_per_parameter(block: int = 64, double_quantised: bool = False) -> float:
    """4-bit NormalFloat with one float32 scale a block, or 8-bit scales in blocks of 256
    (QLoRA, 2305.14314, section 3)."""
    scale = 1 / block + 4 / (block * 256) if double_quantised else 4 / block
    return 0.5 + scale


def logits_bytes(num_rows: int, seq_len: int, vocab_size: int, dtype_bytes: int = 4) -> int:
    return num_rows * seq_len * vocab_size * dtype_bytes


def kv_cache_bytes_per_token(cfg: ModelConfig, dtype_bytes: int = 2) -> int:
    return 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * dtype_bytes


# --- one training step of our decoder --------------------------------------------------------


@dataclass(frozen=True)
class MemoryItems:
    """Bytes on one device at one moment. working_copies: weights in compute dtype. workspace:
    what lives only inside the operation that is running."""

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    working_copies: int = 0
    activations: int = 0
    logits: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def named(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class MemoryLedger:
    """items: at the step's worst moment, which is in `phase`. activations_per_layer_bytes: what
    one block saves for its backward pass. by_phase: the total at the worst moment of each phase.
    Bytes on one device; the engine's state between steps is parameters and optimizer."""

    phase: str
    items: MemoryItems
    activations_per_layer_bytes: int
    by_phase: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return self.items.total

    @property
    def resting_bytes(self) -> int:
        """What stays between two steps."""
        return self.items.parameters + self.items.optimizer


def predict_memory(run: Run, world: int = 1) -> MemoryLedger:
    """The memory of one training step on each of `world` ranks, for a micro-batch of
    micro_batch_rows full rows with a loss on every token.

    Sampling's KV
    cache, the data, the allocator's fragmentation and the libraries' own memory are not in it.
    Raises ConfigError when the ranks cannot be laid out.
    """
    shard = axis_sizes(run.layout, world).dp_shard
    sizes = _Sizes.of(run)
    phases = {
        "forward": _forward(run, sizes, shard),
        "loss": _loss(run, sizes, shard),
        "backward": _worst([_backward(run, sizes, shard, i) for i in range(sizes.num_layers)]),
        "embedding": _embedding(run, sizes, shard),
        "optimizer": _optimizer(run, sizes, shard),
    }
    worst = max(phases, key=lambda name: phases[name].total)
    return MemoryLedger(
        phase=worst,
        items=phases[worst],
        activations_per_layer_bytes=sizes.saved_per_layer,
        by_phase={name: items.total for name, items in phases.items()},
    )


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the pieces, unsharded. a: compute, w: wide, p: parameter dtype."""

    num_layers: int
    num_tokens: int
    a: int
    w: int
    p: int
    block_parameters: int
    block_matrices: int
    root_parameters: int
    embedding: int
    saved_per_layer: int
    saved_by_root: int
    block_workspace: int
    loss_forward: int
    loss_backward: int
    kept_logits: int
    head: int

    @staticmethod
    def of(run: Run) -> _Sizes:
        cfg = run.model
        a, p = DTYPE_BYTES[run.precision.compute], DTYPE_BYTES[run.precision.param]
        w = max(a, 4)
        N = run.train.micro_batch_rows * run.data.seq_len
        shapes = parameter_shapes(cfg)
        block = {n: s for n, s in shapes.items() if n.startswith("blocks.0.")}
        compiled = run.layout.compile
        chunk = min(run.loss.chunk_tokens, N)
        keep = {"always": True, "never": False}.get(
            run.loss.keep_logits, N * cfg.vocab_size * a <= KEEP_LOGITS_BYTES
        )
        chunk_logits = chunk * cfg.vocab_size
        # logits that are not kept: the chunk before, too, until its name is taken
        logits = 0 if keep else a * chunk_logits * (2 if chunk < N else 1)
        piece = min(LOSS_SLICE_BYTES // 4, chunk_logits)
        return _Sizes(
            num_layers=cfg.num_layers,
            num_tokens=N,
            a=a,
            w=w,
            p=p,
            block_parameters=sum(prod(s) for s in block.values()),
            block_matrices=sum(prod(s) for s in block.values() if len(s) == 2),
            root_parameters=sum(prod(s) for n, s in shapes.items() if n not in block)
            - (cfg.num_layers - 1) * sum(prod(s) for s in block.values()),
            embedding=cfg.vocab_size * cfg.d_model,
            saved_per_layer=saved_per_layer(cfg, N, a, w, compiled),
            saved_by_root=_saved_by_root(cfg, N, a, w),
            block_workspace=_block_workspace(cfg, N, a, w, compiled),
            # a slice widened, and its probabilities
            loss_forward=logits + 2 * w * piece,
            # a slice widened and its gradient (from logits, log-probabilities and probabilities
            # too); or the head's gradient from one chunk, and widened where it is added up
            loss_backward=logits
            + max(
                (2 if keep else 4) * w * piece,
                cfg.vocab_size * cfg.d_model * (a + (p if a != p and chunk < N else 0)),
            ),
            kept_logits=N * cfg.vocab_size * a if keep else 0,
            head=cfg.vocab_size * cfg.d_model,
        )


def saved_per_layer(
    cfg: ModelConfig, num_tokens: int, a: int = 2, w: int = 4, compiled: bool = False
) -> int:
    """Bytes that one block keeps for its backward pass, besides its weights.

    Norms: the input and 1/rms. Projections: their input. Attention: q, k, v, the output (which is
    also wo's input) and the log-sum-exp. SwiGLU: gate, silu(gate), up and their product; compiled,
    silu(gate) is computed again.
    """
    N, D, F = num_tokens, cfg.d_model, cfg.d_ff
    query, keyvalue = N * cfg.num_heads * cfg.head_dim, N * cfg.num_kv_heads * cfg.head_dim
    heads = N * (cfg.num_heads + cfg.num_kv_heads)
    attention = a * (2 * query + 2 * keyvalue) + w * N * cfg.num_heads
    norms = 2 * _saved_by_norm(N * D, N, a, w) + 2 * a * N * D
    qk_norms = _saved_by_norm(query + keyvalue, heads, a, w) if cfg.qk_norm else 0
    return norms + attention + qk_norms + (3 if compiled else 4) * a * N * F


def _saved_by_norm(num_elements: int, num_rows: int, a: int, w: int) -> int:
    return a * num_elements + w * num_rows


def _saved_by_root(cfg: ModelConfig, N: int, a: int, w: int) -> int:
    """The last norm, the hidden states, cos and sin, and four numbers a token of the loss."""
    return _saved_by_norm(N * cfg.d_model, N, a, w) + a * N * cfg.d_model + N * cfg.head_dim * 4


def _block_workspace(cfg: ModelConfig, N: int, a: int, w: int, compiled: bool) -> int:
    """The most that a block's backward pass holds besides what was saved: the gradient of the
    residual stream, and either SwiGLU's gradients (three, but the product is gone by then),
    attention's twice (whole, and the stretch of documents at hand), or a norm's wide ones, which
    compiled code does not hold."""
    query, keyvalue = N * cfg.num_heads * cfg.head_dim, N * cfg.num_kv_heads * cfg.head_dim
    residual = a * N * cfg.d_model
    swiglu = 2 * a * N * cfg.d_ff
    attention = a * (query + 2 * (query + 2 * keyvalue))
    norm = 0 if compiled else (4 if a < w else 3) * w * N * cfg.d_model
    return residual + max(swiglu, attention, norm)


def _resting(run: Run, sizes: _Sizes, shard: int) -> tuple[int, int]:
    """Parameters and optimiser state of one rank."""
    total = sizes.root_parameters + sizes.num_layers * sizes.block_parameters
    moments = 2 * total
    if run.optim.kind == "muon":
        moments -= sizes.num_layers * sizes.block_matrices
    return sizes.p * total // shard, sizes.p * moments // shard


def _accumulates(run: Run, shard: int) -> bool:
    """Whether a step has several micro-batches."""
    ranks = shard * run.layout.dp_replicate
    return run.train.global_batch_rows > ranks * run.train.micro_batch_rows


def _gradients(run: Run, sizes: _Sizes, shard: int, num_blocks: int, root: bool) -> int:
    """Gradients that exist once `num_blocks` blocks are done: all of them from the second
    micro-batch on, and then, under FSDP2, unsharded (they are summed over the ranks once)."""
    done = num_blocks * sizes.block_parameters + (sizes.root_parameters if root else 0)
    total = sizes.num_layers * sizes.block_parameters + sizes.root_parameters
    if _accumulates(run, shard):
        dtype_bytes = sizes.p if shard == 1 else DTYPE_BYTES[run.precision.reduce]
        return dtype_bytes * total
    return sizes.p * done // shard


def _copies(run: Run, sizes: _Sizes, shard: int, num_blocks: int, head: bool) -> int:
    """Weights in compute dtype while `num_blocks` blocks are still needed for the backward pass.

    One process casts each matrix where it is used and autograd keeps the cast. FSDP2 gathers a
    block and prefetches the next; the root's stay.
    """
    if shard == 1 and run.layout.dp_replicate == 1:
        if sizes.a == sizes.p:
            return 0
        return sizes.a * (num_blocks * sizes.block_matrices + (sizes.head if head else 0))
    reshards = run.layout.zero == 3 and run.layout.reshard_after_forward != "never"
    num_blocks = min(2, sizes.num_layers) if reshards else sizes.num_layers
    return sizes.a * (num_blocks * sizes.block_parameters + sizes.root_parameters)


def _forward(run: Run, sizes: _Sizes, shard: int) -> MemoryItems:
    """The last chunk of the loss, all blocks saved."""
    parameters, optimizer = _resting(run, sizes, shard)
    accumulated = _gradients(run, sizes, shard, 0, root=False)
    return MemoryItems(
        parameters=parameters,
        optimizer=optimizer,
        gradients=accumulated,
        working_copies=_copies(run, sizes, shard, sizes.num_layers, head=True),
        activations=sizes.num_layers * sizes.saved_per_layer + sizes.saved_by_root,
        logits=sizes.kept_logits,
        workspace=sizes.loss_forward,
    )


def _loss(run: Run, sizes: _Sizes, shard: int) -> MemoryItems:
    """The first chunk of the loss's backward pass; the head's gradient is there."""
    before = _forward(run, sizes, shard)
    extra = sizes.a * sizes.num_tokens * run.model.d_model
    return MemoryItems(
        **{
            **before.named(),
            "gradients": before.gradients + sizes.p * sizes.head,
            "workspace": sizes.loss_backward + extra,
        }
    )


def _backward(run: Run, sizes: _Sizes, shard: int, left: int) -> MemoryItems:
    """Inside a block's backward pass, `left` blocks still to come after it."""
    parameters, optimizer = _resting(run, sizes, shard)
    done = sizes.num_layers - left - 1
    head = 0 if _accumulates(run, shard) and not run.model.tied else sizes.p * sizes.head
    if run.layout.compile:  # the block's gradients appear together
        casts = sizes.p * sizes.block_parameters
    else:
        casts = sizes.a + (sizes.p if _accumulates(run, shard) else 0)
        casts *= run.model.d_model * run.model.d_ff
    if shard > 1:
        reduce = DTYPE_BYTES[run.precision.reduce]
        casts += (sizes.a + reduce) * sizes.block_parameters
    return MemoryItems(
        parameters=parameters,
        optimizer=optimizer,
        gradients=_gradients(run, sizes, shard, done, root=False) + head,
        working_copies=_copies(run, sizes, shard, left + 1, head=False),
        activations=(left + 1) * sizes.saved_per_layer,
        workspace=sizes.block_workspace + casts,
    )


def _embedding(run: Run, sizes: _Sizes, shard: int) -> MemoryItems:
    """The end of the backward pass: the embedding's gradient, beside the head's when tied. Untied,
    in the first micro-batch, it becomes the parameter's gradient as it is."""
    parameters, optimizer = _resting(run, sizes, shard)
    dense = sizes.p * sizes.embedding
    both = dense if run.model.tied else 0
    stays = not run.model.tied and not _accumulates(run, shard)
    return MemoryItems(
        parameters=parameters,
        optimizer=optimizer,
        gradients=_gradients(run, sizes, shard, sizes.num_layers, root=not run.model.tied) + both,
        working_copies=_copies(run, sizes, shard, 0, head=False),
        workspace=(0 if stays else dense)
        + (sizes.a + sizes.w) * sizes.num_tokens * run.model.d_model,
    )


def _optimizer(run: Run, sizes: _Sizes, shard: int) -> MemoryItems:
    """A fused step needs nothing but the state."""
    parameters, optimizer = _resting(run, sizes, shard)
    total = sizes.root_parameters + sizes.num_layers * sizes.block_parameters
    return MemoryItems(
        parameters=parameters, optimizer=optimizer, gradients=sizes.p * total // shard
    )


def _worst(moments: list[MemoryItems]) -> MemoryItems:
    return max(moments, key=lambda items: items.total)
