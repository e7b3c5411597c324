"""Fits the planner's step time to published runs, and predicts each source, and each family of
models, by a fit that has not seen it. Scores the shipped coefficients on runs outside the table.

python benchmarks/plan_steptime.py [table.csv]    (about four minutes)
python benchmarks/plan_steptime.py --outside      (seconds: only the last part)
"""

import sys
from pathlib import Path

from stepwell.plan.calibration.fit import report
from stepwell.plan.calibration.table import read_runs, shipped_table
from stepwell.plan.calibration.validation import Prediction, error_lines, sweep_lines, validate

# Well-known runs that are not in the shipped table, in its form.
OUTSIDE = Path(__file__).with_name("plan_outside_runs.csv")


def outside_lines() -> list[str]:
    found = validate(OUTSIDE)
    return [
        *error_lines("outside the table", found.step_errors()),
        *error_lines("outside the table, by source", found.step_errors(lambda r: r.source_key)),
        *sweep_lines(found.sweeps()),
        *map(_row, found.predictions),
    ]


def _row(p: Prediction) -> str:
    layout, job = p.run.job.layout, p.run.job
    axes = f"{layout.num_gpus} {job.cluster.name}, tp {layout.tp} pp {layout.pp} cp {layout.cp}"
    what = f"{p.run.row_id} {job.dims.name}, {axes}, micro-batches of {layout.micro_batch_rows}"
    error = 100 * (p.step_error or 0.0)
    return f"  {what:<84}{p.run.step_s:>9.2f} s{p.step_s:>9.2f} s{error:>+6.0f} %"


if __name__ == "__main__":
    if "--outside" not in sys.argv:
        table = sys.argv[1] if len(sys.argv) > 1 else shipped_table()
        print("\n".join(report(read_runs(table))))
    print("\n".join(outside_lines()))
