"""The table of layouts that must not change the numbers: every axis alone, and combinations.
Quick is each axis and each pair of axes once; of what the tests in tests/parallel hold to the same,
the rest is slow.

`MODEL` divides where an axis needs it and is odd elsewhere. `python -m tests.layouts` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from stepwell.config import Run
from stepwell.parallel.rules import axis_sizes
from tests.oracle import base_run

MODEL = {
    "model.vocab_size": 64,
    "model.num_layers": 4,
    "model.d_ff": 28,
    "train.micro_batch_rows": 1,
    "train.global_batch_rows": 8,
    "optim.clip_norm": 0.05,
    "loss.label_smoothing": 0.1,
}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"model.tied": False},
    "deep": {"model.num_layers": 6},
    "qwen3": {"model.tied": False, "model.family": "qwen3", "model.qk_norm": True},
    "qwen2": {"model.family": "qwen2", "model.qkv_bias": True},
    "mistral": {"model.family": "mistral", "model.sliding_window": 5, "model.tied": False},
    "lora": {"lora.rank": 3, "lora.dropout": 0.2},
    "dora": {
        "model.family": "qwen2",
        "model.qkv_bias": True,
        "lora.rank": 4,
        "lora.dora": True,
        "lora.rslora": True,
        "lora.dropout": 0.2,
    },
    "qlora": {"model.tied": False, "lora.rank": 3, "lora.quantize": "nf4", "lora.dora": True},
}
FREE = ("layout.", "remat.", "offload.", "train.micro_batch_rows", "optim.release_gradients")


@dataclass(frozen=True)
class Layout:
    """kind: which model. settings: what differs from one process. quick: in `make test`; all are in
    `make test-slow`."""

    name: str
    num_ranks: int
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "tied"
    quick: bool = True

    def run(self) -> Run:
        assert all(key.startswith(FREE) for key in self.settings), self.name
        run = base_run(**{**MODEL, **KINDS[self.kind], **self.settings})
        assert prod(axis_sizes(run.layout, self.num_ranks)) == self.num_ranks
        return run


SHORT = {
    "schedule": "pp_schedule",
    "stages": "pp_stages_per_rank",
    "replicate": "dp_replicate",
    "reshard": "reshard_after_forward",
    "reduce": "reduce_gradients",
    "method": "cp_method",
}


def _layout(text: str, num_ranks: int, kind: str = "tied", quick: bool = True, **settings: Any):
    """text: e.g. "tp=2 zero=1 schedule=zbv", keys of `layout`, or of SHORT."""
    values: dict[str, Any] = {}
    for word in text.split():
        key, value = word.split("=")
        key = SHORT.get(key, key)
        values[f"layout.{key}"] = int(value) if value.isdigit() else value
    values["train.micro_batch_rows"] = 2 if quick else 1
    values |= {key.replace("__", "."): value for key, value in settings.items()}
    return Layout(f"{text or 'one process'}, {kind}", num_ranks, values, kind, quick)


LAYOUTS = [
    _layout("", 1, train__micro_batch_rows=8),
    # ZeRO
    _layout("zero=0", 2, "untied", quick=False),
    _layout("zero=1", 2, "qwen3"),
    _layout("zero=2", 2, train__micro_batch_rows=1),
    _layout("zero=3 reduce=step", 2, "qwen2", quick=False),
    _layout("zero=3 reshard=never", 3, quick=False),
    _layout("zero=3", 3, "mistral"),
    _layout("zero=2", 3, "untied", quick=False),
    _layout("zero=0", 4, quick=False),
    _layout("zero=1 replicate=2", 4, "untied", quick=False),
    _layout("zero=2 replicate=2", 4, "qwen3", quick=False),
    _layout("zero=3 replicate=2", 4),
    _layout("zero=3 reshard=node", 4, "qwen2", quick=False),
    _layout("zero=3 prefetch_forward=2 prefetch_backward=3", 4, "mistral", quick=False),
    # tensor
    _layout("tp=2", 2, "untied"),
    _layout("tp=2", 2, "qwen3", train__micro_batch_rows=8, quick=False),
    _layout("tp=4", 4, "qwen2", quick=False),
    _layout("tp=2 zero=3", 4),
    _layout("tp=2 zero=1", 4, "mistral"),
    _layout("tp=2 zero=3", 6, "untied", quick=False),
    _layout("tp=2 replicate=2 zero=2", 8, "qwen3", quick=False),
    _layout("tp=4 zero=3 reshard=never", 8, quick=False),
    # context
    _layout("cp=2", 2, "mistral"),
    _layout("cp=2 method=ulysses", 2, "qwen2"),
    _layout("cp=4", 4, "untied"),
    _layout("cp=2 method=ulysses zero=1", 4, "qwen3"),
    _layout("cp=2 tp=2", 4, quick=False),
    _layout("cp=2 tp=2 method=ulysses", 4, "qwen2", quick=False),
    _layout("cp=2 zero=3", 6, "mistral", quick=False),
    # pipeline
    _layout("pp=2 schedule=gpipe", 2, quick=False),
    _layout("pp=2 schedule=1f1b reshard=never", 2, "untied", quick=False),
    _layout("pp=2 schedule=interleaved-1f1b stages=2", 2, "qwen3"),
    _layout("pp=2 schedule=zbv stages=2 reshard=never", 2),
    _layout("pp=2 schedule=dualpipev stages=2 reshard=never", 2, "qwen2", quick=False),
    _layout("pp=4", 4),
    _layout("pp=2 zero=1", 4, "mistral", quick=False),
    _layout("pp=2 tp=2", 4, "qwen3"),
    _layout("pp=2 cp=2", 4, "mistral"),
    _layout("pp=2 replicate=2 schedule=zbv stages=2 reshard=never", 4, "untied", quick=False),
    _layout("pp=4 schedule=zbv stages=2 reshard=never", 4, "deep", quick=False),
    _layout("pp=4 schedule=dualpipev stages=2 zero=1", 4, "deep", quick=False),
    # three and four axes
    _layout("pp=2 tp=2 zero=3", 8, quick=False),
    _layout("pp=2 tp=2 zero=1 schedule=zbv stages=2", 8, "untied", quick=False),
    _layout("pp=2 cp=2 tp=2", 8, "mistral", quick=False),
    _layout("pp=2 cp=2 zero=1", 8, quick=False),
    _layout("cp=2 tp=2 replicate=2", 8, "qwen3", quick=False),
    _layout("pp=2 cp=2 method=ulysses schedule=interleaved-1f1b stages=2", 8, quick=False),
    # memory
    _layout("tp=2", 2, "tied", remat__mode="full", quick=False),
    _layout("zero=3", 2, "untied", remat__mode="selective", quick=False),
    _layout("zero=3", 2, "qwen2", remat__mode="sqrt"),
    _layout("pp=2 zero=1", 4, "untied", remat__mode="every", quick=False),
    _layout("zero=3", 2, "mistral", offload__optimizer=True),
    _layout("zero=3", 2, "qwen3", offload__parameters=True, quick=False),
    _layout("tp=2 zero=2", 4, "untied", offload__activations=True),
    # adapters
    _layout("zero=3", 2, "lora"),
    _layout("tp=2", 2, "lora", remat__mode="selective", quick=False),
    _layout("tp=2", 2, "dora"),
    _layout("tp=4", 4, "dora", remat__mode="full", quick=False),
    _layout("zero=1", 3, "dora"),
    _layout("cp=2", 2, "lora"),
    _layout("cp=2 tp=2", 4, "dora"),
    _layout("pp=2", 2, "lora"),
    _layout("pp=2 zero=3", 4, "qlora", remat__mode="full"),
    _layout("zero=2 replicate=2", 4, "qlora", quick=False),
    _layout("pp=2 schedule=zbv stages=2 reshard=never", 2, "dora"),
    _layout("pp=2 schedule=zbv stages=2 reshard=never", 2, "qlora"),
    _layout("zero=3", 2, "lora", offload__optimizer=True, quick=False),
    _layout("zero=3", 2, "qlora", offload__parameters=True),
    _layout("pp=2 tp=2", 4, "dora", quick=False),
    _layout("tp=2 zero=3", 8, "lora", quick=False),
    _layout("pp=2 cp=2 zero=1", 8, "qlora", quick=False),
]


def by_ranks(layouts: list[Layout]) -> dict[int, list[Layout]]:
    return {
        n: [x for x in layouts if x.num_ranks == n] for n in sorted({x.num_ranks for x in layouts})
    }


if __name__ == "__main__":
    for number, layout in enumerate(LAYOUTS, 1):
        print(number, layout.num_ranks, layout.name, "quick" if layout.quick else "slow")
