"""What sampling takes, by hand, and against the engine's own sampler."""

from dataclasses import replace

import pytest
import torch

from stepwell.generate import Request, Sampling, generate
from stepwell.hardware import measure_peak_allocated
from stepwell.models.decode import DecodeWeights, KVCache
from stepwell.models.transformer import Decoder
from stepwell.plan.cluster import cluster
from stepwell.plan.job import dims_of
from stepwell.plan.memory.ledger import kv_cache_bytes_per_token
from stepwell.plan.methods.rollouts import (
    Workload,
    fewest_scoring_gpus,
    fewest_server_gpus,
    kv_bytes_per_token,
    own_sampler,
    server,
    weight_bytes,
)
from stepwell.presets import PRESETS
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

H100 = cluster("h100-sxm")
EIGHT, SEVENTY = (dims_of(PRESETS[name], name) for name in ("llama3-8b", "llama3-70b"))
TINY = ModelConfig(
    num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ff=128, vocab_size=512, head_dim=16
)


def test_keys_and_values_by_hand():
    """Llama 3 8B: 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB a token; 70B: 320 KiB."""
    assert kv_bytes_per_token(EIGHT) == 131_072 == kv_cache_bytes_per_token(PRESETS["llama3-8b"])
    assert kv_bytes_per_token(SEVENTY) == 327_680
    work = Workload(prompts=64, group_size=8, prompt_tokens=500, answer_tokens=1000, slots=64)
    found = own_sampler(EIGHT, work, H100, shares=8)
    assert found.slots == 64  # 8 prompts of 8 answers on a GPU
    # slots are of multiples of 32 tokens; beside them is the prompt read last and the one before
    assert found.cache == 131_072 * (64 * 1504 + 2 * 500)
    assert found.weights == 2 * EIGHT.parameters()
    alone = own_sampler(EIGHT, replace(work, group_size=1), H100, shares=8)
    assert alone.slots == 8
    assert alone.cache == 131_072 * (8 * 1504 + 2 * 500)
    few = own_sampler(EIGHT, replace(work, slots=16), H100, shares=8)
    assert few.cache == 131_072 * (16 * 1504 + 2 * 500)
    assert few.decode_s > found.decode_s


def test_the_engines_cache_and_weights_are_these():
    """In float32 here, so twice as much."""
    torch.manual_seed(0)
    weights = DecodeWeights.pack(TINY, Decoder(TINY).state_dict().items(), torch.float32)
    dims = dims_of(TINY, "tiny")
    work = Workload(prompts=2, group_size=4, prompt_tokens=24, answer_tokens=40, slots=8)
    found = own_sampler(dims, work, H100, shares=1)
    cache = KVCache.empty(weights, 8, work.answer_row)
    per_prompt = found.cache - kv_bytes_per_token(dims) * 8 * work.answer_row
    assert 2 * (found.cache - per_prompt) == cache.kv.nbytes
    requests = [Request(i, tuple(range(24)), seed=i) for i in range(8)]
    peak = measure_peak_allocated(
        lambda: generate(weights, requests, Sampling(max_new_tokens=40), num_slots=8)
    )
    wanted = 2 * (found.cache + found.workspace)
    assert peak == pytest.approx(wanted, rel=0.35)


def test_decoding_is_bound_by_memory_then_by_products():
    one = Workload(prompts=8, group_size=1, prompt_tokens=1, answer_tokens=100, slots=1)
    alone = own_sampler(SEVENTY, one, H100, shares=8)
    read = 2 * SEVENTY.parameters() / (3.35e12)
    assert 100 * read < alone.decode_s < 100 * read * 1.6
    together = own_sampler(SEVENTY, replace(one, prompts=8 * 16, slots=16), H100, shares=8)
    assert together.decode_s < 1.2 * alone.decode_s  # sixteen answers for the price of one
    many = own_sampler(SEVENTY, replace(one, prompts=8 * 4096, slots=4096), H100, shares=8)
    products = 4096 * 100 * 2 * SEVENTY.parameters() / 989e12
    assert products < many.decode_s < 2 * products


def test_a_server_divides_the_weights():
    work = Workload(prompts=64, group_size=8, prompt_tokens=512, answer_tokens=1024)
    assert server(SEVENTY, work, H100, 1) is None  # 141 GB do not fit
    two, eight = server(SEVENTY, work, H100, 2), server(SEVENTY, work, H100, 8)
    assert two is not None
    assert eight is not None
    assert two.weights == 4 * eight.weights == weight_bytes(SEVENTY) / 2
    assert two.total < 80e9
    assert two.slots < eight.slots
    assert eight.decode_s < two.decode_s / 2
    assert fewest_server_gpus(SEVENTY, work, H100) == 2
    assert fewest_server_gpus(EIGHT, work, H100) == 1
    assert fewest_scoring_gpus(SEVENTY, H100) == 2
    assert fewest_scoring_gpus(dims_of(PRESETS["llama3-405b"], ""), H100) is None  # 811 of 680 GB


def test_answers_share_their_prompt_on_a_server():
    work = Workload(prompts=64, group_size=1, prompt_tokens=8192, answer_tokens=64)
    alone, shared = (server(EIGHT, replace(work, group_size=n), H100, 1) for n in (1, 64))
    assert alone is not None
    assert shared is not None
    assert shared.slots > 10 * alone.slots


def test_what_a_workload_cannot_be():
    with pytest.raises(ConfigError, match="workload.group_size=0 must be at least 1"):
        Workload(group_size=0)
    assert Workload(group_size=1).answers == 64
    assert Workload(prompts=2, group_size=3, prompt_tokens=5, answer_tokens=7).trained_tokens == 52
