"""Which layers compute in 8 bits, and what is refused before anything is built."""

import pytest

from stepwell.config import Run
from stepwell.parallel.fp8_layers import fp8_linears, local_shape
from stepwell.parallel.rules import check_run
from stepwell.types import ConfigError
from tests.parallel.refusals import check_named

MODEL = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.d_ff": 64,
    "model.vocab_size": 61,
    "precision.fp8.recipe": "tensorwise",
}
PER_BLOCK = ["attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.w_gate", "mlp.w_up", "mlp.w_down"]


def run(**overrides) -> Run:
    return Run.parse({}, {**MODEL, **overrides})


def test_all_matrices_of_the_blocks_and_nothing_else():
    wanted = [f"blocks.{i}.{name}" for i in range(2) for name in PER_BLOCK]
    assert fp8_linears(run()) == wanted
    assert fp8_linears(run(**{"model.tied": False})) == wanted
    assert fp8_linears(run(**{"precision.fp8.recipe": "none"})) == []


def test_patterns_keep_layers():
    kept = run(**{"precision.fp8.keep": ["*.w_down", "blocks.0.attn.*"]})
    wanted = [f"blocks.0.{n}" for n in ("mlp.w_gate", "mlp.w_up")]
    wanted += [f"blocks.1.{n}" for n in PER_BLOCK if n != "mlp.w_down"]
    assert fp8_linears(kept) == wanted


def test_small_products_stay_and_are_those_of_a_tensor_rank():
    large = [f"blocks.{i}.{n}" for i in range(2) for n in PER_BLOCK if n[-2:] not in ("wk", "wv")]
    assert fp8_linears(run(**{"precision.fp8.min_dim": 32})) == large
    mlp = [name for name in large if "mlp" in name]
    assert fp8_linears(run(**{"precision.fp8.min_dim": 32}), tp=2) == mlp
    assert local_shape(run().model, "blocks.0.attn.wk", (16, 32), tp=4) == (8, 32)


@pytest.mark.parametrize(
    ("overrides", "named", "legal"),
    [
        ({"model.d_ff": 50}, "model.d_ff=50", "model.d_ff=48"),
        ({"model.d_model": 60}, "model.d_model=60", "model.d_model=64"),
        ({"model.head_dim": 6}, "model.num_heads=4 x model.head_dim=6 = 24", "head_dim=8"),
        (
            {"model.head_dim": 12},
            "model.num_kv_heads=2 x model.head_dim=12 = 24",
            "head_dim=16",
        ),
    ],
)
def test_odd_shapes_are_refused_with_the_nearest_legal_one(overrides, named, legal):
    with pytest.raises(ConfigError) as error:
        check_run(run(**overrides), 1)
    assert named in str(error.value)
    assert legal in str(error.value)
    check_run(run(**overrides, **{"precision.fp8.recipe": "none"}), 1)
    check_named(run(**overrides), 1)


def test_odd_shapes_of_kept_layers_are_fine():
    odd = {"model.d_ff": 50, "precision.fp8.keep": ["*.mlp.*"]}
    check_run(run(**odd), 1)


def test_shapes_are_those_of_a_tensor_rank():
    tp = {"layout.tp": 4, "model.num_kv_heads": 4, "model.head_dim": 16, "model.vocab_size": 64}
    check_run(run(**tp), 4)
    with pytest.raises(ConfigError, match="model.d_ff=96 / layout.tp=4 = 24.*model.d_ff=128"):
        check_run(run(**tp, **{"model.d_ff": 96}), 4)
    with pytest.raises(ConfigError, match=r"layout.tp=4 x model.head_dim=24 = 24.*head_dim=32"):
        check_run(run(**tp | {"model.head_dim": 24}), 4)


def test_settings_without_an_effect_are_refused():
    none = {"precision.fp8.recipe": "none", "precision.fp8.shadow_every": 5}
    with pytest.raises(ConfigError, match="shadow_every=5 .*recipe='none'"):
        check_run(run(**none), 1)
    with pytest.raises(ConfigError, match=r"'blocks.0.attn.wx'.*did you mean 'blocks.0.attn.w"):
        check_run(run(**{"precision.fp8.keep": ["blocks.0.attn.wx"]}), 1)
    with pytest.raises(ConfigError, match="min_dim=64 keep them all; .*min_dim=32"):
        check_run(run(**{"precision.fp8.min_dim": 64}), 1)
    check_run(run(**{"precision.fp8.min_dim": 32}), 1)


def test_combinations_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="compute='bf16'.*not 'fp16'"):
        check_run(run(**{"precision.compute": "fp16"}), 1)
    release = {"optim.release_gradients": True}
    with pytest.raises(ConfigError, match="shadow_every=3 .*release_gradients"):
        check_run(run(**release, **{"precision.fp8.shadow_every": 3}), 1)
    with pytest.raises(ConfigError, match="compute='fp16' .*release_gradients"):
        check_run(
            run(**release, **{"precision.fp8.recipe": "none", "precision.compute": "fp16"}), 1
        )
