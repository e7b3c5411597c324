"""Memory levers on every axis of two ranks: bit-equal to the same layout without them."""

import pytest

from tests.layouts import MODEL
from tests.oracle import base_run
from tests.parallel.ranks import run_ranks
from tests.trajectory import assert_equal, trajectories

AXES = {
    "tensor": {"layout.tp": 2},
    "context": {"layout.cp": 2},
    "replicas": {"layout.dp_replicate": 2},
    "pipeline": {"layout.pp": 2},
}
ROWS = {"train.micro_batch_rows": 4}
ALONE = {"train.micro_batch_rows": 8, "optim.clip_norm": 0.0, "guard.action": "none"}
# (what is set on both sides, the lever, axes that it is refused on)
LEVERS = {
    "host optimizer": ({}, {"offload.optimizer": True}, ()),
    "host parameters": ({}, {"offload.parameters": True}, ()),
    "release": (ALONE, {"optim.release_gradients": True}, ("pipeline",)),
    "release, host parameters": (
        ALONE | {"offload.parameters": True},
        {"optim.release_gradients": True},
        ("pipeline",),
    ),
}


@pytest.mark.parametrize("axis", AXES)
def test_a_lever_changes_nothing(axis):
    levers = {name: lever for name, lever in LEVERS.items() if axis not in lever[2]}
    pairs = [
        base_run(**{**MODEL, **ROWS, **AXES[axis], **both, **extra})
        for both, lever, _ in levers.values()
        for extra in ({}, lever)
    ]
    for found in run_ranks(trajectories, 2, pairs, 2):
        for i, name in enumerate(levers):
            assert_equal(found[2 * i + 1], found[2 * i], f"{name}, {axis}")
