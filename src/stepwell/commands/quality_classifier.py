"""`stepwell train-quality-classifier --positives A --negatives B --out FOLDER`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepwell.commands.inputs import Texts, counted, parse_options, read_documents, shown
from stepwell.types import ConfigError, DataError, Document

if TYPE_CHECKING:
    from stepwell.data.quality.training import Example, Settings

NAME = "train-quality-classifier"
MAX_LEVEL = 5


@dataclass
class Train:
    """Trains a classifier that tells good texts from bad ones (or gives scores from 0 to 5), and
    measures it on texts that it hasn't seen. `stepwell quality-filter` and the step quality-score
    read the folder that it writes."""

    out: str
    """The new folder."""
    positives: Texts = ()
    """Good texts: what `stepwell curate` reads."""
    negatives: Texts = ()
    """Bad texts."""
    labels: Texts = ()
    """Instead of these: rows with a score from 0 to 5."""
    score_column: str = "score"
    """The column that holds the score."""
    text_column: str = "text"
    """The column that holds the text."""
    heldout: float = 0.1
    """The share of texts that only measure."""
    threshold: float | None = None
    """From which score on a text counts as good in the report: 0.5 (of --labels 3)."""
    max_chars: int = 10_000
    """How much of each text is read."""
    epochs: int = 10
    """How often training goes through the texts."""
    learning_rate: float = 0.5
    """At the beginning; it falls to 0."""
    dim: int = 16
    """Numbers a word is represented by."""
    word_ngrams: int = 2
    """Up to so many words in a row are features."""
    buckets: int = 1 << 18
    """Numbers that word n-grams are hashed to."""
    min_count: int = 1
    """Rarer words are left out."""
    seed: int = 0
    """Of the first weights."""
    json: bool = False
    """Print the card, which holds the report, as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options(NAME, Train, argv)
    kind = check_inputs(options)
    settings = settings_of(options)
    from stepwell.data.quality.training import train_classifier

    skipped: Counter[str] = Counter()
    examples = scored(options, skipped) if kind == "scores" else sorted_out(options, skipped)
    card = train_classifier(examples, options.out, kind, settings)
    card["skipped"] = dict(skipped)
    print(json.dumps(card) if options.json else report_text(card, options.out))
    return 0


def check_inputs(options: Train) -> Any:
    """The kind of classifier. Raises ConfigError for a mixture of inputs, or half of one."""
    two = bool(options.positives) + bool(options.negatives)
    if (two != 2) if not options.labels else two:
        raise ConfigError(
            "give --positives and --negatives, or --labels alone; here are "
            f"{counted(len(options.positives), 'input')} of --positives, "
            f"{len(options.negatives)} of --negatives and {len(options.labels)} of --labels"
        )
    return "scores" if options.labels else "binary"


def settings_of(options: Train) -> Settings:
    from pydantic import ValidationError

    from stepwell.data.quality.training import Settings
    from stepwell.schema import explain

    values = {name: getattr(options, name) for name in Settings.model_fields}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, Settings, NAME)) from error


def sorted_out(options: Train, skipped: Counter[str]) -> Iterator[Example]:
    from stepwell.data.quality.training import Example

    for level, inputs in enumerate((options.negatives, options.positives)):
        for item in shown(read_documents(inputs, options.text_column), "documents"):
            if isinstance(item, Document):
                yield Example(item.text, level)
            else:
                skipped[item.reason] += 1


def scored(options: Train, skipped: Counter[str]) -> Iterator[Example]:
    """Raises DataError at the end if not one row had a score."""
    from stepwell.data.quality.training import Example

    any_score = False
    for item in shown(read_documents(options.labels, options.text_column), "documents"):
        if not isinstance(item, Document):
            skipped[item.reason] += 1
            continue
        level = level_of(item.meta.get(options.score_column))
        if level is None:
            skipped["no_score"] += 1
            continue
        any_score = True
        yield Example(item.text, level)
    if not any_score:
        raise DataError(
            f"no row of {', '.join(options.labels)} has a whole number from 0 to {MAX_LEVEL} in "
            f"the column {options.score_column!r}; name another with --score-column"
        )


def level_of(score: Any) -> int | None:
    """A whole number from 0 to 5; None for anything else."""
    if isinstance(score, bool) or not isinstance(score, int | float):
        return None
    return int(score) if score in range(MAX_LEVEL + 1) else None


def report_text(card: dict[str, Any], out: str) -> str:
    metrics, examples = card["metrics"], card["examples"]
    lines = [f"{'label':<10}{'train':>10}{'held out':>10}"]
    for name in dict.fromkeys([*examples["train"], *examples["heldout"]]):
        train, held = (examples[part].get(name, 0) for part in ("train", "heldout"))
        lines.append(f"{name:<10}{train:>10,}{held:>10,}")
    left_out = {**{k: examples[k] for k in ("repeated", "conflicting")}, **card["skipped"]}
    left_out = [f"{n:,} {reason}" for reason, n in left_out.items() if n]
    if left_out:
        lines.append(f"left out: {', '.join(left_out)}")
    lines.append(
        f"on the held-out texts, with a score of {metrics['threshold']:g} or more as good:"
    )
    for name in ("precision", "recall", "f1", "roc_auc", "mean_absolute_error", "accuracy"):
        if name in metrics:
            value = metrics[name]
            shown_value = "not defined" if value is None else f"{value:.4f}"
            lines.append(f"  {name.replace('_', ' '):<22}{shown_value}")
    lines.append(f"  {'calibration error':<22}{metrics['calibration']['error']:.4f}")
    lines.append(f"  {'score':<14}{'texts':>8}{'mean score':>12}{'mean label':>12}")
    for row in metrics["calibration"]["bins"]:
        place = f"{row['from']:g} to {row['to']:g}"
        lines.append(
            f"  {place:<14}{row['num']:>8,}{row['mean_score']:>12.3f}{row['mean_outcome']:>12.3f}"
        )
    lines.append(f"the classifier: {out}")
    return "\n".join(lines)
