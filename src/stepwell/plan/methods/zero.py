"""A model under data parallelism and the ZeRO stages: what a GPU holds, what a step sends. No
torch.

Mixed precision with Adam, as ZeRO counts it (1910.02054, figure 1 and section 7): 2 bytes of weight
and 2 of gradient a parameter, 12 of float32 master and two moments. P parameters, n GPUs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from stepwell.hardware import GIB
from stepwell.plan.cluster import Cluster
from stepwell.plan.footprint.coefficients import SHIPPED as MEMORY
from stepwell.plan.footprint.footprint import footprint
from stepwell.plan.job import Arrangement, Dims, Job, Recompute
from stepwell.plan.memory.ledger import zero_bytes_per_parameter, zero_volume_in_parameters
from stepwell.plan.search.space import CHUNK_TOKENS
from stepwell.plan.steptime.coefficients import SHIPPED
from stepwell.plan.steptime.flows import ring_rate
from stepwell.plan.units import size_text
from stepwell.types import ConfigError

STAGES = (0, 1, 2, 3)
NAMES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
WEIGHTS, GRADIENTS, OPTIMIZER = 2, 2, 12  # bytes a parameter


@dataclass(frozen=True)
class ZeroRow:
    """Bytes on a GPU; room: what is left for activations, negative if the state alone is too much.
    sent_bytes: of a GPU and step of one micro-batch, with gradients in bf16. *_s: what that takes
    on the fast links of a machine, and between machines, whose network cards share it (None where
    all GPUs are within the fast links' reach).
    fewest_gpus: from which number on the state fits, None: from none. planned: what a plan of our
    engine says of a GPU, state and all, with a row at a time, by what is computed again."""

    name: str
    stage: int
    weights: float
    gradients: float
    optimizer: float
    room: float
    sent_bytes: float
    scaleup_s: float
    network_s: float | None
    fewest_gpus: int | None
    planned: dict[str, float]

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def fits(self) -> bool:
        return self.room >= 0


@dataclass(frozen=True)
class ZeroTable:
    """links: which of the two times is this cluster's, at this number of GPUs. efficiency: of the
    fast links and of the network, what share of their rates the times are at."""

    name: str
    parameters: int
    num_gpus: int
    gpu: str
    gpu_bytes: int
    seq_len: int
    links: str
    efficiency: tuple[float, float]
    rows: tuple[ZeroRow, ...]

    def lines(self) -> list[str]:
        head = (
            f"{self.name}: {self.parameters / 1e9:.1f} billion parameters, "
            f"{16 * self.parameters / GIB:,.0f} GiB of weights, gradients and optimiser state, on "
            f"{self.num_gpus} x {self.gpu} ({self.gpu_bytes / GIB:.1f} GiB each)"
        )
        table: list[tuple[str, ...]] = [
            (
                "",
                "weights",
                "gradients",
                "optimiser",
                "GiB a GPU",
                "state fits",
                "sent",
                "in machine",
                *(["between"] if self.links == "network" else []),
            )
        ]
        for row in self.rows:
            table.append(
                (
                    row.name,
                    *(f"{n / GIB:,.1f}" for n in (row.weights, row.gradients, row.optimizer)),
                    f"{row.total / GIB:,.1f}",
                    "yes" if row.fits else "no",
                    f"{row.sent_bytes / GIB:,.0f} GiB",
                    f"{row.scaleup_s:.2f} s",
                    *([] if row.network_s is None else [f"{row.network_s:.2f} s"]),
                )
            )
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        rows = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in table
        ]
        return [head, "", *rows, "", *self.reasons(), "", self._conventions()]

    def _conventions(self) -> str:
        fast, far = (f"{100 * share:.0f} %" for share in self.efficiency)
        rates = f"{fast} of the fast links' rate"
        if self.links == "network":
            rates += f" and {far} of the network's"
        return (
            "Bytes as ZeRO counts them (1910.02054): gradients of 2 bytes a parameter. Ours are "
            "summed up in 4 by default, and a plan counts those. Times are for one micro-batch, at "
            f"{rates}, as in a plan, nothing hidden."
        )

    def reasons(self) -> list[str]:
        """Why a stage does not fit, and what would."""
        return [self._reason(row) for row in self.rows]

    def _reason(self, row: ZeroRow) -> str:
        fixed, divided = _parts(row.stage)
        if row.fits:
            said = f"{row.name} leaves {row.room / GIB:.1f} GiB for activations"
            if row.stage == 3:
                more = zero_volume_in_parameters(3) / zero_volume_in_parameters(2)
                said += f", and sends {more:g} times as much"
            return f"{said}. {self._planned(row)}"
        if not divided:
            held = f"{row.total / GIB:,.0f} GiB"
            return f"{row.name} holds everything on each GPU, {held}, on however many."
        said = (
            f"{row.name} divides {divided} of 16 bytes a parameter, which leaves "
            f"{row.total / GIB:,.1f} GiB"
        )
        if row.fewest_gpus is None:
            held = f"{fixed * self.parameters / GIB:,.0f} GiB"
            return (
                f"{said}; the {fixed} bytes that it does not divide are {held}: no number of GPUs "
                "is enough."
            )
        return f"{said}; from {row.fewest_gpus} GPUs on the state fits."

    def _planned(self, row: ZeroRow) -> str:
        verdicts = [
            f"{size_text(needs)} with recompute {mode} "
            f"({'fits' if needs <= (1 - MEMORY.margin) * self.gpu_bytes else 'does not fit'})"
            for mode, needs in row.planned.items()
        ]
        return (
            f"A plan, with gradients in 4 bytes and a row of {self.seq_len:,} tokens at a time, "
            f"has {' and '.join(verdicts)}."
        )

    def as_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "total": row.total, "fits": row.fits} for row in self.rows]
        return {**asdict(self), "rows": rows, "reasons": self.reasons()}


def zero_table(
    dims: Dims,
    cluster: Cluster,
    num_gpus: int,
    efficiency: tuple[float, float] = (SHIPPED.scaleup, SHIPPED.network),
    seq_len: int = 8192,
) -> ZeroTable:
    """The state alone; activations come on top (`planned`: of rows of seq_len tokens). Times are at
    `efficiency` times the rates of the fast links and of the network, with nothing hidden behind
    computation. Raises ConfigError for less than one GPU."""
    if num_gpus < 1:
        raise ConfigError(f"num_gpus={num_gpus} must be at least 1")
    P, room = dims.parameters(), cluster.accelerator.memory_bytes
    spans = cluster.link(num_gpus, 1, num_gpus) != "scaleup"
    fast, far = efficiency[0] * cluster.scaleup_bytes_per_s, _ring(cluster, efficiency)
    rows = []
    for stage, name in zip(STAGES, NAMES, strict=True):
        weights = WEIGHTS * P / (num_gpus if stage >= 3 else 1)
        gradients = GRADIENTS * P / (num_gpus if stage >= 2 else 1)
        total = zero_bytes_per_parameter(stage, num_gpus) * P
        sent = zero_volume_in_parameters(stage) * 2 * P * (num_gpus - 1) / num_gpus
        rows.append(
            ZeroRow(
                name=name,
                stage=stage,
                weights=weights,
                gradients=gradients,
                optimizer=total - weights - gradients,
                room=room - total,
                sent_bytes=sent,
                scaleup_s=sent / fast,
                network_s=sent / far if spans else None,
                fewest_gpus=fewest_gpus(stage, P, room),
                planned=_planned(dims, cluster, num_gpus, stage, seq_len),
            )
        )
    return ZeroTable(
        name=dims.name,
        parameters=P,
        num_gpus=num_gpus,
        gpu=cluster.accelerator.name,
        gpu_bytes=room,
        seq_len=seq_len,
        links="network" if spans else "scaleup",
        efficiency=efficiency,
        rows=tuple(rows),
    )


def _planned(
    dims: Dims, cluster: Cluster, num_gpus: int, stage: int, seq_len: int
) -> dict[str, float]:
    """Bytes that a GPU must have for a step of one row a GPU."""
    layout = Arrangement(
        seq_len=seq_len,
        micro_batch_rows=1,
        global_batch_rows=num_gpus,
        dp_shard=num_gpus,
        zero=stage,
        reshard="always" if stage == 3 else "never",
        reduce_every_micro_batch=stage >= 2,
        loss_chunk_tokens=CHUNK_TOKENS,
    )
    modes: tuple[Recompute, ...] = ("full", "none")
    jobs = {mode: Job(dims, replace(layout, recompute=mode), cluster) for mode in modes}
    return {mode: footprint(job).total for mode, job in jobs.items()}


def _ring(cluster: Cluster, efficiency: tuple[float, float]) -> float:
    """Bytes a second of a ring through several machines: at the efficiency of what bounds it."""
    rate = ring_rate(cluster, cluster.scaleup_gpus)
    return rate * efficiency[rate < cluster.scaleup_bytes_per_s]


def _parts(stage: int) -> tuple[int, int]:
    """Bytes a parameter that every GPU holds, and those that are divided."""
    divided = {0: 0, 1: OPTIMIZER, 2: OPTIMIZER + GRADIENTS, 3: 16}[stage]
    return 16 - divided, divided


def fewest_gpus(stage: int, parameters: int, gpu_bytes: float) -> int | None:
    """The least n with zero_bytes_per_parameter(stage, n) * P <= gpu_bytes."""
    fixed, divided = _parts(stage)
    left = gpu_bytes - fixed * parameters
    if left < 0 or (left == 0 and divided):
        return None
    return max(1, ceil(divided * parameters / left)) if divided else 1
