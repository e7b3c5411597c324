"""A layout never changes the numbers: every entry of tests/layouts.py against one process.

Gradients, norm, weights and optimiser state after one step; then the checkpoint of that step is
loaded under the next layout of as many ranks, and in one process, and one more step is taken: equal
to never having stopped.
"""

from pathlib import Path

import pytest
import torch

from stepwell.data.loader import rank_rows
from stepwell.data.packing import pack_rows
from stepwell.parallel.mesh import init_distributed
from stepwell.train.engine import Engine
from tests.layouts import KINDS, LAYOUTS, Layout, by_ranks
from tests.oracle import LENGTH, assert_same, documents, take_step
from tests.parallel.ranks import run_ranks

TOLERANCE = 1e-9


def batch():
    """Eight rows; the third trains nothing, and the last is short."""
    return pack_rows(documents(), LENGTH, rows=[[0], [1], [2], [3, 4], [5, 6], [7], [8], [0]])


def share(mesh):
    rows = rank_rows(batch().num_rows, mesh.data_rank, mesh.data_world)
    return batch().rows(rows.start, rows.stop)


def two_steps(run):
    engine = Engine(run)
    return take_step(engine, batch()), take_step(engine, batch())


def each_layout(layouts: list[Layout], folder: Path):
    """On each rank: (first step, second step after loading the layout before's checkpoint)."""
    firsts, seconds = [], []
    for i, layout in enumerate(layouts):
        run = layout.run()
        engine = Engine(run, mesh=init_distributed(run.layout))
        firsts.append(take_step(engine, share(engine.mesh)))
        engine.save(folder / str(i), {}).wait()
    for i, layout in enumerate(layouts):
        saved = [j for j, other in enumerate(layouts) if other.kind == layout.kind]
        before = saved[saved.index(i) - 1]
        run = layout.run()
        engine = Engine(run, mesh=init_distributed(run.layout))
        engine.load(folder / str(before))
        seconds.append(take_step(engine, share(engine.mesh)))
    return list(zip(firsts, seconds, strict=True))


@pytest.fixture(scope="module")
def references():
    alone = {kind: two_steps(Layout("", 1, kind=kind).run()) for kind in KINDS}
    assert all(first["norm"] > 0.05 for first, _ in alone.values())  # so clipping is in force
    return alone


def check(layouts, references, folder):
    num_ranks = layouts[0].num_ranks
    if num_ranks == 1:
        results = [each_layout(layouts, folder)]
    else:
        results = run_ranks(each_layout, num_ranks, layouts, folder, timeout_s=300)
    for i, layout in enumerate(layouts):
        for step, wanted in enumerate(references[layout.kind]):
            found = [rank[i][step] for rank in results]
            # A pipeline's rank has the gradients and the optimiser's state of its own pieces.
            assert set().union(*found) == set(wanted)
            for rank, part in enumerate(found):
                where = f"{layout.name}, rank {rank}, step {step + 1}"
                assert {"loss", "norm"} | {k for k in wanted if k.startswith("weight/")} <= set(
                    part
                )
                assert_same(part, {name: wanted[name] for name in part}, TOLERANCE, where)
    for i, layout in enumerate(layouts):
        engine = Engine(Layout("", 1, kind=layout.kind).run())
        engine.load(folder / str(i))
        alone = take_step(engine, batch())
        assert_same(alone, references[layout.kind][1], TOLERANCE, f"{layout.name}, then alone")


QUICK = by_ranks([layout for layout in LAYOUTS if layout.quick])
SLOW = by_ranks([layout for layout in LAYOUTS if not layout.quick])


@pytest.mark.parametrize("num_ranks", QUICK)
def test_a_layout_never_changes_the_numbers(num_ranks, references, tmp_path):
    check(QUICK[num_ranks], references, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", SLOW)
def test_nor_does_any_other(num_ranks, references, tmp_path):
    check(SLOW[num_ranks], references, tmp_path)


def test_the_comparison_can_fail(references):
    first, second = references["tied"]
    with pytest.raises(AssertionError, match="off by"):
        assert_same(second, first, TOLERANCE)
    wrong = {**first, "norm": first["norm"] * (1 + 1e-6)}
    with pytest.raises(AssertionError, match="norm off by"):
        assert_same(wrong, first, TOLERANCE)
    assert torch.equal(first["norm"], references["tied"][0]["norm"])
