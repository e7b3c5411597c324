"""What the report says of a run that trained on its own samples: its headline curves, and what it
answered to the same prompts before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.metrics import read_lines, series

# key -> (title, label of the axis, whether it is a share)
HEADLINE = {
    "reward/accuracy": ("Accuracy on the sampled prompts", "right answers", True),
    "train/kl": ("Divergence from the reference", "nats a token", False),
    "kl/reference": ("Divergence from the reference", "nats an answer", False),
    "train/entropy": ("Entropy", "nats a token", False),
    "rollout/length": ("Length of answers", "tokens", False),
    "reward/dead_groups": ("Groups of equal rewards", "dead groups", True),
}
GREEDY_NOTE = "Greedy answers of the first and of the last weights to the same prompts."
SAMPLED_NOTE = (
    "The first and the last sampled answer to the same prompts (there are no greedy ones of the "
    "run's end)."
)
NO_STEP = -1


@dataclass(frozen=True)
class Graded:
    """An answer with its reward and what each dimension gave; None: did not apply, or failed."""

    step: int
    text: str
    reward: float | None
    scores: Mapping[str, float | None]


@dataclass(frozen=True)
class Change:
    prompt: str
    before: Graded
    after: Graded


@dataclass(frozen=True)
class Changes:
    """note: which answers these are. dimensions: names of the reward's parts, if it has several."""

    rows: Sequence[Change] = ()
    note: str = ""
    dimensions: Sequence[str] = ()


@dataclass(frozen=True)
class Line:
    """A headline quantity over the steps; others: further lines (name, steps, values)."""

    title: str
    y_label: str
    percent: bool
    name: str
    steps: Sequence[int]
    values: Sequence[float]
    others: Sequence[tuple[str, Sequence[int], Sequence[float]]] = ()


def headline_lines(rows: list[dict[str, Any]]) -> list[Line]:
    """Reward as a whole and by dimension, then `HEADLINE` as far as it was logged."""
    steps, rewards = series(rows, "reward/mean")
    if not steps:
        return []
    names = sorted({n for row in rows for key in row if (n := _dimension(key))})
    parts = [(name, *series(rows, f"reward/{name}/mean")) for name in names]
    shown = parts if len(parts) > 1 else []
    found = [Line("Reward", "mean reward", False, "reward", steps, rewards, shown)]
    for key, (title, label, percent) in HEADLINE.items():
        steps, values = series(rows, key)
        if steps:
            found.append(Line(title, label, percent, label, steps, values))
    return found


def _dimension(key: str) -> str | None:
    start, _, rest = key.partition("/")
    name, _, end = rest.rpartition("/")
    return name if start == "reward" and end == "mean" and name else None


def read_changes(path: Path) -> Changes:
    """From the lines of `samples.jsonl`; none in a file of other samples."""
    rows = [row for row in read_lines(path) if "scores" in row]
    greedy, note = [row for row in rows if row.get("greedy")], GREEDY_NOTE
    if len({row["step"] for row in greedy}) < 2:
        greedy, note = [row for row in rows if not row.get("greedy")], SAMPLED_NOTE
    changes = _pairs(greedy)
    if not changes:
        return Changes()
    names = dict.fromkeys(n for c in changes for n in (*c.before.scores, *c.after.scores))
    return Changes(changes, note, list(names) if len(names) > 1 else [])


def _pairs(rows: Sequence[Mapping[str, Any]]) -> list[Change]:
    """A prompt's first and last answer, where these are of two steps."""
    first: dict[str, Mapping[str, Any]] = {}
    last: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        first.setdefault(row["prompt"], row)
        last[row["prompt"]] = row
    return [
        Change(prompt, _graded(before), _graded(last[prompt]))
        for prompt, before in first.items()
        if last[prompt].get("step", NO_STEP) > before.get("step", NO_STEP)
    ]


def _graded(row: Mapping[str, Any]) -> Graded:
    return Graded(row["step"], said(row), row["reward"], row["scores"])


def said(row: Mapping[str, Any]) -> str:
    """A sample's answer; with an environment who said what, a line a turn."""
    turns = row.get("turns") or ()
    lines = [f"{turn['role']}: {turn['content']}" for turn in turns]
    return "\n".join(lines) if lines else str(row.get("completion", row.get("text", "")))
