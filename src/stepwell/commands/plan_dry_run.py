"""`stepwell plan --dry-run`: what the real program holds and sends, beside what was predicted."""

from __future__ import annotations

import sys
from typing import Any

from stepwell.config import Run
from stepwell.hardware import GIB
from stepwell.plan.cluster import Cluster

ON_HOST = "on the host, "  # as in `dryrun`, which imports torch
ITEMS = ("parameters", "gradients", "optimizer", "activations", "peak")


def count(run: Run, world: int, machines: Cluster) -> tuple[Any, list[Any]]:
    """One step on fake ranks, and its differences from what is predicted of the same ranks, both
    eager: a dry run does not compile. Imports torch; says on stderr what it is at. Raises
    ConfigError for an impossible layout."""
    from stepwell.plan.comms.collectives import collectives
    from stepwell.plan.dryrun.scaled import dry_run_scaled
    from stepwell.plan.job import job_of

    found = dry_run_scaled(run, world, machines.gpus_per_node, tell=tell)
    run = run.model_copy(update={"layout": run.layout.model_copy(update={"compile": False})})
    job, ranks = job_of(run, world, machines), [rank.pp_rank for rank in found.ranks]
    ledgers = {rank: ledger_of(run, world, rank) for rank in ranks}
    return found, found.against(ledgers, {rank: collectives(job, rank) for rank in ranks})


def ledger_of(run: Run, world: int, pp_rank: int = 0) -> Any:
    from stepwell.plan.memory.ledger import predict_rank

    return predict_rank(run, world, pp_rank, device="cuda")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def as_json(found: Any, differences: list[Any]) -> dict[str, Any]:
    rows = [one._asdict() for one in differences]
    return {**found.as_json(), "predicted_and_counted": rows}


def lines(found: Any, differences: list[Any]) -> list[str]:
    """A table of memory by pipeline rank, and of what the busiest one sends: counted, predicted."""
    rows = [
        "",
        f"Dry run: one step of the real program on {found.world:,} fake ranks, "
        f"{found.num_micro_batches:,} micro-batches, eager; GiB a rank",
        f"  {'pipeline rank':<15}{'':<11}" + "".join(f"{name:>13}" for name in ITEMS),
    ]
    for rank in found.ranks:
        items = {one.item: one for one in differences if one.pp_rank == rank.pp_rank}
        sizes = {name: getattr(rank, name) for name in ITEMS[:-1]} | {"peak": rank.peak_bytes}
        counted = "".join(f"{sizes[name] / GIB:>13,.3f}" for name in ITEMS)
        predicted = "".join(
            f"{items[name].predicted / GIB:>13,.3f}" if name in items else f"{'-':>13}"
            for name in ITEMS
        )
        rows.append(f"  {rank.pp_rank:<15}{'counted':<11}{counted}")
        rows.append(f"  {'':<15}{'predicted':<11}{predicted}")
    gathered = ", ".join(f"{rank.pp_rank}: {rank.gathered / GIB:,.3f}" for rank in found.ranks)
    rows.append(f"  gathered weights when the first backward pass begins, by rank: {gathered}")
    for one in differences:
        if one.item.startswith(ON_HOST):
            sizes = f"{one.counted / GIB:,.3f} counted, {one.predicted / GIB:,.3f} predicted"
            rows.append(f"  {one.item} of rank {one.pp_rank}: {sizes}")
    busiest = found.busiest
    rows += [f"  {name} are not compared: {why}" for name, why in busiest.not_compared.items()]
    calls: dict[str, int] = {}
    for one in busiest.issued:
        name = f"{one.group} {one.kind}, {one.phase}"
        calls[name] = calls.get(name, 0) + one.calls
    if found.world == 1:
        return rows
    rows.append(f"  {f'sent by pipeline rank {busiest.pp_rank}':<32}" + _heads())
    for one in differences:
        of_memory = one.item in ITEMS or one.item.startswith(ON_HOST)
        if one.pp_rank == busiest.pp_rank and not of_memory:
            sizes = f"{one.counted / GIB:>13,.3f}{one.predicted / GIB:>13,.3f}"
            rows.append(f"    {one.item:<30}{calls.pop(one.item, 0):>11,}{sizes}")
    if calls:
        few = ", ".join(f"{name} {number:,}" for name, number in calls.items())
        rows.append(f"    received, or of a few bytes (calls): {few}")
    return rows


def _heads() -> str:
    return f"{'calls':>11}{'counted':>13}{'predicted':>13}"
