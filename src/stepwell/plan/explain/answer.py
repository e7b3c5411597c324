"""What a plan says, as values and as JSON with stable keys: those of `metrics.jsonl` where a run
measures the same. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stepwell.config import Run
from stepwell.plan.comms.host_link import traffic
from stepwell.plan.explain.knobs import Knob
from stepwell.plan.explain.reasons import Alternative, Explanation
from stepwell.plan.measured.gap import Gap
from stepwell.plan.measured.shown import comparison_json
from stepwell.plan.methods.evaluated import Evaluated
from stepwell.plan.search.candidates import Candidate, Ranking
from stepwell.plan.search.runs import settings_of, short
from stepwell.plan.search.space import REASONS, Task
from stepwell.plan.steptime.waterfall import CONVENTION, waterfall

MODULES = ("norms", "attention", "mlp")
BETWEEN = "between blocks"


@dataclass(frozen=True)
class Searched:
    """batches: searches with other batches. training_tokens: of the whole training, if known.
    assumed: what nobody said. gap: of a measured step to that of the best layout. together: knobs
    one after the other. fastest: with nothing held fixed."""

    ranking: Ranking
    explanation: Explanation
    pareto: tuple[Candidate, ...]
    batches: tuple[Ranking, ...]
    knobs: tuple[Knob, ...]
    training_tokens: int | None = None
    assumed: tuple[str, ...] = ()
    gap: Gap | None = None
    together: tuple[Knob, ...] = ()
    fastest: Candidate | None = None

    @property
    def best(self) -> Candidate:
        return self.ranking.best

    @property
    def step_s(self) -> float:
        return self.best.step_s


@dataclass(frozen=True)
class Review:
    """A run as it is configured. together: knobs one after the other. fastest: the best layout that
    a search finds for the same model, batch and GPUs. assumed: what nobody said. method: all models
    and the whole step of one that has several; `candidate` is then the policy's training."""

    run: Run
    task: Task
    candidate: Candidate
    knobs: tuple[Knob, ...]
    together: tuple[Knob, ...]
    fastest: Candidate | None
    gap: Gap | None
    assumed: tuple[str, ...]
    method: Evaluated | None = None

    @property
    def fits(self) -> bool:
        return self.candidate.fits if self.method is None else self.method.fits

    @property
    def step_s(self) -> float:
        return self.candidate.step_s if self.method is None else self.method.step_s


def candidate_json(found: Candidate, full: bool = True) -> dict[str, Any]:
    """The layout and its numbers; full: with what they are made of."""
    layout, step = found.layout, found.step
    values: dict[str, Any] = {
        "layout": layout_json(found),
        "text": short(layout),
        "fits": found.fits,
        "memory/peak_bytes": round(found.peak_bytes),
        "memory/usable_bytes": found.job.cluster.accelerator.memory_bytes,
        "memory/headroom_bytes": round(found.headroom_bytes),
        "time/step_s": step.total_s,
        "comm/exposed_s": step.exposed_s,
        "bubble_share": step.bubble_share,
        "mfu": step.mfu,
        "hfu": step.hfu,
        "speed/tokens_per_s": found.tokens_per_s,
        "speed/tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "runnable": found.runnable,
    }
    if found.not_in_engine:
        values["not_in_engine"] = found.not_in_engine
    if full:
        values |= {
            "memory/items": {k: round(n) for k, n in memory_items(found).items()},
            "memory/activations": {k: round(n) for k, n in activation_items(found).items()},
            "host": found.memory.host.as_json(),
            "memory/phase": found.exact.phase if found.exact else found.memory.phase,
            "memory/pp_rank": found.memory.pp_rank,
            "time/parts": step.parts,
            "waterfall": [loss._asdict() for loss in waterfall(step)],
            "mfu_convention": CONVENTION,
            "traffic": traffic_json(found),
        }
        if not found.not_in_engine:
            values["settings"] = settings_of(layout)
    return values


def layout_json(found: Candidate) -> dict[str, Any]:
    layout = found.layout
    keys = (
        *("tp", "cp", "pp", "ep", "dp_replicate", "dp_shard", "zero", "reshard", "schedule"),
        *("stages_per_rank", "micro_batch_rows", "num_micro_batches", "global_batch_rows"),
        *("seq_len", "recompute", "precision", "recipe", "compiled", "num_gpus"),
        *("offload_optimizer", "offload_parameters", "offload_activations"),
    )
    return {key: getattr(layout, key) for key in keys}


def memory_items(found: Candidate) -> dict[str, float]:
    """Bytes of a GPU by what holds them, which add up to the peak."""
    items = dict(found.memory.items) if found.exact is None else dict(found.exact.items.named())
    items = {name: n for name, n in items.items() if n}
    held = found.memory
    return {
        **items,
        "fragmentation": held.fragmentation,
        "driver and libraries": held.context,
        "communicators": held.communicators,
    }


def activation_items(found: Candidate) -> dict[str, float]:
    """Bytes of activations by module, which add up to those of `memory_items`. The closed form says
    which module keeps what under the layout's recomputation, the engine's ledger how much there is
    in all."""
    held = found.memory
    modules = {name: held.items.get(name, 0.0) for name in MODULES}
    if found.exact is None:
        return {**modules, BETWEEN: held.items.get("residual", 0.0)}
    there, all_of_them = found.exact.items.activations, sum(modules.values())
    alike = held.phase == found.exact.phase and all_of_them <= there
    share = 1.0 if alike or not all_of_them else there / all_of_them
    modules = {name: share * n for name, n in modules.items()}
    return {**modules, BETWEEN: max(0.0, there - sum(modules.values()))}


def traffic_json(found: Candidate) -> list[dict[str, Any]]:
    """By axis and link, of the rank that sends the most, in one step; and what offload moves."""
    return [
        {"axis": axis, "link": link, "calls": total.calls, "wire_bytes": round(total.wire_bytes)}
        for (axis, link), total in traffic(found.job).items()
    ]


def as_json(searched: Searched, most: int) -> dict[str, Any]:
    ranking, explanation = searched.ranking, searched.explanation
    task = ranking.task
    values = {
        "model": asdict(task.dims) | {"parameters": task.dims.parameters()},
        "cluster": asdict(task.cluster),
        "num_gpus": task.num_gpus,
        "seq_len": task.seq_len,
        "global_batch_tokens": task.tokens,
        "pins": task.pins.given(),
        "assumed": list(searched.assumed),
        **candidate_json(searched.best),
        "offload": list(ranking.offload),
        "search": {
            "meshes": ranking.num_meshes,
            "layouts": ranking.num_layouts,
            "timed": ranking.num_timed,
            "seconds": ranking.seconds,
            "refused_meshes": refused_json(ranking.refused_meshes),
            "refused": refused_json(ranking.refused),
        },
        "reasons": [
            {
                "axis": reason.axis,
                "question": reason.question,
                "value": reason.value,
                "text": reason.text,
                "alternatives": [_alternative(a) for a in reason.alternatives],
            }
            for reason in explanation.reasons
        ],
        "binding": explanation.binding.name,
        "reliefs": [
            {
                "without": relief.name,
                "time/step_s": relief.step_s,
                "text": short(relief.layout) if relief.layout else None,
            }
            for relief in explanation.reliefs
        ],
        "scenarios": [
            {
                "name": s.name,
                "time_per_token": None if math.isinf(s.per_token) else s.per_token,
                "changes": s.changes,
                "best": candidate_json(s.best, full=False) if s.best else None,
            }
            for s in explanation.scenarios
        ],
        "runners_up": [candidate_json(c, full=False) for c in explanation.runners_up[:most]],
        "ranked": [candidate_json(c, full=False) for c in ranking.found[:most]],
        "pareto": [candidate_json(c, full=False) for c in searched.pareto],
        "batches": [
            candidate_json(other.found[0], full=False) for other in searched.batches if other.found
        ],
        "knobs": knobs_json(searched.knobs),
        "together": knobs_json(searched.together),
    }
    if searched.fastest is not None:
        values["fastest"] = candidate_json(searched.fastest, full=False)
    if searched.training_tokens:
        values["training"] = training(searched.best, searched.training_tokens)
    if searched.gap is not None:
        values["measured"] = gap_json(searched.gap)
    return values


def refused_json(refused: Any) -> dict[str, Any]:
    return {name: {"count": n, "rule": REASONS[name]} for name, n in refused.most_common()}


def _alternative(alternative: Alternative) -> dict[str, Any]:
    alone, best = alternative.alone, alternative.best
    return {
        "value": alternative.label,
        "fits": alone.fits,
        "broken": alone.broken or None,
        "memory/peak_bytes": round(alone.peak_bytes) if alone.step else None,
        "time/step_s": alone.step_s if alone.step else None,
        "best": candidate_json(best, full=False) if best else None,
    }


def knobs_json(knobs: Sequence[Knob]) -> list[dict[str, Any]]:
    return [
        {
            "name": knob.name,
            "setting": knob.setting,
            "gain": knob.gain,
            "time/step_s": knob.step_s,
            "memory/peak_bytes": round(knob.changed.peak_bytes),
            "works": knob.works,
            "refused": knob.changed.broken or knob.refused or None,
            "alters": knob.alters or None,
        }
        for knob in knobs
    ]


def training(best: Candidate, tokens: int) -> dict[str, float]:
    """The whole training at the predicted speed, with nothing lost to restarts."""
    seconds = tokens / best.tokens_per_s
    return {
        "tokens": tokens,
        "steps": math.ceil(tokens / best.layout.global_batch_tokens),
        "days": seconds / 86400,
        "gpu_hours": seconds / 3600 * best.layout.num_gpus,
    }


def review_json(review: Review) -> dict[str, Any]:
    task = review.task
    values = {
        "name": review.run.name,
        "method": review.run.method.kind,
        "model": asdict(task.dims) | {"parameters": task.dims.parameters()},
        "cluster": asdict(task.cluster),
        "num_gpus": task.num_gpus,
        "global_batch_tokens": task.tokens,
        "assumed": list(review.assumed),
        **(candidate_json(review.candidate) if review.method is None else _of_method(review)),
        "knobs": knobs_json(review.knobs),
        "together": knobs_json(review.together),
        "fastest": candidate_json(review.fastest, full=False) if review.fastest else None,
    }
    if review.method is not None:
        values["all_models"] = review.method.as_json()
    if review.gap is not None:
        values["measured"] = gap_json(review.gap)
    return values


def _of_method(review: Review) -> dict[str, Any]:
    """Of all models and the whole step; what is of the policy's training alone has a name of its
    own."""
    method, policy = review.method, candidate_json(review.candidate)
    assert method is not None
    held = method.parts[method.phase]
    return {
        **{key: policy[key] for key in ("layout", "text", "runnable", "settings")},
        "fits": method.fits,
        "memory/peak_bytes": round(method.peak),
        "memory/usable_bytes": round(method.limit),
        "memory/headroom_bytes": round(method.limit - method.peak),
        "memory/phase": method.phase,
        "memory/items": {name: round(n) for name, n in held.items()},
        "time/step_s": method.step_s,
        "time/parts": method.times,
        "policy_training": policy,
    }


def gap_json(found: Gap) -> dict[str, Any]:
    values = {
        "source": found.source,
        "time/step_s": found.measured_s,
        "predicted_s": found.predicted_s,
        "suspects": [
            {
                "name": suspect.name,
                "text": suspect.text,
                "look": suspect.look,
                "likely": suspect.likely,
                "eased_by": knobs_json(suspect.eased_by),
            }
            for suspect in found.suspects
        ],
    }
    if found.gains:
        values["gains"] = {name: list(both) for name, both in found.gains.items()}
    if found.comparison is not None:
        values |= comparison_json(found.comparison)
    return values
