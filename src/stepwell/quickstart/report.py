"""What the quickstart's report shows, gathered from the folders of its stages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepwell.config import Run
from stepwell.diagnose.report import (
    Accuracy,
    Answer,
    Curve,
    Figure,
    Funnel,
    MemoryRow,
    ReportData,
    Sample,
    Speed,
    Stage,
    wsd_phases,
)
from stepwell.hardware import detect, peak_flops_per_s, software_versions
from stepwell.metrics import read_events, read_metrics, series
from stepwell.models.flops import flops_per_token

TRAINING = ("pretrain", "sft", "grpo")
NOTE = (
    "Chains of sums with numbers that no training problem has in any order ({count} held-out "
    "problems; {overlap} of them occur in training), answered greedily; bars show the share of "
    "right final answers with 95 % bootstrap intervals. Sampled at temperature 1: {sampled}."
)


def report_data(root: Path, stages: Iterable[str]) -> ReportData:
    """Every number comes from a stage's result or log under `root`."""
    done = {name: _read(root / "done" / f"{name}.json") for name in stages if name != "report"}
    runs = {name: Run.load(root / name / "run.toml") for name in TRAINING if name in done}
    logs = {name: read_metrics(root / name) for name in runs}
    first = next(iter(runs.values()))
    device = detect()
    peak, source = peak_flops_per_s(device, first.precision.compute)
    evaluation = done["evaluate"]
    return ReportData(
        title="Stepwell quickstart",
        summary=_summary(done),
        figures=_figures(evaluation),
        stages=[_stage(name, result, runs.get(name)) for name, result in done.items()],
        funnel=_funnel(done.get("curate")),
        curves=[_loss_curve(name, logs[name], runs[name]) for name in runs if name != "grpo"],
        rewards=_reward_curves(logs["grpo"]),
        accuracy=[
            Accuracy(
                stage=name,
                value=found["accuracy"],
                low=found["interval"][0],
                high=found["interval"][1],
                num_problems=evaluation["num_problems"],
            )
            for name, found in evaluation["stages"].items()
        ],
        accuracy_note=NOTE.format(
            count=evaluation["num_problems"],
            overlap=done["sft"]["overlap_with_heldout"],
            sampled=", ".join(
                f"{100 * found['accuracy_sampled']:.1f} % after {name}"
                for name, found in evaluation["stages"].items()
            ),
        ),
        speed=[
            Speed(name, *series(rows, "speed/tokens_per_s"), series(rows, "speed/mfu")[1])
            for name, rows in logs.items()
        ],
        peak_flops_per_s=peak,
        peak_source=source,
        flop_convention=flops_per_token(first.model, first.data.seq_len).convention,
        memory=_memory(done.get("pretrain")),
        memory_note="One pretraining step, counted from the allocator's events: weights and "
        "optimiser state, and the step's highest point with activations and gradients. The "
        "interpreter and its libraries are not in it.",
        samples=[
            Sample(
                found["prompt"],
                [Answer(a["stage"], a["text"], a["correct"]) for a in found["answers"]],
                found["expected"],
            )
            for found in evaluation["samples"]
        ],
        events=[
            {"run": name, **{key: value for key, value in event.items() if value != {}}}
            for name in runs
            for event in read_events(root / name)
        ],
        config={f"{name}/run.toml": (root / name / "run.toml").read_text("utf-8") for name in runs},
        versions=software_versions(),
        hardware=str(device),
    )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def _summary(done: dict[str, Any]) -> str:
    start = "Raw documents to a model that answers"
    if "pretrain" not in done:
        start = "A real pretrained model, post-trained to answer"
    return (
        f"{start}: {done['evaluate']['summary']}. Every second answer that fine-tuning saw shows "
        "its steps; reinforcement learning, rewarded for right answers only, finds that steps pay."
    )


def _figures(evaluation: dict[str, Any]) -> list[Figure]:
    low, high = evaluation["gain"]["interval"]
    figures = [
        Figure(
            "gain by reinforcement learning",
            f"{evaluation['gain']['points']:+.1f} points",
            f"95 % interval {low:+.1f} to {high:+.1f}",
        )
    ]
    bits = {name: found.get("bits_per_byte") for name, found in evaluation["stages"].items()}
    if bits.get("pretrain") is not None:
        note = f"{bits['grpo']:.3f} after grpo"
        figures.append(Figure("bits per byte, held-out text", f"{bits['pretrain']:.3f}", note))
    return figures


def _stage(name: str, result: dict[str, Any], run: Run | None) -> Stage:
    settings = {}
    if run is not None:
        settings = {
            "steps": result["steps"],
            "learning rate": run.optim.muon_lr if run.optim.kind == "muon" else run.optim.lr,
            "optimiser": run.optim.kind,
            "precision": run.precision.compute,
        }
    return Stage(name, result["seconds"], result.get("tokens") if run else None, settings,
                 result.get("summary", ""))  # fmt: skip


def _funnel(result: dict[str, Any] | None) -> Funnel | None:
    if result is None:
        return None
    return Funnel(
        result["documents_in"],
        result["dropped"],
        result["documents_kept"],
        result["kept_by_source"],
    )


def _loss_curve(name: str, rows: list[dict[str, Any]], run: Run) -> Curve:
    steps, losses = series(rows, "train/loss")
    held_steps, held = series(rows, "eval/loss")
    return Curve(
        f"Loss: {name}",
        steps,
        losses,
        "nats per token",
        phases=wsd_phases(run),
        others=[("held out", held_steps, held)] if held_steps else (),
    )


def _reward_curves(rows: list[dict[str, Any]]) -> list[Curve]:
    curves = [
        Curve("Reward", *series(rows, "reward/mean"), "exactly right", "sampled answers",
              percent=True),
        Curve("Answer length", *series(rows, "rollout/length"), "tokens", "mean"),
        Curve("Entropy", *series(rows, "train/entropy"), "nats per token", "policy"),
    ]  # fmt: skip
    return [curve for curve in curves if curve.steps]


def _memory(result: dict[str, Any] | None) -> list[MemoryRow]:
    if result is None:
        return []
    found = result["memory"]
    rows = [MemoryRow(name, *found[name]) for name in ("weights and optimiser", "peak of a step")]
    return rows + [MemoryRow(f"of it: {name}", size) for name, size in found["items"].items()]
