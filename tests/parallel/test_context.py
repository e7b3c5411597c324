"""Rows divided among context ranks: the gradient oracle, counts, scoring, and refusals."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from stepwell.data.batch import padding
from stepwell.data.packing import pack_rows
from stepwell.parallel.context import local_tokens, pairs_of_ranks
from stepwell.parallel.mesh import Mesh, all_reduce_sum, init_distributed
from stepwell.parallel.rules import AxisSizes, check_run
from stepwell.train.engine import Engine
from stepwell.train.heldout import heldout_loss
from stepwell.train.losses import Loss, LossSums, cross_entropy, masked_sum
from stepwell.train.step_flops import step_flops
from stepwell.types import ConfigError
from tests.oracle import assert_same, base_run, global_batch, take_step
from tests.parallel.ranks import run_jobs

MODELS = {
    "tied": {},
    "untied, qwen3": {"model.tied": False, "model.family": "qwen3", "model.qk_norm": True},
    "one key/value head, qwen2": {
        "model.family": "qwen2", "model.qkv_bias": True, "model.num_kv_heads": 1,
    },
    "mistral, window 3": {"model.family": "mistral", "model.sliding_window": 3},
    "mistral, window 7": {"model.family": "mistral", "model.sliding_window": 7},
}  # fmt: skip
LAYOUTS = {
    2: [{"layout.cp": 2}],
    4: [
        {"layout.cp": 4},
        {"layout.cp": 2, "layout.dp_shard": 2},
        {"layout.cp": 2, "layout.dp_replicate": 2},
        {"layout.cp": 2, "layout.tp": 2},
        {"layout.cp": 2, "layout.zero": 1},
    ],
}
METHODS = ("ring", "ulysses")
# Blocks are passed on 3 times a step, and once more where nothing is kept.
MODES = {2: {"none": 3, "full": 4, "selective": 3}, 4: {"full": 4}}


def run_of(model="tied", **overrides):
    """Sizes that divide where a tensor axis needs it."""
    values = {
        "model.vocab_size": 64,
        "model.d_ff": 28,
        "train.micro_batch_rows": 4,
        "train.global_batch_rows": 8,
        "loss.label_smoothing": 0.1,
        "optim.clip_norm": 0.05,
    }
    return base_run(**{**values, **MODELS[model], **overrides})


def short_rows():
    """Rows that are padding but for their first tokens: the ranks that have only late chunks, or
    only middle ones, have nothing else."""
    batch = pack_rows([([3, 5], [0, 1]), ([7, 1, 4], [0, 1, 1])], 16, rows=[[0], [1]])
    assert (batch.docs_BT >= 0).sum() == 3
    return batch


def weighted_rows():
    """Weights of several sizes, as advantages make them."""
    batch = global_batch()
    generator = torch.Generator().manual_seed(1)
    scale_BT = torch.rand(batch.weights_BT.shape, generator=generator) + 0.5
    return dataclasses.replace(batch, weights_BT=batch.weights_BT * scale_BT)


BATCHES = {
    "documents": global_batch,
    "short": short_rows,
    "weights": weighted_rows,
    "masked": lambda: global_batch().masked(),
}


def step(run, batch):
    """What one step finds and leaves; this rank's share of the batch."""
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    found = take_step(engine, share_of(BATCHES[batch](), mesh))
    return {k: v for k, v in found.items() if not k.startswith("state/")}


def share_of(batch, mesh):
    size = -(-batch.num_rows // mesh.data_world)
    return batch.rows(mesh.data_rank * size, (mesh.data_rank + 1) * size)


def settings(num_ranks):
    """Two ranks: every model and batch with both methods. Four: every layout, models in turn, and
    the batch that leaves ranks without tokens."""
    for number, method in enumerate(METHODS):
        for i, layout in enumerate(LAYOUTS[num_ranks]):
            layout = {**layout, "layout.cp_method": method}
            models = [*MODELS] if num_ranks == 2 else [[*MODELS][(i + 2 * number) % len(MODELS)]]
            for model in models:
                yield model, "documents", layout
            batches = BATCHES if num_ranks == 2 else ["short"]
            for batch in batches if i == 0 else ():
                yield "tied", batch, {**layout, "train.micro_batch_rows": 7 if number else 1}


@pytest.fixture(scope="module")
def references():
    models = {(model, "documents"): step(run_of(model), "documents") for model in MODELS}
    batches = {("tied", batch): step(run_of(), batch) for batch in BATCHES}
    return {**models, **batches}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    jobs: dict[str, tuple] = {
        f"{model}, {batch}, {overrides}": (step, run_of(model, **overrides), batch)
        for model, batch, overrides in settings(request.param)
    }
    for mode in MODES[request.param]:
        run = run_of(**LAYOUTS[request.param][0], **{"remat.mode": mode})
        jobs[f"exchanges, {mode}"] = (exchanges, run)
    return request.param, run_jobs(request.param, **jobs)


@pytest.fixture(scope="module")
def two():
    jobs: dict[str, tuple] = {}
    for method in METHODS:
        layout = {**LAYOUTS[2][0], "layout.cp_method": method}
        jobs[f"counts, {method}"] = (counts, run_of(**layout, **{"loss.keep_logits": "never"}))
        single = {
            "precision.param": "fp32",
            "precision.reduce": "fp32",
            "precision.compute": "bf16",
        }
        jobs[f"bf16, {method}"] = (step, run_of(**layout, **single), "documents")
    return run_jobs(2, **jobs)


def test_context_ranks_never_change_the_numbers(ranks, references):
    num_ranks, results = ranks
    for model, batch, overrides in settings(num_ranks):
        name = f"{model}, {batch}, {overrides}"
        for got in results[name]:
            assert_same(got, references[model, batch], 1e-9, name)


def counts(run):
    """What a step counted, and scores of full rows."""
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    batch = share_of(global_batch(), mesh)
    logprobs_BT = engine.logprobs(batch)
    heldout = heldout_loss(engine, global_batch())
    flops = torch.tensor([step_flops(run, batch)], dtype=torch.float64) * mesh.counts_rows
    stats = engine.forward_backward(batch, cross_entropy(run.loss))
    streamed = engine.forward_backward(with_stream(batch), streamed_loss())
    return logprobs_BT, heldout, all_reduce_sum(flops, mesh).item(), stats, streamed


def exchanges(run):
    """How often a step passes a block on."""
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    send, sent = dist.batch_isend_irecv, []

    def counting_send(ops):
        sent.append(ops)
        return send(ops)

    dist.batch_isend_irecv = counting_send
    try:
        engine.forward_backward(share_of(global_batch(), mesh), cross_entropy(run.loss))
    finally:
        dist.batch_isend_irecv = send
    return len(sent)


def test_recomputation_repeats_the_ring_only_where_it_keeps_nothing(ranks):
    """Keys and values in the forward pass and again, with their gradients, in the backward."""
    num_ranks, results = ranks
    once = (num_ranks - 1) * 2 * 2  # blocks of the model, micro-batches
    for mode, times in MODES[num_ranks].items():
        assert results[f"exchanges, {mode}"] == [times * once] * num_ranks, mode


def with_stream(batch):
    number_BT = torch.arange(batch.tokens_BT.numel()).reshape(batch.tokens_BT.shape)
    return dataclasses.replace(batch, extra={"advantages": number_BT.double()})


def streamed_loss():
    """A loss that reads a further stream, and whose denominator counts the rows."""

    def fn(outputs, batch):
        value = masked_sum(outputs.logprobs_BT * batch.extra["advantages"], batch.weights_BT)
        return LossSums({"rows": value}, {"stream": (value.detach(), batch.weights_BT.sum())})

    return Loss(frozenset({"logprobs"}), lambda batch: {"rows": batch.num_rows}, fn)


def test_counts_and_scores_are_those_of_one_process(two):
    wanted = counts(run_of(**{"loss.keep_logits": "never"}))
    for method in METHODS:
        for got in two[f"counts, {method}"]:
            torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=1e-6)
            assert got[1] == pytest.approx(wanted[1])
            assert got[2] == wanted[2]
            for a, b in zip(got[3:], wanted[3:], strict=True):
                assert a.metrics == pytest.approx(b.metrics)
                plain = [dataclasses.replace(x, metrics={}, loss=0.0) for x in (a, b)]
                assert plain[0] == plain[1]
                assert a.loss == pytest.approx(b.loss)


def test_bf16_follows_float64(two, references):
    wanted = references["tied", "documents"]
    for method in METHODS:
        for got in two[f"bf16, {method}"]:
            for name in (n for n in wanted if n.startswith("grad/")):
                pair = got[name].double().flatten(), wanted[name].flatten()
                assert torch.cosine_similarity(*pair, dim=0) > 0.99, name
            assert got["loss"].item() == pytest.approx(wanted["loss"].item(), rel=0.02)


# --- without ranks --------------------------------------------------------------------------------


def mesh_of(rank, cp):
    sizes = AxisSizes(cp=cp)
    return Mesh(world=cp, rank=rank, local_rank=rank, device=torch.device("cpu"), sizes=sizes)


def test_every_token_is_on_one_rank_with_all_its_streams():
    batch = with_stream(global_batch())
    parts = [local_tokens(batch, mesh_of(rank, 4)) for rank in range(4)]
    numbers = torch.cat([part.extra["advantages"].flatten() for part in parts])
    assert sorted(numbers.tolist()) == list(range(batch.tokens_BT.numel()))
    assert [part.tokens_BT.shape for part in parts] == [(7, 4)] * 4
    for part in parts:
        index = part.extra["advantages"].long()
        for name in ("tokens_BT", "targets_BT", "weights_BT", "positions_BT", "docs_BT"):
            assert torch.equal(getattr(part, name), getattr(batch, name).flatten()[index])
    assert parts[1].extra["advantages"][1].tolist() == [18, 19, 28, 29]


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"18 tokens.*layout\.cp=4.*is 16"):
        local_tokens(padding(1, 18), mesh_of(0, 4))


def test_pairs_of_ranks_are_balanced():
    one = dataclasses.replace(padding(1, 4096), docs_BT=torch.zeros(1, 4096, dtype=torch.int32))
    assert pairs_of_ranks(one, 4) == [4096 * 4097 // 8] * 4
    docs = [([1] * length, [1] * length) for length in (1500, 301, 900, 77, 1001, 318)]
    packed = pairs_of_ranks(pack_rows(docs, 4096, rows=[list(range(6))]), 4)
    assert max(packed) < 1.05 * sum(packed) / 4
    assert pairs_of_ranks(global_batch(), 2, window=1) == [56, 56]


@pytest.mark.parametrize(
    ("overrides", "world", "message"),
    [
        ({"data.seq_len": 18, "layout.cp": 4}, 4, r"data\.seq_len=18.*8.*data\.seq_len=16"),
        (
            {"layout.cp": 8, "layout.cp_method": "ulysses"}, 8,
            r"4 heads.*layout\.cp=8.*layout\.cp=4, or .*'ring'",
        ),
        (
            {"layout.cp": 4, "layout.tp": 2, "layout.cp_method": "ulysses"}, 8,
            r"2 heads.*layout\.tp=2.*layout\.cp=4.*layout\.cp=2",
        ),
    ],
)  # fmt: skip
def test_impossible_layouts_are_refused(overrides, world, message):
    with pytest.raises(ConfigError, match=message):
        check_run(run_of(**overrides), world)
    legal = {**overrides, "layout.cp_method": "ring", "data.seq_len": 16}
    assert check_run(run_of(**legal), world).cp == overrides["layout.cp"]


@pytest.mark.slow
def test_compiled_blocks_take_part(references):
    layout = {"layout.cp": 2, "layout.compile": True}
    jobs = {
        method: (step, run_of(**layout, **{"layout.cp_method": method}), "documents")
        for method in METHODS
    }
    for method, rank_results in run_jobs(2, **jobs).items():
        for got in rank_results:
            assert_same(got, references["tied", "documents"], 1e-9, method)
