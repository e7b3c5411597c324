import json
import os
import platform
import shutil
import signal
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepwell.curate.executors import local
from stepwell.curate.executors.local import LocalExecutor
from stepwell.curate.plan import make_plan
from stepwell.curate.recipe import Recipe
from stepwell.curate.run import WORK, curate, read_curation
from stepwell.types import ConfigError, DataError, StepwellError
from tests.curate import corpus


def run(values, out, workers=1, fresh=False):
    plan = make_plan(Recipe.parse(values))
    return list(curate(plan, out, LocalExecutor(workers), fresh))


@pytest.fixture
def raw(tmp_path):
    corpus.write(tmp_path / "raw")
    return tmp_path / "raw"


def test_every_record_is_kept_or_removed_with_its_reason(raw, tmp_path):
    run(corpus.recipe(raw), tmp_path / "out")
    values = read_curation(tmp_path / "out")
    kept, removed = corpus.result(tmp_path / "out")
    assert values["tally"]["read"] == {"a": 40, "b": 41}
    assert len(kept) + len(removed) == 81
    # b7 repeats a6 with other white space, which doesn't count.
    sizes = {source: [len(t) for s, _, t in kept if s == source] for source in ("a", "b")}
    assert values["kept"] == {"a": [40, sum(sizes["a"])], "b": [37, sum(sizes["b"])]}
    found = {(source, doc): (step, reason) for source, doc, step, reason, *_ in removed}
    assert found["b", "b9"] == ("1. gopher-quality", "gopher_too_few_words")
    assert found["b", "b3"] == found["b", "b7"] == ("2. exact-dedup", "exact_duplicate")
    assert ("read", "broken_json") in found.values()
    counted = {
        reason: docs
        for entry in values["tally"]["steps"].values()
        for reason, docs in entry["dropped"].items()
    }
    assert counted == {"broken_json": 1, "gopher_too_few_words": 1, "exact_duplicate": 2}
    assert not (tmp_path / "out" / WORK).exists()


def test_cutting_changes_nothing(raw, tmp_path):
    parts = run(corpus.recipe(raw), tmp_path / "whole")
    assert max(part.total for part in parts) == 2
    parts = run(corpus.recipe(raw, batch_bytes=900, shard_bytes=2000), tmp_path / "cut", workers=2)
    assert max(part.total for part in parts) > 10
    assert corpus.result(tmp_path / "cut") == corpus.result(tmp_path / "whole")


def test_a_step_is_about_its_sources_only(raw, tmp_path):
    values = corpus.recipe(raw)
    values["steps"] = [
        {"kind": "gopher-quality", "min_words": 400, "sources": ["a"]},
        {"kind": "exact-dedup", "sources": ["b"]},
    ]
    run({**values, "batch_bytes": 900, "shard_bytes": 3000}, tmp_path / "out")
    kept, removed = corpus.result(tmp_path / "out")
    steps = {(source, step) for source, _, step, *_ in removed}
    assert steps == {("a", "1. gopher-quality"), ("b", "read")}
    assert {doc for source, doc, _ in kept if source == "b"} == {f"b{i}" for i in range(40)}
    assert read_curation(tmp_path / "out")["kept"]["b"][0] == 40


def test_a_finished_curation_is_not_done_again(raw, tmp_path):
    out = tmp_path / "out"
    run(corpus.recipe(raw), out)
    before = (out / "curation.json").stat().st_mtime_ns
    assert run(corpus.recipe(raw), out) == []
    assert (out / "curation.json").stat().st_mtime_ns == before
    assert run(corpus.recipe(raw), out, fresh=True) != []


def test_another_recipe_or_input_is_refused(raw, tmp_path):
    out = tmp_path / "out"
    run(corpus.recipe(raw), out)
    other = corpus.recipe(raw)
    other["steps"][0]["min_words"] = 20
    with pytest.raises(ConfigError, match=r"steps\.0\.min_words was 50 and is 20"):
        run(other, out)
    with (raw / "a.jsonl").open("a") as file:
        file.write(json.dumps({"text": corpus.text(99)}) + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl changed"):
        run(corpus.recipe(raw), out)
    run(corpus.recipe(raw), out, fresh=True)
    assert read_curation(out)["tally"]["read"]["a"] == 41


def test_another_version_of_a_library_is_refused(raw, tmp_path):
    recipe = Recipe.parse(corpus.recipe(raw))
    plan = make_plan(recipe)
    assert plan.fingerprint["libraries"]["python"] == platform.python_version()
    assert plan.fingerprint["libraries"]["tokenizers"] == metadata.version("tokenizers")
    list(curate(plan, tmp_path / "out", LocalExecutor(1)))
    libraries = {**plan.fingerprint["libraries"], "tokenizers": "0.0.1"}
    other = replace(plan, fingerprint={**plan.fingerprint, "libraries": libraries})
    with pytest.raises(ConfigError, match=r"libraries.tokenizers was '.*' and is '0.0.1'"):
        list(curate(other, tmp_path / "out", LocalExecutor(1)))


def test_the_scorer_s_code_counts_where_it_is_used(raw):
    values = corpus.recipe(raw)
    scored = {**values, "steps": [{"kind": "perplexity", "model": str(raw)}]}
    codes = {make_plan(Recipe.parse(v)).fingerprint["code"] for v in (values, scored)}
    assert len(codes) == 2


def test_a_folder_of_something_else_is_left_alone(raw, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    for fresh in (False, True):
        with pytest.raises(ConfigError, match="is no curation"):
            run(corpus.recipe(raw), tmp_path / "mine", fresh=fresh)
    assert (tmp_path / "mine" / "letter").read_text() == "dear"


def test_nothing_kept_says_why_and_leaves_nothing(raw, tmp_path):
    values = corpus.recipe(raw)
    values["steps"][0]["min_words"] = 5000
    with pytest.raises(DataError, match="gopher_too_few_words, e.g. a0: ") as error:
        run(values, tmp_path / "out")
    assert "no document is left of 81 records" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_worker_that_dies_is_said_and_nothing_is_lost(raw, tmp_path, monkeypatch):
    out = tmp_path / "out"
    values = corpus.recipe(raw, batch_bytes=900, shard_bytes=3000)
    monkeypatch.setattr(local, "run_task", die)
    with pytest.raises(StepwellError, match="a worker process died during stage 0"):
        run(values, out, workers=2)
    monkeypatch.undo()
    run(values, out, workers=2)
    assert len(corpus.result(out)[0]) == 77


def test_a_source_may_be_empty_and_ids_may_repeat(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    rows = [{"id": "same", "text": corpus.text(i)} for i in range(6)]
    mail = "mail me at jo.smith@web.de. "
    rows += [{"id": "same", "text": mail + corpus.text(i)} for i in (7, 8)]
    (raw / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (raw / "b.jsonl").write_text("")
    values = corpus.recipe(raw, batch_bytes=1500, store={"vocab_size": 300})
    values["steps"] = [{"kind": "pii"}, {"kind": "exact-dedup"}]
    run(values, tmp_path / "out")
    found = read_curation(tmp_path / "out")
    assert found["tally"]["read"] == {"a": 8, "b": 1}
    assert found["tally"]["steps"]["read"]["dropped"] == {"empty_file": 1}
    assert found["tally"]["steps"]["1. pii"]["edited"] == 2
    assert found["kept"]["a"][0] == 8
    assert found["kept"]["b"] == [0, 0]
    assert [store["docs"] for store in found["stores"]] == [8]


def test_progress_is_counted_in_bytes(raw, tmp_path):
    parts = run(corpus.recipe(raw, batch_bytes=900, shard_bytes=3000), tmp_path / "out")
    for part in {step.part for step in parts if step.total_bytes}:
        steps = [step for step in parts if step.part == part]
        done = [step.done_bytes for step in steps]
        assert done == sorted(done)
        assert done[0] == 0
        assert done[-1] == steps[-1].total_bytes
        assert steps[-1].done == steps[-1].total
    read = next(step for step in parts if step.total_bytes)
    assert read.total_bytes == sum(path.stat().st_size for path in raw.iterdir())


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_two_steps_of_one_kind_are_told_apart(raw, tmp_path):
    values = corpus.recipe(raw)
    values["steps"] = [
        {"kind": "gopher-quality"},
        {"kind": "gopher-quality", "min_words": 115, "sources": ["b"]},
    ]
    run(values, tmp_path / "out")
    removed = corpus.rows(tmp_path / "out" / "removed")
    steps = {row["step"] for row in removed}
    assert steps == {"read", "1. gopher-quality", "2. gopher-quality"}
    tally = read_curation(tmp_path / "out")["tally"]["steps"]
    for step in steps:
        num_dropped = sum(tally[step]["dropped"].values())
        assert num_dropped == sum(row["step"] == step for row in removed)


@pytest.mark.parametrize(
    ("place", "is_read"),
    [
        (".", True),
        ("*", True),
        ("**/*.jsonl", True),
        ("o*/d*/*.parquet", True),
        ("*.jsonl", False),
        ("*/*.jsonl", False),
        ("out2/*.jsonl", False),
    ],
)
def test_a_folder_that_is_read_holds_no_output(raw, monkeypatch, place, is_read):
    monkeypatch.chdir(raw)
    (raw / "out2").mkdir()
    shutil.copy("a.jsonl", "out2")
    if place == "o*/d*/*.parquet":
        (raw / "out2" / "d").mkdir()
        pq.write_table(pa.table({"text": [corpus.text(1)]}), "out2/d/x.parquet")
    values = {"sources": [{"name": "s", "path": place}]}
    if not is_read:
        run(values, Path("out"))
        return
    with pytest.raises(ConfigError, match=r"out lies in .*, which source 's' reads"):
        run(values, Path("out"))
    run(values, raw.parent / "elsewhere")


def test_fresh_removes_nothing_that_is_read(raw, tmp_path):
    out = tmp_path / "out"
    run(corpus.recipe(raw), out)
    values = {"sources": [{"name": "s", "path": str(out / "documents" / "part-00000.parquet")}]}
    with pytest.raises(ConfigError, match=r"source 's' reads .*lies in the output"):
        run(values, out, fresh=True)
    assert (out / "documents" / "part-00000.parquet").exists()


def test_a_result_that_is_no_longer_whole_is_not_taken_for_one(raw, tmp_path):
    out = tmp_path / "out"
    values = corpus.recipe(raw)
    values["steps"] = [{"kind": "fuzzy-dedup", "save_index": str(tmp_path / "index")}]
    run(values, out)
    assert run(values, out) == []
    (out / "documents" / "part-00000.parquet").unlink()
    with pytest.raises(DataError, match=r"documents/part-00000.parquet is gone .*add --fresh"):
        run(values, out)
    run(values, out, fresh=True)
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(DataError, match="index/.* are gone or changed; add --fresh"):
        run(values, out)
    run(values, out, fresh=True)
    assert (tmp_path / "index").is_dir()
    with (out / "datasheet.html").open("a") as file:
        file.write("more")
    with pytest.raises(DataError, match="datasheet.html is gone or changed"):
        run(values, out)
