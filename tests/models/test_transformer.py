"""The decoder's own laws; equality with Transformers is in test_hf."""

import pytest
import torch

from stepwell.models.axes import AXES, axes_of
from stepwell.models.flops import parameter_shapes
from stepwell.models.lora_shapes import adapter_shapes
from stepwell.models.transformer import Decoder, ForwardOptions, init_rule
from stepwell.sections.model import LoraConfig, ModelConfig

SMALL = ModelConfig(
    vocab_size=61, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48
)
FAMILIES = {
    "llama": SMALL,
    "qwen2": SMALL.model_copy(update={"family": "qwen2", "qkv_bias": True, "tied": False}),
    "qwen3": SMALL.model_copy(update={"family": "qwen3", "qk_norm": True}),
}


def decoder(cfg=SMALL, seed=0):
    torch.manual_seed(seed)
    model = Decoder(cfg)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def run(model, tokens, positions, borders, needs=frozenset({"logits"}), **more):
    options = ForwardOptions(needs=needs)
    return model(
        tokens, positions, torch.tensor(borders, dtype=torch.int32), options=options, **more
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_axes_of_its_rank_and_a_planned_shape(family):
    cfg = FAMILIES[family]
    parameters = dict(Decoder(cfg).named_parameters())
    assert {n: tuple(p.shape) for n, p in parameters.items()} == parameter_shapes(cfg)
    for name, parameter in parameters.items():
        assert len(axes_of(name)) == parameter.dim()
        assert init_rule(cfg, name)[0] in ("ones", "zeros", "normal")


def test_no_row_of_axes_is_dead():
    names = [n for cfg in FAMILIES.values() for n in dict(Decoder(cfg).named_parameters())]
    names += dict(Decoder(SMALL.model_copy(update={"head": "both"})).named_parameters())
    names += adapter_shapes(SMALL, LoraConfig(rank=2, dora=True))
    used = {row for row in AXES for n in names if axes_of(n) is AXES[row]}
    assert used == set(AXES)


def test_unknown_parameter_is_named():
    with pytest.raises(KeyError, match=r"blocks\.0\.new"):
        axes_of("blocks.0.new.weight")


def test_packed_documents_equal_separate_runs():
    model = decoder()
    tokens = torch.randint(0, 61, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = run(model, tokens, positions, [0, 5, 12]).logits_BTV
    for start, stop in ((0, 5), (5, 12)):
        alone = run(
            model, tokens[:, start:stop], torch.arange(stop - start)[None], [0, stop - start]
        ).logits_BTV
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=0, atol=1e-5)


def test_inactive_tokens_are_zero_and_never_computed():
    model = decoder()
    tokens = torch.randint(0, 61, (2, 6), generator=torch.Generator().manual_seed(0))
    targets = torch.full((2, 6), 10**6)
    active = torch.tensor([1, 7])
    targets.view(-1)[active] = 3
    positions = torch.arange(6).expand(2, 6)
    needs = frozenset({"logprobs", "entropy"})
    out = run(model, tokens, positions, [0, 6, 12], needs, targets_BT=targets, active_M=active)
    full = run(model, tokens, positions, [0, 6, 12]).logits_BTV.log_softmax(-1)
    wanted = torch.zeros(2, 6)
    wanted[0, 1], wanted[1, 1] = full[0, 1, 3], full[1, 1, 3]
    torch.testing.assert_close(out.logprobs_BT, wanted, rtol=0, atol=1e-5)
    assert out.lse_BT is None


def test_tied_head_trains_the_embedding_once():
    model = decoder()
    assert model.head is None
    assert "head.weight" not in dict(model.named_parameters())
    tokens = torch.tensor([[1, 2, 3]])
    out = run(model, tokens, torch.arange(3)[None], [0, 3], frozenset({"logprobs"}),
              targets_BT=torch.tensor([[2, 3, 4]]))  # fmt: skip
    out.logprobs_BT.sum().backward()
    assert model.embed is not None
    grad = model.embed.weight.grad
    assert grad is not None
    assert (grad.abs().sum(-1) > 0).all()


def test_unknown_need_is_refused():
    with pytest.raises(ValueError, match="entropie"):
        run(decoder(), torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None], [0, 2],
            frozenset({"entropie"}))  # fmt: skip
