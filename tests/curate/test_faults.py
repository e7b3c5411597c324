"""What ends a curation: faulty steps, full disks, signals. What was finished is kept, nothing else
is left behind, and the same command goes on."""

import os
import signal
import subprocess
import sys
import time

import pytest

from stepwell.curate import recipe as recipes
from stepwell.curate.executors.local import LocalExecutor
from stepwell.curate.plan import make_plan, without_right
from stepwell.curate.recipe import Recipe
from stepwell.curate.run import WORK, curate
from stepwell.curate.tasks import _items
from stepwell.types import DataError, StepwellError
from tests.curate import corpus
from tests.disk import largest_file

KINDS = {"faulty": "Faulty", "faulty-global": "FaultyGlobal", "lossy": "Lossy"}


def run(values, out, workers=1):
    return list(curate(make_plan(Recipe.parse(values)), out, LocalExecutor(workers)))


def unfinished(out):
    """What is under a temporary name."""
    return [path.name for path in out.rglob("*") if ".tmp" in path.name]


@pytest.fixture
def raw(tmp_path, monkeypatch):
    for kind, name in KINDS.items():
        monkeypatch.setitem(recipes.STEPS, kind, f"tests.curate.faulty:{name}")
    corpus.write(tmp_path / "raw")
    return tmp_path / "raw"


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"kind": "faulty", "word": "Too short"}, r"step 1\. faulty failed on document b/b9 of "),
        ({"kind": "faulty", "together": 2}, "failed on 2 documents together, the first a/a0, of "),
        ({"kind": "faulty-global"}, r"step 1\. faulty-global: sketch failed on document a/a0 of "),
        ({"kind": "faulty-global", "at": "apply"}, r"failed on document a/a0 of .*s00/00000/docum"),
        (
            {"kind": "faulty-global", "at": "decide"},
            r"^1\. faulty-global: decide failed on all",
        ),
        (
            {"kind": "lossy"},
            r"step 1\. lossy was given 40 documents, kept 39 and removed 0: 1 are ",
        ),
    ],
)
def test_a_step_that_fails_is_named_with_the_document(raw, tmp_path, step, said):
    with pytest.raises(StepwellError, match=said):
        run(corpus.recipe(raw, steps=[step]), tmp_path / "out")
    assert unfinished(tmp_path) == []


def test_what_was_done_before_a_fault_is_kept(raw, tmp_path):
    values = corpus.recipe(raw, steps=[{"kind": "faulty", "word": "Too short"}])
    with pytest.raises(StepwellError, match=r"ValueError: a fault \(faulty.py:\d+\)"):
        run(values, tmp_path / "out")
    done = [path.name for path in (tmp_path / "out" / WORK / "s00").iterdir()]
    assert done == ["00000"]


# Tokens of all documents, a shard of documents, the plan: each is too large for the next.
@pytest.mark.parametrize("num_bytes", [24_000, 12_000, 2_000])
def test_a_full_disk_is_said_and_the_same_command_goes_on(tmp_path, num_bytes):
    corpus.write(tmp_path / "raw")
    store = {"store": {"vocab_size": 300, "by": "source"}, "shard_bytes": 8000}
    values = corpus.recipe(tmp_path / "raw", batch_bytes=2000, **store)
    out = tmp_path / "out"
    with (
        largest_file(num_bytes),
        pytest.raises(DataError, match="cannot write .*/out: File too la"),
    ):
        run(values, out)
    assert not (out / "curation.json").exists()
    assert unfinished(out) == []
    run(values, out)
    run(values, tmp_path / "whole")
    assert corpus.result(out) == corpus.result(tmp_path / "whole")


SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)


def test_killed_or_stopped_anywhere_it_goes_on_with_any_number_of_workers(tmp_path):
    corpus.write(tmp_path / "raw", num_docs=60)
    values = corpus.recipe(tmp_path / "raw", shard_bytes=3000, batch_bytes=1500)
    run(values, tmp_path / "whole")
    Recipe.parse(values).save(tmp_path / "recipe.toml")
    out = tmp_path / "out"
    for kind in SIGNALS:
        num_tasks = num_done(out) + 6
        process = start(out, tmp_path / "recipe.toml", workers=2)
        wait_for_tasks(process, out, num_tasks)
        # A terminal's Ctrl-C goes to all processes, the others to the one that was started.
        os.killpg(process.pid, kind) if kind == signal.SIGINT else process.send_signal(kind)
        said = process.communicate(timeout=60)[1]
        ends_within(process.pid, 5.0)
        if kind == signal.SIGKILL:
            assert process.returncode == -kind
        else:
            assert process.returncode == 130, said
            assert said.endswith(
                f"stepwell: interrupted; {out} holds what was finished, and the same command goes "
                "on from there\n"
            )
            assert unfinished(out) == []
    assert (out / WORK).exists()
    run(values, out)
    assert corpus.result(out) == corpus.result(tmp_path / "whole")
    assert unfinished(out) == []


def start(out, recipe, workers):
    words = ["curate", str(recipe), "--out", str(out), "--workers", str(workers)]
    return subprocess.Popen(
        [sys.executable, "-m", "stepwell", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def num_done(out):
    return len(list((out / WORK).glob("s*/[0-9]*")))


def wait_for_tasks(process, out, num_tasks):
    while num_done(out) < num_tasks:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def ends_within(group, seconds):
    """No process of the group is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError(f"processes of group {group} are left")


@pytest.mark.parametrize(
    ("fault", "said"),
    [("gone", "cannot open it now.*once it is back"), ("changed", "b.jsonl changed while")],
)
def test_an_input_that_vanishes_or_changes_ends_the_run_and_loses_nothing(tmp_path, fault, said):
    corpus.write(tmp_path / "raw")
    path, out = tmp_path / "raw" / "b.jsonl", tmp_path / "out"
    values = corpus.recipe(tmp_path / "raw")
    plan = make_plan(Recipe.parse(values))
    content, time_ns = path.read_bytes(), path.stat().st_mtime_ns
    if fault == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-400])
    with pytest.raises(DataError, match=said):
        list(curate(plan, out, LocalExecutor(1)))
    assert [p.name for p in (out / WORK / "s00").iterdir()] == ["00000"]
    path.write_bytes(content)
    os.utime(path, ns=(time_ns, time_ns))
    run(values, out)
    run(values, tmp_path / "whole")
    assert corpus.result(out) == corpus.result(tmp_path / "whole")


def test_an_input_that_changes_while_it_is_read_is_noticed(tmp_path):
    corpus.write(tmp_path / "raw")
    path = tmp_path / "raw" / "a.jsonl"
    plan = make_plan(Recipe.parse(corpus.recipe(tmp_path / "raw")))
    source = plan.source("a")
    (piece,) = plan.reads[0].pieces
    items = _items(plan, piece, source)
    next(items)
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match="changed while it was being curated"):
        list(items)


def test_a_file_that_could_not_be_opened_at_first_is_a_drop(tmp_path, monkeypatch):
    """As root every file can be opened; a file that vanishes from a listing can't."""
    corpus.write(tmp_path / "raw")
    piece = make_plan(Recipe.parse(corpus.recipe(tmp_path / "raw"))).reads[1].pieces[0]
    (tmp_path / "raw" / "b.jsonl").unlink()
    found = without_right(piece)
    assert (found.kind, found.reason) == ("dropped", "unreadable_file")


def test_a_full_disk_of_an_index_is_said_with_how_to_go_on(tmp_path):
    corpus.write(tmp_path / "raw")
    values = corpus.recipe(tmp_path / "raw", shard_bytes=1000, batch_bytes=1000)
    values["steps"] = [{"kind": "fuzzy-dedup", "save_index": str(tmp_path / "index")}]
    with largest_file(30_000), pytest.raises(DataError, match="what was finished is kept"):
        run(values, tmp_path / "out")
    run(values, tmp_path / "out")
