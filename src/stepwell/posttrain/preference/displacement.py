"""Likelihood displacement: preference learning that widens the margin while the chosen answers
themselves become unlikely (2410.08847). A monitor, an alarm, and the pairs that cause it.

P pairs, D_ d_model of the hidden states.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.data.loader import rank_rows
from stepwell.data.pair_packing import pack_pairs
from stepwell.data.preference import Pair
from stepwell.files import whole_file
from stepwell.metrics import encode
from stepwell.parallel.mesh import all_gather_objects
from stepwell.sections.methods import DPO, OnlineDPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.losses import document_counts, document_index
from stepwell.train.session import Session
from stepwell.types import TrainingError

CHES_FILE = "ches.jsonl"
# A fall of the chosen answers counts once their mean is this much below where it began (nats).
LEAST_FALL = 3.0
# Standard errors that a window's mean must be away from where it began.
LEAST_T = 3.0
# Of each nat that the margin has gained, the chosen answers must have lost so much.
LEAST_SHARE = 0.2
CHUNK_PAIRS = 32


# --- the monitor -------------------------------------------------------------------------------


@dataclass
class Monitor:
    """Watches a step's mean log-probability of chosen answers and their margin over the rejected
    ones, in nats an answer: above the reference where there is one.

    `see` says once when, in the mean of the last `window` steps, the margin has grown and the
    chosen answers have fallen: both clearly, by LEAST_FALL and LEAST_SHARE of the growth, and still
    falling within the window. They began at 0 with a reference, else at the first window's means.
    """

    window: int
    has_reference: bool = True
    chosen: list[float] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)
    start: list[float] | None = None
    alarmed: bool = False

    def see(self, step: int, chosen: float, margin: float) -> Alarm | None:
        if self.alarmed or not (math.isfinite(chosen) and math.isfinite(margin)):
            return None
        self.chosen = [*self.chosen, chosen][-self.window :]
        self.margin = [*self.margin, margin][-self.window :]
        if len(self.chosen) < self.window:
            return None
        if self.start is None:
            means = float(np.mean(self.chosen)), float(np.mean(self.margin))
            self.start = [0.0, 0.0] if self.has_reference else list(means)
        fall, gain = moved(self.chosen, self.start[0]), moved(self.margin, self.start[1])
        half = self.window // 2
        falls_on = np.mean(self.chosen[-half:]) < np.mean(self.chosen[:half])
        clear = fall.t < -LEAST_T and gain.t > LEAST_T
        enough = -fall.mean > max(LEAST_FALL, LEAST_SHARE * gain.mean)
        self.alarmed = bool(falls_on and clear and enough)
        return Alarm(step, self.window, fall.mean, gain.mean) if self.alarmed else None

    def state(self) -> dict[str, Any]:
        names = ("chosen", "margin", "start", "alarmed")
        return {name: getattr(self, name) for name in names}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)


class Moved(NamedTuple):
    """mean: above the start. t: that over its standard error."""

    mean: float
    t: float


class Alarm(NamedTuple):
    """chosen, margin: nats an answer above the start, means over the window."""

    step: int
    window: int
    chosen: float
    margin: float

    def text(self, kind: str, run_dir: str | None = None) -> str:
        """What was seen, and what to do next. run_dir: of a run whose pairs can be left out."""
        other = "--method.loss.kind dpop" if kind != "dpop" else "a larger positive_coef"
        alike = (
            "leave out the pairs whose answers are too alike (--method.drop_ches 0.1; "
            f"--method.ches true lists them in {run_dir}/{CHES_FILE}), or "
        )
        return (
            f"likelihood displacement: the margin has grown by {self.margin:.3g} nats while the "
            f"chosen answers fell by {-self.chosen:.3g} nats an answer (means of the last "
            f"{self.window} steps), so probability goes to answers that nobody chose. Next: "
            f"{'' if run_dir is None else alike}hold the chosen answers up "
            f"(--method.loss.sft_coef 1, or {other}), or lower optim.lr"
        )


def moved(values: Sequence[float], start: float) -> Moved:
    """t is infinite where values do not vary, and 0 where they have not moved at all."""
    y = np.asarray(values, np.float64) - start
    mean, error = float(y.mean()), float(y.std(ddof=1)) / math.sqrt(len(y))
    if error <= 1e-12 * abs(mean):
        return Moved(mean, math.copysign(math.inf, mean) if mean else 0.0)
    return Moved(mean, mean / error)


def open_monitor(method: DPO | OnlineDPO, state: Mapping[str, Any]) -> Monitor:
    """The run's monitor, as it was when `state` was taken (empty: at the start)."""
    monitor = Monitor(method.displacement_window, method.loss.needs_reference)
    monitor.load(state)
    return monitor


def watch(session: Session, monitor: Monitor) -> None:
    """Tells the monitor of the step just taken. Raises TrainingError if displacement is to stop the
    run."""
    method, stats = session.run.method, session.stats
    assert isinstance(method, DPO | OnlineDPO)
    if stats is None or method.displacement == "ignore" or method.loss.kind == "kto":
        return
    ending = "_shift" if monitor.has_reference else ""
    chosen, rejected = (stats.metrics[f"logps/{side}{ending}"] for side in ("chosen", "rejected"))
    step = session.engine.step
    alarm = monitor.see(step, chosen, chosen - rejected)
    if alarm is None:
        return
    text = alarm.text(method.loss.kind, str(session.dir) if isinstance(method, DPO) else None)
    details = {key: value for key, value in alarm._asdict().items() if key != "step"}
    session.log.event("displacement", step, advice=text, **details)
    if method.displacement == "stop":
        raise TrainingError(
            f"{text}. The same command goes on from the last checkpoint and stops here again; "
            "--method.displacement warn only reports it"
        )


# --- the pairs that cause it -------------------------------------------------------------------


class Ches(NamedTuple):
    """score: <S+, S-> - |S+|^2 of the sums of hidden states (2410.08847, definition 2).
    normalised: with their means, so that long answers do not rank by their length."""

    score: float
    normalised: float


def ches(chosen_D: Tensor, rejected_D: Tensor, num_chosen: float, num_rejected: float) -> Ches:
    """chosen_D, rejected_D: sums over an answer's tokens of the hidden state that predicts each."""
    inner, square = float(chosen_D @ rejected_D), float(chosen_D @ chosen_D)
    normalised = inner / (num_chosen * num_rejected) - square / num_chosen**2
    return Ches(inner - square, normalised)


def ches_scores(engine: Engine, pairs: Sequence[Pair], pad_id: int) -> list[Ches]:
    """Of every pair under the engine's weights, in order. Every rank calls it with all pairs."""
    mesh, scores = engine.mesh, {}
    size = CHUNK_PAIRS * mesh.data_world
    for start in range(0, len(pairs), size):
        chunk = range(start, min(start + size, len(pairs)))
        share = rank_rows(len(chunk), mesh.data_rank, mesh.data_world)
        mine = chunk[share.start : share.stop]
        batch = pack_pairs(
            [pairs[i] for i in mine], engine.run.data.seq_len, pad_id, index=list(mine)
        )
        found = batch_ches(engine.hidden(batch), batch)
        for part in all_gather_objects(found if mesh.counts_rows else {}, mesh):
            scores |= part
    return [scores[i] for i in range(len(pairs))]


def batch_ches(hidden_BTD: Tensor, batch: Batch) -> dict[int, Ches]:
    """The scores of a batch's pairs by their numbers."""
    index_BT, num_docs = document_index(batch)
    trained_BT = batch.weights_BT != 0
    sums_DD = hidden_BTD.new_zeros(num_docs + 1, hidden_BTD.shape[-1], dtype=torch.float64)
    sums_DD.index_add_(0, index_BT[trained_BT], hidden_BTD[trained_BT].double())
    counts = document_counts(batch).tolist()
    numbers = torch.zeros(num_docs + 1, dtype=torch.int64)
    numbers[index_BT.flatten()] = batch.extra["index"].flatten()
    return {
        int(numbers[d]): ches(sums_DD[d], sums_DD[d + 1], counts[d], counts[d + 1])
        for d in range(0, num_docs, 2)
    }


def kept_pairs(scores: Sequence[Ches], share: float) -> list[int]:
    """Numbers of the pairs that are left when the `share` with the highest normalised scores is
    left out (rounded down), in order."""
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i].normalised, i))
    dropped = set(ranked[: num_dropped(len(scores), share)])
    return [i for i in range(len(scores)) if i not in dropped]


def num_dropped(num_pairs: int, share: float) -> int:
    return int(num_pairs * share)


def write_ches(
    path: Path,
    scores: Sequence[Ches],
    pairs: Sequence[Pair],
    kept: Sequence[int],
    tokenizer: Tokenizer,
) -> None:
    """A line a pair, the worst first: scores, whether it was left out, and its text."""
    held = set(kept)
    with whole_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for i in sorted(range(len(scores)), key=lambda i: (-scores[i].normalised, i)):
            line = {
                "pair": i,
                "item": pairs[i].item,
                "ches": encode(scores[i].score),
                "ches_normalised": encode(scores[i].normalised),
                "dropped": i not in held,
                "prompt": tokenizer.decode(list(pairs[i].prompt_ids)),
                "chosen": tokenizer.decode(list(pairs[i].chosen_ids)),
                "rejected": tokenizer.decode(list(pairs[i].rejected_ids)),
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_kept(path: Path, num_pairs: int) -> list[int] | None:
    """The numbers that `write_ches` was given; None if the file is not there, or of other pairs."""
    if not path.exists():
        return None
    # Not `splitlines`, which breaks lines within a text too.
    lines = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    if sorted(line["pair"] for line in lines) != list(range(num_pairs)):
        return None
    return sorted(line["pair"] for line in lines if not line["dropped"])
