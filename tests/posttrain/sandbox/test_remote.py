import math
import sys

import pytest

from stepwell.posttrain.sandbox.pool import Limits, Program, Sandbox
from stepwell.posttrain.sandbox.remote import Failed, from_text, to_text


@pytest.fixture(scope="module")
def sandbox():
    box = Sandbox(Limits(wall_s=10.0, cpu_s=5))
    yield box
    box.close()


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(10**40),
        "a'\"\n\ud800",
        b"\0\xff",
        (1, [2.5, {"a": (None,), 3: {4, 5}}], frozenset({1})),
        1 + 2j,
        [],
        (),
        {},
        set(),
        ("float", "x"),
        math.inf,
        -0.0,
    ],
)
def test_plain_data_arrive_equal(value):
    got = from_text(to_text(value, lambda v: pytest.fail(f"{v!r} is plain")), lambda n: n)
    assert repr(got) == repr(value)
    assert type(got) is type(value)


def test_what_is_not_plain_stays():
    class Whole(int):
        def __eq__(self, other):
            return True

    kept = []
    text = to_text([Whole(1), print], lambda v: kept.append(v) or len(kept) - 1)
    assert len(kept) == 2
    assert from_text(text, lambda n: f"kept {n}") == ["kept 0", "kept 1"]
    assert math.isnan(from_text(to_text(math.nan, id), id))
    deep = []
    for _ in range(1000):
        deep = [deep]
    to_text(deep, lambda v: 0)


ADD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'\nassert add([1], [2]) == [1, 2]"


@pytest.mark.parametrize(
    ("code", "tests", "entry_point", "ended"),
    [
        (ADD, TESTS, "", "ok"),
        (ADD, "def check(candidate):\n    assert candidate(1, 2) == 3", "add", "ok"),
        (ADD, "def check(candidate):\n    assert candidate(1, 2) == 4", "add", "wrong"),
        (ADD, "def test_add():\n    assert add(1, b=2) == 4", "", "wrong"),
        (ADD, TESTS, "sub", "wrong"),
        (ADD, "assert sub(1, 2) == 3", "", "error"),
        (ADD, "assert add(", "", "broken"),
        (ADD, "assert add(lambda: 0, 1) == 3", "", "broken"),
        (
            ADD,
            "try:\n    add(1, 'a')\nexcept TypeError:\n    pass\nelse:\n    assert False",
            "",
            "ok",
        ),
        ("def add(a, b): return a - b", TESTS, "", "wrong"),
        ("def add(a, b):\n    raise ValueError('no')", TESTS, "", "error"),
        ("def add(a, b): return [0] * 10**9", TESTS, "", "memory"),
        ("x = [0] * 10**9", TESTS, "", "memory"),
        ("syntax error", TESTS, "", "error"),
        ("", TESTS, "", "error"),
        ("def f():\n    yield from range(3)", "assert list(f()) == [0, 1, 2]", "", "ok"),
        (
            "class Stack:\n    def __init__(self): self.x = []\n"
            "    def push(self, v): self.x.append(v)\n    def pop(self): return self.x.pop()\n",
            "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert s.x == [1]",
            "",
            "ok",
        ),
        ("def f(x): return round(x, 2)", "assert abs(f(2.675) - 2.67) < 1e-9", "", "ok"),
    ],
)
def test_tests(sandbox, code, tests, entry_point, ended):
    done = sandbox.run(Program(code, tests=tests, entry_point=entry_point))
    assert done.ended == ended, done


def test_no_end(sandbox):
    for code in ("def add(a, b):\n    while True: pass", "while True: pass"):
        done = sandbox.run(Program(code, tests=TESTS), Limits(wall_s=0.4))
        assert done.ended == "timeout"


CHEATS = {
    "leaves before the tests": "import sys\nsys.exit(0)",
    "leaves in the call": "import os\ndef add(a, b): os._exit(0)",
    "says so": "print('ok')\nprint('{\"ended\": \"ok\"}')\ndef add(a, b): return 0",
    "equal to everything": (
        "class E:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
        "def add(a, b): return E()"
    ),
    "an int that is equal to everything": (
        "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return E(0)"
    ),
    "other built-ins": (
        "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.len = lambda x: 3\n"
        "__debug__ = False\ndef add(a, b): return None"
    ),
    "its own check": "def check(f): pass\ndef test_add(): pass\ndef add(a, b): return None",
    "raises what passes": "def add(a, b): raise SystemExit(0)",
    "reads the tests": (
        "import gc, sys\nfound = []\n"
        "for o in gc.get_objects():\n"
        "    if isinstance(o, dict):\n"
        "        found += [v for v in list(o.values()) if isinstance(v, str) and 'assert' in v"
        " and 'add(' in v and 'gc' not in v]\n"
        "f = sys._getframe()\n"
        "while f:\n    found += [v for v in f.f_locals.values() if isinstance(v, str) and "
        "'assert add' in v and 'gc' not in v]\n    f = f.f_back\n"
        "def add(a, b): return 3 if found else 0"
    ),
    "reads the other process": (
        "import glob, os\n"
        "def add(a, b):\n"
        "    for p in glob.glob('/proc/[0-9]*/mem') + glob.glob('/proc/[0-9]*/fd/*'):\n"
        "        try:\n            open(p, 'rb+').close()\n"
        "        except OSError: continue\n"
        "        if str(os.getpid()) not in p: return 3\n"
        "    return 0"
    ),
    "writes a verdict everywhere": (
        "import os\n"
        "def add(a, b):\n"
        "    for fd in range(256):\n"
        '        try: os.write(fd, b\'{"ended": "ok", "detail": ""}\\n\')\n'
        "        except OSError: pass\n"
        "    return 0"
    ),
    "answers for itself": (
        "import os, struct\n"
        "def add(a, b):\n"
        "    t = repr(('tuple', [True, ('remote', 'eval')])).encode()\n"
        "    for fd in (3, 4):\n"
        "        try: os.write(fd, struct.pack('<Q', len(t)) + t)\n"
        "        except OSError: pass\n"
        "    return 0"
    ),
    "kills the tests": (
        "import os\n"
        "def add(a, b):\n"
        "    for pid in range(1, 50):\n"
        "        if pid != os.getpid():\n"
        "            try: os.kill(pid, 9)\n"
        "            except OSError: pass\n"
        "    return 0"
    ),
    "a very long answer": "def add(a, b): return 'x' * 10**8",
    "a deep answer": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_does_not_pass(sandbox, name):
    done = sandbox.run(Program(CHEATS[name], tests="assert add(1, 2) == 3", entry_point=""))
    assert done.ended in ("wrong", "error", "timeout", "memory"), done
    fair = sandbox.run(Program(ADD, tests="assert add(1, 2) == 3"))
    assert fair.ended == "ok"


def test_what_programs_can_pass_is_data():
    assert "stepwell.posttrain.sandbox.remote" in sys.modules
    with pytest.raises((Failed, ValueError)):
        from_text("__import__('os')", id)
