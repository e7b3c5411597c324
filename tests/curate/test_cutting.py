"""However a curation is cut, in whatever order its tasks run and wherever it is interrupted: the
same documents are kept and removed."""

import random
import shutil

from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.curate.plan import make_plan
from stepwell.curate.recipe import Recipe
from stepwell.curate.run import curate, read_curation
from stepwell.curate.tasks import run_task
from tests.curate import corpus

STEPS = [
    {"kind": "gopher-quality", "min_words": 60},
    {"kind": "exact-dedup"},
    {"kind": "pii"},
    {"kind": "line-dedup", "sources": ["b"]},
    {"kind": "fuzzy-dedup", "threshold": 0.7},
]


class Shuffled:
    """Tasks in some order; several are begun before the first of them is said to have ended, as
    workers do. After `limit` tasks of all the process ends."""

    def __init__(self, seed, workers, limit):
        self.random, self.workers, self.left = random.Random(seed), workers, limit

    def run(self, work, stage, numbers):
        waiting = list(numbers)
        self.random.shuffle(waiting)
        while waiting:
            batch, waiting = waiting[: self.workers], waiting[self.workers :]
            for number in batch:
                if self.left == 0:
                    raise KeyboardInterrupt
                self.left -= 1
                run_task(work, stage, number)
            yield from batch


def counts(out):
    """What doesn't depend on the clock."""
    values = read_curation(out)
    steps = {
        name: {key: entry[key] for key in ("in", "out", "dropped", "edits", "edited")}
        for name, entry in values["tally"]["steps"].items()
    }
    return steps, values["kept"], values["decisions"]


CUTS = st.integers(200, 30_000)


@settings(max_examples=12)
@given(
    batch_bytes=CUTS,
    shard_bytes=CUTS,
    seed=st.integers(0, 99),
    workers=st.integers(1, 5),
    ends=st.lists(st.integers(0, 12), max_size=4),
)
def test_any_cut_order_and_interruption(
    tmp_path_factory, batch_bytes, shard_bytes, seed, workers, ends
):
    folder = tmp_path_factory.getbasetemp() / "cutting"
    whole = folder / "whole"
    if not whole.exists():
        corpus.write(folder / "raw", num_docs=14)
        plan = make_plan(Recipe.parse(corpus.recipe(folder / "raw", steps=STEPS)))
        list(curate(plan, whole, Shuffled(0, 1, -1)))
    cut = {"batch_bytes": batch_bytes, "shard_bytes": shard_bytes}
    plan = make_plan(Recipe.parse(corpus.recipe(folder / "raw", steps=STEPS, **cut)))
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    for number, limit in enumerate([*ends, -1]):
        try:
            list(curate(plan, out, Shuffled(seed + number, workers, limit)))
        except KeyboardInterrupt:
            assert limit >= 0
            assert not (out / "curation.json").exists()
    assert corpus.result(out) == corpus.result(whole)
    assert counts(out) == counts(whole)
