"""400 billion parameters on 1,024 H100s: each axis justified by what else it could be.

The planner searches the layouts that the engine runs. Each axis of the best is then halved,
doubled or switched off alone, and the alternatives are priced: memory that is not there, links that
are left, seconds that a step grows. The bubble that the planner reckons with is measured on real
ranks (the lab `bubble`).
"""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure

from stepwell.labs import bubble
from stepwell.plan.cluster import cluster
from stepwell.plan.dims import find_model
from stepwell.plan.explain.answer import candidate_json
from stepwell.plan.explain.reasons import Explanation, explain
from stepwell.plan.search.candidates import Ranking
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.search import search

CLAIM = (
    "Of a 400B model's layout on 1,024 H100s, each axis is where it is because its neighbours do "
    "not fit, break a rule, or are slower: no value beside the chosen one is better, alone or with "
    "all else chosen anew. The pipeline's bubble, measured on real ranks, is the theory's."
)
NUM_GPUS, SEQ_LEN, BATCH_TOKENS = 1024, 8192, 16 << 20
# Llama 3's largest with 124 blocks, which is 400 billion.
DIMENSIONS = {"model.num_layers": 124}
GIB = 2**30


def measure(small: bool = False) -> dict[str, Any]:
    """small: without the searches that choose all else anew, and without real ranks."""
    model, machines = find_model("llama3-405b", DIMENSIONS), cluster("h100-sxm")
    prices = Prices(model.dims, machines, model.config)
    ranking = search(
        model.dims, machines, NUM_GPUS, SEQ_LEN, BATCH_TOKENS, slack=1.02, prices=prices
    )
    explanation = explain(ranking, prices, deep=not small)
    return {
        "parameters": model.dims.parameters(),
        "num_gpus": NUM_GPUS,
        "gpu_bytes": machines.accelerator.memory_bytes,
        "best": candidate_json(ranking.best),
        "axes": axes_of(ranking, explanation),
        "reasons": {reason.axis: reason.text for reason in explanation.reasons},
        "num_layouts": ranking.num_layouts,
        "num_timed": ranking.num_timed,
        "bubble": None if small else bubble.measure(),
    }


def axes_of(ranking: Ranking, explanation: Explanation) -> list[dict[str, Any]]:
    """A row for each alternative; seconds are None where the layout cannot be."""
    rows = []
    for reason in explanation.reasons:
        for other in reason.alternatives:
            alone, best = other.alone, other.best
            rows.append(
                {
                    "axis": reason.axis,
                    "chosen": reason.value,
                    "instead": other.label,
                    "peak_bytes": alone.peak_bytes if alone.step else None,
                    "step_s": alone.step_s if alone.step else None,
                    "fits": alone.fits,
                    "broken": alone.broken,
                    "best_step_s": best.step_s if best else None,
                }
            )
    return rows


def check(numbers: dict[str, Any]) -> list[str]:
    best, wrong = numbers["best"], []
    best_s = best["time/step_s"]
    if best["memory/peak_bytes"] > numbers["gpu_bytes"]:
        wrong.append(f"the best layout needs {best['memory/peak_bytes'] / GIB:.1f} GiB")
    if not best["runnable"]:
        wrong.append("the engine does not run the best layout")
    for row in numbers["axes"]:
        alone = row["step_s"] if row["fits"] and not row["broken"] else None
        for seconds, how in ((alone, "alone"), (row["best_step_s"], "with all else anew")):
            # What breaks a rule of the topology may be searched for on demand.
            if seconds is not None and not row["broken"] and seconds < 0.999 * best_s:
                wrong.append(f"{row['instead']} {how} takes {seconds:.2f} s, not {best_s:.2f} s")
    if numbers["bubble"] is not None:
        wrong += bubble.check(numbers["bubble"])
    return wrong


def plot(numbers: dict[str, Any]) -> Figure:
    """Each alternative: its memory against the accelerator's, its step against the best."""
    rows, best = numbers["axes"], numbers["best"]
    names = [f"{row['chosen']}: {row['instead']}" for row in rows]
    places = list(range(len(rows)))
    figure = Figure(figsize=(10, 0.3 * len(rows) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    memory = [(row["peak_bytes"] or math.nan) / GIB for row in rows]
    has = numbers["gpu_bytes"] / GIB
    # A bar that is many times too long would hide the others.
    colors = ["tab:green" if row["fits"] else "tab:red" for row in rows]
    left.barh(places, [min(x, 3 * has) for x in memory], color=colors, height=0.6)
    left.axvline(has, color="black", linestyle="--", linewidth=1)
    left.set_xlabel(f"GiB a GPU (it has {has:.1f}; cut off at {3 * has:.0f})")
    left.set_yticks(places, names, fontsize="small")
    left.invert_yaxis()
    best_s = best["time/step_s"]
    slower = [100 * ((row["step_s"] or math.nan) / best_s - 1) for row in rows]
    colors = ["tab:blue" if row["fits"] and not row["broken"] else "lightgray" for row in rows]
    right.barh(places, slower, color=colors, height=0.6, label="that axis alone")
    anew = [
        (100 * (row["best_step_s"] / best_s - 1), i)
        for i, row in enumerate(rows)
        if row["best_step_s"]
    ]
    right.plot(
        [x for x, _ in anew], [i for _, i in anew], "kd", markersize=4, label="all else anew"
    )
    right.axvline(0, color="black", linewidth=1)
    right.set_xlabel("% more time a step (gray: cannot be)")
    right.legend(fontsize="small")
    billions = numbers["parameters"] / 1e9
    figure.suptitle(
        f"{billions:.0f}B on {numbers['num_gpus']:,} H100: {best['text']}\n"
        f"{best_s:.1f} s a step, MFU {100 * best['mfu']:.0f} %, "
        f"{best['memory/peak_bytes'] / GIB:.0f} GiB",
        fontsize="medium",
    )
    return figure
