"""What a run will hold in memory, item by item, before it starts. No torch.

Letters as in `plan/memory/sizes`, which has the bytes of the pieces; here is when they are there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from math import prod

from stepwell.config import Run
from stepwell.hardware import DeviceKind
from stepwell.models.activations import Segment, at_block, held, seen_outside
from stepwell.parallel.lever_rules import host_bytes, share_in_8_bits
from stepwell.parallel.rules import axis_sizes
from stepwell.parallel.schedules import ZERO_BUBBLE
from stepwell.plan.memory.shards import num_shards, parts_of_rank
from stepwell.plan.memory.sizes import Sizes
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

USUAL_MACHINE = 8  # accelerators, where the launcher has not said how many
OFFLOAD_WINDOW = 16  # tensors on their way (parallel.offload)


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
    """items: at the step's worst moment, which is in `phase`, on the pipeline rank that needs the
    most. activations_per_layer_bytes: what one block saves for its backward pass (the mean, where
    blocks differ). phases: the worst moment of each. gradient_bytes: of all
    gradients when a step begins. host: bytes of a rank on its host, by what is offloaded.
    moments_in_8_bits: the share of all moments that optim.kind "adamw8bit" quantises. Bytes on one
    device; the engine's state between steps is parameters and optimizer."""

    phase: str
    items: MemoryItems
    activations_per_layer_bytes: int
    phases: dict[str, MemoryItems]
    gradient_bytes: int = 0
    pp_rank: int = 0
    host: dict[str, int] = field(default_factory=dict)
    moments_in_8_bits: float = 0.0

    @property
    def peak_bytes(self) -> int:
        return self.items.total

    @property
    def by_phase(self) -> dict[str, int]:
        return {name: items.total for name, items in self.phases.items()}

    @property
    def resting_bytes(self) -> int:
        """What stays between two steps."""
        return self.items.parameters + self.items.optimizer


def predict_memory(
    run: Run, world: int = 1, grouped: bool | None = None, *, device: DeviceKind
) -> MemoryLedger:
    """The memory of one training step on each of `world` ranks, for a micro-batch of
    micro_batch_rows full rows with a loss on every token. grouped: whether they have a process
    group, by default unless there is only one that offloads no parameters. device: of each rank; a
    CPU's loss works in slices that fit into its cache, an accelerator's on a chunk at once.

    Sampling's KV cache, the data, the allocator's fragmentation and the libraries' own memory are
    not in it. Raises ConfigError when the ranks cannot be laid out.
    """
    axes = axis_sizes(run.layout, world)
    ledgers = [predict_rank(run, world, r, grouped, device=device) for r in _distinct(run, axes.pp)]
    return max(ledgers, key=lambda ledger: ledger.peak_bytes)


def _distinct(run: Run, pp: int) -> list[int]:
    """Of pipeline ranks with alike stages the first, which has the most micro-batches waiting."""
    found: dict[tuple[object, ...], int] = {}
    for pp_rank in reversed(range(pp)):
        stages = tuple(
            (len(part.blocks), part.blocks.start % run.remat.every, part.first, part.last)
            for part in parts_of_rank(run, pp_rank)
        )
        found[stages] = pp_rank
    return sorted(found.values())


def predict_rank(
    run: Run,
    world: int,
    pp_rank: int,
    grouped: bool | None = None,
    *,
    device: DeviceKind,
) -> MemoryLedger:
    """`predict_memory` of one rank of the pipeline."""
    axes = axis_sizes(run.layout, world)
    grouped = (world > 1 or run.offload.parameters) if grouped is None else grouped
    s = Sizes.of(run, axes, pp_rank, grouped, device)
    phases = _phases(s)
    worst = max(phases, key=lambda name: phases[name].total)
    return MemoryLedger(
        phase=worst,
        items=phases[worst],
        activations_per_layer_bytes=held(s.now.segments, s.saved) // max(len(_blocks(s)), 1),
        phases=phases,
        gradient_bytes=phases["optimizer"].gradients,
        pp_rank=pp_rank,
        host=host_bytes(run, axes, pp_rank),
        moments_in_8_bits=share_in_8_bits(run, axes.tp) if run.optim.kind == "adamw8bit" else 0.0,
    )


def _phases(s: Sizes) -> dict[str, MemoryItems]:
    """The worst moment of each."""
    phases = [("optimizer", _optimizer(s))]
    if s.grouped:
        phases.append(("reduction", _reduction(s)))
    for now in s.times:
        phases += _phases_now(replace(s, now=now))
    worst: dict[str, MemoryItems] = {}
    for name, items in phases:
        worst[name] = _worst([worst.get(name, items), items])
    return worst


def _phases_now(s: Sizes) -> list[tuple[str, MemoryItems]]:
    if s.now.halved:
        return [("backward", _worst(_second_half(s)))]
    blocks, first = _blocks(s), s.now == s.times[0]
    phases = [("forward" if first else "later forward", _forward(s))]
    if s.head and "loss" in s.now.phases:
        phases.append(("loss", _loss(s)))
    if blocks and "backward" in s.now.phases:
        phases.append(("backward", _worst([_backward(s, number, blocks) for number in blocks])))
    if s.embedding and "embedding" in s.now.phases:
        phases.append(("embedding", _embedding(s)))
    return phases


def _blocks(s: Sizes) -> list[int]:
    return [number for start, stop, _ in s.now.segments for number in range(start, stop)]


def _resting(s: Sizes) -> tuple[int, int]:
    """Parameters and optimiser state on the device."""
    offload, trained = s.run.offload, s.trained
    if offload.parameters:
        return 0, 0
    optimizer = 0 if offload.optimizer else trained.optimizer_bytes
    return s.p * trained.shard + s.frozen_bytes, optimizer


def _accumulates(s: Sizes) -> bool:
    """Whether gradients of an earlier micro-batch are there."""
    return s.num_micro_batches > 1


def _gradients(s: Sizes, num_blocks: int, root: bool) -> int:
    """Gradients that exist once `num_blocks` blocks are done: all of them from the second
    micro-batch on. Under FSDP2 those wait whole, in the dtype of their sum, if they are summed once
    a step."""
    layout = s.run.layout
    if s.run.optim.release_gradients:
        return 0
    if s.axes.pp > 1:
        own = num_blocks * s.block.trained.whole if s.now.fresh else 0
        return s.r * (s.now.summed + own)
    if _accumulates(s):
        if not s.grouped:
            return s.p * s.trained.shard
        if not _reduces_every_micro_batch(s):
            return s.r * s.trained.whole
        between = s.r * s.trained.shard if layout.dp_replicate > 1 else 0
        return between + (0 if s.run.offload.parameters else s.p * s.trained.shard)
    if s.run.offload.parameters:
        return 0
    of_root = s.root.trained.shard if root else 0
    return s.p * (num_blocks * s.block.trained.shard + of_root)


def _reduces_every_micro_batch(s: Sizes) -> bool:
    reduce = s.run.layout.reduce_gradients
    return s.run.layout.zero >= 2 if reduce == "auto" else reduce == "micro_batch"


def _copies(s: Sizes, in_use: int, casts: int, head: bool) -> int:
    """Weights in compute dtype.

    One process casts each matrix where it is used, and autograd keeps the cast for blocks that keep
    everything (`casts` of them), but not those of layers in 8 bits. FSDP2 gathers the blocks in use
    and those ahead; the root's stay. A pipeline's stay all between micro-batches.
    """
    layout = s.run.layout
    if not s.grouped:
        if s.a == s.p:
            return 0
        return s.a * (casts * s.cast_elements + (s.head if head and not s.run.lora.rank else 0))
    reshards = layout.zero == 3 and layout.reshard_after_forward != "never" and s.axes.pp == 1
    num_blocks = min(in_use, s.num_blocks) if reshards else s.num_blocks
    copies = s.a * (num_blocks * s.block.gathered + s.root.gathered)
    if reshards and layout.reshard_after_forward == "node":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", min(prod(s.axes), USUAL_MACHINE)))
        on_node = max(1, local // s.axes.tp)
        copies += s.a * s.num_blocks * s.block.gathered // min(on_node, num_shards(s.run, s.axes))
    return copies


def _waiting(s: Sizes, before: tuple[Segment, ...]) -> int:
    """Activations of the segments before the one at work, and of other micro-batches.

    What autograd saves outside of recomputed blocks is offloaded, but for what is on its way;
    products that are kept inside stay on the device.
    """
    kept = held(before, s.saved)
    if not s.run.offload.activations:
        return kept + s.now.waiting
    moves = seen_outside(before, s.saved)
    window = max(s.saved.all, OFFLOAD_WINDOW * s.saved.input)
    return kept - moves + min(moves, window) + s.now.waiting


def _forward(s: Sizes) -> MemoryItems:
    """The last chunk of the loss, all blocks saved and what was gathered of them gone."""
    parameters, optimizer = _resting(s)
    casts = sum(stop - start for start, stop, keep in s.now.segments if keep == "all")
    return MemoryItems(
        parameters=parameters,
        optimizer=optimizer,
        gradients=_gradients(s, 0, root=False) if _accumulates(s) else 0,
        working_copies=_copies(s, 0, casts, head=True),
        activations=_waiting(s, s.now.segments) + s.now.root,
        logits=s.now.logits,
        workspace=s.loss_forward,
    )


def _loss(s: Sizes) -> MemoryItems:
    """The first chunk of the loss's backward pass; the head's gradient is there."""
    before, head, run = _forward(s), _fresh(s) * _trained_root(s, s.head), s.run
    workspace = s.loss_backward + s.a * s.num_tokens * run.model.d_model
    if s.axes.pp > 1 and run.layout.pp_schedule in ZERO_BUBBLE:
        # Kept logits stay for the second half, so a chunk of them is copied; and the head's
        # gradient from the last second half is summed only after this pass. (dualpipev's fullest
        # passes are whole ones.)
        chunk = min(run.loss.chunk_tokens, s.num_tokens)
        workspace += s.a * chunk * (run.model.vocab_size // s.axes.tp) if s.now.logits else 0
        head *= 2 if run.layout.pp_schedule == "zbv" and not s.now.fresh else 1
    return replace(before, gradients=before.gradients + head, workspace=workspace)


def _backward(s: Sizes, number: int, blocks: list[int]) -> MemoryItems:
    """Inside the backward pass of block `number`."""
    run, place = s.run, blocks.index(number)
    parameters, optimizer = _resting(s)
    segment = next(x for x in s.now.segments if x.start <= number < x.stop)
    earlier = tuple(x for x in s.now.segments if x.stop <= segment.start)
    together = segment.stop - segment.start
    # Blocks that are computed again together are gathered one by one meanwhile.
    ahead = min(run.layout.prefetch_backward, blocks.index(segment.start)) if together == 1 else 0
    cast_before = sum(x.keep == "all" for x in earlier)
    adds_up = not s.grouped and _accumulates(s) and not run.model.shares_embedding
    head = 0 if adds_up else _fresh(s) * _trained_root(s, s.head)
    trained, largest = s.block.trained, run.model.d_model * run.model.d_ff // s.axes.tp
    if run.lora.rank:
        largest = run.lora.rank * max(run.model.d_model, run.model.d_ff // s.axes.tp)
    if run.layout.compile:  # the block's gradients appear together
        casts = s.p * trained.whole
    else:
        casts = largest * (s.a + (s.p if _accumulates(s) and not s.grouped else 0))
    if s.grouped and s.axes.pp == 1:  # the block before, in backward order, is still being summed
        casts += s.r * trained.whole if _sharded(s) and place < len(blocks) - 1 else 0
        casts += s.a * s.block.gathered if ahead else 0
    if run.optim.release_gradients:
        casts += s.p * (trained.shard if s.grouped else largest)
    casts_kept = cast_before + number - segment.start + 1
    return MemoryItems(
        parameters=parameters,
        optimizer=optimizer,
        gradients=_gradients(s, len(blocks) - place - 1, root=False) + head,
        working_copies=_copies(s, together + ahead, casts_kept, head=False),
        activations=_waiting(s, earlier) + at_block((segment,), s.saved, number),
        workspace=s.block_workspace + casts,
    )


def _second_half(s: Sizes) -> list[MemoryItems]:
    """The beginning and the end of a pass for weights' gradients alone, which wait in compute dtype
    for all of the stage's."""
    parameters, optimizer = _resting(s)
    begins = MemoryItems(
        parameters=parameters,
        optimizer=optimizer,
        gradients=s.r * s.now.summed,
        working_copies=_copies(s, s.num_blocks, 0, head=False),
        activations=s.now.waiting,
        workspace=s.block_workspace,
    )
    gone = begins.activations - s.now.spent
    return [begins, replace(begins, activations=gone, workspace=s.a * s.now.made)]


def _trained_root(s: Sizes, elements: int) -> int:
    """Of the embedding or the head, as far as they are trained."""
    return 0 if s.run.lora.rank else elements


def _sharded(s: Sizes) -> bool:
    return num_shards(s.run, s.axes) > 1


def _embedding(s: Sizes) -> MemoryItems:
    """The end of the backward pass: the embedding's gradient, beside the head's when tied. Untied,
    in the first micro-batch, it becomes the parameter's gradient as it is. Under FSDP2 both wait
    for their reduction."""
    parameters, optimizer = _resting(s)
    tied = s.run.model.shares_embedding and s.head > 0
    dense = _fresh(s) * _trained_root(s, s.embedding)
    stays = not tied and not _accumulates(s)
    gradients = _gradients(s, s.num_blocks, root=not tied) + (dense if tied else 0)
    if s.grouped:
        ends = s.embedding + (0 if tied else s.head)
        gradients = _gradients(s, s.num_blocks, root=False) + _fresh(s) * _trained_root(s, ends)
        stays = True
    return MemoryItems(
        parameters=parameters,
        optimizer=optimizer,
        gradients=gradients,
        working_copies=_copies(s, 0, 0, head=False),
        activations=s.now.waiting,
        workspace=(0 if stays else dense) + (s.a + s.w) * s.num_tokens * s.run.model.d_model,
    )


def _reduction(s: Sizes) -> MemoryItems:
    """FSDP2 sums the gradients of what is no block, all of them in one piece. Where they have added
    up, they wait in the dtype of the sum already. Gathered weights are gone by then, but for those
    that wait for the next micro-batch, or in a pipeline for their own reduction."""
    parameters, optimizer = _resting(s)
    if s.axes.pp > 1:  # after all passes
        s = replace(s, now=replace(s.now, summed=s.trained.whole, fresh=False))
    root, waits = s.root.trained.whole, s.axes.pp > 1 or not _reduces_every_micro_batch(s)
    fresh = 0 if waits and _accumulates(s) else s.a * root
    last = MemoryItems(
        parameters=parameters,
        optimizer=optimizer,
        gradients=_gradients(s, s.num_blocks, root=False),
        working_copies=s.a * s.num_blocks * s.block.gathered if s.axes.pp > 1 else 0,
        workspace=fresh + s.r * (root + s.root.trained.shard),
    )
    if s.run.layout.zero == 3 or not _accumulates(s) or waits:
        return last
    # Before the last one weights stay; in the first of two no gradients have added up.
    first = replace(s, num_micro_batches=s.num_micro_batches - 1)
    before = replace(
        last,
        gradients=_gradients(first, s.num_blocks, root=False),
        working_copies=_copies(s, 0, 0, head=False),
    )
    return _worst([last, before])


def _fresh(s: Sizes) -> int:
    """Size of a gradient's element as the backward pass makes it: of the weight that was used."""
    return s.a if s.grouped else s.p


def _optimizer(s: Sizes) -> MemoryItems:
    """A fused step needs nothing but the state."""
    parameters, optimizer = _resting(s)
    released = s.run.optim.release_gradients or s.run.offload.parameters
    gradients = 0 if released else s.p * s.trained.shard
    return MemoryItems(parameters=parameters, optimizer=optimizer, gradients=gradients)


def _worst(moments: list[MemoryItems]) -> MemoryItems:
    return max(moments, key=lambda items: items.total)
