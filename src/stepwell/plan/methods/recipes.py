"""A plan of a method as a recipe, and a recipe of a method as a placement. No torch.

The two are each other's inverse: what a plan says of the placement that it writes is what is said
of the recipe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepwell.config import Run
from stepwell.parallel.rules import axis_sizes
from stepwell.plan.cluster import Cluster
from stepwell.plan.job import dims_of, how_to_start, job_of
from stepwell.plan.memory.ledger import predict_memory
from stepwell.plan.memory.models import ModelBytes, predict_models, reference_place
from stepwell.plan.methods.evaluated import Evaluated, placed, servers_of
from stepwell.plan.methods.methods import KEYS, MethodPlan
from stepwell.plan.methods.placements import SAMPLED, Placement
from stepwell.plan.methods.rollouts import Workload
from stepwell.plan.methods.text import of_limit, parts_text
from stepwell.plan.methods.training import Question, reward_bytes, rows_of, training_of
from stepwell.plan.search.runs import values_of
from stepwell.plan.units import seconds_text
from stepwell.sections.methods import DPO, PPO, SampledMethod
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError


def check_writable(one: Evaluated | None, option: str = "--write") -> Evaluated:
    """Raises ConfigError for a placement that no recipe describes, with the reason. option: which
    needs one."""
    if one is None:
        raise ConfigError(f"{option}: nothing that the engine knows fits on these GPUs")
    if one.lacks:
        raise ConfigError(f"{option}: {_with_keys(one)} would fit, but {one.lacks}")
    if one.servers:
        apart = " and ".join(f"{n} for the {name}" for name, n in one.servers.items())
        raise ConfigError(
            f"{option}: {_with_keys(one)} has GPUs of its own for what it does not train "
            f"({apart}), and a recipe describes only the {one.trainers} that train; start the "
            "servers yourself, and name them as method.server and as a source python:FILE of "
            "method.rewards"
        )
    return one


def _with_keys(one: Evaluated) -> str:
    said = "; ".join(one.changes) or "the method as it is usually drawn"
    return f"the plan ({said})"


def recipe(
    plan: MethodPlan, model: ModelConfig, name: str, option: str = "--write"
) -> dict[str, Any]:
    """The tables of a recipe for what the plan has chosen. Raises ConfigError as
    `check_writable`."""
    one = check_writable(plan.chosen, option)
    values = values_of(model, one.job.layout, name)
    for key, value in one.settings.items():
        section, _, field = key.partition(".")
        values.setdefault(section, {})[field] = value
    rows = one.job.layout.global_batch_rows
    if plan.method in SAMPLED:
        for field, key in KEYS[plan.method].items():
            values["method"][key] = getattr(plan.workload, field)
    if plan.method == "dpo":
        values["method"]["pairs_per_step"] = rows
    if values["method"]["kind"] != "sft":
        del values["train"]["global_batch_rows"]
    if one.placement.reward == "model":
        folder = f"model:runs/{name}/reward"
        values["method"]["rewards"] = [{"name": "reward", "source": folder}]
    if values["remat"] == {"mode": "none"}:
        del values["remat"]
    return values


def heading(plan: MethodPlan, machines: Cluster) -> str:
    """Lines of comment above the recipe."""
    one = check_writable(plan.chosen)
    said = "; ".join(one.changes) or "as it is usually drawn"
    still = ["model.init", "data.path and data.tokenizer", "optim", "train.steps"]
    if one.placement.reward == "model":
        still.insert(1, "the reward model's folder")
    elif one.placement.reward == "program":
        still.insert(1, "method.rewards or method.verifier")
    return (
        f"# {plan.method} on {plan.num_gpus} x {machines.name}, planned: {said}.\n"
        f"# {of_limit(one)}; a whole step: {seconds_text(one.step_s)} ({parts_text(one)}).\n"
        f"# Still to say: {', '.join(still)}.\n"
        + (f"# {start}\n" if (start := how_to_start(one.job.layout)) else "")
    )


# --- a recipe as a placement -------------------------------------------------------------------


def as_configured(run: Run, world: int, machines: Cluster, name: str = "") -> Evaluated | None:
    """All models of the run and its whole step, on `world` GPUs that train; None where there is but
    one model. Reward models are taken to be as large as the policy; a server that samples, to have
    the fewest GPUs that are enough.

    Raises ConfigError for a layout that does not fill the ranks, and for a model too large for a
    server.
    """
    if run.method.kind not in (*SAMPLED, "dpo"):
        return None
    placement, dims = placement_of(run), dims_of(run.model, name)
    question = Question(
        run.method.kind, run.model, dims, machines, workload_of(run), run.model, run.lora.rank
    )
    servers = servers_of(question, placement)
    if servers is None:
        raise ConfigError(
            f"method.server={getattr(run.method, 'server', None)!r}: the fast links of a machine "
            f"join too few GPUs to hold {dims.name}; sample with the engine (leave it out)"
        )
    axes = axis_sizes(run.layout, world)
    rows = rows_of(question, axes.dp_replicate * axes.dp_shard)
    train = run.train.model_copy(update={"global_batch_rows": rows})
    alone = run.model_copy(update={"train": train})
    job = job_of(alone, world, machines, name)
    models = predict_models(_apart(run), world)
    models["reward"] = ModelBytes(parameters=reward_bytes(run.model) * _num_reward_models(run))
    ledger = predict_memory(_apart(alone), world, device="cuda")
    training = training_of(question, alone, job, models).having(ledger.peak_bytes)
    total = world + sum(servers.values())
    return placed(question, placement, placement, total, servers, training, copies=True)


def placement_of(run: Run) -> Placement:
    """Where the models of a run are."""
    method, lora, away = run.method, run.lora, run.offload
    offload = "parameters" if away.parameters else "optimizer" if away.optimizer else "none"
    found = Placement(
        adapters="none" if not lora.rank else "qlora" if lora.quantize == "nf4" else "lora",
        offload=offload,
        critic=method.critic if isinstance(method, PPO) else "none",
        reference=reference_place(run) or "none",  # pyright: ignore[reportArgumentType]
    )
    if not isinstance(method, SampledMethod):
        return found
    reward = "model" if _num_reward_models(run) else "program"
    return replace(found, reward=reward, sampler="server" if method.server else "engine")


def workload_of(run: Run) -> Workload:
    """Prompts and answers fill a row."""
    method, T = run.method, run.data.seq_len
    if isinstance(method, SampledMethod):
        return Workload(
            seq_len=T,
            prompts=method.prompts_per_step,
            group_size=method.group_size,
            prompt_tokens=T - method.max_new_tokens,
            answer_tokens=method.max_new_tokens,
            updates=method.updates_per_rollout,
        )
    rows = method.pairs_per_step if isinstance(method, DPO) else run.train.global_batch_rows
    return Workload(seq_len=T, rows=rows)


def _num_reward_models(run: Run) -> int:
    terms = run.method.rewards if isinstance(run.method, SampledMethod) else ()
    sources = [term.source for term in terms if term.source.startswith("model:")]
    return sum(len(source.split(",")) for source in sources)


def _apart(run: Run) -> Run:
    """With a copy of its own for each model, on the GPUs that train."""
    method = run.method
    named = {"reference": "separate", "critic": "separate"}
    update = {key: value for key, value in named.items() if hasattr(method, key)}
    return run.model_copy(
        update={
            "model": run.model.model_copy(update={"head": "lm"}),
            "method": method.model_copy(update=update),
        }
    )
