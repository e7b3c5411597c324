"""What a curation will do, written down before it starts, so that any process can do any part.

`plan.json` in the work folder holds the recipe, what is read and a fingerprint of
everything that the result depends on. A task is (stage, number); its output is a folder that is
there in whole or not at all. So a curation that was killed goes on where it stopped, whatever the
number of workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import stepwell
from stepwell.curate.recipe import Recipe
from stepwell.data.sources.opening import FileFault, open_plain
from stepwell.data.sources.pieces import PYTHON_SOURCES, plan_source
from stepwell.data.sources.spec import Piece, SourceSpec
from stepwell.data.steps import DocumentStep, GlobalStep, StepConfig
from stepwell.files import write_text
from stepwell.types import ConfigError, DataError

PLAN = "plan.json"
# Keys whose values are names or what is written, never files that are read.
NAMES = ("kind", "sources", "by", "scores", "save_index")
# Files of a source that are read by one task. A small file takes time too.
READ_BYTES, FILE_BYTES = 16 << 20, 16 << 10
# Rooms whose code decides what is kept.
CODE = ("data", "curate", "tokenizer.py", "schema.py")
# And of a language model's scores.
SCORER_CODE = ("eval", "models", "train")
# Whose versions decide, too, what is read and what is kept.
LIBRARIES = (
    "fasttext-community", "langcodes", "lxml", "phonenumbers", "py3langid", "pydivsufsort",
    "python-stdnum", "rensa", "tokenizers", "torch", "trafilatura", "warcio", "wordllama", "xxhash",
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """What is done to each shard between two decisions about all documents: `before` is applied,
    then the steps, then the sketch of `after` is made. steps carry their number in the recipe."""

    number: int
    before: tuple[int, GlobalStep] | None
    steps: tuple[tuple[int, DocumentStep], ...]
    after: tuple[int, GlobalStep] | None


@dataclass(frozen=True)
class Read:
    """A task of the first stage: pieces of one source, read one after the other."""

    source: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Plan:
    """folder: the working folder of the command, which paths that are not absolute start from."""

    recipe: Recipe
    reads: tuple[Read, ...]
    fingerprint: Mapping[str, Any]
    folder: str

    @property
    def stages(self) -> list[Stage]:
        return stages_of(self.recipe.steps)

    @cached_property
    def inputs(self) -> dict[str, tuple[int, int]]:
        """path -> (size, time of change), of what is read."""
        return {path: (size, time) for path, size, time in self.fingerprint["inputs"]}

    def source(self, name: str) -> SourceSpec:
        return next(source for source in self.recipe.sources if source.name == name)

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.to_dict(),
            "reads": [asdict(read) for read in self.reads],
            "fingerprint": dict(self.fingerprint),
            "folder": self.folder,
        }


def make_plan(recipe: Recipe) -> Plan:
    """Raises DataError for a source without anything to read."""
    reads = tuple(
        Read(source.name, tuple(pieces))
        for source in recipe.sources
        for pieces in bundled(
            [without_right(piece) for piece in plan_source(source)], source.max_docs is not None
        )
    )
    return Plan(recipe, reads, fingerprint(recipe, reads), os.getcwd())


def without_right(piece: Piece) -> Piece:
    """A file that can't be opened now is dropped, with the reason; one that can't be opened later
    is an error."""
    if piece.kind in ("dropped", *PYTHON_SOURCES):
        return piece
    try:
        open_plain(piece.path).close()
    except FileFault as fault:
        return replace(piece, kind="dropped", reason=fault.reason, detail=fault.detail)
    return piece


def bundled(pieces: Sequence[Piece], in_one: bool) -> Iterator[list[Piece]]:
    """Neighbours of together READ_BYTES or a little more; in_one: all of them."""
    bundle: list[Piece] = []
    size = 0
    for piece in pieces:
        bundle.append(piece)
        size += max(piece.size_bytes, FILE_BYTES)
        if size >= READ_BYTES and not in_one:
            yield bundle
            bundle, size = [], 0
    if bundle:
        yield bundle


def stages_of(steps: Sequence[StepConfig]) -> list[Stage]:
    stages: list[Stage] = []
    before: tuple[int, GlobalStep] | None = None
    local: list[tuple[int, DocumentStep]] = []
    for i, step in enumerate(steps):
        if isinstance(step, DocumentStep):
            local.append((i, step))
        elif isinstance(step, GlobalStep):
            stages.append(Stage(len(stages), before, tuple(local), (i, step)))
            before, local = (i, step), []
        else:
            raise TypeError(f"{type(step).__name__} is neither a document step nor a global one")
    return [*stages, Stage(len(stages), before, tuple(local), None)]


def fingerprint(recipe: Recipe, reads: Sequence[Read]) -> dict[str, Any]:
    """What the result depends on: the recipe, the inputs and every file that a step reads (by path,
    size and time of change), the code, and what it stands on."""
    values = recipe.to_dict()
    # What is dropped unread may be a link to anywhere.
    paths = {p.path for read in reads for p in read.pieces if p.kind != "dropped"}
    paths |= {text for text in _texts([values["steps"], values.get("store")]) if _is_path(text)}
    rooms = CODE + SCORER_CODE * any(step.kind == "perplexity" for step in recipe.steps)
    files = sorted({file for path in paths for file in _files_of(Path(path))})
    return {
        "version": stepwell.__version__,
        "code": code_hash(rooms),
        "libraries": library_versions(),
        "recipe": values,
        "inputs": [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files],
    }


def library_versions() -> dict[str, str]:
    """Of Python, whose Unicode tables and library are read, and of those that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@lru_cache(maxsize=2)
def code_hash(rooms: Sequence[str] = CODE) -> str:
    root = Path(stepwell.__file__).parent
    digest = hashlib.sha256()
    for name in rooms:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of a fingerprint changed, in words."""
    lines = []
    for key in ("version", "code"):
        if was.get(key) != now[key]:
            lines.append(f"Stepwell's {key} was {was.get(key)} and is {now[key]}")
    lines += _changed_values(was.get("libraries", {}), now["libraries"], "libraries")
    lines += _changed_values(was.get("recipe", {}), now["recipe"], "")
    before = {path: rest for path, *rest in was.get("inputs", [])}
    after = {path: rest for path, *rest in now["inputs"]}
    lines += [f"{path} is new" for path in after.keys() - before.keys()]
    lines += [f"{path} is gone" for path in before.keys() - after.keys()]
    lines += [f"{p} changed" for p in after.keys() & before.keys() if after[p] != before[p]]
    return lines


def write_plan(plan: Plan, work: Path) -> None:
    """Into a work folder where nothing is done yet, or of the same plan. Raises ConfigError for
    another plan."""
    path = work / PLAN
    if path.exists() and any(work.glob("s[0-9]*/[0-9]*")):
        # Through JSON, as it was written.
        now = json.loads(json.dumps(dict(plan.fingerprint)))
        if changed := differences(read_json(path)["fingerprint"], now):
            shown = "\n".join(f"  {line}" for line in changed[:8])
            raise ConfigError(
                f"{work.parent} holds a curation that began with something else:\n{shown}\n"
                "start it as it was to go on, or add --fresh to begin anew"
            )
        return
    write_json(path, plan.to_dict())


def read_plan(work: Path) -> Plan:
    """Raises DataError where there is none."""
    path = work / PLAN
    if not path.exists():
        raise DataError(f"{work} holds no {PLAN}; start the curation first")
    return _read_plan(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read_plan(path: Path, _mtime_ns: int) -> Plan:
    values = read_json(path)
    reads = tuple(
        Read(read["source"], tuple(Piece(**piece) for piece in read["pieces"]))
        for read in values["reads"]
    )
    recipe = Recipe.parse(values["recipe"])
    return Plan(recipe, reads, values["fingerprint"], values["folder"])


@contextmanager
def in_folder(plan: Plan) -> Iterator[None]:
    """The block works where the command was given. Raises DataError on a machine without it."""
    if os.getcwd() == plan.folder:
        yield
        return
    if not Path(plan.folder).is_dir():
        raise DataError(
            f"the machine {socket.gethostname()} does not see {plan.folder}, where the curation "
            "was started and its paths begin; all machines must see the same files"
        )
    with chdir(plan.folder):
        yield


def check_input(plan: Plan, path: str) -> None:
    """Raises DataError unless the file is there as it was when the plan was made."""
    expected = plan.inputs.get(path)
    try:
        open_plain(path).close()
        about = os.stat(path)
    except (OSError, FileFault) as error:
        raise DataError(
            f"{path} was there when the curation began, and {socket.gethostname()} cannot open it "
            f"now: {error}; the same command goes on once it is back"
        ) from error
    if expected is not None and expected != (about.st_size, about.st_mtime_ns):
        raise DataError(
            f"{path} changed while it was being curated; put it back as it was to go on, or add "
            "--fresh to begin anew"
        )


def write_json(path: Path, values: Any) -> None:
    write_text(path, json.dumps(values, ensure_ascii=False))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _changed_values(was: Any, now: Any, key: str) -> list[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        names = sorted(was.keys() | now.keys())
        return [
            line
            for name in names
            for line in _changed_values(was.get(name), now.get(name), f"{key}.{name}".lstrip("."))
        ]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        pairs = enumerate(zip(was, now, strict=True))
        return [line for i, (a, b) in pairs for line in _changed_values(a, b, f"{key}.{i}")]
    return [] if was == now else [f"{key} was {was!r} and is {now!r}"]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (t for key, v in value.items() if key not in NAMES for t in _texts(v))
    elif isinstance(value, list | tuple):
        yield from (t for v in value for t in _texts(v))


def _is_path(text: str) -> bool:
    try:
        return bool(text) and Path(text).exists()
    except OSError:  # too long a name
        return False


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return [f for f in path.rglob("*") if f.is_file()]
    return [path] if path.is_file() else []
