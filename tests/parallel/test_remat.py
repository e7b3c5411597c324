"""Activation checkpointing: what is kept, that nothing else changes, and what it costs."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from stepwell.data.loader import rank_rows
from stepwell.data.packing import pack_rows
from stepwell.models.activations import BlockBytes, Segment, block_bytes, held, peak
from stepwell.models.flops import flops_per_token
from stepwell.models.recompute import checkpointed
from stepwell.parallel.mesh import init_distributed
from stepwell.parallel.remat import choices, recomputed, segments_of, square_root_groups
from stepwell.parallel.rules import AxisSizes, check_run
from stepwell.parallel.traffic import count_collectives, summary
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from stepwell.types import ConfigError
from tests.oracle import assert_same, base_run, global_batch, one_step
from tests.parallel.ranks import run_ranks

MODES = {
    "full": {"remat.mode": "full"},
    "every second": {"remat.mode": "every"},
    "every third": {"remat.mode": "every", "remat.every": 3},
    "sqrt": {"remat.mode": "sqrt"},
    "selective": {"remat.mode": "selective"},
    "some of each": {"remat.mode": "budget", "remat.budget_bytes": 210_000},
}
SINGLE = {"precision.compute": "fp32", "precision.param": "fp32", "precision.reduce": "fp32"}


def run_of(**overrides):
    return base_run(**{"model.num_layers": 5, "train.micro_batch_rows": 2, **overrides})


def kept(run, start=0, stop=None):
    stop = run.model.num_layers if stop is None else stop
    return [segment.keep for segment in segments_of(run, AxisSizes(), start, stop)]


# --- which blocks ----------------------------------------------------------------------------


def test_modes_say_what_each_block_keeps():
    assert kept(run_of()) == ["all"] * 5
    assert kept(run_of(**MODES["full"])) == ["input"] * 5
    assert kept(run_of(**MODES["selective"])) == ["products"] * 5
    assert kept(run_of(**MODES["every second"])) == ["input", "all", "input", "all", "input"]
    # A pipeline piece goes by the model's numbers.
    assert kept(run_of(**MODES["every third"]), 2, 5) == ["all", "input", "all"]


@pytest.mark.parametrize(
    ("n", "lengths"), [(1, [1]), (2, [2]), (4, [2, 2]), (5, [2, 3]), (9, [3] * 3), (16, [4] * 4)]
)
def test_square_root_groups(n, lengths):
    groups = square_root_groups(7, 7 + n)
    assert [stop - start for start, stop, _ in groups] == lengths
    assert groups[0].start == 7
    assert all(a.stop == b.start for a, b in pairwise(groups))
    assert {keep for _, _, keep in groups} == {"input"}


def test_peak_of_known_blocks():
    block = BlockBytes(all=10, products=6, input=1)
    assert peak([Segment(i, i + 1, "all") for i in range(4)], block, root=3) == 43
    full = [Segment(i, i + 1, "input") for i in range(4)]
    assert (held(full, block), peak(full, block)) == (4, 3 + 10)
    assert peak([Segment(0, 2, "input"), Segment(2, 4, "input")], block) == 1 + 20
    mixed = [Segment(0, 1, "input"), Segment(1, 2, "products"), Segment(2, 3, "all")]
    assert (held(mixed, block), peak(mixed, block)) == (17, 17)


# --- budget ----------------------------------------------------------------------------------


def test_budget_recomputes_as_little_as_fits():
    """Over all budgets: what is chosen fits, and no choice with less recomputation would."""
    run = run_of(**MODES["some of each"])
    block = block_bytes(run.model, 2 * run.data.seq_len, 8, 8)
    seen = set()
    for budget in range(100_000, 420_000, 5_000):
        run = run_of(**{"remat.mode": "budget", "remat.budget_bytes": budget})
        try:
            found = segments_of(run, AxisSizes(), 0, 4)
        except ConfigError:
            assert all(peak(choice, block) > budget for choice in choices(0, 4))
            continue
        assert peak(found, block) <= budget
        cost = _cost(found)
        assert all(peak(c, block) > budget for c in choices(0, 4) if _cost(c) < cost)
        seen |= {segment.keep for segment in found}
    assert seen == {"all", "products", "input"}


def _cost(segments):
    keeps = [segment.keep for segment in segments]
    return keeps.count("input"), keeps.count("products")


def test_budget_too_small_names_the_smallest():
    run = run_of(**{"remat.mode": "budget", "remat.budget_bytes": 1000})
    with pytest.raises(ConfigError, match="nearest legal value") as refused:
        check_run(run, 1)
    smallest = int(str(refused.value).split("remat.budget_bytes=")[2].split(",")[0])
    check_run(run_of(**{"remat.mode": "budget", "remat.budget_bytes": smallest}), 1)
    with pytest.raises(ConfigError, match=f"remat.budget_bytes={smallest}"):
        check_run(run_of(**{"remat.mode": "budget", "remat.budget_bytes": smallest - 1}), 1)


def test_context_ranks_share_the_tokens_of_a_budget():
    run = run_of(**MODES["some of each"])
    alone = segments_of(run, AxisSizes(), 0, 5)
    assert _cost(segments_of(run, AxisSizes(cp=2), 0, 5)) < _cost(alone)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="remat.mode='full'"):
        check_run(run_of(**MODES["sqrt"], **{"layout.compile": True}), 1)
    pipeline = {"layout.pp": 2, "layout.pp_schedule": "zbv", "layout.pp_stages_per_rank": 2}
    with pytest.raises(ConfigError, match="remat.mode='none'"):
        check_run(run_of(**MODES["full"], **pipeline), 2)
    check_run(run_of(**pipeline, **{"layout.zero": 1}), 2)


# --- nothing else changes --------------------------------------------------------------------


def step_each(runs):
    return [one_step(run) for run in runs]


@cache
def plain():
    return one_step(run_of())


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bit_equal_in_one_process(mode):
    overrides = {**SINGLE, **MODES[mode]}
    if mode == "some of each":  # of float64 activations
        overrides["remat.budget_bytes"] //= 2
    wanted, got = one_step(run_of(**SINGLE)), one_step(run_of(**overrides))
    assert set(kept(run_of(**overrides))) != {"all"}
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


LAYOUTS = {
    "": {},
    "kept gathered": {"layout.reshard_after_forward": "never"},
    "zero 1": {"layout.zero": 1},
    "far prefetch": {"layout.prefetch_forward": 3, "layout.prefetch_backward": 2},
}


def test_no_mode_changes_the_numbers_under_fsdp():
    runs = [run_of(**mode) for mode in MODES.values()]
    runs += [run_of(**layout, **MODES["sqrt"]) for layout in LAYOUTS.values()]
    for results in run_ranks(step_each, 2, runs):
        for got, name in zip(results, [*MODES, *LAYOUTS], strict=True):
            assert_same(got, plain(), 1e-9, name)


EVEN = {"model.vocab_size": 64, "model.d_ff": 28, "model.num_layers": 4}
AXES = {
    "tensor": {"layout.tp": 2, **MODES["full"]},
    "tensor, selective": {"layout.tp": 2, **MODES["selective"]},
    "pipeline": {"layout.pp": 2, **MODES["sqrt"]},
    "pipeline, selective": {"layout.pp": 2, **MODES["selective"]},
    "context": {"layout.cp": 2, **MODES["selective"]},
    "offload": {"offload.activations": True, **MODES["sqrt"]},
}


def test_recomputation_goes_with_every_axis():
    runs = [run_of(**EVEN, **axis) for axis in AXES.values()]
    wanted = one_step(run_of(**EVEN))
    for results in run_ranks(step_each, 2, runs):
        for got, name in zip(results, AXES, strict=True):
            # A pipeline's rank has the gradients of its own stages.
            assert_same(got, {key: wanted[key] for key in got}, 1e-9, name)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "every second", "selective"])
def test_compiled_blocks_are_computed_again(mode):
    run = run_of(**SINGLE, **MODES[mode], **{"layout.compile": True})
    assert_same(one_step(run), one_step(run_of(**SINGLE)), 1e-4, mode)


def two_steps_counted(runs):
    """Of the second step of each: collectives, and units that stayed gathered."""
    found = []
    for run in runs:
        mesh = init_distributed(run.layout)
        engine, batch = Engine(run, mesh=mesh), global_batch()
        share = rank_rows(batch.num_rows, mesh.data_rank, mesh.data_world)
        batch = batch.rows(share.start, share.stop)
        engine.forward_backward(batch, cross_entropy(run.loss))
        engine.optim_step()
        with count_collectives() as collectives:
            engine.forward_backward(batch, cross_entropy(run.loss))
        gathered = [n for n, p in engine.named_parameters() if not isinstance(p, DTensor)]
        found.append((summary(collectives), gathered))
    return found


def test_recomputation_gathers_no_weights_again():
    """A unit of FSDP2 has its weights when it is computed again; a group gathers each of its
    blocks once for both, and no block of another group."""
    more = {"model.num_layers": 6, "train.micro_batch_rows": 7}
    runs = [run_of(**more), run_of(**more, **MODES["full"]), run_of(**more, **MODES["selective"])]
    runs += [run_of(**more, **layout, **MODES["sqrt"]) for layout in ({}, LAYOUTS["far prefetch"])]
    for results in run_ranks(two_steps_counted, 2, runs):
        plain, *others = results
        assert all(other == plain for other in others)
        assert plain[0]["all-gather"][0] == 6 + 6 + 1
        assert plain[1] == []


class Chooser(nn.Module):
    """A router whose every forward pass would choose otherwise: its bias moves."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(8, 4))
        self.experts = nn.Parameter(torch.randn(4, 8))
        self.bias = torch.tensor([0.0, 1e3, 0.0, 0.0])
        self.chosen = []

    def forward(self, x_ND):
        scores_NX = (x_ND @ self.router).sigmoid()
        chosen_N1 = (scores_NX + self.bias).topk(1).indices
        self.bias = self.bias.roll(1)
        self.chosen.append(chosen_N1.flatten().tolist())
        return x_ND + scores_NX.gather(1, chosen_N1) * self.experts[chosen_N1.squeeze(1)]


def test_selective_keeps_a_router_choice():
    torch.manual_seed(0)
    chooser, x_ND = Chooser(), torch.randn(6, 8)
    gradients = {}
    for keep in ("all", "products", "input"):
        chooser.bias, chooser.chosen = torch.tensor([0.0, 1e3, 0.0, 0.0]), []
        chooser.zero_grad()
        checkpointed(chooser, keep, x_ND).square().sum().backward()
        assert chooser.experts.grad is not None
        gradients[keep] = chooser.experts.grad.clone()
        assert len(chooser.chosen) == (1 if keep == "all" else 2)
    assert torch.equal(gradients["products"], gradients["all"])
    # The same without the policy is wrong, or this test would show nothing.
    assert not torch.equal(gradients["input"], gradients["all"])


def test_scoring_computes_nothing_again():
    run = run_of(**MODES["full"])
    engine = Engine(run)
    with FlopCounterMode(display=False) as counter:
        engine.logprobs(global_batch())
    plain_engine = Engine(run_of())
    with FlopCounterMode(display=False) as plain_counter:
        plain_engine.logprobs(global_batch())
    assert counter.get_total_flops() == plain_counter.get_total_flops()


# --- what it costs ---------------------------------------------------------------------------


def full_rows(run):
    """Rows of one document each, without padding, a loss on every token."""
    rows, T = run.train.global_batch_rows, run.data.seq_len
    docs = [(torch.randint(0, run.model.vocab_size, (T + 1,)).tolist(), [1] * (T + 1))] * rows
    return pack_rows(docs, T, rows=[[i] for i in range(rows)])


def counted_flops(run):
    engine = Engine(run)
    with FlopCounterMode(display=False) as counter:
        engine.forward_backward(full_rows(run), cross_entropy(run.loss))
    return counter.get_total_flops()


@pytest.mark.parametrize("mode", MODES)
def test_recomputed_flops_are_counted(mode):
    """Over a whole step, to the last multiply-add."""
    run, num_tokens = run_of(**MODES[mode]), 7 * 16
    blocks, attention = recomputed(run, AxisSizes())
    per_token = flops_per_token(run.model, run.data.seq_len)
    extra = counted_flops(run) - counted_flops(run_of())
    assert extra == num_tokens * per_token.recomputed(blocks=blocks, attention=attention)
    assert (extra > 0) == (mode != "selective")


@pytest.mark.gpu
def test_selective_keeps_attention_on_a_card():
    """In 16 bits, attention is another operator there: neither it nor a product is done twice."""
    card = {"precision.compute": "bf16", "precision.param": "fp32", "precision.reduce": "fp32"}
    card |= {"model.head_dim": 16, "model.d_model": 64}
    plain, full = counted_flops(run_of(**card)), counted_flops(run_of(**card, **MODES["full"]))
    assert counted_flops(run_of(**card, **MODES["selective"])) == plain < full
