"""`stepwell generate MODEL --prompt TEXT`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from stepwell.commands.inputs import decode_weights, load_tokenizer, open_model, parse_options
from stepwell.types import Completion, ConfigError, DataError

if TYPE_CHECKING:
    from stepwell.tokenizer import Tokenizer


@dataclass
class Generate:
    """Samples from a model. Each prompt and each sample has its own random numbers, so an answer
    does not depend on what else is sampled beside it."""

    model: Positional[str]
    """A run's folder, a checkpoint, a Hugging Face folder, a .gguf file, or smollm2."""
    prompt: tuple[str, ...] = ()
    """One or more texts."""
    prompts_file: str | None = None
    """A JSONL file whose rows have a `prompt`, or `messages`."""
    chat: bool = False
    """Put each prompt into the chat template, as the user's turn."""
    tokenizer: str | None = None
    """Where the model comes without one: a tokenizer.json or its folder."""
    samples: int = 1
    """Answers for each prompt."""
    max_new_tokens: int = 128
    """Where an answer is cut."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Sample from the k likeliest only; 0 is all."""
    top_p: float = 1.0
    """Sample from the smallest set with this probability; 1 is all."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    seed: int = 0
    """The same seed gives the same answers, whatever the batch size."""
    batch_size: int = 16
    """Rows at once."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of the weights and the cache."""
    json: bool = False
    """Print one JSON object an answer."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("generate", Generate, argv)
    from stepwell.generate import Request, Sampling, generate

    if options.samples < 1 or options.batch_size < 1:
        raise ConfigError("--samples and --batch-size must be at least 1")
    model = open_model(options.model, options.tokenizer)
    tokenizer = load_tokenizer(model)
    prompts = requested(options, tokenizer)
    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop=options.stop,
        eos_ids=tuple(dict.fromkeys([*model.eos_ids, *tokenizer.stop_ids])),
        max_new_tokens=options.max_new_tokens,
    )
    requests = [
        Request(i * options.samples + j, ids, seed=options.seed + i * options.samples + j)
        for i, ids in enumerate(prompts)
        for j in range(options.samples)
    ]
    weights = decode_weights(model, options.dtype)
    begin = time.perf_counter()
    completions = generate(
        weights, requests, sampling, tokenizer=tokenizer, num_slots=options.batch_size
    )
    seconds = time.perf_counter() - begin
    for completion in completions:
        print(_text(completion, tokenizer, options))
    num_tokens = sum(len(c.token_ids) for c in completions)
    print(f"{num_tokens:,} tokens, {num_tokens / seconds:,.0f} tokens/s", file=sys.stderr)
    return 0


def requested(options: Generate, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The ids of every prompt: those of the command line, then the file's. Raises DataError for
    none and for a row without one."""
    from stepwell.eval.items import load_prompts, make_prompt

    given: list[str | list[dict[str, str]]] = list(options.prompt)
    if options.chat:
        given = [[{"role": "user", "content": text}] for text in options.prompt]
    prompts = [make_prompt(tokenizer, value, {}) for value in given]
    if options.prompts_file is not None:
        rows, broken = load_prompts(options.prompts_file, tokenizer)
        if broken:
            raise DataError(f"{options.prompts_file}, {broken[0].id}: {broken[0].detail}")
        prompts += rows
    if not prompts:
        raise DataError("there is no prompt: give --prompt TEXT or --prompts-file FILE")
    return [prompt.ids for prompt in prompts]


def _text(completion: Completion, tokenizer: Tokenizer, options: Generate) -> str:
    prompt = tokenizer.decode(completion.prompt_ids)
    if options.json:
        return json.dumps(
            {
                "prompt": prompt,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "finish_reason": completion.finish_reason,
            },
            ensure_ascii=False,
        )
    return f"{prompt}|>{completion.text}\n"
