import re
import time

from stepwell.eval.grade import Verdict, answer_seeds, verify_each


def test_seeds_belong_to_the_prompt():
    assert answer_seeds(1, (5, 6), 3) == answer_seeds(1, (5, 6), 5)[:3]
    every = [answer_seeds(s, ids, 4) for s in (0, 1) for ids in ((5, 6), (6, 5), (5,), (5, 6, 0))]
    assert len({x for seeds in every for x in seeds}) == 32
    assert answer_seeds(-1, (5, 6), 3) == answer_seeds(2**64 - 1, (5, 6), 3)


def test_failures_are_no_wrong_answers():
    def grader(prompts, completions, kind):
        if kind[0] == "raise":
            raise ValueError("broken")
        if kind[0] == "slow":
            try:
                time.sleep(60)
            except Exception:  # noqa: BLE001 - a grader that swallows what it can
                return [1.0]
        return [None if kind[0] == "n/a" else 0.0]

    kinds = ["wrong", "raise", "slow", "n/a"]
    started = time.monotonic()
    got = verify_each(grader, [""] * 4, [""] * 4, [{"kind": k} for k in kinds], timeout_s=0.2)
    assert time.monotonic() - started < 5
    assert got[0] == Verdict(0.0)
    assert got[1] == Verdict(None, "error", "ValueError: broken")
    assert (got[2].reward, got[2].failure) == (None, "timeout")
    assert got[3] == Verdict(None)


def test_a_regular_expression_that_explodes_is_stopped():
    def grader(prompts, completions):
        return [float(re.match(r"(a+)+$", completions[0]) is not None)]

    (verdict,) = verify_each(grader, [""], ["a" * 40 + "b"], [{}], timeout_s=0.2)
    assert verdict.failure == "timeout"
