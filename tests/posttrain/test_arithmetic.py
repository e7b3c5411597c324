import re

import pytest

from stepwell.posttrain.arithmetic import (
    Problem,
    add_steps,
    overlap,
    problems,
    subtract_steps,
)
from stepwell.posttrain.verifiers import exact
from stepwell.types import ConfigError


def written(lines: list[str]) -> int:
    """The number that the steps write, ones first."""
    return int("".join(re.findall(r"write (\d)", "\n".join(lines)))[::-1])


def test_steps_by_hand():
    assert add_steps(57, 68) == [
        "7+8=15 write 5 carry 1",
        "5+6+1=12 write 2 carry 1",
        "write 1",
    ]
    assert subtract_steps(52, 8) == ["2-8=-6 write 4 borrow 1", "5-0-1=4 write 4 borrow 0"]
    assert Problem(3, 12, "-").completion().splitlines() == [
        "swap",
        "2-3=-1 write 9 borrow 1",
        "1-0-1=0 write 0 borrow 0",
        "negate",
        "answer: -9",
    ]


def test_every_step_is_right_and_leads_to_the_answer():
    for p in problems(600, "train", seed=0, digits=(1, 6)):
        lines = p.completion().splitlines()
        assert written(lines[:-1]) == abs(p.answer)
        for left, right, third, value in re.findall(
            r"(\d)([+-]\d)([+-]1)?=(-?\d+)", p.completion()
        ):
            assert int(left) + int(right) + int(third or 0) == int(value)
        assert lines[-1] == f"answer: {p.answer}"


def test_the_verifier_reads_the_completion():
    rows = [p.row() for p in problems(100, "heldout", seed=3)]
    columns = {"answer": [r["answer"] for r in rows]}
    prompts, texts = [r["prompt"] for r in rows], [r["completion"] for r in rows]
    assert exact(prompts, texts, **columns) == [1.0] * 100
    wrong = [f"answer: {int(r['answer']) + 1}" for r in rows]
    assert exact(prompts, wrong, **columns) == [0.0] * 100


def test_splits_never_meet_whatever_the_seed():
    train = problems(3000, "train", seed=0, digits=(1, 3))
    heldout = problems(300, "heldout", seed=1, digits=(1, 3))
    assert overlap(train, heldout) == set()
    assert len({p.key for p in train}) == 3000
    for p in train[:500]:
        assert Problem(p.right, p.left, p.op).split() == "train"
        assert Problem(p.right, p.left, p.op).key == p.key
    moved = [Problem(p.right, p.left, p.op) for p in heldout[:1]]
    assert overlap(train + moved, heldout) == {heldout[0].key}
    again = problems(3000, "train", seed=0, digits=(1, 3))
    assert again == train


def test_difficulty_is_the_number_of_digits():
    for p in problems(200, "train", seed=0, digits=(3, 4), ops="+"):
        assert p.op == "+"
        assert p.row()["digits"] in (3, 4)
    sizes = [p.row()["digits"] for p in problems(900, "train", seed=0, digits=(3, 5))]
    assert all(200 < sizes.count(d) < 400 for d in (3, 4, 5))


def test_impossible_requests_are_refused():
    with pytest.raises(ConfigError, match="found only"):
        problems(500, "heldout", seed=0, digits=(1, 1))
    with pytest.raises(ConfigError, match="digits"):
        problems(5, "train", seed=0, digits=(3, 2))
    with pytest.raises(ConfigError, match="ops"):
        problems(5, "train", seed=0, ops="*")
