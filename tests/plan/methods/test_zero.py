"""The table of ZeRO stages: known figures, both sides of what fits, and what our engine sends."""

import json

import pytest

from stepwell.hardware import GIB
from stepwell.plan.cluster import cluster
from stepwell.plan.comms.collectives import collectives
from stepwell.plan.footprint.footprint import footprint
from stepwell.plan.job import Arrangement, Job, dims_of
from stepwell.plan.memory.ledger import zero_bytes_per_parameter
from stepwell.plan.methods.zero import fewest_gpus, zero_table
from stepwell.plan.search.space import CHUNK_TOKENS
from stepwell.plan.steptime.coefficients import SHIPPED
from stepwell.presets import PRESETS
from stepwell.types import ConfigError

LLAMA_70B = dims_of(PRESETS["llama3-70b"], "llama3-70b")
H100 = cluster("h100-sxm")


def test_a_70b():
    """1,129 GB of state: 8 GPUs of 85 GB have 679 GB between them."""
    table = zero_table(LLAMA_70B, H100, 8)
    assert table.parameters == 70_553_706_496
    assert 16 * table.parameters / 1e9 == pytest.approx(1128.86, abs=0.01)
    assert [row.total / 1e9 for row in table.rows] == pytest.approx(
        [1128.9, 388.0, 264.6, 141.1], abs=0.05
    )
    for row in table.rows:
        assert row.total == pytest.approx(
            zero_bytes_per_parameter(row.stage, 8) * table.parameters, rel=1e-12
        )
        assert not row.fits
    assert [row.fewest_gpus for row in table.rows] == [None, None, None, 14]
    assert [row.weights for row in table.rows] == pytest.approx([141.1e9] * 3 + [17.6e9], rel=1e-2)
    assert [row.gradients for row in table.rows] == pytest.approx(
        [141.1e9] * 2 + [17.6e9] * 2, rel=1e-2
    )


def test_from_when_on_it_fits():
    assert not zero_table(LLAMA_70B, H100, 13).rows[3].fits
    assert zero_table(LLAMA_70B, H100, 14).rows[3].fits
    for stage in range(4):
        for params, gpu in [(1_000_000_000, 5e9), (1_000_000_000, 16e9), (8_030_000_000, 80 * GIB)]:
            n = fewest_gpus(stage, params, gpu)
            if n is None:
                assert zero_bytes_per_parameter(stage, 10**9) * params > gpu
                continue
            assert zero_bytes_per_parameter(stage, n) * params <= gpu
            if n > 1:
                assert zero_bytes_per_parameter(stage, n - 1) * params > gpu
    assert fewest_gpus(1, 1_000, 4_000) is None  # nothing is left to divide the rest into
    assert fewest_gpus(1, 1_000, 4_001) == 12_000
    with pytest.raises(ConfigError, match="num_gpus=0 must be at least 1"):
        zero_table(LLAMA_70B, H100, 0)


def test_times_are_volumes_over_rates():
    eight = zero_table(LLAMA_70B, H100, 8, (1.0, 1.0))
    many = zero_table(LLAMA_70B, H100, 64, (1.0, 1.0))
    assert eight.links == "scaleup"
    assert many.links == "network"
    P = eight.parameters
    assert [row.sent_bytes / (2 * P) for row in eight.rows] == pytest.approx(
        [2 * 7 / 8] * 3 + [3 * 7 / 8]
    )
    ddp, *_, three = many.rows
    assert ddp.scaleup_s == pytest.approx(4 * P * 63 / 64 / 450e9)
    assert three.network_s == pytest.approx(6 * P * 63 / 64 / (8 * 50e9))  # eight cards
    half = zero_table(LLAMA_70B, H100, 64, efficiency=(0.25, 0.5))
    assert ddp.network_s is not None
    assert half.rows[0].network_s == pytest.approx(2 * ddp.network_s)
    assert half.rows[0].scaleup_s == pytest.approx(4 * ddp.scaleup_s)
    assert all(row.network_s is None for row in eight.rows)
    assert zero_table(LLAMA_70B, H100, 1).rows[3].sent_bytes == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_volumes_are_those_of_our_own_collectives(stage):
    """With one micro-batch and gradients in bf16. Pieces are rounded up to whole rows."""
    layout = Arrangement(
        seq_len=4096,
        micro_batch_rows=1,
        global_batch_rows=8,
        dp_shard=8,
        zero=stage,
        reshard="always" if stage == 3 else "never",
        reduce_every_micro_batch=stage >= 2,
        gradient_precision="bf16",
        recompute="none",
    )
    sent = collectives(Job(LLAMA_70B, layout, H100))
    found = sum(one.calls * one.wire_bytes for one in sent if one.num_bytes > 2**20)
    wanted = zero_table(LLAMA_70B, H100, 8).rows[stage].sent_bytes
    # stage 3 keeps the embedding and the head after the forward pass
    assert found == pytest.approx(wanted, rel=0.02)


def test_activations_are_told_to_fit_or_not():
    """By what a plan of the same layout says of a GPU, on both sides of what it has."""
    small = dims_of(PRESETS["llama3-8b"], "llama3-8b")
    for seq_len, fits in ((4096, True), (65536, False)):
        table = zero_table(small, H100, 64, seq_len=seq_len)
        layout = Arrangement(seq_len, 1, 64, dp_shard=64, zero=3, recompute="none",
                             loss_chunk_tokens=CHUNK_TOKENS)  # fmt: skip
        needs = table.rows[3].planned["none"]
        assert needs == footprint(Job(small, layout, H100)).total
        assert (needs <= table.gpu_bytes) == fits
        said = f"{needs / GIB:,.1f} GiB with recompute none ({'fits' if fits else 'does not fit'})"
        assert said in table.reasons()[3]
        assert f"a row of {seq_len:,} tokens" in table.reasons()[3]
        assert table.rows[3].planned["full"] < needs


def test_lines_say_why_and_json_has_the_same():
    table = zero_table(LLAMA_70B, H100, 8)
    text = "\n".join(table.lines())
    assert "70.6 billion parameters, 1,051 GiB" in text
    assert "DDP holds everything on each GPU, 1,051 GiB, on however many" in text
    assert "ZeRO-2 divides 14 of 16 bytes a parameter, which leaves 246.4 GiB" in text
    assert "are 131 GiB: no number of GPUs is enough" in text
    assert "from 14 GPUs on the state fits" in text
    assert "gradients of 2 bytes a parameter" in text
    assert f"{100 * SHIPPED.scaleup:.0f} % of the fast links' rate, as in a plan" in text
    assert "between" not in text.splitlines()[2]
    across = zero_table(LLAMA_70B, H100, 64).lines()
    assert "between" in across[2]
    assert f"{100 * SHIPPED.network:.0f} % of the network's" in across[-1]
    found = json.loads(json.dumps(table.as_json()))
    assert [row["total"] for row in found["rows"]] == [row.total for row in table.rows]
    assert found["rows"][3]["fewest_gpus"] == 14
    small = dims_of(PRESETS["llama3-8b"], "llama3-8b")
    assert "leaves" in zero_table(small, H100, 64).reasons()[3]
    assert "1.5 times as much" in zero_table(small, H100, 64).reasons()[3]
