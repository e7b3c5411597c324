"""What passes through the layers, and where the first non-finite value is."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor

from stepwell.data.batch import Batch
from stepwell.train.engine import Engine
from stepwell.train.losses import Loss, LossSums, cross_entropy
from stepwell.train.optim import grad_norm
from stepwell.train.probe import (
    first_non_finite,
    layer_table,
    measure,
    non_finite_state,
    probe_step,
)
from tests.oracle import base_run, global_batch
from tests.parallel.ranks import run_jobs

PLAIN = cross_entropy(base_run().loss)
BAD_TOKEN = 60
EVEN = {"model.vocab_size": 64, "model.d_ff": 28}


def share(engine: Engine) -> Batch:
    """Rows 0..3 and 4..6 of the oracle's batch on two ranks, else all."""
    if engine.mesh.data_world == 1:
        return global_batch()
    return global_batch().rows(*((0, 4), (4, 7))[engine.mesh.data_rank])


def spoil(engine: Engine, name: str, value: float = math.nan) -> None:
    with torch.no_grad():
        for found, parameter in engine.named_parameters():
            if found == name:
                parameter.fill_(value)


def found_after(name: str, **overrides):
    """The finding when one weight is NaN, and whether weights and gradients are left alone."""
    run = base_run(**{"model.tied": False, "train.micro_batch_rows": 2, **overrides})
    engine = Engine(run)
    spoil(engine, name)
    before = engine.full_state_dict()
    finding = first_non_finite(engine, share(engine), PLAIN)
    after = engine.full_state_dict()
    same = all(torch.equal(before[k].nan_to_num(7), after[k].nan_to_num(7)) for k in before)
    clean = all(p.grad is None for _, p in engine.named_parameters())
    return finding, same and clean


CASES = {
    "embed.weight": "embed",
    "blocks.0.attn.wv.weight": "blocks.0.attn.wv",
    "blocks.1.mlp_norm.weight": "blocks.1.mlp_norm",
    "blocks.1.mlp.w_down.weight": "blocks.1.mlp.w_down",
    "norm.weight": "norm",
    "head.weight": "head",
}


@pytest.mark.parametrize("weight", CASES)
def test_the_first_bad_layer_is_named(weight):
    finding, clean = found_after(weight)
    assert finding is not None
    assert (finding.layer, finding.kind) == (CASES[weight], "activation")
    assert (finding.micro_batch, finding.rank) == (0, 0)
    assert finding.sample_ids == global_batch().sample_ids[:2]
    assert clean


def test_nothing_is_found_where_all_is_finite():
    engine = Engine(base_run())
    assert first_non_finite(engine, global_batch(), PLAIN) is None


def test_the_guilty_micro_batch_is_named():
    """Only the last row holds the token whose embedding is infinite."""
    run = base_run(**{"model.tied": False, "train.micro_batch_rows": 2})
    engine, batch = Engine(run), global_batch()
    batch.tokens_BT[batch.tokens_BT == BAD_TOKEN] = 0
    batch.tokens_BT[5, 0] = BAD_TOKEN
    with torch.no_grad():
        engine.decoder.get_parameter("embed.weight")[BAD_TOKEN] = torch.inf
    finding = first_non_finite(engine, batch, PLAIN)
    assert finding is not None
    assert (finding.layer, finding.micro_batch) == ("embed", 2)
    assert finding.sample_ids == batch.sample_ids[4:6]


def test_a_gradient_that_is_bad_while_all_activations_are_fine():
    """The backward pass meets the top first."""
    engine = Engine(base_run(**{"train.micro_batch_rows": 7}))

    def fn(outputs, batch):
        sums, seen = PLAIN.fn(outputs, batch)
        return LossSums({key: value * math.inf for key, value in sums.items()}, seen)

    finding = first_non_finite(engine, global_batch(), Loss(PLAIN.needs, PLAIN.denominators, fn))
    assert finding is not None
    assert (finding.layer, finding.kind) == ("head", "gradient")


def _on_rank(name, layout):
    return found_after(name, **layout)


def _one_rank_alone(layout):
    """Only the second rank's rows are bad."""
    run = base_run(**{"model.tied": False, "train.micro_batch_rows": 1, **layout})
    engine = Engine(run)
    batch = share(engine)
    if engine.mesh.rank == 1:
        batch.tokens_BT[1, 0] = BAD_TOKEN
    else:
        batch.tokens_BT[batch.tokens_BT == BAD_TOKEN] = 0
    state = engine.full_state_dict()
    state["embed.weight"][BAD_TOKEN] = torch.nan
    engine.load_weights(state.items())
    return first_non_finite(engine, batch, PLAIN), batch.sample_ids


def _bad_state(layout):
    """One value of a weight is infinite, and one of another's first moment."""
    engine = Engine(base_run(**{"model.tied": False, "train.micro_batch_rows": 1, **layout}))
    engine.forward_backward(share(engine), PLAIN)
    engine.optim_step()
    good = non_finite_state(engine)
    state = engine.full_state_dict()
    state["head.weight"][1, 2] = torch.inf
    engine.load_weights(state.items())
    for name, value in engine.optimizer.state_dict().items():
        if name == "blocks.0.mlp.w_up.weight.exp_avg":
            local = value.to_local() if isinstance(value, DTensor) else value
            local[-1:].fill_(torch.nan)
    return good, non_finite_state(engine)


def test_weights_and_moments_that_are_not_finite_are_named():
    wanted = [], ["head.weight", "blocks.0.mlp.w_up.weight.exp_avg"]
    assert _bad_state({}) == wanted
    found = run_jobs(2, shards=(_bad_state, {}), pipeline=(_bad_state, {**EVEN, "layout.pp": 2}))
    assert found == {"shards": [wanted, wanted], "pipeline": [wanted, wanted]}


def test_all_ranks_agree_under_every_axis():
    found = run_jobs(
        2,
        zero3=(_on_rank, "blocks.1.attn.wo.weight", {}),
        zero1=(_on_rank, "blocks.0.mlp.w_up.weight", {"layout.zero": 1}),
        tensor=(_on_rank, "blocks.1.attn.wo.weight", {**EVEN, "layout.tp": 2}),
        context=(_on_rank, "blocks.1.attn.wo.weight", {**EVEN, "layout.cp": 2}),
        pipeline=(_on_rank, "blocks.1.attn.wo.weight", {**EVEN, "layout.pp": 2}),
        one=(_one_rank_alone, {}),
    )
    for name in ("zero3", "zero1", "tensor", "context", "pipeline"):
        (first, clean), (second, also) = found[name]
        assert first == second
        layer = "blocks.0.mlp.w_up" if name == "zero1" else "blocks.1.attn.wo"
        rank = 1 if name == "pipeline" else 0  # the one that has the block
        assert (first.layer, first.kind, first.rank) == (layer, "activation", rank)
        assert first.sample_ids == global_batch().sample_ids[:2]
        assert clean
        assert also
    (first, _), (second, ids) = found["one"]
    assert first == second
    assert (first.layer, first.rank, first.micro_batch) == ("embed", 1, 1)
    assert first.sample_ids == ids[1:2]


# --- numbers -------------------------------------------------------------------------------------


def test_measure():
    tally = measure(torch.tensor([3.0, -4.0, math.nan, math.inf]))
    assert (tally.rms, tally.largest, tally.bad_share) == (math.sqrt(12.5), 4.0, 0.5)
    assert measure(torch.empty(0)).rms == 0.0


def test_the_table_shows_what_passes_through():
    run = base_run(**{"train.micro_batch_rows": 3})
    engine = Engine(run)
    plain = Engine(run)
    seen = []
    plain.decoder.blocks["1"].register_forward_hook(lambda _m, _i, out: seen.append(out.detach()))
    wanted = plain.forward_backward(global_batch(), PLAIN)
    stats, probe = probe_step(engine, global_batch(), PLAIN)
    assert stats == wanted
    for (name, got), (_, want) in zip(
        engine.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert got.grad is not None
        assert want.grad is not None
        assert torch.equal(got.grad, want.grad), name
    rows = {row.layer: row for row in layer_table(engine, probe)}
    names = [f"blocks.{i}{part}" for i in (0, 1) for part in (".attn", ".mlp", "")]
    assert list(rows) == ["embed", *names, "norm", "head"]
    values = torch.cat([x.flatten() for x in seen])
    assert rows["blocks.1"].activation.rms == pytest.approx(values.square().mean().sqrt().item())
    assert rows["blocks.1"].activation.largest == values.abs().max().item()
    assert all(row.gradient.num_values for row in rows.values())
    norms = {layer: row.weight_gradient or 0.0 for layer, row in rows.items()}
    parts = [norms[name] for name in ("embed", "blocks.0", "blocks.1", "norm")]
    parameters = [parameter for _, parameter in engine.named_parameters()]
    assert math.hypot(*parts) == pytest.approx(grad_norm(parameters))
    halves = (norms["blocks.1.attn"], norms["blocks.1.mlp"])
    assert math.hypot(*halves) == pytest.approx(norms["blocks.1"])
    assert rows["head"].weight_gradient is None  # tied: the embedding has it
    assert not any(row.activation.num_bad or row.gradient.num_bad for row in rows.values())


def _table(layout):
    engine = Engine(base_run(**{"train.micro_batch_rows": 2, **layout}))
    _, probe = probe_step(engine, share(engine), PLAIN)
    return [
        (row.layer, row.activation.rms, row.gradient.rms, row.weight_gradient or 0.0)
        for row in layer_table(engine, probe)
    ]


def test_the_table_of_two_ranks_is_that_of_one():
    """Rows are 4 and 3: the padding row of the second rank is all that differs; so none here."""
    alone = _table({"train.micro_batch_rows": 1})
    first, second = run_jobs(2, table=(_table, {"train.micro_batch_rows": 4}))["table"]
    assert first == second
    assert [row[0] for row in first] == [row[0] for row in alone]
    for got, want in zip(first, alone, strict=True):
        assert got[1:] == pytest.approx(want[1:], rel=1e-9)
