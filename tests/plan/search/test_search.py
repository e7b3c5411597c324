import math
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from stepwell.hardware import GIB
from stepwell.parallel.rules import check_run
from stepwell.plan.cluster import cluster
from stepwell.plan.dims import find_model
from stepwell.plan.job import Arrangement, job_of
from stepwell.plan.search.candidates import complexity, mesh_of, nothing_fits, pareto
from stepwell.plan.search.checks import check_task
from stepwell.plan.search.fewest import fewest_gpus, leanest_of
from stepwell.plan.search.prices import OF_DATA_RANKS, Prices, checked_run
from stepwell.plan.search.runs import (
    offloaded,
    run_of,
    settings_of,
    settings_text,
    short,
    state_text,
    values_of,
)
from stepwell.plan.search.search import NUM_CHECKED, OFFLOAD_GAIN, SAME, _simplest_first, search
from stepwell.plan.search.space import (
    OFFLOADS,
    REASONS,
    Family,
    Mesh,
    Pins,
    Task,
    body,
    context_problem,
    data_layouts,
    leanest,
    meshes,
    micro_batch_problem,
    micro_batches,
    no_more,
    precisions,
    recomputations,
    schedules,
    tensor_problem,
    with_offload,
)
from stepwell.presets import preset
from stepwell.types import ConfigError

EIGHT = find_model("llama3-8b")
MODEL = preset("llama3-8b")
H100 = cluster("h100-sxm")
SEQ_LEN, BATCH = 8192, 32 * 8192


@pytest.fixture(scope="module")
def prices():
    return Prices(EIGHT.dims, H100, EIGHT.config)


@pytest.fixture(scope="module")
def ranking(prices):
    pins = Pins(max_cp=2)
    return search(EIGHT.dims, H100, 16, SEQ_LEN, BATCH, pins, EIGHT.config, prices=prices)


def every_layout(task):
    """Without bounds, in no order."""
    for mesh in meshes(task, Counter()):
        for schedule, v in schedules(task, mesh, Counter()):
            for micro in micro_batches(task, mesh):
                if micro_batch_problem(task, mesh, micro, schedule, v):
                    continue
                for level in recomputations(task, schedule):
                    for precision in precisions(task):
                        family = Family(mesh, schedule, v, micro, *level, precision)
                        for layout in data_layouts(task, body(task, family), Counter()):
                            yield family, layout


def test_the_best_is_what_trying_everything_finds():
    prices = Prices(EIGHT.dims, H100)  # without the exact ledger's say
    pins = Pins(cp=1, max_tp=2, max_pp=2)
    task = Task(EIGHT.dims, H100, 16, SEQ_LEN, 32, pins)
    tried = {layout: family for family, layout in every_layout(task) if prices.fits(layout)}
    best_s = min(prices.time(layout).total_s for layout in tried)
    found = search(EIGHT.dims, H100, 16, SEQ_LEN, BATCH, pins, prices=prices)
    assert found.best.step_s == pytest.approx(best_s, rel=1e-9)
    assert len(tried) > 100
    # What bounds leave out is slower than all that is within the slack.
    for layout, family in tried.items():
        seconds = prices.time(layout).total_s
        assert prices.loose_bounds(task, [family])[0] <= seconds
        assert prices.bound(body(task, family)) <= seconds * (1 + 1e-9)
    near = {layout for layout in tried if prices.time(layout).total_s <= 1.1 * best_s}
    unlisted = near - {c.layout for c in found.found}
    lighter = [layout for layout in unlisted if layout.recompute == "none"]
    assert lighter == []  # the others fit with less recomputation


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_what_is_taken_to_hold_no_more_holds_no_more(name):
    """By this families that are too large are left out without being asked."""
    dims = find_model(name).dims
    task, prices = Task(dims, H100, 16, SEQ_LEN, 64, Pins(cp=1)), Prices(dims, H100)

    def held(family):
        return prices.memory(leanest(body(task, family))).total

    compared = 0
    for mesh in meshes(task, Counter()):
        for schedule, v in schedules(task, mesh, Counter())[:3]:
            for mode, every in recomputations(task, schedule):
                one = Family(mesh, schedule, v, 1, mode, every, "bf16")
                for other, n in no_more((mode, every)):
                    less = one._replace(recompute=other, recompute_every=n)
                    assert held(less) <= held(one), (one, other)
                    compared += 1
                if mesh.dp <= 16:  # several micro-batches of each
                    assert held(one) <= held(one._replace(micro_batch_rows=2)), one
    assert compared > 100


def test_layouts_fit_and_are_what_the_engine_runs(ranking):
    assert ranking.found
    for candidate in ranking.found:
        layout = candidate.layout
        assert layout.num_gpus == 16
        assert layout.cp <= 2
        assert candidate.headroom_bytes >= 0
        run = run_of(MODEL, layout)
        check_run(run, 16)
        assert job_of(run, 16, H100).layout == layout
    assert ranking.best.exact is not None
    speeds = [round(c.step_s, 6) for c in ranking.found]  # the simpler of equals comes first
    assert speeds == sorted(speeds)
    assert ranking.complaints == ()


def test_refusals_add_up_and_have_reasons(ranking):
    assert set(ranking.refused) | set(ranking.refused_meshes) <= set(REASONS)
    beside = ("stages", "uneven stages", "replicas", "exact memory", "engine")
    timed_or_refused = ranking.num_timed + sum(
        n for name, n in ranking.refused.items() if name not in beside
    )
    assert timed_or_refused == ranking.num_layouts
    assert ranking.refused_meshes["tensor domain"] == 1  # TP 16 with PP, CP and DP 1


def test_pins_hold(prices):
    pins = Pins(tp=2, zero=3, micro_batch_rows=1, recompute="full")
    found = search(EIGHT.dims, H100, 16, SEQ_LEN, BATCH, pins, EIGHT.config, 1.0, prices)
    for candidate in found.found:
        layout = candidate.layout
        kept = (layout.tp, layout.zero, layout.micro_batch_rows, layout.recompute)
        assert kept == (2, 3, 1, "full")
    spare = replace(Pins(), headroom_bytes=50.0 * 2**30)
    roomy = search(EIGHT.dims, H100, 16, SEQ_LEN, BATCH, spare, EIGHT.config, 1.0, prices)
    assert roomy.best.headroom_bytes >= 50 * 2**30


# Held fixed to values that the wider search looks at, too.
FIXED = {
    "tp": (1, 2, 4, 8),
    "cp": (1,),
    "pp": (1, 2, 4, 8),
    "zero": (0, 1, 2),
    "micro_batch_rows": (1, 2, 4),
    "recompute": ("none", "selective", "every", "full"),
    "schedule": ("1f1b", "interleaved-1f1b", "zbv"),
    "stages_per_rank": (2, 4),
}


def best_s(found_by, task, **pins):
    """Of a search with these pins, without offload; inf where nothing fits."""
    try:
        found = search(task.dims, H100, task.num_gpus, task.seq_len, task.tokens,
                       Pins(offload=(), **pins), found_by.config, 1.0, found_by).found  # fmt: skip
    except ConfigError:
        return math.inf
    return found[0].step_s if found else math.inf


@pytest.mark.parametrize(
    ("name", "gpus", "rows", "num"),
    [("llama3-8b", 8, 16, 16), ("llama3-70b", 32, 64, 12)],
)
def test_who_holds_more_fixed_finds_nothing_faster(name, gpus, rows, num):
    model, rng = find_model(name), random.Random(name)
    some = Prices(model.dims, H100, model.config)
    task = Task(model.dims, H100, gpus, SEQ_LEN, rows)
    free_s, num_found = best_s(some, task), 0
    for _ in range(num):
        pins, last_s = {}, free_s
        for key in rng.sample(list(FIXED), 4):
            pins[key] = rng.choice(FIXED[key])
            now_s = best_s(some, task, **pins)
            assert now_s >= last_s * (1 - 1e-9), pins
            if (last_s := now_s) == math.inf:
                break
            num_found += 1
    assert num_found > num


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b"])
def test_the_best_is_found_again_with_its_values_fixed(name):
    model = find_model(name)
    some = Prices(model.dims, H100, model.config)
    task = Task(model.dims, H100, 32, SEQ_LEN, 64)
    best = search(model.dims, H100, 32, SEQ_LEN, task.tokens, Pins(offload=()), model.config, 1.0,
                  some).best.layout  # fmt: skip
    pins = {}
    for key in ("tp", "cp", "pp", "zero", "micro_batch_rows", "recompute"):
        pins[key] = getattr(best, key)
        assert best_s(some, task, **pins) == pytest.approx(some.time(best).total_s), key


def test_what_computes_more_again_is_found_where_less_only_seemed_to_fit(monkeypatch):
    """The closed form's word is not the last: without the layouts that it takes for fitting and the
    engine refuses, those that were left out for them are looked at."""
    some = Prices(EIGHT.dims, H100, EIGHT.config)
    task = Task(EIGHT.dims, H100, 8, SEQ_LEN, 32)
    pins = {"tp": 1, "cp": 1, "pp": 1, "micro_batch_rows": 2}
    before_s = best_s(some, task, **pins)
    exact = some.as_run
    fuller = {"none", "selective", "every"}
    monkeypatch.setattr(some, "as_run", lambda x: "full" if x.recompute in fuller else exact(x))
    after_s = best_s(some, task, **pins)
    assert before_s < after_s == best_s(some, task, **pins, recompute="full") < math.inf


def test_all_that_is_listed_was_put_before_the_engine():
    """Of each mesh the first, what leaves more free than all before it, and the first ones."""
    found = search(EIGHT.dims, H100, 32, SEQ_LEN, 64 * SEQ_LEN, None, EIGHT.config, 1.15).found
    assert len(found) > 2 * NUM_CHECKED
    firsts = {mesh_of(c.layout): c for c in reversed(found)}
    for candidate in (*found[:NUM_CHECKED], *firsts.values(), *pareto(found)):
        assert candidate.runnable is True
        assert candidate.exact is not None
        assert candidate.headroom_bytes >= 0
    assert {candidate.runnable for candidate in found} == {True, None}


@pytest.mark.parametrize("gpu", ["h100-sxm", "l40s"])
def test_what_goes_to_the_host_makes_no_layout_faster_than_its_bound(gpu):
    """By this one bound is asked for all kinds of offload."""
    machines = cluster(gpu)
    prices, task = Prices(EIGHT.dims, machines), Task(EIGHT.dims, machines, 64, 8192, 256, Pins())
    for mesh, v in ((Mesh(2, 1, 1, 1, 32), 1), (Mesh(2, 2, 2, 1, 8), 2)):
        kind = "interleaved-1f1b" if v > 1 else "1f1b"
        resident = body(task, Family(mesh, kind, v, 1, "full", 2, "bf16"))
        bound = prices.bound(resident)
        for kinds in OFFLOADS:
            layout = body(with_offload(task, kinds), Family(mesh, kind, v, 1, "full", 2, "bf16"))
            assert prices.bound(layout) == bound < prices.time(layout).total_s
            parts = prices.time(layout).parts
            assert sum(s for name, s in parts.items() if name not in OF_DATA_RANKS) >= bound


def test_resharding_is_of_stage_3():
    some = Prices(EIGHT.dims, H100, EIGHT.config)
    for reshard in ("always", "never", "node"):
        pins = Pins(reshard=reshard, offload=())
        found = search(EIGHT.dims, H100, 16, SEQ_LEN, BATCH, pins, EIGHT.config, 1, some).found
        assert found
        assert {(c.layout.zero, c.layout.reshard) for c in found} == {(3, reshard)}
        assert reshard == "never" or all(c.layout.pp == 1 for c in found)
        if reshard == "node":
            within = found[0].layout
            assert within.tp == 1
            assert EIGHT.config is not None
            checked_run(EIGHT.config, within)
            with pytest.raises(ConfigError, match="FSDP2 cannot do with what layout.tp=2 ranks"):
                checked_run(EIGHT.config, within.having(tp=2, dp_shard=within.dp_shard // 2))
    one = search(EIGHT.dims, cluster("b300"), 1, 4096, 4096, Pins(reshard="always"), EIGHT.config)
    assert one.best.layout.zero == 3


def test_how_often_gradients_are_reduced_can_be_held_fixed():
    """Of stage 3; the others have no choice, and one micro-batch is reduced once in any case."""
    pins = Pins(tp=1, cp=1, pp=1, micro_batch_rows=1, recompute="none", offload=())
    for often, stages in (("step", {0, 1, 3}), ("micro-batch", {2, 3})):
        asked = replace(pins, reduce_gradients=often)
        task = Task(EIGHT.dims, H100, 16, SEQ_LEN, 64, asked)
        found = list(data_layouts(task, body(task, family_of(task)), Counter()))
        assert {x.zero for x in found} == stages
        assert {x.reduce_every_micro_batch for x in found} == {often == "micro-batch"}
        single = replace(task, rows=16)
        found = data_layouts(single, body(single, family_of(single)), Counter())
        assert {x.zero for x in found} == {0, 1, 2, 3}
        staged = family_of(task)._replace(mesh=Mesh(1, 1, 2, 1, 8))
        pipelines = list(data_layouts(task, body(task, staged), Counter()))
        assert bool(pipelines) == (often == "step")


def family_of(task: Task) -> Family:
    return Family(Mesh(1, 1, 1, 1, task.num_gpus), "1f1b", 1, 1, "none", 2, "bf16")


def test_groups_of_blocks_that_are_computed_again_are_not_compiled():
    found = search(EIGHT.dims, H100, 8, SEQ_LEN, BATCH, Pins(recompute="sqrt"), EIGHT.config)
    assert found.best.layout.recompute == "sqrt"
    assert not found.best.layout.compiled
    assert found.best.runnable


def test_what_fits_and_does_not_run_is_told_by_its_rule(monkeypatch):
    """More accelerators would not help."""
    some = Prices(EIGHT.dims, H100, EIGHT.config)
    monkeypatch.setattr(some, "as_run", lambda _: "no run of that kind")
    pins = Pins(tp=2, cp=1, pp=1, micro_batch_rows=1, offload=())
    found = search(EIGHT.dims, H100, 8, SEQ_LEN, BATCH, pins, EIGHT.config, prices=some)
    assert not found.found
    assert not found.lacks_memory
    said = nothing_fits(found)
    assert "--offload none: no run of that kind" in said
    assert "more accelerators" not in said
    assert "refused by the engine's rules" in said
    poor = replace(H100, host_memory_bytes=2**30)
    pins = Pins(offload=("optimizer",))
    said = nothing_fits(search(EIGHT.dims, poor, 8, SEQ_LEN, BATCH, pins, EIGHT.config))
    assert "more accelerators" not in said
    assert "are more than its 1.0 GiB" in said


def test_the_machines_memory_binds_as_an_accelerators_does():
    """Held fixed, and where only offload would make it fit; on both sides of what is told."""
    seventy, pins = find_model("llama3-70b"), Pins(offload=("optimizer",))
    for model, wanted in ((EIGHT, pins), (seventy, None)):
        args = (8, 4096, 16 * 4096, wanted, model.config, 1.0)
        poor = search(model.dims, replace(H100, host_memory_bytes=100 * GIB), *args)
        assert not poor.found
        assert not poor.lacks_memory
        said = nothing_fits(poor)
        assert re.search("offload (optimizer|parameters), and", said)
        least = int(re.findall(r"host_memory_gib=(\d+) on", said)[0])
        for gib, fits in ((least, True), (least - 1, False)):
            machine = replace(H100, host_memory_bytes=gib * GIB)
            assert bool(search(model.dims, machine, *args).found) == fits


def test_the_leanest_that_is_named_obeys_what_is_held_fixed():
    big = find_model("llama3-405b")
    pins = Pins(zero=1, schedule="interleaved-1f1b", stages_per_rank=2, offload=())
    found = search(big.dims, H100, 16, SEQ_LEN, BATCH, pins, big.config)
    assert found.lacks_memory
    assert found.closest is not None
    layout = found.closest.layout
    assert (layout.zero, layout.schedule, layout.stages_per_rank) == (1, "interleaved-1f1b", 2)


def test_tensor_ranks_leave_the_scale_up_domain_only_when_told():
    free = Task(EIGHT.dims, H100, 32, SEQ_LEN, 32)
    assert tensor_problem(free, 8) == ""
    assert tensor_problem(free, 16) == "tensor domain"
    assert tensor_problem(replace(free, pins=Pins(tp=16)), 16) == ""
    assert tensor_problem(replace(free, pins=Pins(tp=3)), 3) == "tensor heads"
    odd = find_model("llama3-8b", {"model.d_ff": "14340"})
    assert tensor_problem(replace(free, dims=odd.dims), 8) == "tensor dims"
    assert tensor_problem(replace(free, dims=odd.dims), 4) == ""


def test_context_ranks_need_rows_that_are_long_enough():
    task = Task(EIGHT.dims, H100, 32, SEQ_LEN, 32)
    assert context_problem(task, 1, 8) == ""
    assert context_problem(task, 1, 16) == "context"
    assert context_problem(replace(task, pins=Pins(cp=16)), 1, 16) == ""
    assert context_problem(replace(task, seq_len=8200), 1, 8) == "sequence"


def test_experts_are_planned_but_not_run():
    mixtral = find_model("mixtral-8x7b")
    pins = Pins(pp=1, cp=1, micro_batch_rows=1, tp=1)
    found = search(mixtral.dims, cluster("h200"), 32, 4096, 64 * 4096, pins, slack=1.0)
    assert found.best.not_in_engine
    assert found.best.layout.ep in (1, 2, 4, 8)
    with pytest.raises(ConfigError, match="no expert parallelism"):
        run_of(MODEL, replace(found.best.layout, ep=2))
    seen = {mesh.ep for mesh in meshes(Task(mixtral.dims, H100, 32, 4096, 64), Counter())}
    assert seen == {1, 2, 4, 8}


def test_where_nothing_fits_the_leanest_is_named():
    big = find_model("llama3-405b")
    found = search(big.dims, H100, 8, SEQ_LEN, BATCH, Pins(offload=()), big.config)
    assert found.found == ()
    assert found.closest is not None
    assert found.closest.memory.total > H100.accelerator.memory_bytes
    with pytest.raises(ConfigError, match=r"the leanest, .* needs \d+\.\d GiB of 79.1"):
        _ = found.best
    assert "--offload none" in nothing_fits(found)  # what is held fixed is named
    assert "to the host" not in nothing_fits(found)
    enough = fewest_gpus(found.task)
    assert enough == 96  # not the next double
    pins = Pins(recompute="full", micro_batch_rows=1, offload=())
    on = [search(big.dims, H100, n, SEQ_LEN, BATCH, pins, slack=1.0) for n in (88, 96)]
    assert [bool(ranking.found) for ranking in on] == [False, True]
    assert fewest_gpus(replace(found.task, num_gpus=8), times=2) is None


@pytest.mark.parametrize(
    ("gpu", "gpus", "offloads", "forced"),
    [("rtx4090", 4, True, True), ("rtx4090", 6, True, True), ("h100-sxm", 1, True, True),
     ("h200", 1, True, False), ("b200", 2, False, False)],
)  # fmt: skip
def test_the_fastest_offload_is_taken_where_nothing_fits_without_or_any_is_asked_for(
    gpu, gpus, offloads, forced
):
    """Against each kind held fixed."""
    machines = cluster(gpu)
    some = Prices(EIGHT.dims, machines, EIGHT.config)

    def found(pins=None):
        return search(EIGHT.dims, machines, gpus, SEQ_LEN, 512 * SEQ_LEN, pins, EIGHT.config, 1.0,
                      some)  # fmt: skip

    free, any_kind, none = found(), found(Pins(offload="any")), found(Pins(offload=()))
    assert bool(free.offload) == forced
    assert bool(any_kind.offload) == offloads
    assert free.best.layout == (any_kind if forced else none).best.layout
    assert set(any_kind.offload) == set(offloaded(any_kind.best.layout))
    assert bool(none.found) != forced
    assert (any_kind.resident_s == math.inf) == forced
    held = [found(Pins(offload=kinds)).found for kinds in OFFLOADS]
    fastest_s = min(r[0].step_s for r in [*held, none.found] if r)
    assert fastest_s <= any_kind.best.step_s <= OFFLOAD_GAIN * fastest_s


def test_offload_needs_room_in_the_machine():
    seventy = find_model("llama3-70b")
    poor = replace(H100, host_memory_bytes=64 * 2**30)
    assert search(seventy.dims, poor, 8, 4096, 16 * 4096, None, seventy.config, 1.0).found == ()


def test_one_rank_whose_parameters_are_on_the_host_may_fetch_them_block_by_block():
    """A card of 24 GiB can't hold 8 billion bf16 weights beside gradients; one of 80 GiB can, and
    need not fetch them for every micro-batch."""
    small = replace(cluster("rtx4090"), gpus_per_node=1, host_memory_bytes=256 * 2**30)
    for machines, zero in ((small, 3), (H100, 0)):
        best = search(EIGHT.dims, machines, 1, 2048, 32 * 2048, None, EIGHT.config, 1.0).best
        assert (best.layout.offload_parameters, best.layout.zero, best.fits) == (True, zero, True)
        assert best.runnable
        assert ("ZeRO-3 of one rank" in short(best.layout)) == (zero == 3)
    kept = Pins(offload=("parameters",), zero=0)
    assert not search(EIGHT.dims, small, 1, 2048, 32 * 2048, kept, EIGHT.config, 1.0).found


def test_more_of_the_same_accelerators_are_no_slower():
    """Eight billion parameters in cards of 24 GiB: each number finds another way to fit."""
    machines = replace(cluster("rtx4090"), host_memory_bytes=512 * GIB)
    steps, pins = [], Pins(offload="any")
    some = Prices(EIGHT.dims, machines, EIGHT.config)
    for gpus in range(1, 9):
        found = search(EIGHT.dims, machines, gpus, SEQ_LEN, 512 * SEQ_LEN, pins, EIGHT.config, 1.0,
                       some)  # fmt: skip
        steps.append(found.best.step_s)
    assert all(more <= 1.03 * fewer for fewer, more in pairwise(steps)), steps


def test_the_nearest_number_may_need_offload():
    """What is told and what is found are the same: beside 1 card there usually is too little of the
    machine's memory, beside 4 enough; without offload 4 are not enough."""
    some = Prices(EIGHT.dims, cluster("rtx4090"), EIGHT.config)
    sizes = EIGHT.dims, some.cluster, 1, SEQ_LEN, BATCH
    none = search(*sizes, None, EIGHT.config, 1.0, some)
    assert not none.found
    assert "of host memory for 1 rank a machine" in nothing_fits(none)
    assert fewest_gpus(none.task, config=EIGHT.config) == 4
    held = search(*sizes, Pins(offload=()), EIGHT.config, 1.0, some)
    assert re.search(r"the leanest, .* needs \d+\.\d GiB of 24.0 GiB", nothing_fits(held))
    assert (fewest_gpus(held.task, config=EIGHT.config) or math.inf) > 4


@pytest.mark.parametrize(
    ("pins", "gpus", "said"),
    [
        (Pins(tp=16), 8, "--tp 16 must divide --gpus 8; the nearest legal value is 8"),
        (Pins(tp=3), 6, "must divide the attention heads.*nearest legal value is 2"),
        (Pins(tp=4), 6, "--tp 4 must divide --gpus 6; the nearest legal value is 2"),
        (Pins(pp=5), 8, "--pp 5 must divide --gpus 8; the nearest legal value is 4"),
        (Pins(), 0, "at least 1"),
        (Pins(tp=4, pp=4), 8, "--tp 4 x --pp 4 = 16 must divide --gpus 8; the nearest is --pp 2"),
        (Pins(tp=4, max_tp=2), 8, "--tp 4 is more than --max-tp 2"),
        (Pins(cp=3), 6, "--cp 3: rows of 8,192 .* into 2 x 3 parts; the nearest legal value is 2"),
        (Pins(pp=64), 64, "at most 34 stages; the nearest legal value is 32"),
        (Pins(pp=1, stages_per_rank=2), 8, "--stages-per-rank 2 is of a pipeline, and --pp 1"),
        (Pins(pp=1, schedule="zbv"), 8, "--schedule zbv is of a pipeline, and --pp 1"),
        (Pins(schedule="zbv", stages_per_rank=4), 8, "zbv has 2; the nearest legal value is 2"),
        (Pins(stages_per_rank=9), 8, "is none of 1, 2, 3.*the nearest legal value is 8"),
        (Pins(schedule="zbv", recompute="full"), 8, "only none is possible"),
        (Pins(ep=8), 8, "--ep 8: llama3-8b is a dense model and has no experts"),
        (Pins(micro_batch_rows=33), 8, "--micro-batch 33 is more than the 32 rows of a step"),
        (
            Pins(dp_replicate=3),
            6,
            "must divide the 32 rows of a step; the nearest legal value is 2",
        ),
        (Pins(zero=1, reshard="node"), 8, "--reshard node is of ZeRO stage 3"),
        (Pins(zero=1, reduce_gradients="micro-batch"), 8, "--zero 1 reduces once a step; leave"),
        (Pins(zero=2, reduce_gradients="step"), 8, "--zero 2 is what reduces after every"),
        (Pins(pp=2, reduce_gradients="micro-batch"), 8, "a pipeline reduces once a step"),
        (
            Pins(offload=("optimizer", "parameters")),
            8,
            "parameters take the optimiser with them; the nearest legal value is --offload param",
        ),
        (Pins(headroom_bytes=80 * 2**30), 8, "--headroom 80: a h100-sxm has 79.1 GiB"),
    ],
)
def test_what_cannot_be_names_what_can(pins, gpus, said):
    with pytest.raises(ConfigError, match=said):
        search(EIGHT.dims, H100, gpus, SEQ_LEN, BATCH, pins)


def test_experts_that_do_not_divide_are_named():
    mixtral, batch = find_model("mixtral-8x7b").dims, 32 * SEQ_LEN
    with pytest.raises(ConfigError, match="--ep 3: 8 experts are not divisible by 3.* value is 2"):
        search(mixtral, H100, 24, SEQ_LEN, batch, Pins(ep=3))
    with pytest.raises(ConfigError, match="the 4 ranks of a stage are not divisible by 8.* is 4"):
        search(mixtral, H100, 8, SEQ_LEN, batch, Pins(ep=8, pp=2))


def test_both_sides_of_what_is_held_fixed():
    """The nearest legal values that refusals name are legal."""
    task = Task(EIGHT.dims, H100, 8, SEQ_LEN, 32)
    for pins in (Pins(tp=4, pp=2), Pins(pp=1), Pins(schedule="zbv", recompute="none"),
                 Pins(schedule="zbv", stages_per_rank=2), Pins(micro_batch_rows=32), Pins(ep=1),
                 Pins(headroom_bytes=79 * 2**30), Pins(reshard="node"), Pins(cp=2)):  # fmt: skip
        check_task(replace(task, pins=pins))
    check_task(replace(task, num_gpus=32, pins=Pins(pp=32)))


def test_rules_that_leave_nothing_are_told_in_words():
    pins = Pins(pp=8, schedule="zbv", cp=1, tp=1)
    found = search(EIGHT.dims, H100, 8, SEQ_LEN, 2 * SEQ_LEN, pins)
    assert found.closest is None
    said = nothing_fits(found)
    assert "with --tp 1 --cp 1 --pp 8 --schedule zbv: fewer micro-batches than the pipeline" in said
    spare = Pins(headroom_bytes=78 * 2**30, offload=())
    said = nothing_fits(search(EIGHT.dims, H100, 8, SEQ_LEN, BATCH, spare))
    assert "--headroom 78" in said
    assert "78 must stay free" in said


def test_more_gpus_are_looked_for_within_what_is_held_fixed():
    """zbv keeps everything, so what recomputation would make fit does not."""
    seventy = find_model("llama3-70b").dims
    task = Task(seventy, H100, 8, SEQ_LEN, 1024, Pins(tp=1, cp=1, offload=()))
    free = fewest_gpus(task)
    held = fewest_gpus(replace(task, pins=replace(task.pins, schedule="zbv")))
    assert free is not None
    assert held is None or held > free


def test_a_batch_without_a_row_and_a_precision_without_a_rate():
    with pytest.raises(ConfigError, match="--global-batch-tokens 100 has no.*tokens 8192"):
        search(EIGHT.dims, H100, 8, SEQ_LEN, 100)
    with pytest.raises(ConfigError, match="no peak for 'fp8'"):
        search(EIGHT.dims, cluster("a100-80g"), 8, SEQ_LEN, BATCH, Pins(precision="fp8"))
    task = Task(EIGHT.dims, cluster("v100-32g"), 8, SEQ_LEN, 32)
    assert precisions(task) == ["fp16"]


def test_pareto_keeps_what_nothing_beats(ranking):
    front = pareto(ranking.found)
    assert front[0].step_s == ranking.best.step_s
    for slower, faster in zip(front[1:], front, strict=False):
        assert slower.step_s >= faster.step_s
        assert slower.headroom_bytes >= faster.headroom_bytes + 2**30


def test_unlimited_memory_is_asked_for_by_minus_infinity(prices):
    pins = Pins(headroom_bytes=-math.inf)
    free = search(EIGHT.dims, H100, 16, SEQ_LEN, BATCH, pins, slack=1.0, prices=prices)
    held = search(EIGHT.dims, H100, 16, SEQ_LEN, BATCH, slack=1.0, prices=prices)
    assert free.best.step_s <= held.best.step_s


def test_what_stretches_the_context_is_written(ranking):
    """All of llama3's values are defaults; an empty table would not say so."""
    model = preset("llama3-405b")
    written = values_of(model, ranking.best.layout, "x")["model"]["rope_scaling"]
    assert written["factor"] == 8
    assert written["original_max_seq_len"] == 8192
    plain = preset("qwen3-8b")
    assert "rope_scaling" not in values_of(plain, ranking.best.layout, "x")["model"]


def test_one_data_rank_has_no_stage_and_replicas_of_one_shard_divide_nothing():
    layout = Arrangement(8192, 1, 64, tp=8, zero=3)
    assert short(layout) == "TP 8 x DP 1, micro-batch 1, recompute none"
    assert state_text(layout) == "not divided"
    replicas = replace(layout, dp_replicate=8)
    assert short(replicas) == "TP 8 x DP 8, ZeRO-0, micro-batch 1, recompute none"
    assert "DP 2 x 4, ZeRO-3, " in short(replace(layout, dp_replicate=2, dp_shard=4))
    shared = replace(layout, cp=2)  # among context ranks
    assert "DP 1, ZeRO-3, " in short(shared)
    assert "DP 8 x 1, ZeRO-3, " in short(replace(shared, dp_replicate=8))


def test_of_what_takes_the_same_the_simplest_is_the_first(ranking):
    best = ranking.found[0]

    def at(share, **changes):
        step = replace(best.step, parts={"products": share * best.step_s})
        job = replace(best.job, layout=replace(best.layout, **changes))
        return replace(best, job=job, step=step)

    plain, halves = {"dp_replicate": 1, "dp_shard": 8}, {"dp_replicate": 2, "dp_shard": 4}
    inside, outside = 1 + 0.9 * SAME, 1 + 1.1 * SAME
    assert _simplest_first([]) == ()
    first, second = at(1, **halves), at(inside, **plain)
    assert _simplest_first([first, second]) == (second, first)
    first, second = at(1, **halves), at(outside, **plain)
    assert _simplest_first([first, second]) == (first, second)
    first, second = at(1, **plain, offload_optimizer=True), at(inside, **plain)
    assert _simplest_first([first, second]) == (second, first)


def test_groups_of_blocks_are_taken_where_nothing_else_fits():
    """A deep and narrow pipeline, on GPUs with less memory than its blocks' inputs take."""
    heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
    dims = replace(EIGHT.dims, num_layers=256, d_model=512, d_ff=1536, vocab_size=32000, **heads)
    pins = Pins(pp=8, schedule="1f1b", micro_batch_rows=1, offload=())
    task, prices = Task(dims, H100, 8, 65536, 32, pins), Prices(dims, H100)

    def held(mode):
        family = Family(Mesh(1, 1, 8, 1, 1), "1f1b", 1, 1, mode, 2, "bf16")
        return prices.memory(body(task, family)).total

    least, full = held("sqrt"), held("full")
    assert least < 0.8 * full
    for memory_bytes, mode in ((1.02 * full, "full"), (1.05 * least, "sqrt"), (0.9 * least, "")):
        device = replace(H100.accelerator, memory_bytes=round(memory_bytes / 0.99))
        small = replace(H100, accelerator=device)
        found = search(dims, small, 8, 65536, 32 * 65536, pins)
        assert [c.layout.recompute for c in found.found[:1]] == [mode] * bool(mode)
        if mode != "full":  # what holds the least is named
            lean = leanest_of(replace(task, cluster=small), Prices(dims, small))
            assert lean is not None
            assert lean.recompute == "sqrt"


def test_a_layout_in_words_and_as_settings(ranking):
    layout = ranking.best.layout
    assert settings_of(layout)["layout.dp_shard"] == layout.dp_shard
    other = replace(layout, recompute="every", recompute_every=4, zero=1, reshard="never")
    text = settings_text(layout, other)
    assert "--remat.mode every" in text
    assert "--remat.every 4" in text
    assert "ZeRO-1" in short(other)
    assert complexity(layout) == complexity(replace(layout))
