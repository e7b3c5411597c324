"""A layout as a run of ours: what the engine's rules are asked about, and what is written as a
recipe. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from stepwell.config import Run
from stepwell.plan.job import Arrangement
from stepwell.schema import dotted_keys
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

NOT_DIVIDED = "not divided"


def run_of(config: ModelConfig, layout: Arrangement, name: str = "planned") -> Run:
    """The run whose `job_of` has this layout. A context longer than the model's is taken to be
    wanted: max_seq_len grows with it. Raises ConfigError for what no run can be."""
    return Run.parse(values_of(config, layout, name), where=f"the layout {short(layout)}")


def values_of(config: ModelConfig, layout: Arrangement, name: str) -> dict[str, Any]:
    """The run's tables, with only what differs from their defaults."""
    if layout.ep > 1 or layout.program != "stepwell":
        raise ConfigError(f"the engine has no expert parallelism (ep={layout.ep})")
    model = config.model_dump(exclude_none=True, exclude_defaults=True)
    if config.rope_scaling is not None:  # a table without values would not say what it stretches
        model["rope_scaling"] = config.rope_scaling.model_dump()
    model["max_seq_len"] = max(config.max_seq_len, layout.seq_len)
    values: dict[str, Any] = {
        "name": name,
        "dir": f"runs/{name}",
        "model": model,
        "layout": _layout(layout),
        "data": {"seq_len": layout.seq_len},
        "train": {
            "global_batch_rows": layout.global_batch_rows,
            "micro_batch_rows": layout.micro_batch_rows,
        },
        "precision": {"compute": "bf16" if layout.precision == "fp8" else layout.precision},
    }
    if layout.precision == "fp8":
        values["precision"]["fp8"] = {"recipe": recipe_of(layout)}
    if layout.recompute != "none":
        every = {"every": layout.recompute_every} if layout.recompute == "every" else {}
        values["remat"] = {"mode": layout.recompute, **every}
    if not layout.stages_checkpoint:
        values["checkpoint"] = {"asynchronous": False}
    offload = {
        "optimizer": layout.offload_optimizer,
        "parameters": layout.offload_parameters,
        "activations": layout.offload_activations,
    }
    if any(offload.values()):
        values["offload"] = {key: on for key, on in offload.items() if on}
    return values


def recipe_of(layout: Arrangement) -> str:
    return layout.recipe if layout.recipe != "none" else "tensorwise"


def _layout(layout: Arrangement) -> dict[str, Any]:
    found: dict[str, Any] = {
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard,
        "cp": layout.cp,
        "tp": layout.tp,
        "pp": layout.pp,
        "zero": layout.zero,
        "compile": layout.compiled,
    }
    if layout.pp > 1:
        found["pp_schedule"] = layout.schedule
        found["pp_stages_per_rank"] = layout.stages_per_rank
    if layout.zero == 3:
        found["reshard_after_forward"] = layout.reshard
    reduces = layout.zero >= 2 and layout.pp == 1
    if layout.zero == 3 and layout.reduce_every_micro_batch != reduces:
        found["reduce_gradients"] = "micro_batch" if layout.reduce_every_micro_batch else "step"
    return found


def short(layout: Arrangement) -> str:
    """The layout in a line: `TP 8 x PP 16 (interleaved-1f1b, 4 stages a rank) x DP 8, ...`."""
    parts = [f"TP {layout.tp}"] if layout.tp > 1 else []
    parts += [f"CP {layout.cp}"] if layout.cp > 1 else []
    if layout.pp > 1:
        virtual = f" x {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
        parts.append(f"PP {layout.pp} ({layout.schedule}{virtual})")
    parts += [f"EP {layout.ep}"] if layout.ep > 1 else []
    parts.append(data_text(layout))
    state = state_text(layout)
    rest = [state] if state != NOT_DIVIDED else []
    rest += [f"micro-batch {layout.micro_batch_rows}", recompute_text(layout)]
    if layout.precision != "bf16":
        rest.append(layout.precision)
    rest += [f"offload {what}" for what in offloaded(layout)]
    return " x ".join(parts) + ", " + ", ".join(rest)


def recompute_text(layout: Arrangement) -> str:
    if layout.recompute == "every":
        return f"recompute one block in {layout.recompute_every}"
    return f"recompute {layout.recompute}"


def data_text(layout: Arrangement) -> str:
    if layout.dp_replicate > 1 and layout.dp_shard * layout.cp > 1:
        return f"DP {layout.dp_replicate} x {layout.dp_shard}"
    return f"DP {layout.data_ranks}"


def state_text(layout: Arrangement) -> str:
    """How data ranks divide the model's state: `ZeRO-3 keeping weights`. Replicas of a single shard
    divide nothing, whatever the stage is called."""
    if layout.data_ranks * layout.cp == 1:
        fetches = layout.zero == 3 and layout.offload_parameters and layout.pp == 1
        return "ZeRO-3 of one rank" if fetches else NOT_DIVIDED
    if layout.dp_shard * layout.cp == 1:
        return "ZeRO-0"
    text = f"ZeRO-{layout.zero}"
    if layout.zero != 3 or layout.pp > 1:
        return text
    kept = {"always": "", "never": " keeping weights", "node": " resharding in the node"}
    once = "" if layout.reduce_every_micro_batch else " reducing once"
    return text + kept[layout.reshard] + once


def offloaded(layout: Arrangement) -> list[str]:
    kinds: Mapping[str, bool] = {
        "optimizer": layout.offload_optimizer,
        "parameters": layout.offload_parameters,
        "activations": layout.offload_activations,
    }
    return [kind for kind, on in kinds.items() if on]


def settings_of(layout: Arrangement) -> dict[str, Any]:
    """Dotted keys of a run that has this layout, but for the model's."""
    values = values_of(ModelConfig(), layout, "planned")
    for key in ("name", "dir", "model"):
        values.pop(key)
    return dict(_flat(values, ""))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def settings_between(before: Arrangement, after: Arrangement) -> dict[str, Any]:
    """What has to be set to come from one layout to the other, by dotted key: where the other
    leaves a key as usual, to what is usual."""
    old, new, usual = settings_of(before), settings_of(after), _usual()
    both = {key: (old.get(key, usual[key]), new.get(key, usual[key])) for key in {**old, **new}}
    return {key: now for key, (was, now) in both.items() if was != now}


@cache
def _usual() -> dict[str, Any]:
    return {key: field.default for key, field in dotted_keys(Run)}


def settings_text(before: Arrangement, after: Arrangement) -> str:
    """`settings_between`, as on the command line."""
    if after.ep > 1 or before.ep > 1:
        return f"EP {after.ep}"
    changed = settings_between(before, after).items()
    return " ".join(f"--{key} {str(x).lower() if isinstance(x, bool) else x}" for key, x in changed)
