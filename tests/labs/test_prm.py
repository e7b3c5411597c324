import copy

import numpy as np
import pytest

from stepwell.labs import digits, prm


def test_the_claim_holds_and_the_check_can_fail():
    numbers = prm.measure(small=True)
    assert prm.check(numbers) == []
    (chains,) = numbers["by_chains"]
    most, (beam,) = numbers["by_chains"][chains], numbers["beams"]
    assert set(most["accuracy"]) == {"orm", "prm-min", "prm-product", "prm-last", "prm-mean"}
    # One answer is one answer, whoever chooses it.
    ones = [by["1"]["mean"] for by in (*most["accuracy"].values(), numbers["any"])]
    assert ones == pytest.approx([numbers["policy"]["accuracy"][0]] * len(ones))
    assert numbers["policy"]["all_steps_right"] <= numbers["policy"]["accuracy"]
    assert beam["tokens"] <= beam["best_tokens"]
    assert len(prm.plot(numbers).axes) == 3
    for change, said in (
        (lambda n: most_of(n)["gain"]["16"].update(low=-0.1), "more than the ORM"),
        (lambda n: most_of(n)["gain"]["16"].update(mean=0.0), "the gain of 4 is no smaller"),
        (lambda n: most_of(n)["heldout"].update(prm_all_steps_right=[0.7]), "has not learnt"),
        (lambda n: most_of(n)["accuracy"]["orm"]["16"].update(high=1.0), "the ORM not less"),
        (lambda n: n["vote"]["16"].update(high=1.0), "the vote not less"),
        (lambda n: n["by_chains"].update({"9": most_of(n)}), "is not above the ORM of 9"),
    ):
        off = copy.deepcopy(numbers)
        change(off)
        if said.startswith("is not above"):
            off["by_chains"]["9"]["accuracy"]["orm"]["16"].update(high=1.0)
        assert said in "\n".join(prm.check(off))


def most_of(numbers):
    return list(numbers["by_chains"].values())[-1]


def test_steps_and_ends_of_an_answer():
    problem = (7, 2, 3)
    right = digits.lines_of(digits.right_totals(problem))
    assert right == ["7\n", "9\n", "2\n"]
    assert digits.prompt_of(problem).text == "7+2+3+"
    assert digits.first_wrong(problem, right) is None
    assert digits.first_wrong(problem, ["7\n", "8\n", "2\n"]) == 1
    assert digits.first_wrong(problem, right[:2]) == 1  # what is missing
    assert digits.first_wrong(problem, [*right, "4\n"]) == 3
    assert digits.is_right(problem, "7\n8\n2\n")  # by two mistakes
    assert not digits.is_right(problem, "7\n9\n")


def test_both_models_learn_from_the_same_chains(tmp_path):
    world = digits.World(tmp_path, 0, 6, {})
    outcomes, steps = digits.judged_rows(world, 400)
    for outcome, judged in zip(outcomes, steps, strict=True):
        assert outcome.rendering[0] == judged.ids
        wrong = 0.0 in judged.labels
        # A chain without a mistake ends right; one with mistakes may.
        assert outcome.label or wrong
        if wrong:
            after = judged.labels[judged.labels.index(0.0) + 1 :]
            assert after == (None,) * len(after)
    share = np.mean([0.0 not in judged.labels for judged in steps])
    assert share == pytest.approx((1 - digits.SLIP) ** 6, abs=0.08)


def test_ranked_is_the_chance_of_a_pair_with_ties_as_halves():
    good = np.array([1.0, 0.0, 1.0, 0.0])
    assert prm.ranked([3.0, 1.0, 2.0, 2.0], good) == (1 + 1 + 1 + 0.5) / 4


def test_a_tied_vote_is_shared():
    drawn = prm.Drawn(
        [],
        [],
        np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]),
        np.zeros((2, 4)),
        np.array([["3", "3", "5", "5"], ["3", "5", "5", "7"]]),
        np.zeros((2, 4)),
    )
    assert prm.votes(drawn, 4, 0) == [0.5, 0.0]
    assert prm.votes(drawn, 1, 0)[0] == pytest.approx(0.5, abs=0.3)
