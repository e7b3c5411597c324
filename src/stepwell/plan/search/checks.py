"""What no layout can mend: sizes, and values held fixed that contradict each other. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from stepwell.parallel.schedules import ZERO_BUBBLE
from stepwell.plan.cluster import Cluster
from stepwell.plan.job import Arrangement, Dims
from stepwell.plan.search.space import (
    REASONS,
    VIRTUAL_STAGES,
    Pins,
    Task,
    context_problem,
    divisors,
    precisions,
    tensor_problem,
)
from stepwell.types import ConfigError

STAGES_OF = {"gpipe": (1,), "1f1b": (1,), "interleaved-1f1b": VIRTUAL_STAGES}
STAGES_OF |= dict.fromkeys(ZERO_BUBBLE, (2,))


def check_task(task: Task) -> None:
    """Raises ConfigError for what no layout can mend, with the nearest legal value."""
    if task.num_gpus < 1:
        raise ConfigError(f"--gpus {task.num_gpus} must be at least 1, the nearest legal value")
    for check in (_axes, _tensor, _context, _pipeline, _experts, _batch, _data):
        check(task)
    check_headroom(task.pins, task.cluster)
    device = task.cluster.accelerator
    for precision in precisions(task):
        device.peak_flops_per_s(precision)


def option(pin: str) -> str:
    """As it is written on the command line."""
    return "--" + pin.replace("micro_batch_rows", "micro_batch").replace("_", "-")


def pins_text(pins: Pins) -> str:
    """`--tp 8 --zero 3`: what is held fixed."""
    given = {key: value for key, value in pins.given().items() if key != "compiled"}
    if "headroom_bytes" in given:
        given["headroom"] = f"{given.pop('headroom_bytes') / 2**30:g}"
    if given.get("offload", "any") != "any":
        given["offload"] = ",".join(given["offload"]) or "none"
    return " ".join(f"{option(key)} {value}" for key, value in given.items())


def _nearest(legal: Sequence[int], value: int) -> int:
    return min(legal, key=lambda n: abs(n - value))


def _axes(task: Task) -> None:
    """Each divides the accelerators, and all together do."""
    pins, gpus = task.pins, task.num_gpus
    sizes = {axis: getattr(pins, axis) for axis in ("tp", "cp", "pp", "dp_replicate", "dp_shard")}
    sizes = {axis: size for axis, size in sizes.items() if size is not None}
    for axis, size in sizes.items():
        if gpus % size:
            legal = [d for d in divisors(gpus) if axis != "tp" or not tensor_problem(task, d)]
            raise ConfigError(
                f"{option(axis)} {size} must divide --gpus {gpus}; the nearest legal value is "
                f"{_nearest(legal, size)}"
            )
    together = prod(sizes.values())
    if gpus % together:
        said = " x ".join(f"{option(axis)} {size}" for axis, size in sizes.items())
        axis, size = next(reversed(sizes.items()))
        near = _nearest(divisors(gpus // _largest_divisor(gpus, together // size)), size)
        raise ConfigError(
            f"{said} = {together} must divide --gpus {gpus}; the nearest is {option(axis)} {near}"
        )
    for axis in ("tp", "cp", "pp"):
        size, most = sizes.get(axis), getattr(pins, f"max_{axis}")
        if size is not None and most is not None and size > most:
            raise ConfigError(
                f"{option(axis)} {size} is more than --max-{axis} {most}; leave one of them out"
            )


def _largest_divisor(gpus: int, of: int) -> int:
    """The largest size that divides both."""
    return max(d for d in divisors(gpus) if of % d == 0)


def _tensor(task: Task) -> None:
    asked, dims = task.pins.tp or 1, task.dims
    if broken := tensor_problem(task, asked):
        legal = [tp for tp in divisors(task.num_gpus) if not tensor_problem(task, tp)]
        raise ConfigError(
            f"--tp {task.pins.tp}: {REASONS[broken]} (heads {dims.num_heads}, key/value heads "
            f"{dims.num_kv_heads}, MLP {dims.d_ff}, vocabulary {dims.vocab_size}); the nearest "
            f"legal value is {_nearest(legal, asked)}"
        )


def _context(task: Task) -> None:
    cp, tp = task.pins.cp, task.pins.tp or 1
    if cp is None or not context_problem(task, tp, cp):
        return
    legal = [d for d in divisors(task.num_gpus) if not context_problem(task, tp, d)]
    near = f"; the nearest legal value is {_nearest(legal, cp)}" if legal else ""
    parts = f"2 x {cp} parts" + (f" for each of {tp} tensor ranks" if tp > 1 else "")
    raise ConfigError(
        f"--cp {cp}: rows of {task.seq_len:,} tokens do not divide into {parts}{near}"
    )


def _pipeline(task: Task) -> None:
    pins, parts = task.pins, task.dims.num_layers + 2
    stages, schedule = pins.stages_per_rank, pins.schedule
    if pins.pp is not None and pins.pp > parts:
        legal = [d for d in divisors(task.num_gpus) if d <= parts]
        raise ConfigError(
            f"--pp {pins.pp}: {task.dims.name} has {task.dims.num_layers} blocks, an embedding and "
            f"a head, at most {parts} stages; the nearest legal value is {_nearest(legal, pins.pp)}"
        )
    asked = f"--schedule {schedule}" if schedule else f"--stages-per-rank {stages}"
    if pins.pp == 1 and (schedule, stages) != (None, None):
        raise ConfigError(f"{asked} is of a pipeline, and --pp 1 has none; leave one of them out")
    if schedule in STAGES_OF and stages not in (None, *STAGES_OF[schedule]):
        legal = STAGES_OF[schedule]
        raise ConfigError(
            f"--stages-per-rank {stages}: {schedule} has {', '.join(map(str, legal))}; the nearest "
            f"legal value is {_nearest(legal, stages)}"
        )
    every = sorted({n for legal in STAGES_OF.values() for n in legal})
    if stages not in (None, *every):
        raise ConfigError(
            f"--stages-per-rank {stages} is none of {', '.join(map(str, every))}; the nearest "
            f"legal value is {_nearest(every, stages)}"
        )
    if schedule in ZERO_BUBBLE and pins.recompute not in (None, "none"):
        raise ConfigError(
            f"--recompute {pins.recompute}: {schedule} keeps all activations until its delayed "
            "weight gradients are computed; only none is possible, or another --schedule"
        )


def _experts(task: Task) -> None:
    ep, experts = task.pins.ep, task.dims.experts
    if ep is None or ep == 1:
        return
    if experts is None:
        raise ConfigError(
            f"--ep {ep}: {task.dims.name} is a dense model and has no experts; the only legal "
            "value is 1"
        )
    ranks = task.num_gpus // (task.pins.pp or 1)
    legal = [d for d in divisors(experts.num_experts) if ranks % d == 0]
    if ep in legal:
        return
    why = f"{experts.num_experts} experts are not divisible by {ep}"
    if experts.num_experts % ep == 0:
        why = f"the {ranks} ranks of a stage are not divisible by {ep}"
    raise ConfigError(f"--ep {ep}: {why}; the nearest legal value is {_nearest(legal, ep)}")


def _batch(task: Task) -> None:
    pins, rows = task.pins, task.rows
    if pins.micro_batch_rows is not None and pins.micro_batch_rows > rows:
        raise ConfigError(
            f"--micro-batch {pins.micro_batch_rows} is more than the {rows} rows of a step; the "
            f"nearest legal value is {rows}"
        )
    if pins.dp_replicate is not None and rows % pins.dp_replicate:
        legal = [d for d in divisors(task.num_gpus) if rows % d == 0]
        raise ConfigError(
            f"--dp-replicate {pins.dp_replicate} must divide the {rows} rows of a step; the "
            f"nearest legal value is {_nearest(legal, pins.dp_replicate)}"
        )


def _data(task: Task) -> None:
    pins = task.pins
    if pins.reshard is not None and pins.zero not in (None, 3):
        raise ConfigError(
            f"--reshard {pins.reshard} is of ZeRO stage 3, and --zero {pins.zero} is held fixed; "
            "leave --reshard out"
        )
    if instead := _reduced_otherwise(pins):
        raise ConfigError(
            f"--reduce-gradients {pins.reduce_gradients}: {instead}; leave --reduce-gradients out"
        )
    if {"optimizer", "parameters"} <= {*pins.kinds}:
        legal = ",".join(kind for kind in pins.kinds if kind != "optimizer")
        raise ConfigError(
            f"--offload {','.join(pins.kinds)}: parameters take the optimiser with them; "
            f"the nearest legal value is --offload {legal}"
        )


def _reduced_otherwise(pins: Pins) -> str:
    """What else is held fixed, and contradicts --reduce-gradients."""
    if pins.reduce_gradients is None:
        return ""
    if pins.reduce_gradients == "step":
        return "--zero 2 is what reduces after every micro-batch" if pins.zero == 2 else ""
    if pins.pp is not None and pins.pp > 1:
        return "a pipeline reduces once a step"
    return f"--zero {pins.zero} reduces once a step" if pins.zero in (0, 1) else ""


def left_open(pins: Pins, layout: Arrangement, dims: Dims) -> list[str]:
    """Options that are not held fixed, though the layout could be another in them."""
    several = layout.pp == 1 and layout.zero == 3 and layout.num_micro_batches > 1
    sharded = layout.data_ranks * layout.cp > 1
    matters = {
        "tp": layout.num_gpus > 1, "cp": layout.num_gpus > 1, "pp": layout.num_gpus > 1,
        "ep": dims.experts is not None and layout.num_gpus > 1,
        "dp_replicate": layout.data_ranks > 1 and pins.dp_shard is None, "zero": sharded,
        "reshard": sharded and layout.zero == 3 and layout.pp == 1,
        "reduce_gradients": sharded and several, "micro_batch_rows": True, "recompute": True,
        "schedule": layout.pp > 1, "stages_per_rank": layout.pp > 1 and layout.stages_per_rank > 1,
    }  # fmt: skip
    return [option(pin) for pin, can in matters.items() if can and getattr(pins, pin) is None]


def check_headroom(pins: Pins, cluster: Cluster) -> None:
    has, spare = cluster.accelerator.memory_bytes, pins.headroom_bytes
    if spare >= has:
        raise ConfigError(
            f"--headroom {spare / 2**30:g}: a {cluster.name} has {has / 2**30:.1f} GiB, so "
            "nothing would be left to use; give less than that"
        )
