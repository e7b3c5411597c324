"""The traffic ledger by itself; tests/plan/dryrun/test_dryrun.py holds it against the program."""

import subprocess
import sys
from dataclasses import replace

import pytest

from stepwell.config import Run
from stepwell.parallel.wire import wire_bytes
from stepwell.plan.cluster import cluster
from stepwell.plan.comms.collectives import collectives, lines, totals
from stepwell.plan.comms.step import num_micro_batches
from stepwell.plan.job import Experts, Job, job_of
from stepwell.presets import preset
from stepwell.types import ConfigError

H100 = cluster("h100-sxm")


def job(world=64, program="stepwell", **layout) -> Job:
    run = Run.parse(
        {"model": preset("llama3-8b").model_dump(exclude_none=True), "data": {"seq_len": 4096}},
        {
            "train.micro_batch_rows": 1,
            "train.global_batch_rows": layout.pop("rows", 128),
            **{f"layout.{key}": value for key, value in layout.items()},
        },
    )
    found = job_of(run, world, H100)
    return replace(found, layout=replace(found.layout, program=program))


def sums(found: Job, *by: str) -> dict:
    return totals(collectives(found), H100, by)


def test_the_ledger_imports_no_torch():
    code = "import sys, stepwell.plan.comms.collectives; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_ring_formulas():
    assert wire_bytes("all-gather", 800, 8) == wire_bytes("reduce-scatter", 800, 8) == 700
    assert wire_bytes("all-reduce", 800, 8) == 1400
    assert wire_bytes("all-to-all", 800, 8) == wire_bytes("broadcast", 800, 8) == 700
    assert (wire_bytes("send", 800, 8), wire_bytes("recv", 800, 8)) == (800, 0)
    assert wire_bytes("all-reduce", 800, 1) == 0
    with pytest.raises(KeyError):
        wire_bytes("gossip", 1, 2)


@pytest.mark.parametrize(
    ("zero", "expected"), [(0, 2 * 4), (1, 2 + 4), (2, 2 + 4 * 2), (3, 2 * 2 * 2 + 4 * 2)]
)
def test_the_volume_of_each_zero_stage(zero, expected):
    """In bytes a parameter (weights in 2, gradients in 4), for two micro-batches: ZeRO, section 7,
    with one gather less for what is not in the blocks."""
    found = sums(job(zero=zero), "axis")
    parameters = job().dims.parameters()
    sent = sum(total.wire_bytes for (axis,), total in found.items() if axis != "world")
    root = 2 * 2 * 2 * job().dims.embedding_parameters if zero == 3 else 0
    assert sent == pytest.approx((expected * parameters - root) * 63 / 64, rel=0.001)


def test_links_by_stride_and_machines():
    found = {one.axis: one.link(H100) for one in collectives(job(tp=8, pp=4))}
    assert found["tp"] == "scaleup"
    assert found["pp"] == found["world"] == "network"
    assert {one.stride for one in collectives(job(tp=8)) if one.axis == "dp_shard"} == {8}
    near = {one.axis: one.link(H100) for one in collectives(job(world=8, pp=2, tp=4))}
    assert near["pp"] == "scaleup"
    # Stages share machines, and the second machine begins between two of them.
    across = {one.axis: one.link(H100) for one in collectives(job(world=16, pp=4))}
    assert across["pp"] == "network"
    # First and last stage share a tied embedding.
    for world, link in ((8, "scaleup"), (16, "network")):
        whole = job(world=world, pp=2, program="megatron")
        whole = replace(whole, dims=replace(whole.dims, tied=True))
        (ends,) = (one for one in collectives(whole, 0) if one.purpose == "tied embedding")
        assert (ends.stride, ends.link(H100)) == (world // 2, link)
    pcie = cluster("l40s")
    assert {one.link(pcie) for one in collectives(job(world=8, tp=8))} == {"pcie"}
    assert "network" in {one.link(pcie) for one in collectives(job(world=16, tp=8))}


def test_messages_of_a_ring():
    by_kind = {one.kind: one for one in collectives(job(world=16, dp_replicate=2, pp=2))}
    assert by_kind["all-gather"].num_messages == by_kind["all-gather"].num_ranks - 1
    assert by_kind["all-reduce"].num_messages == 2 * (by_kind["all-reduce"].num_ranks - 1)
    assert (by_kind["send"].num_messages, by_kind["recv"].num_messages) == (1, 0)


def test_the_busiest_rank_is_the_default():
    found = job(pp=4)

    def wire(sent):
        return sum(one.calls * one.wire_bytes for one in sent)

    each = [wire(collectives(found, rank)) for rank in range(4)]
    assert wire(collectives(found)) == max(each)
    assert len(set(each)) > 1
    for wrong in (-1, 4):
        with pytest.raises(ConfigError, match=f"pp_rank={wrong} is not among the 4 ranks"):
            collectives(found, wrong)


def test_a_pipeline_sends_what_the_next_rank_receives():
    found = job(pp=4, tp=2)
    for rank in range(3):
        sent = [one for one in collectives(found, rank) if one.kind == "send"]
        got = [one for one in collectives(found, rank + 1) if one.kind == "recv"]
        ahead = next(one for one in sent if one.purpose == "activations")
        behind = next(one for one in got if one.purpose == "activations")
        assert (ahead.num_bytes, ahead.calls) == (behind.num_bytes, behind.calls)
        assert ahead.num_bytes == 2 * 4096 * 4096 // 2
        assert ahead.calls == num_micro_batches(found.layout) == 16


def test_v_shaped_pipelines_turn_round_without_a_message():
    found = job(pp=4, pp_schedule="zbv", pp_stages_per_rank=2, reshard_after_forward="never")
    last = [one for one in collectives(found, 3) if one.purpose == "activations"]
    assert {one.kind: one.calls // num_micro_batches(found.layout) for one in last} == {
        "send": 1,
        "recv": 1,
    }


def test_megatron_gathers_inputs_again_and_weights_once():
    ours, theirs = job(tp=8, zero=1), job(tp=8, zero=1, program="megatron")
    phase = {key[0]: total.calls for key, total in sums(theirs, "purpose").items()}
    assert phase["gather inputs again"] == (2 * 32 + 1) * 16
    assert phase["gather weights"] == phase["reduce gradients"] == 1
    tp = [sums(one, "axis")[("tp",)].wire_bytes for one in (ours, theirs)]
    assert tp[1] / tp[0] == pytest.approx(5 / 4, rel=0.02)
    plain = replace(theirs, layout=replace(theirs.layout, sequence_parallel=False))
    kinds = {key[0] for key in sums(plain, "kind", "axis") if key[1] == "tp"}
    assert kinds == {"all-reduce"}
    assert sums(plain, "axis")[("tp",)].wire_bytes == pytest.approx(tp[0], rel=0.02)


def test_experts_exchange_tokens():
    base = job(tp=1, rows=64)
    dims = replace(base.dims, experts=Experts(num_experts=64, top_k=4, d_ff=1024))
    for ep, expected in ((1, 0), (8, 4 * 32)):
        layout = replace(base.layout, ep=ep, zero=1, program="megatron")
        found = collectives(Job(dims, layout, H100))
        tokens = [one for one in found if one.kind == "all-to-all"]
        assert sum(one.calls for one in tokens) == expected
        assert {one.num_bytes for one in tokens} <= {2 * 4096 * 4 * 4096}
        gradients = next(one for one in found if one.axis == "edp" and one.kind != "all-gather")
        assert gradients.num_ranks == 64 // ep
        assert gradients.num_bytes == 4 * 32 * 64 * 3 * 4096 * 1024 // ep


def test_a_table_by_axis_and_link():
    text = "\n".join(lines(collectives(job(tp=8)), H100))
    assert "tp            scaleup" in text
    assert "dp_shard      network" in text
