"""Several steps of a run, with everything they left: what a memory lever must not change."""

import torch

from stepwell.data.loader import rank_rows
from stepwell.parallel.mesh import init_distributed
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from tests.oracle import full, global_batch


def my_rows(mesh, batch=None):
    batch = global_batch() if batch is None else batch
    share = rank_rows(batch.num_rows, mesh.data_rank, mesh.data_world)
    return batch.rows(share.start, share.stop)


def train(engine, steps, batch=None):
    """The gradient norms of `steps` steps on one batch."""
    loss, rows = cross_entropy(engine.run.loss), my_rows(engine.mesh, batch)
    norms = []
    for _ in range(steps):
        engine.forward_backward(rows, loss)
        norms.append(engine.optim_step().grad_norm)
    return norms


def everything(engine):
    """All weights and optimiser state, whole, copied."""
    state = {f"state/{k}": full(v) for k, v in engine.optimizer.state_dict().items()}
    return {f"weight/{k}": v for k, v in engine.iter_state()} | state


def trajectory(run, steps=5, batch=None):
    """Runs in each rank: norms, and everything after `steps` steps."""
    engine = Engine(run, mesh=init_distributed(run.layout))
    return train(engine, steps, batch), everything(engine)


def trajectories(runs, steps=5):
    return [trajectory(run, steps) for run in runs]


def assert_equal(got, wanted, case=""):
    """Bit for bit: norms, weights and state."""
    assert got[0] == wanted[0], f"{case}: {got[0]} instead of {wanted[0]}"
    assert got[1].keys() == wanted[1].keys(), case
    for name, value in wanted[1].items():
        assert torch.equal(got[1][name], value), f"{case}: {name}"
