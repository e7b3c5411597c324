import csv
import json

import pytest

from stepwell.config import Run
from stepwell.mix import sweep as mix
from stepwell.types import ConfigError, DataError, TrainingError
from tests.runs import MODEL, write_store


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    for seed, name in enumerate(("web", "code")):
        write_store(folder / "train" / name, seed, num_docs=40 * (seed + 1))
        write_store(folder / "heldout" / name, 10 + seed, num_docs=20)
    return folder


def recipe(stores, **more):
    return Run.parse(
        {},
        {
            **MODEL,
            "data.seq_len": 32,
            "data.sources": [{"path": str(stores / "train" / n)} for n in ("web", "code")],
            "data.heldout": [
                {"path": str(stores / "heldout" / n), "weight": w}
                for n, w in (("web", 1.0), ("code", 3.0))
            ],
            "train.steps": 3,
            "train.global_batch_rows": 4,
            "train.micro_batch_rows": 4,
            "train.eval_rows": 8,
            "optim.lr": 0.01,
            **more,
        },
    )


def test_a_sweep_trains_scores_and_goes_on_where_it_was(stores, tmp_path):
    said = []
    found = mix.sweep(recipe(stores), tmp_path / "s", 4, "maximin", num_natural=2, say=said.append)
    assert [d.name for d in found.domains] == ["web", "code"]
    assert [t.weight for t in found.targets] == [1.0, 3.0]
    assert len(said) == 4
    assert found.mixtures.sum(1) == pytest.approx(1)
    sizes = [d.tokens for d in found.domains]
    assert found.mixtures[0] == pytest.approx([s / sum(sizes) for s in sizes])
    # The natural mixture's copies differ in their seed only.
    assert (found.mixtures[0] == found.mixtures[1]).all()
    assert [run.seed for run in found.runs] == [0, 1, 0, 0]
    assert (found.losses[0] != found.losses[1]).all()
    assert not list((tmp_path / "s" / "runs").glob("*/checkpoints"))
    # What a run read is what its mixture says.
    corner = Run.load(tmp_path / "s" / "runs" / "0002" / "run.toml")
    assert [s.path for s in corner.data.sources] == [
        d.path for d, w in zip(found.domains, found.mixtures[2], strict=True) if w
    ]
    rows = list(csv.DictReader((tmp_path / "s" / mix.TABLE).open()))
    assert float(rows[3]["loss code"]) == pytest.approx(found.losses[3, 1], abs=1e-6)

    lines = (tmp_path / "s" / mix.RUNS).read_text().splitlines(keepends=True)
    (tmp_path / "s" / mix.RUNS).write_text("".join(lines[:1] + lines[2:]))
    again = []
    more = mix.sweep(recipe(stores), tmp_path / "s", 5, "maximin", num_natural=2, say=again.append)
    assert len(again) == 2  # the one that was lost and the one that is new
    without_time = lambda run: (run.run, run.seed, run.weights, run.losses)
    assert list(map(without_time, more.runs[:4])) == list(map(without_time, found.runs))


def test_the_seed_of_a_run_is_all_that_differs_between_copies(stores, tmp_path):
    one = mix.sweep(recipe(stores), tmp_path / "a", 3, num_natural=1)
    two = mix.sweep(recipe(stores, **{"train.seed": 5}), tmp_path / "b", 3, num_natural=1)
    assert (one.mixtures == two.mixtures).all()
    assert (one.losses != two.losses).all()


def test_a_changed_plan_is_refused(stores, tmp_path):
    mix.sweep(recipe(stores), tmp_path / "s", 2, num_natural=1)
    with pytest.raises(ConfigError, match=r"recipe.train.steps \(3, now 4\)"):
        mix.sweep(recipe(stores, **{"train.steps": 4}), tmp_path / "s", 2, num_natural=1)
    with pytest.raises(ConfigError, match="design.kind"):
        mix.sweep(recipe(stores), tmp_path / "s", 2, "maximin", num_natural=1)
    assert len(mix.load_sweep(tmp_path / "s").runs) == 2


def test_several_at_once_give_the_same(stores, tmp_path):
    alone = mix.sweep(recipe(stores), tmp_path / "a", 3, num_natural=1)
    both = mix.sweep(recipe(stores), tmp_path / "b", 3, num_natural=1, num_procs=2)
    assert both.losses == pytest.approx(alone.losses, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data.heldout": []}, "data.heldout is empty"),
        ({"model.init": "x"}, "start from the seed"),
        ({"data.stages": [{"start": 0.5, "sources": [{"path": "x"}]}]}, "data.stages"),
    ],
)
def test_recipes_that_cannot_be_swept(stores, tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        mix.sweep(recipe(stores, **change), tmp_path / "s", 3)
    assert not (tmp_path / "s").exists()


def test_one_domain_cannot_be_mixed_two_can(stores, tmp_path):
    one = [{"path": str(stores / "train" / "web")}]
    with pytest.raises(ConfigError, match="the fewest is 2"):
        mix.domains_of(recipe(stores, **{"data.sources": one}))
    assert len(mix.domains_of(recipe(stores))[0]) == 2


def test_at_least_one_run_is_of_the_design(stores):
    domains, _ = mix.domains_of(recipe(stores))
    assert len(mix.mixtures_of(domains, 2, "dirichlet", num_natural=1)) == 2
    with pytest.raises(ConfigError, match="the nearest legal value is 1"):
        mix.mixtures_of(domains, 2, "dirichlet", num_natural=2)


def test_stores_of_one_name_are_told_apart(stores):
    sources = recipe(stores).data.heldout + recipe(stores).data.sources
    names = [d.name for d in mix.named(sources, "x")]
    assert names == ["heldout/web", "heldout/code", "train/web", "train/code"]


def test_power_flattens_the_designs_centre(stores):
    domains, _ = mix.domains_of(recipe(stores))
    mean = lambda power: mix.mixtures_of(domains, 800, "dirichlet", power)[2:].mean(0)
    assert mean(0.0) == pytest.approx([0.5, 0.5], abs=0.05)
    assert mean(1.0) == pytest.approx([1 / 3, 2 / 3], abs=0.06)


def test_a_folder_without_a_sweep(tmp_path):
    with pytest.raises(DataError, match=r"sweep\.json is missing"):
        mix.load_sweep(tmp_path)
    plan = {"domains": [], "targets": [], "recipe": {}}
    (tmp_path / mix.SWEEP).write_text(json.dumps(plan))
    with pytest.raises(DataError, match="no finished run"):
        mix.load_sweep(tmp_path)


def test_a_run_that_fails_in_a_process_of_its_own_says_why(stores, tmp_path):
    """The guard's stop holds more than a message, which no pool can bring back."""
    wild = {"optim.lr": 1e4, "guard.action": "stop", "train.steps": 30}
    with pytest.raises(TrainingError, match=r"proxy 000\d: .*loss"):
        mix.sweep(recipe(stores, **wild), tmp_path / "s", 3, num_natural=1, num_procs=2)
