"""How many ranks a training command is about, and whether its run can be on them: asked before any
of them starts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from stepwell.config import Run
from stepwell.parallel.lever_rules import check_host
from stepwell.parallel.rules import AxisSizes, axis_sizes, check_run, step_units
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError


@dataclass(frozen=True)
class Ranks:
    """grouped: whether they have a process group, which a process that nobody launched has not.
    on_host: how many of them share this machine. assumed: nobody said how many there are."""

    world: int = 1
    grouped: bool = False
    on_host: int = 1
    assumed: bool = False


def ranks_of(
    layout: LayoutConfig, num_procs: int | None, environ: Mapping[str, str], assume: bool = False
) -> Ranks:
    """Those that have been started already, else `--nproc`'s, else this process. assume: else as
    many as the layout needs.

    Raises ConfigError for a --nproc below 1, and for a layout of several ranks where there is only
    this process.
    """
    check_num_procs(num_procs)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        on_host = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        return Ranks(int(environ["WORLD_SIZE"]), grouped=True, on_host=on_host)
    if num_procs is not None:
        return Ranks(num_procs, grouped=True, on_host=num_procs)
    world = fewest_ranks(layout)
    if world > 1 and not assume:
        sizes = layout_text(axis_sizes(layout, world))
        raise ConfigError(
            f"the layout {sizes} needs {world} ranks, and this is one process; give --nproc "
            f"{world}, or start them with torchrun or srun"
        )
    return Ranks(world, grouped=world > 1, assumed=world > 1)


def check_num_procs(num_procs: int | None) -> None:
    if num_procs is not None and num_procs < 1:
        raise ConfigError(f"--nproc {num_procs} must be at least 1, the nearest legal value")


def fewest_ranks(layout: LayoutConfig) -> int:
    """The smallest number of ranks that the layout's axes fit."""
    axes = (layout.pp, layout.dp_replicate, layout.cp, layout.tp, max(1, layout.dp_shard))
    return prod(axes)


def check(run: Run, ranks: Ranks, shown: str = "--nproc {}") -> AxisSizes:
    """The axes of the run. Raises ConfigError with what the engine would refuse, and for ranks that
    would have no row. shown: how a number of ranks is written."""
    check_rows(run, ranks.world, shown)
    sizes = check_run(run, ranks.world)
    check_host(run, sizes, ranks.grouped, ranks.on_host)
    return sizes


def check_rows(run: Run, num_ranks: int, shown: str) -> None:
    """Raises ConfigError unless the layout fits so many ranks and each has a row."""
    sizes = check_run(run, num_ranks, rules=())
    data_ranks, units = sizes.dp_replicate * sizes.dp_shard, step_units(run)
    if units is not None and data_ranks > units[1]:
        key, rows, unit = units
        shares = "" if data_ranks == num_ranks else f", {data_ranks} of them for data,"
        best = shown.format(rows * num_ranks // data_ranks)
        raise ConfigError(
            f"{num_ranks} ranks{shares} exceed {key}={rows}, so some would have "
            f"no {unit}; the nearest legal value is {best}"
        )


def layout_text(sizes: AxisSizes) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes._asdict().items())
