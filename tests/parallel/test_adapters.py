"""Adapters on several ranks: what they leave, merge and sample, and which runs cannot be. That
gradients and steps equal those of one process is in tests/layouts.py."""

import pytest
import torch

from stepwell.generate import Request, Sampling
from stepwell.parallel.adapters import all_shapes
from stepwell.parallel.mesh import init_distributed
from stepwell.parallel.rules import check_run
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from stepwell.types import ConfigError
from tests.layouts import MODEL
from tests.oracle import assert_same, base_run, global_batch
from tests.parallel.ranks import run_jobs
from tests.parallel.refusals import check_named

LORA = {**MODEL, "lora.rank": 3, "lora.dora": True, "optim.lr": 0.05}
# The last of these stages has only the head: it passes gradients on and trains nothing.
BARE_STAGE = {
    "layout.pp": 2,
    "layout.pp_schedule": "interleaved-1f1b",
    "layout.pp_stages_per_rank": 2,
    "lora.targets": r'["blocks\\.[01]\\..*\\.w.*"]',
}
LAYOUTS = {
    "tensor": {"layout.tp": 2},
    "pipeline, 4 bits": {"layout.pp": 2, "lora.quantize": "nf4", "model.tied": False},
    "pipeline, bf16": {
        "optim.lr": 1e-4,
        "layout.pp": 2,
        "precision.compute": "bf16",
        "precision.param": "fp32",
        "precision.reduce": "fp32",
    },
}


def after_a_step(settings):
    """Merged and separate state, adapters off, and a sample."""
    run = base_run(**{**LORA, **settings})
    engine = Engine(run, mesh=init_distributed(run.layout))
    share = global_batch()
    engine.forward_backward(share, cross_entropy(run.loss))
    engine.optim_step()
    found = {f"merged/{name}": value for name, value in engine.iter_state()}
    found |= {f"apart/{name}": value for name, value in engine.iter_state(merged=False)}
    found["reference"] = engine.reference_logprobs(share)
    sampling = Sampling(max_new_tokens=4, temperature=0.0)
    (answer,) = engine.generate([Request(0, (3, 5, 7))], sampling)
    return found, answer.token_ids


@pytest.fixture(scope="module")
def divided():
    return run_jobs(
        2, **{n: (after_a_step, s) for n, s in (LAYOUTS | {"bare": BARE_STAGE}).items()}
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_state_reference_and_samples_are_those_of_one_process(divided, name):
    settings = LAYOUTS[name]
    alone = {k: v for k, v in settings.items() if not k.startswith("layout.")}
    wanted, answer = after_a_step(alone)
    rounded = settings.get("precision.compute") == "bf16"
    for found, theirs in divided[name]:
        if rounded:
            assert {n: v.dtype for n, v in found.items()} == {n: v.dtype for n, v in wanted.items()}
            # Adam's first step is the gradient's sign, which rounding may turn in B.
            close = {n: v for n, v in wanted.items() if ".lora_b." not in n and n != "reference"}
            assert_same({n: found[n] for n in close}, close, 0.01, name)
            continue
        assert_same(found, wanted, 1e-6, name)
        assert theirs == answer


def test_state_holds_every_parameter_in_order():
    run = base_run(**LORA)
    engine = Engine(run)
    apart = {name: value.shape for name, value in engine.iter_state(merged=False)}
    assert list(apart.items()) == list(all_shapes(run).items())
    assert list(engine.full_state_dict()) == [n for n in apart if ".lora_" not in n]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_compiled_blocks_compute_the_same(quantize):
    results = []
    for compile_ in (False, True):
        values = {"layout.compile": compile_, "lora.dropout": 0.2, "lora.quantize": quantize}
        engine = Engine(base_run(**LORA, **values))
        engine.forward_backward(global_batch(), cross_entropy(engine.run.loss))
        results.append({n: p.grad for n, p in engine.named_parameters() if p.grad is not None})
    eager, found = results
    assert_same(found, eager, 1e-9)


# --- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "ranks", "said"),
    [
        (
            {"lora.targets": '["blocks.0.attn.qw"]'},
            1,
            r"'blocks\.0\.attn\.qw', which matches no linear layer of the model \(did you mean "
            r"'blocks\.0\.attn\.w",
        ),
        ({"lora.rank": 13}, 1, r"lora\.rank=13 is above the rank that blocks\.0\.attn\.wk of"),
        ({"lora.quantize": "nf4", "layout.tp": 2}, 2, r"layout\.tp=2 would cut it elsewhere"),
        (
            {
                "lora.quantize": "nf4",
                "precision.fp8.recipe": "tensorwise",
                "precision.fp8.min_dim": 16,
                "precision.compute": "bf16",
                "precision.param": "fp32",
                "precision.reduce": "fp32",
                "model.d_model": 32,
                "model.d_ff": 32,
                "model.head_dim": 16,
            },
            1,
            r"restores a layer's weight for a product in bf16",
        ),
        (
            {"lora.targets": r'["blocks\\.3\\..*\\.w.*"]', "layout.pp": 2},
            2,
            r"the first stage of the pipeline has blocks \[0, 1\]",
        ),
        (
            {"lora.targets": r'["blocks\\.0\\..*\\.w.*"]', "layout.pp": 2},
            2,
            r"rank 1 of the pipeline has blocks \[2, 3\]",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(settings, ranks, said):
    run = base_run(**{**LORA, **settings})
    with pytest.raises(ConfigError, match=said):
        check_run(run, ranks)
    check_named(run, ranks)


@pytest.mark.parametrize(
    "settings",
    [
        {"lora.rank": 12},  # the smallest matrix is 12 x 20
        {"lora.quantize": "nf4", "layout.tp": 1},
        {"lora.targets": r'["blocks\\.[03]\\..*\\.w.*"]', "layout.pp": 2},
    ],
)
def test_the_other_side_of_each_limit_is_legal(settings):
    check_run(base_run(**{**LORA, **settings}), 2 if "layout.pp" in settings else 1)


def test_a_stage_without_adapters_computes_the_same(divided):
    wanted, _ = after_a_step({"lora.targets": BARE_STAGE["lora.targets"]})
    for found, _ in divided["bare"]:
        assert_same(found, wanted, 1e-6)


def test_ranks_begin_with_the_same_adapters_in_any_layout():
    name = "blocks.0.attn.wq.lora_a.weight"
    one = dict(Engine(base_run(**LORA)).iter_state(merged=False))[name]
    other = dict(Engine(base_run(**LORA, **{"precision.param": "fp64"})).iter_state(merged=False))
    assert torch.equal(one, other[name])
    assert one.abs().max() <= 20**-0.5
    assert one.std().item() == pytest.approx((20 * 3) ** -0.5, rel=0.2)
