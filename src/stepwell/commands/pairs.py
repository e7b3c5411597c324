"""`stepwell pairs MODEL PROMPTS --rewards SOURCE --out FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from stepwell.commands.inputs import (
    Model,
    Place,
    check_least,
    counted,
    decode_weights,
    load_tokenizer,
    open_model,
    parse_options,
    shown,
)
from stepwell.commands.score import opened
from stepwell.types import ConfigError, DataError

if TYPE_CHECKING:
    from stepwell.eval.grade import Prompt
    from stepwell.posttrain.preference.make_pairs import Choice, Counts
    from stepwell.posttrain.rewards.composite import Rewards
    from stepwell.tokenizer import Tokenizer

CHUNK_ANSWERS = 256


@dataclass
class Pairs:
    """Makes preference pairs out of a model's own answers: samples several to each prompt, scores
    them, and pairs better ones with worse ones. With --sft it keeps the right answers instead."""

    model: tyro.conf.Positional[str]
    """What samples: a run's folder, a checkpoint, a Hugging Face folder, a .gguf file, or
    smollm2."""
    prompts: tyro.conf.Positional[str]
    """JSONL or Parquet with `prompt` (a text or messages) and the columns that the rewards need."""
    rewards: str
    """What scores: exact, math, regex:PATTERN, json:SCHEMA_FILE, code, tests, gym:SET,
    model:FOLDER[,FOLDER], or python:FILE.py:FUNCTION."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="PATH")]
    """The JSONL file to write."""
    num: int = 8
    """Answers to each prompt."""
    pairing: Literal["best-worst", "right-wrong"] = "best-worst"
    """One pair a prompt, or each right answer with each wrong one."""
    sft: bool = False
    """Write rows for `stepwell sft`: the right answers, each text once."""
    right_at: float | None = None
    """The score from which an answer is right (right-wrong, --sft): 0.99 by default, but for scores
    that a model has learnt and for penalties, of which none is right."""
    most: int = 4
    """Rows of one prompt, at most (right-wrong, --sft)."""
    keep_cut: bool = False
    """Answers that were cut off at --max-new-tokens may be chosen too."""
    limit: int | None = None
    """The first so many prompts only."""
    max_new_tokens: int = 256
    """Where an answer is cut."""
    temperature: float = 1.0
    """Of sampling."""
    top_p: float = 1.0
    """Sample from the smallest set with this probability; 1 is all."""
    seed: int = 0
    """The same seed gives the same answers, whatever the batch size."""
    batch_size: int = 64
    """Answers at once."""
    timeout_s: float = 10.0
    """For scoring each answer, in seconds."""
    tokenizer: Place = None
    """Where the model comes without one: a tokenizer.json or its folder."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of the weights and the cache."""
    self_test: bool = True
    """Try the rewards on junk first; --no-self-test leaves that out."""
    json: bool = False
    """Print the summary as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("pairs", Pairs, argv)
    check(options)
    from stepwell.posttrain.preference.make_pairs import Choice, load_sources

    choice = Choice(options.pairing, right_at(options), options.most, options.keep_cut)
    model = open_model(options.model, options.tokenizer)
    tokenizer = load_tokenizer(model)
    longest = model.cfg.max_seq_len - options.max_new_tokens
    sources, dropped = load_sources(options.prompts, tokenizer, longest, options.limit)
    rewards = open_tested(options, [prompt for prompt, _ in sources], model, tokenizer)
    try:
        counts = write_rows(options, sources, choice, rewards, model, tokenizer)
    finally:
        rewards.close()
    counts.dropped_prompts = dropped
    summary = counts.summary()
    print(json.dumps(summary) if options.json else summary_text(summary, options))
    return 0


def check(options: Pairs) -> None:
    """Raises ConfigError for options that cannot be."""
    check_least(1 if options.sft else 2, num=options.num)
    names = ("most", "max_new_tokens", "batch_size", "limit")
    check_least(**{name: getattr(options, name) for name in names})
    for name in ("timeout_s", "temperature"):
        value = getattr(options, name)
        if not value > 0:
            why = ": greedy answers are all the same" if name == "temperature" else ""
            raise ConfigError(f"--{name.replace('_', '-')} {value:g} must be above 0{why}")
    if options.sft and options.pairing != "best-worst":
        raise ConfigError(f"--pairing {options.pairing} is of pairs, and --sft makes none")
    what = "--sft" if options.sft else f"--pairing {options.pairing}"
    if what != "--pairing best-worst" and right_at(options) is None:
        raise ConfigError(
            f"{what} asks which answers are right, and of the scores of {options.rewards} none is; "
            "say with --right-at from which one on, or take --pairing best-worst"
        )


def right_at(options: Pairs) -> float | None:
    """None: no score of the rewards means that an answer is right."""
    kind = options.rewards.partition(":")[0]
    usual = None if kind in ("model", "overlong", "repetition") else 0.99
    return usual if options.right_at is None else options.right_at


def open_tested(
    options: Pairs, prompts: Sequence[Prompt], model: Model, tokenizer: Tokenizer
) -> Rewards:
    """The rewards, once junk has shown that it doesn't pay. Raises ConfigError, and DataError for
    rows without a column that they need."""
    import torch

    from stepwell.config import Run
    from stepwell.parallel.mesh import Mesh
    from stepwell.posttrain.rewards.composite import open_rewards
    from stepwell.posttrain.rewards.self_test import self_test
    from stepwell.sections.methods import GRPO
    from stepwell.sections.rewards import RewardTerm

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    most = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens
    values = {"data.seq_len": most, "model.max_seq_len": most, "precision.compute": options.dtype}
    run = Run.parse({}, values)  # of which reward models read the length of a row
    term = RewardTerm(name="reward", source=options.rewards)
    method = GRPO(rewards=(term,), reward_timeout_s=options.timeout_s)
    rewards = open_rewards(method, tokenizer, Mesh(1, 0, 0, device), run)
    try:
        rewards.check_columns(prompts)
        texts = rewards.warnings
        if options.self_test:
            texts = self_test(rewards, prompts, tokenizer, options.max_new_tokens)
        for text in texts:
            print(f"warning: {text}", file=sys.stderr)
    except BaseException:
        rewards.close()
        raise
    return rewards


def write_rows(
    options: Pairs,
    sources: Sequence[tuple[Prompt, Any]],
    choice: Choice,
    rewards: Rewards,
    model: Model,
    tokenizer: Tokenizer,
) -> Counts:
    """Samples, scores and writes prompt by prompt. Raises DataError if no row comes of it: then
    there is no file."""
    from stepwell.generate import Sampling, generate
    from stepwell.posttrain.preference.make_pairs import Counts, pair_rows, sft_rows
    from stepwell.posttrain.rollout import scored
    from stepwell.posttrain.sampling.episodes import Episode, group_requests

    sampling = Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        eos_ids=tuple(dict.fromkeys([*model.eos_ids, *tokenizer.stop_ids])),
        max_new_tokens=options.max_new_tokens,
    )
    weights, counts = decode_weights(model, options.dtype), Counts()
    make = sft_rows if options.sft else pair_rows
    step = max(1, CHUNK_ANSWERS // options.num)
    chunks = [sources[i : i + step] for i in range(0, len(sources), step)]
    with opened(options.out) as file:
        for chunk in shown(chunks, f"chunks of {len(chunks)}"):
            prompts = [prompt for prompt, _ in chunk]
            requests = group_requests(prompts, options.num, options.seed)
            completions = generate(
                weights, requests, sampling, tokenizer=tokenizer, num_slots=options.batch_size
            )
            rollouts = scored(prompts, options.num, [Episode(c) for c in completions], rewards)
            for group, (_, value) in zip(rollouts.groups, chunk, strict=True):
                for row in make(group, value, choice, counts):
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if not counts.rows:
            raise DataError(
                f"no row comes of {counted(counts.answers, 'answer')} to "
                f"{counted(counts.prompts, 'prompt')}: {listed(counts.without)}"
            )
    return counts


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {reason}" for reason, number in counts.items()) or "none"


def summary_text(summary: Mapping[str, Any], options: Pairs) -> str:
    rows = counted(summary["rows"], "answer" if options.sft else "pair")
    lines = [f"{options.out}: {rows} of {counted(summary['prompts'], 'prompt')}"]
    if summary["prompts_without"]:
        lines.append(f"prompts without: {listed(summary['prompts_without'])}")
    if summary["dropped_prompts"]:
        lines.append(f"prompts dropped: {listed(summary['dropped_prompts'])}")
    unused = f"; set aside: {listed(summary['unused_answers'])}"
    scores = f"mean score {summary['mean_score']:.3f}"
    if summary["right"] is None:
        low, high = summary["score_range"]
        scores += f" ({low:.3f} to {high:.3f})"
    else:
        scores += f", {100 * summary['right']:.1f} % right"
    lines.append(
        f"{counted(summary['answers'], 'answer')}, {scores}"
        f"{unused if summary['unused_answers'] else ''}"
    )
    return "\n".join(lines)
