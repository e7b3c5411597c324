"""`stepwell score MODEL[,MODEL ...] ROWS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from stepwell.commands.inputs import (
    Place,
    check_least,
    counted,
    load_tokenizer,
    open_model,
    parse_options,
)
from stepwell.files import whole_file
from stepwell.types import ConfigError, DataError, Dropped

if TYPE_CHECKING:
    from stepwell.posttrain.reward_model.model import Scorer
    from stepwell.tokenizer import Tokenizer

CHUNK_ROWS = 256


@dataclass
class Score:
    """Scores the answers of a file with a trained reward model, or with several as one.

    A row of `chosen` and `rejected` gets both scores and their difference, one of `messages` or of
    `prompt` and `completion` a `score`, with --steps one of `prompt` and `completions` (or a
    `completion`, which is split) the chance that each step is right, and a reward of them.
    """

    models: Positional[str]
    """Folders of reward models, several of them with commas between: runs, checkpoints, Hugging
    Face sequence or token classifiers."""
    rows: Positional[str]
    """A JSONL or Parquet file."""
    out: Place = None
    """The JSONL file to write; by default standard output."""
    aggregate: Literal["mean", "min", "mean-k-sd"] = "mean"
    """What several models say together."""
    k: float = 1.0
    """Of mean-k-sd: how many standard deviations are taken off."""
    steps: Literal["none", "product", "min", "last", "mean"] = "none"
    """Score steps, and take this of their chances as the reward."""
    separator: str = "\\n"
    """What ends a step; \\n is a line's end."""
    seq_len: int = 2048
    """Longer texts are cut at the end."""
    limit: int | None = None
    """Use the first so many rows."""
    tokenizer: Place = None
    """Where the models come without one: a tokenizer.json or its folder."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Of the computation; by default bf16 on a GPU, fp32 on the CPU."""
    json: bool = False
    """Print the summary as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("score", Score, argv)
    check_least(limit=options.limit, seq_len=options.seq_len)
    import torch

    from stepwell.data.sources.rows import records
    from stepwell.parallel.mesh import Mesh
    from stepwell.posttrain.reward_model.model import open_scorer
    from stepwell.posttrain.reward_model.objectives import check_objectives, remarks

    if options.out is None and options.json:
        raise ConfigError("--json prints the summary where the scores go; name a file with --out")
    names = options.models.split(",")
    objectives = check_objectives(names)
    model = open_model(names[0], options.tokenizer)
    tokenizer = load_tokenizer(model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer = open_scorer(
        names,
        Mesh(1, 0, 0, device),
        min(options.seq_len, model.cfg.max_seq_len),
        options.aggregate,
        options.k,
        tokenizer=tokenizer,
        compute=options.dtype or ("bf16" if device.type == "cuda" else "fp32"),
    )
    for remark in remarks(scorer, objectives, options.steps != "none"):
        print(f"warning: {remark}", file=sys.stderr)
    rows = islice(records(options.rows), options.limit)
    margins: list[float] = []
    summary: dict[str, Any] = {"rows": 0, "scored": 0, "dropped": {}}
    with opened(options.out) as file:
        while chunk := list(islice(rows, CHUNK_ROWS)):
            for values in scored(chunk, scorer, tokenizer, options):
                file.write(json.dumps(values, ensure_ascii=False) + "\n")
                count(values, summary, margins)
        if not summary["scored"]:
            raise DataError(f"no row of {options.rows} can be scored: {reasons(summary)}")
    if margins:
        summary |= of_pairs(margins)
    if options.json:
        print(json.dumps(summary))
    else:
        print(summary_text(summary), file=sys.stderr)
    return 0


def scored(
    chunk: Sequence[Any], scorer: Scorer, tokenizer: Tokenizer, options: Score
) -> Iterator[dict[str, Any]]:
    """The rows with their scores, in order; one that has none says why in `dropped`."""
    from stepwell.data.chat import UnusableRow
    from stepwell.posttrain.reward_model.ensembles import combine, disagreement
    from stepwell.posttrain.reward_model.prm import aggregate

    separator = options.separator.replace("\\n", "\n")
    found: list[tuple[dict[str, Any], list[tuple[list[int], list[int]]]]] = []
    for record in chunk:
        if isinstance(record, Dropped):
            found.append(({"dropped": record.reason}, []))
            continue
        values = dict(record.values)
        try:
            if options.steps == "none":
                texts = [(ids, []) for ids in whole_answers(values, tokenizer)]
            else:
                texts = [steps_of(values, tokenizer, separator, scorer.seq_len)]
            found.append((values, [cut(text, values, scorer.seq_len) for text in texts]))
        except UnusableRow as error:
            found.append((values | {"dropped": error.reason}, []))
    texts = [text for _, parts in found for text in parts]
    docs = [ids for ids, _ in texts]
    if options.steps != "none":
        chances = iter(scorer.step_scores(docs, [ends for _, ends in texts]))
        for values, parts in found:
            for steps in islice(chances, len(parts)):
                values |= {"step_scores": steps, "score": aggregate(steps, options.steps)}
            yield values
        return
    scores_KD = scorer.member_scores(docs)
    scores = iter(combine(scores_KD, scorer.aggregate, scorer.k).tolist())
    apart = iter(disagreement(scores_KD).tolist())
    for values, parts in found:
        mine, spread = list(islice(scores, len(parts))), list(islice(apart, len(parts)))
        several = len(scorer.members) > 1
        if len(mine) == 2:
            values |= {"score_chosen": mine[0], "score_rejected": mine[1]}
            values |= {"score_margin": mine[0] - mine[1]}
            values |= {"disagreement": max(spread)} if several else {}
        elif mine:
            values |= {"score": mine[0]} | ({"disagreement": spread[0]} if several else {})
        yield values


def whole_answers(values: Mapping[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of the row's answer, or of its chosen and its rejected one, each with its prompt and
    up to the token that ends it. Raises UnusableRow."""
    from stepwell.data.preference import render_answer, two_answers
    from stepwell.data.sft_data import render_row
    from stepwell.posttrain.reward_model.rows import answer_length

    if values.get("chosen") is not None:
        texts = [render_answer(tokenizer, p, a, values) for p, a in two_answers(values)]
    else:
        texts = [render_row(tokenizer, values)]
    return [ids[: answer_length(mask)] for ids, mask in texts]


def steps_of(
    values: Mapping[str, Any], tokenizer: Tokenizer, separator: str, seq_len: int
) -> tuple[list[int], list[int]]:
    """ids of the prompt and its steps, and where the steps end. Raises UnusableRow, also where
    seq_len is too short for one of the steps."""
    from stepwell.data.chat import UnusableRow
    from stepwell.data.preference import ended_step, step_prompt
    from stepwell.posttrain.reward_model.prm import split_steps

    texts = values.get("completions")
    if texts is None and isinstance(values.get("completion"), str):
        if not values["completion"].strip():
            raise UnusableRow("empty_completion", "the completion is blank")
        texts = split_steps(values["completion"], separator)
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise UnusableRow(
            "missing_column", "steps need `completions`, a text each, or `completion`"
        )
    if values.get("prompt") is None:
        raise UnusableRow("missing_column", "no 'prompt'")
    ids, ends = list(step_prompt(tokenizer, values)), []
    for text in texts:
        ids += tokenizer.encode(ended_step(text, separator), special=False)
        ends.append(len(ids) - 1)
    if len(ids) > seq_len:
        raise UnusableRow("too_long", f"{len(ids)} tokens, more than {seq_len}")
    return ids, ends


def cut(
    text: tuple[list[int], list[int]], values: dict[str, Any], seq_len: int
) -> tuple[list[int], list[int]]:
    ids, ends = text
    if len(ids) > seq_len:
        values["truncated"] = True
    return ids[:seq_len], ends


def count(values: Mapping[str, Any], summary: dict[str, Any], margins: list[float]) -> None:
    summary["rows"] += 1
    if "dropped" in values:
        reason = values["dropped"]
        summary["dropped"][reason] = summary["dropped"].get(reason, 0) + 1
        return
    summary["scored"] += 1
    if "score_margin" in values:
        margins.append(values["score_margin"])


def of_pairs(margins: Sequence[float]) -> dict[str, Any]:
    """Accuracy with its interval, and the temperature that would make the chances true."""
    from stepwell.eval.score import bootstrap_interval
    from stepwell.posttrain.reward_model.calibration import fit_temperature

    right = [1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in margins]
    found: dict[str, Any] = {
        "accuracy": sum(right) / len(right),
        "interval": bootstrap_interval(right),
        "margin": sum(margins) / len(margins),
    }
    try:
        return found | {"temperature": fit_temperature(margins)}
    except DataError as error:
        return found | {"temperature": None, "no_temperature": str(error)}


def reasons(summary: Mapping[str, Any]) -> str:
    parts = [f"{number} {reason}" for reason, number in summary["dropped"].items()]
    return ", ".join(parts) or "it has none"


def summary_text(summary: Mapping[str, Any]) -> str:
    text = f"{counted(summary['scored'], 'row')} scored"
    if summary["dropped"]:
        text += f", {reasons(summary)} left out"
    if "accuracy" in summary:
        low, high = summary["interval"]
        text += (
            f"; the chosen answer wins in {100 * summary['accuracy']:.1f} % "
            f"({100 * low:.1f} to {100 * high:.1f}), mean margin {summary['margin']:.3f}"
        )
        if summary["temperature"] is not None:
            text += f", calibrated at temperature {summary['temperature']:.2f}"
    return text


@contextmanager
def opened(out: str | None) -> Iterator[IO[str]]:
    """Standard output, or a file that appears when all is written."""
    if out is None:
        yield sys.stdout
        return
    with whole_file(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file
