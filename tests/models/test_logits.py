"""Chunked token statistics against plain logits, and what they hold in memory."""

import pytest
import torch
import torch.distributed as dist

from stepwell.models import logits
from stepwell.models.logits import token_stats
from stepwell.parallel.traffic import count_collectives
from tests.parallel.ranks import run_jobs

N, D, V = 23, 8, 31


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def reference(hidden, weight, targets, temperature):
    scaled = hidden @ weight.T / temperature
    logprobs = scaled.log_softmax(-1)
    return (
        logprobs[torch.arange(N), targets],
        scaled.logsumexp(-1),
        -(logprobs.exp() * logprobs).sum(-1),
        scaled.mean(-1),
    )


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 23, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_values_and_gradients_equal_plain_logits(keep, chunk, temperature):
    hidden, weight, targets = inputs()
    stats = token_stats(
        hidden, weight, targets, chunk_tokens=chunk, keep_logits=keep,
        inverse_temperature=1 / temperature, with_entropy=True, with_mean=True,
    )  # fmt: skip
    wanted = reference(hidden, weight, targets, temperature)
    mix = torch.randn(4, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for got, want in zip(stats, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    total = torch.stack([(m * s).sum() for m, s in zip(mix, stats, strict=True)]).sum()
    wanted_total = torch.stack([(m * s).sum() for m, s in zip(mix, wanted, strict=True)]).sum()
    for got, want in zip(
        torch.autograd.grad(total, (hidden, weight)),
        torch.autograd.grad(wanted_total, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_temperature_known_answer():
    """T = .5, logits [2, 0]: log p = -0.01815, not -0.12693."""
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[2.0], [0.0]])
    stats = token_stats(hidden, weight, torch.tensor([0]), inverse_temperature=2.0)
    assert stats.logprobs.item() == pytest.approx(-0.01815, abs=1e-5)
    assert torch.equal(weight, torch.tensor([[2.0], [0.0]]))


def test_compiled_arithmetic_equals_eager():
    """What a GPU runs with layout.compile, on the CPU."""
    hidden, weight, targets = (x.detach() for x in inputs())
    wanted = logits._Wanted(scale=0.5, entropy=False, mean=True, probs=True)
    grads = tuple(torch.ones(N) * k for k in (1.0, 2.0, 0.0, 3.0))
    results = []
    for stats, grad in (
        (logits._chunk_stats, logits._chunk_grad),
        (logits._compiled(logits._chunk_stats), logits._compiled(logits._chunk_grad)),
    ):
        values = (hidden @ weight.t()).float()
        found = stats(values, targets, wanted)
        probs = values.clone()
        by = logits._coefficients((*grads[:2], None, grads[3]), found[0], found[2], 0.5, V)
        grad(values, targets, found[1], found[2], by, 0.5, True)
        results.append((*found, probs, values))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    stats = token_stats(hidden, weight, torch.tensor([1]), with_entropy=True)
    assert stats.logprobs.item() == -2e4
    (grad,) = torch.autograd.grad(stats.logprobs.sum() + stats.entropy.sum(), hidden)
    assert grad.isfinite().all()


def test_empty_selection_has_a_zero_gradient():
    hidden = torch.zeros(0, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    stats = token_stats(hidden, weight, torch.zeros(0, dtype=torch.int64))
    stats.logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_never_holds_all_logits_in_float32():
    """The largest float32 tensor that autograd keeps or makes is a chunk's, not N*V."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.bytes = max(self.bytes, x.numel() * x.element_size())
            return out

    hidden = torch.randn(512, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(2000, 16, requires_grad=True)
    with Largest() as largest:
        stats = token_stats(hidden, weight, torch.zeros(512, dtype=torch.int64), chunk_tokens=64)
        stats.logprobs.sum().backward()
    assert largest.bytes == 64 * 2000 * 4


@pytest.mark.parametrize("keep", [False, True])
def test_what_was_not_asked_for_is_zero_without_gradient(keep):
    hidden, weight, targets = inputs()
    stats = token_stats(hidden, weight, targets, keep_logits=keep)
    assert not stats.entropy.any()
    assert not stats.mean_logit.any()
    (grad,) = torch.autograd.grad((stats.entropy + stats.mean_logit).sum(), hidden)
    assert not grad.any()


# --- vocabulary in parts -------------------------------------------------------------------------

PARTS = 3
PART_CASES = [
    (keep, chunk, temperature, entropy)
    for keep in (False, True)
    for chunk in (7, 64)
    for temperature in (1.0, 0.5)
    for entropy in (False, True)
]


def part_inputs(dtype=torch.float64):
    """Every part holds some of the targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64)
    weight = 2 * torch.randn(3 * V, D, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3 * V, (N,), generator=generator)
    mix = torch.randn(4, N, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, mix


def objective(stats, mix):
    return torch.stack([(m * s).sum() for m, s in zip(mix, stats, strict=True)]).sum()


def stats_of_parts(dtype=torch.float64):
    """On each rank: case -> values, gradient of the hidden states (summed over the ranks, as the
    gathering before the head does) and of this rank's part of the weight."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    found = {}
    for case in PART_CASES:
        keep, chunk, temperature, entropy = case
        hidden, weight, targets, mix = part_inputs(dtype)
        part = weight.detach().chunk(PARTS)[world.rank()].clone().requires_grad_()
        with count_collectives() as sent:
            stats = token_stats(
                hidden, part, targets, chunk_tokens=chunk, keep_logits=keep,
                inverse_temperature=1 / temperature, with_entropy=entropy, with_mean=True,
                tp=world,
            )  # fmt: skip
            grads = torch.autograd.grad(objective(stats, mix), (hidden, part))
        dist.all_reduce(grads[0])
        found[case] = [x.detach() for x in (*stats, *grads)], sent
    empty = token_stats(part_inputs()[0][:0], part, targets[:0], tp=world)
    return found, [x.shape for x in empty]


@pytest.fixture(scope="module")
def parts():
    return run_jobs(PARTS, exact=(stats_of_parts,), bf16=(stats_of_parts, torch.bfloat16))


@pytest.mark.parametrize("case", PART_CASES)
def test_parts_of_the_vocabulary_equal_the_whole(parts, case):
    _, _, temperature, entropy = case
    hidden, weight, targets, mix = part_inputs()
    assert targets.div(V, rounding_mode="floor").unique().numel() == PARTS
    wanted = list(reference(hidden, weight, targets, temperature))
    if not entropy:
        wanted[2] = torch.zeros_like(wanted[2])
    grads = torch.autograd.grad(objective(wanted, mix), (hidden, weight))
    results = [rank[0][case][0] for rank in parts["exact"]]
    for rank in results:
        for got, want, first in zip(rank[:4], wanted, results[0], strict=False):
            torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-11)
            assert torch.equal(got, first)
        torch.testing.assert_close(rank[4], grads[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(
        torch.cat([rank[5] for rank in results]), grads[1], rtol=0, atol=1e-10
    )


def test_parts_exchange_one_small_message(parts):
    """Four numbers a token, gathered once forward and never backward."""
    for found, _ in parts["exact"]:
        for _, sent in found.values():
            (message,) = sent
            assert message.kind == "all-gather"
            assert message.num_bytes <= 4 * PARTS * 8 * 64


def test_parts_in_bfloat16_follow_the_whole(parts):
    for case in PART_CASES:
        keep, chunk, temperature, entropy = case
        hidden, weight, targets, mix = part_inputs(torch.bfloat16)
        whole = token_stats(
            hidden, weight, targets, chunk_tokens=chunk, keep_logits=keep,
            inverse_temperature=1 / temperature, with_entropy=entropy, with_mean=True,
        )  # fmt: skip
        grads = torch.autograd.grad(objective(whole, mix), (hidden, weight))
        results = [rank[0][case][0] for rank in parts["bf16"]]
        for got, want in zip(results[0][:4], whole, strict=True):
            torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=2e-5)
        got_weight = torch.cat([rank[5] for rank in results])
        for got, want in ((results[0][4], grads[0]), (got_weight, grads[1])):
            error = (got.float() - want.float()).abs().max() / want.float().abs().max()
            assert error < 0.02


def test_no_token_at_all_in_parts(parts):
    assert parts["exact"][0][1] == [torch.Size([0])] * 4
