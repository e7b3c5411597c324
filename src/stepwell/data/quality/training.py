"""Trains a quality classifier: fastText (Joulin et al. 2016, 1607.01759) on good against bad texts,
as DCLM does (2406.11794, section 4.4), or on educational scores from 0 to 5 (FineWeb-Edu,
2406.17557, section 4).

What comes out depends on the texts and settings alone, not on their order.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from stepwell import __version__
from stepwell.data.files import file_sha256, new_folder
from stepwell.data.quality.classifier import (
    CARD,
    FORMAT,
    LABELS,
    MODEL,
    Kind,
    prepare,
    read_classifier,
)
from stepwell.data.quality.metrics import binary_report, calibration, level_report
from stepwell.schema import NonNegative, Positive, Section
from stepwell.types import DataError

SCORED_AT_ONCE = 1000
Share = Annotated[float, Field(strict=True, gt=0, lt=1)]


class Settings(Section):
    """max_chars: how much of each text is read, in training and later. heldout: the share of texts
    (chosen by their hashes) that only measure. threshold: what counts as good in the report; by
    default 0.5, or 3 of scores."""

    max_chars: Positive = 10_000
    heldout: Share = 0.1
    threshold: Annotated[float, Field(strict=True)] | None = None
    dim: Positive = 16
    word_ngrams: Positive = 2
    buckets: Positive = 1 << 18
    epochs: Positive = 10
    learning_rate: Annotated[float, Field(strict=True, gt=0)] = 0.5
    min_count: Positive = 1
    seed: NonNegative = 0


@dataclass(frozen=True)
class Example:
    """level: 1 for a positive text and 0 for a negative one, or its score."""

    text: str
    level: int


def train_classifier(
    examples: Iterable[Example], out: str | Path, kind: Kind, settings: Settings | None = None
) -> dict[str, Any]:
    """Writes a new folder with model.bin and card.json; returns the card, which holds the metrics
    on the held-out texts.

    A text that comes twice counts once; one that comes with different labels is left out. Raises
    DataError if `out` exists, or when some label lacks texts to train on or to measure with.
    """
    import fasttext

    settings = settings or Settings()
    with new_folder(out) as folder, TemporaryDirectory(dir=folder.parent, prefix=".tmp-") as name:
        work = Path(name)
        spread(examples, work, settings.max_chars)
        counts = gather(work, kind, settings.heldout)
        check_counts(counts, kind)
        model = fasttext.train_supervised(
            str(work / "train.txt"), dim=settings.dim, wordNgrams=settings.word_ngrams,
            bucket=settings.buckets, epoch=settings.epochs, lr=settings.learning_rate,
            minCount=settings.min_count, thread=1, seed=settings.seed, verbose=0,
        )  # fmt: skip
        model.save_model(str(folder / MODEL))
        card = {
            "format": FORMAT,
            "kind": kind,
            "examples": counts,
            "settings": settings.model_dump(),
            "model_sha256": file_sha256(folder / MODEL),
            "stepwell": __version__,
        }
        write_card(folder, card)
        card["metrics"] = measure(folder, work, settings.threshold)
        write_card(folder, card)
    return card


def write_card(folder: Path, card: dict[str, Any]) -> None:
    (folder / CARD).write_text(json.dumps(card, indent=1) + "\n", "utf-8")


def spread(examples: Iterable[Example], work: Path, max_chars: int) -> None:
    """Deals the examples to 256 files by their hashes, so that each can be sorted in memory."""
    files = [(work / f"part-{i:02x}").open("w", encoding="utf-8") for i in range(256)]
    try:
        for example in examples:
            text = prepare(example.text, max_chars)
            if text:
                digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
                files[int(digest[:2], 16)].write(f"{digest} {example.level} {text}\n")
    finally:
        for file in files:
            file.close()


def gather(work: Path, kind: Kind, heldout: float) -> dict[str, Any]:
    """Writes train.txt as fastText reads it and heldout.txt (level, text), in the order of the
    hashes. Returns how many of each there are."""
    train, held = Counter[int](), Counter[int]()
    num_same = num_conflicting = 0
    with (
        (work / "train.txt").open("w", encoding="utf-8") as train_file,
        (work / "heldout.txt").open("w", encoding="utf-8") as held_file,
    ):
        for part in sorted(work.glob("part-*")):
            levels: dict[str, set[int]] = {}
            texts: dict[str, str] = {}
            for line in part.read_text("utf-8").split("\n")[:-1]:
                digest, level, text = line.split(" ", 2)
                num_same += digest in texts
                texts[digest] = text
                levels.setdefault(digest, set()).add(int(level))
            part.unlink()
            for digest in sorted(texts):
                if len(levels[digest]) > 1:
                    num_conflicting += 1
                    continue
                (level,) = levels[digest]
                if int(digest[2:18], 16) < heldout * 2**64:
                    held[level] += 1
                    held_file.write(f"{level} {texts[digest]}\n")
                else:
                    train[level] += 1
                    train_file.write(f"__label__{LABELS[kind][level]} {texts[digest]}\n")
    return {
        "train": {LABELS[kind][i]: train[i] for i in sorted(train)},
        "heldout": {LABELS[kind][i]: held[i] for i in sorted(held)},
        "repeated": num_same,
        "conflicting": num_conflicting,
    }


def check_counts(counts: dict[str, Any], kind: Kind) -> None:
    """Raises DataError unless there is something to tell apart, and to measure it with."""
    known = {*counts["train"], *counts["heldout"]}
    needed = set(LABELS[kind]) if kind == "binary" else known
    lacking = [name for name in sorted(needed) if not counts["train"].get(name)]
    if len(needed) < 2 or lacking:
        raise DataError(
            f"a classifier needs texts to train on of at least two labels; there are "
            f"{counts['train']} ({counts['repeated']} repeated, {counts['conflicting']} with "
            "different labels were left out)"
        )
    if len(counts["heldout"]) < 2:
        raise DataError(
            f"the held-out part has {counts['heldout']}: at least two labels are needed to measure "
            "with; give more texts or a larger share with --heldout"
        )


def measure(folder: Path, work: Path, threshold: float | None) -> dict[str, Any]:
    """The report on the held-out texts."""
    classifier = read_classifier(str(folder))
    scores, levels = [], []
    for chunk in chunks(work / "heldout.txt"):
        scores.append(classifier.score([text for _, text in chunk]))
        levels += [level for level, _ in chunk]
    score, level = np.concatenate(scores).astype(np.float64), np.array(levels)
    if classifier.kind == "binary":
        limit = 0.5 if threshold is None else threshold
        edges = [i / 10 for i in range(11)]
        return {
            **binary_report(score, level == 1, limit),
            "calibration": calibration(score, level, edges),
        }
    limit = 3.0 if threshold is None else threshold
    num = len(LABELS["scores"])
    return {
        **binary_report(score, level >= limit, limit),
        **level_report(score, level, num),
        "calibration": calibration(score, level, [i - 0.5 for i in range(num + 1)]),
    }


def chunks(path: Path) -> Iterator[list[tuple[int, str]]]:
    found: list[tuple[int, str]] = []
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            level, _, text = line.rstrip("\n").partition(" ")
            found.append((int(level), text))
            if len(found) == SCORED_AT_ONCE:
                yield found
                found = []
    if found:
        yield found
