"""One rank's trace by torch.profiler (Kineto's Chrome trace), read as a stream: whole steps, and
what ran in them. No torch.

A kernel is an event of category `kernel`, `gpu_memcpy` or `gpu_memset`; one of NCCL carries its
collective, sizes and group in `args` (libkineto, output_json.cpp). Steps are the annotations
`ProfilerStep#N` that a profiler with a schedule writes, and so does `log.profile_step`. A trace
without kernels is a CPU's: there an operator counts for the time in which none that it calls runs.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple, TextIO

from stepwell.types import DataError

CHUNK_CHARS = 1 << 20
MOST_CHARS = 1 << 26  # of one value
NO_SPACE = re.compile(r"[^ \t\n\r]")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
ANNOTATIONS = ("user_annotation", "gpu_user_annotation")
STEP = re.compile(r"ProfilerStep\s*#(\d+)$")
OPTIMIZER = "Optimizer.step#"
GLOO = "gloo:"
# Bytes of a number, by the names that c10d writes.
DTYPE_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
}
# Of a collective's name without its underscores; the first that begins it decides.
KINDS = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "sendrecv": "send",
    "send": "send",
    "recv": "recv",
}
WITHOUT_STEPS = (
    "record it with a schedule and profiler.step(), or with log.profile_step=N in a recipe"
)


class Message(NamedTuple):
    """A collective of this rank. kind: as in parallel.wire, empty where nothing says it. num_bytes:
    of the whole tensor, None where the trace does not say. group: what the program calls its ranks.
    ranks: the first of them, if known."""

    kind: str
    num_bytes: int | None
    num_ranks: int
    group: str
    ranks: tuple[int, ...]


class Piece(NamedTuple):
    """What ran, on one clock. within: the names of operators that it was called by (CPU). grid: a
    kernel's, as the trace writes it."""

    name: str
    start_s: float
    end_s: float
    message: Message | None = None
    within: tuple[str, ...] = ()
    grid: str = ""


class Window(NamedTuple):
    number: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Trace:
    """steps: whole ones. pieces: kernels; of a CPU, operators' own time. optimizer: when an
    optimiser stepped. on_device: there are kernels; else it is a CPU's. device: the accelerator as
    its driver calls it, empty where the trace does not say. world, rank: of the job, None where the
    trace does not say."""

    steps: tuple[Window, ...]
    pieces: tuple[Piece, ...]
    optimizer: tuple[tuple[float, float], ...]
    on_device: bool
    device: str
    world: int | None
    rank: int | None


def read_trace(path: str | Path) -> Trace:
    """Raises DataError for a file that is no trace, is cut off, holds several ranks, no whole step,
    or a step in which nothing ran, and for values that cannot be."""
    found = _Found()
    for key, value in entries(Path(path)):
        try:
            if key == "traceEvents":
                found.add(value)
            elif key == "distributedInfo":
                ranks = _dict(value, key)
                found.world, found.rank = (_or_none(ranks, name) for name in ("world_size", "rank"))
            elif key == "deviceProperties":
                found.device = _device(value)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    if len(found.devices) > 1:
        names = ", ".join(map(str, sorted(found.devices)))
        raise DataError(f"{path} holds the devices {names}; give the trace of one rank")
    on_device = bool(found.kernels)
    steps = found.steps(on_device)
    if not steps:
        what = "of a trace" if not found.num_events else f"among {found.num_events:,} events"
        raise DataError(f"{path} holds no whole step (ProfilerStep#N) {what}; {WITHOUT_STEPS}")
    pieces = tuple(found.kernels if on_device else found.own_time())
    _check_filled(path, steps, pieces)
    return Trace(
        steps,
        pieces,
        tuple(found.optimizer[on_device]),
        on_device,
        found.device if on_device else "",
        found.world,
        found.rank,
    )


def _check_filled(path: str | Path, steps: tuple[Window, ...], pieces: tuple[Piece, ...]) -> None:
    """Raises DataError for a step in which nothing ran: a mean with it would be of no step."""
    for step in steps:
        if not any(p.start_s < step.end_s and p.end_s > step.start_s for p in pieces):
            raise DataError(
                f"{path}: in ProfilerStep#{step.number} nothing ran; was the recording cut off? "
                "Record it again, or leave that step out"
            )


@dataclass
class _Found:
    """What is kept of the events. origin_us: of the clock, so that microseconds since 1970 lose
    nothing as seconds. annotated: spans of ProfilerStep#N by number, on the device
    (True) and on the host; optimizer likewise. operators: of a CPU, by thread. gloo: its
    messages, which name neither sizes nor groups."""

    num_events: int = 0
    origin_us: float | None = None
    kernels: list[Piece] = field(default_factory=list)
    devices: set[int] = field(default_factory=set)
    annotated: dict[bool, dict[int, tuple[float, float]]] = field(
        default_factory=lambda: {True: {}, False: {}}
    )
    optimizer: dict[bool, list[tuple[float, float]]] = field(
        default_factory=lambda: {True: [], False: []}
    )
    operators: dict[Any, list[tuple[float, float, str]]] = field(default_factory=dict)
    gloo: list[Piece] = field(default_factory=list)
    device: str = ""
    world: int | None = None
    rank: int | None = None

    def add(self, event: Any) -> None:
        self.num_events += 1
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        category, name = (_text(event.get(key)) for key in ("cat", "name"))
        category, name = category.lower(), intern(name)
        if category not in KERNELS and category not in ANNOTATIONS and category != "cpu_op":
            return
        since_us, lasts_us = _number(event, "ts", None), _number(event, "dur", 0)
        if lasts_us < 0:
            raise DataError(f"{name[:60]!r} lasts dur={lasts_us:g}, which must be at least 0")
        if self.origin_us is None:
            self.origin_us = since_us
        start = (since_us - self.origin_us) * 1e-6
        end = start + lasts_us * 1e-6
        if category in KERNELS:
            args = _dict(event.get("args"), "args")
            self.devices.add(_count(args, "device"))
            grid = str(args.get("grid", ""))
            self.kernels.append(Piece(name, start, end, message_of(name, args), (), grid))
            self.operators.clear()
        elif category in ANNOTATIONS:
            self._annotation(name, start, end, category == "gpu_user_annotation")
        elif not self.kernels:
            lane = str(event.get("pid")), str(event.get("tid"))
            self.operators.setdefault(lane, []).append((start, end, name))

    def _annotation(self, name: str, start: float, end: float, on_device: bool) -> None:
        """Written once for each stream; a step's span is that of all of them."""
        if name.startswith(OPTIMIZER):
            self.optimizer[on_device].append((start, end))
        if name.startswith(GLOO):
            sent = Message(kind_of(name.removeprefix(GLOO)), None, 0, "", ())
            self.gloo.append(Piece(name, start, end, sent))
        step = STEP.match(name)
        if step is not None:
            spans, number = self.annotated[on_device], int(step[1])
            first, last = spans.get(number, (start, end))
            spans[number] = (min(first, start), max(last, end))

    def steps(self, on_device: bool) -> tuple[Window, ...]:
        """On a device a step lasts until the next one's first kernel; the last one until its last
        kernel, or as long as on the host."""
        host, spans = self.annotated[False], self.annotated[on_device] or self.annotated[False]
        found = []
        for number, (start, end) in sorted(spans.items()):
            if on_device and spans is not host:
                first, last = host.get(number, (start, end))
                end = (
                    spans[number + 1][0] if number + 1 in spans else max(end, start + last - first)
                )
            found.append(Window(number, start, end))
        return tuple(found)

    def own_time(self) -> Iterator[Piece]:
        yield from self.gloo
        for calls in self.operators.values():
            yield from own_pieces(calls)


def own_pieces(calls: Iterable[tuple[float, float, str]]) -> Iterator[Piece]:
    """The spans in which each of one thread's operators, (start, end, name), runs and none that it
    calls."""
    open_calls: list[tuple[float, str]] = []
    now = float("-inf")

    def until(time: float) -> Iterator[Piece]:
        nonlocal now
        while open_calls and now < time:
            end, name = open_calls[-1]
            stop = min(end, time)
            if stop > now:
                yield Piece(name, now, stop, None, tuple(n for _, n in open_calls[:-1]))
            now = max(now, stop)
            if end <= time:
                open_calls.pop()
        now = max(now, time)

    for start, end, name in sorted(calls, key=lambda call: (call[0], -call[1])):
        yield from until(start)
        open_calls.append((end, name))
    yield from until(float("inf"))


def message_of(name: str, args: dict[str, Any]) -> Message | None:
    """What a kernel sends; None for one that does not."""
    told = str(args.get("Collective name", "")).strip('"')
    if not told and "nccl" not in name.lower():
        return None
    kind = kind_of(told) or kind_of(re.sub(r"^.*?nccl(Dev)?Kernel", "", name))
    size = _count(args, "Group size")
    each = DTYPE_BYTES.get(str(args.get("dtype", "")).strip('"'))
    sent, got = (_count(args, f"{way} msg nelems") for way in ("In", "Out"))
    elements = max(sent, got) if kind != "recv" else got or sent
    whole = elements * each if each and elements else None
    group = args.get("Process Group Description") or args.get("Process Group Name") or ""
    ranks = tuple(map(int, re.findall(r"\d+", str(args.get("Process Group Ranks", "")))))
    return Message(kind, whole, size, str(group).strip('"'), ranks)


def kind_of(name: str) -> str:
    """As in parallel.wire, of what c10d, or NCCL's kernel, calls a collective; else empty."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for begins, kind in KINDS.items() if plain.startswith(begins)), "")


# --- values ----------------------------------------------------------------------------------


def _number(values: dict[str, Any], key: str, default: float | None) -> float:
    """Raises DataError for what is not a finite number, and for None."""
    told = values.get(key, default)
    try:
        found = float(told)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise DataError(f"{key}={str(told)[:40]!r} must be a finite number")
    return found


def _count(values: dict[str, Any], key: str) -> int:
    """0 where it is not told. Raises DataError for what is not a whole number of at least 0."""
    found = _number(values, key, 0)
    if found < 0 or found != int(found):
        raise DataError(f"{key}={values[key]!r} must be a whole number of at least 0")
    return int(found)


def _or_none(values: dict[str, Any], key: str) -> int | None:
    return None if values.get(key) is None else _count(values, key)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _dict(value: Any, key: str) -> dict[str, Any]:
    """Empty where it is not told. Raises DataError."""
    if value is not None and not isinstance(value, dict):
        raise DataError(f"{key} is {type(value).__name__}; an object is needed")
    return value or {}


def _device(properties: Any) -> str:
    """The first one's name; empty where none is told. Raises DataError."""
    if properties is not None and not isinstance(properties, list):
        raise DataError(f"deviceProperties is {type(properties).__name__}; a list is needed")
    return _text(_dict((properties or [None])[0], "deviceProperties").get("name"))


# --- the file --------------------------------------------------------------------------------


def entries(path: Path) -> Iterator[tuple[str, Any]]:
    """(key, value) of the file's object, with ("traceEvents", event) for each event; a file that is
    a list holds events. Needs the memory of one value at a time. Raises DataError."""
    try:
        with _opened(path) as file:
            yield from _Reader(file).entries()
    except (ValueError, EOFError, RecursionError, zlib.error) as error:
        raise DataError(
            f"{path} is no whole trace ({error}); was the program that wrote it cut off?"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _opened(path: Path) -> TextIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    opened = gzip.GzipFile(path) if packed else path.open("rb")
    return TextIOWrapper(opened, encoding="utf-8", errors="replace")


class _Reader:
    """JSON from a file, value by value."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at, self._ended = file, "", 0, False
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def entries(self) -> Iterator[tuple[str, Any]]:
        if self._next() == "[":
            yield from (("traceEvents", event) for event in self._items())
            return
        self._take("{")
        while self._next() != "}":
            key = self._value()
            self._take(":")
            if key == "traceEvents":
                yield from (("traceEvents", event) for event in self._items())
            else:
                yield key, self._value()
            if self._next() != "}":
                self._take(",")

    def _items(self) -> Iterator[Any]:
        self._take("[")
        while self._next() != "]":
            yield self._value()
            if self._next() != "]":
                self._take(",")
        self._take("]")

    def _more(self) -> bool:
        more = "" if self._ended else self._file.read(CHUNK_CHARS)
        self._text, self._at = self._text[self._at :] + more, 0
        self._ended = not more
        return bool(more)

    def _next(self) -> str:
        """The next character that is not a space."""
        while True:
            found = NO_SPACE.search(self._text, self._at)
            if found is not None:
                self._at = found.start()
                return found[0]
            self._at = len(self._text)
            if not self._more():
                raise ValueError("it ends within a value")

    def _take(self, wanted: str) -> None:
        found = self._next()
        if found != wanted:
            raise ValueError(f"{found!r} where {wanted!r} was due")
        self._at += 1

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                if end < len(self._text) or self._ended:  # else a number may go on
                    self._at = end
                    return value
            except ValueError:
                if self._ended or len(self._text) - self._at > MOST_CHARS:
                    raise
            self._more()
