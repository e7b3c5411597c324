"""What of NEFTune's noise falls on this rank's tokens."""

from __future__ import annotations

from dataclasses import replace

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.models.neftune import Noise, noise_bounds, place_keys
from stepwell.parallel.context import local_tokens
from stepwell.parallel.mesh import Mesh
from stepwell.sections.methods import SFT

KEYS, BOUNDS = "noise_keys", "noise_bounds"


def embedding_noise(batch: Batch, run: Run, step: int, mesh: Mesh) -> Noise | None:
    """For full rows at a step of the run; None where method.neftune_alpha is 0 or no key of it.

    A token is known by its row's sample id and its place in the row.
    """
    alpha = run.method.neftune_alpha if isinstance(run.method, SFT) else 0.0
    if not alpha or not batch.num_rows:
        return None
    shape = batch.tokens_BT.shape
    keys_BT = place_keys(batch.sample_ids, shape[1], run.train.seed, step)
    bounds_BT = noise_bounds(batch.cu_seqlens(), alpha, run.model.d_model).view(shape)
    mine = local_tokens(replace(batch, extra={KEYS: keys_BT, BOUNDS: bounds_BT}), mesh).extra
    return Noise(*(mine[name].flatten().to(mesh.device) for name in (KEYS, BOUNDS)))
