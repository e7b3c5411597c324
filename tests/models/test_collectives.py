"""Collectives on two and three gloo ranks: values and gradients by hand."""

import pytest
import torch
import torch.distributed as dist

from stepwell.models import collectives
from tests.parallel.ranks import run_jobs

RANKS = 3


def group():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    return world


def of_rank(rank, rows=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 4, generator=generator, dtype=dtype)


def value_and_gradient(name, rows, dtype, *args):
    """The collective's value of this rank's x, and the gradient of x for a weight of the value's
    shape that is another on each rank."""
    world = group()
    x = of_rank(world.rank(), rows, dtype).requires_grad_()
    value = getattr(collectives, name)(x, world, *args)
    weight = of_rank(10 + world.rank(), value.shape[0], dtype)
    (value * weight).sum().backward()
    return value.detach(), x.grad


def uneven_exchange():
    """Rank s sends s + r rows to rank r."""
    rank = group().rank()
    send = [rank + r for r in range(RANKS)]
    receive = [s + rank for s in range(RANKS)]
    return value_and_gradient("all_to_all", sum(send), torch.float64, receive, send)


def refusals():
    found = []
    for name in ("reduce_scatter", "all_to_all"):
        with pytest.raises(ValueError, match="7 rows do not divide among 3 ranks") as error:
            getattr(collectives, name)(of_rank(0, 7), group())
        found.append(str(error.value))
    return found


@pytest.fixture(scope="module")
def found():
    return run_jobs(
        RANKS,
        all_gather=(value_and_gradient, "all_gather", 2, torch.float64),
        gather_same=(value_and_gradient, "gather_same", 2, torch.float64),
        reduce_scatter=(value_and_gradient, "reduce_scatter", 6, torch.float64),
        shared=(value_and_gradient, "shared", 2, torch.float64),
        shared_bf16=(value_and_gradient, "shared", 2, torch.bfloat16),
        all_to_all=(value_and_gradient, "all_to_all", 6, torch.float64),
        uneven=(uneven_exchange,),
        refusals=(refusals,),
    )


def weights(rows, dtype=torch.float64):
    return [of_rank(10 + rank, rows, dtype) for rank in range(RANKS)]


@pytest.mark.parametrize("name", ["all_gather", "gather_same"])
def test_gathering(found, name):
    whole = torch.cat([of_rank(rank) for rank in range(RANKS)])
    used = weights(6)
    for rank, (value, gradient) in enumerate(found[name]):
        assert torch.equal(value, whole)
        total = used[rank] if name == "gather_same" else torch.stack(used).sum(0)
        torch.testing.assert_close(gradient, total[2 * rank : 2 * rank + 2])


def test_reduce_scatter(found):
    total = torch.stack([of_rank(rank, 6) for rank in range(RANKS)]).sum(0)
    for rank, (value, gradient) in enumerate(found["reduce_scatter"]):
        torch.testing.assert_close(value, total[2 * rank : 2 * rank + 2])
        assert torch.equal(gradient, torch.cat(weights(2)))


def test_shared_weights_get_the_same_summed_gradient(found):
    for rank, (value, gradient) in enumerate(found["shared"]):
        assert torch.equal(value, of_rank(rank))
        torch.testing.assert_close(gradient, torch.stack(weights(2)).sum(0))
        assert torch.equal(gradient, found["shared"][0][1])


def test_shared_gradients_are_summed_in_float32(found):
    wanted = torch.stack(weights(2, torch.bfloat16)).float().sum(0).bfloat16()
    for _, gradient in found["shared_bf16"]:
        assert gradient.dtype == torch.bfloat16
        assert torch.equal(gradient, wanted)


def test_all_to_all(found):
    sent, used = [of_rank(rank, 6) for rank in range(RANKS)], weights(6)
    for rank, (value, gradient) in enumerate(found["all_to_all"]):
        part = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(value, torch.cat([x[part] for x in sent]))
        assert torch.equal(gradient, torch.cat([weight[part] for weight in used]))


def test_uneven_all_to_all(found):
    sent = [of_rank(s, sum(s + r for r in range(RANKS))) for s in range(RANKS)]
    parts = [x.split([s + r for r in range(RANKS)]) for s, x in enumerate(sent)]
    for rank, (value, gradient) in enumerate(found["uneven"]):
        assert torch.equal(value, torch.cat([parts[s][rank] for s in range(RANKS)]))
        assert gradient.shape == sent[rank].shape
        assert (gradient != 0).all()


def test_rows_that_do_not_divide_are_refused(found):
    assert "the nearest number that does is 6" in found["refusals"][0][0]


def test_without_a_group_nothing_happens():
    x = of_rank(0)
    for name in ("all_gather", "gather_same", "reduce_scatter", "shared", "all_to_all"):
        assert getattr(collectives, name)(x, None) is x
