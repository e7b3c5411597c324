"""Pictures of a placement as inline SVG: which model is on which GPU, its moments' bytes, each
model's bytes, the seconds of a step. No torch.

Colours are the page's (`--s0` to `--s7`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepwell.plan.explain.pictures import WIDTH, box, place_of, svg, text
from stepwell.plan.methods.evaluated import (
    ACTIVATIONS,
    CACHE,
    COPY,
    GATHERED,
    OUTSIDE,
    Evaluated,
)
from stepwell.plan.methods.text import part_name
from stepwell.plan.units import in_gib, seconds_text, size_text

MOST_GPUS = 32  # that are drawn
COLORS = {
    "policy": "--s0",
    "critic": "--s1",
    "reference": "--s2",
    "reward": "--s3",
    COPY: "--s4",
    CACHE: "--s6",
    ACTIVATIONS: "--s7",
    GATHERED: "--s7",
    OUTSIDE: "--s5",
}
PARTS = {"parameters": "--s2", "gradients": "--s1", "master": "--s0", "moments": "--s4"}
DOES = {"sampler": "samples", "reward": "scores"}
LEFT, HIGH, GAP = 130, 18, 5


def legend() -> list[tuple[str, str]]:
    """(colour, what), each colour once."""
    found = {color: name for name, color in COLORS.items() if name != GATHERED}
    found[COLORS[GATHERED]] = f"{ACTIVATIONS}, {GATHERED}"
    return list(found.items())


def legend_of_parts() -> list[tuple[str, str]]:
    kinds = [(color, part_name(part)) for part, color in PARTS.items()]
    return [*kinds, (COLORS[CACHE], CACHE)]


# --- who is where ----------------------------------------------------------------------------


def gpus(one: Evaluated) -> str:
    """A box for each GPU: what it does, its place in the layout, and as bars what rests there."""
    roles = ["trains"] * one.trainers
    for name, number in one.servers.items():
        roles += [DOES[name]] * number
    shown = _shown(roles)
    columns = min(len(shown), 8)
    wide, high = WIDTH / columns, 74
    parts = []
    for i, gpu in enumerate(shown):
        x, y = (i % columns) * wide, (i // columns) * (high + 6)
        held, role = _held(one, roles[gpu]), roles[gpu]
        parts.append(box(x + 2, y, wide - 4, high, "--band", f"GPU {gpu} {role}: {_told(held)}"))
        parts.append(text(x + wide / 2, y + 16, f"GPU {gpu}", "gpu", "middle"))
        parts.append(text(x + wide / 2, y + 31, role, "gpu small", "middle"))
        parts.append(text(x + wide / 2, y + 45, _place(one, gpu), "gpu small", "middle"))
        scale = (wide - 12) / max(one.limit, sum(held.values()))
        parts += _stack(x + 6, y + 53, 14, held, scale, COLORS)
    height = -(-len(shown) // columns) * (high + 6)
    if len(shown) < len(roles):
        height += 16
        more = f"{len(roles) - len(shown):,} more that train are like these"
        parts.append(text(0, height - 4, more, "small"))
    what = "Each GPU, what it does, and what rests on it"
    return svg(WIDTH, height, "Which model is where", what, parts)


def _shown(roles: Sequence[str]) -> list[int]:
    """Of many that train, the first; always those that serve."""
    serve = [i for i, role in enumerate(roles) if role != "trains"]
    train = [i for i, role in enumerate(roles) if role == "trains"]
    return [*train[: max(1, MOST_GPUS - len(serve))], *serve]


def _place(one: Evaluated, gpu: int) -> str:
    layout = one.job.layout
    if gpu >= layout.num_gpus:
        return ""
    place = place_of(gpu, layout)
    data = place.dp_replicate * layout.dp_shard + place.dp_shard
    sizes = {"DP": layout.data_ranks, "CP": layout.cp, "TP": layout.tp, "PP": layout.pp}
    here = {"DP": data, "CP": place.cp, "TP": place.tp, "PP": place.pp}
    return " ".join(f"{axis} {here[axis]}" for axis, size in sizes.items() if size > 1)


def _held(one: Evaluated, role: str) -> dict[str, float]:
    """Between two moments, or, where nothing trains, all the time."""
    sampling = one.sampling
    if role == "scores":
        return {"reward": one.served_reward / one.servers["reward"]}
    if role == "samples" and sampling is not None:
        return {
            COPY: sampling.weights,
            CACHE: sampling.cache,
            ACTIVATIONS: sampling.workspace,
        }
    held: dict[str, float] = {
        name: model.total - model.gradients for name, model in one.models.items()
    }
    if sampling is not None and COPY in one.parts["sampling"]:
        held[COPY] = one.parts["sampling"][COPY]
    return held


# --- bytes -----------------------------------------------------------------------------------


def moments_chart(one: Evaluated) -> str:
    """A bar for each moment, beside what a GPU has."""
    has = one.job.cluster.accelerator.memory_bytes
    most = max(has, one.peak)
    scale = (WIDTH - LEFT - 60) / most
    parts = []
    for i, (moment, held) in enumerate(one.parts.items()):
        y = i * (HIGH + GAP)
        parts.append(text(0, y + 13, moment))
        parts += _stack(LEFT, y, HIGH, held, scale, COLORS)
        total = sum(held.values())
        parts.append(text(LEFT + total * scale + 4, y + 13, in_gib(total), "small"))
    height = len(one.parts) * (HIGH + GAP)
    limit = LEFT + has * scale
    parts.append(f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="{height}" class="limit"/>')
    parts.append(text(limit, height + 12, size_text(has), "small", "end"))
    what = "GiB on a GPU that trains, in each moment of a step"
    return svg(WIDTH, height + 16, "Memory of each moment", what, parts)


def models_chart(one: Evaluated) -> str:
    """A bar for each model, the sampler's copy and the keys and values."""
    bars: dict[str, dict[str, float]] = {
        name: {part: n for part, n in model.named().items() if part in PARTS and n}
        for name, model in one.models.items()
    }
    sampling = one.sampling
    if sampling is not None:
        bars[COPY] = {"parameters": sampling.weights}
        bars[CACHE] = {CACHE: sampling.cache}
    most = max((sum(bar.values()) for bar in bars.values()), default=0) or 1
    scale = (WIDTH - LEFT - 190) / most
    parts = []
    for i, (name, bar) in enumerate(bars.items()):
        y = i * (HIGH + GAP)
        parts.append(text(0, y + 13, name))
        parts += _stack(LEFT, y, HIGH, bar, scale, {**PARTS, CACHE: COLORS[CACHE]})
        host = one.models[name].host if name in one.models else 0
        said = in_gib(sum(bar.values())) + (f" and {in_gib(host)} on the host" if host else "")
        parts.append(text(LEFT + sum(bar.values()) * scale + 4, y + 13, said, "small"))
    what = "GiB of each model on a GPU, by what they are"
    return svg(WIDTH, len(bars) * (HIGH + GAP), "Memory of each model", what, parts)


# --- time ------------------------------------------------------------------------------------


def time_chart(one: Evaluated) -> str:
    """A step's parts one after the other."""
    left, scale = 160, (WIDTH - 160 - 130) / one.step_s
    parts, start = [], 0.0
    for i, (name, seconds) in enumerate(one.times.items()):
        y, x = i * (HIGH + GAP), left + start * scale
        parts.append(text(left - 8, y + 13, name, "", "end"))
        parts.append(box(x, y, seconds * scale, HIGH, _color_of_time(name), seconds_text(seconds)))
        shown = f"{seconds_text(seconds)}, {100 * seconds / one.step_s:.0f} %"
        parts.append(text(x + seconds * scale + 4, y + 13, shown, "small"))
        start += seconds
    what = "Seconds of a step, one part after the other"
    height = len(one.times) * (HIGH + GAP)
    return svg(WIDTH, height, "Where a step's time goes", what, parts)


def _color_of_time(name: str) -> str:
    kinds = {"reading prompts": "--s6", "decoding": "--s6", "new weights": "--s4"}
    kinds |= {"scoring": "--s2", "reference": "--s2", "training the critic": "--s1"}
    return kinds.get(name, "--s0")


# --- pieces ----------------------------------------------------------------------------------


def _stack(
    x: float, y: float, high: float, held: Mapping[str, float], scale: float, colors: dict[str, str]
) -> list[str]:
    parts = []
    for name, num_bytes in held.items():
        if num_bytes:
            hint = f"{part_name(name)}: {size_text(num_bytes)}"
            parts.append(box(x, y, num_bytes * scale, high, colors[name], hint))
        x += num_bytes * scale
    return parts


def _told(held: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size_text(n)}" for name, n in held.items() if n)
