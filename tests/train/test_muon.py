import pytest
import torch

from stepwell.train.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_singular_values_end_near_one_and_vectors_stay(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    y = orthogonalise(x, 5).float()
    singular = torch.linalg.svdvals(y)
    assert singular.min() > 0.5
    assert singular.max() < 1.3
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    aligned = u.T @ y @ vh.T
    off_diagonal = aligned - aligned.diag().diag()
    assert off_diagonal.abs().max() < 0.05
    assert aligned.diag().min() > 0.5


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_equals_torchs_muon_on_one_process(shape):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    a = Muon([ours], lr=0.02, weight_decay=0.1)
    b = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        a.step()
        b.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            a.state[ours]["momentum_buffer"], b.state[theirs]["momentum_buffer"]
        )
    assert (ours - start).abs().max() > 0.01


def test_a_zero_gradient_only_decays():
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    parameter.grad = torch.zeros(3, 4)
    Muon([parameter], lr=0.5, weight_decay=0.1).step()
    torch.testing.assert_close(parameter.detach(), torch.full((3, 4), 0.95))
