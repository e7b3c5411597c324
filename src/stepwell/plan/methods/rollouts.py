"""What sampling takes in memory and time: a copy of the weights, keys and values, decoding. No
torch.

A token of an answer reads all weights and the keys and values of what came before it, so decoding
is bound by the memory's bandwidth until many answers share the reading; a prompt is read at the
rate of products.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from stepwell.plan.cluster import Cluster
from stepwell.plan.job import Dims
from stepwell.plan.steptime.coefficients import SHIPPED, Coefficients, fastest_matmul
from stepwell.types import ConfigError

BYTES = 2  # of a value that is sampled with
# Logits of a step of decoding: as computed and in float32, their softmax and its sum (generate).
LOGIT_BYTES = 14
# Kernels of a layer and token: norms, products, rotation, attention, cache, residuals.
KERNELS_PER_LAYER = 14
SLOT_MULTIPLE, LENGTH_MULTIPLE = 8, 32  # as the engine allocates (generate, models/decode)
USABLE = 0.9  # of a server's memory


@dataclass(frozen=True)
class Workload:
    """A step's work. rows: of seq_len tokens (pairs of answers in dpo). For methods that sample:
    group_size answers to each of `prompts` prompts, and how often they are gone through; slots:
    answers that a GPU samples at once."""

    seq_len: int = 2048
    rows: int = 64
    prompts: int = 64
    group_size: int = 8
    prompt_tokens: int = 512
    answer_tokens: int = 1024
    updates: int = 1
    slots: int = 64

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"workload.{name}={getattr(self, name)} must be at least 1")

    @property
    def answers(self) -> int:
        return self.prompts * self.group_size

    @property
    def answer_row(self) -> int:
        """Tokens of a prompt with one answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def trained_tokens(self) -> int:
        """Of a step, when the answers to a prompt share it."""
        return self.prompts * (self.prompt_tokens + self.group_size * self.answer_tokens)


def kv_bytes_per_token(dims: Dims) -> int:
    """2 * layers * kv_heads * head_dim values."""
    return 2 * dims.num_layers * dims.kv_width * BYTES


def cache_bytes(dims: Dims, work: Workload, slots: int) -> int:
    """Of the engine's slots, whose number and length it rounds up."""
    rows = ceil(slots / SLOT_MULTIPLE) * SLOT_MULTIPLE
    length = ceil(work.answer_row / LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return kv_bytes_per_token(dims) * rows * length


def weight_bytes(dims: Dims) -> int:
    return BYTES * dims.parameters()


@dataclass(frozen=True)
class Sampling:
    """weights, cache, workspace: bytes on a GPU. num_gpus: that share one copy of the weights.
    slots: answers at once on them. prefill_s, decode_s: of a step's rollout."""

    weights: float
    cache: float
    workspace: float
    num_gpus: int
    slots: int
    prefill_s: float
    decode_s: float

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.workspace

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


def own_sampler(
    dims: Dims, work: Workload, cluster: Cluster, shares: int, c: Coefficients = SHIPPED
) -> Sampling:
    """The engine's: each GPU has a whole copy of the weights, a slot for each answer at once with
    room for the longest, and beside the slots the prompt that was read last and the one before.
    shares: among how many data ranks the prompts are divided, whose other ranks (tensor, context,
    pipeline) sample the same."""
    prompts = ceil(work.prompts / shares)
    answers = prompts * work.group_size
    slots = min(work.slots, answers)
    open_prompts = min(ceil(slots / work.group_size), 2)
    cache = cache_bytes(dims, work, slots) + kv_bytes_per_token(dims) * open_prompts * (
        work.prompt_tokens
    )
    prefill, decode = _seconds(dims, work, cluster, prompts, answers, slots, 1, c)
    return Sampling(
        weights=weight_bytes(dims),
        cache=cache,
        workspace=LOGIT_BYTES * slots * dims.vocab_size,
        num_gpus=1,
        slots=slots,
        prefill_s=prefill,
        decode_s=decode,
    )


def server(
    dims: Dims, work: Workload, cluster: Cluster, num_gpus: int, c: Coefficients = SHIPPED
) -> Sampling | None:
    """GPUs that divide one copy of the weights and sample all answers, in as many slots as there is
    room for; answers to one prompt share its keys and values. None if there is room for none."""
    room = USABLE * num_gpus * cluster.accelerator.memory_bytes - weight_bytes(dims)
    per_token = kv_bytes_per_token(dims)
    shared = work.prompt_tokens / work.group_size
    slots = min(work.answers, int(room // (per_token * (work.answer_tokens + shared))))
    if slots < 1:
        return None
    prefill, decode = _seconds(dims, work, cluster, work.prompts, work.answers, slots, num_gpus, c)
    return Sampling(
        weights=weight_bytes(dims) / num_gpus,
        cache=per_token * slots * (work.answer_tokens + shared) / num_gpus,
        workspace=LOGIT_BYTES * slots * dims.vocab_size / num_gpus,
        num_gpus=num_gpus,
        slots=slots,
        prefill_s=prefill,
        decode_s=decode,
    )


def fewest_server_gpus(dims: Dims, work: Workload, cluster: Cluster, slots: int = 8) -> int | None:
    """The least power of two of GPUs, within the fast links, with room for the weights and a few
    answers."""
    num_gpus = 1
    while num_gpus <= cluster.scaleup_gpus:
        found = server(dims, work, cluster, num_gpus)
        if found is not None and found.slots >= min(slots, work.answers):
            return num_gpus
        num_gpus *= 2
    return None


def fewest_scoring_gpus(dims: Dims, cluster: Cluster) -> int | None:
    """Likewise for a model that only scores."""
    num_gpus = 1
    while num_gpus <= cluster.scaleup_gpus:
        if weight_bytes(dims) <= USABLE * num_gpus * cluster.accelerator.memory_bytes:
            return num_gpus
        num_gpus *= 2
    return None


def _seconds(
    dims: Dims,
    work: Workload,
    cluster: Cluster,
    prompts: int,
    answers: int,
    slots: int,
    num_gpus: int,
    c: Coefficients,
) -> tuple[float, float]:
    """Of reading the prompts, of decoding. All answers are as long as they can be. Each token
    waits for the slowest of memory, products and the host's kernels, and with several GPUs for two
    sums a layer."""
    device = cluster.accelerator
    products = fastest_matmul(device, 16) * c.matmul_16 * num_gpus
    bandwidth = device.bandwidth_bytes_per_s * c.memory * num_gpus
    flops = 2 * (dims.parameters(active=True) - dims.embedding_parameters * (not dims.tied))
    context = work.prompt_tokens + work.answer_tokens / 2
    kernels = KERNELS_PER_LAYER * dims.num_layers * c.launch_s
    sums = 2 * dims.num_layers * c.hop_s / 10 if num_gpus > 1 else 0.0

    def token_s(at_once: int) -> float:
        read = weight_bytes(dims) + at_once * context * kv_bytes_per_token(dims)
        return max(read / bandwidth, at_once * flops / products, kernels) + sums

    full, rest = divmod(answers, slots)
    decode = full * token_s(slots) + (token_s(rest) if rest else 0.0)
    prefill = prompts * max(work.prompt_tokens * flops / products, kernels)
    return prefill, decode * work.answer_tokens
