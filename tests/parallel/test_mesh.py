import pytest
import torch
import torch.distributed as dist

from stepwell.parallel.mesh import (
    all_gather_objects,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    broadcast_object,
    init_distributed,
    launched_ranks,
    sparse_view,
)
from stepwell.parallel.rules import axis_sizes
from stepwell.ranks import RanksFailed
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError
from tests.parallel.ranks import run_ranks


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "sizes"),
    [(1, -1, 1, (1, 1)), (1, -1, 4, (1, 4)), (2, -1, 4, (2, 2)), (4, 1, 4, (4, 1))],
)
def test_axis_sizes_fill_the_world(replicate, shard, world, sizes):
    layout = LayoutConfig(dp_replicate=replicate, dp_shard=shard)
    found = axis_sizes(layout, world)
    assert (found.dp_replicate, found.dp_shard) == sizes


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "words"),
    [
        (3, -1, 4, ["dp_replicate=3", "4", "dp_replicate=2, or 3 ranks"]),
        (8, -1, 4, ["dp_replicate=8", "dp_replicate=4, or 8 ranks"]),
        (2, 3, 4, ["= 6", "ranks, 4", "dp_shard=2, or 6 ranks"]),
        (1, 2, 1, ["= 2", "ranks, 1", "dp_shard=1, or 2 ranks"]),
    ],
)
def test_a_layout_that_does_not_fill_the_world_is_refused(replicate, shard, world, words):
    layout = LayoutConfig(dp_replicate=replicate, dp_shard=shard)
    with pytest.raises(ConfigError) as error:
        axis_sizes(layout, world)
    for word in words:
        assert word in str(error.value)


def test_launched_ranks_reads_torchrun():
    assert launched_ranks({}) is None
    assert launched_ranks({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (8, 5, 1)


def test_one_process_needs_no_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    mesh = init_distributed(LayoutConfig())
    assert (mesh.world, mesh.rank, mesh.data_rank, mesh.data_world) == (1, 0, 0, 1)
    assert mesh.device_mesh is None
    assert mesh.is_main
    assert not torch.distributed.is_initialized()
    x = torch.tensor([1.0, 2.0])
    assert all_reduce_sum(x, mesh).tolist() == [1, 2]
    assert all_reduce_max(x, mesh).tolist() == [1, 2]
    assert broadcast_object({"a": 1}, mesh) == {"a": 1}
    assert all_gather_objects(3, mesh) == [3]
    barrier(mesh)


def _collectives(replicate):
    mesh = init_distributed(LayoutConfig(dp_replicate=replicate))
    again = init_distributed(LayoutConfig(dp_replicate=replicate))
    assert again.rank == mesh.rank
    assert mesh.device_mesh is not None
    assert mesh.device_mesh.mesh_dim_names == ("pp", "dp_replicate", "fsdp", "tp")
    x = torch.tensor([mesh.rank, 10 * mesh.rank], dtype=torch.float64)
    barrier(mesh)
    return {
        "shape": tuple(mesh.device_mesh.shape),
        "data": (mesh.data_rank, mesh.data_world),
        "sum": all_reduce_sum(x, mesh).tolist(),
        "max": all_reduce_max(x, mesh).tolist(),
        "unchanged": x.tolist(),
        "object": broadcast_object(f"from {mesh.rank}", mesh),
        "objects": all_gather_objects(mesh.rank, mesh),
    }


def test_collectives_on_four_ranks():
    for rank, got in enumerate(run_ranks(_collectives, 4, 2)):
        assert got == {
            "shape": (1, 2, 2, 1),
            "data": (rank, 4),
            "sum": [6, 60],
            "max": [3, 30],
            "unchanged": [rank, 10 * rank],
            "object": "from 0",
            "objects": [0, 1, 2, 3],
        }


def _views(layout, ep):
    """This rank's place on the dense view, and its neighbours on each view's axes."""
    mesh = init_distributed(layout)
    sparse = sparse_view(mesh, ep)
    assert mesh.device_mesh is not None
    with pytest.raises(ConfigError, match="ep=3 must divide the 2 ranks .* nearest .* is 2"):
        sparse_view(mesh, 3)
    groups = {"tp": mesh.tp_group, "cp": mesh.cp_group, "pp": mesh.pp_group}
    names = ("pp", "edp", "ep")
    return {
        "place": tuple(mesh.place),
        "dense": {n: dist.get_process_group_ranks(g) for n, g in groups.items() if g is not None},
        "sparse": {n: dist.get_process_group_ranks(sparse.get_group(n)) for n in names},
        "rows": (mesh.data_rank, mesh.counts_rows, mesh.counts_tokens),
    }


def test_dense_and_sparse_view_of_the_same_ranks():
    first, second, third, fourth = run_ranks(_views, 4, LayoutConfig(pp=2, cp=2), 2)
    assert first["dense"] == {"cp": [0, 1], "pp": [0, 2]}
    assert fourth["dense"] == {"cp": [2, 3], "pp": [1, 3]}
    assert first["sparse"] == {"pp": [0, 2], "edp": [0], "ep": [0, 1]}
    assert fourth["sparse"] == {"pp": [1, 3], "edp": [3], "ep": [2, 3]}
    assert [r["place"] for r in (first, second, third, fourth)] == [
        (0, 0, 0, 0, 0),
        (0, 0, 0, 1, 0),
        (1, 0, 0, 0, 0),
        (1, 0, 0, 1, 0),
    ]
    assert [r["rows"] for r in (first, second, third, fourth)] == [
        (0, True, True),
        (0, False, True),
        (0, False, False),
        (0, False, False),
    ]


def _refused():
    with pytest.raises(ConfigError, match="dp_replicate=1"):
        init_distributed(LayoutConfig(dp_replicate=2))
    return torch.distributed.is_initialized()


def test_a_refused_layout_starts_nothing():
    assert run_ranks(_refused, 3) == [False] * 3


def _one_fails():
    mesh = init_distributed(LayoutConfig())
    if mesh.rank == 1:
        raise ValueError("the reason on rank 1")
    barrier(mesh)


def test_a_failing_rank_shows_its_traceback():
    with pytest.raises(RanksFailed, match="the reason on rank 1"):
        run_ranks(_one_fails, 2)
