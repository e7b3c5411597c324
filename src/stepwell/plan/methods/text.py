"""A method's plan in words and as JSON. No torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stepwell.plan.explain.words import count_text
from stepwell.plan.methods.evaluated import NO_COPY, Evaluated
from stepwell.plan.methods.methods import MethodPlan
from stepwell.plan.methods.placements import SAMPLED
from stepwell.plan.methods.rollouts import Workload
from stepwell.plan.units import count_of, in_gib, seconds_text, size_text

NAMES = {
    "ppo": "policy, critic, reference and reward model",
    "grpo": "policy and reference",
    "dpo": "policy and reference",
    "lora": "the model with its adapters",
    "qlora": "the model in 4 bits with its adapters",
}


def lines(plan: MethodPlan) -> list[str]:
    together = plan.num_gpus * plan.asked.limit
    models = NAMES[plan.method] if "reference" in plan.asked.models else "policy"
    if plan.method in ("lora", "qlora"):
        models = NAMES[plan.method]
    found = [
        f"{plan.method} of {plan.name} ({count_text(plan.parameters)} parameters) on "
        f"{plan.num_gpus} x {plan.gpu}",
        f"a GPU has {size_text(plan.gpu_bytes)}, {in_gib(plan.asked.limit)} of them usable",
        f"{models}: {plan.bytes_per_parameter:.3g} bytes a parameter, "
        f"{size_text(plan.state_bytes)}{_repeated(plan)}; the GPUs have {size_text(together)} "
        "together",
        f"a step's work: {workload_text(plan.method, plan.workload)}{_rows(plan)}",
        "",
        "as it is usually drawn:",
        *_indented(_of(plan.asked)),
    ]
    found += ["", *verdict(plan)]
    if plan.nearest is not None and plan.nearest is not plan.asked and not plan.fits:
        found += ["", "the nearest that fits:", *_indented(_of(plan.nearest, True))]
    if plan.elsewhere is not None and not plan.fits:
        head = f"the nearest that runs as the engine is, on {plan.num_gpus} x {plan.elsewhere.gpu}:"
        found += ["", head, *_indented(_of(plan.elsewhere, True))]
    for head, same in (
        ("others that fit, and are faster:", True),
        ("faster, but another training:", False),
    ):
        others = [_short(one) for one in plan.others if one.trains_the_same is same]
        found += ["", head, *_indented(others)] if others else []
    return found


def _repeated(plan: MethodPlan) -> str:
    """What is on several GPUs counts as often there."""
    asked = plan.asked
    four = asked.placement.adapters == "qlora"
    if asked.trainers == 1 or not (four or asked.placement.reward == "model"):
        return ""
    whole = "the base in 4 bits" if four else "the reward model"
    held = f"{size_text(plan.held_bytes)} on {asked.trainers} GPUs"
    return f" a copy, {held}, each of which has {whole} whole"


def workload_text(method: str, work: Workload) -> str:
    if method not in SAMPLED:
        rows = "pairs of answers in " if method == "dpo" else ""
        given = "--global-batch-tokens, --seq-len"
        return f"{rows}{count_of(work.rows, 'row')} of {work.seq_len:,} tokens ({given})"
    each = f"{work.group_size} answers" if work.group_size > 1 else "1 answer"
    passes = f", gone through {work.updates} times" if work.updates > 1 else ""
    return (
        f"{work.prompts:,} prompts of {work.prompt_tokens:,} tokens, {each} of up to "
        f"{work.answer_tokens:,} to each{passes} "
        "(--prompts, --prompt-tokens, --group-size, --answer-tokens)"
    )


def _rows(plan: MethodPlan) -> str:
    if plan.method not in SAMPLED:
        return ""
    rows = plan.asked.job.layout.global_batch_rows
    return f"; {packed_text(rows, plan.workload)}"


def packed_text(rows: int, work: Workload) -> str:
    """What is trained on: a prompt is there once for all answers to it, and rows are full."""
    shared = ", each prompt once for its answers" if work.group_size > 1 else ""
    return (
        f"packed{shared}, they are {count_of(rows, 'row')} of {work.seq_len:,} tokens to train on"
    )


def of_limit(one: Evaluated) -> str:
    return f"{in_gib(one.peak)} of {size_text(one.limit)} while {one.phase}"


def _indented(rows) -> list[str]:
    return [f"  {row}" for row in rows]


def verdict(plan: MethodPlan) -> list[str]:
    asked = plan.asked
    if asked.fits:
        room = size_text(asked.limit - asked.peak)
        return [f"it fits: {of_limit(asked)}, {room} are free"]
    if asked.peak > asked.limit:
        said = [
            f"it does not fit: {asked.phase} needs {size_text(asked.peak)} on a GPU that has "
            f"{size_text(asked.limit)}"
        ]
    else:
        said = [f"it does not fit: {asked.host_shortage}"]
    if plan.fewest_gpus is not None:
        said.append(f"from {plan.fewest_gpus} GPUs on it would")
    else:
        said.append(f"more GPUs do not help: {_undivided(asked)} on each of them")
        if plan.fewest_served is not None:
            enough = f"it would fit from {plan.fewest_served} GPUs on"
            said.append(f"with servers for {_served(asked)} {enough}, but {NO_COPY}")
    if plan.nearest is None:
        said.append("nothing that the engine knows fits on these GPUs")
    return said


def _undivided(asked: Evaluated) -> str:
    """What every GPU has whole."""
    whole = []
    if asked.sampling is not None and not asked.servers.get("sampler"):
        whole.append(f"the sampler's copy of the weights ({size_text(asked.sampling.weights)})")
    if asked.placement.reward == "model":
        whole.append(f"the reward model ({size_text(asked.models['reward'].total)})")
    if asked.placement.adapters == "qlora":
        whole.append("the base in 4 bits")
    return " and ".join(whole) + (" are whole" if len(whole) > 1 else " is whole")


def _served(asked: Evaluated) -> str:
    return "sampling and scoring" if asked.placement.reward == "model" else "sampling"


def configured(one: Evaluated) -> list[str]:
    """Of a recipe: whether all its models fit, and the whole step."""
    verdict = "fits" if one.fits else "does not fit"
    short = [one.host_shortage] if one.host_shortage else []
    return [f"{verdict}: {of_limit(one)}", *short, *_of(one)]


def _of(one: Evaluated, with_settings: bool = False) -> list[str]:
    found = []
    if one.changes:
        found.append("; ".join(one.changes))
    servers = "".join(f", {n} for the {name}" for name, n in one.servers.items())
    train = "1 GPU trains" if one.trainers == 1 else f"{one.trainers} GPUs train"
    found.append(f"{train}{servers}: {one.layout}")
    if one.why_tp:
        found.append(one.why_tp)
    for name, model in one.models.items():
        if name == "reward" and one.placement.reward == "program":
            continue
        host = f", {size_text(model.host)} on the host" if model.host else ""
        parts = ", ".join(
            f"{part_name(part)} {size_text(n)}"
            for part, n in model.named().items()
            if n and part != "host"
        )
        said = f" ({parts})" if parts else "" if host else " (none of its own on these GPUs)"
        held = size_text(model.total) if model.total else "nothing"
        found.append(f"{name:<10}{held:>10} a GPU{said}{host}")
    phases = ", ".join(f"{name} {in_gib(n)}" for name, n in one.phases.items())
    found.append(f"in each moment, of {size_text(one.limit)}: {phases}")
    if one.sampling is not None:
        s = one.sampling
        found.append(
            f"sampling: {size_text(s.weights)} of weights and {size_text(s.cache)} of keys and "
            f"values on a GPU, {s.slots} answers at once"
        )
        found += alike_text(one)
    if one.host_of_machine:
        held = in_gib(one.host_of_machine)
        found.append(f"host memory of a machine: {held} of {one.host_text}")
    found.append(f"a whole step: {seconds_text(one.step_s)} ({parts_text(one)})")
    if with_settings:
        found.append(" ".join(settings_text(one)))
    if one.lacks:
        found.append(f"but {one.lacks}")
    return found


def alike_text(one: Evaluated) -> list[str]:
    """What is sampled more than once, if so."""
    if one.sampled_alike == 1:
        return []
    shares = count_of(one.job.layout.data_ranks, "data rank")
    return [
        f"each answer is sampled {one.sampled_alike} times: the engine divides prompts among "
        f"{shares}, and the {one.sampled_alike} GPUs of a data rank sample the same ones"
    ]


def settings_text(one: Evaluated) -> list[str]:
    """`--key value` of what is not as usual."""
    usual = {"layout.tp": 1, "remat.mode": "none"}
    keys = [(key, value) for key, value in one.settings.items() if usual.get(key) != value]
    return [f"--{key} {str(value).replace('True', 'true')}" for key, value in keys]


def part_name(part: str) -> str:
    """A GPU's float32 weights are there, too, where the optimiser has masters of its own on the
    host."""
    return {"parameters": "frozen weights", "master": "float32 weights"}.get(part, part)


def parts_text(one: Evaluated) -> str:
    shown = [(name, s) for name, s in one.times.items() if s >= 0.005 * one.step_s]
    return ", ".join(f"{name} {seconds_text(s)}" for name, s in shown)


def _short(one: Evaluated) -> str:
    said = "; ".join(one.changes) or "as drawn"
    return f"{said}: {size_text(one.peak)}, {seconds_text(one.step_s)} a step"


def as_json(plan: MethodPlan) -> dict[str, Any]:
    def told(one: Evaluated | None) -> dict[str, Any] | None:
        return None if one is None else one.as_json()

    return {
        "method": plan.method,
        "model": plan.name,
        "gpu": plan.gpu,
        "num_gpus": plan.num_gpus,
        "parameters": plan.parameters,
        "bytes_per_parameter": plan.bytes_per_parameter,
        "state_bytes": plan.state_bytes,
        "held_bytes": plan.held_bytes,
        "pins": plan.pins.given(),
        "workload": asdict(plan.workload),
        "fits": plan.fits,
        "fewest_gpus": plan.fewest_gpus,
        "fewest_served": plan.fewest_served,
        "asked": told(plan.asked),
        "nearest": told(plan.nearest),
        "others": [told(one) for one in plan.others],
        "elsewhere": told(plan.elsewhere),
        "text": plan.lines(),
    }
