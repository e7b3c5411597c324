import copy

import pytest

from stepwell.labs import layout


@pytest.fixture(scope="module")
def numbers():
    return layout.measure(small=True)


def test_the_claim_holds_and_the_check_can_fail(numbers):
    assert layout.check(numbers) == []
    assert 395e9 < numbers["parameters"] < 405e9
    assert {row["axis"] for row in numbers["axes"]} >= {"zero", "tp", "pp", "cp", "recompute"}
    best_s = numbers["best"]["time/step_s"]
    off = copy.deepcopy(numbers)
    off["axes"][0] |= {"fits": True, "broken": "", "step_s": 0.5 * best_s}
    off["best"]["runnable"] = False
    tie = {**numbers["axes"][0], "fits": True, "broken": "", "step_s": best_s, "best_step_s": None}
    for simpler in (False, True):
        tied = {**numbers, "axes": [{**tie, "simpler": simpler}]}
        assert ["and simpler" in line for line in layout.check(tied)] == [True] * simpler
    assert "a tie, which" in layout.page({**numbers, "axes": [tie]})
    other = {**numbers["without_context"], "fits": True, "time/step_s": 0.99 * best_s}
    assert other["text"].startswith("TP 8 x PP")
    assert "CP" not in other["text"]
    assert len(layout.check({**numbers, "without_context": other})) == 1
    assert layout.check({**numbers, "without_context": {**other, "fits": False}}) == []
    assert len(layout.check(off)) == 2
    off["best"]["memory/peak_bytes"] = numbers["gpu_bytes"] + 1
    assert len(layout.check(off)) == 3
    off["measured_by_others"][0]["published"] *= 1.2
    assert "where 516 were measured" in layout.check(off)[3]
    held = {"pp_rank": 0, "counted": 100 << 30}
    near = [{**held, "item": "activations", "predicted": 109 << 30}]
    assert layout.check({**numbers, "dry_run": near}) == []
    for item, predicted in (("activations", 111 << 30), ("parameters", 104 << 30)):
        far = [{**held, "item": item, "predicted": predicted}]
        found = layout.check({**numbers, "dry_run": far})
        assert [line.split()[0] for line in found] == [item]
    few = [{**held, "item": "activations", "predicted": 2 << 30, "counted": 1 << 30}]
    assert layout.check({**numbers, "dry_run": [*near, *few]}) == []
    assert len(layout.plot(numbers).axes) == 2


def test_the_page_says_what_the_numbers_say(numbers):
    told = layout.page(numbers)
    assert "http" not in told.replace("http://www.w3.org/2000/svg", "")
    for reason in numbers["reasons"]:
        assert reason["question"] in told
    assert f"{numbers['best']['time/step_s']:.2f} s" in told
    assert "What Meta measured" in told
    assert numbers["without_context"]["text"] in told
    for axis, where in (("tensor (TP)", "within a machine"), ("context (CP)", "between machines")):
        assert f"<td>{axis}</td><td>{where}</td>" in "".join(told.split("\n"))
    has = numbers["gpu_bytes"]
    row = {**numbers["axes"][0], "fits": False, "broken": "", "peak_bytes": has}
    for more, said in ((0, "leaves less than the margin"), (1, "does not fit")):
        page = layout.page({**numbers, "axes": [{**row, "peak_bytes": has + more}]})
        assert f"<td>{said}</td>" in page
    assert "they were not searched" in told
    assert "What the program holds" not in told
    row = {"item": "peak", "pp_rank": 3, "predicted": 2 << 30, "counted": 1 << 30}
    assert "+100.0 %" in layout.page({**numbers, "dry_run": [row]})
