import numpy as np
import pytest

from stepwell.data.quality.metrics import binary_report, calibration, level_report, roc_auc


def test_precision_recall_and_f1_by_hand():
    scores = np.array([0.9, 0.8, 0.5, 0.4, 0.1])
    good = np.array([True, False, True, True, False])
    found = binary_report(scores, good, 0.5)
    assert (found["num"], found["num_positive"]) == (5, 3)
    assert found["precision"] == pytest.approx(2 / 3)
    assert found["recall"] == pytest.approx(2 / 3)
    assert found["f1"] == pytest.approx(2 / 3)
    # Pairs of a good and a bad one: .9 beats both, .5 and .4 beat .1 only.
    assert found["roc_auc"] == pytest.approx(4 / 6)


def test_what_is_not_defined_is_none():
    found = binary_report(np.array([0.1, 0.2]), np.array([True, False]), 0.5)
    assert (found["precision"], found["recall"], found["f1"]) == (None, 0.0, None)
    assert roc_auc(np.array([0.1, 0.2]), np.array([True, True])) is None
    wrong = binary_report(np.array([0.1, 0.9]), np.array([True, False]), 0.5)
    assert wrong["f1"] == 0.0


def test_ties_count_half_and_order_is_all_that_matters():
    good = np.array([True, False])
    assert roc_auc(np.array([0.3, 0.3]), good) == 0.5
    rng = np.random.default_rng(0)
    scores, good = rng.integers(0, 5, 200).astype(float), rng.integers(0, 2, 200) == 1
    pairs = [(a > b) + (a == b) / 2 for a in scores[good] for b in scores[~good]]
    assert roc_auc(scores, good) == pytest.approx(np.mean(pairs))
    assert roc_auc(np.exp(scores), good) == roc_auc(scores, good)


def test_calibration_by_hand():
    found = calibration(np.array([0.1, 0.3, 0.9, 1.0]), np.array([0, 1, 1, 1]), [0.0, 0.5, 1.0])
    assert [b["num"] for b in found["bins"]] == [2, 2]
    assert found["bins"][0]["mean_score"] == pytest.approx(0.2)
    assert found["bins"][0]["mean_outcome"] == 0.5
    assert found["error"] == pytest.approx((2 * 0.3 + 2 * 0.05) / 4)
    assert len(calibration(np.array([0.1]), np.array([0]), [0.0, 0.5, 1.0])["bins"]) == 1


def test_levels_round_half_up_and_stay_in_range():
    found = level_report(np.array([0.5, 2.4, 5.0, -0.2]), np.array([1, 2, 4, 0]), 6)
    assert found["accuracy"] == 0.75
    assert found["mean_absolute_error"] == pytest.approx((0.5 + 0.4 + 1.0 + 0.2) / 4)
    assert found["confusion"][4] == [0, 0, 0, 0, 0, 1]
