"""400 billion parameters on 1,024 H100s: each axis justified by what else it could be.

The planner searches the layouts that the engine runs. Each axis of the best is then halved,
doubled or switched off alone, and the alternatives are priced: memory that is not there, links that
are left, seconds that a step grows. What could contradict it from outside: the same prices, put to
layouts whose steps Meta has measured; the engine's own program, run on fake ranks; and the bubble
of real ranks (the lab `bubble`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from stepwell.config import Run
from stepwell.labs import bubble
from stepwell.plan.cluster import Cluster, cluster
from stepwell.plan.comms.collectives import collectives
from stepwell.plan.dims import Subject, find_model
from stepwell.plan.explain.answer import candidate_json
from stepwell.plan.explain.page import Rows, filled, of_candidate
from stepwell.plan.explain.reasons import Explanation, change_text, explain
from stepwell.plan.job import Arrangement, Dims, Job, job_of
from stepwell.plan.memory.ledger import predict_rank
from stepwell.plan.search.candidates import Candidate, Ranking, complexity
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.runs import run_of
from stepwell.plan.search.search import SAME, search
from stepwell.plan.search.space import Pins, Task
from stepwell.plan.steptime.step import predict_step
from stepwell.plan.units import seconds_text, size_text

CLAIM = (
    "Of a 400B model's layout on 1,024 H100s in bf16, each axis is where it is because each of its "
    "neighbours does not fit, leaves less than the margin, breaks a rule, is slower, or is as fast "
    "and no simpler, and so is the fastest with TP 8 and as many stages but no context ranks; and "
    "the prices that say so are within 10 % of the steps of 405B that Meta measured."
)
NUM_GPUS, SEQ_LEN, BATCH_TOKENS = 1024, 8192, 16 << 20
# Llama 3's largest with 124 blocks, which is 400 billion.
DIMENSIONS = {"model.num_layers": 124}
GIB = 2**30
# Llama 3 405B (2407.21783, table 4), 16M tokens in rows of 8,192, TP 8 x PP 16: data ranks, and the
# TFLOP/s of a GPU.
MEASURED = ((64, 430.0), (128, 400.0))
TOLERANCE = 0.10
# What the dry run is held to: state, and what is there besides.
COUNTED = {"parameters": 0.03, "gradients": 0.03, "optimizer": 0.03, "activations": 0.1}
COUNTED["peak"] = 0.1


def measure(small: bool = False) -> dict[str, Any]:
    """small: without the searches that choose all else anew, without the program on fake ranks, and
    without real ranks."""
    subject, machines = find_model("llama3-405b", DIMENSIONS), cluster("h100-sxm")
    prices = Prices(subject.dims, machines, subject.config)
    ranking = search(
        subject.dims, machines, NUM_GPUS, SEQ_LEN, BATCH_TOKENS, slack=1.02, prices=prices
    )
    explanation = explain(ranking, prices, deep=not small)
    return {
        "parameters": subject.dims.parameters(),
        "num_gpus": NUM_GPUS,
        "gpu_bytes": machines.accelerator.memory_bytes,
        "best": candidate_json(ranking.best),
        "searched_anew": not small,
        "axes": axes_of(ranking, explanation),
        "without_context": without_context(ranking, prices),
        "reasons": [
            {
                "axis": reason.axis,
                "question": reason.question,
                "value": reason.value,
                "lead": reason.lead,
                "told": list(reason.told),
            }
            for reason in explanation.reasons
        ],
        "num_layouts": ranking.num_layouts,
        "num_timed": ranking.num_timed,
        "measured_by_others": measured_by_others(machines),
        "dry_run": None if small else dry_run_of(subject, ranking.best, machines),
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
                    "simpler": simpler(alone.layout, ranking.best.layout),
                    "best_step_s": best.step_s if best else None,
                }
            )
    return rows


def simpler(layout: Arrangement | None, best: Arrangement) -> bool:
    """What decides between layouts that are as fast."""
    return layout is not None and complexity(layout) < complexity(best)


def without_context(ranking: Ranking, prices: Prices) -> dict[str, Any] | None:
    """What an expert asks first: the fastest with TP 8 and as many stages but no context ranks, all
    else chosen anew, or what comes nearest to fitting. None where the best has none."""
    if ranking.best.layout.cp == 1:
        return None
    pins = Pins(tp=8, cp=1, pp=ranking.best.layout.pp)
    sizes = (NUM_GPUS, SEQ_LEN, BATCH_TOKENS)
    held = search(ranking.task.dims, ranking.task.cluster, *sizes, pins, prices=prices)
    found = held.found[0] if held.found else held.closest
    return None if found is None else candidate_json(found, full=False) | {"fits": bool(held.found)}


def measured_by_others(machines: Cluster) -> list[dict[str, float]]:
    """TFLOP/s of a GPU as published, and as predicted of that layout (memory is not asked about:
    their program is not ours)."""
    dims = find_model("llama3-405b", {}).dims
    return [
        {
            "num_gpus": 8 * 16 * data_ranks,
            "published": published,
            "predicted": _tflops(dims, machines, data_ranks),
        }
        for data_ranks, published in MEASURED
    ]


def _tflops(dims: Dims, machines: Cluster, data_ranks: int) -> float:
    layout = Arrangement(
        seq_len=SEQ_LEN,
        micro_batch_rows=1,
        global_batch_rows=BATCH_TOKENS // SEQ_LEN,
        tp=8,
        pp=16,
        schedule="interleaved-1f1b",
        stages_per_rank=8,
        dp_shard=data_ranks,
        zero=1,
        reshard="never",
        reduce_every_micro_batch=False,
    )
    peak = machines.accelerator.bf16_flops_per_s
    assert peak is not None
    return predict_step(Job(dims, layout, machines)).mfu * peak / 1e12


def dry_run_of(subject: Subject, best: Candidate, machines: Cluster) -> list[dict[str, Any]]:
    """Bytes of a rank in a step of the engine's own program, and as the ledger has them."""
    from stepwell.plan.dryrun.scaled import dry_run_scaled  # torch

    assert subject.config is not None
    run = run_of(subject.config, best.layout.having(compiled=False))
    found = dry_run_scaled(run, NUM_GPUS, machines.gpus_per_node)
    ranks = [rank.pp_rank for rank in found.ranks]
    ledgers = {rank: predict_rank(run, NUM_GPUS, rank, device="cuda") for rank in ranks}
    sent = {rank: collectives(best.job, rank) for rank in ranks}
    rows = [one._asdict() for one in found.against(ledgers, sent)]
    return [row for row in rows if row["item"] in COUNTED]


def check(numbers: dict[str, Any]) -> list[str]:
    best, wrong = numbers["best"], []
    best_s = best["time/step_s"]
    if best["memory/peak_bytes"] > numbers["gpu_bytes"]:
        wrong.append(f"the best layout needs {best['memory/peak_bytes'] / GIB:.1f} GiB")
    if not best["runnable"]:
        wrong.append("the engine does not run the best layout")
    for row in numbers["axes"]:
        # What breaks a rule of the topology, or alters the numbers, is searched for on demand.
        if row["broken"] or row["axis"] == "precision":
            continue
        alone = row["step_s"] if row["fits"] else None
        for seconds, how in ((alone, "alone"), (row["best_step_s"], "with all else anew")):
            if seconds is not None and seconds < (1 - SAME) * best_s:
                wrong.append(f"{row['instead']} {how} takes {seconds:.2f} s, not {best_s:.2f} s")
        if is_tie(row, best_s) and row["simpler"]:
            wrong.append(f"{row['instead']} is as fast as {row['chosen']}, and simpler")
    other = numbers["without_context"]
    if other and other["fits"] and other["time/step_s"] < (1 - SAME) * best_s:
        wrong.append(f"{other['text']} takes {other['time/step_s']:.2f} s, not {best_s:.2f} s")
    for row in numbers["measured_by_others"]:
        if abs(row["predicted"] / row["published"] - 1) > TOLERANCE:
            wrong.append(
                f"{row['predicted']:.0f} TFLOP/s on {row['num_gpus']:,} GPUs, where "
                f"{row['published']:.0f} were measured"
            )
    for row in _held_to(numbers["dry_run"] or ()):
        if abs(row["predicted"] - row["counted"]) > COUNTED[row["item"]] * row["counted"]:
            wrong.append(
                f"{row['item']} of pipeline rank {row['pp_rank']}: {size_text(row['predicted'])}, "
                f"where the program holds {size_text(row['counted'])}"
            )
    if numbers["bubble"] is not None:
        wrong += bubble.check(numbers["bubble"])
    return wrong


def is_tie(row: dict[str, Any], best_s: float) -> bool:
    if not row["fits"] or row["broken"] or row["step_s"] is None:
        return False
    return abs(row["step_s"] / best_s - 1) <= SAME


def _held_to(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Activations only of pipeline ranks that hold many: the last keep one micro-batch."""
    most = max((row["counted"] for row in rows if row["item"] == "activations"), default=0)
    return [row for row in rows if row["item"] != "activations" or row["counted"] > most / 2]


# --- to look at ------------------------------------------------------------------------------


def page(numbers: dict[str, Any]) -> str:
    """One HTML page: the layout on the machines, the reasons, alternatives, what was checked."""
    subject, machines = find_model("llama3-405b", DIMENSIONS), cluster("h100-sxm")
    assert subject.config is not None
    model = {"model": subject.config.model_dump(exclude_none=True, exclude_defaults=True)}
    model["model"]["max_seq_len"] = max(subject.config.max_seq_len, SEQ_LEN)
    job = job_of(Run.parse(model, numbers["best"]["settings"]), NUM_GPUS, machines, "400B")
    prices = Prices(subject.dims, machines, subject.config)
    best = Candidate(job, prices.memory(job.layout), prices.time(job.layout))
    task = Task(job.dims, machines, NUM_GPUS, SEQ_LEN, job.layout.global_batch_rows)
    tables = [_alternatives(numbers), _first_question(numbers), _links(numbers), _others(numbers)]
    tables += [_counted(numbers), _bubbles(numbers)]
    found = of_candidate(best, task, "400B", tables)
    found["lead"] += (
        f" {numbers['num_layouts']:,} layouts were looked at, {numbers['num_timed']:,} fit and "
        "were timed."
    )
    found["reasons"] = numbers["reasons"]
    return filled(**found)


def _alternatives(numbers: dict[str, Any]) -> Rows:
    best_s = numbers["best"]["time/step_s"]
    rows = [
        (
            row["chosen"],
            row["instead"],
            size_text(row["peak_bytes"]) if row["peak_bytes"] else "",
            seconds_text(row["step_s"]) if row["step_s"] else "",
            _verdict(row, best_s, numbers["gpu_bytes"]),
            change_text(row["best_step_s"], best_s) if row["best_step_s"] else "",
        )
        for row in numbers["axes"]
    ]
    columns = ("chosen", "instead", "a GPU", "a step", "alone", "all else anew")
    note = "" if numbers["searched_anew"] else "With all else chosen anew they were not searched."
    return Rows("alternatives", "Each axis's neighbours", columns, rows, columns[2:4], note)


def _verdict(row: dict[str, Any], best_s: float, gpu_bytes: float) -> str:
    if row["broken"]:
        return row["broken"]
    if not row["fits"]:
        within = (row["peak_bytes"] or math.inf) <= gpu_bytes
        return "leaves less than the margin" if within else "does not fit"
    if is_tie(row, best_s):
        return f"as fast: a tie, which {row['chosen']} wins as the simpler layout"
    return change_text(row["step_s"], best_s)


def _first_question(numbers: dict[str, Any]) -> Rows:
    other, best = numbers["without_context"], numbers["best"]
    rows = [] if other is None else [_in_words(best, "chosen"), _in_words(other, "")]
    if other is not None:
        change = change_text(other["time/step_s"], best["time/step_s"])
        rows[1] = (*rows[1][:-1], change if other["fits"] else "does not fit")
    columns = ("layout", "a GPU", "a step", "verdict")
    title = "Why context ranks at all? The fastest with TP 8 and as many stages, but without"
    return Rows("without-context", title, columns, rows, columns[1:3])


def _in_words(found: dict[str, Any], verdict: str) -> tuple[str, ...]:
    held, step = size_text(found["memory/peak_bytes"]), seconds_text(found["time/step_s"])
    return found["text"], held, step, verdict


def _links(numbers: dict[str, Any]) -> Rows:
    """Which axes cross machines."""
    names = {"tp": "tensor (TP)", "cp": "context (CP)", "pp": "pipeline (PP)", "world": "all ranks"}
    names |= {"dp_shard": "data (DP), shards", "dp_replicate": "data (DP), replicas"}
    rows = [
        (
            names.get(row["axis"], str(row["axis"])),
            "between machines" if row["link"] == "network" else "within a machine",
            size_text(row["wire_bytes"]),
        )
        for row in numbers["best"]["traffic"]
    ]
    columns = ("axis", "its messages go", "sent by a GPU in a step")
    return Rows("links", "Which axes cross machines", columns, rows, columns[2:])


def _others(numbers: dict[str, Any]) -> Rows:
    rows = [
        (
            f"{row['num_gpus']:,}",
            f"{row['published']:.0f}",
            f"{row['predicted']:.0f}",
            f"{100 * (row['predicted'] / row['published'] - 1):+.1f} %",
        )
        for row in numbers["measured_by_others"]
    ]
    columns = ("H100s", "measured, TFLOP/s a GPU", "predicted", "error")
    note = (
        "Llama 3 405B, TP 8 x PP 16, 16M tokens a step (2407.21783, table 4), at the same prices."
    )
    return Rows("others", "What Meta measured", columns, rows, columns, note)


def _counted(numbers: dict[str, Any]) -> Rows:
    rows = [
        (
            str(row["pp_rank"]),
            row["item"],
            size_text(row["predicted"]),
            size_text(row["counted"]),
            f"{100 * (row['predicted'] / row['counted'] - 1):+.1f} %" if row["counted"] else "",
        )
        for row in numbers["dry_run"] or ()
    ]
    columns = ("pipeline rank", "what", "predicted", "counted", "error")
    note = "The engine's own step on fake ranks, not compiled."
    return Rows("counted", "What the program holds", columns, rows, columns[2:], note)


def _bubbles(numbers: dict[str, Any]) -> Rows:
    rows = [] if numbers["bubble"] is None else [(bubble.CLAIM, _held(numbers["bubble"]))]
    return Rows("bubble", "The pipeline's bubble, on real ranks", ("claim", "holds"), rows)


def _held(numbers: dict[str, Any]) -> str:
    return "; ".join(bubble.check(numbers)) or "yes"


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
    if anew:
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
