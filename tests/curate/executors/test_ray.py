import os
from pathlib import Path

import pytest
import ray
from ray import cluster_utils

from stepwell.curate.executors.local import LocalExecutor
from stepwell.curate.executors.ray import RayExecutor
from stepwell.curate.plan import make_plan
from stepwell.curate.recipe import Recipe
from stepwell.curate.run import curate
from stepwell.types import ConfigError
from tests.curate import corpus


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one core each, in this machine."""
    here = os.getcwd()
    os.chdir("/")  # a cluster knows nothing of where a command will be given
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    os.chdir(here)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_two_nodes_give_the_same_result(cluster, tmp_path, monkeypatch):
    """Sources and output are relative to where the command is given."""
    monkeypatch.chdir(tmp_path)
    raw = Path("raw")
    corpus.write(raw)
    values = corpus.recipe(raw, batch_bytes=900, shard_bytes=3000)
    plan = make_plan(Recipe.parse(values))
    list(curate(plan, tmp_path / "local", LocalExecutor(1)))
    executor = RayExecutor(cluster.address)
    assert len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 2
    parts = list(curate(plan, Path("ray"), executor))
    assert any(part.total > 2 for part in parts)
    assert corpus.result(tmp_path / "ray") == corpus.result(tmp_path / "local")


def test_an_error_in_a_task_is_the_error_of_the_run(cluster, tmp_path):
    raw = tmp_path / "raw"
    corpus.write(raw)
    plan = make_plan(Recipe.parse(corpus.recipe(raw)))
    executor = RayExecutor(cluster.address)
    with pytest.raises(ConfigError, match="does not see the work folder"):
        list(executor.run(tmp_path / "nowhere", 0, [0]))
    assert plan.reads
