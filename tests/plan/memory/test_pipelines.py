"""What a pipeline's waiting micro-batches hold, in the ledger and in its closed form, held against
the real program on fake ranks."""

import pytest

from stepwell.config import Run
from stepwell.plan.cluster import cluster
from stepwell.plan.dryrun.dryrun import dry_run
from stepwell.plan.footprint.activations import block_of
from stepwell.plan.footprint.moments import moments_of, rank_of
from stepwell.plan.job import job_of
from stepwell.plan.memory.ledger import predict_rank

MODEL = {
    "vocab_size": 8192, "num_layers": 4, "d_model": 256, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 64, "d_ff": 704, "max_seq_len": 512, "tied": False,
}  # fmt: skip


def pipeline(schedule: str, **values) -> Run:
    stages = {"gpipe": 1, "1f1b": 1}.get(schedule, 2)
    return Run.parse(
        {"model": MODEL},
        {
            "layout.pp": 2, "layout.pp_schedule": schedule, "layout.pp_stages_per_rank": stages,
            "layout.zero": 1, "layout.compile": False, "data.seq_len": 512,
            "train.global_batch_rows": 10, "train.micro_batch_rows": 1, **values,
        },
    )  # fmt: skip


def closed_form(run: Run, world: int, pp_rank: int) -> float:
    job = job_of(run, world, cluster("h100-sxm"))
    block = block_of(job.dims, job.layout)
    moments = moments_of(rank_of(job, pp_rank, block, block))
    return max(sum(items.values()) for items in moments.values())


@pytest.mark.parametrize("schedule", ["gpipe", "zbv", "dualpipev"])
def test_every_micro_batch_that_waits_is_counted(schedule):
    """Its blocks' activations and, of the last stage, its kept logits and hidden states; between
    the halves of a backward pass, all that and its products' gradients."""
    run = pipeline(schedule)
    for counted in dry_run(run, 4).ranks:
        ledger = predict_rank(run, 4, counted.pp_rank, device="cuda")
        forward = ledger.phases["forward"]
        held = forward.activations + forward.logits
        assert held == pytest.approx(counted.activations, rel=0.06), counted.pp_rank
        assert ledger.peak_bytes == pytest.approx(counted.peak_bytes, rel=0.06), counted.pp_rank
        closed = closed_form(run, 4, counted.pp_rank)
        assert closed == pytest.approx(counted.peak_bytes, rel=0.06), counted.pp_rank
