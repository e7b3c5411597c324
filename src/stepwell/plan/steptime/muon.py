"""What Muon's steps compute: products that make each hidden matrix's update orthogonal. No torch.

Newton-Schulz's quintic (train/muon): with m the smaller side of a matrix and n the larger, an
iteration multiplies m x n by n x m, m x m by m x m and m x m by m x n, in 16 bits.
"""

from __future__ import annotations

from stepwell.plan.comms.weights import block_weights
from stepwell.plan.job import Arrangement, Dims, Job
from stepwell.plan.steptime.coefficients import PROCESSORS, generation
from stepwell.plan.steptime.work import Product, blocks_of_ranks, product

NUM_ITERATIONS = 5


def orthogonal_products(job: Job) -> list[tuple[Product, float]]:
    """With how many of each the busiest rank computes in a step.

    Ours compute every matrix of their stage whole on each rank. Others' data ranks divide the
    matrices where they divide the optimiser's state (2502.16982, section 2.3)."""
    dims, layout = job.dims, job.layout
    if layout.optimizer != "muon":
        return []
    processors = PROCESSORS[generation(job.cluster.accelerator)]
    num_blocks = max(blocks_of_ranks(dims.num_layers, layout))
    shards = layout.dp_shard * layout.cp if layout.zero and layout.program != "stepwell" else 1
    found = []
    for shape, number in _matrices(dims, layout, num_blocks):
        m, n = sorted(shape)
        times = NUM_ITERATIONS * number / shards
        for rows, columns, summed in ((m, m, n), (m, m, m), (m, n, m)):
            found.append((product(rows, columns, summed, processors, low=False), times))
    return found


def _matrices(dims: Dims, layout: Arrangement, num_blocks: int):
    """Shapes of a rank's hidden matrices, and how many it has of each."""
    routed = num_blocks * dims.num_expert_layers / dims.num_layers
    for experts, number in ((False, num_blocks - routed), (True, routed)):
        for weight in block_weights(dims, layout, experts) if number else ():
            if weight.trained and len(weight.shape) == 2:
                yield weight.shape, number
    if dims.experts:
        local = routed * dims.experts.num_experts / layout.ep
        ways = 3 if dims.mlp == "swiglu" else 2
        yield (dims.experts.d_ff, dims.d_model), ways * local
