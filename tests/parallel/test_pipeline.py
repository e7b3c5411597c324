"""Pipelines on real gloo ranks: gradients of every schedule against one process, and every verb."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from stepwell.config import Run
from stepwell.data.batch import concat
from stepwell.data.loader import rank_rows
from stepwell.generate import Request, Sampling
from stepwell.models.transformer import Decoder, ForwardOptions, init_rule
from stepwell.parallel.apply import parallelize
from stepwell.parallel.init import init_parameters
from stepwell.parallel.mesh import init_distributed
from stepwell.parallel.pipeline import Pipeline, full_shapes, pieces_of
from stepwell.parallel.rules import check_run
from stepwell.parallel.schedules import bubble_fraction
from stepwell.plan.pipeline.actions import schedule_actions
from stepwell.train.engine import Engine
from stepwell.train.heldout import heldout_loss
from stepwell.train.losses import cross_entropy
from stepwell.types import CheckpointError, ConfigError, TrainingError
from tests.oracle import LENGTH, assert_same, base_run, full, global_batch, take_step
from tests.parallel.ranks import run_jobs
from tests.parallel.test_schedules import Action, simulate

STAGES_PER_RANK = {"interleaved-1f1b": 2, "zbv": 2, "dualpipev": 2}
MODEL = {"model.num_layers": 6, "train.micro_batch_rows": 1, "train.global_batch_rows": 8}


def run_of(schedule: str | None = None, pp: int = 2, **overrides: Any) -> Run:
    """One process without a schedule."""
    layout: dict[str, Any] = {}
    if schedule is not None:
        layout = {
            "layout.pp": pp,
            "layout.pp_schedule": schedule,
            "layout.pp_stages_per_rank": STAGES_PER_RANK.get(schedule, 1),
            "layout.reshard_after_forward": "never" if "v" in schedule[-1] else "always",
        }
    return base_run(**{**MODEL, **layout, **overrides})


def rows(num_rows: int):
    """Up to eight rows; the eighth is the first again."""
    return concat([global_batch(), global_batch()]).rows(0, num_rows)


def share(engine: Engine, num_rows: int):
    mine = rank_rows(num_rows, engine.mesh.data_rank, engine.mesh.data_world)
    return rows(num_rows).rows(mine.start, mine.stop)


def step(run: Run, num_rows: int = 8) -> dict[str, torch.Tensor]:
    engine = Engine(run)
    return take_step(engine, share(engine, num_rows))


def together(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What all ranks have; what several have must be the same."""
    whole: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, value in rank.items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


CLIPPED = {"optim.clip_norm": 0.05, "loss.label_smoothing": 0.1}
UNTIED = {"model.tied": False, "optim.clip_norm": 0.0}
TWO_RANKS = [
    ("gpipe", 4, CLIPPED, {}),
    ("1f1b", 8, CLIPPED, {}),
    ("interleaved-1f1b", 4, CLIPPED, {}),
    ("zbv", 4, CLIPPED, {}),
    ("dualpipev", 4, CLIPPED, {}),
    ("gpipe", 1, UNTIED, {}),  # one row: a second micro-batch is empty
    ("1f1b", 2, UNTIED, {"layout.pp_layers": (0, 6)}),
    ("interleaved-1f1b", 2, UNTIED, {"layout.pp_layers": (2, 1, 3, 0)}),
    ("zbv", 1, UNTIED, {"layout.pp_layers": (0, 4, 1, 1)}),
    ("zbv", 2, CLIPPED, {"loss.keep_logits": "never"}),
    ("dualpipev", 1, UNTIED, {}),
    ("interleaved-1f1b", 7, UNTIED, {"layout.pp_stages_per_rank": 3}),
    ("zbv", 4, CLIPPED, {}),  # once more
]
FOUR_RANKS = [
    ("1f1b", 8, CLIPPED, {"layout.pp": 4}),
    ("zbv", 4, CLIPPED, {"layout.pp": 4}),
    ("gpipe", 4, CLIPPED, {"layout.reshard_after_forward": "node"}),
    ("1f1b", 7, UNTIED, {}),  # pp 2 x fsdp 2, resharded after each forward pass
    ("interleaved-1f1b", 4, CLIPPED, {"layout.dp_replicate": 2}),
    ("zbv", 4, CLIPPED, {}),
    ("dualpipev", 4, UNTIED, {"layout.zero": 1}),
]


def gradients(cases):
    return [
        step(run_of(schedule, **{**model, **layout}), num_rows)
        for schedule, num_rows, model, layout in cases
    ]


@pytest.fixture(scope="module")
def alone():
    """What one process gets of (model, number of rows)."""
    known = {}

    def of(model, num_rows):
        key = (tuple(sorted(model.items())), num_rows)
        if key not in known:
            known[key] = step(run_of(**model), num_rows)
        return known[key]

    return of


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All that is asked of two ranks, in one launch."""
    return run_jobs(
        2,
        gradients=(gradients, TWO_RANKS),
        orders=(executed_orders, ["gpipe", *STAGES_PER_RANK, "1f1b"]),
        verbs=(verbs, run_of("1f1b")),
        verbs_v=(verbs, run_of("zbv")),
        verbs_i=(verbs, run_of("interleaved-1f1b")),
        two_passes=(two_passes, run_of("1f1b")),
        lost=(lose_gradients,),
        strictness=(load_wrong_weights,),
        other_rows=(give_each_rank_other_rows,),
        going_on=(save_then_load_elsewhere, tmp_path_factory.mktemp("pipeline")),
    )


def compare(cases, results, alone):
    for i, (schedule, num_rows, model, layout) in enumerate(cases):
        shared = {k: v for k, v in {**model, **layout}.items() if not k.startswith("layout.")}
        got, wanted = together([rank[i] for rank in results]), alone(shared, num_rows)
        assert_same(got, wanted, 1e-9, f"{schedule}, {num_rows} rows, {model}, {layout}")
        # Every rank has all weights, and each gradient is on the ranks of one stage.
        for rank in results:
            assert {k for k in wanted if k.startswith(("weight/", "loss", "norm"))} <= set(rank[i])


def test_every_schedule_has_the_gradients_of_one_process(two, alone):
    compare(TWO_RANKS, two["gradients"], alone)


def test_a_step_repeats_itself_bit_for_bit(two):
    assert TWO_RANKS[-1] == TWO_RANKS[3]
    for rank in two["gradients"]:
        assert all(torch.equal(value, rank[-1][name]) for name, value in rank[3].items())


def test_with_sharded_data_and_with_four_stages(alone):
    scored = ["1f1b", "zbv"]
    found = run_jobs(
        4,
        gradients=(gradients, FOUR_RANKS),
        orders=(executed_orders, ["1f1b"], 4),
        scores=(scores, scored),
    )
    compare(FOUR_RANKS, found["gradients"], alone)
    check_orders(found["orders"], ["1f1b"], 4)
    (wanted,) = scores([None])
    for i, schedule in enumerate(scored):
        results = [rank[i] for rank in found["scores"]]
        assert all(rank["before"] == pytest.approx(wanted["before"]) for rank in results), schedule
        assert all(rank["after"] == pytest.approx(wanted["after"]) for rank in results), schedule


def scores(schedules):
    """Held-out loss before and after a step, on sharded weights."""
    found = []
    for schedule in schedules:
        engine = Engine(run_of(schedule))
        before = heldout_loss(engine, rows(7))
        engine.forward_backward(share(engine, 8), cross_entropy(engine.run.loss))
        engine.optim_step()
        found.append({"before": before, "after": heldout_loss(engine, rows(7))})
    return found


# --- the order of actions ---------------------------------------------------------------------


def executed_orders(schedules, pp=2):
    return [executed_order(run_of(schedule, pp=pp)) for schedule in schedules]


def executed_order(run: Run) -> tuple[list[Action], int]:
    """What this rank's stages were told to do, in order, and the most bytes received at once."""
    actions: list[Action] = []
    received = [0]
    engine = Engine(run)
    pipeline = engine.pipeline
    assert pipeline is not None
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    originals = {name: getattr(PipelineStage, name) for name in names}

    def recording(name):
        def method(self, index, *args, **kwargs):
            whole = kwargs.get("full_backward", True)
            kind = {"forward_one_chunk": "F", "backward_one_chunk": "BW" if whole else "B"}
            actions.append(Action(kind.get(name, "W"), self.stage_index, index))
            received.append(pipeline.receive_bytes)
            return originals[name](self, index, *args, **kwargs)

        return method

    for name in names:
        setattr(PipelineStage, name, recording(name))
    try:
        engine.forward_backward(rows(8), cross_entropy(run.loss))
    finally:
        for name in names:
            setattr(PipelineStage, name, originals[name])
    assert pipeline.receive_bytes == 0
    return actions, max(received)


def check_orders(results, schedules, pp):
    for i, schedule in enumerate(schedules):
        v = STAGES_PER_RANK.get(schedule, 1)
        order = {rank: found[i][0] for rank, found in enumerate(results)}
        names: dict[str, str] = {"BW": "B", "B": "I"}
        carried_out = [
            [f"{a.stage}{names.get(a.kind, a.kind)}{a.micro_batch}" for a in order[rank]]
            for rank in range(pp)
        ]
        planned = schedule_actions(schedule, pp, 8, v)
        assert carried_out == [[str(action) for action in row] for row in planned], schedule
        pairs = {a.key: a.with_next for row in planned for a in row}
        order = {
            rank: [
                a._replace(with_next=pairs[names.get(a.kind) or a.kind, a.stage, a.micro_batch])
                for a in actions
            ]
            for rank, actions in order.items()
        }
        idle = simulate(order, pp * v)
        assert idle / (3 * 8 * v) == pytest.approx(bubble_fraction(schedule, pp, 8, v)), schedule


def test_bubble_is_that_of_the_order_that_was_carried_out(two):
    check_orders(two["orders"], ["gpipe", *STAGES_PER_RANK, "1f1b"], 2)


def test_received_activations_are_held_no_longer_than_needed(two):
    """Of 8 micro-batches, the second rank of GPipe has all, that of 1F1B the one at work."""
    one = LENGTH * 20 * 8
    gpipe, *_, one_f_one_b = two["orders"][1]
    assert gpipe[1] == 8 * one
    assert one_f_one_b[1] == one


# --- the engine's verbs -----------------------------------------------------------------------


def verbs(run: Run):
    """Every verb once; also in one process."""
    engine = Engine(run)
    batch = replace(rows(8), extra={"advantages": torch.ones(8, LENGTH)})
    found = {"scores": engine.logprobs(batch.rows(0, 5)), "heldout": heldout_loss(engine, batch)}
    found["stats"] = engine.forward_backward(batch, cross_entropy(run.loss))
    found["step"] = engine.optim_step()
    requests = [Request(i, (i, 2 * i + 1), seed=i) for i in range(3)]
    found["answers"] = engine.generate(requests, Sampling(max_new_tokens=6))
    found["state"] = engine.full_state_dict()
    found["reloaded"] = Engine(run, weights=found["state"].items()).logprobs(rows(1))
    found["ends"] = [full(p.embed.weight) for p in engine.pieces if p.embed is not None]
    return found


@pytest.mark.parametrize("schedule", ["verbs", "verbs_v", "verbs_i"])
def test_every_verb_gives_what_one_process_gives_on_all_ranks(two, schedule):
    wanted = verbs(run_of())
    for got in two[schedule]:
        torch.testing.assert_close(got["scores"], wanted["scores"], rtol=1e-6, atol=1e-6)
        assert got["heldout"] == pytest.approx(wanted["heldout"], rel=1e-6)
        assert got["stats"].loss == pytest.approx(wanted["stats"].loss, rel=1e-12)
        assert got["stats"].metrics == pytest.approx(wanted["stats"].metrics, rel=1e-12)
        for count in ("num_tokens", "num_loss_tokens", "num_twice_tokens"):
            assert getattr(got["stats"], count) == getattr(wanted["stats"], count)
        assert got["step"].grad_norm == pytest.approx(wanted["step"].grad_norm, rel=1e-12)
        tokens = [[a.token_ids for a in of["answers"]] for of in (got, wanted)]
        assert tokens[0] == tokens[1]
        assert list(got["state"]) == list(wanted["state"])  # in the model's order
        assert_same(got["state"], wanted["state"], 1e-9)
        torch.testing.assert_close(got["reloaded"], wanted["reloaded"], rtol=1e-6, atol=1e-6)


def test_all_ranks_know_the_same(two):
    for schedule in ("verbs", "verbs_v"):
        first, second = two[schedule]
        assert first["stats"] == second["stats"]
        assert first["step"] == second["step"]
        assert first["answers"] == second["answers"]
        assert torch.equal(first["scores"], second["scores"])


def test_both_ends_of_a_tied_embedding_stay_equal(two):
    for schedule in ("verbs", "verbs_v"):
        ends = [end for rank in two[schedule] for end in rank["ends"]]
        assert len(ends) == 2
        assert torch.equal(*ends)
        assert torch.equal(ends[0], two[schedule][0]["state"]["embed.weight"])


def two_passes(run: Run):
    """Rows of two lengths in one step, scoring between them."""
    engine, loss = Engine(run), cross_entropy(run.loss)
    engine.forward_backward(rows(3), loss)
    short = rows(5)._map(lambda x_BT: x_BT[:, : LENGTH // 2], rows(5).sample_ids)
    engine.logprobs(short)
    engine.forward_backward(short, loss)
    found = {n: full(p.grad) for n, p in engine.named_parameters() if p.grad is not None}
    return found | {"norm": torch.tensor(engine.optim_step().grad_norm)}


def test_a_step_of_two_passes_of_different_lengths(two):
    assert_same(together(two["two_passes"]), two_passes(run_of()), 1e-9)


def give_each_rank_other_rows():
    engine = Engine(run_of("1f1b"))
    batch = rows(2)
    if engine.mesh.rank == 1:
        batch = batch._map(lambda x_BT: x_BT[:, : LENGTH // 2], batch.sample_ids)
    with pytest.raises(TrainingError) as caught:
        engine.forward_backward(batch, cross_entropy(engine.run.loss))
    return str(caught.value)


def test_ranks_with_different_rows_end_with_a_message(two):
    first, second = two["other_rows"]
    assert f"has 2 micro-batches of {LENGTH} tokens" in first
    assert f"has 2 micro-batches of {LENGTH // 2} tokens" in second


def load_wrong_weights():
    run = run_of("1f1b")
    engine = Engine(run)
    state = engine.full_state_dict()
    errors = []
    for wrong in (
        {k: v for k, v in state.items() if k != "blocks.5.attn.wq.weight"},
        {**state, "surplus": torch.zeros(1)},
        {**state, "embed.weight": torch.zeros(3)},
    ):
        with pytest.raises(CheckpointError) as caught:
            engine.load_weights(wrong.items())
        errors.append(str(caught.value))
    return errors


def test_weights_are_strict_over_all_pieces(two):
    first, second = two["strictness"]
    assert first == second
    assert ["wq" in first[0], "surplus" in first[1], "shape" in first[2]] == [True] * 3


def lose_gradients():
    """A zero-bubble schedule over weights that are given back after the forward pass: what the rule
    refuses, without asking it."""
    reshard: dict[str, Any] = {"layout.reshard_after_forward": "always"}
    run = run_of("zbv", **reshard)
    mesh = init_distributed(run.layout)
    pieces = []
    for piece in pieces_of(run.model, run.layout, mesh.place.pp):
        with torch.device("meta"):
            decoder = Decoder(run.model, piece).double()
        parallelize(decoder, mesh, run)
        init_parameters(decoder, 0, lambda name, _: init_rule(run.model, name))
        pieces.append(decoder)
    pipeline = Pipeline(pieces, mesh, run)
    micro = rows(1)

    def objective(decoder, inputs, i):
        tokens = micro.tokens_BT if inputs is None else inputs
        options = ForwardOptions(dtype=torch.float64, in_halves=True)
        found = decoder(
            tokens, micro.positions_BT, micro.cu_seqlens(), micro.targets_BT, None, options
        )
        return found.logprobs_BT.sum() if decoder.piece.last else found

    with pytest.raises(TrainingError) as caught:
        pipeline.forward_backward(4, LENGTH, objective)
    return str(caught.value)


def test_lost_gradients_end_the_run_on_all_ranks(two):
    first, second = two["lost"]
    assert first == second
    assert "got no gradient" in first
    assert "blocks." in first


# --- checkpoints ------------------------------------------------------------------------------


def save_then_load_elsewhere(folder):
    """Two steps with a save between them, and the second again after loading it as another
    pipeline; Muon and AdamW both have state."""
    settings: dict[str, Any] = {"optim.kind": "muon"}
    engine = Engine(run_of("1f1b", **settings))
    take_step(engine, rows(8))
    engine.save(folder / "one", {"at": 1}).wait()
    straight = take_step(engine, rows(8))
    other = Engine(run_of("zbv", **settings))
    assert other.load(folder / "one") == {"at": 1}
    resumed = take_step(other, rows(8))
    with pytest.raises(CheckpointError) as caught:
        Engine(run_of("1f1b")).load(folder / "one")  # AdamW misses moments
    return {"folder": folder, "straight": straight, "resumed": resumed, "error": str(caught.value)}


def test_a_checkpoint_goes_on_in_any_pipeline_and_in_one_process(two):
    straight = together([rank["straight"] for rank in two["going_on"]])
    assert_same(together([rank["resumed"] for rank in two["going_on"]]), straight, 1e-9)
    muon: dict[str, Any] = {"optim.kind": "muon"}
    engine = Engine(run_of(**muon))
    engine.load(two["going_on"][0]["folder"] / "one")
    assert_same(take_step(engine, rows(8)), straight, 1e-9)
    first, second = (rank["error"] for rank in two["going_on"])
    assert first == second
    assert "missing" in first
    assert "surplus" in first


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout.pp_stages_per_rank": 2}, "pp_stages_per_rank=1"),
        ({"layout.pp_schedule": "zbv"}, "layout.pp_stages_per_rank=2"),
        ({"layout.pp_schedule": "interleaved-1f1b"}, "layout.pp_stages_per_rank=2"),
        ({"layout.pp_layers": (6,)}, r"1 numbers for 2 stages.*pp_layers=\[3, 3\]"),
        ({"layout.pp_layers": (3, 4)}, "adds up to 7, not to model.num_layers=6"),
        (
            {"layout.pp_schedule": "zbv", "layout.pp_stages_per_rank": 2, "layout.zero": 1,
             "layout.pp_layers": (3, 0, 2, 1)},
            r"can be without blocks.*pp_layers=\[1, 2, 2, 1\]",
        ),
        ({"train.micro_batch_rows": 8}, "the nearest legal value is train.micro_batch_rows=4"),
        ({"train.global_batch_rows": 1}, "global_batch_rows=2 with train.micro_batch_rows=1"),
        ({"layout.zero": 2}, "zero=1, or layout.zero=3"),
        ({"layout.reduce_gradients": "micro_batch"}, "reduce_gradients='auto'"),
        (
            {"layout.pp_schedule": "zbv", "layout.pp_stages_per_rank": 2},
            "reshard_after_forward='never'",
        ),
        (
            {"layout.pp_schedule": "dualpipev", "layout.pp_stages_per_rank": 2, "layout.zero": 0,
             "layout.compile": True},
            "layout.compile=false",
        ),
        ({"optim.release_gradients": True, "optim.clip_norm": 0.0}, "release_gradients=false"),
        ({"layout.pp": 1, "layout.pp_schedule": "zbv"}, "layout.pp_schedule='1f1b'"),
        ({"model.num_layers": 1, "layout.pp_stages_per_rank": 2,
          "layout.pp_schedule": "interleaved-1f1b"}, "legal value.*pp_stages_per_rank=1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_run(base_run(**{**MODEL, "layout.pp": 2, **settings}), settings.get("layout.pp", 2))


def test_names_and_shapes_of_the_whole_model():
    run = run_of()
    state = Engine(run).full_state_dict()
    assert full_shapes(run.model) == {name: value.shape for name, value in state.items()}
    assert math.prod(full_shapes(run.model)["embed.weight"]) == state["embed.weight"].numel()
