import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell import labs
from stepwell.cli import main
from stepwell.commands.lab import claims

LAB = """
import torch
from matplotlib.figure import Figure

CLAIM = "the sum of 1..n is n (n + 1) / 2"

def measure(small):
    return {"small": small, "sums": [torch.arange(n + 1).sum().item() for n in (1, 2)]}

def check(numbers):
    pairs = enumerate(numbers["sums"], 1)
    return [f"the sum to {n} is {x}" for n, x in pairs if x != n * (n + 1) / 2]

def plot(numbers):
    figure = Figure()
    figure.subplots().plot(numbers["sums"])
    return figure
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Writes the lab, changed, under a new name among the shipped ones, and returns the name."""
    monkeypatch.setattr(labs, "__path__", [*labs.__path__, str(tmp_path)])
    monkeypatch.chdir(tmp_path)

    def write(name: str, old: str = "", new: str = "") -> str:
        (tmp_path / f"{name}.py").write_text(LAB.replace(old, new))
        return name

    yield write
    for name in [n for n in sys.modules if n.startswith("stepwell.labs.") and "test" in n]:
        del sys.modules[name]


def test_a_claim_that_holds(lab, capsys):
    name = lab("holds_test")
    assert main(["lab", name, "--small"]) == 0
    out = capsys.readouterr().out
    assert out == (
        "the sum of 1..n is n (n + 1) / 2\n"
        "holds\n"
        f"runs/labs/{name}/numbers.json, runs/labs/{name}/plot.svg\n"
    )
    folder = Path("runs/labs") / name
    assert json.loads((folder / "numbers.json").read_text()) == {"small": True, "sums": [1, 3]}
    assert "<svg" in (folder / "plot.svg").read_text()
    assert sorted(os.listdir(folder)) == ["numbers.json", "plot.svg"]


def test_a_claim_that_does_not_hold(lab, capsys):
    name = lab("fails_test", "(n + 1).sum", "(n + 2).sum")
    assert main(["lab", name, "--out", "here", "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["holds"] is False
    assert verdict["contradictions"] == ["the sum to 1 is 3", "the sum to 2 is 6"]
    assert verdict["numbers"] == {"small": False, "sums": [3, 6]}
    assert sorted(os.listdir("here")) == ["numbers.json", "plot.svg"]


def test_the_same_numbers_give_the_same_files(lab):
    name = lab("again_test")
    for out in ("a", "b"):
        assert main(["lab", name, "--out", out]) == 0
    for file in ("numbers.json", "plot.svg"):
        assert Path("a", file).read_bytes() == Path("b", file).read_bytes()


@pytest.mark.parametrize("value", [".item() * float('nan')", ""])
def test_numbers_that_json_cannot_hold_are_refused(lab, capsys, value):
    name = lab("numbers_test", ".item()", value)
    sys.modules.pop(f"stepwell.labs.{name}", None)
    assert main(["lab", name, "--out", "here"]) == 1
    assert f"lab {name}: its numbers are no JSON" in capsys.readouterr().err
    assert os.listdir("here") == []


def test_an_unknown_lab_names_the_nearest(lab, capsys):
    lab("holds_test")
    assert main(["lab", "hold_test"]) == 2
    assert "unknown lab 'hold_test' (did you mean 'holds_test'?)" in capsys.readouterr().err


def test_labs_are_listed_with_their_claims(lab, capsys):
    lab("listed_test")
    (Path.cwd() / "helper_test.py").write_text("x = 1\n")
    assert main(["lab"]) == 0
    out = capsys.readouterr().out
    assert "  listed_test the sum of 1..n is n (n + 1) / 2\n" in out
    assert "helper_test" not in out
    assert main(["lab", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == claims()
    assert "stepwell.labs.listed_test" not in sys.modules


def test_listing_imports_no_torch():
    code = (
        "import sys\nfrom stepwell.cli import main\nmain(['lab'])\n"
        "sys.exit('imported torch' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
