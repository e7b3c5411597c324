import sys

import pytest

from stepwell.posttrain.sampling.environments import find_environment
from stepwell.posttrain.user_code import attribute, load
from stepwell.posttrain.verifiers.python_file import python_function
from stepwell.types import ConfigError

BOTH = """
from __future__ import annotations
from dataclasses import dataclass
import neighbour_of_mine

@dataclass
class Rule:
    least: int = 1

class Mine:
    role = "tool"
    def reset(self, row): pass
    def step(self, text): return None, float(neighbour_of_mine.SCORE), True

def score(prompts, completions):
    return [Rule().least * neighbour_of_mine.SCORE]

number = 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_mine.py").write_text("SCORE = 0.5\n")
    path = tmp_path / "json.py"  # a library's name, which stays the library's
    path.write_text(BOTH)
    yield str(path)
    sys.modules.pop("neighbour_of_mine", None)


def test_a_file_is_a_module_like_any_other(file):
    """Dataclasses with postponed annotations, and imports of files beside it."""
    assert python_function(f"{file}:score")([""], [""]) == [0.5]
    environment = find_environment(f"python:{file}:Mine")()
    assert environment.step("") == (None, 0.5, True)
    import json

    assert json.loads("[1]") == [1]


def test_what_a_name_must_stand_for(file):
    module = load(file, "what")
    assert attribute(module, "Rule", "what", "class")().least == 1
    with pytest.raises(
        ConfigError, match="what: 'number' of .*json.py is of type int, and no clas"
    ):
        attribute(module, "number", "what", "class")
    with pytest.raises(ConfigError, match=r"no function 'scor' \(did you mean 'score'\?\)"):
        python_function(f"{file}:scor")
    with pytest.raises(ConfigError, match="'Rule' is a class, whose objects are no scores"):
        python_function(f"{file}:Rule")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit(3)\n", "cannot be run: SystemExit: 3"),
        ("1 / 0\n", "cannot be run: ZeroDivisionError"),
        ("def f(:\n", "cannot be run: SyntaxError"),
    ],
)
def test_a_file_that_fails_leaves_nothing(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "bad.py").write_text(text)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "bad.py", "what")
    assert not [name for name in set(sys.modules) - before if name.startswith("bad")]
    with pytest.raises(ConfigError, match="there is no Python file"):
        load(tmp_path / "none.py", "what")
    (tmp_path / "bad.txt").write_text("")
    with pytest.raises(ConfigError, match="not a Python file"):
        load(tmp_path / "bad.txt", "what")
