import threading
import time

import pytest

from stepwell.eval.grade import Prompt
from stepwell.posttrain.rewards.sources import open_scorer
from stepwell.posttrain.verifiers.shape import soft_overlong
from stepwell.types import Completion, ConfigError


def answer(text: str, num_tokens: int = 1, from_policy=None) -> Completion:
    ids = (2,) * num_tokens
    return Completion(0, (1,), ids, (0.0,) * num_tokens, text, "stop", from_policy=from_policy)


def scores(source: str, texts: list[str], timeout_s: float = 10.0, **columns):
    """Of each text the reward, or how its grader failed."""
    scorer = open_scorer(source, timeout_s)
    try:
        prompts = [Prompt(f"prompt {i}", (1,), columns) for i in range(len(texts))]
        verdicts = scorer.score(prompts, [answer(t) for t in texts])
    finally:
        scorer.close()
    return [v.failure or v.reward for v in verdicts]


def test_soft_overlong():
    """The known answer: limit 100, cache 20."""
    expected = {0: 0, 80: 0, 81: -0.05, 90: -0.5, 99: -0.95, 100: -1, 101: -1, 500: -1}
    assert {n: soft_overlong(n, 100, 20) for n in expected} == pytest.approx(expected)
    scorer = open_scorer("overlong:100:20", 1.0)
    answers = [answer("", n) for n in (80, 90, 100)]
    answers.append(answer("", 150, from_policy=(True,) * 90 + (False,) * 60))
    assert [v.reward for v in scorer.score([Prompt("", ())] * 4, answers)] == [0, -0.5, -1, -0.5]


def test_repetition():
    assert scores("repetition:2", ["a b c d", "a b a b a b", "", "a", "x " * 101]) == [
        0.0,
        pytest.approx(-3 / 5),
        0.0,
        0.0,
        pytest.approx(-0.99),
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("exakt", "did you mean 'exact'"),
        ("overlong:100", "not of the form overlong:LIMIT:CACHE"),
        ("overlong:100:101", "nearest legal value is 100"),
        ("overlong:100:0", "nearest legal value is 1"),
        ("repetition:0", "at least 1"),
        ("repetition:x", "not of the form"),
        ("regex:(", "not a regular expression"),
        ("regex:", "unknown reward source"),
        ("json:nothing.json", "cannot read the JSON schema nothing.json"),
        ("python:nothing.py:f", "there is no Python file 'nothing.py'"),
        ("gym:chainsum", "did you mean 'chain_sum'"),
        ("model:folder", "needs a run"),
    ],
)
def test_what_cannot_be_opened(source, message):
    with pytest.raises(ConfigError, match=message):
        open_scorer(source, 1.0)


@pytest.fixture
def graders(tmp_path):
    (tmp_path / "helper.py").write_text("HALF = 0.5\n")
    (tmp_path / "mine.py").write_text(
        """
import asyncio, functools, os, re, sys, time
from helper import HALF

def half(prompts, completions, answer):
    print("noise")
    return [None if a is None else HALF for a in answer]

def odd(prompts, completions, **columns):
    what = completions[0]
    if what == "raise":
        raise ValueError("broken")
    if what == "C":
        10 ** 10 ** 10  # holds the GIL: no signal gets in
    if what == "sleep":
        time.sleep(60)
    if what == "deaf":
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    if what == "die":
        os._exit(3)
    return {"nan": [float("nan")], "text": ["1"], "two": [1, 2], "bool": [True]}.get(what, [0.25])

class Judge:
    async def __call__(self, prompts, completions, **columns):
        await asyncio.sleep(60 if completions[0] == "slow" else 0.01)
        return [0.5]

class Sync(Judge):
    def __call__(self, prompts, completions, **columns):
        return super().__call__(prompts, completions, **columns)

async def filled(extra, prompts, completions):
    return [extra]

async_object, sync_object = Judge(), Sync()
async_partial = functools.partial(filled, 0.5)
partial_object = functools.partial(Judge(), unused=1)

def wrapped(prompts, completions):
    return filled(0.5, prompts, completions)

def leaves(prompts, completions):
    sys.exit(completions[0])

running = most = 0

async def judge(prompts, completions, **columns):
    global running, most
    running += 1
    most = max(most, running)
    try:
        await asyncio.sleep(60 if completions[0] == "slow" else 0.1)
    finally:
        running -= 1
    if completions[0] == "raise":
        raise TimeoutError("of its own")
    return [float(most)]
"""
    )
    return f"python:{tmp_path}/mine.py"


def test_a_function_of_ones_own(graders):
    assert scores(f"{graders}:half", ["x"], answer="1", other=2) == [0.5]
    assert scores(f"{graders}:half", ["x"], answer=None) == [None]
    with pytest.raises(ConfigError, match=r"no function 'hlf' \(did you mean 'half'\?\)"):
        open_scorer(f"{graders}:hlf", 1.0)


def test_failures_cost_their_own_answer_only(graders, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    texts = ["x", "raise", "sleep", "C", "deaf", "die", "nan", "text", "two", "bool", "x"]
    started = time.monotonic()
    got = scores(f"{graders}:odd", texts, timeout_s=0.3)
    assert time.monotonic() - started < 30
    assert got == [
        0.25,
        "error",
        "timeout",
        "timeout",
        "timeout",
        "error",
        "error",
        "error",
        "error",
        1.0,
        0.25,
    ]


def test_async_graders_run_together(graders):
    started = time.monotonic()
    got = scores(f"{graders}:judge", ["x"] * 12 + ["slow", "raise"], timeout_s=1.0)
    assert time.monotonic() - started < 20
    assert got[-2:] == ["timeout", "error"]
    assert max(float(score or 0) for score in got[:12]) >= 12  # so many at once


def test_any_thread_may_score(graders):
    scorer = open_scorer(f"{graders}:odd", 5.0)
    found = {}

    def grade(n):
        found[n] = scorer.score([Prompt("", ())] * 3, [answer("x")] * 3)

    threads = [threading.Thread(target=grade, args=[n]) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    scorer.close()
    assert [[v.reward for v in found[n]] for n in range(3)] == [[0.25] * 3] * 3


def test_json(tmp_path):
    pytest.importorskip("jsonschema")
    path = tmp_path / "schema.json"
    path.write_text(
        '{"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}'
    )
    texts = [
        '{"a": 1}',
        '```json\n{"a": 1}\n```',
        'Here:\n```\n{"a": 1, "b": null}\n```\nDone.',
        '{"a": "1"}',
        '{"a": 1} and more',
        '```\n{"a": 1}\n```\n```\n{"a": 2}\n```',
        '{"a": NaN}',
        "",
        "[" * 100_000,
    ]
    assert scores(f"json:{path}", texts) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    path.write_text('{"type": "nothing"}')
    with pytest.raises(ConfigError, match="is not a JSON schema"):
        open_scorer(f"json:{path}", 1.0)


def fenced(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\n"


def test_code():
    cases = [{"stdin": "2\n", "stdout": "4"}, {"input": "3\n", "output": "9\n"}]
    texts = [
        fenced("print(int(input()) ** 2)"),
        fenced("print(4)"),
        fenced("print(4)") + fenced("print(int(input()) ** 2)"),
        fenced("while True: pass"),
        fenced("1 / 0"),
        "print(int(input()) ** 2)",
        "",
        "```sh\necho 4\n```",
    ]
    assert scores("code", texts, timeout_s=1.0, cases=cases) == [1, 0, 1, 0, 0, 0, 0, 0]
    assert scores("code", [fenced("print('a  ')\nprint()")], answer="a") == [1]
    assert scores("code", [fenced("print(input())")], answer="b", stdin="b") == [1]
    assert scores("code", [fenced("")], answer=None) == [None]
    assert scores("code", [fenced("")], cases=[]) == ["error"]
    assert scores("code", [fenced("")], cases=[{"stdin": ""}]) == ["error"]


HUMAN_EVAL = {
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}


def test_unit_tests():
    prompt = 'def add(a, b):\n    """The sum."""\n'
    scorer = open_scorer("tests", 2.0)
    right = "    return a + b\n"
    texts = [right, "    return a - b\n", prompt + right, fenced(prompt + right), "", "import sys"]
    prompts = [Prompt(prompt, (), HUMAN_EVAL)] * len(texts)
    verdicts = scorer.score(prompts, [answer(t) for t in texts])
    assert [v.reward for v in verdicts] == [1, 0, 1, 1, 0, 0]
    assert verdicts[1].detail.startswith("wrong: line 2 of the tests")
    rows = [{"test_list": ["assert add(1, 2) == 3"]}, {"tests": "assert ("}, {"tests": []}, {}]
    verdicts = scorer.score([Prompt("", (), r) for r in rows], [answer(prompt + right)] * 4)
    assert [v.failure or v.reward for v in verdicts] == [1, "error", "error", None]
    scorer.close()


@pytest.mark.parametrize(
    "name", ["async_object", "sync_object", "async_partial", "partial_object", "wrapped"]
)
def test_whatever_can_be_awaited_is(graders, name):
    assert scores(f"{graders}:{name}", ["x", "y"]) == [0.5, 0.5]


def test_an_awaited_answer_of_a_plain_function_has_a_time_limit(graders):
    assert scores(f"{graders}:sync_object", ["slow", "x"], timeout_s=0.3) == ["timeout", 0.5]


def test_a_grader_that_calls_exit_costs_its_own_answer(graders):
    scorer = open_scorer(f"{graders}:leaves", 5.0)
    try:
        (verdict,) = scorer.score([Prompt("", ())], [answer("no key set")])
    finally:
        scorer.close()
    assert (verdict.failure, verdict.detail) == ("error", "SystemExit: no key set")


def test_an_interrupted_grader_is_replaced(tmp_path, monkeypatch):
    """Half an import would be found by the next answer's."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    (tmp_path / "slow_to_import.py").write_text(
        "import sys, time\nsys.modules['slow_to_import_begun'] = sys\ntime.sleep(60)\n"
    )
    (tmp_path / "torn.py").write_text(
        "import sys\ndef f(prompts, completions):\n"
        "    if completions[0] == 'slow':\n        import slow_to_import\n"
        "    return [float('slow_to_import_begun' in sys.modules)]\n"
    )
    source = f"python:{tmp_path}/torn.py:f"
    assert scores(source, ["slow", "x"], timeout_s=0.3) == ["timeout", 0.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit('no key set')\n", "ends.py cannot be run: SystemExit: no key set"),
        ("import os\nos._exit(7)\n", r"ends.py:f: reading it ended the process \(exit code 7\)"),
    ],
)
def test_a_file_that_ends_the_process_is_named(tmp_path, text, message):
    (tmp_path / "ends.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_scorer(f"python:{tmp_path}/ends.py:f", 1.0)


def test_a_file_that_does_not_come_to_its_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("stepwell.posttrain.rewards.grader_pool.START_S", 0.5)
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(ConfigError, match=r"waits.py:f: reading it took longer than 0.5 s"):
        open_scorer(f"python:{tmp_path}/waits.py:f", 1.0)
