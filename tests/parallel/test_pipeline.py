"""Pipelines on real gloo ranks: gradients of every schedule against one process."""

import pytest
import torch

from tests.oracle import assert_same, base_run, one_step
from tests.parallel.ranks import run_ranks

PIPELINE = {"model.num_layers": 6, "train.micro_batch_rows": 1}


def pipeline_run(schedule="1f1b", pp=2, **overrides):
    stages = {"interleaved-1f1b": 2, "zbv": 2, "dualpipev": 2}.get(schedule, 1)
    reshard = "never" if schedule in ("zbv", "dualpipev") else "always"
    layout = {
        "layout.pp": pp,
        "layout.pp_schedule": schedule,
        "layout.pp_stages_per_rank": stages,
        "layout.reshard_after_forward": reshard,
    }
    return base_run(**{**PIPELINE, **layout, **overrides})


def steps(runs):
    return [one_step(run) for run in runs]


def together(ranks):
    """What all ranks hold of one step; what several hold must be the same."""
    whole = {}
    for rank in ranks:
        for name, value in rank.items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


if __name__ == "__main__":
    import sys
    import time
    t = time.time()
    schedules = sys.argv[2:]
    pp = int(sys.argv[1])
    want = one_step(base_run(**PIPELINE))
    runs = [pipeline_run(s, pp) for s in schedules]
    found = run_ranks(steps, pp, runs, timeout_s=80.0)
    for i, s in enumerate(schedules):
        got = together([f[i] for f in found])
        print(s, set(want) ^ set(got), got["norm"].item(), want["norm"].item())
        assert_same(got, want, 1e-9, s)
    print(time.time() - t)
