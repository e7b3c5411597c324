"""Products in 16 bits on a CPU have few shapes, however many tokens are wanted."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepwell.data.packing import pack_rows
from stepwell.models.row_padding import missing_rows, with_zeros
from stepwell.train.engine import Engine
from stepwell.train.losses import Loss, LossSums, masked_sum
from tests.oracle import assert_same, base_run

CPU = torch.device("cpu")
LENGTH = 96


class Shapes(TorchDispatchMode):
    """Those of all products' operands."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.seen.add(tuple(tuple(a.shape) for a in args))
        return func(*args, **(kwargs or {}))


def engine_of(compute: str, **more) -> Engine:
    single = {"precision.param": "fp32", "precision.reduce": "fp32", "precision.compute": compute}
    values = {"data.seq_len": LENGTH, "loss.z_loss": 0.0, "loss.chunk_tokens": 64}
    return Engine(base_run(**{**single, **values, **more}))


def batch_of(num_wanted: int):
    ids = [(7 * i) % 61 for i in range(LENGTH + 1)]
    return pack_rows([(ids, [0] * (LENGTH + 1 - num_wanted) + [1] * num_wanted)], LENGTH)


def gradients(engine: Engine, num_wanted: int) -> dict[str, torch.Tensor]:
    for _, parameter in engine.named_parameters():
        parameter.grad = None

    def fn(outputs, batch):
        return LossSums({"all": masked_sum(outputs.logprobs_BT, batch.weights_BT)}, {})

    loss = Loss(frozenset({"logprobs"}), lambda _: {"all": 1.0}, fn)
    engine.forward_backward(batch_of(num_wanted), loss)
    return {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("compute", "most"), [("bf16", 0), ("fp32", 1)])
def test_how_many_tokens_are_wanted_changes_no_shape_in_16_bits(compute, most):
    engine = engine_of(compute)
    first = Shapes()
    with first:
        gradients(engine, 64)
    later = Shapes()
    with later:
        for num_wanted in (1, 17, 40, 63):
            gradients(engine, num_wanted)
    new = later.seen - first.seen
    assert (len(new) > 0) == bool(most), "float32 is multiplied as it comes"


def test_rows_of_zeros_change_no_gradient(monkeypatch):
    """bf16's, with and without them: products of other shapes round in their own way."""
    engine = engine_of("bf16")
    padded = gradients(engine, 17)
    monkeypatch.setattr("stepwell.models.attention.ACTIVE_MULTIPLE", 1)
    assert_same(gradients(engine, 17), padded, 2e-2, "rows of zeros")


def test_rows_are_added_where_shapes_cost():
    assert missing_rows(65, torch.bfloat16, CPU, 64) == 63
    assert missing_rows(64, torch.float16, CPU, 64) == 0
    assert missing_rows(65, torch.float32, CPU, 64) == 0
    assert missing_rows(65, torch.bfloat16, torch.device("meta"), 64) == 0
    x = torch.ones(2, 3)
    assert with_zeros(x, 0) is x
    assert with_zeros(x, 2).tolist() == [[1] * 3] * 2 + [[0] * 3] * 2
    assert with_zeros(torch.ones(2), 1).tolist() == [1, 1, 0]
