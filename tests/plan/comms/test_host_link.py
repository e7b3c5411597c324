"""What offload moves over a GPU's PCIe link, by hand and against what the engine moves."""

import pytest

from stepwell.plan.cluster import cluster
from stepwell.plan.comms.collectives import collectives, totals
from stepwell.plan.comms.host_link import busiest_way, moved, traffic
from stepwell.plan.job import job_of
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from tests.plan.jobs import LLAMA_8B, job
from tests.plan.memory.test_ledger import full_batch, run_of

H100 = cluster("h100-sxm")
PARAMETERS = LLAMA_8B.parameters()
ROOT = 2 * LLAMA_8B.vocab_size * LLAMA_8B.d_model + LLAMA_8B.d_model


def sums(asked):
    found = {}
    for one in moved(asked):
        key = (one.what, one.way, one.phase)
        found[key] = found.get(key, 0.0) + one.total_bytes
    return found


def test_without_offload_the_traffic_is_that_of_the_collectives():
    assert moved(job()) == []
    assert traffic(job()) == totals(collectives(job()), H100)


def test_an_optimiser_on_the_host_takes_gradients_and_gives_weights():
    """Four bytes a parameter each way, once a step, of a rank's eighth."""
    found = sums(job(offload_optimizer=True))
    share = pytest.approx(4 * PARAMETERS / 8, rel=1e-6)
    assert found == {
        ("gradients", "to host", "optimizer"): share,
        ("parameters", "from host", "optimizer"): share,
    }


def test_parameters_come_for_each_gather_and_gradients_go_for_each_reduction():
    """Blocks twice for each micro-batch, the rest once; gradients once for each."""
    asked = job(offload_parameters=True, zero=3, reshard="always", reduce_every_micro_batch=True)
    m, found = asked.layout.num_micro_batches, sums(asked)
    assert m > 1
    assert found == {
        ("parameters", "from host", "forward"): pytest.approx(m * 4 * PARAMETERS / 8),
        ("parameters", "from host", "backward"): pytest.approx(m * 4 * (PARAMETERS - ROOT) / 8),
        ("gradients", "to host", "backward"): pytest.approx(m * 4 * PARAMETERS / 8),
    }
    whole = busiest_way(moved(asked), "backward")
    assert whole == pytest.approx(found["gradients", "to host", "backward"])


@pytest.mark.parametrize(
    ("layout", "gathers", "again", "reductions"),
    [
        ({"zero": 2, "reshard": "never"}, 1, 0, 4),
        ({"reshard": "node"}, 4, 0, 4),
        ({"reduce_every_micro_batch": False}, 4, 4, 1),
        ({"dp_shard": 4, "dp_replicate": 2}, 4, 4, 1),
    ],
)
def test_what_stays_on_gpus_is_not_moved_again(layout, gathers, again, reductions):
    """Between replicas gradients wait for the last micro-batch (parallel.fsdp)."""
    asked = job(offload_parameters=True, global_batch_rows=32, micro_batch_rows=1, **layout)
    part, found = 4 / asked.layout.dp_shard, sums(asked)
    blocks, times = part * (PARAMETERS - ROOT), gathers
    forward = found["parameters", "from host", "forward"]
    assert forward == pytest.approx(times * (blocks + part * ROOT))
    backward = found.get(("parameters", "from host", "backward"), 0.0)
    assert backward == pytest.approx(again * blocks)
    gradients = found["gradients", "to host", "backward"]
    assert gradients == pytest.approx(reductions * part * PARAMETERS)


@pytest.mark.parametrize("mode", ["none", "every", "selective", "full"])
def test_activations_are_those_that_the_engine_moves(mode):
    """Of two micro-batches."""
    plain = run_of(rows=8, num_layers=6, vocab_size=512, num_kv_heads=4, d_ff=512)
    more = {"remat": {"mode": mode}, "offload": {"activations": True}}
    values = {**plain.model_dump(exclude_none=True), **more}
    run = type(plain).parse(values, {"train.global_batch_rows": 16})
    engine = Engine(run)
    engine.forward_backward(full_batch(run), cross_entropy(run.loss))
    offload = engine.activation_offload
    assert offload is not None
    found = sums(job_of(run, 1, H100))
    assert found["activations", "to host", "forward"] == pytest.approx(
        offload.bytes_to_host, rel=0.1
    )
    back = found["activations", "from host", "backward"]
    assert back == pytest.approx(offload.bytes_to_device, rel=0.1)


def test_a_pipeline_counts_the_rank_that_moves_most():
    asked = job(offload_activations=True, pp=4, dp_shard=2, recompute="full")
    each = [sum(one.total_bytes for one in moved(asked, rank)) for rank in range(4)]
    assert sum(one.total_bytes for one in moved(asked)) == max(each)


def test_rows_of_the_traffic_say_each_way():
    found = traffic(job(offload_activations=True, offload_optimizer=True))
    of_host = {axis for axis, link in found if link == "pcie"}
    ways = ("activations to", "activations from", "gradients to", "parameters from")
    assert of_host == {f"{way} host" for way in ways}
