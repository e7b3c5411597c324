import json

import pytest

from stepwell.config import Run
from stepwell.metrics import read_lines
from stepwell.mix import sweep, validate
from stepwell.train.pretrain import pretrain
from stepwell.train.run_checkpoints import latest
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
    assert "learning rate 0.01, 100.0% of the run's peak" in said[0]
    assert len(said) == 5
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
    assert run.data.order == "shuffled"
    assert found[0].lr == parent.optim.lr
    assert rates[0] == pytest.approx(parent.optim.lr)
    assert sorted(rates, reverse=True) == rates
    assert rates[-1] < 0.2 * rates[0]
    assert latest(parent.dir) is not None

    # What is finished is kept; another seed is only itself run.
    again = []
    more = validate.validate(
        parent.dir, MIXES, domains, targets, out, 4, [0, 1, 2], say=again.append
    )
    assert len(again) == 3
    assert more[1].error is not None
    with pytest.raises(ConfigError, match="num_steps"):
        validate.validate(parent.dir, MIXES, domains, targets, out, 5, [0])


def test_a_gain_is_sure_where_students_interval_lies_above_0():
    verdict = lambda error, seeds: validate.Verdict("m", 1.0, 0.1, error, {}, seeds)
    # Student's quantiles for 1, 2 and 30 degrees of freedom.
    for seeds, quantile in ((2, 12.706), (3, 4.303), (31, 2.042)):
        assert verdict(0.0999 / quantile, seeds).sure
        assert not verdict(0.1001 / quantile, seeds).sure
        assert verdict(0.01, seeds).half_width == pytest.approx(0.01 * quantile, rel=1e-3)
    assert not verdict(None, 1).sure
    first = validate.Verdict("natural", 1.1, 0.0, None, {}, 1)
    assert "one seed: no error known" in validate.as_text([first, verdict(None, 1)])
    assert "95 % interval -0.0271 to +0.2271" in validate.as_text([first, verdict(0.01, 2)])


def test_anneals_begin_with_the_checkpoints_rate(stores, tmp_path):  # noqa: F811
    more = {
        "dir": str(tmp_path / "decayed"),
        "train.steps": 8,
        "optim.schedule.decay_steps": 4,
        "checkpoint.every_steps": 6,
        "data.order": "sequential",
    }
    decayed = recipe(stores, **more)
    pretrain(decayed)
    domains, targets = sweep.domains_of(decayed)
    for place, lr in ((6, 0.01 * (1 - 0.5**0.5)), (8, 0.01 * (1 - 0.75**0.5))):
        folder = tmp_path / "decayed" / "checkpoints" / f"step-{place:08d}"
        out, said = tmp_path / f"v{place}", []
        found = validate.validate(folder, MIXES, domains, targets, out, 2, [0], say=said.append)
        assert found[1].lr == pytest.approx(lr)
        lines = read_lines(out / "web-0" / "metrics.jsonl")
        assert lines[0]["train/lr"] == pytest.approx(lr)
        assert Run.load(out / "web-0" / "run.toml").data.order == "shuffled"
        assert said[0].startswith("warning") == (lr < 0.001)
    out = tmp_path / "given"
    found = validate.validate(folder, MIXES, domains, targets, out, 2, [0], lr=0.004)
    assert read_lines(out / "web-0" / "metrics.jsonl")[0]["train/lr"] == pytest.approx(0.004)
    with pytest.raises(ConfigError, match="lr"):
        validate.validate(folder, MIXES, domains, targets, out, 2, [0])
    with pytest.raises(ConfigError, match="must be a positive number"):
        validate.validate(folder, MIXES, domains, targets, tmp_path / "x", 2, [0], lr=float("nan"))


def test_a_trunk_within_a_stage_and_caps_of_its_own_can_be_validated(stores, tmp_path):  # noqa: F811
    run = recipe(stores, dir=str(tmp_path / "staged"), **{"train.steps": 4})
    sources = [{**s.model_dump(), "max_epochs": 9.0} for s in run.data.sources]
    stages = [{"start": 0.5, "sources": sources}]
    more = {"data.sources": sources, "data.stages": stages}
    run = Run.parse(run.model_dump(mode="json", exclude_none=True), more)
    pretrain(run)
    domains, targets = sweep.domains_of(recipe(stores))
    found = validate.validate(run.dir, MIXES, domains, targets, tmp_path / "v", 2, [0])
    assert [v.mix for v in found] == ["natural", "web"]


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
