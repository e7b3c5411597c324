import json

import pytest
from tests.mix.test_sweep import recipe, stores  # noqa: F401

from stepwell import cli
from stepwell.config import Run


@pytest.fixture(scope="module")
def swept(stores, tmp_path_factory):  # noqa: F811
    """A recipe, and a sweep by it."""
    folder = tmp_path_factory.mktemp("mix")
    recipe(stores).save(folder / "recipe.toml")
    words = ["--runs", "8", "--design", "maximin", "--natural", "1"]
    args = ["mix", "sweep", str(folder / "recipe.toml"), "--out", str(folder / "s"), *words]
    assert cli.main(args) == 0
    return folder


def said(capsys, *words):
    code = cli.main(["mix", *map(str, words)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_from_a_sweep_to_a_recipe_that_trains(swept, capsys):
    assert len((swept / "s" / "runs.csv").read_text().splitlines()) == 9
    code, out, _ = said(capsys, "fit", swept / "s", "--json")
    assert code == 0
    assert set(json.loads(out)["outcomes"]) == {"web", "code"}

    code, out, _ = said(capsys, "propose", swept / "s", "--tokens", "2000", "--draws", "20")
    assert code == 0
    assert "decision: the " in out
    proposal = json.loads((swept / "s" / "proposal.json").read_text())
    sources = Run.load(swept / "s" / "proposal.toml").data.sources
    assert sum(s.weight for s in sources) == pytest.approx(1, abs=1e-3)
    assert {s.max_epochs for s in sources} == {4.0}
    assert proposal["targets"] == {"web": 1.0, "code": 3.0}

    words = [
        "--tokens",
        "2e3",
        "--target",
        "code=1",
        "--max-epochs",
        "7",
        "--draws",
        "20",
        "--json",
    ]
    code, out, _ = said(capsys, "propose", swept / "s", *words)
    assert json.loads(out)["targets"] == {"web": 0.0, "code": 1.0}
    assert Run.load(swept / "s" / "proposal.toml").data.sources[0].max_epochs == 7.0


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["propose", "s", "--tokens", "1e9"], "the most is"),
        (["propose", "s", "--tokens", "0"], "must be 1 or more"),
        (["propose", "s", "--tokens", "1e3", "--target", "wob=1"], "did you mean 'web'"),
        (["propose", "s", "--tokens", "1e3", "--target", "web"], "is not NAME=NUMBER"),
        (
            ["validate", "s", "--checkpoint", "x", "--steps", "1", "--mix", "a"],
            "is not NAME:DOMAIN",
        ),
        (["propose", "s", "--tokens", "nan"], "must be 1 or more"),
        (["propose", "s", "--tokens", "1e3", "--max-epochs", "nan"], "a finite number above 0"),
        (["propose", "s", "--tokens", "1e3", "--max-epochs", "-1"], "a finite number above 0"),
        (["propose", "s", "--tokens", "1e3", "--draws", "19"], "at least 20"),
        (["propose", "s", "--tokens", "1e3", "--draws", "-1"], "at least 20"),
        (["propose", "s", "--tokens", "1e3", "--seed", "-1"], "at least 0"),
        (["propose", "s", "--tokens", "1e3", "--target", "web=nan"], "0 or more"),
        (["propose", "s", "--tokens", "1e3", "--target", "web=1", "web=2"], "'web' twice"),
        (["sweep", "recipe.toml", "--out", "n", "--seed", "-1"], "--seed -1 must be at least 0"),
        (["sweep", "recipe.toml", "--out", "n", "--procs", "0"], "--procs 0 must be at least 1"),
        (["sweep", "recipe.toml", "--out", "n", "--runs", "0"], "--runs 0 must be at least 3"),
        (["sweep", "recipe.toml", "--out", "n", "--natural", "0"], "must be at least 1"),
        (["sweep", "recipe.toml", "--out", "n", "--power", "nan"], "must be a finite number"),
        (["sweep", "recipe.toml", "--out", "n", "--runs", "5"], "--runs 6"),
        (["doremi", "recipe.toml", "--out", "n", "--step-size", "nan"], "must be positive"),
        (["doremi", "recipe.toml", "--out", "n", "--step-size", "inf"], "must be positive"),
        (["doremi", "recipe.toml", "--out", "n", "--smoothing", "nan"], "between 0 and 1"),
        (["validate", "s", "--checkpoint", "x", "--steps", "0", "--mix", "a:web=1"], "--steps 0"),
        (["validate", "s", "--checkpoint", "x", "--steps", "1", "--procs", "0"], "--procs 0"),
        (["validate", "s", "--checkpoint", "x", "--steps", "1", "--lr", "nan"], "--lr nan"),
        (
            ["validate", "s", "--checkpoint", "x", "--steps", "1", "--mix", "a:web=1", "a:code=1"],
            "names 'a' twice",
        ),
        (["fit", "nowhere"], "mix sweep` first"),
        (["sweap"], "did you mean 'sweep'"),
    ],
)
def test_mistakes_are_named(swept, capsys, words, wrong, monkeypatch):
    monkeypatch.chdir(swept)
    code, _, err = said(capsys, *words)
    assert code in (2, 3)
    assert wrong in err


def test_doremi_and_validate(swept, capsys):
    recipe_path, out = swept / "recipe.toml", swept / "d"
    code, shown, _ = said(capsys, "doremi", recipe_path, "--out", out, "--step-size", "2", "--json")
    assert code == 0
    found = json.loads((out / "doremi.json").read_text())
    assert json.loads(shown) == found
    assert sum(found["weights"].values()) == pytest.approx(1)
    # A second run with other settings is not mixed with the first; with the same it goes on.
    for other, named in (
        (["--step-size", "3"], "step_size (2.0, now 3.0)"),
        (["--step-size", "2", "--smoothing", "0.1"], "smoothing"),
        (["--step-size", "2", "--reference", out / "reference"], "reference"),
    ):
        code, _, err = said(capsys, "doremi", recipe_path, "--out", out, *other)
        assert code == 2
        assert named in err
    assert said(capsys, "doremi", recipe_path, "--out", out, "--step-size", "2")[0] == 0

    mixes = ["--mix", "even:web=0.5,code=0.5", "web:web=1"]
    words = ["--checkpoint", out / "reference", "--steps", "2", "--seeds", "1", *mixes]
    code, shown, _ = said(capsys, "validate", swept / "s", *words)
    assert code == 0
    assert "one seed: no error known" in shown
    assert (swept / "s" / "validate" / "web-0" / "run.toml").is_file()
