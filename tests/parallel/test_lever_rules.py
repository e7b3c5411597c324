"""What does not go together is refused before anything is built, with the value and the way out."""

from math import prod

import pytest

from stepwell.config import Run
from stepwell.models.flops import parameter_shapes
from stepwell.parallel.lever_rules import check_host, share_in_8_bits
from stepwell.parallel.rules import AxisSizes, check_run
from stepwell.plan.memory.ledger import predict_memory
from stepwell.types import ConfigError

ALONE = {"optim.release_gradients": True, "optim.clip_norm": 0.0, "guard.action": "none"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"offload.parameters": True, "offload.optimizer": True},
            "is offload.optimizer=false",
        ),
        ({"offload.optimizer": True, "optim.kind": "muon"}, "not optim.kind='muon'"),
        ({"offload.optimizer": True, "optim.kind": "adamw8bit"}, "not optim.kind='adamw8bit'"),
        ({"offload.parameters": True, "optim.kind": "adamw8bit"}, "or offload.parameters=false"),
        (
            ALONE | {"train.global_batch_rows": 32, "train.micro_batch_rows": 7},
            "micro_batch_rows=8",
        ),
        (ALONE | {"train.micro_batch_rows": 8, "optim.kind": "muon"}, "optim.kind='muon'"),
        (
            ALONE | {"train.micro_batch_rows": 4, "optim.clip_norm": 1.0},
            "(?s)optim.clip_norm=1.*\n.*train.micro_batch_rows=4",
        ),
    ],
)
def test_a_combination_is_refused(overrides, message):
    run = Run.parse({}, overrides)
    with pytest.raises(ConfigError, match=message):
        check_run(run, 4)


@pytest.mark.parametrize(
    "overrides",
    [
        {"offload.parameters": True, "offload.activations": True, "optim.kind": "muon"},
        {"offload.optimizer": True, "offload.activations": True},
        {"optim.kind": "adamw8bit"},
        ALONE | {"train.global_batch_rows": 32, "train.micro_batch_rows": 8},
        ALONE
        | {
            "train.global_batch_rows": 32,
            "train.micro_batch_rows": 8,
            "offload.parameters": True,
            "offload.activations": True,
        },
    ],
)
def test_what_goes_together_is_not(overrides):
    check_run(Run.parse({}, overrides), 4)


def test_the_share_of_moments_in_8_bits():
    """Matrices of d_model 256 have rows of whole blocks; w_down's 704 are not, on any rank."""
    model = {"model.num_layers": 2, "model.d_model": 256, "model.d_ff": 704}
    run = Run.parse({}, {**model, "optim.kind": "adamw8bit"})
    shapes = parameter_shapes(run.model)
    total = sum(prod(shape) for shape in shapes.values())
    left = 2 * 704 * 256 + sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    assert share_in_8_bits(run) == pytest.approx((total - left) / total)
    # wo's 256 columns are 128 on each of two ranks.
    assert share_in_8_bits(run, tp=2) == pytest.approx((total - left - 2 * 256 * 256) / total)
    assert predict_memory(run, device="cpu").moments_in_8_bits == share_in_8_bits(run)
    assert predict_memory(Run.parse({}, model), device="cpu").moments_in_8_bits == 0


def test_runs_without_offload_need_no_room_on_the_host():
    run = Run.parse({}, {"model.d_ff": 2**24, "model.num_layers": 9999})
    check_host(run, AxisSizes(), grouped=False)
