"""`python -m benchmarks.gpu`: a dense model on one CUDA card: tokens/s, MFU, peak memory, and where
the time goes, for bf16 and fp8, eager and compiled, with and without activation checkpointing.

Needs torch 2.11 or newer and no network, and ends within `--budget-s`. The variants that time did
not allow, or that failed, are in the result with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import platform
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stepwell import __version__, hardware
from stepwell.config import Run
from stepwell.data.batch import Batch, padding
from stepwell.diagnose.waterfall import profiled_kernels, waterfall
from stepwell.models.flops import count_parameters, flops_per_token
from stepwell.sections.model import ModelConfig
from stepwell.train.engine import Engine, Stats
from stepwell.train.losses import cross_entropy
from stepwell.train.step_flops import step_flops

RESULTS = Path(__file__).parent / "results"
MODELS = {
    # Llama-3.2-1B's shape (its released config.json), without RoPE scaling.
    "1b": ModelConfig(
        vocab_size=128256,
        num_layers=16,
        d_model=2048,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        d_ff=8192,
        rope_theta=500_000.0,
        max_seq_len=8192,
    ),
    "tiny": ModelConfig(num_layers=2, max_seq_len=8192),
}
# A CPU only tries the script.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"rows": 8, "seq_len": 2048, "steps": 10, "budget_s": 450.0},
    "cpu": {"rows": 2, "seq_len": 128, "steps": 2, "budget_s": 60.0},
}
FP8 = {"precision.fp8.recipe": "tensorwise"}
COMPILED = {"layout.compile": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16, compiled": COMPILED,
    "bf16, eager": {},
    "fp8 tensorwise, compiled": {**FP8, **COMPILED},
    "fp8 rowwise, compiled": {"precision.fp8.recipe": "rowwise", **COMPILED},
    "bf16, compiled, full checkpointing": {"remat.mode": "full", **COMPILED},
    "bf16, eager, full checkpointing": {"remat.mode": "full"},
    "bf16, eager, selective checkpointing": {"remat.mode": "selective"},
    "bf16, eager, every second block": {"remat.mode": "every"},
    "fp8 delayed, compiled": {"precision.fp8.recipe": "delayed", **COMPILED},
    "fp8 tensorwise, eager": FP8,
}


def main() -> int:
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA card here; --device cpu --model tiny tries the script itself")
        return 2
    deadline = time.monotonic() + args.budget_s
    result: dict[str, Any] = {"machine": machine(args.device), "settings": vars(args)}
    result["variants"] = {}
    print(
        f"{len(VARIANTS)} variants of {args.model} on {result['machine']['device']}, each "
        f"{3 + args.steps} steps of {args.rows} x {args.seq_len} tokens and one under the "
        f"profiler; about {args.budget_s:g} s in all, then the rest is left out",
        flush=True,
    )
    for name, overrides in VARIANTS.items():
        if args.only and args.only not in name:
            continue
        print(f"{name} ...", flush=True)
        row = one_variant(args, overrides, deadline)
        result["variants"][name] = row
        print(described(row), flush=True)
    slug = result["machine"]["device"].lower().replace(" ", "-")
    path = args.out or RESULTS / f"{datetime.date.today()}-{slug}-gpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(f"written to {path}")
    return 0


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, help="of a micro-batch, one a step (8; 2 on a CPU)")
    parser.add_argument("--seq-len", type=int, help="(2048; 128 on a CPU)")
    parser.add_argument("--steps", type=int, help="timed, after 3 others (10; 2 on a CPU)")
    parser.add_argument("--budget-s", type=float, help="(450; 60 on a CPU)")
    parser.add_argument("--only", default="", help="variants with this in their name")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def one_variant(args: argparse.Namespace, overrides: dict[str, Any], deadline: float) -> dict:
    # On a card the first compiled step alone takes most of a minute.
    reserve = 40 if args.device == "cuda" else 10
    if time.monotonic() > deadline - reserve:
        return {"skipped": f"less than {reserve} of {args.budget_s:g} s are left"}
    try:
        return measured(args, overrides, deadline)
    except Exception as error:  # noqa: BLE001 - it becomes part of the result, the others go on
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def measured(args: argparse.Namespace, overrides: dict[str, Any], deadline: float) -> dict:
    values = {
        "data.seq_len": args.seq_len,
        "train.micro_batch_rows": args.rows,
        "train.global_batch_rows": args.rows,
        "guard.spike_factor": 1e6,
        **overrides,
    }
    run = Run.parse({"model": MODELS[args.model].model_dump(exclude_none=True)}, values)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    engine, loss = Engine(run), cross_entropy(run.loss)
    batch = random_batch(args.rows, args.seq_len, run.model.vocab_size)
    seconds: list[float] = []
    stats = None
    for step in range(3 + args.steps):
        began = time.perf_counter()
        stats = engine.forward_backward(batch, loss)
        engine.optim_step()
        synchronize(args.device)
        if step >= 3:
            seconds.append(time.perf_counter() - began)
        if time.monotonic() > deadline and seconds:
            break
    assert stats is not None
    return report(args, run, engine, batch, loss, seconds, stats)


def report(
    args: argparse.Namespace,
    run: Run,
    engine: Engine,
    batch: Batch,
    loss: Any,
    seconds: list[float],
    stats: Stats,
) -> dict[str, Any]:
    """The median step, and a waterfall of one further step under the profiler."""
    step_s = statistics.median(seconds)
    peak, source = hardware.peak_flops_per_s(hardware.detect(), run.precision.compute)
    flops = step_flops(run, batch)
    peak_bytes = (
        torch.cuda.max_memory_allocated() if args.device == "cuda" else hardware.peak_rss_bytes()
    )
    activities = [ProfilerActivity.CPU]
    if args.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        engine.forward_backward(batch, loss)
        engine.optim_step()
        synchronize(args.device)
        profiled_s = time.perf_counter() - began
    kernels = profiled_kernels(profiler, args.device)
    recomputed = recomputed_flops(run, batch, stats)
    # The profiler slows the host, not the kernels: a step as fast as the median, if they fit in it.
    busy = sum(kernel.end_s - kernel.start_s for kernel in kernels)
    fall = waterfall(kernels, max(step_s, min(busy, profiled_s)), flops, recomputed, peak)
    return {
        "tokens_per_s": batch.tokens_BT.numel() / step_s,
        "step_s": {"median": step_s, "min": min(seconds), "max": max(seconds)},
        "num_steps": len(seconds),
        "mfu": flops / step_s / peak,
        "hfu": (flops + recomputed) / step_s / peak,
        "peak_flops_per_s": peak,
        "peak_source": source,
        "peak_memory_bytes": peak_bytes,
        "loss": stats.loss,
        "num_parameters": count_parameters(run.model).total,
        "waterfall": dataclasses.asdict(fall),
        "waterfall_lines": fall.lines(),
        "largest_kernels": largest(kernels),
    }


def recomputed_flops(run: Run, batch: Batch, stats: Stats) -> float:
    """The head's logits that were computed twice, and the blocks that checkpointing repeats."""
    per_token = flops_per_token(run.model, batch.tokens_BT.shape[1])
    blocks = {"full": 1.0, "every": 1 / run.remat.every}.get(run.remat.mode, 0.0)
    body = blocks * batch.tokens_BT.numel() * (per_token.blocks + per_token.attention)
    return body + stats.num_twice_tokens * per_token.head


def largest(kernels: list[Any], count: int = 12) -> dict[str, float]:
    """Seconds by kernel name."""
    sums: dict[str, float] = {}
    for kernel in kernels:
        sums[kernel.name] = sums.get(kernel.name, 0.0) + kernel.end_s - kernel.start_s
    return dict(sorted(sums.items(), key=lambda item: -item[1])[:count])


def described(row: dict[str, Any]) -> str:
    if "tokens_per_s" not in row:
        return "  " + " ".join(f"{key}: {value}" for key, value in row.items())
    head = (
        f"  {row['tokens_per_s']:,.0f} tokens/s, MFU {100 * row['mfu']:.1f} %, "
        f"HFU {100 * row['hfu']:.1f} %, peak {row['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
    return "\n".join([head, *(f"    {line}" for line in row["waterfall_lines"])])


def random_batch(num_rows: int, length: int, vocab_size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    window = torch.randint(0, vocab_size, (num_rows, length + 1), generator=generator)
    return dataclasses.replace(
        padding(num_rows, length),
        tokens_BT=window[:, :-1],
        targets_BT=window[:, 1:],
        weights_BT=torch.ones(num_rows, length),
        positions_BT=torch.arange(length).expand(num_rows, -1),
        docs_BT=torch.zeros(num_rows, length, dtype=torch.int32),
        sample_ids=tuple(range(num_rows)),
    )


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else hardware.cpu_name()
    return {
        "date": str(datetime.date.today()),
        "device": name,
        "driver_cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "stepwell": __version__,
    }


if __name__ == "__main__":
    sys.exit(main())
