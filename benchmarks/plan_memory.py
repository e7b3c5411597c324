"""How near the planner's memory ledger comes to published measurements; fits its coefficients anew.

python benchmarks/plan_memory.py [table.csv]
"""

import sys

from stepwell.plan.calibration.memory import report
from stepwell.plan.calibration.table import read_runs, shipped_table

if __name__ == "__main__":
    table = sys.argv[1] if len(sys.argv) > 1 else shipped_table()
    print("\n".join(report(read_runs(table))))
