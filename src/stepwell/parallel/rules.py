"""Which layouts there are, and which combinations work: every rule once, checked before anything is
built. No torch.

`axis_sizes` fills the world; `RULES` refuse what cannot work with the values, the rule and the
nearest legal value. The table in docs/layouts.md is made from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from stepwell.config import Run
from stepwell.parallel import adapter_rules, fp8_layers, lever_rules, pipeline_rules, remat
from stepwell.parallel.remedies import (
    RANKS,
    Change,
    Complaint,
    Way,
    divisors,
    multiples,
    only,
    other_sizes,
    told,
    values_of,
)
from stepwell.sections.layout import LayoutConfig
from stepwell.sections.methods import SampledMethod
from stepwell.types import ConfigError


class AxisSizes(NamedTuple):
    """The dense view of the ranks; the last axis varies fastest."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1


def axis_sizes(layout: LayoutConfig, world: int) -> AxisSizes:
    """The axes for `world` ranks; raises ConfigError if they do not fill it, with what would fill
    it (`check_run` knows what the rest of a run allows, too)."""
    problem = _unfilled(layout, world)
    if problem is not None:
        sized = [_sized(layout, world, way) for way in problem.ways]
        raise ConfigError(told(problem, [found for found in sized if found]))
    fixed = layout.pp * layout.tp * layout.cp * layout.dp_replicate
    return AxisSizes(layout.pp, layout.dp_replicate, world // fixed, layout.cp, layout.tp)


def _unfilled(layout: LayoutConfig, world: int) -> Complaint | None:
    rest = world
    for axis in ("pp", "tp", "cp", "dp_replicate"):
        size = getattr(layout, axis)
        if rest % size:
            left = "" if rest == world else f" of the {world} that the axes before it leave"
            fixed = layout.pp * layout.tp * layout.cp * layout.dp_replicate
            return Complaint(
                f"layout.{axis}={size} must divide the number of ranks, {rest}{left}",
                (
                    values_of(f"layout.{axis}", divisors(world, size)),
                    _other_ranks(fixed * max(layout.dp_shard, 1), world),
                ),
            )
        rest //= size
    if layout.dp_shard in (-1, rest):
        return None
    fixed = world // rest
    needed = layout.dp_shard * fixed
    return Complaint(
        f"layout.dp_shard={layout.dp_shard} x the other axes' {fixed} = {needed} must equal the "
        f"number of ranks, {world}",
        (values_of("layout.dp_shard", [rest, -1]), values_of(RANKS, [needed])),
    )


def _other_ranks(of: int, world: int) -> Way:
    """Multiples of `of`, nearest first, of two the fewer."""
    return values_of(RANKS, sorted(multiples(of, world), key=lambda n: (abs(n - world), n)))


def _sized(layout: LayoutConfig, world: int, way: Way) -> Change | None:
    for wanted in way:
        axes = {k.removeprefix("layout."): v for k, v in wanted.items() if k != RANKS}
        if _unfilled(layout.model_copy(update=axes), wanted.get(RANKS, world)) is None:
            return wanted
    return None


@dataclass(frozen=True)
class Rule:
    """why: the reason in general. broken(run, sizes): what is wrong with this run, with its values
    and what might mend it; empty if nothing is."""

    name: str
    why: str
    broken: Callable[[Run, AxisSizes], list[Complaint]]


# Complaints by rule and by what they are about.
Found = dict[tuple[str, str], Complaint]


def check_run(run: Run, world: int, rules: Iterable[Rule] | None = None) -> AxisSizes:
    """The axes of the run on `world` ranks. Raises ConfigError with every one of `rules` (all by
    default) that it breaks, or with what its axes lack to fill the ranks. The values that are named
    are legal: with each alone the run has that complaint no more, and none that it had not."""
    problem = _unfilled(run.layout, world)
    if problem is None:
        reported = _broken(run, axis_sizes(run.layout, world), RULES if rules is None else rules)
    else:
        reported = {_AXES: problem}
    if reported:
        before, messages = _complaints(run, world), []
        for of, complaint in reported.items():
            legal = [_first_legal(run, world, before, of, way) for way in complaint.ways]
            messages.append(told(complaint, [found for found in legal if found]))
        raise ConfigError("\n".join(messages))
    return axis_sizes(run.layout, world)


_AXES = ("axes", "")


def _complaints(run: Run, world: int) -> Found:
    """Also where the axes do not fill the world: what would be wrong if they did."""
    layout, found = run.layout, Found()
    problem = _unfilled(layout, world)
    if problem is None:
        sizes = axis_sizes(layout, world)
    else:
        found[_AXES] = problem
        shard = max(layout.dp_shard, 1)
        sizes = AxisSizes(layout.pp, layout.dp_replicate, shard, layout.cp, layout.tp)
    return found | _broken(run, sizes, RULES)


def _broken(run: Run, sizes: AxisSizes, rules: Iterable[Rule]) -> Found:
    return {(rule.name, c.about): c for rule in rules for c in rule.broken(run, sizes)}


def _first_legal(
    run: Run, world: int, before: Found, of: tuple[str, str], way: Way
) -> Change | None:
    """The first change that mends the complaint `of`; of several the one that leaves the fewest
    others. None that brings a new complaint, or leaves one about the same key, will do."""
    best, fewest = None, len(before)
    for wanted in way:
        after = _after(run, world, wanted)
        if after is None or not after.keys() <= before.keys() - {of}:
            continue
        same = any(wanted.keys() & complaint.keys for complaint in after.values())
        if not same and len(after) < fewest:
            best, fewest = wanted, len(after)
        if fewest == 0:
            break
    return best


def _after(run: Run, world: int, wanted: Change) -> Found | None:
    """The complaints about the changed run; None if there is no such run."""
    settings = {key: value for key, value in wanted.items() if key != RANKS}
    try:
        changed = Run.parse(run.model_dump(exclude_none=True), settings)
    except ConfigError:
        return None
    return _complaints(changed, wanted.get(RANKS, world))


# --- the rules -------------------------------------------------------------------------------


def _heads(run: Run, sizes: AxisSizes) -> list[Complaint]:
    heads = run.model.num_heads
    if heads % sizes.tp == 0:
        return []
    said = f"layout.tp={sizes.tp} must divide model.num_heads={heads}"
    return [Complaint(said, (other_sizes("tp", sizes),))]


def _kv_heads(run: Run, sizes: AxisSizes) -> list[Complaint]:
    heads, tp = run.model.num_kv_heads, sizes.tp
    if heads % tp == 0 or tp % heads == 0:
        return []
    said = (
        f"layout.tp={tp} must divide model.num_kv_heads={heads} or be a multiple of it (then each "
        "head is used by several ranks)"
    )
    return [Complaint(said, (other_sizes("tp", sizes),))]


def _sharded_dims(run: Run, sizes: AxisSizes) -> list[Complaint]:
    found = []
    for name in ("d_ff", "vocab_size"):
        value = getattr(run.model, name)
        if value % sizes.tp:
            ways = values_of(f"model.{name}", multiples(sizes.tp, value)), other_sizes("tp", sizes)
            said = f"model.{name}={value} must be a multiple of layout.tp={sizes.tp}"
            found.append(Complaint(said, ways, name))
    return found


def _sequence(run: Run, sizes: AxisSizes) -> list[Complaint]:
    parts = sizes.tp * (2 * sizes.cp if sizes.cp > 1 else 1)
    length = run.data.seq_len
    if length % parts == 0:
        return []
    what = f"layout.tp={sizes.tp}" + (f" x 2 x layout.cp={sizes.cp}" if sizes.cp > 1 else "")
    ways = [values_of("data.seq_len", multiples(parts, length))]
    ways += [other_sizes(axis, sizes) for axis in ("tp", "cp") if getattr(sizes, axis) > 1]
    said = (
        f"data.seq_len={length} must be a multiple of {what} = {parts}, which divide it among the "
        "ranks"
    )
    return [Complaint(said, tuple(ways))]


def _ulysses(run: Run, sizes: AxisSizes) -> list[Complaint]:
    heads = run.model.num_heads // sizes.tp
    if run.layout.cp_method != "ulysses" or heads % sizes.cp == 0:
        return []
    said = (
        f"layout.cp_method='ulysses' divides the {heads} heads of a tensor rank (model.num_heads="
        f"{run.model.num_heads}, layout.tp={sizes.tp}) among layout.cp={sizes.cp} ranks"
    )
    return [Complaint(said, (other_sizes("cp", sizes), only(layout__cp_method="ring")))]


def _zero(run: Run, sizes: AxisSizes) -> list[Complaint]:
    layout, found = run.layout, []
    reduces = {0: "step", 1: "step", 2: "micro_batch"}.get(layout.zero)
    if layout.reduce_gradients not in ("auto", reduces) and reduces is not None:
        said = (
            f"layout.zero={layout.zero} reduces gradients once a {reduces.replace('_', '-')}, not "
            f"layout.reduce_gradients={layout.reduce_gradients!r}"
        )
        stages = (2, 3) if layout.zero < 2 else (1, 3)
        ways = only(layout__reduce_gradients="auto"), values_of("layout.zero", stages)
        found.append(Complaint(said, ways, "gradients"))
    if layout.zero < 3 and layout.reshard_after_forward == "node":
        said = (
            f"layout.reshard_after_forward='node' belongs to layout.zero=3; zero={layout.zero} "
            "keeps the weights gathered ('always' is ignored there)"
        )
        ways = only(layout__reshard_after_forward="always"), only(layout__zero=3)
        found.append(Complaint(said, ways, "weights"))
    return found


def _node(run: Run, sizes: AxisSizes) -> list[Complaint]:
    divided = sizes.dp_shard * sizes.cp > 1
    if run.layout.reshard_after_forward != "node" or sizes.tp == 1 or not divided:
        return []
    said = (
        "layout.reshard_after_forward='node' divides weights anew among the ranks of a node, which "
        f"FSDP2 cannot do with what layout.tp={sizes.tp} ranks divide"
    )
    ways = only(layout__reshard_after_forward="always"), only(layout__tp=1)
    return [Complaint(said, ways)]


def step_units(run: Run) -> tuple[str, int, str] | None:
    """The key that says how many units of a step the ranks share, their number, and what one is
    called. None for methods that sample: a rank may be without a prompt."""
    method = run.method
    if isinstance(method, SampledMethod):
        return None
    if method.units_per_step is None:
        return method.step_key, run.train.global_batch_rows, "row"
    unit = method.step_key.removeprefix("method.").removesuffix("s_per_step")
    return method.step_key, method.units_per_step, unit


def _rows(run: Run, sizes: AxisSizes) -> list[Complaint]:
    data_ranks, units = sizes.dp_replicate * sizes.dp_shard, step_units(run)
    if units is None or data_ranks <= units[1]:
        return []
    key, rows, unit = units
    world = prod(sizes)
    shares = "" if data_ranks == world else f", {data_ranks} of them for data,"
    said = f"{world} ranks{shares} exceed {key}={rows}, so some would have no {unit}"
    fewer = range(rows * world // data_ranks, 0, -1)
    return [Complaint(said, (values_of(key, [data_ranks]), values_of(RANKS, fewer[:32])))]


RULES: tuple[Rule, ...] = (
    Rule("rows", "Every data parallel rank has a row.", _rows),
    Rule("heads", "A tensor rank holds whole attention heads.", _heads),
    Rule("key/value heads", "Key/value heads are divided or shared evenly.", _kv_heads),
    Rule(
        "sharded dims", "Tensor ranks hold equal parts of d_ff and the vocabulary.", _sharded_dims
    ),
    Rule("sequence", "Tensor and context ranks hold equal parts of a row.", _sequence),
    Rule("ulysses", "All-to-all gives each context rank whole attention heads.", _ulysses),
    Rule("stages", "Each pipeline stage holds part of the model.", pipeline_rules.stages),
    Rule("micro-batches", "Every pipeline rank is at work at once.", pipeline_rules.micro_batches),
    Rule(
        "gradients of a pipeline",
        "Stages sum their gradients over the ranks once a step.",
        pipeline_rules.gradients,
    ),
    Rule(
        "zero bubble",
        "A backward pass in halves needs the weights to stay, and code that can be run in halves.",
        pipeline_rules.zero_bubble,
    ),
    Rule(
        "release in a pipeline",
        "A pipeline has several micro-batches a step.",
        pipeline_rules.release,
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
    Rule(
        "weights within a node",
        "FSDP2 reshards to fewer ranks only what tensor ranks do not divide.",
        _node,
    ),
    Rule("fp8 shapes", "The 8-bit product reads 16 bytes at a time.", fp8_layers.odd_shapes),
    Rule("fp8 settings", "What is set for fp8 has an effect.", fp8_layers.idle_settings),
    Rule("fp8 and fp16", "8 bits work beside bfloat16.", fp8_layers.mixed_with_fp16),
    Rule(
        "whole gradients",
        "The shadow check and fp16's overflow look at all gradients of a step.",
        fp8_layers.needs_whole_gradients,
    ),
    Rule("adapters' layers", "A pattern names a layer.", adapter_rules.targets),
    Rule("adapters' rank", "An adapter is smaller than its matrix.", adapter_rules.rank),
    Rule(
        "4 bits",
        "A block of 64 values of the whole matrix has one scale, and products are in 16 bits.",
        adapter_rules.four_bits,
    ),
    Rule(
        "adapters in a pipeline",
        "The first stage and every rank have something to train.",
        adapter_rules.stages,
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
