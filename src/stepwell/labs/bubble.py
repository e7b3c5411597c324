"""The bubble of each pipeline schedule, on real ranks, beside theory.

Torch's schedules run as the engine runs them, with real messages between real gloo ranks, on stages
that take a known time: each pass sleeps. Every pass writes down when it began and ended, so idle
time is measured, and can be held against the formulas and against `plan/pipeline/bubble`, which
simulates the same order of actions. p ranks, v stages a rank, m micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.distributed.pipelining import PipelineStage

from stepwell.parallel.pipeline import SCHEDULES
from stepwell.parallel.schedules import stages_of_rank
from stepwell.plan.pipeline.actions import Action, schedule_actions
from stepwell.plan.pipeline.bubble import (
    Costs,
    Event,
    Timeline,
    bubble_share,
    simulate_schedule,
)
from stepwell.ranks import run_ranks
from stepwell.sections.layout import LayoutConfig

CLAIM = (
    "A pipeline of p ranks and m micro-batches idles for (p-1)/m of its time of work under GPipe "
    "and 1F1B, (p-1)/(v m) interleaved, (p-1)/(6 m) under ZBV, (p-1)/(3 m) under DualPipeV: "
    "measured to within 3 percent of the step's time, and the simulator tells the step of uneven "
    "stages to within 5 percent."
)
Case = tuple[str, int, int, int]  # schedule, p, m, v
CASES: tuple[Case, ...] = (
    ("gpipe", 4, 8, 1),
    ("1f1b", 4, 8, 1),
    ("interleaved-1f1b", 4, 8, 2),
    ("zbv", 4, 8, 2),
    ("dualpipev", 4, 8, 2),
    ("1f1b", 4, 16, 1),
    ("zbv", 4, 16, 2),
    ("1f1b", 2, 8, 1),
)
SMALL: tuple[Case, ...] = (("1f1b", 2, 4, 1), ("interleaved-1f1b", 2, 4, 2), ("zbv", 2, 4, 2))
UNIT_S = 0.12  # a rank's forward pass of one micro-batch; its backward pass takes twice as long
REPEATS = 4  # steps, of which the fastest counts: what else runs on the machine only adds
BUBBLE_WITHIN, STEP_WITHIN = 0.03, 0.05


def measure(small: bool = False) -> dict[str, Any]:
    """`cases`: for each, what was measured and what was foretold."""
    even = [(case, False) for case in (SMALL if small else CASES)]
    uneven = [(case, True) for case in (SMALL[:1] if small else CASES[1:3])]
    cases = [*even, *uneven]
    found: dict[int, dict[str, Any]] = {}
    for p in sorted({case[1] for case, _ in cases}):  # one launch for all cases of p ranks
        mine = [i for i, (case, _) in enumerate(cases) if case[1] == p]
        asked = [(cases[i][0], case_costs(cases[i][0], cases[i][1], UNIT_S)) for i in mine]
        timelines = measured_timelines(p, asked)
        for i, (case, costs), timeline in zip(mine, asked, timelines, strict=True):
            found[i] = compare(case, costs, timeline, cases[i][1])
    return {"unit_s": UNIT_S, "cases": [found[i] for i in range(len(cases))]}


def check(numbers: dict[str, Any]) -> list[str]:
    wrong = []
    for row in numbers["cases"]:
        name = f"{row['schedule']} p={row['p']} m={row['m']} v={row['v']}"
        name += " with uneven stages" if row["uneven"] else ""
        if not row["same_order"]:
            wrong.append(f"{name}: ranks did not do what the planner writes down")
        if row["peak_in_flight"] != row["peak_in_flight_foretold"]:
            wrong.append(f"{name}: {row['peak_in_flight']} micro-batches at once on the ranks")
        # shares of the step, which is 1 + bubble times the work
        measured, foretold = (b / (1 + b) for b in (row["bubble"], row["bubble_foretold"]))
        if abs(measured - foretold) > BUBBLE_WITHIN:
            wrong.append(f"{name}: idle {measured:.1%} of the step, not {foretold:.1%}")
        if abs(row["step_s"] / row["step_s_foretold"] - 1) > STEP_WITHIN:
            wrong.append(f"{name}: {row['step_s']:.3f} s, not {row['step_s_foretold']:.3f} s")
    return wrong


def plot(numbers: dict[str, Any]) -> Figure:
    rows = numbers["cases"]
    figure = Figure(figsize=(7.5, 0.42 * len(rows) + 1), layout="constrained")
    axis = figure.subplots()
    places = range(len(rows))
    axis.barh(places, [100 * row["bubble"] for row in rows], height=0.6, label="measured")
    foretold = [100 * row["bubble_foretold"] for row in rows]
    axis.plot(foretold, places, "k|", markersize=16, label="foretold")
    names = [
        f"{row['schedule']} p={row['p']} m={row['m']}{', uneven' * row['uneven']}" for row in rows
    ]
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set_xlabel("idle time, % of the time of work")
    axis.legend(fontsize="small")
    return figure


def case_costs(case: Case, uneven: bool, unit_s: float) -> Costs:
    """Of even stages, a rank's all together take unit_s; uneven: the last takes half as long again,
    as with a head on it."""
    _, p, _, v = case
    each = (unit_s / v,) * (p * v - 1) + (unit_s / v * (1.5 if uneven else 1),)
    return Costs(each, each, each)


def compare(case: Case, costs: Costs, measured: Timeline, uneven: bool) -> dict[str, Any]:
    schedule, p, m, v = case
    orders = [[event.action.key for event in measured.of_rank(rank)] for rank in range(p)]
    planned = [[action.key for action in row] for row in schedule_actions(schedule, p, m, v)]
    foretold = simulate_schedule(schedule, p, m, v, costs)
    return {
        "schedule": schedule,
        "p": p,
        "m": m,
        "v": v,
        "uneven": uneven,
        "bubble": measured.bubble_share,
        "bubble_foretold": foretold.bubble_share if uneven else bubble_share(*case),
        "step_s": measured.total_s,
        "step_s_foretold": foretold.total_s,
        "same_order": orders == planned,
        "peak_in_flight": measured.peak_in_flight_of_ranks,
        "peak_in_flight_foretold": foretold.peak_in_flight_of_ranks,
    }


def measured_timelines(p: int, asked: Sequence[tuple[Case, Costs]]) -> list[Timeline]:
    """Of each case the fastest of a few steps on p real ranks, from its first action to its
    last."""
    ranks = run_ranks(_all_cases, p, list(asked), timeout_s=1200.0)
    found = []
    for i, ((_, _, _, v), _) in enumerate(asked):
        steps = [_joined([rank[i][step] for rank in ranks], p * v) for step in range(REPEATS)]
        found.append(min(steps, key=lambda step: step.total_s))
    return found


Record = tuple[str, int, int, float, float]


def _joined(rows: list[list[Record]], num_stages: int) -> Timeline:
    start = min(row[0][3] for row in rows)
    events = [
        Event(Action(kind, stage, i), rank, begin - start, end - start, None)  # type: ignore[arg-type]
        for rank, row in enumerate(rows)
        for kind, stage, i, begin, end in row
    ]
    return Timeline(tuple(events), len(rows), num_stages)


# --- on each rank ----------------------------------------------------------------------------


class _Sleeping(PipelineStage):
    """Takes the time that its costs say, and writes down when. The clock is the machine's, the same
    in all processes."""

    costs: Costs
    records: list[Record]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        found = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._took("F", fwd_chunk_id, begin)
        return found

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any
    ) -> None:
        begin = time.perf_counter()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward=full_backward, **kwargs)
        self._took("B" if full_backward else "I", bwd_chunk_id, begin)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._took("W", bwd_chunk_id, begin)

    def _took(self, kind: Any, micro_batch: int, begin: float) -> None:
        """Sleeps for what is left of the action's time."""
        action = Action(kind, self.stage_index, micro_batch)
        end = begin + self.costs.of(action)
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        record = (kind, self.stage_index, micro_batch, begin, time.perf_counter())
        self.records.append(record)


def _all_cases(asked: list[tuple[Case, Costs]]) -> list[list[list[Record]]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return [_steps(case, costs) for case, costs in asked]
    finally:
        dist.destroy_process_group()


def _steps(case: Case, costs: Costs) -> list[list[Record]]:
    """This rank's records of each step."""
    (schedule, p, m, v), rank = case, dist.get_rank()
    layout = LayoutConfig.model_validate(
        {"pp": p, "pp_schedule": schedule, "pp_stages_per_rank": v}
    )
    records: list[Record] = []
    stages = [_stage(index, p * v, costs, records) for index in stages_of_rank(rank, layout)]
    run = SCHEDULES[schedule](stages if v > 1 else stages[0], m, loss_fn=_total, scale_grads=False)
    inputs = [torch.ones(m, 1)] if 0 in stages_of_rank(rank, layout) else []
    found = []
    for _ in range(REPEATS + 1):  # the first one gets to know its neighbours
        records.clear()
        dist.barrier()
        run.step(*inputs, target=torch.zeros(m, 1), return_outputs=False)
        found.append(list(records))
        for stage in stages:
            stage.clear_runtime_states()
    return found[1:]


def _stage(index: int, number: int, costs: Costs, records: list[Record]) -> _Sleeping:
    x = torch.ones(1, 1, device="meta", requires_grad=index > 0)
    y = torch.ones(1, 1, device="meta", requires_grad=True)
    stage = _Sleeping(
        torch.nn.Linear(1, 1), index, number, torch.device("cpu"), input_args=(x,), output_args=(y,)
    )
    stage.costs, stage.records = costs, records
    return stage


def _total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()
