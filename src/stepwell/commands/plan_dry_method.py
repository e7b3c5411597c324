"""`stepwell plan --method NAME --dry-run`: the method's own losses and all of its models on fake
ranks, counted beside what is predicted. Imports torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from stepwell.commands.plan_dry_run import ledger_of, tell
from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.hardware import GIB
from stepwell.parallel.rules import axis_sizes
from stepwell.plan.cluster import Cluster
from stepwell.plan.dryrun.dryrun import (
    Beside,
    Counted,
    Difference,
    DryRun,
    dry_run,
    full_rows,
    rows_of_rank,
)
from stepwell.plan.dryrun.rollout import Sampled, dry_rollout
from stepwell.plan.memory.models import ModelBytes, predict_models, reference_place
from stepwell.plan.methods.evaluated import OUTSIDE
from stepwell.plan.methods.recipes import as_configured, workload_of
from stepwell.plan.methods.rollouts import cache_bytes, weight_bytes
from stepwell.posttrain.policy import loss as grpo_loss
from stepwell.posttrain.ppo import critic
from stepwell.posttrain.ppo.loss import policy_loss
from stepwell.posttrain.ppo.placement import reference_run
from stepwell.posttrain.preference.losses import REFERENCE as REFERENCE_SUMS
from stepwell.posttrain.preference.losses import preference_loss
from stepwell.posttrain.preference.scored_references import with_stream
from stepwell.sections.methods import DPO, GRPO, PPO, SampledMethod
from stepwell.sections.model import LoraConfig
from stepwell.train.losses import Loss, document_counts

METHODS = ("ppo", "grpo", "dpo")
# A step of more holds no more than that of three, but for their rows of tokens.
MOST_MICRO_BATCHES = 3


def count(run: Run, world: int, machines: Cluster) -> tuple[DryRun, list[Difference]]:
    """A training step of every model that is trained, with the frozen ones there, and its
    differences from what is predicted, for a run without a pipeline. Raises ConfigError for an
    impossible layout."""
    run = run.model_copy(update={"layout": run.layout.model_copy(update={"compile": False})})
    axes = axis_sizes(run.layout, world)
    m = -(-rows_of_rank(run, axes) // run.train.micro_batch_rows)
    few = min(m, MOST_MICRO_BATCHES)
    others = models_beside(run)
    names = ", ".join(["the policy", *others])
    tell(f"dry run: {names}; {few} of {m} micro-batches")
    found = dry_run(
        run, world, None, loss_of(run), machines.gpus_per_node, few, partial(rows_of, run), others
    )
    rows = differences(run, world, found.ranks[0], others)
    if isinstance(run.method, SampledMethod):
        rows += rollout_differences(run, world, machines, others)
    return found, rows


# --- the program -------------------------------------------------------------------------------


def models_beside(run: Run) -> dict[str, Beside]:
    """The critic, the reference and reward models, where they are on a GPU while it trains."""
    method, found = run.method, {}
    if isinstance(method, PPO) and (alone := critic.critic_run(run)) is not None:
        found["critic"] = Beside(alone, critic.value_loss(method))
    if reference_place(run) == "separate":
        found["reference"] = Beside(reference_run(run))
    terms = method.rewards if isinstance(method, SampledMethod) else ()
    folders = [f for t in terms if t.source.startswith("model:") for f in t.source.split(",")]
    for i in range(len(folders)):
        name = "reward" if len(folders) == 1 else f"reward {i + 1}"
        found[name] = Beside(_reward_run(run), whole=True)
    return found


def _reward_run(run: Run) -> Run:
    """As large as the policy."""
    model = run.model.model_copy(update={"head": "score", "num_labels": 1, "init": None})
    layout = run.layout.model_copy(update={"tp": 1, "cp": 1, "dp_replicate": 1, "dp_shard": 1})
    return run.model_copy(update={"model": model, "layout": layout, "lora": LoraConfig()})


def loss_of(run: Run) -> Loss | None:
    """The policy's; None where it is the cross-entropy of its rows."""
    match run.method:
        case PPO() as method:
            return policy_loss(method, method.kl_coef)
        case GRPO() as method:
            return grpo_loss.policy_loss(method)
        case DPO() as method:
            return preference_loss(method.loss, run.precision.compute)
        case _:
            return None


def rows_of(asked: Run, run: Run, num_rows: int) -> Batch:
    """Full rows with what the losses read. run: as it is run."""
    batch = full_rows(run, num_rows)
    if isinstance(asked.method, DPO):
        return _pairs(batch)
    if not isinstance(asked.method, SampledMethod):
        return batch
    zeros = torch.zeros_like(batch.weights_BT)
    names = (grpo_loss.ADVANTAGES, grpo_loss.OLD, grpo_loss.SAMPLER, grpo_loss.REFERENCE)
    names += (critic.RETURNS, critic.OLD_VALUES) if isinstance(asked.method, PPO) else ()
    batch.extra.update(dict.fromkeys(names, zeros))
    return batch


def _pairs(batch: Batch) -> Batch:
    """A row's halves are a pair's answers."""
    T = batch.tokens_BT.shape[1]
    half = (torch.arange(T) >= T // 2).to(torch.int32)
    batch.docs_BT[:] = half
    batch.positions_BT[:] = torch.arange(T) - half * (T // 2)
    return with_stream(batch, REFERENCE_SUMS, torch.zeros_like(document_counts(batch)))


# --- what was predicted of it ------------------------------------------------------------------


def differences(run: Run, world: int, rank: Counted, others: dict[str, Beside]) -> list[Difference]:
    """State of each model, activations of the policy, and the worst moment of the whole."""
    ledger = ledger_of(run, world)
    models = predict_models(run, world)
    for name, one in others.items():
        if one.whole:
            models[name] = predict_models(one.run)["policy"]
            models[name] = ModelBytes(parameters=models[name].master // 2)
    optimizer, forward = ledger.phases["optimizer"], ledger.phases["forward"]
    casts = forward.working_copies if world == 1 else 0  # nothing is gathered: autograd keeps them
    rows = [
        ("policy's parameters", optimizer.parameters, rank.parameters),
        ("policy's gradients", ledger.gradient_bytes, rank.gradients),
        ("policy's optimizer", optimizer.optimizer, rank.optimizer),
    ]
    if "activations" not in rank.not_compared:
        held = forward.activations + forward.logits + casts
        rows.append(("policy's activations", held, rank.activations))
    for name, held in rank.beside.items():
        model = models[name]
        rows.append((f"{name}'s parameters", model.parameters + model.master, held.parameters))
        if others[name].loss is not None:
            rows.append((f"{name}'s gradients", model.gradients, held.gradients))
            rows.append((f"{name}'s optimizer", model.moments, held.optimizer))
    rows.append(("peak", _peak(run, world, models, others), rank.peak_bytes))
    return [Difference(0, *row) for row in rows]


def _peak(run: Run, world: int, models: dict[str, ModelBytes], others: dict[str, Beside]) -> int:
    """Of the models that are trained one after the other the worst step, beside what rests."""
    rest = {name: model.total - model.gradients for name, model in models.items()}
    here = {name: rest[name] for name in ("policy", *others)}
    steps = {"policy": ledger_of(run, world).peak_bytes}
    for name, one in others.items():
        if one.loss is not None:
            steps[name] = ledger_of(one.run, world).peak_bytes
    return max(step + sum(here.values()) - here[name] for name, step in steps.items())


def rollout_differences(
    run: Run, world: int, machines: Cluster, others: dict[str, Beside]
) -> list[Difference]:
    """Packing, sampling and scoring, counted, beside the plan's bytes of the same moments."""
    planned = as_configured(run, world, machines)
    assert planned is not None
    work, sampling = workload_of(run), planned.sampling
    asked = None
    if sampling is not None and not planned.servers.get("sampler"):
        asked = Sampled(sampling.slots, work.group_size, work.prompt_tokens, work.answer_tokens)
    tell("dry run: packing, sampling a token, scoring")
    of_run = partial(rows_of, run)
    found = dry_rollout(run, world, asked, of_run, others, machines.gpus_per_node)
    dims = planned.job.dims
    rows: list[tuple[str, float, int]] = [("sampler's copy", weight_bytes(dims), found.copy)]
    if asked is not None:
        rows.append(("keys and values", cache_bytes(dims, work, asked.slots), found.cache))
    for name, peak in found.peaks.items():
        if name in planned.parts:
            parts = planned.parts[name]
            rows.append((f"{name}, peak", sum(parts.values()) - parts[OUTSIDE], peak))
    return [Difference(0, *row) for row in rows]


# --- words ---------------------------------------------------------------------------------------


def as_json(found: DryRun, rows: list[Difference]) -> dict[str, Any]:
    return {**found.as_json(), "predicted_and_counted": [one._asdict() for one in rows]}


def lines(found: DryRun, rows: list[Difference]) -> list[str]:
    told = [
        "",
        f"Dry run: the real training step of every model on {found.world:,} fake ranks, "
        f"{found.num_micro_batches:,} micro-batches, eager; GiB a rank",
        f"  {'':<24}{'counted':>12}{'predicted':>12}{'':>10}",
    ]
    for one in rows:
        off = f"{100 * one.relative:+.1f} %" if one.counted else ""
        sizes = f"{one.counted / GIB:>12,.3f}{one.predicted / GIB:>12,.3f}"
        told.append(f"  {one.item:<24}{sizes}{off:>10}")
    if any(one.item == "keys and values" for one in rows):
        told.append("  of sampling the prompts, a first token and one at the answers' full length")
    else:
        told.append("  not run: sampling (no answers, or a server's), scoring without a sampler")
    return told
