"""Tensor and sequence parallelism on gloo ranks: gradients, replicas, shares and messages, beside
one process in float64. (More layouts: tests/layouts.py.)"""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from stepwell import generate
from stepwell.data.loader import rank_rows
from stepwell.models.transformer import axes_of
from stepwell.parallel.mesh import barrier, init_distributed
from stepwell.parallel.rules import check_run
from stepwell.parallel.tensor import tp_placement
from stepwell.parallel.traffic import count_collectives, summary
from stepwell.train.engine import Engine
from stepwell.train.losses import Loss, LossSums, select, token_count
from stepwell.types import ConfigError
from tests.oracle import LENGTH, assert_same, base_run, documents, global_batch, take_step
from tests.parallel.ranks import run_jobs, run_ranks

TOLERANCE = 1e-9
SIZES = {
    "model.vocab_size": 64,
    "model.d_ff": 28,
    "optim.clip_norm": 0.05,
    "train.micro_batch_rows": 4,
}
QWEN2 = {"model.family": "qwen2", "model.qkv_bias": True}
QWEN3 = {"model.family": "qwen3", "model.qk_norm": True, "model.tied": False}
SMOOTH = {"loss.label_smoothing": 0.1}
COMPUTED_TWICE = {"loss.keep_logits": "never"}
MUON = {"optim.kind": "muon"}


def run_of(**settings):
    return base_run(**{**SIZES, **settings})


def tp_run(tp, **settings):
    return run_of(**{"layout.tp": tp, **settings})


# name -> (ranks, tp, settings of the model, loss and optimiser, settings of the layout)
LAYOUTS = {
    "tp 2": (2, 2, {**QWEN3, **SMOOTH}, {"train.micro_batch_rows": 3}),
    "tp 2, logits computed twice": (2, 2, {**QWEN2, **COMPUTED_TWICE}, {}),
    "tp 4, more ranks than key/value heads": (4, 4, {**QWEN2, **SMOOTH}, {}),
    "tp 4 with norms of heads": (4, 4, {**QWEN3}, {"train.micro_batch_rows": 7}),
    "tp 2 x fsdp 2": (4, 2, {**QWEN3, **SMOOTH}, {"train.micro_batch_rows": 2}),
    "tp 2 x 2 replicas, muon": (
        4,
        2,
        {**MUON},
        {"layout.dp_replicate": 2, "train.global_batch_rows": 8},
    ),
    "tp 2 x zero 1": (4, 2, {**QWEN2}, {"layout.zero": 1}),
    "tp 2 x fsdp 3": (6, 2, {**QWEN2}, {}),
}


def share_of(mesh):
    batch = global_batch()
    rows = rank_rows(batch.num_rows, mesh.data_rank, mesh.data_world)
    return batch.rows(rows.start, rows.stop)


def step(run):
    """What a step finds and leaves, and the weights that it started from."""
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    start = engine.full_state_dict()
    found = take_step(engine, share_of(mesh))
    return found | {f"start/{name}": value for name, value in start.items()}


def steps(runs):
    return {name: step(run) for name, run in runs.items()}


@pytest.mark.parametrize("num_ranks", [2, 4, 6])
def test_gradients_norms_and_steps_equal_one_process(num_ranks):
    layouts = {name: layout for name, layout in LAYOUTS.items() if layout[0] == num_ranks}
    runs = {name: tp_run(tp, **model, **layout) for name, (_, tp, model, layout) in layouts.items()}
    results = run_ranks(steps, num_ranks, runs)
    for name, (_, _, model, _) in layouts.items():
        wanted = step(run_of(**model))
        for rank, found in enumerate(results):
            assert_same(found[name], wanted, TOLERANCE, f"{name}, rank {rank}")
            for key in wanted:
                if key.startswith("start/"):
                    assert torch.equal(found[name][key], wanted[key]), f"{name}: {key}"


# --- what a rank holds and sends -----------------------------------------------------------------


def test_placements():
    cfg = run_of(**QWEN3).model  # 4 heads, 2 key/value heads
    for tp, keyvalue in ((2, Shard(0)), (4, Replicate())):
        for name, wanted in {
            "embed.weight": Shard(0),
            "head.weight": Shard(0),
            "norm.weight": Replicate(),
            "blocks.0.attn_norm.weight": Replicate(),
            "blocks.0.attn.wq.weight": Shard(0),
            "blocks.0.attn.wq.bias": Shard(0),
            "blocks.0.attn.wk.weight": keyvalue,
            "blocks.0.attn.wv.bias": keyvalue,
            "blocks.0.attn.wo.weight": Shard(1),
            "blocks.0.attn.q_norm.weight": Replicate(),
            "blocks.0.mlp.w_up.weight": Shard(0),
            "blocks.0.mlp.w_down.weight": Shard(1),
        }.items():
            assert tp_placement(axes_of(name), cfg, tp) == wanted, (tp, name)


def local_parts(run):
    """After one step: this rank's part of each weight and gradient."""
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    engine.forward_backward(share_of(mesh), everything())
    parts = {f"grad/{name}": local_of(p.grad) for name, p in engine.named_parameters()}
    engine.optim_step()
    weights = {f"weight/{name}": local_of(p) for name, p in engine.named_parameters()}
    kept = [name for name, p in engine.named_parameters() if is_whole(p)]
    return parts | weights, kept


def local_of(tensor):
    assert isinstance(tensor, DTensor)
    return tensor.to_local().clone()


def is_whole(parameter):
    assert isinstance(parameter, DTensor)
    return parameter.placements[-1].is_replicate()


def messages(run):
    """Of one micro-batch, forward and backward; the loss has no z-loss, so no more is needed."""
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    engine.forward_backward(global_batch(), everything())  # FSDP2 sets itself up
    with count_collectives() as sent:
        engine.forward_backward(global_batch(), everything(frozenset({"logprobs"})))
    of_tp = [message for message in sent if message.num_ranks == 2 and message.num_bytes > 4096]
    return summary(of_tp)


def refused_length(run):
    """Rows of 15 tokens on two ranks: an error, and the ranks can still talk."""
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    odd = global_batch().streams(lambda x: x[:, :15]).rows(0, 1)
    with pytest.raises(ValueError, match="15 rows do not divide among 2 ranks") as error:
        engine.forward_backward(odd, everything())
    barrier(mesh)
    return str(error.value)


# --- what the model gives ------------------------------------------------------------------------


def everything(needs=frozenset({"logprobs", "lse", "entropy", "mean_logit", "hidden", "logits"})):
    """A loss of all that a model can be asked for."""

    def fn(outputs, batch):
        total_BT = -outputs.logprobs_BT
        if "logits" in needs:
            total_BT = total_BT + 0.3 * outputs.lse_BT.square() - 0.2 * outputs.entropy_BT
            total_BT = total_BT + 0.7 * outputs.mean_logit_BT + outputs.hidden_BTD.sin().sum(-1)
            total_BT = total_BT + 0.1 * outputs.logits_BTV.cos().sum(-1)
        return LossSums({"tokens": select(total_BT, batch.weights_BT).sum()}, {})

    return Loss(needs, token_count, fn)


def gradients_of_everything(run):
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    stats = engine.forward_backward(share_of(mesh), everything(), temperature=0.7)
    found = {"loss": torch.tensor(stats.loss, dtype=torch.float64)}
    for name, parameter in engine.named_parameters():
        grad = parameter.grad
        assert grad is not None
        found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()
    return found


def scores_and_samples(run):
    """Log-probabilities of this rank's rows, and greedy answers."""
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    prompts = [tuple(ids[:5]) for ids, _ in documents()[:3]]
    requests = [generate.Request(i, ids) for i, ids in enumerate(prompts)]
    sampling = generate.Sampling(temperature=0.0, max_new_tokens=6)
    answers = engine.generate(requests, sampling)
    return engine.logprobs(share_of(mesh)), [answer.token_ids for answer in answers]


def bf16_gradients(run):
    engine = Engine(run, mesh=init_distributed(run.layout))
    engine.forward_backward(global_batch(), everything(frozenset({"logprobs"})))
    return {name: full_gradient(p) for name, p in engine.named_parameters()}


def full_gradient(parameter):
    grad = parameter.grad
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()


BF16 = {
    "precision.compute": "bf16",
    "precision.param": "fp32",
    "precision.reduce": "fp32",
    "loss.z_loss": 0.0,
}


@pytest.fixture(scope="module")
def two():
    all_rows = {"train.micro_batch_rows": 7}
    return run_jobs(
        2,
        everything=(gradients_of_everything, tp_run(2, **QWEN3)),
        scores=(scores_and_samples, tp_run(2, **QWEN2)),
        messages=(messages, tp_run(2, **all_rows)),
        bf16=(bf16_gradients, tp_run(2, **QWEN3, **BF16, **all_rows)),
        refused=(refused_length, tp_run(2)),
    )


@pytest.fixture(scope="module")
def four():
    return run_jobs(
        4,
        parts=(local_parts, tp_run(4, **QWEN2)),
        divided=(local_parts, tp_run(2, **QWEN3)),
    )


def test_all_outputs_have_the_right_gradients(two):
    wanted = gradients_of_everything(run_of(**QWEN3))
    for rank, found in enumerate(two["everything"]):
        assert_same(found, wanted, TOLERANCE, f"rank {rank}")


def test_scores_and_samples_equal_one_process(two):
    logprobs, answers = scores_and_samples(run_of(**QWEN2))
    for found, found_answers in two["scores"]:
        torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-6)
        assert found_answers == answers


def test_messages_of_a_micro_batch(two):
    """N*D a sublayer: gathered and scattered, forward and backward; the same at both ends."""
    num_tokens, d_model, num_layers = 7 * LENGTH, 20, 2
    times = 2 * num_layers + 1  # two sublayers a block; the embedding or the head
    wanted = {"all-gather": times * 2, "reduce-scatter": times * 2}
    for found in two["messages"]:
        for kind, number in wanted.items():
            assert found[kind] == (number, number * num_tokens * d_model * 8), kind


def test_bfloat16_is_as_near_as_one_process(two):
    """Next to float32; partial sums are rounded once more, which costs little."""
    whole = {"train.micro_batch_rows": 7}
    alone = bf16_gradients(run_of(**QWEN3, **BF16, **whole))
    exact = bf16_gradients(run_of(**QWEN3, **{**BF16, "precision.compute": "fp32"}, **whole))
    for found in two["bf16"]:
        for name, want in exact.items():
            error, usual = ((x[name] - want).norm() / want.norm() for x in (found, alone))
            assert 0 < error < 1.5 * usual + 0.005, f"{name}: {error:.3g}, alone {usual:.3g}"


def test_rows_that_do_not_divide_are_refused(two):
    assert "the nearest number that does is 16" in two["refused"][0]
    with pytest.raises(ConfigError, match=r"seq_len=15 must be a multiple of layout.tp=2.*16"):
        check_run(tp_run(2, **{"data.seq_len": 15}), 2)


def test_replicas_stay_equal_bit_for_bit(four):
    """Key/value heads that several ranks use, and norms: at step 1, gradient and weight."""
    (first, kept), *others = four["parts"]
    assert {"norm.weight", "blocks.0.attn.wk.weight", "blocks.1.attn.wv.bias"} <= set(kept)
    for name in kept:
        for parts, _ in others:
            assert torch.equal(parts[f"grad/{name}"], first[f"grad/{name}"]), name
            assert torch.equal(parts[f"weight/{name}"], first[f"weight/{name}"]), name
        assert first[f"grad/{name}"].any(), name
    shards = [parts for parts, _ in four["divided"]]  # ranks 0, 1 and 2, 3 are tensor ranks
    for name in ("norm.weight", "blocks.0.attn.q_norm.weight"):
        for one, other in (shards[:2], shards[2:]):
            assert torch.equal(one[f"grad/{name}"], other[f"grad/{name}"]), name


def test_ranks_hold_equal_shares(four):
    """tp 4: a quarter of what is divided. tp 2 x fsdp 2: a quarter, but half of the norms."""
    shapes = {n: tuple(p.shape) for n, p in Engine(run_of(**QWEN2)).named_parameters()}
    for parts, kept in four["parts"]:
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            wanted = size if name in kept else size // 4
            assert parts[f"weight/{name}"].numel() == wanted, name
    for parts, kept in four["divided"]:
        assert sorted(kept) == sorted(n for n in kept if "norm" in n)
        assert parts["weight/embed.weight"].shape == (16, 20)
        assert parts["weight/blocks.0.mlp.w_down.weight"].shape == (10, 14)
        assert parts["weight/norm.weight"].shape == (10,)


# --- checkpoints ---------------------------------------------------------------------------------


def go_on(run, folder, load, save):
    """One step after loading a checkpoint (None: from the start), and a checkpoint of it."""
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    if load is not None:
        engine.load(folder / load)
    found = take_step(engine, share_of(mesh))
    engine.save(folder / save, {}).wait()
    return found


def test_checkpoints_of_any_layout_go_on_in_any_other(tmp_path):
    """Two steps straight equal: tp 2 x fsdp 2, then alone, then tp 4."""
    settings = {**QWEN2, **SMOOTH}
    alone = run_of(**settings)
    straight = [go_on(alone, tmp_path, None, "a1"), go_on(alone, tmp_path, "a1", "a2")]
    straight.append(go_on(alone, tmp_path, "a2", "a3"))
    first = run_ranks(go_on, 4, tp_run(2, **settings), tmp_path, None, "b1")[0]
    second = go_on(alone, tmp_path, "b1", "b2")
    third = run_ranks(go_on, 4, tp_run(4, **settings), tmp_path, "b2", "b3")[3]
    for found, wanted in zip((first, second, third), straight, strict=True):
        assert_same(found, wanted, TOLERANCE)


@pytest.mark.slow
def test_compiled_blocks_equal_one_process():
    compiled = {"layout.compile": True, "train.micro_batch_rows": 7}
    wanted = step(run_of(**QWEN3))
    for found in run_ranks(step, 2, tp_run(2, **QWEN3, **compiled), timeout_s=300):
        assert_same(found, wanted, TOLERANCE)
