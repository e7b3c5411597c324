"""A small model of chains of sums, and its problems: what labs of reinforcement learning begin
with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from stepwell.config import Run
from stepwell.eval.grade import Prompt
from stepwell.eval.items import load_prompts
from stepwell.eval.tasks import Matches, generate_and_match
from stepwell.generate import Sampling
from stepwell.labs.symbols import tokenizer_of
from stepwell.models.flops import parameter_shapes
from stepwell.posttrain.chain_sum import problems
from stepwell.posttrain.sft import sft
from stepwell.posttrain.verifiers.exact import exact
from stepwell.tokenizer import Tokenizer
from stepwell.train import checkpoint, run_checkpoints
from stepwell.train.engine import Engine
from stepwell.train.weights import TOKENIZER

SYMBOLS = "0123456789+-=?\n: answer"


class Size(NamedTuple):
    """num_terms: fewest and most of a chain. num_problems: of fine-tuning. worked: the share of
    them that shows its steps."""

    model: dict[str, Any]
    num_terms: tuple[int, int]
    num_problems: int
    worked: float
    steps: int
    rows: int
    num_prompts: int
    num_heldout: int


def model(layers: int, d_model: int) -> dict[str, Any]:
    """Settings of a small model in float32."""
    return {
        "model.num_layers": layers,
        "model.d_model": d_model,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.head_dim": d_model // 4,
        "model.d_ff": 2 * d_model,
        "model.init_std": 0.05,
        "precision.compute": "fp32",
    }


class World(NamedTuple):
    folder: Path
    tokenizer: Tokenizer
    seed: int
    size: Size

    def run(self, kind: str, name: str, **values: Any) -> Run:
        usual = {
            **self.size.model,
            "model.vocab_size": self.tokenizer.vocab_size,
            "data.path": str(self.folder / ("sft.jsonl" if kind == "sft" else "prompts.jsonl")),
            "data.tokenizer": str(self.folder / "tokenizer"),
            "data.seq_len": 128,
            "dir": str(self.folder / name),
            "train.seed": self.seed,
            "optim.weight_decay": 0.0,
        }
        return Run.parse({"method": {"kind": kind}}, {**usual, **values})

    def engine(self, run: Run, folder: str | Path, **more: Any) -> Engine:
        """Of the weights in the last checkpoint of a run's folder, or in a checkpoint."""
        place = run_checkpoints.latest(folder) or Path(folder)
        return Engine(run, checkpoint.load_weights(place, parameter_shapes(run.model)), **more)

    def prompts(self, name: str) -> list[Prompt]:
        return load_prompts(str(self.folder / f"{name}.jsonl"), self.tokenizer)[0]

    def heldout(
        self, engine: Engine, max_new_tokens: int, temperature: float = 0.0, num_samples: int = 1
    ) -> Matches:
        """Answers to the held-out problems, graded."""
        sampling = Sampling(
            temperature, eos_ids=self.tokenizer.stop_ids, max_new_tokens=max_new_tokens
        )
        items = self.prompts("heldout")
        return generate_and_match(engine, items, self.tokenizer, sampling, exact, num_samples)


def make_world(folder: Path, seed: int, size: Size) -> tuple[World, str]:
    """Problems, and the folder of a model fine-tuned on the first of them. What it is trained on by
    reinforcement ("prompts") it has not seen; "heldout" neither stage has."""
    tokenizer = tokenizer_of(SYMBOLS)
    tokenizer.save(folder / "tokenizer")
    world = World(folder, tokenizer, seed, size)
    found = problems(size.num_problems + size.num_prompts, "train", seed, size.num_terms)
    taught, asked = found[: size.num_problems], found[size.num_problems :]
    # The n-th is worked where the running total of shares passes a whole number.
    worked = [int((i + 1) * size.worked) > int(i * size.worked) for i in range(len(taught))]
    rows = [_row(p, is_worked) for p, is_worked in zip(taught, worked, strict=True)]
    _write(folder / "sft.jsonl", rows)
    _write(folder / "prompts.jsonl", [_row(p) for p in asked])
    # The same for every seed.
    heldout = problems(size.num_heldout, "heldout", 0, size.num_terms)
    _write(folder / "heldout.jsonl", [_row(p) for p in heldout])
    base = folder / "base"
    Engine(world.run("sft", "none")).save(base, {TOKENIZER: tokenizer.fingerprint}).wait()
    run = world.run(
        "sft",
        "sft",
        **{
            "model.init": str(base),
            "train.steps": size.steps,
            "train.global_batch_rows": size.rows,
            "train.micro_batch_rows": size.rows,
            "optim.kind": "muon",
            "optim.lr": 0.02,
        },
    )
    sft(run, tokenizer)
    return world, str(run_checkpoints.latest(run.dir))


def _row(problem: Any, worked: bool = True) -> dict[str, Any]:
    return {
        "prompt": problem.prompt,
        "completion": "\n" + problem.completion(worked),
        "answer": str(problem.answer),
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
