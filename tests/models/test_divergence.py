"""Divergences: closed forms, and vocabulary shards against the whole."""

import math

import pytest
import torch
import torch.distributed as dist

from stepwell.models.divergence import forward_kl, jensen_shannon, reverse_kl
from tests.parallel.ranks import run_ranks

N, V = 7, 24
CASES = {
    "forward": (forward_kl, {}),
    "reverse": (reverse_kl, {}),
    "js": (jensen_shannon, {}),
    "js skewed": (jensen_shannon, {"beta": 0.1}),
}


def logits():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (4 * torch.randn(N, V, generator=generator).double() for _ in range(2))
    student[0] = teacher[0]
    teacher[1, 3] = 60.0  # one sure token
    return student, teacher, torch.randn(N, generator=generator).double()


def values_and_gradient(rank, world, tp):
    student, teacher, weight = logits()
    student, teacher = (x.chunk(world, -1)[rank].contiguous() for x in (student, teacher))
    found = {}
    for name, (divergence, options) in CASES.items():
        for temperature in (1.0, 2.5):
            leaf = student.clone().requires_grad_()
            value = divergence(leaf, teacher, temperature=temperature, tp=tp, **options)
            (gradient,) = torch.autograd.grad((value * weight).sum(), leaf)
            found[name, temperature] = value.detach(), gradient
    return found


def of_shards():
    dist.init_process_group("gloo")
    return values_and_gradient(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def test_vocabulary_shards_equal_the_whole():
    shards = run_ranks(of_shards, 3)
    for case, (wanted, wanted_gradient) in values_and_gradient(0, 1, None).items():
        for rank in shards:
            torch.testing.assert_close(rank[case][0], wanted, rtol=0, atol=1e-12, msg=str(case))
            assert torch.equal(rank[case][0], shards[0][case][0])
        gradient = torch.cat([rank[case][1] for rank in shards], -1)
        torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=1e-12, msg=str(case))


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_definition(name):
    """By probabilities, in float64, and its gradient by autograd."""
    student, teacher, weight = logits()
    student, teacher, weight = student[2:], teacher[2:], weight[2:]
    leaf = student.clone().requires_grad_()
    q, p = (leaf / 2.5).softmax(-1), (teacher / 2.5).softmax(-1)
    beta = CASES[name][1].get("beta", 0.5)
    m = beta * p + (1 - beta) * q

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    js = beta * kl(p, m) + (1 - beta) * kl(q, m)
    wanted = {"forward": kl(p, q), "reverse": kl(q, p), "js": js, "js skewed": js}[name]
    (gradient,) = torch.autograd.grad((wanted * weight).sum(), leaf)
    got, got_gradient = values_and_gradient(0, 1, None)[name, 2.5]
    torch.testing.assert_close(got[2:], wanted.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(got_gradient[2:], gradient, rtol=0, atol=1e-12)


def test_known_answers():
    """p = (.7, .3), q = (1/2, 1/2): KL(p || q) = .082283; two sure opposites have the
    largest Jensen-Shannon divergence, ln 2."""
    teacher = torch.tensor([[0.7, 0.3]]).log()
    student = torch.zeros(1, 2)
    assert forward_kl(student, teacher).item() == pytest.approx(0.082283, abs=1e-6)
    assert reverse_kl(teacher, student).item() == pytest.approx(0.082283, abs=1e-6)
    js = 0.5 * (0.7 * math.log(0.7 / 0.6) + 0.3 * math.log(0.3 / 0.4))
    js += 0.5 * (0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4))
    assert jensen_shannon(student, teacher).item() == pytest.approx(js, abs=1e-6)
    sure = torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 200.0]])
    assert jensen_shannon(*sure).item() == pytest.approx(math.log(2), abs=1e-6)
    assert forward_kl(*sure).item() == 200.0


def test_ends_of_the_generalised_divergence_are_the_two_kls():
    student, teacher, _ = (x[2:] / 8 for x in logits())
    tiny = 1e-7
    torch.testing.assert_close(
        jensen_shannon(student, teacher, beta=tiny) / tiny,
        forward_kl(student, teacher),
        rtol=1e-4,
        atol=0,
    )
    torch.testing.assert_close(
        jensen_shannon(student, teacher, beta=1 - tiny) / tiny,
        reverse_kl(student, teacher),
        rtol=1e-4,
        atol=0,
    )
    for beta in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=f"beta={beta}"):
            jensen_shannon(student, teacher, beta=beta)


def test_equal_distributions_and_dtype():
    student, teacher, _ = logits()
    for name, (value, _) in values_and_gradient(0, 1, None).items():
        assert abs(value[0].item()) < 1e-12, name
        assert (value > -1e-12).all(), name
    half = forward_kl(student.bfloat16(), teacher.bfloat16())
    assert half.dtype == torch.float32
    assert half.isfinite().all()
