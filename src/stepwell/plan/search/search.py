"""The fastest layouts of a model on so many accelerators. No torch.

A family is a mesh with a schedule, a micro-batch, recomputation and a precision. Families are taken
up in the order of bounds that no layout of theirs can beat: first what a micro-batch takes without
a pipeline, with most of the bubble; then the predicted step without what its data ranks send; then
its layouts, every way to divide the model among the data ranks that fits, by their predicted step.
So the first layout that the engine would run is the fastest, and once the bounds exceed `slack`
times its step, none of the rest can come that close.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from stepwell.plan.cluster import Cluster
from stepwell.plan.job import Arrangement, Dims
from stepwell.plan.search.candidates import Candidate, Ranking, complexity, mesh_of
from stepwell.plan.search.checks import check_task
from stepwell.plan.search.fewest import leanest_of
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.space import (
    OFFLOADS,
    Family,
    Level,
    Pins,
    Refused,
    Task,
    body,
    data_layouts,
    leanest,
    lighter,
    meshes,
    micro_batch_problem,
    micro_batches,
    no_less,
    no_more,
    precisions,
    recomputations,
    schedules,
    with_offload,
)
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

SLACK = 1.1
SAME = 5e-4  # of a step: less is no difference, and the simpler layout is taken
NUM_CHECKED = 24  # of the best, put before the engine's rules and its exact ledger in any case
OFFLOAD_GAIN = 1.001  # times as fast as with less offload, or it is not taken


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
    for the same model and cluster. at_most_s: slower layouts are of no interest. may_offload: where
    nothing fits without, the fastest of all kinds.

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
    slack = max(slack, 1 + SAME)
    opened = _search(task, prices, slack, at_most_s)
    if may_offload and task.pins.recompute is None:
        opened = _with_groups(task, prices, slack, opened)
    resident, offload = opened, ()
    forced = (
        may_offload and task.pins.offload is None and not opened.found and at_most_s == math.inf
    )
    if forced or task.pins.offload == "any":
        limit_s = min(opened.best_s / OFFLOAD_GAIN, at_most_s)
        offload = _worthwhile_offload(task, prices, limit_s)
    if offload:
        opened = _search(with_offload(task, offload), prices, slack)
    found = _checked(opened, slack)
    closest = None if found else _closest(task, prices, may_offload)
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
        resident_s=resident.best_s,
        complaints=tuple(dict.fromkeys(opened.complaints)),
    )


def _with_groups(task: Task, prices: Prices, slack: float, opened: _Open) -> _Open:
    """The search over groups of blocks that are computed again together, if one of them is the
    fastest. On the same layout they take longer than "full", so only where that does not fit."""
    grouped = replace(task, pins=replace(task.pins, recompute="sqrt"))
    found = _search(grouped, prices, slack, opened.best_s * (1 - SAME))
    return found if found.found else opened


def _worthwhile_offload(task: Task, prices: Prices, at_most_s: float) -> tuple[str, ...]:
    """The kinds with which the step is the shortest, each asked for only so far as it would be much
    faster than those before; none that takes longer than at_most_s. None beats memory without
    end."""
    chosen: tuple[str, ...] = ()
    endless = replace(task, pins=replace(task.pins, headroom_bytes=-math.inf))
    least_s = _search(endless, prices, 1.0).best_s
    for kinds in OFFLOADS:
        if at_most_s < least_s < math.inf:
            break
        found = _search(with_offload(task, kinds), prices, 1.0, at_most_s)
        if found.found:
            at_most_s, chosen = found.best_s / OFFLOAD_GAIN, kinds
    return chosen


def _closest(task: Task, prices: Prices, may_offload: bool) -> Candidate | None:
    """What lacks the least, with or without offload; of what an accelerator has room for, what
    takes the least of the machine's memory."""
    tasks = [task]
    if (may_offload and task.pins.offload is None) or task.pins.offload == "any":
        tasks += [with_offload(task, kinds) for kinds in OFFLOADS]
    leanest = [lean for one in tasks if (lean := leanest_of(one, prices))]
    exact = [(prices.as_run(lean), lean) for lean in leanest]
    found = [prices.candidate(lean) if isinstance(c, str) else c for c, lean in exact]
    with_room = [c for c in found if c.room_bytes >= task.pins.headroom_bytes]
    least = min(found, key=lambda c: c.peak_bytes, default=None)
    return min(with_room, key=lambda c: c.memory.host.total, default=least)


# By recomputation: the rows at a time from which a family is too large, and up to which it fits.
Borders = dict[Level, tuple[float, int]]


def _of(borders: Borders, levels: Iterable[Level]) -> Iterator[tuple[float, int]]:
    return (borders[level] for level in levels if level in borders)


@dataclass
class _Open:
    """A search under way. found: layouts that fit, by their seconds, the fastest first. heavier: by
    layout those that were left out since this one, with less recomputation, seemed to fit."""

    task: Task
    prices: Prices
    refused_meshes: Refused = field(default_factory=Counter)
    refused: Refused = field(default_factory=Counter)
    num_meshes: int = 0
    num_layouts: int = 0
    num_timed: int = 0
    found: dict[Arrangement, float] = field(default_factory=dict)
    best_s: float = math.inf
    counts: dict[tuple[object, ...], int] = field(default_factory=dict)
    borders: dict[tuple[object, ...], Borders] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    heavier: dict[Arrangement, list[Arrangement]] = field(default_factory=dict)
    failed: set[Arrangement] = field(default_factory=set)

    def count(self, family: Family) -> int:
        """Its data parallel layouts."""
        mesh = family.mesh
        several = -(-self.task.rows // mesh.dp) > family.micro_batch_rows
        key = (mesh.dp, mesh.cp, mesh.tp, mesh.pp > 1, several)
        if key not in self.counts:
            layouts = data_layouts(self.task, body(self.task, family), Counter())
            self.counts[key] = sum(1 for _ in layouts)
        return self.counts[key]

    def is_too_large(self, family: Family) -> bool:
        """Whether no layout of the family fits. More rows at a time, or less recomputation, hold
        more, so most families are judged by others; and what 1f1b cannot hold with the most
        recomputation, no other schedule can."""
        return self._is_crowded(family, "1f1b", 1, least=True) or self._is_crowded(
            family, family.schedule, family.stages_per_rank
        )

    def _is_crowded(self, family: Family, schedule: str, v: int, least: bool = False) -> bool:
        mesh, micro = family.mesh, family.micro_batch_rows
        level = (family.recompute, family.recompute_every)
        level = recomputations(self.task)[0] if least else level
        single = micro * mesh.dp >= self.task.rows  # without gradients that add up
        key = (mesh, schedule, v, family.precision, single)
        borders = self.borders.setdefault(key, {})
        if any(micro >= at for at, _ in _of(borders, no_more(level))):
            return True
        if any(micro <= at for _, at in _of(borders, no_less(level))):
            return False
        crowded_at, fits_at = borders.get(level, (math.inf, 0))
        alike = family._replace(
            schedule=schedule, stages_per_rank=v, recompute=level[0], recompute_every=level[1]
        )
        spare = self.task.pins.headroom_bytes
        fits = self.prices.fits(leanest(body(self.task, alike)), spare)
        borders[level] = (crowded_at, micro) if fits else (micro, fits_at)
        return not fits

    def lighter(self, layout: Arrangement) -> Arrangement | None:
        """A layout that fits with less recomputation, as far as is known."""
        spare = self.task.pins.headroom_bytes
        for less in with_less_recomputation(self.task, layout):
            if less not in self.failed and self.prices.fits(less, spare):
                return less
        return None

    def runs(self, layout: Arrangement) -> bool:
        """Whether the engine has nothing against it, and room by its exact ledger."""
        found = self.prices.as_run(layout)
        if isinstance(found, str):
            self.refused["engine"] += 1
            self.complaints.append(found)
            return False
        spare = self.task.pins.headroom_bytes
        if found.headroom_bytes < spare or (spare > -math.inf and not found.memory.host.fits):
            self.refused["exact memory"] += 1
            return False
        return True


def _search(task: Task, prices: Prices, slack: float, at_most_s: float = math.inf) -> _Open:
    """Best first: a family's loose bound, then its tight one, then its layouts."""
    opened, order, heap = _Open(task, prices), itertools.count(), []
    for alike in families(opened):
        for family, bound in zip(alike, prices.loose_bounds(task, alike), strict=True):
            if bound > at_most_s:
                opened.refused["too slow"] += opened.count(family)
            else:
                heap.append((bound, next(order), family, None))
    heapq.heapify(heap)
    while heap and heap[0][0] <= min(slack * opened.best_s, at_most_s):
        seconds, _, family, layout = heapq.heappop(heap)
        if family is None:
            for some in _take(opened, layout, seconds):
                heapq.heappush(heap, (prices.time(some).total_s, next(order), None, some))
        elif layout is None and opened.is_too_large(family):
            opened.refused["memory"] += opened.count(family)
        elif layout is None:
            layout = body(task, family)
            heapq.heappush(heap, (prices.bound(layout), next(order), family, layout))
        else:
            for some in _timed(opened, layout):
                heapq.heappush(heap, (prices.time(some).total_s, next(order), None, some))
    for _, _, family, _ in heap:
        if family is not None:
            opened.refused["too slow"] += opened.count(family)
    return opened


def families(opened: _Open) -> Iterator[list[Family]]:
    """Those that the rules allow, alike but for recomputation and precision; the others are
    counted."""
    task, refused, kinds = opened.task, opened.refused, precisions(opened.task)
    for mesh in meshes(task, opened.refused_meshes):
        opened.num_meshes += 1
        for schedule, v in schedules(task, mesh, refused):
            levels = recomputations(task, schedule)
            for micro in micro_batches(task, mesh):
                alike = [
                    Family(mesh, schedule, v, micro, mode, every, kind)
                    for kind in kinds
                    for mode, every in levels
                ]
                number = opened.count(alike[0]) * len(alike) if alike else 0
                opened.num_layouts += number
                if wrong := micro_batch_problem(task, mesh, micro, schedule, v):
                    refused[wrong] += number
                elif alike:
                    yield alike


def _timed(opened: _Open, family: Arrangement) -> Iterator[Arrangement]:
    """The layouts of a family that fit and are not dominated."""
    task, prices, spare = opened.task, opened.prices, opened.task.pins.headroom_bytes
    for layout in data_layouts(task, family, opened.refused):
        if not prices.fits(layout, spare):
            opened.refused["memory"] += 1
        elif lighter := opened.lighter(layout):
            opened.heavier.setdefault(lighter, []).append(layout)
            opened.refused["more recomputation"] += 1
        else:
            opened.num_timed += 1
            yield layout


def _take(opened: _Open, layout: Arrangement, seconds: float) -> list[Arrangement]:
    """The fastest one must run; the others are asked when they are listed. In place of one that
    does not: those that compute more again, which had been left out for it."""
    if opened.found or opened.runs(layout):
        opened.found[layout] = seconds
        opened.best_s = min(opened.best_s, seconds)
        return []
    opened.failed.add(layout)
    instead = opened.heavier.pop(layout, [])
    opened.refused["more recomputation"] -= len(instead)
    opened.num_timed += len(instead)
    return instead


def with_less_recomputation(task: Task, layout: Arrangement) -> list[Arrangement]:
    levels = recomputations(task, layout.schedule)
    return [
        layout.having(recompute=mode, recompute_every=every)
        for mode, every in lighter((layout.recompute, layout.recompute_every))
        if (mode, every) in levels
    ]


# --- the best of them ------------------------------------------------------------------------


def _checked(opened: _Open, slack: float) -> tuple[Candidate, ...]:
    """Ranked, as the engine sees them: the first ones, the first of each mesh, and those that leave
    more memory free than all before. The others are as they were predicted."""
    limit = slack * opened.best_s
    ranked = sorted(
        (layout for layout, seconds in opened.found.items() if seconds <= limit),
        key=lambda layout: (round(opened.found[layout], 6), complexity(layout)),
    )
    found: list[Candidate] = []
    meshes_seen, most_free = set[tuple[int, ...]](), -math.inf
    missing = "" if opened.prices.config else "the engine has no such model yet"
    for layout in ranked:
        candidate, mesh = opened.prices.candidate(layout), mesh_of(layout)
        freer = candidate.headroom_bytes > most_free
        if len(found) < NUM_CHECKED or mesh not in meshes_seen or freer:
            if not opened.runs(layout):
                continue
            exact = opened.prices.as_run(layout)
            assert not isinstance(exact, str)
            candidate = exact
            most_free = max(most_free, exact.headroom_bytes)
        meshes_seen.add(mesh)
        found.append(replace(candidate, not_in_engine=missing))
    return _simplest_first(found)


def _simplest_first(found: list[Candidate]) -> tuple[Candidate, ...]:
    """Of those that were checked and take the same time as the fastest."""
    limit = (1 + SAME) * found[0].step_s if found else 0.0
    tied = [c for c in found[:NUM_CHECKED] if c.step_s <= limit]
    best = [min(tied, key=lambda c: complexity(c.layout))] if tied else []
    return (*best, *(c for c in found if c is not best[0]))


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
