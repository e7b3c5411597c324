"""The step time's physics: parts, limits, and directions in which it must move."""

from dataclasses import replace

import pytest

from stepwell.hardware import ACCELERATORS
from stepwell.plan.comms.collectives import collectives
from stepwell.plan.comms.host_link import busiest_way, moved
from stepwell.plan.comms.step import Phase
from stepwell.plan.steptime.coefficients import SHIPPED, UNMEASURED, fastest_matmul, peak
from stepwell.plan.steptime.muon import orthogonal_products
from stepwell.plan.steptime.step import PCIE, flops_per_token, ledger, predict_step, price
from stepwell.plan.steptime.waterfall import lines, waterfall
from stepwell.plan.steptime.work import work_of
from stepwell.types import ConfigError
from tests.plan.jobs import LLAMA_8B, LLAMA_70B, MIXTURE, changed, job

PIPELINE = job(LLAMA_70B, tp=4, pp=4, dp_shard=4, zero=1, program="megatron")
JOBS = {
    "zero-3": job(),
    "replicas": job(zero=0),
    "full": job(recompute="full"),
    "pipeline": PIPELINE,
    "interleaved": changed(PIPELINE, stages_per_rank=5, schedule="interleaved-1f1b"),
    "context": job(cp=2, dp_shard=4),
    "experts": job(MIXTURE, ep=8, program="megatron", zero=1),
    "8 bits": job(precision="fp8", recipe="tensorwise"),
    "4 bits": job(gpu="b200", precision="fp8", recipe="nvfp4"),
    "adapters": job(trained_share=0.005),
    "no flash": job(gpu="v100-32g", precision="fp16", flash=False, micro_batch_rows=1),
    "offload": job(offload_activations=True, offload_parameters=True, recompute="full"),
    "groups": job(dp_shard=8, dp_replicate=8, zero=1, program="megatron"),
    "across": job(dp_shard=64),
}


@pytest.mark.parametrize("name", JOBS)
def test_parts_add_up_and_none_is_negative(name):
    step = predict_step(JOBS[name])
    assert step.total_s == pytest.approx(sum(step.parts.values()))
    assert min(step.parts.values()) >= 0
    assert 0 < step.mfu <= step.hfu < 1


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("link", ["scaleup_bytes_per_s", "network_bytes_per_s", "pcie_bytes_per_s"])
def test_half_of_a_link_is_never_faster(name, link):
    asked = JOBS[name]
    slow = replace(asked.cluster, **{link: getattr(asked.cluster, link) / 2})
    assert predict_step(replace(asked, cluster=slow)).total_s >= predict_step(asked).total_s


@pytest.mark.parametrize("name", JOBS)
def test_half_of_the_memory_bandwidth_is_slower(name):
    asked = JOBS[name]
    device = asked.cluster.accelerator
    slow = replace(device, bandwidth_bytes_per_s=device.bandwidth_bytes_per_s / 2)
    slower = replace(asked, cluster=replace(asked.cluster, accelerator=slow))
    assert predict_step(slower).total_s > predict_step(asked).total_s


def test_the_mfu_is_the_useful_flops_over_the_peak():
    step = predict_step(job())
    matrices, attention = flops_per_token(LLAMA_8B, 8192)
    useful = 3 * (matrices + attention) * step.tokens / 8
    assert step.mfu == pytest.approx(useful / 989.4e12 / step.total_s)
    assert step.tokens_per_s_per_gpu == pytest.approx(64 * 8192 / 8 / step.total_s)


def test_twice_the_micro_batches_half_the_bubble():
    few, many = (predict_step(changed(PIPELINE, global_batch_rows=n)) for n in (256, 512))
    assert few.parts["bubble"] == pytest.approx(many.parts["bubble"], rel=0.02)
    assert few.bubble_share / many.bubble_share == pytest.approx(2, rel=0.1)


def test_the_bubble_of_even_stages_is_the_published_one():
    """(p-1)/m of a step's work; with v stages a rank, (p-1)/(v m) (2104.04473, 2.2)."""
    dims = replace(LLAMA_70B, vocab_size=256)
    plain = changed(PIPELINE, global_batch_rows=64, dp_shard=1, tp=1)
    plain = replace(plain, dims=dims)
    other = ("optimizer", "straggling", "contention", "gradient accumulation")
    other += ("exposed data", "exposed pp", "exposed world")
    for asked, expected in (
        (plain, 3 / 64),
        (changed(plain, stages_per_rank=5, schedule="interleaved-1f1b"), 3 / 5 / 64),
        (changed(plain, stages_per_rank=2, schedule="zbv"), 3 / 6 / 64),
        (changed(plain, stages_per_rank=2, schedule="dualpipev"), 3 / 3 / 64),
    ):
        parts = predict_step(asked).parts
        bubble = parts.pop("bubble")
        work = sum(seconds for name, seconds in parts.items() if name not in other)
        assert bubble / work == pytest.approx(expected, rel=0.02)


def test_one_stage_has_no_bubble():
    assert predict_step(job()).parts["bubble"] == 0


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_8_bits_are_faster_where_products_are_large(recipe):
    eight = predict_step(job(LLAMA_70B, "b200", precision="fp8", recipe=recipe))
    four = predict_step(job(LLAMA_70B, "b200", precision="fp8", recipe="nvfp4"))
    assert four.total_s < eight.total_s < predict_step(job(LLAMA_70B, "b200")).total_s


def test_8_bits_gain_nothing_where_products_are_small():
    """What is cast costs as much memory traffic as the products save."""
    small = replace(LLAMA_8B, d_model=256, num_heads=2, num_kv_heads=2, d_ff=512, vocab_size=512)
    gain = [
        predict_step(job(dims, zero=1)).total_s
        / predict_step(job(dims, zero=1, precision="fp8", recipe="tensorwise")).total_s
        for dims in (small, LLAMA_70B)
    ]
    assert gain[0] < 1.05 < gain[1]


def test_recomputing_blocks_costs_less_than_a_third():
    none, full = predict_step(job()), predict_step(job(recompute="full"))
    assert 1.15 < full.total_s / none.total_s < 1.4
    assert none.mfu > full.mfu
    assert full.hfu > full.mfu
    assert full.parts["recomputation"] > 0 == none.parts["recomputation"]


def test_communication_that_nothing_hides_is_exposed():
    apart = predict_step(job(dp_shard=64, overlap_data=False)).parts
    beside = predict_step(job(dp_shard=64)).parts
    assert apart["exposed data"] > 5 * beside["exposed data"]
    assert apart["contention"] < beside["contention"]


def test_what_hidden_messages_slow_hides_more_of_them():
    """Computing of w seconds that loses a share s of theirs hides w / (1 - s) seconds of messages:
    none is exposed up to there, and from there on a step takes as long as its messages."""
    asked = job(dp_shard=64, global_batch_rows=64)
    computing = _computing(predict_step(asked))
    shares = []
    for rate in (50e9, 4e9, 2e9):
        slow = replace(asked.cluster, network_bytes_per_s=rate)
        parts = predict_step(replace(asked, cluster=slow)).parts
        shares.append((parts["exposed data"] / computing, parts["contention"] / computing))
    assert shares[0][0] < 0.01 < shares[0][1]
    once, twice = (1 + sum(share) for share in shares[1:])
    assert min(exposed for exposed, _ in shares[1:]) > 0.1
    # Twice the messages, twice the step.
    assert twice == pytest.approx(2 * once, rel=0.05)


def test_gathers_by_single_parameters_wait_for_more_hops():
    of_blocks, of_parameters = (
        ledger(job(dp_shard=64, program="fsdp", flash=False, overlap_data=overlap)).flows
        for overlap in (True, False)
    )
    hops = [sum(f.hops for f in flows) for flows in (of_blocks, of_parameters)]
    network = [sum(f.network_s for f in flows) for flows in (of_blocks, of_parameters)]
    assert hops[1] > 5 * hops[0]
    assert network[1] == pytest.approx(network[0], rel=1e-3)


def test_a_slow_network_is_worse_for_tensor_ranks_across_machines():
    inside = predict_step(job(LLAMA_70B, tp=8, dp_shard=8, global_batch_rows=512))
    across = predict_step(job(LLAMA_70B, tp=16, dp_shard=4, global_batch_rows=512))
    assert across.parts["exposed tp"] > 2 * inside.parts["exposed tp"]


def test_messages_that_wait_for_a_network_slow_computing_less():
    """Than as many bytes that pass over the links inside a machine in the same time."""
    alone = job(LLAMA_70B, tp=8, dp_shard=8, global_batch_rows=512)
    led = ledger(alone)
    moved = [replace(f, moved_s=f.network_s + f.scaleup_s) for f in led.flows]
    slow, fast = price(replace(led, flows=tuple(moved)), SHIPPED), price(led, SHIPPED)
    assert 0.4 < fast.parts["contention"] / slow.parts["contention"] < 0.8


def test_the_host_launches_on_while_messages_are_waited_for():
    asked = job(MIXTURE, ep=8, program="megatron", zero=1, seq_len=1024)
    slow = replace(asked, cluster=replace(asked.cluster, scaleup_bytes_per_s=20e9))
    assert 0 < predict_step(slow).parts["host"] < predict_step(asked).parts["host"]


def test_experts_whose_exchange_is_overlapped_wait_less():
    apart, beside = (
        predict_step(job(MIXTURE, ep=8, program="megatron", zero=1, overlap_ep=overlap)).parts
        for overlap in (False, True)
    )
    assert beside["exposed ep"] == pytest.approx(0.4 * apart["exposed ep"])
    even = predict_step(job(MIXTURE, ep=8, program="megatron", zero=1, imbalance=1.0)).parts
    assert apart["exposed ep"] == pytest.approx(1.3 * even["exposed ep"], rel=0.02)


def test_small_kernels_wait_for_the_host():
    tiny = replace(LLAMA_8B, d_model=128, num_heads=1, num_kv_heads=1, d_ff=256, vocab_size=512)
    step = predict_step(job(tiny, seq_len=128))
    assert step.parts["host"] > 0.8 * step.total_s
    launches = predict_step(job(tiny, seq_len=128), SHIPPED.changed(launch_s=1e-6))
    assert launches.total_s < step.total_s / 2


def test_flash_attention_2_is_native_before_hopper():
    """Ada has Ampere's units for products: nothing newer is written for it."""
    slowed = set()
    for name in ACCELERATORS:
        plain = job(LLAMA_8B, gpu=name, precision="fp16")
        native = changed(plain, attention_kernel="native")
        slower = predict_step(plain).parts["attention"] / predict_step(native).parts["attention"]
        assert slower == pytest.approx(1) or slower == pytest.approx(1 / SHIPPED.attention_older)
        slowed |= {name} if slower > 1.01 else set()
    assert {"h100-sxm", "b200", "rtx5090", "mi300x"} <= slowed
    before = {"v100-32g", "a100-80g", "a10", "rtx3090", "rtx-a6000", "rtx4090", "l40s", "l4"}
    assert not before & slowed


def test_adapters_send_and_step_almost_nothing():
    full, few = predict_step(job(zero=1, program="megatron")), None
    few = predict_step(job(zero=1, program="megatron", trained_share=0.005))
    assert few.parts["optimizer"] < 0.01 * full.parts["optimizer"]
    assert few.parts["contention"] < 0.1 * full.parts["contention"]


def test_a_group_that_shards_hands_weights_out_inside_a_machine():
    """The gradients cross machines either way; the weights only without groups."""
    whole = ledger(job(dp_shard=64, zero=1, program="megatron"))
    group = ledger(job(dp_shard=8, dp_replicate=8, zero=1, program="megatron"))
    optimizer = [
        sum(f.network_s for f in led.flows if (f.axis, f.phase) == ("dp_shard", "optimizer"))
        for led in (whole, group)
    ]
    assert optimizer[0] > 0 == optimizer[1]
    assert sum(f.network_s for f in group.flows if f.phase == "backward") > 0


def test_an_optimiser_on_the_host_waits_for_the_host():
    """10^9 parameters a machine in .22 s (2101.06840), however fast the link is."""
    asked = job(offload_optimizer=True)
    parts = predict_step(asked).parts
    assert parts["optimizer"] == pytest.approx(8.03 * 0.22, rel=0.02)
    link = replace(asked.cluster, pcie_bytes_per_s=1e9)
    slow = predict_step(replace(asked, cluster=link)).parts
    assert slow["optimizer"] == pytest.approx(4 * 8.03 / 8 / PCIE, rel=0.02)


def test_copies_to_the_host_hide_beside_computing_and_no_longer():
    """Over a link that takes as long for one way as all computing, both ways leave as much open;
    over one that takes a fifth of it, none."""
    asked = job(dp_shard=1, zero=0, offload_activations=True, recompute="full")
    computing = _computing(predict_step(asked))
    saved = busiest_way(moved(asked), "forward")
    assert saved == busiest_way(moved(asked), "backward") > 0
    for share, left in ((0.2, 0.0), (1.0, 1.0), (3.0, 5.0)):
        link = replace(asked.cluster, pcie_bytes_per_s=saved / (PCIE * share * computing))
        parts = predict_step(replace(asked, cluster=link)).parts
        assert parts["exposed offload"] == pytest.approx(left * computing)


def test_messages_of_cards_without_fast_links_share_the_link_with_offload():
    """Messages that take no time by themselves still occupy it."""
    asked = job(gpu="rtx4090", dp_shard=4, micro_batch_rows=4)
    asked = changed(asked, offload_activations=True, offload_parameters=True)
    fast = {"scaleup_bytes_per_s": 1e15, "network_bytes_per_s": 1e15, "pcie_bytes_per_s": 1e10}
    asked = replace(asked, cluster=replace(asked.cluster, **fast))
    step = predict_step(asked)
    phases: tuple[Phase, ...] = ("forward", "backward")
    sent = sum(s.calls * s.wire_bytes for s in collectives(asked) if s.phase in phases)
    copied = sum(busiest_way(moved(asked), phase) for phase in phases)
    assert sent > copied / 100
    expected = (sent + copied) / (PCIE * 1e10) - _computing(step)
    assert step.parts["exposed offload"] == pytest.approx(expected, rel=1e-3)


def _computing(step):
    names = ("products", "attention", "memory", "quantisation", "host", "recomputation")
    return sum(step.parts[name] for name in names)


@pytest.mark.parametrize(("num_gpus", "tera"), [(8192, 430), (16384, 400)])
def test_llama_3_405b(num_gpus, tera):
    """Of 2407.21783, table 4 (not in the published table): 16M tokens of 8192 on H100, TP 8, PP 16,
    gradients summed in 32 bits. Interleaved stages of one block, which the paper does not print."""
    large = replace(LLAMA_70B, num_layers=126, d_model=16384, num_heads=128, d_ff=53248)
    asked = job(
        large,
        tp=8,
        pp=16,
        dp_shard=num_gpus // 128,
        stages_per_rank=8,
        schedule="interleaved-1f1b",
        zero=1,
        reduce_every_micro_batch=False,
        global_batch_rows=2048,
        program="megatron",
        attention_kernel="native",
    )
    step = predict_step(asked)
    assert step.model_flops / step.total_s / 1e12 == pytest.approx(tera, rel=0.07)


def test_a_row_of_131072_tokens_on_16_context_ranks():
    """Of 2407.21783, table 4, on 16,384 GPUs: 380 TFLOP/s (its context ranks gather keys once, ours
    pass them around, and our causal attention is that of halves). Not faster than measured, and no
    longer bound by the ring's messages."""
    large = replace(LLAMA_70B, num_layers=126, d_model=16384, num_heads=128, d_ff=53248)
    asked = job(
        large,
        tp=8,
        cp=16,
        pp=16,
        dp_shard=8,
        stages_per_rank=8,
        schedule="interleaved-1f1b",
        zero=1,
        reduce_every_micro_batch=False,
        seq_len=131072,
        global_batch_rows=128,
        program="megatron",
        attention_kernel="native",
    )
    step = predict_step(asked)
    assert step.parts.get("exposed cp", 0.0) < 0.01 * step.total_s
    assert 320 < step.model_flops / step.total_s / 1e12 < 380


def test_adding_up_gradients_is_no_part_of_the_optimiser():
    """Sums of 4 bytes are read and written for each micro-batch, whatever the data ranks share."""
    few, many = (
        predict_step(job(zero=1, reduce_every_micro_batch=False, global_batch_rows=rows))
        for rows in (64, 128)
    )
    name = "gradient accumulation"
    assert many.parts[name] == pytest.approx(2 * few.parts[name])
    rate = job().cluster.accelerator.bandwidth_bytes_per_s * SHIPPED.memory
    assert few.parts[name] == pytest.approx(8 * LLAMA_8B.parameters() * 8 / rate, rel=0.01)
    assert many.parts["optimizer"] == few.parts["optimizer"]
    assert predict_step(job(reduce_every_micro_batch=True)).parts[name] == 0


def test_gradients_that_are_used_as_they_come_are_not_added_up():
    name = "gradient accumulation"
    kept, released = (
        predict_step(job(dp_shard=1, zero=0, global_batch_rows=1, release_gradients=released))
        for released in (False, True)
    )
    assert kept.parts[name] > 0 == released.parts[name]


def test_moments_in_8_bits_take_as_long_whatever_the_masters_are():
    """They are bound by bringing values to 8 bits: faster than 32 bits, slower than 16."""
    took = {
        (optimizer, state): predict_step(
            job(zero=0, optimizer=optimizer, state_precision=state)
        ).parts["optimizer"]
        for optimizer in ("adamw", "adamw8bit")
        for state in ("fp32", "bf16")
    }
    assert took["adamw", "bf16"] == took["adamw", "fp32"] / 2
    assert took["adamw8bit", "bf16"] == took["adamw8bit", "fp32"]
    assert took["adamw", "bf16"] < took["adamw8bit", "bf16"] < took["adamw", "fp32"]


def test_attention_waits_for_an_exchange_of_heads_and_not_for_a_ring():
    found = {}
    for method in ("ring", "ulysses"):
        counted = ledger(job(cp=8, dp_shard=1, cp_method=method))
        alone = [f.seconds(SHIPPED.scaleup, SHIPPED.network, SHIPPED.hop_s) for f in counted.flows
                 if f.axis == "cp"]  # fmt: skip
        found[method] = sum(alone), price(counted, SHIPPED).parts["exposed cp"]
    assert found["ulysses"][1] == found["ulysses"][0] > 0
    assert found["ring"][1] < found["ring"][0]


def test_muon_orthogonalises_whole_matrices():
    """By hand: 5 iterations of 4 m m n + 2 m m m, m the smaller side. Ours on every rank; where
    others divide it, 8 ranks take an eighth."""
    sides = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    flops = 32 * sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sides)
    asked = job(optimizer="muon")
    assert sum(n * p.flops for p, n in orthogonal_products(asked)) == flops
    for changes, divided in (({}, 1), ({"program": "fsdp"}, 8), ({"zero": 0}, 1)):
        muon, adamw = (
            predict_step(changed(asked, optimizer=kind, **changes)).parts["optimizer"]
            for kind in ("muon", "adamw")
        )
        assert flops / 794.5e12 / divided < muon - adamw < 1.3 * flops / 794.5e12 / divided
    half = sum(n * p.flops for p, n in orthogonal_products(job(optimizer="muon", pp=2)))
    assert half == flops / 2
    assert not orthogonal_products(job())


def test_muon_of_experts_orthogonalises_each():
    more = [
        sum(n * p.flops for p, n in orthogonal_products(job(dims, optimizer="muon", ep=8)))
        for dims in (MIXTURE, replace(LLAMA_8B, d_ff=4096))
    ]
    one = 5 * 6 * 4096**3
    router = 5 * (4 * 16 * 16 * 4096 + 2 * 16**3)
    assert more[0] - more[1] == 32 * (3 * (2 - 1) * one + router)


def test_a_precision_without_a_rate_is_refused():
    with pytest.raises(ConfigError, match=r"a100-80g has no peak for 'fp8'"):
        predict_step(job(gpu="a100-80g", precision="fp8", recipe="tensorwise"))


def test_the_fastest_product_is_measured_where_anybody_has():
    device = job().cluster.accelerator
    assert fastest_matmul(device, 16) == 794.5e12
    h20 = job(gpu="h20").cluster.accelerator
    assert fastest_matmul(h20, 16) == UNMEASURED * peak(h20, 16)
    b300 = job(gpu="b300").cluster.accelerator
    assert fastest_matmul(b300, 4) == 3 * fastest_matmul(b300, 8)


def test_a_plan_counts_a_block_once(monkeypatch):
    """405B on 16k GPUs costs as little as 8B on 8: nothing grows with blocks, ranks or batches."""
    calls = []
    monkeypatch.setattr(
        "stepwell.plan.steptime.work.fill", lambda *shape: calls.append(shape) or 1.0
    )
    large = replace(LLAMA_70B, num_layers=126, d_model=16384)
    asked = job(large, tp=8, pp=16, dp_shard=128, global_batch_rows=2048, zero=1)
    work_of(asked)
    assert len(calls) < 20
    assert len(collectives(asked)) < 60


def test_a_ledger_is_priced_without_being_counted_again():
    counted = ledger(PIPELINE)
    assert price(counted, SHIPPED).parts == predict_step(PIPELINE).parts


# --- the waterfall ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_the_waterfall_goes_from_the_peak_to_the_mfu(name):
    step = predict_step(JOBS[name])
    first, *losses = waterfall(step)
    assert first.share == pytest.approx(step.mfu)
    assert first.share + sum(loss.share for loss in losses) == pytest.approx(1)
    assert min(loss.seconds for loss in losses) > 0


def test_the_waterfall_as_text_ends_with_the_mfu_and_its_convention():
    step = predict_step(job())
    text = lines(step)
    assert f"MFU {100 * step.mfu:.1f} %" in text[-1]
    assert "causal attention counted by half" in text[-1]
    assert text[-2].split()[-2] == f"{100 * step.mfu:.1f}"
