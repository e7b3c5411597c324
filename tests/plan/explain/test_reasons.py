import json
from dataclasses import replace
from itertools import pairwise

import pytest

from stepwell.config import Run
from stepwell.plan.cluster import cluster
from stepwell.plan.dims import find_model
from stepwell.plan.explain.answer import (
    Review,
    Searched,
    as_json,
    memory_items,
    review_json,
    training,
)
from stepwell.plan.explain.change import changed, refilled
from stepwell.plan.explain.circumstances import (
    MESSAGES,
    Relief,
    links_note,
    messages_s,
    scenarios,
)
from stepwell.plan.explain.knobs import knobs, refusal, together
from stepwell.plan.explain.reasons import WORTH_TELLING, explain, fastest_offload, reasons
from stepwell.plan.explain.words import PARTS
from stepwell.plan.job import job_of
from stepwell.plan.measured.gap import gap, measured_step_s
from stepwell.plan.search.candidates import Candidate, pareto
from stepwell.plan.search.prices import Prices, budget_gain_s
from stepwell.plan.search.runs import offloaded
from stepwell.plan.search.search import batches, search
from stepwell.plan.search.space import OFFLOADS, Family, Mesh, Pins, Task, body
from stepwell.plan.steptime.step import predict_step
from stepwell.presets import preset
from stepwell.types import ConfigError

GIB = 2**30
H100 = cluster("h100-sxm")
EIGHT = find_model("llama3-8b")


@pytest.fixture(scope="module")
def prices():
    return Prices(EIGHT.dims, H100, EIGHT.config)


@pytest.fixture(scope="module")
def answer(prices):
    pins = Pins(max_cp=2, max_pp=2, precision="bf16")
    ranking = search(EIGHT.dims, H100, 16, 8192, 64 * 8192, pins, prices=prices)
    return Searched(
        ranking,
        explain(ranking, prices),
        tuple(pareto(ranking.found)),
        tuple(batches(ranking, prices, (0.5,))),
        tuple(knobs(prices, ranking.task, ranking.best.layout, EIGHT.config)),
        10**12,
    )


@pytest.fixture(scope="module")
def review():
    run = Run.parse({"model": preset("llama3-8b").model_dump(exclude_none=True)}, {
        "layout.compile": True, "data.seq_len": 4096, "train.global_batch_rows": 512,
        "train.micro_batch_rows": 1, "layout.dp_shard": 64,
    })  # fmt: skip
    job = job_of(run, 64, H100)
    p = Prices(job.dims, H100, run.model)
    task = Task(job.dims, H100, 64, 4096, 512)
    candidate = Candidate(job, p.memory(job.layout), p.time(job.layout))
    found = tuple(knobs(p, task, job.layout, run.model))
    measured = gap(job, 1.3 * candidate.step_s)
    more = tuple(together(p, task, job.layout, run.model))
    return Review(run, task, candidate, found, more, None, measured, ())


def test_every_axis_has_a_reason_with_numbers(answer):
    reasons = {reason.axis: reason for reason in answer.explanation.reasons}
    wanted = {"fit", "zero", "tp", "pp", "cp", "data", "micro_batch_rows", "recompute"}
    assert wanted | {"precision", "offload"} <= set(reasons)
    assert list(reasons)[:3] == ["fit", "zero", "tp"]  # the decision tree's order
    assert "120 GiB" in reasons["fit"].text  # 8.03e9 * 16 bytes
    for reason in reasons.values():
        for other in reason.alternatives:
            assert other.label in reason.text
            if not other.alone.fits and not other.alone.broken:
                assert f"{other.alone.peak_bytes / GIB:.1f} GiB of 79.1" in reason.text


def test_no_alternative_is_better(answer):
    best = answer.best
    for reason in answer.explanation.reasons:
        if reason.axis == "precision":  # not decided by speed
            continue
        for other in reason.alternatives:
            if other.alone.works:
                assert other.alone.step_s >= best.step_s * (1 - 1e-6), other.label
            if other.best is not None and not other.alone.broken:
                assert other.best.step_s >= best.step_s * (1 - 1e-6), other.label


def reasons_of(dims, machines, num_gpus, seq_len, rows, pins, config=None):
    prices = Prices(dims, machines, config)
    batch = rows * seq_len
    ranking = search(dims, machines, num_gpus, seq_len, batch, pins, config, 1.0, prices)
    found = explain(ranking, prices).reasons
    return ranking.best, {reason.axis: reason for reason in found}


def test_eight_bits_are_told_and_not_taken():
    pins = Pins(tp=1, pp=1, cp=1, micro_batch_rows=1)
    best, found = reasons_of(EIGHT.dims, H100, 16, 8192, 64, pins)
    assert best.layout.precision == "bf16"
    said = found["precision"]
    assert "--precision any" in said.lead
    (eight,) = said.alternatives
    assert eight.label == "fp8"
    assert eight.alone.step_s < best.step_s
    saved = (eight.alone.peak_bytes - best.peak_bytes) / GIB
    assert f"and holds {eight.alone.peak_bytes / GIB:.1f} GiB ({saved:+.1f})" in said.text
    assert eight.best is not None
    assert eight.best.layout.precision == "fp8"
    any_best, found = reasons_of(EIGHT.dims, H100, 16, 8192, 64, replace(pins, precision="any"))
    assert any_best.layout == eight.best.layout
    (sixteen,) = found["precision"].alternatives
    assert sixteen.label == "bf16"
    assert sixteen.best is not None
    assert sixteen.best.step_s == best.step_s
    older, found = reasons_of(EIGHT.dims, cluster("a100-80g"), 8, 8192, 64, pins)
    assert older.layout.precision == "bf16"
    assert found["precision"].text == "a100-80g has no products in 8 bits."


def test_what_is_held_fixed_is_said_not_to_be_searched():
    pins = Pins(tp=1, pp=1, cp=1, micro_batch_rows=1, zero=3)
    _, found = reasons_of(EIGHT.dims, H100, 16, 8192, 64, pins)
    held = "Held fixed, so layouts with other values are not searched."
    assert held in found["zero"].text
    assert held not in found["recompute"].text


def test_the_best_with_a_value_is_what_a_search_finds_that_holds_it():
    """Long rows on few machines, where offload would be faster but is not taken unasked."""
    model, pins = find_model("qwen3-32b"), Pins(max_cp=4, recompute="every", micro_batch_rows=1)
    sizes = model.dims, H100, 32, 32768, 64 * 32768
    some = Prices(model.dims, H100, model.config)
    ranking = search(*sizes, pins, prices=some)
    best, task = ranking.best, ranking.task
    found = {reason.axis: reason for reason in reasons(some, task, best)}
    for axis in ("tp", "pp"):
        for other in found[axis].alternatives:
            value = int(other.label.split()[1])
            held = search(*sizes, replace(pins, **{axis: value}), prices=some)
            if other.best is not None:
                assert other.best.step_s == pytest.approx(held.best.step_s, rel=1e-3)
                assert held.best.step_s >= best.step_s
            else:  # nothing fits without offload, or only what is not worth telling
                assert held.offload or held.best.step_s > WORTH_TELLING * best.step_s
    any_kind = search(*sizes, replace(pins, offload="any"), prices=some).best
    faster = fastest_offload(found.values())
    assert faster is not None
    assert offloaded(any_kind.layout)
    assert any_kind.step_s < 0.98 * best.step_s
    assert faster.step_s == pytest.approx(any_kind.step_s, rel=2e-3)


def test_what_is_there_already_breaks_no_rule():
    """512 tokens of a row on each context rank are not held against other changes."""
    prices, task = Prices(EIGHT.dims, H100, EIGHT.config), Task(EIGHT.dims, H100, 64, 4096, 512)
    before = body(task, Family(Mesh(1, 8, 1, 1, 8), "1f1b", 1, 1, "full", 2, "bf16"))
    assert not changed(prices, task, before, {"recompute": "selective"}).broken
    assert "fewer than 1,024" in changed(prices, task, before, {"cp": 16}).broken


def test_where_today_stays_the_best_it_is_what_is_found():
    """With what is forced to the host the bound is today's layout itself."""
    one = Prices(EIGHT.dims, H100, EIGHT.config)
    ranking = search(EIGHT.dims, H100, 1, 2048, 32 * 2048, None, EIGHT.config, 1.0, one)
    assert ranking.offload
    found = {scenario.name: scenario for scenario in scenarios(one, ranking.task, ranking.best)}
    for name, rows in (("twice the batch", 64), ("half the batch", 16)):
        held = search(EIGHT.dims, H100, 1, 2048, rows * 2048, None, EIGHT.config, 1.0, one).best
        other = found[name].best
        assert other is not None
        assert other.step_s == pytest.approx(held.step_s, rel=2e-3)


def test_where_something_must_be_offloaded_others_are_searched_with_it():
    """70B on 8: without offload nothing fits, of any other value either."""
    seventy, pins = find_model("llama3-70b"), Pins(cp=1, pp=1)
    best, found = reasons_of(seventy.dims, H100, 8, 4096, 64, pins, seventy.config)
    kinds = offloaded(best.layout)
    assert kinds
    assert found["offload"].value == f"offload {' and '.join(kinds)}"
    # None of it, and each other kind.
    others = found["offload"].alternatives
    assert len(others) == len(OFFLOADS)
    assert not others[0].alone.fits
    assert all(other.best is None or other.best.step_s >= best.step_s for other in others)
    others = [a.best for a in found["micro_batch_rows"].alternatives + found["tp"].alternatives]
    assert any(other is not None for other in others)
    assert all(offloaded(other.layout) == kinds for other in others if other is not None)


def test_whether_it_fits_on_one_is_what_is_found_there():
    """On both sides: with room, just so, with offload only, not at all; and on one, its plan."""
    for gpu, gpus, value, said in (
        ("b200", 2, "yes", "nothing need be divided"),
        ("h200", 2, "just", "With recompute full it fits just so"),
        ("h100-sxm", 2, "no", "or optimizer kept on the host"),
        ("rtx4090", 4, "no", "so it must be divided."),
        ("h200", 1, "yes", "The plan with "),
    ):
        machines = cluster(gpu)
        some = Prices(EIGHT.dims, machines, EIGHT.config)
        task = Task(EIGHT.dims, machines, gpus, 8192, 64)
        best = search(EIGHT.dims, machines, gpus, 8192, 64 * 8192, None, EIGHT.config, 1.0, some)
        whole = next(reasons(some, task, best.best, deep=False))
        assert (whole.value, said in whole.text) == (value, True), whole.text


def test_twice_the_memory_keeps_offload_where_that_is_faster():
    one = Prices(EIGHT.dims, H100, EIGHT.config)
    ranking = search(EIGHT.dims, H100, 1, 8192, 512 * 8192, None, EIGHT.config, 1.0, one)
    twice = next(scenarios(one, ranking.task, ranking.best))
    assert twice.name == "twice the memory"
    for kinds in ((), ranking.offload):
        larger = replace(H100.accelerator, memory_bytes=2 * H100.accelerator.memory_bytes)
        machines = replace(H100, accelerator=larger)
        held = search(EIGHT.dims, machines, 1, 8192, 512 * 8192, Pins(offload=kinds), EIGHT.config)
        assert twice.best is not None
        assert twice.best.step_s <= held.best.step_s * (1 + 1e-9)


def test_reliefs_only_relieve_and_the_largest_binds(answer):
    explanation, best = answer.explanation, answer.best
    for relief in explanation.reliefs:
        assert relief.step_s <= best.step_s * (1 + 1e-6), relief.name
    assert explanation.binding.step_s == min(r.step_s for r in explanation.reliefs)
    assert {"memory", "network", "scale-up links"} <= {r.name for r in explanation.reliefs}


def test_scenarios_move_the_right_way(answer):
    found = {s.name: s.per_token for s in answer.explanation.scenarios}
    assert found["half the network"] >= 1 - 1e-6
    assert found["twice the memory"] <= 1 + 1e-6


def test_runners_up_are_of_other_meshes(answer):
    seen = [(c.layout.tp, c.layout.cp, c.layout.pp) for c in answer.explanation.runners_up]
    assert len(seen) == len(set(seen))
    best = answer.best.layout
    assert (best.tp, best.cp, best.pp) not in seen


def test_parts_have_names_in_words(answer):
    assert set(answer.best.step.parts) <= set(PARTS)


def test_json_has_stable_keys_and_adds_up(answer):
    found = json.loads(json.dumps(as_json(answer, 5)))
    for key in ("memory/peak_bytes", "comm/exposed_s", "time/step_s", "mfu", "speed/tokens_per_s"):
        assert found[key] >= 0
    assert sum(found["memory/items"].values()) == pytest.approx(
        found["memory/peak_bytes"], rel=1e-6
    )
    assert sum(found["time/parts"].values()) == pytest.approx(found["time/step_s"])
    assert sum(w["seconds"] for w in found["waterfall"]) == pytest.approx(found["time/step_s"])
    assert len(found["ranked"]) <= 5
    assert found["training"]["days"] == pytest.approx(1e12 / found["speed/tokens_per_s"] / 86400)
    assert found["settings"]["layout.tp"] == answer.best.layout.tp
    assert sum(memory_items(answer.best).values()) == pytest.approx(answer.best.peak_bytes)
    assert training(answer.best, 10**12)["gpu_hours"] > 0


def filled(layout, num_gpus, changes):
    found = refilled(replace(layout, **changes), num_gpus, changes)
    assert found is not None
    return found


def test_other_axes_are_refilled_by_data_ranks(answer):
    sizes = {"tp": 1, "cp": 1, "pp": 1, "dp_shard": 64, "dp_replicate": 1}
    layout = replace(answer.best.layout, schedule="1f1b", stages_per_rank=1, **sizes)
    assert filled(layout, 64, {"tp": 4}).dp_shard == 16
    assert refilled(replace(layout, tp=3), 64, {"tp": 3}) is None
    staged = filled(replace(layout, zero=2), 64, {"pp": 4})
    assert (staged.zero, staged.reshard, staged.dp_shard) == (1, "never", 16)
    flat = filled(replace(staged, schedule="interleaved-1f1b"), 64, {"pp": 1})
    assert (flat.schedule, flat.stages_per_rank, flat.dp_shard) == ("1f1b", 1, 64)
    halves = filled(replace(staged, recompute="full"), 64, {"schedule": "zbv"})
    assert (halves.stages_per_rank, halves.recompute, halves.compiled) == (2, "none", False)


def test_a_forbidden_change_is_priced_and_named(prices, answer):
    task = answer.ranking.task
    found = changed(prices, task, answer.best.layout, {"tp": 16, "pp": 1, "cp": 1})
    assert "scale-up domain" in found.broken
    assert found.step_s > answer.best.step_s
    assert not found.works
    none = changed(prices, task, answer.best.layout, {"tp": 5})
    assert none.layout is None
    assert "does not divide 16 accelerators" in none.broken


def test_what_does_not_divide_is_the_product(prices, answer):
    sizes = {"tp": 1, "cp": 1, "pp": 2, "dp_shard": 1, "dp_replicate": 1}
    layout = replace(answer.best.layout, **sizes)
    found = changed(prices, answer.ranking.task, layout, {"tp": 2})
    assert found.broken == "TP 2 x PP 2 needs 4 accelerators, and there are 2"
    three = changed(prices, answer.ranking.task, replace(layout, dp_shard=4), {"tp": 3})
    assert three.broken == "TP 3 x PP 2 = 6 does not divide 8 accelerators"


def test_a_change_that_the_schedule_undoes_is_not_priced(prices, answer):
    """zbv keeps all activations: "selective" would be the same layout under another name."""
    sizes = {
        "zero": 1,
        "reshard": "never",
        "tp": 1,
        "cp": 1,
        "pp": 2,
        "dp_shard": 8,
        "dp_replicate": 1,
        "recompute": "full",
    }
    plain = replace(answer.best.layout, schedule="1f1b", stages_per_rank=1, **sizes)
    task = answer.ranking.task
    halves = changed(prices, task, plain, {"schedule": "zbv", "stages_per_rank": 2})
    assert set(halves.also) >= {"recompute none", "blocks not compiled"}
    assert halves.layout is not None
    again = changed(prices, task, halves.layout, {"recompute": "selective"})
    assert (again.layout, again.step) == (None, None)
    assert again.broken == "not possible alone: zbv keeps all activations"
    assert "is not compiled" in changed(prices, task, halves.layout, {"compiled": True}).broken
    assert changed(prices, task, plain, {"recompute": "selective"}).also == ()


def test_a_pipeline_of_other_size_has_as_many_stages_a_rank_as_the_blocks_are_enough_for():
    """Kept at 12, twice the ranks would need more stages than there are blocks."""
    found = find_model("llama3-405b")
    prices, task = Prices(found.dims, H100), Task(found.dims, H100, 1024, 8192, 2048)
    before = body(task, Family(Mesh(8, 1, 8, 1, 16), "interleaved-1f1b", 12, 1, "full", 2, "bf16"))
    for pp, v, told in ((4, 12, ()), (16, 8, ("8 stages a rank",)), (64, 2, ("2 stages a rank",))):
        other = changed(prices, task, before, {"pp": pp})
        assert not other.broken
        assert other.layout is not None
        assert (other.layout.pp, other.layout.stages_per_rank, other.also) == (pp, v, told)
    alone = changed(prices, task, before, {"pp": 128})
    assert alone.layout is not None
    assert (alone.layout.schedule, alone.also[-1]) == ("1f1b", "1f1b")
    kept = changed(prices, task, before, {"pp": 16, "schedule": "interleaved-1f1b",
                                          "stages_per_rank": 12})  # fmt: skip
    assert kept.layout is not None
    assert kept.layout.stages_per_rank == 12
    assert "more pipeline stages" in kept.broken


@pytest.mark.parametrize(
    ("name", "gpus", "seq_len", "rows"),
    [
        ("llama3-8b", 8, 32768, 32),
        ("llama3-70b", 32, 8192, 256),
        pytest.param("llama3-405b", 512, 8192, 2048, marks=pytest.mark.slow),
    ],
)
def test_neither_groups_of_blocks_nor_budgets_gain_what_is_worth_a_search(
    name, gpus, seq_len, rows
):
    """Groups take a tenth longer than what else there is; the best budget that there could be,
    among layouts up to a third slower, gains a hundredth at most."""
    found = find_model(name)
    prices = Prices(found.dims, H100, found.config)
    sizes = (found.dims, H100, gpus, seq_len, rows * seq_len)
    ranking = search(*sizes, slack=1.33, prices=prices, may_offload=False)
    best_s = ranking.best.step_s
    grouped = search(*sizes, Pins(recompute="sqrt"), slack=1, prices=prices, may_offload=False)
    assert grouped.best.step_s > 1.1 * best_s
    assert min(c.step_s - budget_gain_s(prices, c) for c in ranking.found) > 0.985 * best_s


def test_a_budget_gains_no_more_than_the_room_that_is_left_pays_for():
    found = find_model("llama3-8b")
    prices = Prices(found.dims, H100)
    task = Task(found.dims, H100, 8, 8192, 64)
    layout = body(task, Family(Mesh(1, 1, 1, 1, 8), "1f1b", 1, 2, "full", 2, "bf16"))
    now, whole = prices.candidate(layout), layout.having(recompute="none")
    saved = now.step_s - prices.time(whole).total_s
    more_bytes = prices.memory(whole).total - now.memory.total
    assert 0 < now.room_bytes < more_bytes  # some of its blocks can be kept, not all
    gain_s = budget_gain_s(prices, now)
    assert saved * now.room_bytes / more_bytes <= gain_s * (1 + 1e-9)
    assert 0 < gain_s <= saved * (1 + 1e-9)
    roomy = replace(H100.accelerator, memory_bytes=H100.accelerator.memory_bytes + 2 * more_bytes)
    endless = Prices(found.dims, replace(H100, accelerator=roomy))
    assert budget_gain_s(endless, endless.candidate(layout)) == pytest.approx(saved)
    full = replace(H100.accelerator, memory_bytes=now.peak_bytes)
    crowded = Prices(found.dims, replace(H100, accelerator=full))
    assert budget_gain_s(crowded, crowded.candidate(layout)) == 0


def test_messages_that_no_single_link_causes_are_told(answer):
    found, best = answer.explanation, answer.best
    (all_of_them,) = (r for r in found.reliefs if r.name == MESSAGES)
    assert all_of_them.step_s == pytest.approx(best.step_s - messages_s(best.step))
    costly = replace(all_of_them, step_s=0.9 * best.step_s)
    links = [Relief(name, best.step_s) for name in ("network", "scale-up links")]
    told = links_note((*links, costly), best)
    assert "no link alone binds" in told
    assert f"{0.1 * best.step_s:.2f} s" in told
    binds = [Relief("network", 0.91 * best.step_s), costly]
    assert links_note(binds, best) == ""
    free = replace(costly, step_s=best.step_s)
    assert links_note((*links, free), best) == ""


# --- knobs -----------------------------------------------------------------------------------


def test_knobs_say_what_to_set_and_what_it_gains(review):
    before = review.candidate
    assert [k.gain for k in review.knobs] == sorted((k.gain for k in review.knobs), reverse=True)
    for knob in review.knobs:
        assert knob.setting.startswith("--")
        tokens = knob.changed.layout.global_batch_tokens / before.layout.global_batch_tokens
        assert knob.gain == pytest.approx(1 - knob.changed.step_s / tokens / before.step_s)
    names = {knob.name for knob in review.knobs if knob.works and knob.gain > 0}
    assert any("micro-batch" in name or "ZeRO" in name for name in names)
    assert any("8 bits" in knob.alters for knob in review.knobs)


def test_a_knob_that_only_seems_to_fit_is_refused_by_the_engines_own_ledger(answer):
    layout = answer.best.layout
    exact = Prices(EIGHT.dims, H100, EIGHT.config).as_run(layout)
    assert not isinstance(exact, str)
    peak = exact.peak_bytes
    for has, said in ((peak, ""), (peak - 1, "GiB by the engine's own ledger")):
        small = replace(H100, accelerator=replace(H100.accelerator, memory_bytes=has))
        found = refusal(Prices(EIGHT.dims, small, EIGHT.config), layout, EIGHT.config)
        assert found.endswith(said)
        assert bool(found) == bool(said)
        # Of a recipe with another optimiser the layout alone does not say what is held.
        other = layout.having(optimizer="adamw8bit")
        assert refusal(Prices(EIGHT.dims, small, EIGHT.config), other, EIGHT.config) == ""


def test_knobs_one_after_the_other_never_lose(review):
    steps = [review.candidate.step_s, *(k.changed.step_s for k in review.together)]
    assert len(steps) > 1
    assert all(after < before for before, after in pairwise(steps))
    assert all(not knob.alters for knob in review.together)


def test_what_a_knob_sets_is_a_run_with_that_layout(review):
    knob = next(k for k in review.knobs if k.works and k.gain > 0)
    words = knob.setting.split()
    overrides = {k.removeprefix("--"): v for k, v in zip(words[::2], words[1::2], strict=True)}
    run = Run.parse(review.run.model_dump(exclude_none=True), overrides)
    assert job_of(run, 64, H100).layout == knob.changed.layout


def test_suspects_explain_the_gap(review):
    job, found = review.candidate.job, review.gap
    assert found.ratio == pytest.approx(1.3)
    names = {suspect.name for suspect in found.suspects}
    assert {"slow products", "waiting"} <= names
    network = next(s for s in found.suspects if s.name == "the network")
    gbits = float(network.text.split(" at ")[1].split()[0])
    slower = replace(H100, network_bytes_per_s=gbits * 1e9 / 8)
    seconds = predict_step(replace(job, cluster=slower)).total_s
    assert seconds == pytest.approx(found.measured_s, rel=0.02)
    assert gap(job, found.predicted_s).suspects == ()
    assert gap(job, 0.5 * found.predicted_s).suspects == ()


def test_what_was_measured_in_any_unit(review):
    job, step = review.candidate.job, review.candidate.step
    for given in (
        {"step_s": step.total_s},
        {"mfu": step.mfu},
        {"tokens_per_s": review.candidate.tokens_per_s},
        {"tokens_per_s_per_gpu": step.tokens_per_s_per_gpu},
    ):
        assert measured_step_s(given, job) == pytest.approx(step.total_s)
    with pytest.raises(ConfigError, match="give one of step_s="):
        measured_step_s({"speed": 1.0}, job)
    with pytest.raises(ConfigError, match="above 0"):
        measured_step_s({"mfu": 0.0}, job)
    # No step takes less than its products at the peak rate.
    assert measured_step_s({"mfu": 1.0}, job) == pytest.approx(step.mfu * step.total_s)
    for given in ({"mfu": 1.001}, {"step_s": 0.999 * step.mfu * step.total_s}):
        with pytest.raises(ConfigError, match="cannot be.*an MFU of 100 %.*peak rate of 64"):
            measured_step_s(given, job)
    with pytest.raises(ConfigError, match="above 0"):
        gap(job, 0)


def test_a_review_as_json(review):
    found = json.loads(json.dumps(review_json(review)))
    assert found["fits"]
    assert found["measured"]["suspects"]
    assert found["host"]["total"] > 0
    assert found["knobs"][0]["gain"] == pytest.approx(review.knobs[0].gain)
