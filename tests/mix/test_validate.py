import json

import pytest

from stepwell.config import Run
from stepwell.metrics import read_lines
from stepwell.mix import sweep, validate
from stepwell.train.checkpoint import latest
from stepwell.train.pretrain import pretrain
from stepwell.types import CheckpointError, ConfigError
from tests.mix.test_sweep import recipe, stores  # noqa: F401

MIXES = {"natural": {"web": 0.3, "code": 0.7}, "web": {"web": 1.0}}


@pytest.fixture(scope="module")
def parent(stores, tmp_path_factory):  # noqa: F811
    run = recipe(stores, dir=str(tmp_path_factory.mktemp("runs") / "parent"), **{"train.steps": 6})
    pretrain(run)
    return run


def test_each_mixture_is_annealed_from_the_same_checkpoint_with_every_seed(parent, tmp_path):
    domains, targets = sweep.domains_of(parent)
    out, said = tmp_path / "v", []
    found = validate.validate(parent.dir, MIXES, domains, targets, out, 4, [0, 1], say=said.append)
    assert len(said) == 4
    assert [v.mix for v in found] == ["natural", "web"]
    anneals = [json.loads(line) for line in (out / validate.ANNEALS).read_text().splitlines()]
    losses = {(a["mix"], a["seed"]): a["losses"] for a in anneals}
    assert losses["web", 0] != losses["web", 1]
    # Targets are weighted 1 : 3, and the gain is that of each seed, averaged.
    target = lambda mix, seed: (losses[mix, seed]["web"] + 3 * losses[mix, seed]["code"]) / 4
    gains = [target("natural", seed) - target("web", seed) for seed in (0, 1)]
    assert found[1].gain == pytest.approx(sum(gains) / 2)
    assert found[1].error == pytest.approx(abs(gains[0] - gains[1]) / 2)
    assert found[0].gain == 0
    # The branch goes on from the parent's step, on its own sources, with the rate going down.
    run = Run.load(out / "web-1" / "run.toml")
    assert [s.path for s in run.data.stages[0].sources] == [domains[0].path]
    lines = read_lines(out / "web-1" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [7, 8, 9, 10]
    rates = [line["train/lr"] for line in lines]
    assert rates[0] == pytest.approx(parent.optim.lr)
    assert sorted(rates, reverse=True) == rates
    assert rates[-1] < 0.2 * rates[0]
    assert latest(parent.dir) is not None

    # What is finished is kept; another seed is only itself run.
    again = []
    more = validate.validate(
        parent.dir, MIXES, domains, targets, out, 4, [0, 1, 2], say=again.append
    )
    assert len(again) == 2
    assert more[1].error is not None
    with pytest.raises(ConfigError, match="num_steps"):
        validate.validate(parent.dir, MIXES, domains, targets, out, 5, [0])


def test_a_gain_is_sure_above_twice_its_error():
    verdict = lambda error: validate.Verdict("m", 1.0, 0.1, error, {})
    assert verdict(0.049).sure
    assert not verdict(0.05).sure
    assert not verdict(None).sure
    text = validate.as_text([validate.Verdict("natural", 1.1, 0.0, None, {}), verdict(None)])
    assert "one seed: no error known" in text


@pytest.mark.parametrize(
    ("mixes", "said"),
    [
        ({"a": {"web": 1.0}}, "the fewest is 2"),
        ({"a": {"web": 1.0}, "b": {"wob": 1.0}}, "'wob'"),
        ({"a": {"web": 1.0}, "b": {"web": 0.0}}, "one above 0"),
        ({"a": {"web": 1.0}, "b": {"web": -1.0}}, "0 or more"),
    ],
)
def test_mixtures_that_cannot_be(parent, mixes, said):
    domains, _ = sweep.domains_of(parent)
    with pytest.raises(ConfigError, match=said):
        validate.check_mixes(mixes, domains)


def test_a_checkpoint_must_lie_in_its_run(tmp_path):
    with pytest.raises(CheckpointError, match="does not lie in a run's folder"):
        validate.recipe_of(tmp_path / "somewhere" / "step")
