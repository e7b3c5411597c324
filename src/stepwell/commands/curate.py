"""`stepwell curate RECIPE.toml` and `stepwell curate INPUT ... --out FOLDER`."""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from stepwell.commands.inputs import Inputs, Place, counted, parse_options
from stepwell.schema import read_toml
from stepwell.types import ConfigError, nearest

if TYPE_CHECKING:
    from stepwell.curate.recipe import Recipe
    from stepwell.curate.run import Executor, Progress

FILTERS = {"prose": ["gopher-quality"], "code": ["code-quality"], "none": []}
LINES_EVERY_S = 30.0
Clock = Callable[[], float]
Number = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]


@dataclass
class Curate:
    """Turns raw documents into cleaned ones and token stores, with a datasheet; every document that
    goes has a reason. Takes a recipe (a TOML file, or the name of one that ships), or inputs.

    Keys of a recipe follow as --steps.0.min_words 30 or --store.vocab_size 8192. A curation that
    was interrupted goes on when the same command is given again."""

    inputs: Inputs
    """A recipe; or rows (.jsonl, .jsonl.gz, .jsonl.zst, .parquet), text, HTML, WARC and code files,
    folders of them, stdlib-code, stdlib-prose."""
    out: str
    """The folder that is written."""
    filters: Literal["prose", "code", "none"] = "prose"
    """Of inputs. prose: Gopher's quality rules; code: those of Codex; none: only what is unreadable
    goes."""
    no_dedup: bool = False
    """Of inputs: keep exact copies, which are dropped otherwise."""
    text_column: str = "text"
    """Of inputs: the column that holds the text."""
    workers: Number = None
    """Processes (or tasks at a time of another executor); without it, one a core."""
    executor: Literal["local", "ray", "slurm"] = "local"
    """local: processes of this machine; ray: a Ray cluster; slurm: writes the scripts of job
    arrays. Of several machines, all must see the folder."""
    ray_address: Place = None
    """Of the Ray cluster; without it, RAY_ADDRESS, else this machine."""
    fresh: bool = False
    """Begin anew, whatever was done before."""
    json: bool = False
    """Print the counts as JSON."""


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["task"]:
        from stepwell.curate.executors.slurm import run_array_element

        return run_array_element(argv[1:])
    rest, overrides = split_overrides(argv)
    options = parse_options("curate", Curate, rest)
    recipe = recipe_of(options, overrides)
    if options.executor == "slurm":
        if options.workers is not None and options.workers < 1:
            raise ConfigError(few_workers(options.workers))
        return queued(recipe, Path(options.out), options)
    executor = executor_of(options.executor, options.workers, options.ray_address)
    return run(recipe, Path(options.out), executor, options.fresh, options.json)


def queued(recipe: Recipe, out: Path, options: Curate) -> int:
    """Writes Slurm's scripts, and says how to queue them."""
    from stepwell.curate.executors.slurm import write_scripts

    script = write_scripts(recipe, out, options.workers, options.fresh)
    if script is None:
        return print_result(out, options.json)
    text = f"written; queue it with: {script}"
    print(json.dumps({"out": str(out), "submit": str(script)}) if options.json else text)
    return 0


def run(recipe: Recipe, out: Path, executor: Executor, fresh: bool, as_json: bool) -> int:
    """Curates, with a progress bar on a terminal and lines elsewhere, and prints what became of the
    documents."""
    from stepwell.curate.plan import make_plan
    from stepwell.curate.run import WORK, curate

    try:
        plan = make_plan(recipe)
        with ended_by_sigterm(), closing(curate(plan, out, executor, fresh)) as progress:
            shown(progress)
    except KeyboardInterrupt:
        # Whoever presses Ctrl-C twice is still told how to go on.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        begun = f"{out} holds what was finished" if (out / WORK).exists() else "nothing was begun"
        print(
            f"stepwell: interrupted; {begun}, and the same command goes on from there",
            file=sys.stderr,
        )
        return 130
    return print_result(out, as_json)


def print_result(out: Path, as_json: bool) -> int:
    from stepwell.curate.run import read_curation

    values = read_curation(out)
    values["out"] = str(out)
    print(json.dumps(values) if as_json else report_text(values, out))
    return 0


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does: its workers end too, and nothing half-done stays."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def executor_of(name: str, workers: int | None, ray_address: str | None = None) -> Executor:
    if workers is not None and workers < 1:
        raise ConfigError(few_workers(workers))
    if name == "ray":
        from stepwell.curate.executors.ray import RayExecutor

        return RayExecutor(ray_address, workers)
    from stepwell.curate.executors.local import LocalExecutor

    return LocalExecutor(workers or len(os.sched_getaffinity(0)))


def few_workers(workers: int) -> str:
    return f"--workers {workers} must be at least 1, the nearest legal value"


def recipe_of(options: Curate, overrides: dict[str, Any]) -> Recipe:
    from stepwell.curate.recipe import Recipe

    first = options.inputs[0] if options.inputs else ""
    path = find_recipe(first)
    if path is not None and len(options.inputs) == 1:
        return Recipe.load(path, overrides)
    if path is not None:
        raise ConfigError(
            f"{first} is a recipe, which names its sources itself; the nearest legal command has "
            "no further inputs"
        )
    steps = [{"kind": kind} for kind in FILTERS[options.filters]]
    if not options.no_dedup:
        steps.append({"kind": "exact-dedup"})
    return recipe_for(options.inputs, options.text_column, steps, overrides)


def recipe_for(
    inputs: Sequence[str],
    text_column: str,
    steps: Sequence[dict[str, Any]],
    overrides: dict[str, Any],
) -> Recipe:
    """A recipe with a source for each input, called by the input's name."""
    from stepwell.curate.recipe import Recipe

    sources = [
        {"name": name, "path": path, "text_column": text_column}
        for name, path in zip(source_names(inputs), inputs, strict=True)
    ]
    if not sources:
        raise ConfigError(
            "no input: give a recipe, files or folders, or stdlib-code or stdlib-prose for "
            "Python's own"
        )
    return Recipe.parse({"sources": sources, "steps": list(steps)}, overrides, "the command line")


def source_names(inputs: Sequence[str]) -> list[str]:
    """The stem of each input (of a glob, its last folder without wildcards), numbered where two
    have the same."""
    names: list[str] = []
    for text in inputs:
        path = Path(text)
        if glob.has_magic(text) and not path.exists():
            path = next(p for p in path.absolute().parents if not glob.has_magic(str(p)))
        stem = path.name.split(".")[0] or path.absolute().name or "input"
        same = sum(name == stem or name.startswith(f"{stem}-") for name in names)
        names.append(f"{stem}-{same + 1}" if same else stem)
    return names


def find_recipe(name: str) -> Path | None:
    """A TOML file, or a curation's recipe that ships with Stepwell. Raises ConfigError for what can
    only be meant as one and is none."""
    if Path(name).suffix == ".toml":
        return Path(name)
    if Path(name).exists():
        return None
    shipped = {path.stem: path for path in shipped_curations()}
    if name.startswith("curate-") and name not in shipped:
        raise ConfigError(
            f"there is no recipe {name!r}{nearest(name, shipped)}: {', '.join(shipped)}"
        )
    return shipped.get(name)


def shipped_curations() -> list[Path]:
    """The recipes of curations that ship."""
    from importlib.resources import files

    found = sorted(Path(str(files("stepwell.recipes"))).glob("*.toml"))
    return [path for path in found if "sources" in read_toml(path)]


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """(the words that are no `--dotted.key value`, the keys with their texts)."""
    rest: list[str] = []
    overrides: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        key, given, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in key:
            rest.append(word)
            continue
        if not given:
            value = next(words, "")
            if not value:
                raise ConfigError(f"--{key} needs a value")
        overrides[key.replace("-", "_")] = value
    return rest, overrides


def shown(progress: Iterator[Progress]) -> None:
    """A bar for each part of the work with rate and time left, where there is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        for line in progress_lines(progress):
            print(line, file=sys.stderr, flush=True)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[tasks]} {task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # A task may take minutes, and the time left goes by those that ended within this period.
    with Bars(*columns, console=console, speed_estimate_period=600) as bars:
        rows: dict[str, tuple[Any, float, int]] = {}
        width = shutil.get_terminal_size().columns // 3
        for step in progress:
            done, total = step.done_bytes, step.total_bytes
            if not total:
                done, total = step.done, step.total
            if step.part not in rows:
                row = bars.add_task(step.part[:width], total=total, tasks="", rate="")
                rows[step.part] = (row, time.monotonic(), step.done_bytes)
            row, begin, first = rows[step.part]
            rate = rate_text(step.done_bytes - first, time.monotonic() - begin)
            bars.update(row, completed=done, tasks=f"{step.done}/{step.total}", rate=rate)


def progress_lines(
    progress: Iterable[Progress], every_s: float = LINES_EVERY_S, clock: Clock = time.monotonic
) -> Iterator[str]:
    """A line when a part begins and when it ends, and between them at most one in every_s."""
    part, begin, last, first = "", 0.0, 0.0, 0
    for step in progress:
        now = clock()
        begins = step.part != part
        if begins:
            part, begin, last, first = step.part, now, now, step.done_bytes
        tasks = f"{step.done} of {counted(step.total, 'task')}"
        if step.done == step.total:
            rate = rate_text(step.done_bytes - first, now - begin)
            end = f", {rate}" if rate else ""
            yield f"stepwell: {part}: done, {tasks}, {now - begin:.1f} s{end}"
        elif begins:
            yield f"stepwell: {part}: {tasks} done"
        elif now - last >= every_s:
            last = now
            rate = rate_text(step.done_bytes - first, now - begin)
            yield f"stepwell: {part}: {tasks} done, {now - begin:.0f} s, {rate}"


def rate_text(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / 1e6 / max(seconds, 1e-9):,.1f} MB/s" if num_bytes else ""


def report_text(values: dict[str, Any], out: Path) -> str:
    from stepwell.curate.datasheet import size_text

    tally = values["tally"]
    kept = [sum(column) for column in zip(*values["kept"].values(), strict=True)] or [0, 0]
    lines = [
        f"read {counted(sum(tally['read'].values()), 'record')}",
        f"kept {counted(kept[0], 'document')}, {size_text(kept[1])}: {out}",
    ]
    for name, entry in tally["steps"].items():
        for reason, count in sorted(entry["dropped"].items(), key=lambda item: -item[1]):
            lines.append(f"  dropped {count:>8,}  {name}: {reason}")
        for reason, count in sorted(entry["edits"].items(), key=lambda item: -item[1]):
            lines.append(f"  changed {count:>8,}  {name}: {reason}")
    if (out / "datasheet.html").exists():
        lines.append(f"the datasheet: {out / 'datasheet.html'}")
    return "\n".join(lines)
