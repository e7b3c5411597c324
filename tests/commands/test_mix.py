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

    code, out, _ = said(capsys, "propose", swept / "s", "--tokens", "2000", "--draws", "10")
    assert code == 0
    assert "decision: the " in out
    proposal = json.loads((swept / "s" / "proposal.json").read_text())
    sources = Run.load(swept / "s" / "proposal.toml").data.sources
    assert sum(s.weight for s in sources) == pytest.approx(1, abs=1e-3)
    assert {s.max_epochs for s in sources} == {4.0}
    assert proposal["targets"] == {"web": 1.0, "code": 3.0}

    words = ["--tokens", "2e3", "--target", "code=1", "--max-epochs", "7", "--draws", "5", "--json"]
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

    mixes = ["--mix", "even:web=0.5,code=0.5", "web:web=1"]
    words = ["--checkpoint", out / "reference", "--steps", "2", "--seeds", "1", *mixes]
    code, shown, _ = said(capsys, "validate", swept / "s", *words)
    assert code == 0
    assert "one seed: no error known" in shown
    assert (swept / "s" / "validate" / "web-0" / "run.toml").is_file()
