import csv
import json
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from stepwell.config import Run
from stepwell.data.store import StoreWriter, TokenStore
from stepwell.mix import sweep as mix
from stepwell.mix.design import maximin_design
from stepwell.mix.files import check_plan
from stepwell.mix.fit import cross_validate, fewest_mixtures
from stepwell.train.lock import folder_lock
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
        mix.sweep(recipe(stores), tmp_path / "s", 2, "dirichlet", num_natural=1)
    assert len(mix.load_sweep(tmp_path / "s").runs) == 2


def test_other_texts_of_as_many_tokens_are_another_plan(stores, tmp_path):
    shutil.copytree(stores, tmp_path / "stores")
    plans = []
    for _ in range(2):
        domains, targets = mix.domains_of(recipe(tmp_path / "stores"))
        plans.append({"domains": [*map(asdict, domains)], "targets": [*map(asdict, targets)]})
        store = TokenStore.open(tmp_path / "stores" / "heldout" / "web")
        docs = [(store.doc(i) + 1) % 320 for i in range(store.num_docs)]
        shutil.rmtree(store.folder)
        with StoreWriter(store.folder, store.manifest["tokenizer"], 320) as writer:
            for doc in docs:
                writer.add(doc)
    assert plans[0]["domains"] == plans[1]["domains"]
    check_plan(tmp_path / "plan.json", plans[0], "it")
    check_plan(tmp_path / "plan.json", plans[0], "it")
    with pytest.raises(ConfigError, match="it has another targets"):
        check_plan(tmp_path / "plan.json", plans[1], "it")


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


def test_what_ends_well_beside_one_that_fails_is_kept():
    failed, good, waiting = Future(), Future(), Future()
    for future in (failed, good):
        future.set_running_or_notify_cancel()
    failed.set_exception(TrainingError("no"))
    places = {failed: 0, good: 1, waiting: 2}
    timer = threading.Timer(0.05, good.set_result, ["loss"])
    timer.start()
    stream = mix.ended(places)
    assert next(stream) == (1, "loss")
    with pytest.raises(TrainingError, match="no"):
        next(stream)
    timer.join()
    assert waiting.cancelled()


def test_lines_end_at_line_feeds_alone(tmp_path):
    run = mix.Measured(0, 0, {"a\u2028b": 1.0}, {"w\x85": 2.0}, 1.0)
    path = tmp_path / mix.RUNS
    path.write_text(json.dumps(asdict(run), ensure_ascii=False) + "\n", "utf-8")
    assert mix.read_runs(path) == [run]


def test_the_design_must_be_enough_for_a_law(stores):
    """Two domains: 4 different mixtures for the law, and a fold of them that is left out."""
    for runs, natural in ((6, 2), (5, 1)):
        mix.check_design(recipe(stores), runs, "auto", 0.5, natural, 0)
        with pytest.raises(ConfigError, match=f"the nearest legal value is --runs {runs}"):
            mix.check_design(recipe(stores), runs - 1, "auto", 0.5, natural, 0)
    assert [fewest_mixtures(d) for d in (2, 3, 6)] == [5, 6, 9]
    mixtures = maximin_design(np.array([0.5, 0.3, 0.2]), 6)
    cross_validate("log-linear", mixtures, 3 + mixtures[:, :1])


def test_auto_spreads_few_domains(stores, tmp_path):
    mix.sweep(recipe(stores), tmp_path / "s", 2, num_natural=1)
    assert json.loads((tmp_path / "s" / mix.SWEEP).read_text())["design"]["kind"] == "maximin"


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({"num_runs": 1}, "the nearest legal value is 2"),
        ({"num_runs": 0}, "the nearest legal value is 2"),
        ({"seed": -1}, "seed=-1"),
        ({"power": float("nan")}, "power=nan"),
    ],
)
def test_designs_that_cannot_be(stores, more, wrong):
    domains, _ = mix.domains_of(recipe(stores))
    values = {"num_runs": 3, "design": "dirichlet", "num_natural": 1}
    assert len(mix.mixtures_of(domains, **values)) == 3
    with pytest.raises(ConfigError, match=wrong):
        mix.mixtures_of(domains, **{**values, **more})


def test_runs_that_repeat_more_than_the_recipe_allows_are_named_before(stores, tmp_path):
    tight = [{"path": str(stores / "train" / n), "max_epochs": 0.2} for n in ("web", "code")]
    said = []
    mix.sweep(
        recipe(stores, **{"data.sources": tight}), tmp_path / "s", 3, num_natural=1, say=said.append
    )
    assert said[0].startswith("warning: run ")
    domain = mix.Domain("web", "x", 100, 1.0, max_epochs=2.0)
    assert mix.overread([domain], [0.5], 400) == []
    assert "reads web 2.1 times" in mix.overread([domain], [0.5], 420)[0]


def test_one_store_is_no_two_domains(stores, tmp_path):
    (tmp_path / "link").symlink_to(stores / "train" / "web")
    sources = [{"path": str(stores / "train" / "web")}, {"path": str(tmp_path / "link")}]
    with pytest.raises(ConfigError, match="hold the same tokens"):
        mix.domains_of(recipe(stores, **{"data.sources": sources}))


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        (mix.SWEEP, "{", "is damaged"),
        (mix.SWEEP, "[]", "holds no object"),
        (mix.SWEEP, "{}", "is no sweep's plan"),
        (mix.RUNS, '{"run": 0}', "line 1 of"),
        (mix.RUNS, '{"run": 0, "se', "line 1 of"),
        (
            mix.RUNS,
            '{"run": 0, "seed": 0, "weights": {}, "losses": {"web": NaN}, "seconds": 1}',
            "not finite",
        ),
        (
            mix.RUNS,
            '{"run": 0, "seed": 0, "weights": {}, "losses": {}, "seconds": 1}',
            "of another sweep",
        ),
    ],
)
def test_damaged_files_are_named(stores, tmp_path, name, text, wrong):
    domains, targets = mix.domains_of(recipe(stores))
    plan = {
        "domains": [asdict(d) for d in domains],
        "targets": [asdict(t) for t in targets],
        "recipe": recipe(stores).model_dump(mode="json", exclude_none=True),
    }
    (tmp_path / mix.SWEEP).write_text(json.dumps(plan))
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=wrong):
        mix.load_sweep(tmp_path)


def test_workers_die_with_a_killed_sweep_which_then_goes_on(stores, tmp_path):
    path, out = tmp_path / "recipe.toml", tmp_path / "s"
    recipe(stores, **{"train.steps": 300}).save(path)
    words = ["mix", "sweep", str(path), "--out", str(out), "--runs", "6", "--procs", "2"]
    parent = subprocess.Popen(
        [sys.executable, "-m", "stepwell.cli", *words], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not list(out.glob("runs/*/metrics.jsonl")):
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.05)
    workers = [int(pid) for pid in _children(parent.pid)]
    assert len(workers) >= 2
    parent.kill()
    parent.wait()
    while any(Path(f"/proc/{pid}").exists() and not _zombie(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    begun = {p.parent for p in out.glob("runs/*/run.toml")}
    for folder in begun:
        with folder_lock(folder):
            pass


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
