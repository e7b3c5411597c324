import pytest
import torch

from stepwell.posttrain.policy.aggregation import KINDS, denominator, document_means, token_weight
from stepwell.types import ConfigError


def aggregated(answers, kind, constant_tokens=10):
    """The loss of answers given by their tokens' losses."""
    lengths = [len(answer) for answer in answers]
    weights = [token_weight(n, kind, constant_tokens) for n in lengths]
    total = sum(w * sum(answer) for w, answer in zip(weights, answers, strict=True))
    return total / denominator(lengths, kind)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token", 6 / 5),  # (1 + 2 + 3 + 0 + 0) / 5
        ("sequence", 1.0),  # (2 + 0) / 2
        ("constant", 0.3),  # (6 / 10 + 0 / 10) / 2
    ],
)
def test_known_answers(kind, expected):
    assert aggregated([[1, 2, 3], [0, 0]], kind) == pytest.approx(expected)
    # An answer without trained tokens is no answer of loss 0.
    assert aggregated([[1, 2, 3], [0, 0], []], kind) == pytest.approx(expected)


def test_an_unequal_split_of_tokens_is_not_a_mean_of_means():
    """100 tokens at 2.0 and 900 at 0.5: 0.65 over tokens, 1.25 over answers."""
    answers = [[2.0] * 100, [0.5] * 900]
    assert aggregated(answers, "token") == pytest.approx(0.65)
    assert aggregated(answers, "sequence") == pytest.approx(1.25)


def test_weights_of_a_token():
    assert token_weight(4, "token") == 1.0
    assert token_weight(4, "sequence") == 0.25
    assert token_weight(4, "constant", 64) == 1 / 64
    assert [token_weight(0, kind, 64) for kind in KINDS] == [0.0, 0.0, 0.0]


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="'tokens' is unknown .did you mean 'token'"):
        token_weight(3, "tokens")
    with pytest.raises(ConfigError, match="'row' is unknown"):
        denominator([3], "row")
    for length in (None, 0):
        with pytest.raises(ConfigError, match=f"length of {length} must be at least 1"):
            token_weight(3, "constant", length)
    assert token_weight(3, "constant", 1) == 1.0


def test_means_over_documents_select():
    docs_BT = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 1, 2, -1, -1]])
    nan = float("nan")
    values_BT = torch.tensor([[1.0, 2, nan, 5, 7, nan], [4, 1, 2, nan, 9, nan]])
    mask_BT = torch.tensor([[1.0, 0.5, 0, 1, 1, 0], [1, 1, 1, 0, 1, 0]])
    expected = [[1.5, 1.5, 1.5, 6, 6, 0], [4, 1.5, 1.5, 0, 0, 0]]
    assert document_means(values_BT, mask_BT, docs_BT).tolist() == expected
    nothing = torch.full((2, 3), -1)
    assert document_means(torch.ones(2, 3), torch.ones(2, 3), nothing).tolist() == [[0.0] * 3] * 2
