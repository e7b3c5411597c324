import subprocess
import sys
from math import prod

import pytest
import torch
from torch.distributed.tensor import DTensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.loader import rank_rows
from stepwell.hardware import GIB, live_tensor_bytes, measure_peak_allocated
from stepwell.models.activations import held, saved_per_layer
from stepwell.models.flops import parameter_shapes
from stepwell.models.lora import LoraLinear
from stepwell.models.lora_shapes import trained_shapes
from stepwell.models.transformer import Decoder, ForwardOptions
from stepwell.parallel.mesh import init_distributed
from stepwell.parallel.rules import axis_sizes
from stepwell.plan.cluster import cluster
from stepwell.plan.dryrun.dryrun import full_rows
from stepwell.plan.footprint.activations import block_of
from stepwell.plan.job import job_of
from stepwell.plan.memory.ledger import (
    kv_cache_bytes_per_token,
    logits_bytes,
    method_bytes_per_parameter,
    nf4_bytes_per_parameter,
    predict_memory,
    predict_rank,
    state_bytes_per_parameter,
    zero_bytes_per_parameter,
    zero_volume_in_parameters,
)
from stepwell.plan.memory.sizes import Sizes
from stepwell.sections.model import ModelConfig
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from stepwell.types import ConfigError
from tests.oracle import base_run, global_batch
from tests.parallel.ranks import run_ranks

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def run_of(rows=4, seq_len=128, micro_batches=1, compute="bf16", loss=None, layout=None, **model):
    return Run.parse(
        {
            "model": model,
            "precision": {"compute": compute},
            "data": {"seq_len": seq_len},
            "loss": loss or {},
            "layout": layout or {},
            "train": {"micro_batch_rows": rows, "global_batch_rows": rows * micro_batches},
        }
    )


def test_planning_imports_no_torch():
    code = "import sys, stepwell.plan.memory.ledger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- closed forms ----------------------------------------------------------------------------


def test_state_of_one_and_of_several_models():
    assert state_bytes_per_parameter() == 16
    assert state_bytes_per_parameter(trained=False) == 2
    assert method_bytes_per_parameter("ppo") == 36
    assert method_bytes_per_parameter("dpo") == 18
    assert method_bytes_per_parameter("grpo") == 18
    assert method_bytes_per_parameter("grpo", kl=False) == 16
    with pytest.raises(ConfigError, match="unknown method 'ppi'"):
        method_bytes_per_parameter("ppi")


@pytest.mark.parametrize("n", [1, 2, 8, 1024])
def test_zero_stages(n):
    found = [zero_bytes_per_parameter(stage, n) for stage in range(4)]
    assert found == [16, 4 + 12 / n, 2 + 14 / n, 16 / n]


def test_zero_communication():
    assert [zero_volume_in_parameters(stage) for stage in range(4)] == [2, 2, 2, 3]
    assert zero_volume_in_parameters(3, reshard_after_forward=False) == 2
    for refused in (zero_volume_in_parameters, lambda s: zero_bytes_per_parameter(s, 2)):
        with pytest.raises(ConfigError, match="no stage 4"):
            refused(4)
    with pytest.raises(ConfigError, match="num_ranks=0"):
        zero_bytes_per_parameter(1, 0)


def test_quantised_weights_logits_and_cache():
    assert nf4_bytes_per_parameter(64) == 0.5625
    assert nf4_bytes_per_parameter(64, double_quantised=True) == pytest.approx(0.516, abs=5e-4)
    assert logits_bytes(8, 1024, 151_936) / GIB == pytest.approx(4.64, abs=5e-3)
    cfg = ModelConfig(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
    assert kv_cache_bytes_per_token(cfg) == 2 * 30 * 3 * 64 * 2


# --- the ledger against a real step ----------------------------------------------------------


def full_batch(run: Run) -> Batch:
    return full_rows(run, run.train.global_batch_rows)


def measured_engine_step(run: Run) -> int:
    engine, batch, loss = Engine(run), full_batch(run), cross_entropy(run.loss)

    def step():
        engine.forward_backward(batch, loss)
        engine.optim_step()

    step()
    return measure_peak_allocated(step)


def measured_step(run: Run) -> int:
    """Peak bytes of a step of the bare decoder above its weights and optimiser state."""
    torch.manual_seed(0)
    decoder = Decoder(run.model)
    optimizer = torch.optim.AdamW(decoder.parameters(), fused=True)
    rows, T = run.train.micro_batch_rows, run.data.seq_len
    tokens_BT = torch.randint(0, run.model.vocab_size, (rows, T))
    positions_BT = torch.arange(T).repeat(rows, 1)
    cu_seqlens = torch.arange(0, rows * T + 1, T, dtype=torch.int32)
    options = ForwardOptions(
        dtype=DTYPES[run.precision.compute],
        chunk_tokens=run.loss.chunk_tokens,
        keep_logits=run.loss.keep_logits != "never",
    )

    def step():
        for _ in range(run.train.global_batch_rows // rows):
            found = decoder(tokens_BT, positions_BT, cu_seqlens, tokens_BT, options=options)
            (-found.logprobs_BT.mean()).backward()
            del found
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    return measure_peak_allocated(step)


CASES = {
    "small": run_of(num_layers=4),
    "wide, large vocabulary": run_of(
        rows=1, num_layers=2, d_model=512, num_heads=8, d_ff=1536, vocab_size=16_384, tied=False
    ),
    "float32": run_of(compute="fp32", num_layers=3, vocab_size=512),
    "logits computed twice": run_of(
        num_layers=2, loss={"keep_logits": "never", "chunk_tokens": 128}
    ),
    "several chunks kept": run_of(num_layers=2, loss={"chunk_tokens": 128}),
    "many activations": run_of(rows=8, num_layers=6, vocab_size=512, num_kv_heads=4, d_ff=512),
    "qwen3": run_of(num_layers=3, family="qwen3", qk_norm=True),
    "accumulating": run_of(num_layers=3, micro_batches=2),
    "few tokens": run_of(rows=1, seq_len=32, num_layers=6, d_model=512, num_heads=8, d_ff=1536),
}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_predicted_within_10_percent(name):
    run = CASES[name]
    ledger = predict_memory(run, device="cpu")
    predicted = ledger.peak_bytes - ledger.resting_bytes
    assert predicted == pytest.approx(measured_step(run), rel=0.10)


@pytest.mark.parametrize("name", ["small", "wide, large vocabulary", "accumulating"])
def test_an_engine_step_is_predicted_within_10_percent(name):
    run = CASES[name]
    ledger = predict_memory(run, device="cpu")
    predicted = ledger.peak_bytes - ledger.resting_bytes
    assert predicted == pytest.approx(measured_engine_step(run), rel=0.10)


REMAT = {
    "full": {"mode": "full"},
    "every": {"mode": "every"},
    "sqrt": {"mode": "sqrt"},
    "selective": {"mode": "selective"},
    "budget": {"mode": "budget", "budget_bytes": 25 * 2**20},
}


@pytest.mark.parametrize(
    ("mode", "compute"), [*((mode, "bf16") for mode in REMAT), ("full", "fp32"), ("sqrt", "fp32")]
)
def test_recomputation_is_predicted_within_10_percent(mode, compute):
    plain = run_of(rows=8, num_layers=6, vocab_size=512, num_kv_heads=4, d_ff=512, compute=compute)
    run = Run.parse({**plain.model_dump(exclude_none=True), "remat": REMAT[mode]})
    ledger = predict_memory(run, device="cpu")
    predicted = ledger.peak_bytes - ledger.resting_bytes
    assert ledger.peak_bytes < predict_memory(plain, device="cpu").peak_bytes
    assert predicted == pytest.approx(measured_engine_step(run), rel=0.10)


EIGHT_BITS = {
    "tensorwise": {"precision.fp8.recipe": "tensorwise"},
    "one micro-batch": {"precision.fp8.recipe": "delayed", "train.global_batch_rows": 2},
    "rowwise": {"precision.fp8.recipe": "rowwise"},
    "high precision": {
        "precision.fp8.recipe": "delayed",
        "precision.fp8.wgrad_high_precision": True,
    },
    "without w_down": {"precision.fp8.recipe": "delayed", "precision.fp8.keep": ["*.w_down"]},
    "without mlp": {"precision.fp8.recipe": "tensorwise", "precision.fp8.keep": ["*.mlp.*"]},
    "without half of the blocks": {
        "precision.fp8.recipe": "tensorwise",
        "precision.fp8.keep": ["blocks.0.*", "blocks.2.*", "blocks.4.*"],
    },
    "full": {"precision.fp8.recipe": "tensorwise", "remat.mode": "full"},
    "selective": {"precision.fp8.recipe": "rowwise", "remat.mode": "selective"},
}


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_8_bits_are_predicted_within_10_percent(name):
    plain = run_of(rows=2, seq_len=256, micro_batches=2, num_layers=6, vocab_size=1024)
    run = Run.parse(plain.model_dump(exclude_none=True), EIGHT_BITS[name])
    ledger = predict_memory(run, device="cpu")
    predicted = ledger.peak_bytes - ledger.resting_bytes
    assert predicted == pytest.approx(measured_engine_step(run), rel=0.10)


def test_a_layer_in_8_bits_saves_what_is_predicted():
    """The tensors that autograd holds for a block, by the ledger and by the engine."""
    for recipe in ("tensorwise", "rowwise"):
        per_layer = []
        for num_layers in (1, 2):
            run = run_of(num_layers=num_layers, vocab_size=256)
            run = Run.parse(run.model_dump(), {"precision.fp8.recipe": recipe})
            per_layer.append(bytes_saved(Engine(run), run))
        found = predict_memory(run, device="cpu").activations_per_layer_bytes
        assert per_layer[1] - per_layer[0] == pytest.approx(found, rel=0.001), recipe


ATTENTION, MLP = r"blocks\.\d+\.attn\.w[qkvo]", r"blocks\.\d+\.mlp\.w_\w+"


@pytest.mark.parametrize(
    "lora",
    [
        {"targets": (ATTENTION, MLP)},
        {"targets": (ATTENTION,)},
        {"targets": (r"blocks\.\d+\.attn\.wo", r"blocks\.\d+\.mlp\.w_gate")},
        {"targets": (r"blocks\.\d+\.mlp\.w_down",)},
        {"targets": (ATTENTION,), "dropout": 0.1, "dora": True},
    ],
)
def test_a_frozen_product_keeps_no_input(lora):
    """What autograd holds of a block with adapters, by both ledgers and by the engine."""
    per_layer = []
    for num_layers in (2, 3):
        plain = run_of(num_layers=num_layers, vocab_size=256).model_dump(exclude_none=True)
        run = Run.parse({**plain, "lora": {"rank": 4, **lora}})
        engine = Engine(run)
        casts = 2 * sum(p.numel() for piece in engine.pieces for p in piece.parameters()
                        if p.requires_grad and p.dim() == 2)  # fmt: skip
        per_layer.append(bytes_saved(engine, run) - casts)
    found = predict_memory(run, device="cpu").activations_per_layer_bytes
    assert per_layer[1] - per_layer[0] == pytest.approx(found, rel=0.003)
    if "dropout" not in lora:
        job = job_of(run, 1, cluster("h100-sxm"))
        assert block_of(job.dims, job.layout).all.total == found


def bytes_saved(engine, run):
    held = {}

    def keep(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.forward_backward(full_batch(run), cross_entropy(run.loss))
    own = {p.untyped_storage().data_ptr() for piece in engine.pieces for p in piece.parameters()}
    return live_tensor_bytes([tensor for at, tensor in held.items() if at not in own])


def test_released_gradients_are_predicted_within_10_percent():
    plain = CASES["few tokens"].model_dump(exclude_none=True)
    run = Run.parse(
        plain, {"optim.release_gradients": True, "optim.clip_norm": 0.0, "guard.action": "none"}
    )
    ledger = predict_memory(run, device="cpu")
    assert ledger.peak_bytes < predict_memory(CASES["few tokens"], device="cpu").peak_bytes
    predicted = ledger.peak_bytes - ledger.resting_bytes
    assert predicted == pytest.approx(measured_engine_step(run), rel=0.10)


@pytest.mark.parametrize("mode", ["none", "every", "selective"])
def test_offloaded_activations_are_predicted_within_10_percent(mode):
    """On a CPU the host's copies are on the same device as the rest."""
    plain = run_of(rows=8, num_layers=6, vocab_size=512, num_kv_heads=4, d_ff=512)
    more = {"remat": {"mode": mode}, "offload": {"activations": True}}
    run = Run.parse({**plain.model_dump(exclude_none=True), **more})
    ledger, measured = predict_memory(run, device="cpu"), measured_engine_step(run)
    host = ledger.host["activations"]
    assert ledger.peak_bytes - ledger.resting_bytes + host == pytest.approx(measured, rel=0.10)
    engine = Engine(run)
    engine.forward_backward(full_batch(run), cross_entropy(run.loss))
    assert engine.activation_offload is not None
    assert host == pytest.approx(engine.activation_offload.peak_host_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "many activations", "several chunks kept"])
def test_a_compiled_engine_step_is_predicted_within_10_percent(name):
    layout = CASES[name].layout.model_copy(update={"compile": True})
    run = CASES[name].model_copy(update={"layout": layout})
    ledger = predict_memory(run, device="cpu")
    assert ledger.peak_bytes < predict_memory(CASES[name], device="cpu").peak_bytes
    predicted = ledger.peak_bytes - ledger.resting_bytes
    assert predicted == pytest.approx(measured_engine_step(run), rel=0.10)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_resting_memory_is_exact(compute):
    run = run_of(num_layers=2, compute=compute)
    decoder = Decoder(run.model)
    ledger = predict_memory(run, device="cpu")
    assert ledger.items.parameters == live_tensor_bytes(decoder.parameters())
    assert ledger.items.optimizer == 2 * live_tensor_bytes(decoder.parameters())


def test_a_layer_saves_what_is_predicted():
    def saved(num_layers: int) -> int:
        run = run_of(num_layers=num_layers, vocab_size=256)
        decoder = Decoder(run.model)
        tokens_BT = torch.zeros(4, 128, dtype=torch.int64)
        cu_seqlens = torch.tensor([0, 128, 256, 384, 512], dtype=torch.int32)
        options = ForwardOptions(dtype=torch.bfloat16, keep_logits=True)
        held = {}

        def keep(tensor):
            held[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            decoder(tokens_BT, tokens_BT, cu_seqlens, tokens_BT, options=options)
        weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
        casts = (
            2 * num_layers * sum(p.numel() for p in decoder.blocks["0"].parameters() if p.dim() > 1)
        )
        return live_tensor_bytes([t for at, t in held.items() if at not in weights]) - casts

    run = run_of(num_layers=1, vocab_size=256)
    assert saved(3) - saved(2) == saved_per_layer(run.model, 512)
    assert predict_memory(run, device="cpu").activations_per_layer_bytes == saved_per_layer(
        run.model, 512
    )


def test_items_add_up_to_the_peak():
    ledger = predict_memory(run_of(num_layers=4), device="cpu")
    assert ledger.peak_bytes == sum(ledger.items.named().values())
    assert ledger.by_phase[ledger.phase] == ledger.peak_bytes == max(ledger.by_phase.values())


def test_sharding_divides_the_state():
    run = run_of(num_layers=4)
    one, four = predict_memory(run, device="cpu"), predict_memory(run, world=4, device="cpu")
    assert four.resting_bytes == one.resting_bytes // 4
    assert four.activations_per_layer_bytes == one.activations_per_layer_bytes
    kept = run_of(num_layers=4, layout={"reshard_after_forward": "never"})
    difference = (
        predict_memory(kept, 4, device="cpu").items.working_copies - four.items.working_copies
    )
    block = sum(p.numel() for p in Decoder(run.model).blocks["0"].parameters())
    assert difference == 4 * 2 * block  # all four in bf16, which are gone by the loss otherwise


LAYOUTS = {
    "zero 0": {"layout.zero": 0},
    "zero 1": {"layout.zero": 1, "optim.kind": "muon"},
    "zero 2": {"layout.zero": 2},
    "zero 3": {"model.tied": False},
    "tensor": {"layout.tp": 2},
    "tensor, one key head": {"layout.tp": 2, "model.num_kv_heads": 1, "model.tied": False},
    "context": {"layout.cp": 2},
    "pipeline": {"layout.pp": 2, "layout.pp_layers": (3, 1)},
    "pipeline, interleaved": {
        "layout.pp": 2,
        "layout.pp_schedule": "interleaved-1f1b",
        "layout.pp_stages_per_rank": 2,
        "model.tied": False,
    },
    "context, ulysses": {"layout.cp": 2, "layout.cp_method": "ulysses"},
    "tensor, zero 1": {"layout.tp": 2, "layout.zero": 1, "remat.mode": "full"},
    "adapters": {"lora.rank": 4},
    "optimiser on the host": {"offload.optimizer": True},
    "moments in 8 bits": {
        "optim.kind": "adamw8bit",
        "model.d_model": 256,
        "precision.compute": "bf16",
        "precision.param": "fp32",
        "precision.reduce": "fp32",
    },
}


def layout_run(**overrides):
    odd = {"model.num_layers": 4, "model.d_ff": 26, "model.vocab_size": 62}
    return base_run(**{**odd, "train.micro_batch_rows": 2, **overrides})


def state_of_ranks(runs):
    """This rank's bytes of weights, gradients after a backward pass and moments, of each run."""
    found = []
    for run in runs:
        mesh = init_distributed(run.layout)
        engine, batch = Engine(run, mesh=mesh), global_batch()
        share = rank_rows(batch.num_rows, mesh.data_rank, mesh.data_world)
        engine.forward_backward(batch.rows(share.start, share.stop), cross_entropy(run.loss))
        parameters = [p for piece in engine.pieces for p in piece.parameters()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        moments = [m for m in engine.optimizer.state_dict().values() if m.dim()]
        sizes = [live_tensor_bytes(part) for part in (parameters, gradients, moments)]
        found.append((mesh.place.pp, *sizes))
    return found


def test_state_of_real_ranks_is_exact():
    runs = [layout_run(**overrides) for overrides in LAYOUTS.values()]
    for results in run_ranks(state_of_ranks, 2, runs):
        for name, run, (stage, *measured) in zip(LAYOUTS, runs, results, strict=True):
            ledger = predict_rank(run, 2, stage, device="cpu")
            items = ledger.items
            predicted = [items.parameters, ledger.gradient_bytes, items.optimizer]
            predicted[2] += ledger.host.get("optimizer", 0) // 2  # two of the four copies there
            assert predicted == measured, name


# Layouts, and what of them is to be within 5 %: the activations that autograd saves.
SAVED = {
    "zero 0": {"layout.zero": 0},
    "zero 1": {"layout.zero": 1},
    "zero 3": {},
    "zero 3, every": {"remat.mode": "every"},
    "tensor": {"layout.tp": 2},
    "context": {"layout.cp": 2},
    "context, ulysses": {"layout.cp": 2, "layout.cp_method": "ulysses"},
    "8 bits": {"precision.fp8.recipe": "tensorwise"},
    "adapters": {"lora.rank": 8},
}


def saving_run(overrides):
    """Its 544 (or 272) tokens, and those that they are padded to, are the size of no weight."""
    run = run_of(seq_len=136, num_layers=2, vocab_size=1040, num_kv_heads=4)
    rows = 4 if {"layout.tp", "layout.cp"} & set(overrides) else 8
    values = run.model_dump(exclude_none=True)
    return Run.parse(values, {**overrides, "train.global_batch_rows": rows})


def saved_by_ranks(runs):
    """Bytes that autograd holds, on this rank, of a micro-batch, without weights."""
    found = []
    for run in runs:
        mesh = init_distributed(run.layout)
        engine, batch = Engine(run, mesh=mesh), full_batch(run)
        share = rank_rows(batch.num_rows, mesh.data_rank, mesh.data_world)
        shapes, held = weight_shapes(run), {}

        def keep(tensor, shapes=shapes, held=held):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if tuple(local.shape) not in shapes:
                held[local.untyped_storage().data_ptr()] = local
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            engine.forward_backward(batch.rows(share.start, share.stop), cross_entropy(run.loss))
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in held.values()))
    return found


def weight_shapes(run):
    """Of matrices on a tensor rank, and of their transposes."""
    shapes = list(parameter_shapes(run.model).values())
    if run.lora.rank:
        shapes += trained_shapes(run.model, run.lora).values()
    found = set()
    for rows, columns in (shape for shape in shapes if len(shape) == 2):
        found |= {(rows // i, columns // j) for i in (1, 2) for j in (1, 2)}
    return found | {(columns, rows) for rows, columns in found}


def test_activations_of_real_ranks_are_predicted_within_5_percent():
    runs = [saving_run(overrides) for overrides in SAVED.values()]
    for results in run_ranks(saved_by_ranks, 2, runs):
        for name, run, measured in zip(SAVED, runs, results, strict=True):
            sizes = Sizes.of(run, axis_sizes(run.layout, 2), 0, grouped=True, device="cpu")
            predicted = held(sizes.now.segments, sizes.saved) + sizes.now.root
            predicted += sizes.now.logits
            assert predicted == pytest.approx(measured, rel=0.05), name


PEAKS = {
    "zero 0": ({"zero": 0}, "none", 2),
    "zero 1": ({"zero": 1}, "none", 2),
    "zero 1, accumulating": ({"zero": 1}, "none", 4),
    "zero 2": ({"zero": 2}, "none", 2),
    "zero 3": ({}, "none", 2),
    "zero 3, kept gathered": ({"reshard_after_forward": "never"}, "none", 2),
    "zero 3, full": ({}, "full", 2),
    "zero 3, every": ({}, "every", 2),
    "zero 3, sqrt": ({}, "sqrt", 2),
    "zero 3, selective": ({}, "selective", 2),
    "tensor": ({"tp": 2}, "none", 1),
    "tensor, full": ({"tp": 2}, "full", 1),
    "tensor, selective": ({"tp": 2}, "selective", 1),
    "context": ({"cp": 2}, "none", 1),
    "context, full": ({"cp": 2}, "full", 1),
    "context, ulysses": ({"cp": 2, "cp_method": "ulysses"}, "none", 1),
    "gpipe": ({"pp": 2, "pp_schedule": "gpipe"}, "none", 4),
    "1f1b": ({"pp": 2}, "none", 4),
    "1f1b, full": ({"pp": 2}, "full", 4),
    "interleaved": (
        {"pp": 2, "pp_schedule": "interleaved-1f1b", "pp_stages_per_rank": 2},
        "none",
        4,
    ),
    "interleaved, as many as ranks": (
        {"pp": 2, "pp_schedule": "interleaved-1f1b", "pp_stages_per_rank": 3},
        "none",
        2,
    ),
    "zbv": ({"pp": 2, "pp_schedule": "zbv", "pp_stages_per_rank": 2, "zero": 1}, "none", 4),
}
TOO_HIGH = {"1f1b": 0.06, "interleaved, as many as ranks": 0.06}  # 5.0, 5.1 % on the last rank


def peak_run(layout, mode, micro_batches):
    run = run_of(
        micro_batches=micro_batches, layout=layout, num_layers=6, vocab_size=1024, num_kv_heads=4
    )
    return Run.parse({**run.model_dump(exclude_none=True), "remat": {"mode": mode}})


def peaks_of_ranks(runs):
    """The least of four steps: what gloo's threads free is not seen, which can only add."""
    found = []
    for run in runs:
        mesh = init_distributed(run.layout)
        engine, batch, loss = Engine(run, mesh=mesh), full_batch(run), cross_entropy(run.loss)
        share = rank_rows(batch.num_rows, mesh.data_rank, mesh.data_world)
        mine = batch.rows(share.start, share.stop)

        def step(engine=engine, mine=mine, loss=loss):
            engine.forward_backward(mine, loss)
            engine.optim_step()

        step()
        step()
        found.append((mesh.place.pp, min(measure_peak_allocated(step) for _ in range(4))))
    return found


@pytest.mark.slow
def test_the_peak_of_real_ranks_is_predicted_within_5_percent():
    """Of weights, optimiser, gradients, activations and all that is there for a moment."""
    runs = [peak_run(*case) for case in PEAKS.values()]
    for results in run_ranks(peaks_of_ranks, 2, runs, timeout_s=400):
        for name, run, (stage, above) in zip(PEAKS, runs, results, strict=True):
            ledger = predict_rank(run, 2, stage, device="cpu")
            error = ledger.peak_bytes / (ledger.resting_bytes + above) - 1
            assert -0.05 < error < TOO_HIGH.get(name, 0.05), (name, stage, error)


def test_muon_keeps_one_moment_of_hidden_matrices():
    run = run_of(num_layers=2)
    muon = run.model_copy(update={"optim": run.optim.model_copy(update={"kind": "muon"})})
    hidden = sum(p.numel() for p in Decoder(run.model).blocks.parameters() if p.dim() == 2)
    saved = (
        predict_memory(run, device="cpu").items.optimizer
        - predict_memory(muon, device="cpu").items.optimizer
    )
    assert saved == 4 * hidden


# --- adapters --------------------------------------------------------------------------------


def lora_run(compute="bf16", micro_batches=1, **lora) -> Run:
    run = run_of(rows=4, micro_batches=micro_batches, compute=compute, num_layers=4, d_ff=768)
    return Run.parse(run.model_dump(exclude_none=True), {f"lora.{k}": v for k, v in lora.items()})


ADAPTED = {
    "lora": lora_run(rank=8),
    "dora": lora_run(rank=8, dora=True),
    "dropout": lora_run(rank=8, dropout=0.1),
    "some layers": lora_run(rank=4, targets=r'["blocks\\.\\d+\\.attn\\.w[qv]"]'),
    "accumulating": lora_run(rank=8, micro_batches=2),
    "4 bits": lora_run(rank=8, quantize="nf4"),
    "4 bits, plain scales": lora_run(rank=8, quantize="nf4", double_quantize=False),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_what_a_run_with_adapters_holds_is_exact(name):
    run = ADAPTED[name]
    engine = Engine(run)
    layers = [m.quantised for m in engine.decoder.modules() if isinstance(m, LoraLinear)]
    in_4_bits = sum(q.num_bytes for q in layers if q is not None)
    ledger = predict_memory(run, device="cpu")
    parameters = (p for _, p in engine.named_parameters())
    assert ledger.items.parameters == live_tensor_bytes(parameters) + in_4_bits
    moments = [v for n, v in engine.optimizer.state_dict().items() if not n.endswith(".step")]
    assert ledger.items.optimizer == live_tensor_bytes(moments)
    trained = sum(p.numel() for _, p in engine.named_parameters() if p.requires_grad)
    assert ledger.gradient_bytes == 4 * trained


@pytest.mark.parametrize("name", ADAPTED)
def test_a_step_with_adapters_is_predicted_within_12_percent(name):
    run = ADAPTED[name]
    ledger = predict_memory(run, device="cpu")
    predicted = ledger.peak_bytes - ledger.resting_bytes
    assert predicted == pytest.approx(measured_engine_step(run), rel=0.12)


def test_a_trained_parameter_has_16_bytes_and_a_frozen_one_2():
    """Of bf16 training: master, moments and gradient, and the copy that is computed with."""
    run = lora_run(rank=8)
    shapes, trained = parameter_shapes(run.model), trained_shapes(run.model, run.lora)
    num_trained = sum(prod(shape) for shape in trained.values())
    num_matrices = sum(prod(shape) for shape in shapes.values() if len(shape) == 2)
    num_vectors = sum(prod(shape) for shape in shapes.values() if len(shape) == 1)
    ledger = predict_memory(run, device="cpu")
    held = ledger.resting_bytes + ledger.gradient_bytes
    assert held == 16 * num_trained + 2 * num_matrices + 4 * num_vectors
