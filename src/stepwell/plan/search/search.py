"""The fastest layouts of a model on so many accelerators. No torch.

A family is a mesh with a schedule, a micro-batch and recomputation. Families are opened in the
order of bounds that no layout of theirs can beat: first what a micro-batch takes without a
pipeline, with most of the bubble; then the predicted step without what its data ranks send. Once
the bounds exceed `slack` times the best step found, none of the rest can come that close. Within a
family every way to divide the model among the data ranks is tried.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from stepwell.parallel.rules import check_run
from stepwell.parallel.schedules import bubble_fraction
from stepwell.plan.cluster import Cluster
from stepwell.plan.footprint.footprint import Footprint, fits, footprint, headroom
from stepwell.plan.footprint.pieces import ranks_to_try
from stepwell.plan.job import Arrangement, Dims, Job
from stepwell.plan.memory.ledger import MemoryLedger, predict_memory, predict_rank
from stepwell.plan.search.checks import check_task, pins_text
from stepwell.plan.search.runs import run_of, short
from stepwell.plan.search.space import (
    REASONS,
    Pins,
    Refused,
    Task,
    body,
    data_layouts,
    meshes,
    micro_batch_problem,
    micro_batches,
    recomputations,
    schedules,
)
from stepwell.plan.steptime.coefficients import SHIPPED, Coefficients
from stepwell.plan.steptime.step import StepTime, predict_step
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

SLACK = 1.1
HOST_BYTES_A_GPU = 256 * 2**30  # of a machine that does not say: 2 TiB beside 8, as is usual
NUM_CHECKED = 24  # of the best, put before the engine's rules and its exact ledger
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
OFFLOADS = (("optimizer",), ("optimizer", "activations"), ("parameters", "activations"))


@dataclass(frozen=True)
class Candidate:
    """exact: the ledger of our engine, where it was asked. not_in_engine: why it cannot be run, if
    so."""

    job: Job
    memory: Footprint
    step: StepTime
    exact: MemoryLedger | None = None
    not_in_engine: str = ""

    @property
    def layout(self) -> Arrangement:
        return self.job.layout

    @property
    def step_s(self) -> float:
        return self.step.total_s

    @property
    def peak_bytes(self) -> float:
        """What a GPU must have, with the driver's and the communicators' share."""
        if self.exact is None:
            return self.memory.total
        return self.memory.total + self.exact.peak_bytes - self.memory.allocated

    @property
    def headroom_bytes(self) -> float:
        return self.job.cluster.accelerator.memory_bytes - self.peak_bytes

    @property
    def tokens_per_s(self) -> float:
        """Of all accelerators together."""
        return self.layout.global_batch_tokens / self.step_s


@dataclass(frozen=True)
class Ranking:
    """found: layouts that fit, the fastest first; all within `SLACK` of the best are there.
    refused_meshes, refused: how many meshes, and layouts of the others, by rule (`space.REASONS`).
    closest: where nothing fits, what needs the least memory. offload: what had to be offloaded for
    anything to fit."""

    task: Task
    found: tuple[Candidate, ...]
    refused_meshes: Refused
    refused: Refused
    num_meshes: int
    num_layouts: int
    num_timed: int
    seconds: float
    closest: Candidate | None = None
    offload: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate:
        """Raises ConfigError where nothing fits, with what the closest layout lacks."""
        if self.found:
            return self.found[0]
        raise ConfigError(nothing_fits(self))


def nothing_fits(ranking: Ranking) -> str:
    task, closest = ranking.task, ranking.closest
    gpus, name = task.num_gpus, task.cluster.name
    what = f"no layout of {task.dims.name} on {gpus:,} x {name} "
    pins = task.pins
    held = f" with {pins_text(pins)}" if pins.given() else ""
    if closest is None:
        return f"{what}obeys the rules{held}: {rules_text(ranking)}"
    has, needs = task.cluster.accelerator.memory_bytes, closest.memory.total
    said = f"the leanest, {short(closest.layout)}, needs {needs / 2**30:.1f} GiB"
    said += f" of {has / 2**30:.1f} on each{held}"
    if needs + pins.headroom_bytes > has >= needs:
        said += f", and {pins.headroom_bytes / 2**30:g} must stay free"
    if pins.offload is None:
        said += ", and does not fit with offload to the host either"
    freed = ", or free what is held fixed" if held else ""
    return f"{what}fits: {said}; give more accelerators{freed}"


def rules_text(ranking: Ranking) -> str:
    """What stands against each layout, the most frequent first."""
    meshes = [f"{REASONS[k]} ({n:,} meshes)" for k, n in ranking.refused_meshes.most_common()]
    layouts = [f"{REASONS[k]} ({n:,} layouts)" for k, n in ranking.refused.most_common()]
    found = meshes + layouts + list(ranking.complaints[:2])
    return "; ".join(found) or "what is held fixed leaves nothing to look at; free some of it"


def fewest_gpus(task: Task, times: int = 64) -> int | None:
    """The number of accelerators on which something fits: doubled as often as needed, then the
    least of up to 16 numbers of whole machines between. None if not even `times` as many are
    enough."""
    prices, number = Prices(task.dims, task.cluster), task.num_gpus
    while number < times * task.num_gpus:
        number *= 2
        if _something_fits(replace(task, num_gpus=number), prices):
            between = (replace(task, num_gpus=n) for n in _between(task.cluster, number))
            return next((t.num_gpus for t in between if _something_fits(t, prices)), number)
    return None


def _between(cluster: Cluster, number: int, most: int = 16) -> range:
    """Of half of `number` to itself, whole machines where that is more than one."""
    low, machine = number // 2, cluster.gpus_per_node
    step = machine if low >= machine else 1
    while (number - low) // step > most:
        step *= 2
    return range(low - low % step + step, number, step)


def _something_fits(task: Task, prices: Prices) -> bool:
    try:
        check_task(task)
    except ConfigError:
        return False
    opened = _Open(task, prices)
    return any(opened.fits(layout) for layout in _leanest(task))


def _leanest(task: Task) -> Iterator[Arrangement]:
    """Of each mesh what holds the least, within what is held fixed."""
    pins, rows = task.pins, task.pins.micro_batch_rows or 1
    free = (pins.schedule, pins.stages_per_rank) == (None, None)
    sharded = (pins.zero, pins.reshard, pins.dp_shard, pins.dp_replicate) == (None,) * 4
    for mesh in meshes(task, Counter()):
        for schedule, v in [("1f1b", 1)] if free else schedules(task, mesh, Counter()):
            levels = recomputations(task, schedule)[:1]
            if not levels or micro_batch_problem(task, mesh, rows, schedule, v):
                continue
            family = body(task, mesh, schedule, v, rows, *levels[0])
            yield from [leanest(family)] if sharded else data_layouts(task, family, Counter())


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
        self.micro_batch = lru_cache(maxsize=None)(self._micro_batch)
        self.as_run = lru_cache(maxsize=None)(self._as_run)
        self.time = lru_cache(maxsize=None)(self._time)
        self.bound = lru_cache(maxsize=None)(self._bound)
        self.loose_bound = lru_cache(maxsize=None)(self._loose_bound)
        self.memory = lru_cache(maxsize=None)(self._memory)

    def job(self, layout: Arrangement) -> Job:
        return Job(self.dims, layout, self.cluster)

    def _time(self, layout: Arrangement) -> StepTime:
        return predict_step(self.job(layout), self.rates)

    def _bound(self, layout: Arrangement) -> float:
        """Seconds that no way to divide the model among the data ranks takes less than."""
        parts = self.time(layout).parts
        return sum(seconds for name, seconds in parts.items() if name not in OF_DATA_RANKS)

    def _loose_bound(self, family: Arrangement) -> float:
        return loose_bound(self, family)

    def _micro_batch(self, layout: Arrangement) -> float:
        """Seconds of computing one on all blocks and the head, with what it waits for within."""
        parts = predict_step(self.job(layout), self.rates).parts
        return sum(parts.get(name, 0.0) for name in OF_MICRO_BATCHES)

    def _memory(self, layout: Arrangement) -> Footprint:
        return footprint(self.job(layout))

    def fits(self, layout: Arrangement, headroom_bytes: float = 0) -> bool:
        """With as much to spare; -inf asks for nothing."""
        if headroom_bytes == -math.inf:
            return True
        held = self.memory(layout)
        if not fits(held, self.cluster) or headroom(held, self.cluster) < headroom_bytes:
            return False
        room = self.cluster.host_memory_bytes or HOST_BYTES_A_GPU * self.cluster.gpus_per_node
        return sum(held.host.values()) * self.cluster.gpus_per_node <= room

    def on(self, cluster: Cluster) -> Prices:
        """Of the same model on machines of the same sizes, with other rates or more memory; what
        does not depend on that is shared."""
        other, now = Prices(self.dims, cluster, self.config, self.rates), self.cluster
        other.memory = self.memory
        memory_bytes = now.accelerator.memory_bytes
        same = replace(cluster.accelerator, memory_bytes=memory_bytes)
        if replace(cluster, accelerator=same) == now:
            other.time, other.bound, other.micro_batch = self.time, self.bound, self.micro_batch
            other.loose_bound = self.loose_bound
        return other

    def _as_run(self, layout: Arrangement) -> Candidate | str:
        """With the engine's exact ledger; in words, what the engine's rules have against it."""
        found = self.candidate(layout)
        if self.config is None:
            return found
        try:
            some = as_run(found, self.config, every_rank=False)
            return some if some.headroom_bytes < 0 else as_run(found, self.config)
        except ConfigError as refusal:
            return str(refusal)

    def candidate(self, layout: Arrangement) -> Candidate:
        return Candidate(self.job(layout), self.memory(layout), self.time(layout))


@dataclass
class _Open:
    """A search under way."""

    task: Task
    prices: Prices
    refused_meshes: Refused = field(default_factory=Counter)
    refused: Refused = field(default_factory=Counter)
    num_meshes: int = 0
    num_layouts: int = 0
    num_timed: int = 0
    leanest: Arrangement | None = None
    least_bytes: float = math.inf
    found: dict[Arrangement, float] = field(default_factory=dict)
    best_s: float = math.inf
    counts: dict[tuple[int, ...], int] = field(default_factory=dict)
    crowded: dict[tuple[int, ...], tuple[float, int]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def count(self, family: Arrangement) -> int:
        """Its data parallel layouts."""
        several = family.num_micro_batches > 1
        key = (family.dp_shard, family.cp, family.tp, family.pp > 1, several)
        if key not in self.counts:
            self.counts[key] = sum(1 for _ in data_layouts(self.task, family, Counter()))
        return self.counts[key]

    def is_crowded(self, family: Arrangement) -> bool:
        """Whether the mesh cannot hold so many rows at a time in any way. What 1f1b cannot hold
        with the most recomputation, no other schedule and no less recomputation can."""
        micro = family.micro_batch_rows
        key = (family.tp, family.cp, family.pp, family.ep)
        crowded_at, fits_at = self.crowded.get(key, (math.inf, 0))
        if fits_at < micro < crowded_at:
            mode, every = recomputations(self.task)[0]
            least = replace(
                family, schedule="1f1b", stages_per_rank=1, recompute=mode, recompute_every=every
            )
            if self.fits(leanest(least)):
                fits_at = micro
            else:
                crowded_at = micro
            self.crowded[key] = crowded_at, fits_at
        return micro >= crowded_at

    def runs(self, layout: Arrangement) -> bool:
        """Whether the engine has nothing against it, and room by its exact ledger."""
        found = self.prices.as_run(layout)
        if isinstance(found, str):
            self.refused["engine"] += 1
            self.complaints.append(found)
            return False
        if found.headroom_bytes < self.task.pins.headroom_bytes:
            self.refused["exact memory"] += 1
            return False
        return True

    def fits(self, layout: Arrangement) -> bool:
        held = self.prices.memory(layout).total
        if held < self.least_bytes:
            self.least_bytes, self.leanest = held, layout
        return self.prices.fits(layout, self.task.pins.headroom_bytes)


def search(
    dims: Dims,
    cluster: Cluster,
    num_gpus: int,
    seq_len: int,
    global_batch_tokens: int,
    pins: Pins | None = None,
    config: ModelConfig | None = None,
    slack: float = SLACK,
    prices: Prices | None = None,
    at_most_s: float = math.inf,
    may_offload: bool = True,
) -> Ranking:
    """Layouts by predicted step time. global_batch_tokens: rounded to whole rows of seq_len.
    config: the engine's model, whose rules then have the last word. prices: of an earlier search
    for the same model and cluster. at_most_s: slower layouts are of no interest. may_offload: if
    nothing fits without.

    Raises ConfigError for pins and sizes that no layout can have; where nothing fits, `found` is
    empty.
    """
    rows = round(global_batch_tokens / seq_len)
    if rows < 1:
        raise ConfigError(
            f"--global-batch-tokens {global_batch_tokens:,} has no row of {seq_len:,} tokens; the "
            f"nearest is --global-batch-tokens {seq_len}"
        )
    task = Task(dims, cluster, num_gpus, seq_len, rows, pins or Pins())
    check_task(task)
    begin, prices = time.perf_counter(), prices or Prices(dims, cluster, config)
    opened = _search(task, prices, slack, at_most_s)
    offload: tuple[str, ...] = ()
    nothing = not opened.found and opened.leanest is not None
    if nothing and may_offload and task.pins.offload is None and at_most_s == math.inf:
        for offload in OFFLOADS:
            lighter = replace(task, pins=replace(task.pins, offload=offload))
            again = _search(lighter, prices, slack)
            if again.found:
                opened = again
                break
        else:
            offload = ()
    found = _checked(opened, slack)
    closest = None
    if not found and opened.leanest is not None:
        closest = prices.candidate(opened.leanest)
    return Ranking(
        task=task,
        found=found,
        refused_meshes=opened.refused_meshes,
        refused=opened.refused,
        num_meshes=opened.num_meshes,
        num_layouts=opened.num_layouts,
        num_timed=opened.num_timed,
        seconds=time.perf_counter() - begin,
        closest=closest,
        offload=offload,
        complaints=tuple(dict.fromkeys(opened.complaints)),
    )


def _search(task: Task, prices: Prices, slack: float, at_most_s: float = math.inf) -> _Open:
    """Best first: a family's loose bound, then its tight one, then its layouts."""
    opened = _Open(task, prices)
    order = itertools.count()
    heap = [(prices.loose_bound(family), next(order), False, family) for family in families(opened)]
    heapq.heapify(heap)
    while heap:
        bound, _, tight, family = heapq.heappop(heap)
        if bound > min(slack * opened.best_s, at_most_s):
            opened.refused["too slow"] += opened.count(family)
        elif tight:
            _open(opened, family)
        elif opened.is_crowded(family) or not opened.fits(leanest(family)):
            opened.refused["memory"] += opened.count(family)
        else:
            heapq.heappush(heap, (prices.bound(family), next(order), True, family))
    return opened


def families(opened: _Open) -> Iterator[Arrangement]:
    """Those that the rules allow; the others are counted."""
    task, refused = opened.task, opened.refused
    for mesh in meshes(task, opened.refused_meshes):
        opened.num_meshes += 1
        for schedule, v in schedules(task, mesh, refused):
            for micro in micro_batches(task, mesh):
                wrong = micro_batch_problem(task, mesh, micro, schedule, v)
                levels = recomputations(task, schedule)
                for mode, every in levels[: 1 if wrong else None]:
                    family = body(task, mesh, schedule, v, micro, mode, every)
                    number = opened.count(family) * (len(levels) if wrong else 1)
                    opened.num_layouts += number
                    if wrong:
                        refused[wrong] += number
                    else:
                        yield family


def leanest(body: Arrangement) -> Arrangement:
    """The data parallelism that holds the least: everything sharded over all data ranks."""
    if body.dp_shard * body.cp == 1:
        return replace(body, zero=0)
    if body.pp > 1:
        return replace(body, zero=3)
    return replace(body, zero=3, reshard="always", reduce_every_micro_batch=True)


def loose_bound(prices: Prices, family: Arrangement) -> float:
    """Seconds that no layout of the family takes less than: its micro-batches, of which a pipeline
    divides the blocks, and most of the bubble."""
    ranks = family.num_gpus // (family.tp * family.cp)
    alone = replace(
        family,
        pp=1,
        schedule="1f1b",
        stages_per_rank=1,
        dp_shard=ranks,
        global_batch_rows=ranks * family.micro_batch_rows,
    )
    micro_batch_s = prices.micro_batch(alone) / family.pp
    idle = bubble_fraction(
        family.schedule, family.pp, family.num_micro_batches, family.stages_per_rank
    )
    return 0.97 * micro_batch_s * family.num_micro_batches * (1 + 0.7 * idle)


def _open(opened: _Open, family: Arrangement) -> None:
    task, prices = opened.task, opened.prices
    spare = task.pins.headroom_bytes
    for layout in data_layouts(task, family, opened.refused):
        if not prices.fits(layout, spare):
            opened.refused["memory"] += 1
        elif any(prices.fits(less, spare) for less in with_less_recomputation(task, layout)):
            opened.refused["more recomputation"] += 1
        else:
            seconds = prices.time(layout).total_s
            opened.num_timed += 1
            if seconds >= opened.best_s or opened.runs(layout):
                opened.found[layout] = seconds
                opened.best_s = min(opened.best_s, seconds)


def with_less_recomputation(task: Task, layout: Arrangement) -> list[Arrangement]:
    """The next lighter one is enough: what is lighter still holds more."""
    levels = recomputations(task, layout.schedule)
    place = levels.index((layout.recompute, layout.recompute_every))
    return [
        replace(layout, recompute=mode, recompute_every=every)
        for mode, every in levels[place + 1 : place + 2]
    ]


# --- the best of them ------------------------------------------------------------------------


def _checked(opened: _Open, slack: float) -> tuple[Candidate, ...]:
    """Ranked; the first ones as the engine sees them."""
    limit = slack * opened.best_s
    ranked = sorted(
        (layout for layout, seconds in opened.found.items() if seconds <= limit),
        key=lambda layout: (round(opened.found[layout], 6), complexity(layout)),
    )
    found: list[Candidate] = []
    missing = "" if opened.prices.config else "the engine has no such model yet"
    for layout in ranked:
        candidate = opened.prices.candidate(layout)
        if len(found) < NUM_CHECKED:
            if not opened.runs(layout):
                continue
            exact = opened.prices.as_run(layout)
            assert not isinstance(exact, str)
            candidate = exact
        found.append(replace(candidate, not_in_engine=missing))
    return tuple(found)


def as_run(candidate: Candidate, config: ModelConfig, every_rank: bool = True) -> Candidate:
    """The candidate with the engine's exact ledger, of every rank of the pipeline or of those that
    may need the most. Raises ConfigError with what the engine's rules have against it."""
    run, world = run_of(config, candidate.layout), candidate.layout.num_gpus
    check_run(run, world)
    if every_rank:
        return replace(candidate, exact=predict_memory(run, world))
    ranks = {candidate.memory.pp_rank, *ranks_to_try(candidate.job.dims, candidate.layout)}
    ledgers = [predict_rank(run, world, rank) for rank in sorted(ranks)]
    return replace(candidate, exact=max(ledgers, key=lambda ledger: ledger.peak_bytes))


def complexity(layout: Arrangement) -> tuple[int, ...]:
    """Between layouts of equal speed: fewer axes, smaller ones, the lower stage."""
    axes = (layout.tp, layout.cp, layout.pp, layout.ep, layout.dp_replicate)
    return (sum(size > 1 for size in axes), layout.stages_per_rank, *axes, layout.zero)


def pareto(candidates: Sequence[Candidate], step_bytes: float = 2**30) -> list[Candidate]:
    """Those that none beats in both speed and memory left, the fastest first; `step_bytes`: how
    much more must be left to be worth a line."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: c.step_s):
        if not front or candidate.headroom_bytes >= front[-1].headroom_bytes + step_bytes:
            front.append(candidate)
    return front


def batches(ranking: Ranking, prices: Prices, factors: Iterable[float] = (0.5, 2)) -> list[Ranking]:
    """The same search with other batches, only for the best of each."""
    task, found = ranking.task, []
    for factor in factors:
        rows = round(task.rows * factor)
        if rows < 1:
            continue
        tokens, gpus = rows * task.seq_len, task.num_gpus
        pins = task.pins
        found.append(
            search(
                task.dims, task.cluster, gpus, task.seq_len, tokens, pins, slack=1, prices=prices
            )
        )
    return found
