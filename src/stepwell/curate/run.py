"""The whole of a curation, from a plan to a finished folder.

    out/recipe.toml documents/ removed/ edits/ store/ curation.json datasheet.html

`curation.json` comes last: a folder without it is not finished. Until then everything is in
`out/.work`, and a curation that is started again goes on there.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from stepwell.curate.checks import check_recipe
from stepwell.curate.folders import decision_folder, is_done, shards_of, stage_folder
from stepwell.curate.outputs import publish
from stepwell.curate.plan import Plan, differences, read_json, write_json, write_plan
from stepwell.curate.tally import add_tallies
from stepwell.curate.tasks import TALLY, decide, has_decision, step_name, task_bytes
from stepwell.curate.writing import DOCUMENTS
from stepwell.train.lock import LOCK, folder_lock
from stepwell.types import ConfigError, DataError, StepwellError

WORK, CURATION = ".work", "curation.json"


class Executor(Protocol):
    def run(self, work: Path, stage: int, numbers: Sequence[int]) -> Iterator[int]:
        """Runs tasks of a stage and gives their numbers as they end."""
        ...


@dataclass(frozen=True)
class Progress:
    """A part of the work: `done` of `total` tasks, which read so many bytes."""

    part: str
    done: int
    total: int
    done_bytes: int = 0
    total_bytes: int = 0


class NothingKept(DataError):
    """No document is left, so there is nothing to go on with."""


def curate(
    plan: Plan, out: Path, executor: Executor, fresh: bool = False
) -> Generator[Progress, None, None]:
    """Does what is not done yet, and yields how far it is. The result is `read_curation(out)`.

    fresh: begin anew, whatever is in `out`. Raises ConfigError for a folder that holds something
    else or another curation, DataError when no document is left, and what a step raises; what was
    finished by then is kept.
    """
    if is_finished(plan, out, fresh):
        return
    check_recipe(plan.recipe)
    work = out / WORK
    with _locked(out):
        if fresh:
            remove_results(out)
        work.mkdir(exist_ok=True)
        write_plan(plan, work)
        for stage in plan.stages:
            yield from _stage(plan, work, stage.number, executor)
        check_sums(summary(plan, work))
        yield from _tasks(plan, work, len(plan.stages), executor)
        counts = summary(plan, work)
        yield from _begun_and_done(publish(plan, work, out, counts))
        counts["files"] = result_files(plan, out)
        write_json(out / CURATION, counts)
        shutil.rmtree(work)


def is_finished(plan: Plan, out: Path, fresh: bool = False) -> bool:
    """Whether `out` holds the result already, in whole. Raises as `check_folder`, and DataError
    where files of the result are gone or changed."""
    check_folder(plan, out, fresh)
    if fresh or not (out / CURATION).exists():
        return False
    files = read_json(out / CURATION).get("files", {})
    wrong = [path for path, size in files.items() if not _has_size(out / path, size)]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise DataError(
            f"{out} is no longer the curation that was finished: {', '.join(wrong[:3])}{more} "
            f"{'is' if len(wrong) == 1 else 'are'} gone or changed; add --fresh to make it anew"
        )
    return True


def result_files(plan: Plan, out: Path) -> dict[str, int]:
    """path (from `out` on, or absolute) -> size, of everything that the curation wrote."""
    parts = [p for p in sorted(out.iterdir()) if p.name not in (WORK, LOCK)]
    paths = [p for part in parts for p in (part, *sorted(part.rglob("*"))) if p.is_file()]
    files = {p.relative_to(out).as_posix(): p.stat().st_size for p in paths}
    saved = [Path(path) for s in plan.recipe.steps if (path := getattr(s, "save_index", None))]
    others = [p.absolute() for folder in saved for p in sorted(folder.rglob("*")) if p.is_file()]
    return files | {str(p): p.stat().st_size for p in others}


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def check_folder(plan: Plan, out: Path, fresh: bool) -> None:
    """Raises DataError for an `out` that can't be written, ConfigError for one that isn't a
    curation's, and for a finished one of another plan."""
    blocked = next((p for p in (out, *out.parents) if p.exists() and not p.is_dir()), None)
    if blocked is not None:
        raise DataError(f"cannot write {out}: {blocked} is a file; choose another name")
    if not out.exists():
        check_apart(plan, out)
        return
    ours = (out / CURATION, out / WORK)
    if any(out.iterdir()) and not any(path.exists() for path in ours):
        raise ConfigError(f"{out} exists already and is no curation; choose another name")
    check_apart(plan, out)
    if (out / CURATION).exists() and not fresh:
        was = read_curation(out)["fingerprint"]
        if changed := differences(was, plan.to_dict()["fingerprint"]):
            shown = "\n".join(f"  {line}" for line in changed[:8])
            raise ConfigError(
                f"{out} holds a finished curation of something else:\n{shown}\nchoose another "
                "folder, or add --fresh to make it anew"
            )


def check_apart(plan: Plan, out: Path) -> None:
    """Raises ConfigError where inputs and output lie in each other: the next run would read what
    this one wrote, or --fresh remove what is read."""
    target = out.resolve()
    for source in plan.recipe.sources:
        for place in source.paths:
            if reads_from(place, target):
                raise ConfigError(
                    f"{out} lies in {place}, which source {source.name!r} reads: the next run "
                    "would read this one's output; choose a folder outside"
                )
    for read in plan.reads if out.exists() else ():
        for folder in {os.path.dirname(piece.path) for piece in read.pieces}:
            path = Path(folder).resolve()
            if target in (path, *path.parents):
                raise ConfigError(
                    f"source {read.source!r} reads {folder}, which lies in the output {out}; "
                    "choose another folder for one of them"
                )


def reads_from(place: str, out: Path) -> bool:
    """Whether a path of a source (a folder or a glob) would take in what is written to `out`."""
    path = Path(os.path.abspath(place))
    fixed = next(p for p in (path, *path.parents) if not glob.has_magic(str(p)))
    if fixed == path or path.is_dir():
        return path.is_dir() and path.resolve() in (out, *out.parents)
    if "**" in path.parts:
        return fixed.resolve() in (out, *out.parents)
    pattern = (*fixed.resolve().parts, *path.parts[len(fixed.parts) :])
    written = out / DOCUMENTS / "part-00000.parquet"
    candidates = (written, written.with_suffix(".jsonl"), *written.parents)
    return any(
        len(c.parts) == len(pattern) and all(map(fnmatch, c.parts, pattern)) for c in candidates
    )


def remove_results(out: Path) -> None:
    (out / CURATION).unlink(missing_ok=True)
    for path in out.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def read_curation(out: Path) -> dict[str, Any]:
    """Raises DataError for a folder that is no finished curation."""
    if not (out / CURATION).is_file():
        unfinished = (out / WORK).exists()
        raise DataError(
            f"{out} holds {'an unfinished' if unfinished else 'no'} curation"
            f"{'; start it again to go on' if unfinished else ': it has no ' + CURATION}"
        )
    return read_json(out / CURATION)


def summary(plan: Plan, work: Path) -> dict[str, Any]:
    """All counts: {"fingerprint", "tally" (see `tally`), "kept": {source: [docs, bytes]},
    "decisions": {step: its own numbers}}."""
    tally = collect(plan, work)
    decisions = {}
    for stage in plan.stages:
        path = decision_folder(work, stage.number) / "summary.json"
        if stage.after is not None and path.exists():
            decisions[step_name(*stage.after)] = read_json(path)
    return {
        "fingerprint": dict(plan.fingerprint),
        "tally": tally,
        "kept": kept_volumes(plan, tally),
        "decisions": decisions,
    }


def collect(plan: Plan, work: Path) -> dict[str, Any]:
    folders: list[Path] = []
    for stage in range(len(plan.stages) + 1):
        tasks = stage_folder(work, stage).glob("[0-9]*")
        folders += sorted(tasks, key=lambda path: int(path.name))
        folders.append(decision_folder(work, stage))
    tallies = (folder / TALLY for folder in folders)
    return add_tallies(read_json(path) for path in tallies if path.exists())


def check_sums(counts: Mapping[str, Any]) -> None:
    """Raises StepwellError unless every record was kept or removed."""
    num_read = sum(counts["tally"]["read"].values())
    if num_read != accounted(counts):
        raise StepwellError(
            f"{num_read} records were read but {accounted(counts)} were kept or removed"
        )


def accounted(counts: Mapping[str, Any]) -> int:
    """Documents that were kept or removed."""
    kept = sum(docs for docs, _ in counts["kept"].values())
    return kept + sum(sum(e["dropped"].values()) for e in counts["tally"]["steps"].values())


def kept_volumes(plan: Plan, tally: dict[str, Any]) -> dict[str, list[int]]:
    """What is left of each source: the last step's output where it was seen by one."""
    kept: dict[str, list[int]] = {}
    for entry in tally["steps"].values():
        for source in entry["in"]:
            kept[source] = entry["out"].get(source, [0, 0])
    return kept


def _stage(plan: Plan, work: Path, stage: int, executor: Executor) -> Iterator[Progress]:
    yield from _tasks(plan, work, stage, executor)
    if not shards_of(work, stage):
        raise NothingKept(nothing_kept(plan, work))
    if has_decision(plan, stage):
        after = plan.stages[stage].after
        part = f"{after[1].kind}: deciding" if after is not None else "tokenizer"
        yield Progress(part, 0, 1)
        decide(work, stage)
        yield Progress(part, 1, 1)


def _tasks(plan: Plan, work: Path, stage: int, executor: Executor) -> Iterator[Progress]:
    sizes = task_bytes(plan, work, stage)
    part = _part(plan, stage)
    numbers = [n for n in range(len(sizes)) if not is_done(work, stage, n)]
    done, done_bytes = len(sizes) - len(numbers), sum(sizes) - sum(sizes[n] for n in numbers)
    yield Progress(part, done, len(sizes), done_bytes, sum(sizes))
    for number in executor.run(work, stage, numbers):
        done, done_bytes = done + 1, done_bytes + sizes[number]
        yield Progress(part, done, len(sizes), done_bytes, sum(sizes))


def _begun_and_done(names: Iterable[str]) -> Iterator[Progress]:
    """names: of what is done before the next one comes."""
    last = ""
    for name in names:
        if last:
            yield Progress(last, 1, 1)
        last = f"publishing {name}"
        yield Progress(last, 0, 1)
    yield Progress(last, 1, 1)


def _part(plan: Plan, stage: int) -> str:
    if stage == len(plan.stages):
        return "writing"
    entry = plan.stages[stage]
    first = ["read"] if stage == 0 else [entry.before[1].kind] if entry.before else []
    return ", ".join([*first, *(step.kind for _, step in entry.steps)])


def nothing_kept(plan: Plan, work: Path) -> str:
    """Why nothing is left: each reason with its count and an example."""
    tally = collect(plan, work)
    num_read = sum(tally["read"].values())
    lines = [
        f"no document is left of {num_read:,} record{'' if num_read == 1 else 's'}, so "
        f"{work.parent} was not written"
    ]
    for name, entry in tally["steps"].items():
        for reason, count in sorted(entry["dropped"].items(), key=lambda pair: -pair[1]):
            first = entry["examples"][reason][0]
            detail = f": {first['detail']}" if first["detail"] else ""
            lines.append(f"  dropped {count:>8,}  {name}: {reason}, e.g. {first['id']}{detail}")
    return "\n".join(lines)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    made = not out.exists()
    try:
        with folder_lock(out):
            yield
    except NothingKept:
        shutil.rmtree(out / WORK, ignore_errors=True)
        if made and out.is_dir() and not os.listdir(out):
            out.rmdir()
        raise
    except (OSError, DataError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError) or not _is_below(out, cause.filename):
            raise
        # Arrow's own words say which of its calls it was.
        why = os.strerror(cause.errno) if cause.errno else str(cause)
        raise DataError(
            f"cannot write {out}: {why}; what was finished is kept, and the "
            "same command goes on from there when there is room"
        ) from error


def _is_below(out: Path, filename: Any) -> bool:
    """Whether an error is about what is written; one that names no file is."""
    return not isinstance(filename, str) or out.absolute() in Path(filename).absolute().parents
