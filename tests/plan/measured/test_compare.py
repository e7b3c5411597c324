import re
from dataclasses import replace
from functools import cache

import pytest

from stepwell.plan.cluster import cluster
from stepwell.plan.dims import find_model
from stepwell.plan.explain.knobs import knobs
from stepwell.plan.job import Arrangement, Job
from stepwell.plan.measured.compare import compare, task_of
from stepwell.plan.measured.fitted import fit
from stepwell.plan.measured.lines import predicted_parts
from stepwell.plan.measured.parts import parts_of
from stepwell.plan.measured.shown import line_rows
from stepwell.plan.measured.trace import read_trace
from stepwell.plan.search.prices import Prices
from stepwell.plan.steptime.coefficients import SHIPPED
from stepwell.plan.steptime.step import predict_step
from stepwell.types import ConfigError
from tests.plan.measured import traces

EIGHT = find_model("llama3-8b")
LAYOUT = Arrangement(
    seq_len=8192, micro_batch_rows=1, global_batch_rows=128, dp_shard=64, zero=3,
    reshard="always", compiled=True,
)  # fmt: skip
JOB = Job(EIGHT.dims, LAYOUT, cluster("h100-sxm"))


def read(tmp_path, job=JOB, **how):
    return read_trace(traces.write(tmp_path / "t.json", traces.planned(job, **how), packed=False))


@cache
def planned_knobs():
    found = knobs(Prices(EIGHT.dims, JOB.cluster, EIGHT.config), task_of(JOB), LAYOUT, EIGHT.config)
    return {knob.name: knob.gain for knob in found}


def test_predicted_parts_add_up_with_everything_on():
    layout = replace(LAYOUT, tp=8, pp=4, cp=2, dp_shard=1, recompute="full", global_batch_rows=64)
    step = predict_step(replace(JOB, layout=layout))
    parts = predicted_parts(step)
    assert sum(parts.values()) == pytest.approx(step.total_s)
    assert parts["products"] > step.parts["products"] + step.recomputed["products"]  # slowed
    assert parts["exposed pp"] > step.parts["bubble"] > 0


def test_a_step_as_predicted_has_no_causes_and_the_same_knobs(tmp_path):
    found = compare(read(tmp_path), JOB, EIGHT.config)
    assert found.causes == ()
    assert found.doubts == ()
    assert sum(line.measured_s for line in found.lines) == pytest.approx(
        found.measured.step_s, rel=2e-3
    )
    for line in found.lines:
        assert line.measured_s == pytest.approx(line.predicted_s, abs=0.01 * found.predicted_s)
    for key, rate in found.fitted.rates.as_dict().items():
        assert rate == pytest.approx(getattr(SHIPPED, key), rel=0.03), key
    assert abs(found.fitted.beside_s) < 0.01 * found.predicted_s
    assert "-0.000 s" not in {row[-1] for row in line_rows(found)}
    for knob in found.knobs:
        if abs(knob.gain) > 0.02:
            assert knob.gain == pytest.approx(planned_knobs()[knob.name], abs=0.02)
    # Gains add up: each is of the step that the one before leaves.
    left = found.measured.step_s
    for knob in found.together:
        left *= 1 - knob.gain
        assert knob.step_s == pytest.approx(left)


def test_a_slow_network_is_named_with_its_rate_and_what_eases_it(tmp_path):
    found = compare(read(tmp_path, links=4.0), JOB, EIGHT.config)
    (cause,) = found.causes
    assert cause.name == "exposed data"
    (link,) = found.links
    assert link.link == "network"
    expected = predict_step_rate()
    assert link.messages.bytes_per_s == pytest.approx(expected / 4, rel=0.01)
    assert f"gives {expected / 4e9:,.0f} of 400 GB/s" in cause.text
    assert "benchmark of that link" in cause.look
    assert found.fitted.rates.network == pytest.approx(SHIPPED.network / 4, rel=0.01)
    gains = {knob.name: knob.gain for knob in found.knobs}
    for name in ("keep weights after the forward pass", "reshard within the machine"):
        assert gains[name] > planned_knobs()[name] + 0.01
    assert cause.eased_by[0].gain == max(k.gain for k in cause.eased_by) > 0.05


def predict_step_rate():
    """Bytes a second of data ranks' messages as planned, with their hops."""
    busy = traces.message_seconds(JOB, SHIPPED)["data"]
    sent = [s for s in traces.collectives(JOB) if s.axis == "dp_shard"]
    return sum(s.wire_bytes * s.calls for s in sent) / busy


@pytest.mark.parametrize(
    ("how", "name", "said", "rate"),
    [
        ({"slower": {"products": 1.5}}, "products", "at 67 % of the expected rate", "matmul_16"),
        ({"slower": {"attention": 2}}, "attention", "flash::FlashAttnFwdSm90", "attention"),
        ({"slower": {"memory-bound": 2.1}}, "memory-bound", "eager blocks would take", "memory"),
        ({"waits_ms": 500}, "idle", "the longest 50", ""),
    ],
)
def test_each_slow_part_is_its_own_cause(tmp_path, how, name, said, rate):
    found = compare(read(tmp_path, **how), JOB, EIGHT.config, deep=False)
    assert found.causes[0].name == name
    assert said in found.causes[0].text
    assert found.together == ()
    if rate:
        rates = found.fitted.rates.as_dict() | {"memory": SHIPPED.memory / found.fitted.memory}
        assert rates[rate] < 0.75 * getattr(SHIPPED, rate)
        assert found.fitted.step(JOB).total_s == pytest.approx(found.measured.step_s, rel=0.03)
    else:  # no rate explains it, and no knob changes it
        assert found.fitted.beside_s == pytest.approx(0.5, abs=0.02)


def test_messages_that_nothing_hides(tmp_path):
    found = compare(read(tmp_path, overlap=False), JOB, EIGHT.config)
    assert not found.fitted.job.layout.overlap_data
    assert "layout.prefetch_forward" in found.causes[0].look
    told = re.search(r"as foreseen, a step would take ([\d.]+) s less", found.causes[0].text)
    as_foreseen = found.measured.step_s - predict_step(JOB).total_s
    assert told is not None
    assert float(told[1]) <= found.measured.parts["exposed data"]
    assert float(told[1]) == pytest.approx(as_foreseen, rel=0.3)
    assert found.links[0].messages.hidden_s == pytest.approx(0, abs=1e-3)


def test_short_pauses_make_the_host_slower():
    measured = parts_of_pauses(0.4)
    fitted = fit(JOB, measured)
    host = predict_step(fitted.job, fitted.rates).parts["host"]
    assert host == pytest.approx(0.4, rel=0.01)


def parts_of_pauses(seconds):
    step = predict_step(JOB)
    parts = predicted_parts(step)
    parts["idle"] += seconds
    from stepwell.plan.measured.parts import Measured

    return Measured(1, step.total_s + seconds, parts, {}, seconds, 1e-4, {})


def test_a_trace_of_something_else_is_refused_or_doubted(tmp_path):
    with pytest.raises(ConfigError, match=r"of 64 ranks, and 32 are planned; give --gpus 64"):
        compare(read(tmp_path), replace(JOB, layout=replace(LAYOUT, dp_shard=32)), EIGHT.config)
    stage2 = replace(JOB, layout=replace(LAYOUT, zero=2, reshard="never"))
    (doubt,) = compare(read(tmp_path), stage2, EIGHT.config, deep=False).doubts
    assert "the layout or the batch another" in doubt
    on_a100 = replace(JOB, cluster=cluster("a100-80g"))
    found = compare(read(tmp_path), on_a100, EIGHT.config)
    assert "NVIDIA H100 80GB HBM3 (h100-sxm), and a100-80g is planned" in found.doubts[0]
    assert "give --gpu h100-sxm" in found.doubts[0]
    assert found.lines
    assert not any((found.of_device, found.causes, found.knobs, found.together))


def test_a_trace_of_a_cpu_is_a_table_and_no_advice_for_a_gpu(tmp_path):
    of_cpu = replace(read(tmp_path, links=2.0), on_device=False, device="")
    found = compare(of_cpu, JOB, EIGHT.config)
    assert "it is of a CPU, and h100-sxm is planned" in found.doubts[0]
    assert found.lines
    assert not any((found.of_device, found.causes, found.knobs, found.together))
    for name in ("a device of next year", ""):  # kernels decide, not whether the device is named
        unknown = compare(replace(of_cpu, on_device=True, device=name), JOB, EIGHT.config)
        assert all((unknown.of_device, unknown.causes, unknown.knobs, unknown.together))
        assert unknown.doubts == ()


def test_tensor_ranks_and_stages(tmp_path):
    """TP 8 x PP 4: the first crosses NVLink, a stage waits in its messages."""
    layout = replace(LAYOUT, tp=8, pp=4, dp_shard=2, zero=1, reshard="never", global_batch_rows=16)
    m, k = traces.message, traces.kernel
    tensor = ("mesh_tp", 8)
    events = [
        k(traces.GEMM, 0, 400),
        m(traces.ALL_GATHER, 400, 460, 20, 8 * 2**30, "BFloat16", *tensor),
        m(traces.SEND_RECV, 460, 700, 30, 2**20, "BFloat16", "mesh_pp", 4),
        k(traces.ADAM, 700, 710), *traces.steps([(0, 710)], [(0, 720)]),
    ]  # fmt: skip
    trace = read_trace(traces.write(tmp_path / "t.json", traces.trace(events)))
    found = compare(trace, replace(JOB, layout=layout), EIGHT.config, deep=False)
    links = {link.axis: link for link in found.links}
    assert links["tp"].link == "scaleup"
    assert links["tp"].messages.bytes_per_s == pytest.approx(16 * 2**30 * 7 / 8 / 0.06)
    assert links["tp"].rated == 450e9
    lines = {line.name: line for line in found.lines}
    assert lines["exposed pp"].measured_s == pytest.approx(0.24)
    assert lines["exposed pp"].predicted_s > 0
    assert parts_of(trace, layout).parts["exposed tp"] == pytest.approx(0.06)


def gemms(seconds_alone, seconds_beside, num=24):
    """Products one after the other, every other one of which a gather covers."""
    events, now = [], 0.0
    for i in range(num):
        lasts = 1e3 * (seconds_beside if i % 2 else seconds_alone)
        events.append(traces.kernel(traces.GEMM, now, now + lasts, grid=[132, 1, 1]))
        if i % 2:
            sent = 2**28, "BFloat16", "mesh_fsdp", 64
            events.append(traces.message(traces.ALL_GATHER, now, now + lasts, 20, *sent))
        now += lasts + 0.01
    return [*events, traces.kernel(traces.FLASH, now, now + 300)], now + 300


def traced(tmp_path, events, until_ms, world=64):
    events = [*events, *traces.steps([(0, until_ms)], [(0, until_ms)])]
    return read_trace(traces.write(tmp_path / "t.json", traces.trace(events, world), packed=False))


@pytest.mark.parametrize("ratio", [1.0, 1.3])
def test_equal_products_tell_what_messages_beside_them_cost(tmp_path, ratio):
    events, until = gemms(0.05, ratio * 0.05)
    found = compare(traced(tmp_path, events, until), JOB, EIGHT.config, deep=False)
    hidden_s = found.measured.messages["data"].hidden_s
    assert found.measured.slowed == pytest.approx(1 - 1 / ratio)
    step = predict_step(found.fitted.job, found.fitted.rates)
    assert step.parts["contention"] == pytest.approx((1 - 1 / ratio) * hidden_s, rel=0.02)
    if ratio == 1:  # messages that slow nothing, and that products hide, gain nothing by ZeRO-1
        assert found.fitted.rates.contention == 0
        gains = {knob.name: knob.gain for knob in found.knobs}
        assert gains.get("ZeRO-1", 0.0) <= 0.005


def test_without_messages_nothing_is_slowed_by_them_and_their_lack_is_said(tmp_path):
    values = traces.planned(JOB)
    values["traceEvents"] = [e for e in values["traceEvents"] if "nccl" not in e["name"]]
    trace = read_trace(traces.write(tmp_path / "t.json", values))
    found = compare(trace, JOB, EIGHT.config)
    assert found.fitted.rates.contention == 0
    (doubt,) = found.doubts
    assert "the trace has no messages of data, and the plan " in doubt
    gains = {knob.name: knob.gain for knob in found.knobs}
    for name in ("ZeRO-1", "ZeRO-2", "PP 2", "keep weights after the forward pass"):
        assert gains.get(name, 0.0) <= 0.005, name


def test_messages_that_the_plan_has_none_of_are_said_and_in_the_table(tmp_path):
    group = "TENSOR_MODEL_PARALLEL_GROUP", 8
    events = [
        traces.kernel(traces.GEMM, 0, 1400), traces.kernel(traces.FLASH, 1400, 1700),
        traces.message(traces.ALL_GATHER, 1700, 1900, 20, 2**33, "BFloat16", *group),
    ]  # fmt: skip
    found = compare(traced(tmp_path, events, 1900), JOB, EIGHT.config, deep=False)
    (link,) = found.links
    assert (link.axis, link.link, link.predicted_bytes) == ("tp", "scaleup", 0)
    assert link.messages.bytes_per_s == pytest.approx(2**34 * 7 / 8 / 0.2)
    said = " ".join(found.doubts)
    assert "messages of tp are in the trace (14.00 GiB a step), and the plan has none" in said
    assert "no messages of data" in said
    cause = next(cause for cause in found.causes if cause.name == "exposed tp")
    assert "foresees no such messages" in cause.text


@pytest.mark.parametrize(
    "how",
    [
        {"slower": {"products": 0.75}},
        {"slower": {"products": 0.86}, "links": 3.0},
        {"slower": {"attention": 0.3}},
        {"slower": {"memory-bound": 2.3, "optimizer": 3.0}},
        {"links": 0.3},
        {"links": 6.0, "overlap": False, "waits_ms": 300},
    ],
)
def test_no_rate_beats_the_hardware_and_no_knob_saves_more_than_was_there(tmp_path, how):
    found = compare(read(tmp_path, **how), JOB, EIGHT.config, deep=False)
    rates, fitted = found.fitted.rates.as_dict(), found.fitted
    for name in ("matmul_16", "matmul_8", "attention", "memory", "scaleup", "network"):
        assert rates[name] <= 1, name
    assert fitted.beside_s >= 0
    whole = fitted.step(JOB).total_s + fitted.beside_s
    assert whole == pytest.approx(found.measured.step_s, rel=2e-3)
    measured = found.measured.parts
    before = predicted_parts(fitted.step(JOB))
    for knob in found.knobs:
        if knob.changed.layout and knob.changed.layout.global_batch_rows == 128:
            after = predicted_parts(fitted.step(replace(JOB, layout=knob.changed.layout)))
            for name, seconds in before.items():
                assert seconds - after[name] <= measured.get(name, 0.0) * 1.001, (knob.name, name)


def test_messages_that_hide_better_than_predicted_gain_no_more_than_they_cost(tmp_path):
    """A network at a third of its rate, of which computing hides most."""
    events = [e for e in traces.planned(JOB)["traceEvents"] if e["ph"] == "X"]
    events = [e for e in events if e["cat"] == "kernel" and "nccl" not in e["name"]]
    until = max((e["ts"] + e["dur"] - traces.EPOCH_US) / 1e3 for e in events)
    sent = message_events(JOB, until)
    scale = 3 * traces.message_seconds(JOB, SHIPPED)["data"] / sum(e["dur"] for e in sent) * 1e6
    for i, one in enumerate(sent):
        one["dur"] *= scale
        one["tid"] = 20 + i % 4
    found = compare(traced(tmp_path, [*events, *sent], until + 80), JOB, EIGHT.config, deep=False)
    cost_s = found.measured.parts["exposed data"] + found.fitted.step(JOB).parts["contention"]
    sends = found.measured.messages["data"]
    assert sends.hidden_s > 20 * sends.exposed_s
    gains = {knob.name: knob.gain for knob in found.knobs}
    for name in ("ZeRO-1", "ZeRO-2", "keep weights after the forward pass"):
        assert gains.get(name, 0.0) <= cost_s / found.measured.step_s + 1e-6, name


def test_attention_that_is_not_fused_is_told_and_not_blamed_on_memory(tmp_path):
    apart = replace(JOB, layout=replace(LAYOUT, flash=False))
    lines = {name: 1e3 * s for name, s in predicted_parts(predict_step(apart)).items()}
    products = lines["products"] + lines["attention"]
    until = products + lines["memory-bound"]
    softmax = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, false>"
    sent = message_events(JOB, until)
    events = [traces.kernel(traces.GEMM, 0, products), traces.kernel(softmax, products, until)]
    found = compare(traced(tmp_path, [*events, *sent], until), JOB, EIGHT.config, deep=False)
    cause = found.causes[0]
    assert cause.name == "attention"
    assert "no kernel of fused attention ran" in cause.text
    assert not {"products", "memory-bound"} & {cause.name for cause in found.causes}
    assert found.fitted.memory == pytest.approx(1, abs=0.05)
    assert found.fitted.rates.memory == SHIPPED.memory
    kept = [line for line in found.lines if line.name == "attention"]
    assert kept[0].measured_s == 0


def message_events(job, until_ms):
    """Gathers of a step, evenly over it."""
    sent = [s for s in traces.collectives(job) if s.kind == "all-gather" and s.axis == "dp_shard"]
    calls = sum(s.calls for s in sent)
    each, at, found = until_ms / calls / 2, 0.0, []
    for one in sent:
        for _ in range(one.calls):
            size = one.num_bytes // 2, "BFloat16", "mesh_fsdp", one.num_ranks
            found.append(traces.message(traces.ALL_GATHER, at, at + each, 20, *size))
            at += 2 * each
    return found


def test_slow_elementwise_kernels_say_nothing_of_adding_up_gradients_and_the_optimiser(tmp_path):
    layout = replace(LAYOUT, zero=1, reshard="never", reduce_every_micro_batch=False)
    job = replace(JOB, layout=layout)
    trace = read(tmp_path, job, slower={"memory-bound": 2.0})
    found = compare(trace, job, EIGHT.config, deep=False)
    planned, now = predict_step(job).parts, found.fitted.step(job).parts
    assert planned["gradient accumulation"] > 0
    for name in ("gradient accumulation", "optimizer"):
        assert now[name] == pytest.approx(planned[name], rel=0.02), name
    assert now["memory"] > 1.9 * planned["memory"]


def test_pauses_within_the_optimiser_are_its_own(tmp_path):
    values = traces.planned(JOB)
    step = next(e for e in values["traceEvents"] if e["name"] == traces.ADAM)
    start = (step["ts"] - traces.EPOCH_US) / 1e3
    events = [e for e in values["traceEvents"] if e["ph"] == "X" and e["name"] != traces.ADAM]
    events = [e for e in events if "ProfilerStep" not in e["name"] and e["cat"] == "kernel"]
    events += [traces.kernel(traces.ADAM, start + 3 * i, start + 3 * i + 0.1) for i in range(200)]
    until = start + 600
    name = "Optimizer.step#AdamW.step"
    events.append(traces.event(name, "gpu_user_annotation", start, until, traces.COMPUTE))
    found = compare(traced(tmp_path, events, until), JOB, EIGHT.config, deep=False)
    assert found.measured.optimizer_idle_s == pytest.approx(0.58, abs=0.005)
    cause = found.causes[0]
    assert cause.name == "idle"
    assert "s while the optimiser steps" in cause.text
    assert "is the optimiser fused" in cause.look
    assert "longer ones" not in cause.text
