"""`stepwell plan --dry-run`: what the real program holds and sends, beside what was predicted."""

from __future__ import annotations

import json
from typing import Any

from stepwell.config import Run
from stepwell.plan.memory.ledger import predict_rank

GIB = 2**30


def show(run: Run, world: int, as_json: bool) -> None:
    """One step on fake ranks; imports torch. Raises ConfigError for an impossible layout."""
    from stepwell.plan.dryrun.dryrun import dry_run

    found = dry_run(run, world)
    if as_json:
        print(json.dumps({"dry_run": found.as_json()}))
        return
    print("\n".join(lines(found, run, world)))


def lines(found: Any, run: Run, world: int) -> list[str]:
    """A table by pipeline rank: counted, and predicted for the same rank, both eager: a dry run
    does not compile."""
    eager = run.layout.model_copy(update={"compile": False})
    run = run.model_copy(update={"layout": eager})
    rows = [
        "",
        f"Dry run: one step of the real program on {found.world:,} fake ranks, "
        f"{found.num_micro_batches} micro-batches, eager",
        f"  {'pipeline rank':<15}{'':<12}{'parameters':>12}{'optimiser':>12}{'peak':>12}",
    ]
    for rank in found.ranks:
        ledger = predict_rank(run, world, rank.pp_rank, grouped=True)
        counted = (rank.parameters, rank.optimizer, rank.peak_bytes)
        predicted = (ledger.items.parameters, ledger.items.optimizer, ledger.peak_bytes)
        rows.append(f"  {rank.pp_rank:<15}{'counted':<12}" + _cells(counted))
        rows.append(f"  {'':<15}{'predicted':<12}" + _cells(predicted))
    busiest = found.busiest
    rows.append(f"  collectives of pipeline rank {busiest.pp_rank}:")
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for one in busiest.issued:
        calls, sent = totals.get((one.group, one.kind), (0, 0.0))
        totals[one.group, one.kind] = calls + one.calls, sent + one.calls * one.wire_bytes
    for (axis, kind), (calls, sent) in totals.items():
        rows.append(f"    {axis:<14}{kind:<16}{calls:>8,} calls{sent / GIB:>12,.2f} GiB")
    return rows


def _cells(values: tuple[int, ...]) -> str:
    return "".join(f"{n / GIB:>8,.2f} GiB" for n in values)
