"""Fits the planner's step time to published runs and predicts each source, and each family of
models, by a fit that has not seen it.

python benchmarks/plan_steptime.py [table.csv]    (about four minutes)
"""

import sys

from stepwell.plan.calibration.fit import report
from stepwell.plan.calibration.published import read_runs, shipped_table

if __name__ == "__main__":
    table = sys.argv[1] if len(sys.argv) > 1 else shipped_table()
    print("\n".join(report(read_runs(table))))
