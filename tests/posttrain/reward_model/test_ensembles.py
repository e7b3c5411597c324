"""What several reward models say together."""

import pytest
import torch

from stepwell.posttrain.reward_model.ensembles import combine, disagreement, standardised
from stepwell.types import ConfigError

SCORES = torch.tensor([[1.0, 4.0, 2.0], [3.0, 0.0, 2.0], [2.0, 2.0, 2.0]])


def test_combinations_of_known_scores():
    assert combine(SCORES, "mean").tolist() == [2.0, 2.0, 2.0]
    assert combine(SCORES, "min").tolist() == [1.0, 0.0, 2.0]
    assert disagreement(SCORES).tolist() == [1.0, 2.0, 0.0]
    assert combine(SCORES, "mean-k-sd", 1.5).tolist() == [0.5, -1.0, 2.0]
    assert combine(SCORES, "mean-k-sd", 0.0).tolist() == [2.0, 2.0, 2.0]


def test_a_single_model_has_a_mean_only():
    one = SCORES[:1]
    assert combine(one, "mean").tolist() == one[0].tolist()
    assert disagreement(one).tolist() == [0.0, 0.0, 0.0]
    for how in ("min", "mean-k-sd"):
        with pytest.raises(ConfigError, match="two or more"):
            combine(one, how)
        assert combine(SCORES[:2], how).shape == (3,)
    with pytest.raises(ConfigError, match="at least one"):
        combine(SCORES[:0], "mean")


def test_what_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'mean'"):
        combine(SCORES, "meen")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reward disagreement"):
        combine(SCORES, "mean-k-sd", -0.1)


def test_standardising_takes_each_models_own_constant_out():
    """Otherwise the lowest score would be that of the model whose constant is lowest."""
    means, sds = torch.tensor([0.0, 100.0, -50.0]), torch.tensor([1.0, 10.0, 2.0])
    wanted = SCORES
    moved = wanted * sds[:, None] + means[:, None]
    assert (combine(moved, "min") == moved[2]).all()
    torch.testing.assert_close(standardised(moved, means, sds), wanted)
    with pytest.raises(ConfigError, match="reward model 1 .* deviation 0"):
        standardised(SCORES, means, torch.tensor([1.0, 0.0, 1.0]))
