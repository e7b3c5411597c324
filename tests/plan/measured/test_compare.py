from dataclasses import replace
from functools import cache

import pytest

from stepwell.plan.cluster import cluster
from stepwell.plan.dims import find_model
from stepwell.plan.explain.knobs import knobs
from stepwell.plan.job import Arrangement, Job
from stepwell.plan.measured.compare import compare, fit, predicted_parts, task_of
from stepwell.plan.measured.parts import parts_of
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
        rates = found.fitted.rates.as_dict()
        assert rates[rate] < 0.75 * getattr(SHIPPED, rate)
        assert predict_step(found.fitted.job, found.fitted.rates).total_s == pytest.approx(
            found.measured.step_s, rel=0.03
        )
    else:  # no rate explains it, and no knob changes it
        assert found.fitted.beside_s == pytest.approx(0.5, abs=0.02)


def test_messages_that_nothing_hides(tmp_path):
    found = compare(read(tmp_path, overlap=False), JOB, EIGHT.config)
    assert not found.fitted.job.layout.overlap_data
    assert "layout.prefetch_forward" in found.causes[0].look
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
