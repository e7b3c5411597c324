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
from stepwell.parallel import fp8_layers
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


RULES: tuple[Rule, ...] = (
    Rule("heads", "A tensor rank holds whole attention heads.", _heads),
    Rule("key/value heads", "Key/value heads are divided or shared evenly.", _kv_heads),
    Rule(
        "sharded dims", "Tensor ranks hold equal parts of d_ff and the vocabulary.", _sharded_dims
    ),
    Rule("sequence", "Tensor and context ranks hold equal parts of a row.", _sequence),
    Rule("zero", "A stage says when gradients are reduced and weights resharded.", _zero),
    Rule("fp8 shapes", "The 8-bit product reads 16 bytes at a time.", fp8_layers.odd_shapes),
    Rule("fp8 settings", "What is set for fp8 has an effect.", fp8_layers.idle_settings),
    Rule("fp8 and fp16", "8 bits work beside bfloat16.", fp8_layers.mixed_with_fp16),
    Rule(
        "whole gradients",
        "The shadow check and fp16's overflow look at all gradients of a step.",
        fp8_layers.needs_whole_gradients,
    ),
)
