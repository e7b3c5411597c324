"""What a block keeps for its backward pass, module by module, in any program. No torch.

N tokens of a micro-batch on a context rank, D d_model, F d_ff, t tensor ranks. `a` is the size of
the compute dtype, `w` of the wide one (float32 at least). For our own engine these are the sums of
`models/activations.py`; Megatron's are those of 2205.05198, section 4, with what a flash kernel, a
gated MLP and grouped heads change.
"""

from __future__ import annotations

from typing import NamedTuple

from stepwell.models.activations import KEEP_LOGITS_BYTES
from stepwell.plan.footprint.pieces import target_sizes
from stepwell.plan.job import Adapters, Arrangement, Dims, Program

# Modules that Megatron computes again under "selective" unless told otherwise.
CORE_ATTENTION = ("core_attn",)


class Habits(NamedTuple):
    """gathered: the input of tensor ranks' products is kept whole (else each rank's part of the
    tokens, and gathered again). repeated: key and value heads are repeated for every query head
    before attention. silu_kept: silu(gate) is kept beside gate, up and their product."""

    gathered: bool
    repeated: bool
    silu_kept: bool


HABITS: dict[Program, Habits] = {
    "stepwell": Habits(gathered=True, repeated=False, silu_kept=True),
    # torchtitan's `repeat_kv`, torchtune's expanded heads
    "fsdp": Habits(gathered=True, repeated=True, silu_kept=True),
    # fused bias_swiglu keeps what the first product wrote
    "megatron": Habits(gathered=False, repeated=False, silu_kept=False),
}


class Modules(NamedTuple):
    """Bytes of a block, by module."""

    norms: float = 0.0
    attention: float = 0.0
    mlp: float = 0.0

    @property
    def total(self) -> float:
        return self.norms + self.attention + self.mlp

    def times(self, factor: float) -> Modules:
        return Modules(self.norms * factor, self.attention * factor, self.mlp * factor)

    def plus(self, other: Modules) -> Modules:
        return Modules(
            self.norms + other.norms, self.attention + other.attention, self.mlp + other.mlp
        )


class Block(NamedTuple):
    """What one block holds until its backward pass if it keeps everything, its products (what
    "selective" keeps), or its input; unneeded: of its products, what its backward pass does not
    use."""

    all: Modules
    products: Modules
    input: Modules
    unneeded: float = 0.0


class Tokens(NamedTuple):
    """Elements of a micro-batch on a rank. wide: N x D. part: of it, what lies between products.
    query, key: N x their heads' widths on a tensor rank. heads: N x query heads. rows: tokens of
    `part`."""

    wide: float
    part: float
    query: float
    key: float
    heads: float
    rows: float
    num_tokens: float


def compute_bytes(layout: Arrangement) -> int:
    """Of an element in the compute dtype; products in 8 bits are between tensors in 16."""
    return 4 if layout.precision == "fp32" else 2


def master_bytes(layout: Arrangement) -> int:
    return 2 if layout.state_precision == "bf16" else 4


def freezes(layout: Arrangement) -> bool:
    """Whether only part of the model is trained, which the embedding and the head are not in."""
    return layout.adapters is not None or layout.trained_share < 1


def tokens_of(dims: Dims, layout: Arrangement) -> Tokens:
    num, t = layout.micro_batch_rows * layout.seq_len / layout.cp, layout.tp
    divided = t if layout.sequence_parallel or layout.program == "stepwell" else 1
    kv_heads = max(1, dims.num_kv_heads // t)
    return Tokens(
        wide=num * dims.d_model,
        part=num * dims.d_model / divided,
        query=num * dims.q_width / t,
        key=num * kv_heads * dims.head_dim,
        heads=num * dims.num_heads / t,
        rows=num / divided,
        num_tokens=num,
    )


def block_of(dims: Dims, layout: Arrangement, experts: bool = False) -> Block:
    """One block of the model; experts: one whose MLP is of experts."""
    a, w = compute_bytes(layout), 4
    at, habits = tokens_of(dims, layout), HABITS[layout.program]
    given = a * (at.wide if habits.gathered else at.part)  # input of the products
    attention, mlp = _attention(dims, layout, at, a, w) + given, given
    mlp += _experts(dims, layout, at, a, w) if experts else _mlp(dims, layout, at, a)
    if eight_bits(layout):
        more = _in_8_bits(dims, layout, at, a, given, experts)
        attention, mlp = attention + more[0], mlp + more[1]
    if _drops(layout):  # masks of the dropout before each sum
        attention, mlp = attention + at.part, mlp + at.part
    saved, products_of_adapters = _adapters(dims, layout, at, a)
    if layout.adapters is not None:
        unread = _inputs_of_frozen(dims, layout.adapters, layout, at, a, given)
        attention, mlp = attention - unread[0], mlp - unread[1]
    whole = Modules(2 * (a * at.part + w * at.rows), attention, mlp + saved)
    products, unneeded = _selective(dims, layout, at, a, w, whole, experts)
    kept = at.wide / layout.tp if layout.partitioned_activations else at.part
    return Block(
        all=whole,
        products=products.plus(Modules(mlp=products_of_adapters)),
        input=Modules(norms=a * kept),
        unneeded=unneeded,
    )


def between_halves(dims: Dims, layout: Arrangement) -> tuple[Modules, Modules]:
    """What a block has more between the halves of its backward pass, and what is gone at the end of
    the second (plan/memory/sizes). Experts as an ordinary MLP."""
    a, at = compute_bytes(layout), tokens_of(dims, layout)
    inner = at.num_tokens * dims.d_ff / layout.tp
    normed = 2 * at.part + (at.query + at.key if dims.qk_norm else 0.0)
    norms = 0.0 if freezes(layout) else a * normed
    factors = 2 if dims.mlp == "swiglu" else 1
    more = Modules(norms, a * (at.query + 2 * at.key + at.wide), a * (factors * inner + at.wide))
    read = Modules(2 * (a * at.part + 4 * at.rows), a * at.wide, a * (at.wide + inner))
    return more, more.plus(read)


def eight_bits(layout: Arrangement) -> bool:
    """Whether products keep their inputs in 8 bits: ours unless scales are by row, Transformer
    Engine's; torchtitan's checkpointing keeps what products write instead."""
    if layout.precision != "fp8" or layout.program == "fsdp":
        return False
    return layout.program == "megatron" or layout.recipe in ("tensorwise", "delayed")


def _drops(layout: Arrangement) -> bool:
    """Models of the time before flash attention were trained with dropout."""
    return layout.program == "megatron" and not layout.flash


def _attention(dims: Dims, layout: Arrangement, at: Tokens, a: int, w: int) -> float:
    """Queries, keys, values, the output and the log-sum-exp, or the scores' softmax."""
    key = at.query if HABITS[layout.program].repeated else at.key
    kept = a * (2 * at.query + 2 * key)
    if layout.cp > 1 and layout.cp_method == "ulysses":  # the output, exchanged
        kept += a * at.query
    if dims.qk_norm:
        rows = at.heads + at.num_tokens * max(1, dims.num_kv_heads // layout.tp)
        kept += a * (at.query + at.key) + w * rows
    if layout.flash:
        return kept + w * at.heads
    return kept + scores(layout, at, a)


def scores(layout: Arrangement, at: Tokens, a: int) -> float:
    """The softmax of all pairs, and its dropout's output and mask (2205.05198, section 4.1)."""
    return at.heads * layout.seq_len * (2 * a + 1 if _drops(layout) else a)


def _mlp(dims: Dims, layout: Arrangement, at: Tokens, a: int) -> float:
    """Between the two products: with a gate, its value, silu of it (unless computed again), the
    other factor and the product; without, what goes into the activation and comes out."""
    each = at.num_tokens * dims.d_ff / layout.tp
    return each * _widths(dims, layout, a)


def _widths(dims: Dims, layout: Arrangement, a: int) -> float:
    last = 1 if eight_bits(layout) and layout.program == "megatron" else a
    if dims.mlp != "swiglu":
        return a + last
    silu = HABITS[layout.program].silu_kept and not layout.compiled
    return a * (3 if silu else 2) + last


def routed_tokens(dims: Dims, layout: Arrangement) -> float:
    """Tokens of a micro-batch that the busiest rank's experts see, each once for every expert."""
    assert dims.experts
    num = layout.micro_batch_rows * layout.seq_len / layout.cp
    return num / layout.tp * dims.experts.top_k * layout.expert_imbalance


def _experts(dims: Dims, layout: Arrangement, at: Tokens, a: int, w: int) -> float:
    """Routed tokens as the products read them, and between the products (their weights are applied
    there, so that what leaves is not kept); the router's logits and probabilities; shared
    experts."""
    assert dims.experts
    keeps = 1 if eight_bits(layout) else a
    width = _widths(dims, layout, a)
    each = keeps * dims.d_model + width * dims.experts.d_ff
    shared = at.num_tokens * dims.experts.num_shared * dims.experts.d_ff / layout.tp * width
    router = 2 * w * at.num_tokens / layout.tp * dims.experts.num_experts
    return routed_tokens(dims, layout) * each + shared + router


def _in_8_bits(
    dims: Dims, layout: Arrangement, at: Tokens, a: int, given: float, experts: bool
) -> tuple[float, float]:
    """What 8 bits change. Megatron's products keep a byte an element of their input. In our engine
    each has a copy of its own, in place of a shared one; attention's output stays
    (models/activations)."""
    if layout.program == "megatron":
        return given / a - given, given / a - given
    attention, factors = at.wide * (3 - a) + at.query, 2 if dims.mlp == "swiglu" else 1
    if experts:  # the router, and the sorted tokens, read the input as it is
        return attention, 0.0
    inner = at.num_tokens * dims.d_ff / layout.tp
    return attention, at.wide * (factors - a) + inner * (1 - a)


def _adapters(dims: Dims, layout: Arrangement, at: Tokens, a: int) -> tuple[float, float]:
    """What adapters keep, and what of products (parallel/remat): x A^T; with a magnitude what it
    scales; and, among products, B's."""
    if layout.adapters is None:
        return 0.0, 0.0
    sizes = target_sizes(dims, layout)
    hidden = a * at.num_tokens * layout.adapters.rank * len(sizes)
    rows = a * at.num_tokens * sum(rows for rows, _ in sizes)
    return hidden + (rows if layout.adapters.dora else 0.0), hidden + rows


def _inputs_of_frozen(
    dims: Dims, adapters: Adapters, layout: Arrangement, at: Tokens, a: int, given: float
) -> tuple[float, float]:
    """Inputs of attention and of the MLP that only products of frozen weights read, none of them
    with an adapter: autograd keeps an input for its weight's gradient (parallel/remat)."""
    adapted = {*adapters.targets}
    attention = 0.0 if adapted & {"wq", "wk", "wv"} else given
    mlp = 0.0 if adapted & {"w_gate", "w_up"} else given
    if "w_down" not in adapted:
        mlp += a * at.num_tokens * dims.d_ff / layout.tp
    return attention, mlp


def _selective(
    dims: Dims, layout: Arrangement, at: Tokens, a: int, w: int, whole: Modules, experts: bool
) -> tuple[Modules, float]:
    """What "selective" keeps, and what of it the backward pass does not use."""
    if layout.program == "megatron":
        return _without(dims, layout, at, a, whole, experts), 0.0
    if layout.program == "stepwell":
        written = a * (at.wide + (at.part if layout.tp > 1 else 0))
        heads = a * (2 * at.query + 2 * at.key) + w * at.heads
        mlp, unneeded = _products_of_mlp(dims, layout, at, a, w, written, experts)
        return Modules(a * at.part, heads + written, mlp), unneeded
    if layout.recipe == "nvfp4":  # whose products are no operators that torchtitan's list names
        return Modules(a * at.part, a * at.query + w * at.heads, 0.0), 0.0
    # torchtitan keeps attention and every second product: wq, wv, w1, w2.
    heads = a * (2 * at.query + at.key) + w * at.heads
    if experts:  # products of all experts are not on its list, but the exchanges are
        assert dims.experts
        exchanged = 2 * a * routed_tokens(dims, layout) * dims.d_model if layout.ep > 1 else 0.0
        inner = at.num_tokens * dims.experts.num_shared * dims.experts.d_ff / layout.tp
        shared = a * at.wide if inner else 0.0
        return Modules(a * at.part, heads, exchanged + a * inner + shared), shared
    inner = at.num_tokens * dims.d_ff / layout.tp
    return Modules(a * at.part, heads, a * (inner + at.wide)), a * at.wide


def _products_of_mlp(
    dims: Dims, layout: Arrangement, at: Tokens, a: int, w: int, written: float, experts: bool
) -> tuple[float, float]:
    """What the products of an MLP write, and what of it is only added up. Of experts: for each
    expert that a token goes to, and there what has been exchanged; the router's logits; shared
    experts."""
    factors = 2 if dims.mlp == "swiglu" else 1
    if not experts:
        return factors * a * at.num_tokens * dims.d_ff / layout.tp + written, written
    assert dims.experts
    one, routed = dims.experts, routed_tokens(dims, layout)
    shared = at.num_tokens * one.num_shared * one.d_ff / layout.tp
    unneeded = a * routed * dims.d_model + (written if one.num_shared else 0.0)
    router = w * at.num_tokens / layout.tp * one.num_experts
    exchanged = a * routed * dims.d_model if layout.ep > 1 else 0.0
    inner = factors * a * (routed * one.d_ff + shared)
    return inner + exchanged + router + unneeded, unneeded


def _without(
    dims: Dims, layout: Arrangement, at: Tokens, a: int, whole: Modules, experts: bool
) -> Modules:
    """Of all, less the modules that are computed again."""
    norms, attention, mlp = whole
    modules = layout.recompute_modules or CORE_ATTENTION
    if "core_attn" in modules and not layout.flash:
        attention -= scores(layout, at, a)
    if "mlp" in modules and not experts:
        mlp -= _mlp(dims, layout, at, a)
    if "moe_act" in modules and experts:
        assert dims.experts
        mlp -= a * routed_tokens(dims, layout) * dims.experts.d_ff
    if "layernorm" in modules:
        attention -= a * at.part
        mlp -= a * at.part
    return Modules(norms, attention, mlp)


def logits_of(dims: Dims, layout: Arrangement) -> tuple[float, float]:
    """Bytes of the logits that wait for the backward pass, and the most that the loss holds beside
    them."""
    num, a = layout.tokens_of_rank, compute_bytes(layout)
    vocab = dims.vocab_size / layout.tp
    chunk = min(layout.loss_chunk_tokens or num, num)
    if layout.program == "megatron":
        # float32 logits become their softmax and its gradient in place; before flash attention's
        # time exp had a copy of its own
        return 0.0, chunk * vocab * (a + (4 if layout.flash else 8))
    if layout.program == "fsdp":
        if layout.compiled_loss:
            return 0.0, chunk * vocab * 2 * a  # logits and their gradient
        # log-softmax and the two gradients; on divided logits also a one-hot and its exponential
        return 0.0, chunk * vocab * 4 * (3 if layout.tp == 1 else 4)
    keep = num * vocab * a <= KEEP_LOGITS_BYTES
    logits = 0.0 if keep else a * chunk * vocab * (2 if chunk < num else 1)
    piece = chunk * vocab
    gradient = 0.0 if freezes(layout) else vocab * dims.d_model * a
    work = logits + max((2 if keep else 4) * 4 * piece, gradient)
    return (num * vocab * a if keep else 0.0), work
