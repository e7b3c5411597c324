import json

import pytest

from stepwell.cli import main


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines: list[dict[str, object]] = [
        {"prompt": f"{a}+{b}=?", "answer": str(a + b), "completion": f"answer: {a + b + wrong}"}
        for a, b, wrong in [(1, 2, 0), (30, 4, 1), (50, 6, 0)]
    ]
    messages = [{"role": "user", "content": "7+8=?"}]
    lines.append({"prompt": messages, "answer": "15", "completions": ["answer: 15", "no idea"]})
    lines.append({"question": "no prompt"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_answers_and_junk(rows, capsys):
    assert main(["reward-test", "exact", rows, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["dropped"]) == (4, 1)
    assert [answer["score"] for answer in result["answers"]] == [1, 0, 1, 1, 0]
    names = [finding["junk"] for finding in result["junk"]]
    assert "nothing" in names
    assert "many answers at once" in names
    assert not any(finding["refused"] for finding in result["junk"])
    assert main(["reward-test", "exact", rows, "--limit", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("exact on 2 rows\n")
    assert "1  'answer: 3'" in shown


def test_a_scorer_that_junk_satisfies(rows, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def f(prompts, completions, answer):\n"
        "    return [float(a in c) for a, c in zip(answer, completions)]\n"
    )
    assert main(["reward-test", f"python:{tmp_path}/mine.py:f", rows, "--timeout-s", "5"]) == 2
    out, err = capsys.readouterr()
    assert "many answers at once: 'answer: 56 or 3 or 56'  REFUSED" in out
    assert "gives 1 to junk" in err


def test_a_grader_that_always_fails(rows, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "async def f(prompts, completions): return 1 / 0\n"
        "async def g(texts, answers, **columns): return [float(answers[0] == 'answer: 3')]\n"
    )
    assert main(["reward-test", f"python:{tmp_path}/mine.py:f", rows]) == 3
    out, err = capsys.readouterr()
    assert out.count("warning: reward 'reward': the grader fails on 4 rows") == 1
    assert "the first failure is error: ZeroDivisionError: division by zero" in err
    assert main(["reward-test", f"python:{tmp_path}/mine.py:g", rows, "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [answer["score"] for answer in answers] == [1, 0, 0, 0, 0]


def test_a_grader_that_hangs_is_stopped_soon_and_said_so(rows, tmp_path, capsys):
    """What there was to see so far is shown."""
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def f(prompts, completions): time.sleep(60)\n"
        "def g(prompts, completions): raise ValueError('two\\n\\nlines')\n"
        "class C:\n    pass\n"
    )
    mine = f"python:{tmp_path}/mine.py"
    assert main(["reward-test", f"{mine}:f", rows, "--timeout-s", "0.1"]) == 3
    out, err = capsys.readouterr()
    assert out.count("timeout  'answer") == 4
    assert "too long for each of the first 4 answers" in err
    assert main(["reward-test", f"{mine}:g", rows]) == 3
    out = capsys.readouterr().out
    assert out.count("(ValueError: two lines)\n") == 5
    assert "\n\nlines" not in out
    assert main(["reward-test", f"{mine}:C", rows]) == 2
    assert "'C' is a class" in capsys.readouterr().err


def test_a_constant_is_refused(rows, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def f(prompts, completions, **k): return [1.0]\n")
    assert main(["reward-test", f"python:{tmp_path}/mine.py:f", rows]) == 2
    out, err = capsys.readouterr()
    assert "no junk scores less than the row's own answer on 4 of 4 rows" in out
    assert "nothing else in the reward tells right from wrong" in err


def test_a_penalty(rows, capsys):
    assert main(["reward-test", "repetition:2", rows]) == 0
    assert "junk is not tried" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["model:x", "ROWS"], 2, "stepwell score"),
        (["exakt", "ROWS"], 2, "did you mean 'exact'"),
        (["exact", "ROWS", "--limit", "0"], 2, "must be at least 1"),
        (["exact", "ROWS", "--timeout-s", "0"], 2, "must be above 0"),
        (["gym:gcd", "ROWS"], 3, "needs the column 'entry', which 4 of 4 rows lack"),
        (["exact", "nothing.jsonl"], 3, "nothing.jsonl"),
    ],
)
def test_refusals(rows, words, code, message, capsys):
    assert main(["reward-test", *[rows if w == "ROWS" else w for w in words]]) == code
    assert message in capsys.readouterr().err
