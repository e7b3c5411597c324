import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

from stepwell.config import Run
from stepwell.models.transformer import Decoder, ForwardOptions, init_rule
from stepwell.parallel.apply import parallelize
from stepwell.parallel.init import init_parameters
from stepwell.parallel.mesh import Mesh, init_distributed
from stepwell.sections.layout import LayoutConfig, PrecisionConfig
from stepwell.sections.model import ModelConfig
from tests.parallel.ranks import run_ranks

CFG = ModelConfig(
    vocab_size=67, num_layers=2, d_model=16, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=24
)
ALONE = Mesh(world=1, rank=0, local_rank=0, device=torch.device("cpu"))
PRECISION = PrecisionConfig(compute="fp32")


def build(mesh, layout):
    with torch.device("meta"):
        decoder = Decoder(CFG)
    names = [name for name, _ in decoder.named_parameters()]
    found = parallelize(decoder, mesh, Run(model=CFG, layout=layout, precision=PRECISION))
    assert found is decoder
    assert [name for name, _ in found.named_parameters()] == names
    init_parameters(decoder, 3, lambda name, _: init_rule(CFG, name))
    return decoder


def forward(decoder):
    tokens = torch.arange(24).view(2, 12) % CFG.vocab_size
    borders = torch.tensor([0, 12, 24], dtype=torch.int32)
    positions = torch.arange(12).expand(2, -1)
    options = ForwardOptions(dtype=torch.float32)
    return decoder(tokens, positions, borders, tokens, options=options).logprobs_BT


def test_one_process_is_materialised_where_the_mesh_says():
    decoder = build(ALONE, LayoutConfig())
    for parameter in decoder.parameters():
        assert parameter.device == torch.device("cpu")
        assert not isinstance(parameter, DTensor)
    assert forward(decoder).isfinite().all()


def _sharded():
    layout = LayoutConfig()
    decoder = build(init_distributed(layout), layout)
    assert all(isinstance(p, DTensor) for p in decoder.parameters())
    return forward(decoder).detach()


def test_ranks_hold_shards_and_compute_the_same():
    wanted = forward(build(ALONE, LayoutConfig()))
    for got in run_ranks(_sharded, 2):
        torch.testing.assert_close(got, wanted)


def test_compile_is_per_block_and_keeps_names_and_values():
    """Each block has compiled code of its own call; nothing is compiled before it is called."""
    decoder = build(ALONE, LayoutConfig(compile=True))
    plain = build(ALONE, LayoutConfig())
    assert all(block._compiled_call_impl is not None for block in decoder.blocks.values())
    assert all(block._compiled_call_impl is None for block in plain.blocks.values())
    assert decoder._compiled_call_impl is None


@pytest.mark.slow
def test_compiled_blocks_give_the_same_values():
    decoder = build(ALONE, LayoutConfig(compile=True))
    torch.testing.assert_close(forward(decoder), forward(build(ALONE, LayoutConfig())))


def test_the_same_weights_whatever_was_there():
    """to_empty leaves garbage; initialisation must overwrite all of it."""
    first, second = build(ALONE, LayoutConfig()), build(ALONE, LayoutConfig())
    state = copy.deepcopy(first.state_dict())
    for name, value in second.state_dict().items():
        assert torch.equal(state[name], value), name
