"""FSDP2 against one process, in float64: every gradient, the norm and the weights after a step."""

import os
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stepwell.models.transformer import Decoder, ForwardOptions, init_rule
from stepwell.parallel.fsdp import apply_fsdp, begin_micro_batch
from stepwell.parallel.init import init_parameters
from stepwell.parallel.mesh import Mesh, init_distributed
from stepwell.parallel.traffic import count_collectives, summary
from stepwell.sections.layout import LayoutConfig, PrecisionConfig
from stepwell.sections.model import ModelConfig
from stepwell.sections.optim import OptimConfig
from stepwell.train.optim import build_optimizer, clip, grad_norm
from stepwell.types import ConfigError
from tests.parallel.ranks import run_jobs

# Nothing here is a multiple of 2, 3 or 4 where it need not be.
CFG = ModelConfig(
    vocab_size=67,
    num_layers=3,
    d_model=33,
    num_heads=2,
    num_kv_heads=1,
    head_dim=10,
    d_ff=37,
    tied=False,
)
EXACT = PrecisionConfig(param="fp64", compute="fp64", reduce="fp64")
ROWS, LENGTH, CLIP = 12, 9, 0.05


def _build(mesh, layout, cfg=CFG, precision=EXACT) -> Any:
    dtype = torch.float64 if precision.param == "fp64" else torch.float32
    with torch.device("meta"):
        decoder = Decoder(cfg).to(dtype)
    apply_fsdp(decoder, mesh, layout, precision)
    decoder.to_empty(device="cpu")
    init_parameters(decoder, 11, lambda name, shape: init_rule(cfg, name))
    return decoder


def _loss(decoder, rows, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    tokens_BT = torch.randint(0, CFG.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    weights_BT = torch.rand(ROWS, LENGTH, generator=generator).double()
    weights_BT[5] = 0.0
    B = len(rows)
    outputs = decoder(
        tokens_BT[rows, :-1],
        torch.arange(LENGTH).expand(B, -1),
        torch.arange(0, (B + 1) * LENGTH, LENGTH, dtype=torch.int32),
        tokens_BT[rows, 1:],
        options=ForwardOptions(dtype=dtype),
    )
    return -(outputs.logprobs_BT * weights_BT[rows]).sum() / weights_BT.sum()


def _full(value):
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def _step(mesh, layout, num_micro_batches, cfg=CFG):
    decoder = _build(mesh, layout, cfg)
    optimizer = build_optimizer(decoder.named_parameters(), OptimConfig(lr=1e-2))
    mine = torch.arange(ROWS).chunk(mesh.data_world)[mesh.data_rank]
    parts = mine.chunk(num_micro_batches)
    for number, rows in enumerate(parts):
        begin_micro_batch(decoder, layout, number == len(parts) - 1)
        _loss(decoder, rows).backward()
    parameters = dict(decoder.named_parameters())
    gradients = {name: _full(p.grad) for name, p in parameters.items()}
    norm = grad_norm(parameters.values())
    clip(parameters.values(), CLIP, norm)
    clipped = grad_norm(parameters.values())
    optimizer.step()
    return {
        "gradients": gradients,
        "norms": (norm, clipped),
        "weights": {name: _full(p) for name, p in parameters.items()},
        "moments": {name: _full(value) for name, value in optimizer.state_dict().items()},
        "units": sum(isinstance(m, FSDPModule) for m in decoder.modules()),
        "sharded": all(isinstance(p, DTensor) for p in parameters.values()),
    }


def _muon_step(mesh, layout):
    decoder = _build(mesh, layout)
    for block in list(decoder.blocks.values())[1:]:
        block.requires_grad_(False)
    config = OptimConfig(kind="muon", muon_lr=0.02)
    optimizer = build_optimizer(decoder.named_parameters(), config)
    _loss(decoder, torch.arange(ROWS).chunk(mesh.data_world)[mesh.data_rank]).backward()
    optimizer.step()
    parameters = dict(decoder.named_parameters())
    slots = {name: _full(value) for name, value in optimizer.state_dict().items()}
    return {name: _full(p) for name, p in parameters.items()}, slots


def _muon_on_ranks():
    return _muon_step(init_distributed(LayoutConfig()), LayoutConfig())


def test_muon_and_frozen_blocks_on_three_ranks(ranks):
    alone = Mesh(world=1, rank=0, local_rank=0, device=torch.device("cpu"))
    weights, slots = _muon_step(alone, LayoutConfig())
    assert not any(name.startswith("blocks.1") for name in slots)
    for got_weights, got_slots in ranks(3)["muon"]:
        _close(got_slots, slots)
        _close(got_weights, weights)


def _scored_between_steps(reshard):
    """A forward pass without a backward must leave nothing behind that is saved or loaded into."""
    layout = LayoutConfig(reshard_after_forward="always" if reshard else "never")
    mesh = init_distributed(layout)
    decoder = _build(mesh, layout, precision=PrecisionConfig())
    before = {name: _full(p) for name, p in decoder.named_parameters()}
    rows = torch.arange(ROWS).chunk(mesh.data_world)[mesh.data_rank]
    with torch.no_grad():
        first = _loss(decoder, rows, torch.bfloat16)
        after = dict(decoder.named_parameters())
        assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in after.values())
        assert all(torch.equal(_full(p), before[name]) for name, p in after.items())
        for p in after.values():
            p.mul_(2.0)
        assert _loss(decoder, rows, torch.bfloat16) != first
    _loss(decoder, rows, torch.bfloat16).backward()
    assert all(p.grad is not None for p in decoder.parameters())


@pytest.fixture(scope="module")
def ranks():
    """What each number of ranks computes, in one launch each: name of the job -> a value a rank."""
    jobs = {
        1: {"lossy": (_lossy_reduce,)},
        2: {
            "scored, reshard": (_scored_between_steps, True),
            "scored, no reshard": (_scored_between_steps, False),
            "stages": (_counts_by_stage,),
            "prefetch": (_gathered_ahead,),
        },
        3: {"muon": (_muon_on_ranks,), "bf16": (_bf16_and_memory,)},
        4: {"node": (_node,)},
    }
    for num_ranks, tied in TIED.items():
        jobs[num_ranks]["layouts"] = (_all_layouts, SETTINGS[num_ranks], tied)
    done: dict[int, dict[str, list[Any]]] = {}

    def results(num_ranks):
        if num_ranks not in done:
            done[num_ranks] = run_jobs(num_ranks, **jobs[num_ranks])
        return done[num_ranks]

    return results


def _counts(layout, num_micro_batches):
    mesh = init_distributed(layout)
    decoder = _build(mesh, layout)
    rows = torch.arange(ROWS).chunk(mesh.data_world)[mesh.data_rank]
    with count_collectives() as found:
        for number, part in enumerate(rows.chunk(num_micro_batches)):
            begin_micro_batch(decoder, layout, number == num_micro_batches - 1)
            _loss(decoder, part).backward()
    return {kind: number for kind, (number, _) in summary(found).items()}


def _counts_by_stage():
    found = {}
    for setting in COUNTS:
        zero, reduce, reshard = setting
        values = {"zero": zero, "reduce_gradients": reduce, "reshard_after_forward": reshard}
        found[setting] = _counts(LayoutConfig.model_validate(values), 3)
    return found


# What three micro-batches issue for 3 blocks and the root (whose weights stay for its backward).
COUNTS = {
    (0, "auto", "always"): {"all-reduce": 4},
    (1, "auto", "always"): {"all-gather": 4, "reduce-scatter": 4},
    (2, "auto", "always"): {"all-gather": 4, "reduce-scatter": 12},
    (3, "auto", "always"): {"all-gather": 21, "reduce-scatter": 12},
    (3, "step", "always"): {"all-gather": 21, "reduce-scatter": 4},
    (3, "auto", "never"): {"all-gather": 12, "reduce-scatter": 12},
}


def test_each_stage_communicates_what_it_must_and_no_more(ranks):
    assert ranks(2)["stages"] == [COUNTS, COUNTS]


def _node():
    """Two nodes of two ranks: the copy for the backward pass is gathered from the neighbour."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    layout = LayoutConfig(reshard_after_forward="node")
    mesh = init_distributed(layout)
    decoder = _build(mesh, layout)
    with count_collectives() as found:
        _loss(decoder, torch.arange(ROWS).chunk(4)[mesh.data_rank]).backward()
    return sorted(one.num_ranks for one in found if one.kind == "all-gather")


def test_reshard_by_node_gathers_within_the_node(ranks):
    assert ranks(4)["node"] == [[2, 2, 2, 4, 4, 4, 4]] * 4


def _gathered_ahead():
    return [_gathered(ahead) for ahead in (0, 1, 2)]


def _gathered(ahead):
    """How many units have been gathered when each block's forward, or backward, is under way."""
    layout = LayoutConfig(prefetch_forward=ahead, prefetch_backward=max(ahead, 1))
    mesh = init_distributed(layout)
    decoder = _build(mesh, layout)
    seen: list[int] = []
    with count_collectives() as found:
        for block in decoder.blocks.values():
            block.register_forward_pre_hook(lambda *_: seen.append(len(found)))
            block.mlp.register_full_backward_pre_hook(lambda *_: seen.append(len(found)))
        _loss(decoder, torch.arange(ROWS).chunk(2)[mesh.data_rank]).backward()
    gathers = [i for i, one in enumerate(found) if one.kind == "all-gather"]
    return [sum(i < count for i in gathers) for count in seen]


def test_prefetch_depth_is_how_many_blocks_are_gathered_ahead(ranks):
    for none, one, two in ranks(2)["prefetch"]:
        assert none[:3] == [2, 3, 4]  # the root, and the blocks so far
        assert one[:3] == [3, 4, 4]
        assert two[:3] == [4, 4, 4]
        assert one[3:] == [6, 7, 7]  # the last block's weights, and the block's before it
        assert two[3:] == [7, 7, 7]


@pytest.mark.parametrize("job", ["scored, reshard", "scored, no reshard"])
def test_scoring_between_steps_leaves_float32_shards(ranks, job):
    assert ranks(2)[job] == [None, None]


def _all_layouts(settings, tied):
    cfg = CFG.model_copy(update={"tied": tied})
    results = []
    for replicate, reshard, num_micro_batches in settings:
        layout = LayoutConfig(
            dp_replicate=replicate, reshard_after_forward="always" if reshard else "never"
        )
        results.append(_step(init_distributed(layout), layout, num_micro_batches, cfg))
    return results


def _close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


SETTINGS = {
    1: [(1, True, 2)],
    2: [(1, True, 1), (1, False, 3), (2, True, 2)],
    3: [(1, True, 1), (1, True, 2)],
    4: [(1, True, 1), (2, True, 3), (4, False, 1)],
}


TIED = {1: False, 2: True, 3: False, 4: False}


@pytest.mark.parametrize("num_ranks", SETTINGS)
def test_a_layout_never_changes_the_numbers(ranks, num_ranks):
    one = _step(
        Mesh(world=1, rank=0, local_rank=0, device=torch.device("cpu")),
        LayoutConfig(),
        1,
        CFG.model_copy(update={"tied": TIED[num_ranks]}),
    )
    assert one["units"] == 0
    assert one["norms"][1] == pytest.approx(CLIP, rel=1e-3)
    for results in ranks(num_ranks)["layouts"]:
        for setting, result in zip(SETTINGS[num_ranks], results, strict=True):
            assert result["units"] == CFG.num_layers + 1, setting
            assert result["sharded"]
            assert result["gradients"].keys() == one["gradients"].keys()
            for key in ("gradients", "norms", "weights", "moments"):
                _close(result[key], one[key])


def _bf16_and_memory():
    layout = LayoutConfig()
    mesh = init_distributed(layout)
    precision = PrecisionConfig()
    decoder = _build(mesh, layout, precision=precision)
    seen = []

    def look(module, inputs):
        seen.append((module.attn.wq.weight.dtype, inputs[0].dtype, inputs[1].cos.dtype))

    for block in decoder.blocks.values():
        block.register_forward_pre_hook(look)
    rows = torch.arange(ROWS).chunk(mesh.data_world)[mesh.data_rank]
    loss = _loss(decoder, rows, torch.bfloat16)
    loss.backward()
    local = sum(p.to_local().numel() for p in decoder.parameters())
    whole = sum(p.numel() for p in decoder.parameters())
    gradient = decoder.blocks["0"].attn.wq.weight.grad
    return seen, gradient.dtype, _full(gradient), local / whole


def test_bf16_compute_keeps_float32_masters_and_sharded_memory(ranks):
    single = _build(
        Mesh(world=1, rank=0, local_rank=0, device=torch.device("cpu")),
        LayoutConfig(),
        precision=PrecisionConfig(),
    )
    _loss(single, torch.arange(ROWS), torch.bfloat16).backward()
    expected = single.blocks["0"].attn.wq.weight.grad
    shares = []
    for seen, dtype, gradient, share in ranks(3)["bf16"]:
        assert set(seen) == {(torch.bfloat16, torch.bfloat16, torch.float32)}
        assert dtype == torch.float32
        assert (gradient - expected).norm() < 0.02 * expected.norm()
        shares.append(share)
    assert sum(shares) == pytest.approx(1.0)
    assert max(shares) < 0.36


def _lossy_reduce():
    layout = LayoutConfig()
    mesh = init_distributed(layout)
    with pytest.raises(ConfigError, match="the only legal value is 'fp64'"):
        _build(mesh, layout, precision=PrecisionConfig(param="fp64", compute="fp64"))


def test_float64_gradients_are_not_rounded_on_the_way(ranks):
    assert ranks(1)["lossy"] == [None]
