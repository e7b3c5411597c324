"""Strings of letters whose worth is known, and reward models that have learnt it from few pairs:
what labs of over-optimised rewards begin with.

Gold gives each letter that occurs its hidden worth, once, and takes something off for every
repetition. Pairs are of random answers, where repetitions are few, so a reward model learns the
letters well and the penalty badly. The first policy is untrained and writes letters at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stepwell.config import Run
from stepwell.data.judged import Pair
from stepwell.eval.grade import Prompt
from stepwell.generate import Request, Sampling
from stepwell.labs.symbols import tokenizer_of
from stepwell.parallel.mesh import Mesh
from stepwell.posttrain.reward_model.losses import reward_loss
from stepwell.posttrain.reward_model.rows import pack
from stepwell.sections.methods import RewardModel
from stepwell.train.engine import Engine
from stepwell.train.weights import TOKENIZER
from stepwell.types import Completion

LETTERS = "abcdefghijklmnopqrstuvwx"
TOKENIZER_OF_LETTERS = tokenizer_of(LETTERS)
MAX_TOKENS, NUM_PROMPTS, PAIRS_PER_STEP = 12, 8, 32
REPETITION_PENALTY = 0.45


class World:
    """Letters' worths, prompts (a letter each) and the first policy of a seed."""

    def __init__(self, seed: int):
        self.seed = seed
        order = np.random.default_rng(seed).permutation(list(LETTERS))
        ids = [TOKENIZER_OF_LETTERS.encode(letter)[0] for letter in order]
        self.worth = dict(zip(ids, np.linspace(-1, 1, len(ids)).tolist(), strict=True))
        self.prompts = [
            Prompt(letter, tuple(TOKENIZER_OF_LETTERS.encode(letter)))
            for letter in LETTERS[:NUM_PROMPTS]
        ]
        self.policy = Engine(self.run())
        self.weights = [(k, v.clone()) for k, v in self.policy.full_state_dict().items()]

    def run(self, method: dict[str, Any] | None = None, **values: Any) -> Run:
        sizes = {"num_layers": 1, "d_model": 32, "num_heads": 2, "num_kv_heads": 2, "d_ff": 64}
        usual = {
            **{f"model.{name}": value for name, value in sizes.items()},
            "model.head_dim": 16,
            "model.vocab_size": TOKENIZER_OF_LETTERS.vocab_size,
            "model.max_seq_len": 64,
            "data.seq_len": 64,
            "precision.compute": "fp32",
            "optim.schedule.kind": "constant",
            "optim.weight_decay": 0.0,
            "train.seed": self.seed,
        }
        return Run.parse({} if method is None else {"method": method}, {**usual, **values})

    def gold(self, ids: Sequence[int]) -> float:
        known = [i for i in ids if i in self.worth]
        repetitions = len(known) - len(set(known))
        return sum(self.worth[i] for i in set(known)) - REPETITION_PENALTY * repetitions

    def answers(self, count: int, seed: int) -> list[Completion]:
        """Of the first policy, to the prompts in turn."""
        sampling = Sampling(eos_ids=TOKENIZER_OF_LETTERS.stop_ids, max_new_tokens=MAX_TOKENS)
        requests = [
            Request(i, self.prompts[i % NUM_PROMPTS].ids, (self.seed * 1000 + seed) * 1_000_000 + i)
            for i in range(count)
        ]
        return self.policy.generate(requests, sampling, tokenizer=TOKENIZER_OF_LETTERS)

    def train_model(self, folder: str, number: int, num_pairs: int, steps: int) -> None:
        """A reward model on pairs of its own, the better one by gold first."""
        sampled, pairs = self.answers(2 * num_pairs, 1 + number), []
        for one, other in zip(sampled[::2], sampled[1::2], strict=True):
            worse, better = sorted((one, other), key=lambda c: self.gold(c.token_ids))
            pairs.append(
                Pair(
                    better.prompt_ids,
                    better.token_ids,
                    worse.token_ids,
                    rejected_prompt_ids=worse.prompt_ids,
                )
            )
        values = {"optim.lr": 3e-3, "train.seed": 1000 * self.seed + number}
        run = self.run({"kind": "reward"}, **values, **{"train.micro_batch_rows": 64})
        assert isinstance(run.method, RewardModel)
        engine, loss = Engine(run), reward_loss(run.method, 1)
        rng = np.random.default_rng([self.seed, number])
        for _ in range(steps):
            chosen = rng.integers(0, len(pairs), PAIRS_PER_STEP).tolist()
            batch = pack([pairs[i] for i in chosen], run, TOKENIZER_OF_LETTERS.pad_id, chosen)
            engine.forward_backward(batch, loss)
            engine.optim_step()
        engine.save(folder, {TOKENIZER: TOKENIZER_OF_LETTERS.fingerprint}).wait()


def alone() -> Mesh:
    return Mesh(1, 0, 0, torch.device("cpu"))
