"""`python -m benchmarks`: Stepwell beside other libraries, as ratios within one run."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.drive import OURS, Spec, measure
from benchmarks.prepare import prepare
from benchmarks.table import ratios, show
from benchmarks.workload import CACHE, ROOT, SCRATCH
from stepwell import __version__

ENVS = CACHE / "envs"


def variants(library: str, env: str, module: str, names: dict[str, tuple[str, ...]]) -> list[Spec]:
    return [Spec(library, name, env, f"benchmarks.{module}", a) for name, a in names.items()]


COMPILED = ("--compile", "1")
PACKED = ("--packing", "1")
BOTH = {"eager": (), "compiled": COMPILED}


def generation(temperature: str) -> list[Spec]:
    heat = ("--temperature", temperature)
    return [
        *variants(OURS, "", "ours.generate", {"bf16": heat}),
        *variants(
            "Transformers",
            "trl",
            "peers.transformers_generate",
            {
                "bf16": heat,
                "fp32": (*heat, "--dtype", "fp32"),
                "bf16 compiled": (*heat, *COMPILED),
            },
        ),
    ]


# What is counted by the second; tokens, if nothing else is said.
UNITS = {"reward": "pairs", "dpo": "pairs", "dpo-precomputed": "pairs", "kto": "rows"}
# job -> (target ratio, its workers)
JOBS = {
    "pretrain": (
        1.3,
        [
            *variants(OURS, "", "ours.pretrain", BOTH),
            *variants("Transformers", "trl", "peers.transformers_pretrain", BOTH),
            *variants("litgpt", "litgpt", "peers.litgpt_pretrain", BOTH),
            *variants("torchtitan", "torchtitan", "peers.torchtitan_pretrain", BOTH),
        ],
    ),
    "sft": (
        2.5,
        [
            *variants(OURS, "", "ours.sft", BOTH),
            *variants(
                "TRL",
                "trl",
                "peers.trl_sft",
                {
                    **BOTH,
                    "packed": PACKED,
                    "packed compiled": (*PACKED, *COMPILED),
                },
            ),
        ],
    ),
    "grpo": (
        3.0,
        [
            *variants(OURS, "", "ours.grpo", BOTH),
            *variants(
                "TRL",
                "trl",
                "peers.trl_grpo",
                {**BOTH, "continuous batching": ("--batching", "1")},
            ),
        ],
    ),
    "ppo": (
        3.0,
        [
            *variants(OURS, "", "ours.ppo", BOTH),
            *variants("TRL 1.12", "trl", "peers.trl_ppo", {"eager": ()}),
        ],
    ),
    "dpo": (
        3.0,
        [
            *variants(OURS, "", "ours.dpo", BOTH),
            *variants("TRL", "trl", "peers.trl_dpo", BOTH),
        ],
    ),
    "dpo-precomputed": (
        2.0,
        [
            *variants(OURS, "", "ours.dpo", BOTH),
            *variants(
                "TRL",
                "trl",
                "peers.trl_dpo",
                {"eager": ("--precomputed", "1"), "compiled": ("--precomputed", "1", *COMPILED)},
            ),
        ],
    ),
    "kto": (
        3.0,
        [
            *variants(OURS, "", "ours.kto", BOTH),
            *variants("TRL", "trl", "peers.trl_kto", BOTH),
        ],
    ),
    "reward": (
        2.0,
        [
            *variants(OURS, "", "ours.reward", BOTH),
            *variants("TRL", "trl", "peers.trl_reward", BOTH),
        ],
    ),
    "generate-greedy": (2.0, generation("0")),
    "generate-sample": (2.0, generation("1")),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--jobs", default=",".join(JOBS), help="some of " + ", ".join(JOBS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps in a timed chunk")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first chunk")
    parser.add_argument("--only", default="", help="libraries to compare with (default: all)")
    parser.add_argument("--variants", default="", help="ways to run to try (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="no compiled variants, one round: does it work?"
    )
    parser.add_argument("--threads", type=int, help="of each worker (default: all cores)")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="tokens per second of CPU time: for a machine that others use, with --threads 1",
    )
    parser.add_argument("--no-setup", action="store_true", help="don't install missing peers")
    args = parser.parse_args()
    if not (args.quick or args.no_setup):
        subprocess.run([ROOT / "benchmarks" / "setup_peers.sh", ENVS], check=True)
    prepare()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    rounds, steps, quiet_s = (1, 1, 0) if args.quick else (args.rounds, args.steps, 20)
    result = {
        "machine": machine(),
        "threads": args.threads or torch.get_num_threads(),
        "variants": args.variants or "all",
        "clock": "cpu" if args.cpu_time else "wall",
        "rounds": rounds,
        "warmup_steps": 1 if args.quick else args.warmup,
        "steps_per_chunk": steps,
        "jobs": {},
    }
    for job in args.jobs.split(","):
        target, specs = JOBS[job]
        wanted = {OURS, *args.only.split(",")} if args.only else {s.library for s in specs}
        specs = [
            s
            for s in specs
            if s.library in wanted
            and not (args.quick and "compiled" in s.variant)
            and (not args.variants or s.variant in args.variants.split(","))
        ]
        print(f"{job}:")
        # Generation steps are 128 tokens for each of 16 rows: few of them say enough.
        chunk = max(1, steps // 2) if job.startswith("generate") else steps
        settings = {
            "BENCH_STEPS": str(chunk),
            "BENCH_WARMUP": "1" if args.quick else str(args.warmup),
            "BENCH_QUIET_S": "0" if args.cpu_time else str(quiet_s),
            **({"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}),
        }
        unit = UNITS.get(job, "tokens")
        speed = f"{unit}_per_cpu_s" if args.cpu_time else f"{unit}_per_s"
        records = measure(specs, ENVS, rounds, settings, speed)
        rows = ratios(records, speed)
        result["jobs"][job] = {"target": target, "ratios": rows, "workers": records, "unit": unit}
        print(show(job, target, rows, unit), flush=True)
    name = "-".join(
        [
            str(datetime.date.today()),
            result["machine"]["slug"],
            f"{result['threads']}-threads",
            result["clock"],
            args.jobs.replace(",", "+") if args.jobs != ",".join(JOBS) else "all",
        ]
    )
    path = (
        (CACHE / "quick.json") if args.quick else (ROOT / "benchmarks" / "results" / f"{name}.json")
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")


def machine() -> dict:
    """What ratios depend on."""
    cpu, flags = platform.processor() or platform.machine(), ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(
            line.split(":", 1)
            for line in info.read_text().split("\n\n")[0].split("\n")
            if ":" in line
        )
        fields = {k.strip(): v.strip() for k, v in fields.items()}
        cpu, flags = fields.get("model name", cpu), fields.get("flags", "")
    kinds = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags.split()]
    return {
        "date": str(datetime.date.today()),
        "cpu": cpu,
        "cpu_flags": kinds,
        "cores": os.cpu_count(),
        "slug": (cpu + "-" + (kinds[-1] if kinds else "")).lower().replace(" ", "-"),
        "python": sys.version.split()[0],
        "stepwell": __version__,
        "stepwell_torch": torch.__version__,
        "peers": {
            env: versions(ENVS / env / "bin" / "python") for env in ("trl", "litgpt", "torchtitan")
        },
    }


def versions(python: Path) -> dict[str, str]:
    if not python.exists():
        return {}
    code = (
        "import json, importlib.metadata as m\n"
        "have = {d.name.lower(): d.version for d in m.distributions()}\n"
        "names = ['torch', 'transformers', 'trl', 'litgpt', 'torchtitan']\n"
        "print(json.dumps({n: have[n] for n in names if n in have}))"
    )
    return json.loads(subprocess.check_output([python, "-c", code], text=True))


if __name__ == "__main__":
    main()
