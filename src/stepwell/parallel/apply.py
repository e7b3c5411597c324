"""The one ordered list of what happens to a model between `meta` and its first step."""

from __future__ import annotations

from torch import nn

from stepwell.config import Run
from stepwell.parallel.fsdp import apply_fsdp
from stepwell.parallel.mesh import Mesh


def parallelize(decoder: nn.Module, mesh: Mesh, run: Run) -> nn.Module:
    """Lays out, compiles, shards and materialises a decoder (or a pipeline stage's piece of one)
    that was built on the meta device.

    Its parameters are uninitialised afterwards. Returns the same module; names do not change.
    """
    blocks = decoder.blocks
    assert isinstance(blocks, nn.ModuleDict)
    if run.layout.compile:
        for block in blocks.values():
            # One block is compiled and serves all: the parameters are inputs of the compiled code.
            block.compile()
    apply_fsdp(decoder, mesh, run.layout, run.precision)
    return decoder.to_empty(device=mesh.device)
