"""What layouts cost, each asked for once; and what no layout of a family beats. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from stepwell.config import Run
from stepwell.parallel.rules import check_run
from stepwell.parallel.schedules import ZERO_BUBBLE, bubble_fraction
from stepwell.plan.cluster import Cluster
from stepwell.plan.footprint.footprint import Footprint, fits, footprint, headroom
from stepwell.plan.job import Arrangement, Dims, Job
from stepwell.plan.memory.ledger import predict_memory, predict_rank
from stepwell.plan.search.candidates import Candidate
from stepwell.plan.search.runs import run_of
from stepwell.plan.search.space import Family, Task, body
from stepwell.plan.steptime.coefficients import SHIPPED, Coefficients
from stepwell.plan.steptime.step import StepTime, predict_step
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

# Parts of a step that depend on how the data ranks divide the model, or grow with such ones.
OF_DATA_RANKS = (
    *("exposed data", "exposed offload", "contention", "optimizer", "straggling"),
    "gradient accumulation",
)
# Parts that each micro-batch brings, whatever the pipeline.
OF_MICRO_BATCHES = (
    *("products", "attention", "memory", "quantisation", "recomputation", "exposed tp"),
    "exposed ep",
)


class Prices:
    """Time and memory of layouts of one model on one cluster, each asked for once. config: the
    engine's model, if it has it. rates: what the machines give."""

    def __init__(
        self,
        dims: Dims,
        cluster: Cluster,
        config: ModelConfig | None = None,
        rates: Coefficients = SHIPPED,
    ):
        self.dims, self.cluster, self.config, self.rates = dims, cluster, config, rates
        self.as_run = lru_cache(maxsize=None)(self._as_run)
        self.time = lru_cache(maxsize=None)(self._time)
        self.bound = lru_cache(maxsize=None)(self._bound)
        self.memory = lru_cache(maxsize=None)(self._memory)
        self._micro_batches: dict[tuple[object, ...], dict[tuple[object, ...], float]] = {}

    def job(self, layout: Arrangement) -> Job:
        return Job(self.dims, layout, self.cluster)

    def _time(self, layout: Arrangement) -> StepTime:
        return predict_step(self.job(layout), self.rates)

    def _bound(self, layout: Arrangement) -> float:
        """Seconds that no way to divide the model among the data ranks takes less than, nor any
        that moves something to the host: so one is asked for all kinds of offload."""
        resident = layout.having(
            offload_optimizer=False, offload_parameters=False, offload_activations=False
        )
        parts = self.time(resident).parts
        return sum(seconds for name, seconds in parts.items() if name not in OF_DATA_RANKS)

    def loose_bounds(self, task: Task, alike: Sequence[Family]) -> list[float]:
        """Seconds that no layout of each family takes less than: its micro-batches, of which a
        pipeline divides the blocks, and most of the bubble. alike: families that differ in
        recomputation and precision only."""
        mesh, schedule, v, micro = alike[0][:4]
        num = -(-task.rows // mesh.dp)
        num = -(-num // micro)
        scale = 0.97 / mesh.pp * num * (1 + 0.7 * bubble_fraction(schedule, mesh.pp, num, v))
        compiled = task.pins.compiled and schedule not in ZERO_BUBBLE
        sizes = (task.seq_len, mesh.dp * mesh.pp, mesh.tp, mesh.cp, mesh.ep, compiled, micro)
        known = self._micro_batches.setdefault(sizes, {})
        for family in alike:
            if family[4:] not in known:
                known[family[4:]] = self._micro_batch(task, family)
        return [scale * known[family[4:]] for family in alike]

    def _micro_batch(self, task: Task, family: Family) -> float:
        """Seconds of computing one on all blocks and the head, with what it waits for within."""
        ranks = family.mesh.dp * family.mesh.pp
        alone = body(task, family).having(
            pp=1,
            schedule="1f1b",
            stages_per_rank=1,
            dp_shard=ranks,
            global_batch_rows=ranks * family.micro_batch_rows,
        )
        parts = predict_step(self.job(alone), self.rates).parts
        return sum(parts.get(name, 0.0) for name in OF_MICRO_BATCHES)

    def _memory(self, layout: Arrangement) -> Footprint:
        return footprint(self.job(layout))

    def fits(self, layout: Arrangement, headroom_bytes: float = 0) -> bool:
        """With as much to spare; -inf asks for nothing."""
        if headroom_bytes == -math.inf:
            return True
        held = self.memory(layout)
        return fits(held, self.cluster) and headroom(held, self.cluster) >= headroom_bytes

    def on(self, cluster: Cluster) -> Prices:
        """Of the same model on machines of the same sizes, with other rates or more memory; what
        does not depend on that is shared."""
        other, now = Prices(self.dims, cluster, self.config, self.rates), self.cluster
        other.memory = self.memory
        memory_bytes = now.accelerator.memory_bytes
        same = replace(cluster.accelerator, memory_bytes=memory_bytes)
        if replace(cluster, accelerator=same) == now:
            other.time, other.bound = self.time, self.bound
            other._micro_batches = self._micro_batches
        return other

    def _as_run(self, layout: Arrangement) -> Candidate | str:
        """With the engine's exact ledger; in words, what the engine's rules have against it."""
        found = self.candidate(layout)
        if self.config is None:
            return found
        try:
            run = checked_run(self.config, layout)
        except ConfigError as refusal:
            return str(refusal)
        rank = predict_rank(run, layout.num_gpus, found.memory.pp_rank, device="cuda")
        worst = replace(found, exact=rank)
        return worst if worst.headroom_bytes < 0 else _with_ledgers(found, run)

    def candidate(self, layout: Arrangement) -> Candidate:
        return Candidate(self.job(layout), self.memory(layout), self.time(layout))


def budget_gain_s(prices: Prices, candidate: Candidate) -> float:
    """Seconds that no choice of blocks to compute again (remat.budget_bytes) saves more than:
    whole levels, of which the accelerator's room pays a share, each at the best rate."""
    layout, gains, rates = candidate.layout, [0.0], [0.0]
    for level in ("selective", "none"):
        lighter = layout.having(recompute=level)
        gain = candidate.step_s - prices.time(lighter).total_s
        more_bytes = prices.memory(lighter).total - prices.memory(layout).total
        rates.append(gain / max(1.0, more_bytes))
        gains.append(gain)
    return min(max(gains), max(0.0, candidate.room_bytes) * max(rates))


def as_run(candidate: Candidate, config: ModelConfig) -> Candidate:
    """The candidate with the engine's exact ledgers. Raises ConfigError with what the engine's
    rules have against it."""
    return _with_ledgers(candidate, checked_run(config, candidate.layout))


def checked_run(config: ModelConfig, layout: Arrangement) -> Run:
    """Raises ConfigError."""
    run = run_of(config, layout)
    check_run(run, layout.num_gpus)
    return run


def _with_ledgers(candidate: Candidate, run: Run) -> Candidate:
    world = candidate.layout.num_gpus
    return candidate.with_ledger(predict_memory(run, world, device="cuda"))
