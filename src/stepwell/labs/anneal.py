"""The same good data in a cosine's tail, spread evenly, and in the decay of a WSD schedule.

A small decoder reads mostly web text and mail; a tenth of its tokens are books, which is what it is
judged by (bits per byte of held-out ones). Either every step has its tenth, or they make up half of
the last fifth of the run. Each placement is tried under a cosine and under WSD whose decay is that
last fifth; in a fifth arm the rate stays constant there and the checkpoints are averaged as in WSM
(2507.17634). The arms of a seed share their first weights and the order of both stores; those with
a stable phase and no books in it branch off one trunk.

The small form takes its text from the standard library: code, and the language reference as books.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import t as student

from stepwell.config import Run
from stepwell.data.corpora import fetch_corpus
from stepwell.data.curriculum import rows_given, streams_of
from stepwell.data.sources.python_library import stdlib_code, stdlib_prose
from stepwell.data.store import TokenStore, build_store
from stepwell.eval.tasks import bits_per_byte
from stepwell.models.flops import parameter_shapes
from stepwell.sections.data import first_step
from stepwell.sections.optim import ScheduleConfig
from stepwell.tokenizer import Tokenizer
from stepwell.train import average, checkpoint, run_checkpoints
from stepwell.train.curriculum import lr_mass
from stepwell.train.engine import Engine
from stepwell.train.pretrain import pretrain
from stepwell.types import DataError, Document

CLAIM = (
    "Good data at the end of a run, instead of spread evenly, gains more when the end is the decay "
    "of a WSD schedule than when it is a cosine's tail (95 % interval over seeds above 0), and "
    "under WSD it gains with every seed. At the end it leads lower under WSD than under the cosine "
    "with every seed, and so does a constant rate with an average of its checkpoints."
)
TAIL = 0.2
BOOKS_IN_TAIL = 0.5
NUM_AVERAGED = 9
LEVEL = 0.95


class Arm(NamedTuple):
    """schedule: of the last fifth. spread: books in every step instead of at the end."""

    schedule: str
    spread: bool
    averaged: bool = False


ARMS = {
    "cosine, spread": Arm("cosine", True),
    "cosine, at the end": Arm("cosine", False),
    "WSD, spread": Arm("wsd", True),
    "WSD, at the end": Arm("wsd", False),
    "constant, at the end, averaged": Arm("constant", False, averaged=True),
}
# Gains in bits per byte: of the second over the first, of the same seed.
GAINS = {
    "end over spread, cosine": ("cosine, spread", "cosine, at the end"),
    "end over spread, WSD": ("WSD, spread", "WSD, at the end"),
    "WSD over cosine, spread": ("cosine, spread", "WSD, spread"),
    "WSD over cosine, at the end": ("cosine, at the end", "WSD, at the end"),
    "average over cosine, at the end": ("cosine, at the end", "constant, at the end, averaged"),
    "average over WSD, at the end": ("WSD, at the end", "constant, at the end, averaged"),
}
WITH_EVERY_SEED = (
    "end over spread, WSD",
    "WSD over cosine, at the end",
    "average over cosine, at the end",
)
# How much more the second gain is than the first: what the schedules do for any data cancels out.
INTERACTION = "end over spread, WSD less cosine"
INTERACTION_OF = ("end over spread, cosine", "end over spread, WSD")


class Size(NamedTuple):
    seeds: int
    steps: int
    rows: int
    seq_len: int
    model: dict[str, int]
    vocab_size: int
    bytes_of: dict[str, int]
    heldout_bytes: int
    lr: float
    num_procs: int


FULL = Size(
    seeds=4,
    steps=600,
    rows=16,
    seq_len=128,
    model={
        "num_layers": 2,
        "d_model": 64,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 32,
        "d_ff": 192,
    },
    vocab_size=1024,
    bytes_of={"web": 6_000_000, "books": 1_500_000},
    heldout_bytes=200_000,
    lr=5e-3,
    num_procs=2,
)
SMALL = Size(
    seeds=3,
    steps=160,
    rows=8,
    seq_len=64,
    model={
        "num_layers": 1,
        "d_model": 48,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 24,
        "d_ff": 96,
    },
    vocab_size=384,
    bytes_of={"web": 200_000, "books": 100_000},
    heldout_bytes=20_000,
    lr=5e-3,
    num_procs=1,
)
CORPUS = Path(".cache/corpus")
FOLDERS = {
    "web": ("text/anarchism", "text/python-docs", "mail/spam-assassin"),
    "books": ("books/austen", "books/moby-dick", "books/sotu"),
}
PIECE_CHARS = 8_000


def measure(small: bool = False) -> dict[str, Any]:
    """`arms[name]`: bits per byte of held-out books and web by seed, rows of books read, and the
    share of the learning-rate mass that the last fifth has. `gains`: see there."""
    size = SMALL if small else FULL
    with tempfile.TemporaryDirectory(prefix="stepwell-anneal-") as name:
        folder = Path(name)
        texts = _prepare(folder, small, size)
        jobs = [(seed, folder, size, texts) for seed in range(size.seeds)]
        if size.num_procs == 1:
            found = [_seed(*job) for job in jobs]
        else:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(size.num_procs, mp_context=context) as pool:
                found = list(pool.map(_seed, *zip(*jobs, strict=True)))
    arms = {
        arm: {
            "books": [of_seed[arm]["books"] for of_seed in found],
            "web": [of_seed[arm]["web"] for of_seed in found],
            "book_rows": [of_seed[arm]["book_rows"] for of_seed in found],
            "tail_lr_share": _tail_lr_share(ARMS[arm], size),
        }
        for arm in ARMS
    }
    return {"seeds": size.seeds, "steps": size.steps, "arms": arms, "gains": gains(arms)}


def gains(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Gain in bits per byte of held-out books of each of GAINS and the interaction: by seed, the
    mean and its interval."""
    books = {name: np.array(row["books"]) for name, row in arms.items()}
    by_seed = {name: books[before] - books[after] for name, (before, after) in GAINS.items()}
    first, second = INTERACTION_OF
    by_seed[INTERACTION] = by_seed[second] - by_seed[first]
    return {name: _interval(values.tolist()) for name, values in by_seed.items()}


def check(numbers: dict[str, Any]) -> list[str]:
    wrong, gained = [], numbers["gains"]
    rows = {count for arm in numbers["arms"].values() for count in arm["book_rows"]}
    if max(rows) - min(rows) > 1:
        wrong.append(f"the arms have read {min(rows)} to {max(rows)} rows of books, not the same")
    more = gained[INTERACTION]
    if not more["low"] > 0:
        found = f"{more['mean']:+.4f} ({more['low']:+.4f} to {more['high']:+.4f})"
        wrong.append(f"{INTERACTION}: {found} bits per byte")
    for name in WITH_EVERY_SEED:
        if not min(gained[name]["by_seed"]) > 0:
            found = ", ".join(f"{gain:+.4f}" for gain in gained[name]["by_seed"])
            wrong.append(f"{name}: {found} bits per byte (by seed)")
    return wrong


def plot(numbers: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    arms, gained = numbers["arms"], numbers["gains"]
    for place, row in enumerate(arms.values()):
        left.plot(row["books"], [place] * len(row["books"]), "o", color="C0", alpha=0.6)
    labels = [f"{arm}\n(last fifth: {row['tail_lr_share']:.1%} of lr)" for arm, row in arms.items()]
    left.set_yticks(range(len(arms)), labels, fontsize="small")
    left.invert_yaxis()
    left.set_xlabel("bits per byte of held-out books, a point a seed")
    means = np.array([row["mean"] for row in gained.values()])
    ends = np.array([[row["low"], row["high"]] for row in gained.values()]).T
    right.errorbar(means, range(len(means)), xerr=abs(ends - means), fmt="o", color="C0", capsize=3)
    right.set_yticks(range(len(means)), list(gained), fontsize="small")
    right.invert_yaxis()
    right.axvline(0, color="gray", linewidth=0.5)
    right.set_xlabel(f"gain in bits per byte ({LEVEL:.0%} interval over {numbers['seeds']} seeds)")
    return figure


# --- one seed ------------------------------------------------------------------------------------


def _seed(
    seed: int, folder: Path, size: Size, texts: dict[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """All arms of a seed."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    trunk = _run("trunk", Arm("constant", False), seed, folder, size)
    _train(trunk)
    found = {}
    for name, arm in ARMS.items():
        run = _run(name, arm, seed, folder, size)
        _train(run)
        engine = _engine(run, arm, trunk)
        scores = {kind: bits_per_byte(engine, texts[kind], tokenizer).value for kind in texts}
        found[name] = {**scores, "book_rows": _book_rows(run, folder)}
        say = ", ".join(f"{kind} {value:.4f}" for kind, value in scores.items())
        sys.stderr.write(f"anneal: seed {seed}, {name}: {say} bits per byte\n")
    return found


def _run(name: str, arm: Arm, seed: int, folder: Path, size: Size) -> Run:
    """A whole run, or the part of one that all arms share until the last fifth (the trunk)."""
    start = first_step(1 - TAIL, size.steps)
    web = {"path": str(folder / "web"), "weight": 1 - BOOKS_IN_TAIL}
    books = {"path": str(folder / "books"), "weight": BOOKS_IN_TAIL}
    spread = [
        {**web, "weight": 1 - TAIL * BOOKS_IN_TAIL},
        {**books, "weight": TAIL * BOOKS_IN_TAIL},
    ]
    stages = [{"start": 1 - TAIL, "sources": [web, books]}]
    is_trunk = name == "trunk"
    values: dict[str, Any] = {
        **{f"model.{key}": value for key, value in size.model.items()},
        "model.vocab_size": Tokenizer.load(folder / "tokenizer").vocab_size,
        "dir": str(_place(folder, name, seed)),
        "data.seq_len": size.seq_len,
        "data.sources": spread if arm.spread else [web],
        "data.stages": [] if arm.spread or is_trunk else stages,
        "train.steps": start if is_trunk else size.steps,
        "train.global_batch_rows": size.rows,
        "train.micro_batch_rows": size.rows,
        "train.seed": seed,
        "train.log_every": size.steps,
        "optim.lr": size.lr,
        "optim.schedule": _schedule(arm, size).model_dump(),
        "checkpoint.every_steps": (size.steps - start) // (NUM_AVERAGED - 1)
        if arm.averaged
        else size.steps,
        "checkpoint.keep_last": NUM_AVERAGED,
    }
    if not (is_trunk or arm.spread or arm.schedule == "cosine"):
        values["checkpoint.branch_from"] = str(_place(folder, "trunk", seed))
    return Run.parse({}, values)


def _place(folder: Path, name: str, seed: int) -> Path:
    return folder / f"seed{seed}" / name.replace(",", "").replace(" ", "-")


def _train(run: Run) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        pretrain(run)


def _engine(run: Run, arm: Arm, trunk: Run) -> Engine:
    """The trained model; of an averaged arm the mean from the trunk's last checkpoint on."""
    folders = [
        run_checkpoints.step_folder(run.dir, step) for step in run_checkpoints.steps_of(run.dir)
    ]
    if not arm.averaged:
        return Engine(run, checkpoint.load_weights(folders[-1], parameter_shapes(run.model)))
    folders = [run_checkpoints.step_folder(trunk.dir, trunk.train.steps), *folders]
    steps = [run_checkpoints.read_state(found)["step"] for found in folders]
    weights = average.merge_weights("1-sqrt", steps)
    return Engine(run, average.averaged(folders, weights, average.check_alike(folders)))


def _book_rows(run: Run, folder: Path) -> int:
    """Rows of books that the run has read, by the state of its streams."""
    last = run_checkpoints.latest(run.dir)
    assert last is not None
    extra = run_checkpoints.read_state(last)["extra"]
    given = rows_given({name: extra[name] for name in streams_of(run.data) if name in extra})
    return given[TokenStore.open(folder / "books").fingerprint]


def _schedule(arm: Arm, size: Size) -> ScheduleConfig:
    decay = size.steps - first_step(1 - TAIL, size.steps) if arm.schedule == "wsd" else 0
    return ScheduleConfig.model_validate(
        {"kind": arm.schedule, "warmup_steps": size.steps // 20, "decay_steps": decay}
    )


def _tail_lr_share(arm: Arm, size: Size) -> float:
    start, steps, schedule = first_step(1 - TAIL, size.steps), size.steps, _schedule(arm, size)
    return lr_mass(schedule, start, steps, steps) / lr_mass(schedule, 0, steps, steps)


def _interval(differences: list[float]) -> dict[str, Any]:
    """Mean, and Student's interval of it over the seeds."""
    mean, count = statistics.fmean(differences), len(differences)
    error = statistics.stdev(differences) / math.sqrt(count)
    half = float(student.ppf((1 + LEVEL) / 2, count - 1)) * error
    return {"mean": mean, "low": mean - half, "high": mean + half, "by_seed": differences}


# --- the text ------------------------------------------------------------------------------------


def _prepare(folder: Path, small: bool, size: Size) -> dict[str, list[str]]:
    """Writes the tokenizer and the stores; returns the held-out texts of each domain."""
    train, heldout = {}, {}
    for kind in FOLDERS:
        texts = _library_texts(kind) if small else _corpus_texts(kind)
        pieces = [t[i : i + PIECE_CHARS] for t in texts for i in range(0, len(t), PIECE_CHARS)]
        order = np.random.default_rng(0).permutation(len(pieces)).tolist()
        mixed = iter([pieces[place] for place in order])
        heldout[kind] = list(_up_to(mixed, size.heldout_bytes))
        train[kind] = list(_up_to(mixed, size.bytes_of[kind]))
    fewest = min(len(pieces) for pieces in train.values())
    tokenizer = Tokenizer.train(
        [piece for pieces in train.values() for piece in pieces[:fewest]], size.vocab_size
    )
    tokenizer.save(folder / "tokenizer")
    for kind, pieces in train.items():
        documents = (Document(str(i), piece, kind) for i, piece in enumerate(pieces))
        build_store(documents, tokenizer, folder / kind)
    return heldout


def _up_to(pieces: Iterator[str], num_bytes: int) -> Iterator[str]:
    total = 0
    while total < num_bytes and (piece := next(pieces, None)) is not None:
        total += len(piece.encode())
        yield piece


def _corpus_texts(kind: str) -> Iterator[str]:
    for done in fetch_corpus(CORPUS, FOLDERS[kind]):
        if done.outcome == "skipped":
            raise DataError(f"the corpus lacks {done.item.name}: {done.detail}")
    for folder in FOLDERS[kind]:
        for path in sorted((CORPUS / folder).rglob("*")):
            if path.suffix in (".txt", ".rst", ".md"):
                yield path.read_text("utf-8", errors="replace")
            elif path.suffix == ".jsonl":
                for line in path.read_text("utf-8").splitlines():
                    yield json.loads(line)["text"]


def _library_texts(kind: str) -> Iterable[str]:
    if kind == "books":
        items = itertools.takewhile(lambda item: item.id.startswith("topics/"), stdlib_prose())
    else:
        items = stdlib_code()
    return (item.text for item in items if isinstance(item, Document))
