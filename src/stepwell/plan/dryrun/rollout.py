"""What a method does before its training step, on ranks that are not there: the policy's weights
are packed to sample from, prompts are read, a token is decoded with keys and values as long as they
get, and every model scores a micro-batch. Sampled ids are unknown, so what depends on them (when an
answer ends, which rows follow) is not seen; every answer is as long as it may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor

from stepwell import generate
from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.models import decode
from stepwell.models.decode import DecodeWeights, KVCache
from stepwell.parallel.adapters import quantised_bytes
from stepwell.parallel.mesh import Mesh
from stepwell.plan.dryrun.dryrun import (
    Beside,
    bytes_of,
    engine_beside,
    parameters_of,
    plain_run,
    state_of,
)
from stepwell.plan.dryrun.fakes import fake_device, fake_ranks
from stepwell.plan.dryrun.watch import Watch, watching
from stepwell.train.engine import Engine

NUM_PROMPTS = 3  # that are read; of further ones no more are held at a time


class Sampled(NamedTuple):
    """What a rank samples: answers to prompts, group_size of each, `slots` at a time."""

    slots: int
    group_size: int
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Rollout:
    """Bytes on one rank. copy: the weights to sample from. cache: keys and values. peaks: the most
    that is held in each moment, all models' state included; "sampling" is there where this rank
    samples."""

    copy: int
    cache: int
    peaks: dict[str, int]


def dry_rollout(
    run: Run,
    world: int,
    work: Sampled | None,
    rows: Callable[[Run, int], Batch],
    beside: Mapping[str, Beside],
    gpus_per_node: int = 8,
) -> Rollout:
    """Of the first rank, without a pipeline. work: None where a server samples. rows, beside: as in
    `dry_run`. Raises as `dry_run`."""
    run = plain_run(run)
    place = fake_ranks(run.layout, world, 0, gpus_per_node, run.offload.parameters)
    with place as mesh, fake_device(), _as_on_a_device():
        others = {n: one._replace(run=plain_run(one.run)) for n, one in beside.items()}
        return _count(run, mesh, work, rows(run, run.train.micro_batch_rows), others)


def _count(
    run: Run, mesh: Mesh, work: Sampled | None, batch: Batch, beside: Mapping[str, Beside]
) -> Rollout:
    policy = Engine(run, mesh=mesh)
    engines = [policy, *(engine_beside(one, mesh) for one in beside.values())]
    watch, cache, peaks = Watch(lambda: ()), 0, {}
    for one in engines:
        watch.hold([*parameters_of(one), *state_of(one)])
    with watching(watch):
        peaks["packing"] = _peak_of(watch, policy.snapshot)
        weights = policy.snapshot().weights
        if work is not None:
            cache, peaks["sampling"] = _sample(policy, work, watch)
        peaks["scoring"] = max(_peak_of(watch, partial(_score, one, batch)) for one in engines)
    four_bits = sum(quantised_bytes(one.pieces)[0] for one in engines)
    copied = [x for layer in (weights, *weights.layers) for x in vars(layer).values()]
    return Rollout(
        copy=bytes_of(x for x in copied if isinstance(x, Tensor)),
        cache=cache,
        peaks={name: peak + four_bits for name, peak in peaks.items()},
    )


def _peak_of(watch: Watch, work: Callable[[], Any]) -> int:
    watch.peaks.clear()
    work()
    return max(watch.peaks.values(), default=watch.live)


def _sample(policy: Engine, work: Sampled, watch: Watch) -> tuple[int, int]:
    """The bytes of keys and values, and the most that is held until the first token of each answer
    is there and a second one decoded, as if it were the last."""
    longest = decode.bucketed(work.prompt_tokens + work.answer_tokens)
    requests = [
        generate.Request(i, (min(i // work.group_size, NUM_PROMPTS - 1),) * work.prompt_tokens)
        for i in range(work.slots)
    ]
    reports = policy.snapshot().stream(
        requests,
        generate.Sampling(max_new_tokens=work.answer_tokens),
        every_tokens=1,
        num_slots=work.slots,
    )
    found: list[KVCache] = []
    with patch.object(generate, "bucketed", lambda length: longest), _noting_caches(found):
        peak = _peak_of(watch, lambda: next(reports))
    return sum(one.kv.untyped_storage().nbytes() for one in found), peak


def _score(engine: Engine, batch: Batch) -> Tensor:
    return engine.logprobs(batch) if engine.run.model.has_lm_head else engine.scores(batch)


@contextmanager
def _as_on_a_device() -> Iterator[None]:
    """Where matrices are not laid out in a CPU's blocks."""
    with patch.object(decode, "_BLOCKED_BF16", False):
        yield


@contextmanager
def _noting_caches(found: list[KVCache]) -> Iterator[None]:
    empty = KVCache.empty

    def noted(weights: DecodeWeights, num_slots: int, length: int) -> KVCache:
        found.append(empty(weights, num_slots, length))
        return found[-1]

    with patch.object(KVCache, "empty", noted):
        yield
