import pytest

from stepwell.eval.grade import Prompt
from stepwell.posttrain.rewards.composite import open_rewards
from stepwell.posttrain.rewards.self_test import is_penalty, junk_scores, right_answers, self_test
from stepwell.posttrain.verifiers.gym import GYM_SETS, gym_rows
from stepwell.sections.methods import GRPO
from stepwell.sections.rewards import RewardTerm
from stepwell.types import ConfigError, DataError


@pytest.fixture(autouse=True)
def one_grader(monkeypatch):
    """More of them would only have more to import."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def found_in(source: str, prompts: list[Prompt], **bounds) -> list[str]:
    term = RewardTerm(name="r", source=source, **bounds)
    rewards = open_rewards(GRPO(rewards=(term,), reward_timeout_s=5.0))
    try:
        return self_test(rewards, prompts)
    finally:
        rewards.close()


def sums(count: int = 12) -> list[Prompt]:
    numbers = [(7 * i + 3, 11 * i + 5) for i in range(count)]
    return [Prompt(f"{a}+{b}=?", (1,), {"answer": str(a + b)}) for a, b in numbers]


def gym_prompts(name: str, count: int = 8) -> list[Prompt]:
    rows = gym_rows(name, count, seed=5)
    return [Prompt(r["prompt"], (1,), {"answer": r["answer"], "entry": r["entry"]}) for r in rows]


@pytest.mark.parametrize("source", ["exact", "math"])
def test_good_scorers_pass(source):
    assert found_in(source, sums()) == []
    words = [Prompt("?", (1,), {"answer": w}) for w in ("Paris", "Rome", "Oslo", "yes", "no", "A")]
    assert found_in(source, words) == []


def test_small_numbers_are_in_no_empty_junk():
    rows = [Prompt(f"{n + 20}-20=?", (1,), {"answer": str(n)}) for n in range(8)]
    assert not [text for text in found_in("exact", rows) if "junk" in text]


@pytest.mark.slow
@pytest.mark.parametrize("name", GYM_SETS)
def test_every_listed_gym_set_passes(name):
    pytest.importorskip("reasoning_gym")
    assert found_in(f"gym:{name}", gym_prompts(name)) == []


def test_a_gym_set_passes():
    pytest.importorskip("reasoning_gym")
    assert found_in("gym:countdown", gym_prompts("countdown")) == []


TRAPS = """
SETS = {}

def scorer(name, entry, text):
    import reasoning_gym
    if name not in SETS:
        SETS[name] = reasoning_gym.create_dataset(name, size=1, seed=0)
    return SETS[name].score_answer(text, entry)

def raw(prompts, completions, entry):
    return [scorer(e["metadata"]["source_dataset"], e, c) for c, e in zip(completions, entry)]

def binary(prompts, completions, entry):
    return [float(s >= 0.99) for s in raw(prompts, completions, entry)]

def last_number(prompts, completions, answer):
    return [float(a in c) for c, a in zip(completions, answer)]

def any_text(prompts, completions):
    return [1.0]

def short(prompts, completions):
    return [-len(c) / 1000 for c in completions]

def constant(prompts, completions, answer):
    return [True]

def nothing(prompts, completions, answer):
    return [0]

def of_the_row(prompts, completions, answer):
    return [float(answer[0])]

def marked(prompts, completions, answer):
    return [float(c == f"!{a}") for c, a in zip(completions, answer)]

def hashes(prompts, completions, answer):
    return [float(c == f"#### {a}") for c, a in zip(completions, answer)]

def fails(prompts, completions, answer):
    return [1.0 if completions[0].split()[-1] == answer[0] else 0.0]
"""


@pytest.fixture
def traps(tmp_path):
    (tmp_path / "traps.py").write_text(TRAPS)
    return f"python:{tmp_path}/traps.py"


def test_the_trap_of_reasoning_gym_is_found(traps):
    """A scorer of reasoning-gym that gives full credit to an empty text."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    data = reasoning_gym.create_dataset("game_of_life_halting", size=8, seed=0)
    prompts = [Prompt(r["question"], (1,), {"entry": r}) for r in data]
    with pytest.raises(ConfigError, match=r"gives 1 to junk \((nothing|blanks): "):
        found_in(f"{traps}:binary", prompts)
    assert found_in(f"{traps}:binary", prompts, high=0.0) == []


def test_an_answer_anywhere_is_refused(traps):
    message = r"junk \(many answers at once: 'answer: .* or .*'\) on 8 of 8 rows"
    with pytest.raises(ConfigError, match=message):
        found_in(f"{traps}:last_number", sums())


def test_what_is_only_reported(traps):
    (text,) = found_in(f"{traps}:any_text", [Prompt("?", (1,))])
    assert text.endswith(
        "no row says what is right, so junk was only seen to be scored, all of it 1"
    )
    assert found_in(f"{traps}:short", sums(), weight=-1.0) == []
    found = found_in(f"{traps}:fails", sums())
    assert any("the grader fails on 8 rows with junk (nothing: '')" in text for text in found)


@pytest.mark.parametrize("name", ["constant", "of_the_row"])
def test_a_function_that_scores_all_the_same_is_refused(traps, name):
    message = r"no junk less than the row's own answer on 8 of 8 rows \(the first scores \d"
    with pytest.raises(ConfigError, match=message):
        found_in(f"{traps}:{name}", sums())
    rows = [Prompt("?", (1,), {"answer": str(n)}) for n in (0, 0, 0, 0, 0, 7, 7, 7)]
    if name == "of_the_row":  # where it gives nothing it teaches nothing
        with pytest.raises(ConfigError, match="on 8 of 8 rows"):
            found_in(f"{traps}:{name}", rows)
    told = "tell right from wrong there"
    assert any(told in text for text in found_in(f"{traps}:nothing", rows))
    assert any(told in text for text in found_in(f"{traps}:marked", sums()))
    assert found_in(f"{traps}:hashes", sums()) == []


def test_what_scores_all_the_same_may_stand_beside_what_does_not(traps):
    """A term of form, say, that no junk meets and no right answer."""
    same = RewardTerm(name="same", source=f"{traps}:constant")
    for source, fine in (("exact", True), (f"{traps}:hashes", True), ("regex:answer: .", False)):
        rewards = open_rewards(GRPO(rewards=(same, RewardTerm(name="other", source=source))))
        try:
            if fine:
                (text,) = self_test(rewards, sums())
                assert text.startswith("reward 'same': no junk scores less")
            else:
                with pytest.raises(ConfigError, match="'same'.*nothing else in the reward"):
                    self_test(rewards, sums())
        finally:
            rewards.close()


def test_a_grader_that_always_hangs_is_tried_on_a_few(tmp_path):
    log = tmp_path / "log"
    (tmp_path / "slow.py").write_text(
        f"import time\ndef f(prompts, completions):\n    open({str(log)!r}, 'a').write('.')\n"
        "    time.sleep(60)\n"
    )
    rewards = open_rewards(GRPO(verifier=f"python:{tmp_path}/slow.py:f", reward_timeout_s=0.1))
    try:
        with pytest.raises(DataError, match="too long for each of the first 4 answers"):
            self_test(rewards, sums())
    finally:
        rewards.close()
    assert log.read_text() == "...."


def test_a_pattern_that_anything_meets_is_refused():
    with pytest.raises(ConfigError, match=r"'regex:\.\*'\) gives 1 to junk \(nothing: ''\)"):
        found_in("regex:.*", sums())
    found = found_in(r"regex:answer: \d+", sums())
    assert any("(many answers at once" in text for text in found)


def test_rows_whose_answer_is_not_read_are_reported():
    (text,) = found_in("exact", [Prompt("?", (1,), {"answer": a}) for a in ("...", "!", "A")])
    assert text == "reward 'r': the row's own answer does not score 1 on 2 of 3 rows"


def test_code_and_tests():
    cases = [{"stdin": "2\n", "stdout": "4"}, {"stdin": "3\n", "stdout": "9"}]
    solved = {"cases": cases, "solution": "print(int(input()) ** 2)"}
    assert found_in("code", [Prompt("Square it.", (1,), solved)]) == []
    with pytest.raises(ConfigError, match="a program that does nothing"):
        found_in("code", [Prompt("?", (1,), {"cases": [{"stdin": "", "stdout": "\n"}]})])
    row = {"tests": "assert add(1, 2) == 3", "canonical_solution": "def add(a, b): return a + b"}
    assert found_in("tests", [Prompt("Add.", (1,), row)]) == []
    with pytest.raises(ConfigError, match="gives 1 to junk"):
        found_in("tests", [Prompt("Add.", (1,), {"tests": "def test(): pass"})])


def test_luck_is_no_fault_of_the_scorer():
    """One row of eight whose answer is the last of a list of numbers."""
    prompts = [Prompt("?", (1,), {"answer": "100"}), *sums(7)]
    (text,) = found_in("exact", prompts)
    assert text.startswith("reward 'r': junk (numbers: '0 1 2")
    assert text.endswith("scores as a right answer on 1 of 8 rows")


def test_penalties_are_not_tried():
    rewards = open_rewards(
        GRPO(
            rewards=(
                RewardTerm(name="long", source="overlong:100:20"),
                RewardTerm(name="again", source="repetition:3"),
                RewardTerm(name="less", source="exact", weight=-1.0),
                RewardTerm(name="never", source="exact", high=0.0),
                RewardTerm(name="real", source="exact", high=0.5),
            )
        )
    )
    assert [is_penalty(d) for d in rewards.dimensions] == [True] * 4 + [False]
    assert {f.dimension for f in junk_scores(rewards, sums())} == {"real"}
    with pytest.raises(ConfigError, match="no prompts"):
        self_test(rewards, [])


def test_right_answers():
    assert right_answers(Prompt("", (), {"answer": 7}))[:2] == ["answer: 7", "7"]
    assert right_answers(Prompt("", (), {"answer": [1, 2]}))[1] == "[1, 2]"
    assert right_answers(Prompt("", ())) == []
