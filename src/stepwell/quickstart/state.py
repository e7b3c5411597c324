"""What the stages of a quickstart share: its sizes, its folders, its documents and problems."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stepwell.config import Run
from stepwell.files import write_text
from stepwell.types import ConfigError, Document

if TYPE_CHECKING:
    from stepwell.eval.grade import Prompt
    from stepwell.tokenizer import Tokenizer
    from stepwell.train.engine import Engine

SEED = 0
HELDOUT_DOCUMENTS = 0.02
CODE, PROSE = "stdlib-code", "stdlib-prose"


@dataclass(frozen=True)
class Plan:
    """The sizes of a quickstart: problems, and settings of the recipes that differ from them.

    every: only each so-many-th document is read. eval_bytes: of held-out text that is scored.
    """

    num_sft_rows: int
    num_prompts: int
    num_heldout: int
    every: int = 1
    eval_bytes: int = 200_000
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)


FULL = Plan(num_sft_rows=8000, num_prompts=4000, num_heldout=400)
SMALL = Plan(
    num_sft_rows=400,
    num_prompts=200,
    num_heldout=64,
    every=4,
    eval_bytes=30_000,
    overrides={
        "pretrain": {
            "train.steps": 12,
            "optim.schedule.warmup_steps": 2,
            "optim.schedule.decay_steps": 3,
            "train.eval_every": 6,
        },
        "sft": {"train.steps": 10},
        "grpo": {"train.steps": 3, "method.prompts_per_step": 8, "method.group_size": 4},
    },
)
SMOLLM2 = Plan(num_sft_rows=1000, num_prompts=1000, num_heldout=200)


@dataclass(frozen=True)
class Quickstart:
    root: Path
    plan: Plan
    base: Literal["scratch", "smollm2"]

    def done(self, stage: str) -> dict[str, Any] | None:
        """The result of a finished stage."""
        path = self._mark(stage)
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    def finish(self, stage: str, result: dict[str, Any]) -> None:
        write_text(self._mark(stage), json.dumps(result, indent=1))

    def _mark(self, stage: str) -> Path:
        return self.root / "done" / f"{stage}.json"

    def run_of(self, stage: str, **settings: Any) -> Run:
        """The shipped recipe of a training stage with this quickstart's paths and sizes."""
        name = "quickstart" if self.base == "scratch" else f"quickstart-{self.base}"
        recipe = recipe_path(f"{name}-{stage}")
        overrides = {"dir": str(self.root / stage), **self.plan.overrides.get(stage, {})}
        return Run.load(recipe, {**overrides, **settings})

    def tokenizer(self) -> Tokenizer:
        from stepwell.tokenizer import Tokenizer

        return Tokenizer.load(self.root / "tokenizer")


def recipe_path(name: str) -> Path:
    return Path(str(files("stepwell.recipes"))) / f"{name}.toml"


def documents(state: Quickstart) -> Iterator[Document]:
    """The curated documents, as they were written."""
    from stepwell.data.sources.pieces import curated_documents

    kept = curated_documents(state.root / "curated")
    for item in islice(kept, 0, None, state.plan.every):
        if isinstance(item, Document):
            yield item


def heldout(doc: Document) -> bool:
    """Whether a document is kept from training, by a hash of its id."""
    digest = hashlib.sha256(doc.id.encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64 < HELDOUT_DOCUMENTS


def heldout_texts(state: Quickstart) -> list[str]:
    """Held-out documents, up to plan.eval_bytes of text."""
    if state.base != "scratch":
        return []
    texts, size = [], 0
    for doc in filter(heldout, documents(state)):
        text = doc.text[: state.plan.eval_bytes // 8]
        size += len(text)
        if size > state.plan.eval_bytes:
            break
        texts.append(text)
    return texts


def write_problems(state: Quickstart) -> int:
    """Three files of problems with nothing in common. Returns how many held-out problems occur in
    training, in whatever order of their numbers: it must be 0, or ConfigError."""
    from stepwell.posttrain import chain_sum

    plan, folder = state.plan, state.root / "problems"
    train = chain_sum.problems(plan.num_sft_rows + plan.num_prompts, "train", SEED)
    test = chain_sum.problems(plan.num_heldout, "heldout", SEED)
    shared = len(chain_sum.overlap(train, test))
    if shared:
        raise ConfigError(f"{shared} held-out problems are among those trained on")
    folder.mkdir(parents=True, exist_ok=True)
    shown = [p.row(worked=i % 2 == 0) for i, p in enumerate(train[: plan.num_sft_rows])]
    write_lines(folder / "train.jsonl", shown)
    write_lines(folder / "prompts.jsonl", (p.row() for p in train[plan.num_sft_rows :]))
    write_lines(folder / "heldout.jsonl", (p.row() for p in test))
    return shared


def load_prompts(state: Quickstart, name: str) -> list[Prompt]:
    from stepwell.eval.items import load_prompts as load

    return load(state.root / "problems" / f"{name}.jsonl", state.tokenizer())[0]


def init_of(state: Quickstart, stage: str) -> str:
    """The last checkpoint of a stage, or the name of the real model in its place."""
    from stepwell.train.run_checkpoints import latest

    if state.base == "smollm2" and stage in ("pretrain", "base"):
        return "smollm2"
    folder = latest(state.root / stage)
    if folder is None:
        raise ConfigError(f"{state.root / stage} has no checkpoint; --fresh starts over")
    return str(folder)


def load_engine(state: Quickstart, stage: str) -> Engine:
    """The model after a stage, ready to score and sample."""
    from stepwell.train.engine import Engine
    from stepwell.train.weights import initial_weights, resolve

    settings = {"model.init": init_of(state, stage), "layout.compile": False}
    run = resolve(state.run_of("sft", **settings))
    return Engine(run, initial_weights(run.model))


def write_lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(value) + "\n" for value in values))
