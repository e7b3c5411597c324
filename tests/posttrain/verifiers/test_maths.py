import pytest

from stepwell.eval.grade import Prompt
from stepwell.posttrain.rewards.sources import open_scorer
from stepwell.posttrain.verifiers.maths import boxed, final_formula, is_bounded, maths
from stepwell.types import Completion

pytest.importorskip("math_verify")

RIGHT = [
    ("answer: 0.5", "1/2"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"so $x = \frac12$.", r"\frac12"),
    (r"answer: -\frac{3}{4}", "-0.75"),
    ("answer: 50%", "0.5"),
    ("answer: 50%", "50"),
    ("0.5", r"50\%"),
    ("answer: 0.5", "50%"),
    ("answer: [0, 1)", "[0,1)"),
    (r"$(-\infty, 3] \cup [5, \infty)$", r"(-\infty,3]\cup[5,\infty)"),
    ("answer: {2, 1}", r"\{1,2\}"),
    (r"\boxed{\{2,1\}}", r"\boxed{\{1,2\}}"),
    ("answer: 1, 2", r"\{1,2\}"),
    ("answer: (1,2)", "(1,2)"),
    ("answer: 42 apples", "42"),
    ("answer: 3+4=7", "7"),
    ("x=3", "3"),
    ("answer: 3", "x=3"),
    ("answer: y = 2x + 1", "y=2x+1"),
    (r"answer: 2\sqrt{2}", r"\sqrt{8}"),
    (r"answer: $\sqrt{2}$", r"2^{1/2}"),
    ("answer: 1,204", "1204"),
    (r"The answer is $\boxed{42}$.", "42"),
    (r"5\text{ cm}", "5"),
    ("answer: Monday", "monday"),
    (r"answer: Monday.", r"\text{Monday}"),
    ("answer: A", "A"),
    (r"first \boxed{41}, no: \boxed{42}", "42"),
]
WRONG = [
    ("answer: [0,1]", "[0,1)"),
    ("answer: (2,1)", "(1,2)"),
    ("answer: 2/3", "3/2"),
    ("answer: 3/4", "-0.75"),
    ("answer: 41 or 42 or 43", "41"),
    ("answer: 41, 42, 43", "41"),
    ("answer: 41, 42, 43", "43"),
    ("41 42 43", "43"),
    (r"\boxed{42, 43}", "42"),
    (r"\boxed{42} and \boxed{41}", "42"),
    ("answer: $42$ or $43$", "42"),
    ("answer: B", "A"),
    ("answer: A B C D", "A"),
    ("", "42"),
    ("answer:", "42"),
    ("\\boxed{}", "42"),
    ("\\boxed{42", "42"),
    ("answer: " + "9" * 5000, "42"),
    ("answer: $\\frac{1}{$", "1"),
    ("\0\x01\x02", "42"),
]


@pytest.mark.parametrize(("text", "truth"), RIGHT)
def test_right(text, truth):
    assert maths()([""], [text], answer=[truth]) == [1.0]


@pytest.mark.parametrize(("text", "truth"), WRONG)
def test_wrong(text, truth):
    assert maths()([""], [text], answer=[truth]) == [0.0]


def test_not_applicable():
    assert maths()(["", ""], ["1", "1"], answer=[None, 1]) == [None, 1.0]


def test_what_is_read_as_the_answer():
    assert boxed(r"a \boxed{x^{2}} b") == "x^{2}"
    assert boxed(r"\boxed{") is None
    assert final_formula("so $a$ and\nthen $b$.\nDone") == "b"
    assert final_formula("answer: 7% of it") == "7%"


def test_what_never_ends_is_a_timeout():
    """sympy raises the tower in C, where neither a signal nor a thread gets at it."""
    scorer = open_scorer("math", 1.0)
    prompts = [Prompt("", (), {"answer": answer}) for answer in ("10^{10^{10}}", "42", "42")]
    texts = ["answer: $43$", "answer: 42", "answer: 41"]
    completions = [Completion(0, (), (), (), text, "stop") for text in texts]
    verdicts = scorer.score(prompts, completions)
    scorer.close()
    assert [v.failure or v.reward for v in verdicts] == ["timeout", 1.0, 0.0]


@pytest.mark.parametrize(
    ("formula", "bounded"),
    [
        ("9^{9^{9^{9}}}", False),
        ("9**9**9", False),
        ("10^{10001}", False),
        ("10^{10000}", True),
        ("1001!", False),
        ("1000!", True),
        ("(3!)!!", False),
        ("10^{2^3}", True),
        ("e^{x^2}", True),
        ("x^{10}", True),
        ("2^{-3}", True),
    ],
)
def test_powers_and_factorials_are_bounded(formula, bounded):
    assert is_bounded(formula) == bounded


def test_a_tower_of_powers_is_a_wrong_answer_at_once():
    pytest.importorskip("math_verify")
    texts = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{100000!}", r"\boxed{0.50000001}"]
    # Its inner power is of 696 digits, which no float holds.
    texts.append(r"\boxed{9^{9^{9^{3}}}}")
    assert maths()([""] * 4, texts, answer=["1", "1", "1/2", "1"]) == [0.0, 0.0, 1.0, 0.0]
