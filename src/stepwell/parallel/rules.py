"""Which layouts there are, and which combinations work: every rule once, checked before anything is
built. No torch.

`axis_sizes` fills the world; `RULES` refuse what cannot work with the values, the rule and the
nearest legal value. The table in docs/layouts.md is made from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stepwell.config import LayoutConfig, Run
from stepwell.parallel import fp8_layers, lever_rules, remat
from stepwell.parallel.schedules import (
    ZERO_BUBBLE,
    fewest_micro_batches,
    num_stages,
    split_blocks,
)
from stepwell.types import ConfigError


class AxisSizes(NamedTuple):
    """The dense view of the ranks; the last axis varies fastest."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1


def axis_sizes(layout: LayoutConfig, world: int) -> AxisSizes:
    """The axes for `world` ranks; raises ConfigError if they do not fill it."""
    rest = world
    for axis in ("pp", "tp", "cp", "dp_replicate"):
        size = getattr(layout, axis)
        if rest % size:
            best = nearest_divisor(rest, size)
            left = "" if rest == world else f" of the {world} that the axes before it leave"
            raise ConfigError(
                f"layout.{axis}={size} must divide the number of ranks, {rest}{left}; "
                f"the nearest that does is {best}"
            )
        rest //= size
    if layout.dp_shard not in (-1, rest):
        fixed = world // rest
        raise ConfigError(
            f"layout.dp_shard={layout.dp_shard} x the other axes' {fixed} = "
            f"{layout.dp_shard * fixed} must equal the number of ranks, {world}; with these axes "
            f"the only legal dp_shard is {rest} (or -1), or start {layout.dp_shard * fixed} ranks"
        )
    return AxisSizes(layout.pp, layout.dp_replicate, rest, layout.cp, layout.tp)


@dataclass(frozen=True)
class Rule:
    """why: the reason in general. broken(run, sizes): what is wrong with this run, with its values
    and the nearest legal one; None if nothing is."""

    name: str
    why: str
    broken: Callable[[Run, AxisSizes], str | None]


def check_run(run: Run, world: int, rules: Iterable[Rule] | None = None) -> AxisSizes:
    """The axes of the run on `world` ranks. Raises ConfigError with every rule that it breaks."""
    sizes = axis_sizes(run.layout, world)
    found = [rule.broken(run, sizes) for rule in (RULES if rules is None else rules)]
    problems = [problem for problem in found if problem]
    if problems:
        raise ConfigError("\n".join(problems))
    return sizes


def nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def nearest_multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of


# --- the rules -------------------------------------------------------------------------------


def _heads(run: Run, sizes: AxisSizes) -> str | None:
    heads = run.model.num_heads
    if heads % sizes.tp == 0:
        return None
    return (
        f"layout.tp={sizes.tp} must divide model.num_heads={heads}; the nearest that does is "
        f"{nearest_divisor(heads, sizes.tp)}"
    )


def _kv_heads(run: Run, sizes: AxisSizes) -> str | None:
    heads, tp = run.model.num_kv_heads, sizes.tp
    if heads % tp == 0 or tp % heads == 0:
        return None
    legal = [t for t in range(1, run.model.num_heads + 1) if heads % t == 0 or t % heads == 0]
    legal = [t for t in legal if run.model.num_heads % t == 0]
    return (
        f"layout.tp={tp} must divide model.num_kv_heads={heads} or be a multiple of it (then each "
        f"head is used by several ranks); the nearest legal value is "
        f"{min(legal, key=lambda t: abs(t - tp))}"
    )


def _sharded_dims(run: Run, sizes: AxisSizes) -> str | None:
    for name in ("d_ff", "vocab_size"):
        value = getattr(run.model, name)
        if value % sizes.tp:
            return (
                f"model.{name}={value} must be a multiple of layout.tp={sizes.tp}; the nearest is "
                f"{nearest_multiple(value, sizes.tp)}, or set layout.tp="
                f"{nearest_divisor(value, sizes.tp)}"
            )
    return None


def _sequence(run: Run, sizes: AxisSizes) -> str | None:
    parts = sizes.tp * (2 * sizes.cp if sizes.cp > 1 else 1)
    length = run.data.seq_len
    if length % parts == 0:
        return None
    what = f"layout.tp={sizes.tp}" + (f" x 2 x layout.cp={sizes.cp}" if sizes.cp > 1 else "")
    return (
        f"data.seq_len={length} must be a multiple of {what} = {parts}, which divide it among the "
        f"ranks; the nearest is {nearest_multiple(length, parts)}"
    )


def _ulysses(run: Run, sizes: AxisSizes) -> str | None:
    heads = run.model.num_heads // sizes.tp
    if run.layout.cp_method != "ulysses" or heads % sizes.cp == 0:
        return None
    return (
        f"layout.cp_method='ulysses' divides the {heads} heads of a tensor rank (model.num_heads="
        f"{run.model.num_heads}, layout.tp={sizes.tp}) among layout.cp={sizes.cp} ranks; the "
        f"nearest cp that divides them is {nearest_divisor(heads, sizes.cp)}, or set "
        "layout.cp_method='ring'"
    )


def _zero(run: Run, sizes: AxisSizes) -> str | None:
    layout = run.layout
    reduces = {0: "step", 1: "step", 2: "micro_batch"}.get(layout.zero)
    if layout.reduce_gradients not in ("auto", reduces) and reduces is not None:
        return (
            f"layout.zero={layout.zero} reduces gradients once a {reduces.replace('_', '-')}, not "
            f"layout.reduce_gradients={layout.reduce_gradients!r}; the nearest legal values are "
            f"reduce_gradients='auto', or zero={2 if layout.zero < 2 else 1}"
        )
    if layout.zero < 3 and layout.reshard_after_forward == "node":
        return (
            f"layout.reshard_after_forward='node' belongs to layout.zero=3; zero={layout.zero} "
            "keeps the weights gathered (leave it at 'always', which zero 0 to 2 ignore)"
        )
    return None


def _stages(run: Run, sizes: AxisSizes) -> str | None:
    layout, blocks = run.layout, run.model.num_layers
    v, schedule = layout.pp_stages_per_rank, layout.pp_schedule
    if sizes.pp == 1:
        if v == 1 and layout.pp_layers is None and schedule == "1f1b":
            return None
        return (
            f"layout.pp_schedule={schedule!r}, pp_stages_per_rank={v} and pp_layers="
            f"{layout.pp_layers} are of a pipeline; leave them out, or set layout.pp to 2 or more"
        )
    one, two = schedule in ("gpipe", "1f1b"), schedule in ZERO_BUBBLE
    if (one and v != 1) or (two and v != 2) or v + one < 2:
        legal = "1" if one else "2" if two else "2 or more"
        return (
            f"layout.pp_stages_per_rank={v} does not fit layout.pp_schedule={schedule!r}, which "
            f"has {legal} a rank; set pp_stages_per_rank={1 if one else 2}"
        )
    stages = num_stages(layout)
    if layout.pp_layers is None:
        if stages <= blocks + 2:
            return None
        return (
            f"layout.pp={sizes.pp} x pp_stages_per_rank={v} = {stages} stages are more than the "
            f"model has parts: model.num_layers={blocks} blocks, the embedding and the head; the "
            f"nearest legal value is pp={(blocks + 2) // v}"
        )
    return _given_stages(layout.pp_layers, stages, blocks, layout)


def _given_stages(
    counts: tuple[int, ...], stages: int, blocks: int, layout: LayoutConfig
) -> str | None:
    even = [len(r) for r in split_blocks(blocks, layout.model_copy(update={"pp_layers": None}))]
    said = f"layout.pp_layers={list(counts)}"
    if len(counts) != stages:
        return f"{said} has {len(counts)} numbers for {stages} stages; an even split is {even}"
    if sum(counts) != blocks:
        return (
            f"{said} adds up to {sum(counts)}, not to model.num_layers={blocks}; an even split is "
            f"{even}"
        )
    if 0 in counts[1:-1]:
        return (
            f"{said}: only the first stage (which has the embedding) and the last one (which has "
            f"the head) can be without blocks; an even split is {even}"
        )
    return None


def _micro_batches(run: Run, sizes: AxisSizes) -> str | None:
    if sizes.pp == 1 or run.method.kind == "grpo":  # its rows are not known beforehand
        return None
    if run.optim.release_gradients:  # one micro-batch; another rule refuses that
        return None
    train, shares = run.train, sizes.dp_replicate * sizes.dp_shard
    rows = -(-train.global_batch_rows // shares)
    number, fewest = -(-rows // train.micro_batch_rows), fewest_micro_batches(run.layout)
    if number >= fewest:
        return None
    share = f" / {shares} shares" if shares > 1 else ""
    said = f"train.global_batch_rows={train.global_batch_rows}{share} in pieces of "
    said += f"train.micro_batch_rows={train.micro_batch_rows} make {number} micro-batches, fewer "
    said += f"than the {fewest} that layout.pp_schedule={run.layout.pp_schedule!r} needs on "
    said += f"layout.pp={sizes.pp} ranks; the nearest legal value is "
    if rows >= fewest:
        size = max(n for n in range(1, rows + 1) if -(-rows // n) >= fewest)
        return f"{said}micro_batch_rows={size}"
    return f"{said}global_batch_rows={fewest * shares} with micro_batch_rows=1"


def _pipeline_gradients(run: Run, sizes: AxisSizes) -> str | None:
    layout = run.layout
    if sizes.pp == 1 or (layout.zero != 2 and layout.reduce_gradients != "micro_batch"):
        return None
    return (
        f"layout.pp={sizes.pp} sums gradients over the ranks once a step, which layout.zero="
        f"{layout.zero} with reduce_gradients={layout.reduce_gradients!r} does after every "
        "micro-batch; the nearest legal values are reduce_gradients='auto' with zero=1, or zero=3"
    )


def _zero_bubble(run: Run, sizes: AxisSizes) -> str | None:
    layout = run.layout
    if sizes.pp == 1 or layout.pp_schedule not in ZERO_BUBBLE:
        return None
    said = f"layout.pp_schedule={layout.pp_schedule!r} computes gradients of inputs and of weights "
    if layout.zero == 3 and layout.reshard_after_forward != "never":
        return (
            f"{said}apart, and would lose those of weights that were given back between (layout."
            f"zero=3, reshard_after_forward={layout.reshard_after_forward!r}); set "
            "reshard_after_forward='never' or zero=1, or pp_schedule='interleaved-1f1b'"
        )
    if layout.compile:
        return (
            f"{said}apart, and compiled blocks compute them together; set layout.compile=false, or "
            "pp_schedule='interleaved-1f1b'"
        )
    return None


def _pipeline_release(run: Run, sizes: AxisSizes) -> str | None:
    if sizes.pp == 1 or not run.optim.release_gradients:
        return None
    return (
        "optim.release_gradients=true steps within the backward pass of a step's only micro-batch, "
        f"and layout.pp={sizes.pp} needs at least {fewest_micro_batches(run.layout)}; set "
        "optim.release_gradients=false"
    )


RULES: tuple[Rule, ...] = (
    Rule("heads", "A tensor rank holds whole attention heads.", _heads),
    Rule("key/value heads", "Key/value heads are divided or shared evenly.", _kv_heads),
    Rule(
        "sharded dims", "Tensor ranks hold equal parts of d_ff and the vocabulary.", _sharded_dims
    ),
    Rule("sequence", "Tensor and context ranks hold equal parts of a row.", _sequence),
    Rule("ulysses", "All-to-all gives each context rank whole attention heads.", _ulysses),
    Rule("stages", "Each pipeline stage holds part of the model.", _stages),
    Rule("micro-batches", "Every pipeline rank is at work at once.", _micro_batches),
    Rule(
        "gradients of a pipeline",
        "Stages sum their gradients over the ranks once a step.",
        _pipeline_gradients,
    ),
    Rule(
        "zero bubble",
        "A backward pass in halves needs the weights to stay, and code that can be run in halves.",
        _zero_bubble,
    ),
    Rule(
        "release in a pipeline", "A pipeline has several micro-batches a step.", _pipeline_release
    ),
    Rule("offload once", "Parameter offload includes the optimiser.", lever_rules.offload_twice),
    Rule("offload AdamW", "The host steps element by element.", lever_rules.host_steps_adamw),
    Rule("8-bit moments", "They are of float32 weights on the device.", lever_rules.eight_bits),
    Rule(
        "gradient release",
        "A step within the backward pass sees one gradient of one micro-batch.",
        lever_rules.release,
    ),
    Rule("zero", "A stage says when gradients are reduced and weights resharded.", _zero),
    Rule("fp8 shapes", "The 8-bit product reads 16 bytes at a time.", fp8_layers.odd_shapes),
    Rule("fp8 settings", "What is set for fp8 has an effect.", fp8_layers.idle_settings),
    Rule("fp8 and fp16", "8 bits work beside bfloat16.", fp8_layers.mixed_with_fp16),
    Rule(
        "whole gradients",
        "The shadow check and fp16's overflow look at all gradients of a step.",
        fp8_layers.needs_whole_gradients,
    ),
    Rule("recomputation budget", "Activations fit into remat.budget_bytes.", remat.broken_budget),
    Rule(
        "recomputation and compiler",
        "The compiler sees one block at a time.",
        remat.broken_by_compiler,
    ),
    Rule(
        "recomputation and zero bubble",
        "A backward pass in halves computes everything again for each weight.",
        remat.broken_by_zero_bubble,
    ),
)
