import json
import re

import pytest

from stepwell.plan.measured import trace as module
from stepwell.plan.measured.trace import (
    Message,
    entries,
    kind_of,
    message_of,
    own_pieces,
    read_trace,
)
from stepwell.types import DataError
from tests.plan.measured import traces
from tests.plan.measured.traces import GEMM

STEP = traces.steps([(0, 10)], [(0, 10)])


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
def test_the_reader_agrees_with_json_wherever_a_chunk_ends(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "CHUNK_CHARS", chunk)
    values = traces.trace([traces.kernel('ünïcode "quoted", [braces}', 0, 1), *STEP])
    values |= {"number": 12345.678, "empty": {}, "none": None, "list": [[], [1, 2.5e-3]]}
    for packed in (False, True):
        found = list(entries(traces.write(tmp_path / "t.json", values, packed)))
        assert [v for k, v in found if k == "traceEvents"] == values["traceEvents"]
        rest = {k: v for k, v in found if k != "traceEvents"}
        assert rest == {k: v for k, v in values.items() if k != "traceEvents"}


def test_a_bare_list_is_events(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([traces.kernel(GEMM, 0, 5), *STEP]))
    found = read_trace(path)
    assert len(found.pieces) == 1
    assert found.world is None
    assert (found.on_device, found.device) == (True, "")


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([traces.kernel(GEMM, 0, 5)], r"no whole step .*among 5 events.*log\.profile_step"),
        ([traces.kernel(GEMM, 0, 1), traces.kernel(GEMM, 0, 1, device=1), *STEP], "devices 0, 1"),
    ],
)
def test_what_is_refused(tmp_path, events, said):
    with pytest.raises(DataError, match=said):
        read_trace(traces.write(tmp_path / "t.json.gz", traces.trace(events)))


def test_a_step_in_which_nothing_ran_is_refused(tmp_path):
    events = [traces.kernel(GEMM, 0, 5), *traces.steps([(0, 10), (10, 20)], [(0, 10), (10, 20)])]
    with pytest.raises(DataError, match="in ProfilerStep#4 nothing ran"):
        read_trace(traces.write(tmp_path / "t.json.gz", traces.trace(events)))
    events.append(traces.kernel(GEMM, 19, 19.5))
    assert len(read_trace(traces.write(tmp_path / "t.json.gz", traces.trace(events))).steps) == 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"ts": "abc"}, "ts='abc' must be a finite number"),
        ({"ts": None}, "ts='None' must be a finite number"),
        ({"dur": float("nan")}, "dur='nan' must be a finite number"),
        ({"dur": -1}, "lasts dur=-1, which must be at least 0"),
        ({"args": [1]}, "args is list; an object is needed"),
        ({"args": {"device": {}}}, "device='{}' must be a finite number"),
        ({"args": {"Group size": "abc"}, "name": traces.ALL_GATHER}, "Group size='abc' must be"),
        (
            {"args": {"Group size": 1.5}, "name": traces.ALL_GATHER},
            "Group size=1.5 must be a whole",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path, values, said):
    events = [traces.kernel(GEMM, 0, 5) | values, *STEP]
    path = traces.write(tmp_path / "t.json.gz", traces.trace(events))
    with pytest.raises(DataError, match=f"t.json.gz: .*{re.escape(said)}"):
        read_trace(path)


@pytest.mark.parametrize("values", [{"cat": None}, {"cat": 7}, {"name": None}, {"args": None}])
def test_what_names_no_kernel_of_ours_is_none(tmp_path, values):
    events = [traces.kernel(GEMM, 0, 5), traces.kernel(GEMM, 6, 7) | values, *STEP]
    found = read_trace(traces.write(tmp_path / "t.json.gz", traces.trace(events)))
    assert len(found.pieces) == (1 if "cat" in values else 2)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"distributedInfo": [8]}, "distributedInfo is list"),
        ({"distributedInfo": {"world_size": "many"}}, "world_size='many'"),
        ({"deviceProperties": {"name": "x"}}, "deviceProperties is dict"),
        ({"deviceProperties": ["x"]}, "deviceProperties is str"),
    ],
)
def test_what_the_trace_says_of_itself_is_checked(tmp_path, about, said):
    path = traces.write(
        tmp_path / "t.json.gz", traces.trace([traces.kernel(GEMM, 0, 5), *STEP]) | about
    )
    with pytest.raises(DataError, match=said):
        read_trace(path)
    nothing = dict.fromkeys(about)
    traces.write(path, traces.trace([traces.kernel(GEMM, 0, 5), *STEP]) | nothing)
    assert read_trace(path).on_device


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_cut_off_is_refused(tmp_path, packed):
    path = traces.write(tmp_path / "t.json", traces.trace([traces.kernel(GEMM, 0, 5)]), packed)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="no whole trace"):
        read_trace(path)
    with pytest.raises(DataError, match="cannot read"):
        read_trace(tmp_path / "missing.json")
    path.write_text(f'{{"traceEvents": [{"[" * 100_000}')
    with pytest.raises(DataError, match="no whole trace"):
        read_trace(path)
    path.write_text("step_s,3\n")
    with pytest.raises(DataError, match="no whole trace"):
        read_trace(path)


def test_without_annotations_on_the_device_the_host_says_where_steps_are(tmp_path):
    host = [e for e in traces.steps([(0, 9), (10, 19)], [(1, 11), (11, 23)]) if e["tid"] == 4242]
    events = [traces.kernel(GEMM, 0, 5), traces.kernel(GEMM, 12, 15), *host]
    found = read_trace(traces.write(tmp_path / "t.json", traces.trace(events)))
    assert [w.number for w in found.steps] == [3, 4]
    assert [w.seconds for w in found.steps] == pytest.approx([0.010, 0.012])


def test_steps_that_do_not_follow_each_other_end_for_themselves(tmp_path):
    kernels = [traces.kernel(GEMM, 0, 5), traces.kernel(GEMM, 51, 55)]
    events = [*kernels, *STEP, *traces.steps([(50, 60)], [(50, 62)], first=9)]
    found = read_trace(traces.write(tmp_path / "t.json", traces.trace(events)))
    assert [w.seconds for w in found.steps] == pytest.approx([0.010, 0.012])


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ("_allgather_base", "all-gather"), ("allgather_into_tensor_coalesced", "all-gather"),
        ("_reduce_scatter_base", "reduce-scatter"), ("allreduce_coalesced", "all-reduce"),
        ("all_to_allv", "all-to-all"), ("broadcast", "broadcast"), ("recv", "recv"),
        ("AllGather_RING_LL", "all-gather"), ("SendRecv(nccl)", "send"), ("barrier", ""),
    ],
)  # fmt: skip
def test_the_kind_of_a_collective(told, kind):
    assert kind_of(told) == kind


def test_a_message_has_the_bytes_of_the_whole_tensor():
    args = {"Collective name": "_allgather_base", "dtype": "BFloat16", "Group size": 4}
    args |= {"In msg nelems": 100, "Out msg nelems": 400, "Process Group Description": "mesh_tp"}
    args["Process Group Ranks"] = "[8, 9, 10, 11]"
    told = Message("all-gather", 800, 4, "mesh_tp", (8, 9, 10, 11))
    assert message_of(traces.ALL_GATHER, args) == told
    # Some versions write strings in quotes of their own; some kernels carry nothing.
    args["dtype"] = '"BFloat16"'
    assert message_of(traces.ALL_GATHER, args) == told
    assert message_of(traces.ALL_GATHER, {}) == Message("all-gather", None, 0, "", ())
    assert message_of(GEMM, {}) is None


def test_own_time_of_nested_operators():
    calls = [(0.0, 10.0, "a"), (1.0, 4.0, "b"), (2.0, 3.0, "c"), (4.0, 6.0, "d"), (12.0, 13.0, "e")]
    found = [(p.name, p.start_s, p.end_s, p.within) for p in own_pieces(calls)]
    assert found == [
        ("a", 0.0, 1.0, ()), ("b", 1.0, 2.0, ("a",)), ("c", 2.0, 3.0, ("a", "b")),
        ("b", 3.0, 4.0, ("a",)), ("d", 4.0, 6.0, ("a",)), ("a", 6.0, 10.0, ()),
        ("e", 12.0, 13.0, ()),
    ]  # fmt: skip


def test_a_cpu_trace_has_operators_own_time_and_gloo_messages(tmp_path):
    host = {"stream": 4242}
    events = [
        traces.event("aten::linear", "cpu_op", 0, 6, **host),
        traces.event("aten::mm", "cpu_op", 1, 5, **host),
        traces.event("gloo:all_reduce", "user_annotation", 3, 8, 4250),
        traces.event("ProfilerStep#2", "user_annotation", 0, 10, **host),
    ]
    values = traces.trace(events, world=2) | {"deviceProperties": []}
    found = read_trace(traces.write(tmp_path / "t.json", values))
    assert (found.on_device, found.device) == (False, "")
    names = [(p.name, round(1e3 * (p.end_s - p.start_s), 3)) for p in found.pieces]
    # Of aten::mm at 0-1 that every hand-made trace has, what is within the first operator.
    assert ("gloo:all_reduce", 5.0) in names
    assert ("aten::mm", 4.0) in names
    assert sum(t for name, t in names if name == "aten::linear") == pytest.approx(1.0)
    assert found.pieces[0].message == Message("all-reduce", None, 0, "", ())
