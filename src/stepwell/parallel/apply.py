"""The one ordered list of what happens to a model between `meta` and its first step."""

from __future__ import annotations

from stepwell.config import Run
from stepwell.models.transformer import Decoder
from stepwell.parallel.adapters import lay_out_adapters
from stepwell.parallel.fsdp import apply_fsdp
from stepwell.parallel.mesh import Mesh
from stepwell.parallel.precision import apply_fp8
from stepwell.parallel.remat import segments_of
from stepwell.parallel.tensor import apply_tensor_parallel


def parallelize(decoder: Decoder, mesh: Mesh, run: Run) -> Decoder:
    """Lays out, compiles, shards and materialises a decoder (or a pipeline stage's piece of one)
    that was built on the meta device.

    Its parameters are uninitialised afterwards. Returns the same module; names do not change.
    """
    apply_tensor_parallel(decoder, mesh, run.model)
    lay_out_adapters(decoder, mesh, run)
    apply_fp8(decoder, mesh, run)
    piece = decoder.piece
    decoder.segments = segments_of(run, mesh.sizes, piece.start, piece.stop)
    if run.layout.compile:
        for block in decoder.blocks.values():
            # One block is compiled and serves all: the parameters are inputs of the compiled code.
            block.compile()
    on_host = run.offload.parameters
    apply_fsdp(decoder, mesh, run.layout, run.precision, offload_parameters=on_host)
    return decoder.to_empty(device="cpu" if on_host else mesh.device)
