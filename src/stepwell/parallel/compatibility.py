"""The table of what works together, made from the rules that the code enforces. No torch.

`python -m stepwell.parallel.compatibility` prints it as Markdown; docs/layouts.md holds it.
"""

from __future__ import annotations

import sys
from typing import Any

from stepwell.config import Run
from stepwell.parallel.rules import RULES, Rule, axis_sizes, check_run
from stepwell.types import ConfigError

# A run that every feature alone fits.
BASE = {
    "model.num_layers": 8,
    "model.num_heads": 8,
    "model.num_kv_heads": 4,
    "model.d_ff": 704,
    "data.seq_len": 512,
    "train.global_batch_rows": 64,
    "train.micro_batch_rows": 4,
}
FEATURES: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"layout.zero": 0},
    "ZeRO 1": {"layout.zero": 1},
    "ZeRO 2": {"layout.zero": 2},
    "ZeRO 3": {"layout.zero": 3, "layout.reshard_after_forward": "always"},
    "ZeRO 3, no reshard": {"layout.zero": 3, "layout.reshard_after_forward": "never"},
    "HSDP": {"layout.dp_replicate": 2},
    "tensor": {"layout.tp": 2},
    "context, ring": {"layout.cp": 2, "layout.cp_method": "ring"},
    "context, ulysses": {"layout.cp": 2, "layout.cp_method": "ulysses"},
    "gpipe": {"layout.pp": 2, "layout.pp_schedule": "gpipe"},
    "1f1b": {"layout.pp": 2, "layout.pp_schedule": "1f1b"},
    "interleaved-1f1b": {
        "layout.pp": 2,
        "layout.pp_schedule": "interleaved-1f1b",
        "layout.pp_stages_per_rank": 2,
    },
    "zbv": {"layout.pp": 2, "layout.pp_schedule": "zbv", "layout.pp_stages_per_rank": 2},
    "dualpipev": {
        "layout.pp": 2,
        "layout.pp_schedule": "dualpipev",
        "layout.pp_stages_per_rank": 2,
    },
    "compile": {"layout.compile": True},
    "remat full": {"remat.mode": "full"},
    "remat sqrt": {"remat.mode": "sqrt"},
    "remat selective": {"remat.mode": "selective"},
    "offload optimizer": {"offload.optimizer": True},
    "offload parameters": {"offload.parameters": True},
    "offload activations": {"offload.activations": True},
    "fp16": {"precision.compute": "fp16"},
    "fp8": {"precision.fp8.recipe": "tensorwise"},
    "LoRA": {"lora.rank": 16},
    "QLoRA": {"lora.rank": 16, "lora.quantize": "nf4"},
    "muon": {"optim.kind": "muon"},
    "adamw8bit": {"optim.kind": "adamw8bit"},
    "release gradients": {
        "optim.release_gradients": True,
        "optim.clip_norm": 0.0,
        "guard.action": "none",
        "train.global_batch_rows": 8,
    },
}


# What a feature needs as well, unless the other one of a pair says otherwise.
NEEDED: dict[str, dict[str, Any]] = {
    "zbv": {"layout.reshard_after_forward": "never"},
    "dualpipev": {"layout.reshard_after_forward": "never"},
}


def combined(first: str, second: str) -> dict[str, Any] | None:
    """The settings of both features; None if they contradict each other."""
    a, b = FEATURES[first], FEATURES[second]
    if any(a[key] != b[key] for key in a.keys() & b.keys()):
        return None
    return NEEDED.get(first, {}) | NEEDED.get(second, {}) | a | b


def num_ranks(settings: dict[str, Any]) -> int:
    """Two data parallel ranks beside the axes that the settings name."""
    size = 2
    for axis in ("pp", "dp_replicate", "cp", "tp"):
        size *= settings.get(f"layout.{axis}", 1)
    return size


def refusal(settings: dict[str, Any]) -> str | None:
    """Why a run with these settings is refused, or None."""
    try:
        check_run(_run(settings), num_ranks(settings))
    except ConfigError as error:
        return str(error)
    return None


def broken_rules(settings: dict[str, Any]) -> list[Rule]:
    run = _run(settings)
    sizes = axis_sizes(run.layout, num_ranks(settings))
    return [rule for rule in RULES if rule.broken(run, sizes)]


def table() -> str:
    """Markdown: a row and a column for each feature, and the reasons below."""
    letters: dict[str, str] = {}
    names = list(FEATURES)
    lines = [
        "| | " + " | ".join(str(i) for i in range(1, len(names) + 1)) + " |",
        "|-" * (len(names) + 1) + "|",
    ]
    for i, first in enumerate(names, 1):
        cells = [_cell(first, second, letters) for second in names[:i]]
        cells += [""] * (len(names) - i)
        lines.append(f"| {i} {first} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "`+` works together, `.` exclude each other by definition, a letter is refused:",
        "",
    ]
    why = {rule.name: rule.why for rule in RULES}
    lines += [f"- {letter}: {name}. {why[name]}" for name, letter in letters.items()]
    return "\n".join(lines)


def _run(settings: dict[str, Any]) -> Run:
    return Run.parse({}, {**BASE, **settings})


def _cell(first: str, second: str, letters: dict[str, str]) -> str:
    settings = combined(first, second)
    if settings is None:
        return "."
    broken = broken_rules(settings)
    for rule in broken:
        letters.setdefault(rule.name, chr(ord("a") + len(letters)))
    return " ".join(letters[rule.name] for rule in broken) or "+"


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
