"""`stepwell generate MODEL --prompt TEXT`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from stepwell.commands.inputs import (
    Place,
    Texts,
    check_least,
    counted,
    decode_weights,
    load_tokenizer,
    open_model,
    parse_options,
)
from stepwell.types import Completion, DataError

if TYPE_CHECKING:
    from stepwell.tokenizer import Tokenizer


@dataclass
class Generate:
    """Samples from a model. Each prompt and each sample has its own random numbers, so an answer
    does not depend on what else is sampled beside it."""

    model: Positional[str]
    """A run's or a quickstart's folder, a checkpoint, a Hugging Face folder, a .gguf file, or
    smollm2."""
    prompt: Texts = ()
    """One or more texts."""
    prompts_file: Place = None
    """A JSONL file whose rows have a `prompt`, or `messages`."""
    chat: bool = False
    """Put each prompt into the chat template, as the user's turn."""
    tokenizer: Place = None
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
    stop: Texts = ()
    """Texts that end an answer."""
    seed: int = 0
    """The same seed gives the same answers, whatever the batch size."""
    batch_size: int = 16
    """Rows at once."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of the weights and the cache."""
    echo: bool = False
    """Print the prompt before its answer (on a terminal it is always shown, dimmed)."""
    json: bool = False
    """Print one JSON object an answer."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("generate", Generate, argv)
    check_least(samples=options.samples, batch_size=options.batch_size)
    from stepwell.generate import Request, Sampling, generate

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
    style = "dim" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else "plain"
    for number, completion in enumerate(completions):
        if options.json:
            print(_json(completion, tokenizer))
        else:
            print(
                ("\n" if number else "") + answer_text(completion, tokenizer, options.echo, style)
            )
    if note := full_context(completions, model.cfg.max_seq_len, options.max_new_tokens):
        print(note, file=sys.stderr)
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


def answer_text(completion: Completion, tokenizer: Tokenizer, echo: bool, style: str) -> str:
    """The answer alone; style dim: after its prompt, which a terminal then shows dimmed; echo:
    after its prompt as it is."""
    prompt = tokenizer.decode(completion.prompt_ids)
    if style == "dim":
        return f"\x1b[2m{prompt}\x1b[0m{completion.text}"
    return prompt + completion.text if echo else completion.text


def full_context(
    completions: Sequence[Completion], max_seq_len: int, max_new_tokens: int
) -> str | None:
    """What to say of answers that ended because the model sees no further."""
    cut = sum(
        c.finish_reason == "length"
        and len(c.token_ids) < max_new_tokens
        and len(c.prompt_ids) + len(c.token_ids) >= max_seq_len
        for c in completions
    )
    if not cut:
        return None
    return (
        f"{counted(cut, 'answer')} ended before --max-new-tokens {max_new_tokens}: the model's "
        f"context of {max_seq_len} tokens (prompt and answer) was full"
    )


def _json(completion: Completion, tokenizer: Tokenizer) -> str:
    return json.dumps(
        {
            "prompt": tokenizer.decode(completion.prompt_ids),
            "text": completion.text,
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "finish_reason": completion.finish_reason,
        },
        ensure_ascii=False,
    )
