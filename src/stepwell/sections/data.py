"""What a run reads: the section `data`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stepwell.schema import Above0, Flag, Positive, Section


class SourceConfig(Section):
    """A token store and its share of the samples. max_epochs: how often the whole run may read it;
    then its share goes to the others, in proportion to their weights."""

    path: str
    weight: Above0 = 1.0
    max_epochs: Above0 | None = None


class StageConfig(Section):
    """A part of the run that reads its own sources: a phase of the schedule, or all steps from the
    fraction `start` of train.steps until the next stage's."""

    phase: Literal["warmup", "stable", "decay"] | None = None
    start: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = None
    sources: tuple[SourceConfig, ...]

    @model_validator(mode="after")
    def _rules(self) -> StageConfig:
        if (self.phase is None) == (self.start is None):
            raise ValueError(
                f"a stage of data.stages has phase={self.phase!r} and start={self.start}, but "
                'needs one of them: phase = "decay", or start = 0.8'
            )
        if not self.sources:
            raise ValueError(
                f"the stage of {self.where} has no sources; name at least one token store"
            )
        return self

    @property
    def where(self) -> str:
        return f"phase={self.phase!r}" if self.phase else f"start={self.start}"


# What the section [data] had once, and what says the same now.
FORMER_DATA_KEYS = {
    "decay_sources": """a [[data.stages]] table with phase = "decay" and these as its sources""",
    "shuffle": """data.order = "shuffled" (for true) or "sequential" (for false)""",
}


class DataConfig(Section):
    """sources: what a pretraining run reads in the steps to which no stage of `stages` applies.

    order: of a store's rows within an epoch. quality-ascending: by the mean score of their tokens,
    the best last; the store must have scores.
    path: a JSONL or Parquet file of `messages` or `prompt`+`completion` rows (sft), or of prompts
    with an `answer` column (grpo).
    heldout: stores that are scored during training (pretrain, sft), never trained on;
    heldout_path: rows like those of `path` instead (sft).
    tokenizer: a folder or file with a `tokenizer.json`.
    """

    sources: tuple[SourceConfig, ...] = ()
    stages: tuple[StageConfig, ...] = ()
    heldout: tuple[SourceConfig, ...] = ()
    path: str | None = None
    heldout_path: str | None = None
    tokenizer: str | None = None
    seq_len: Positive = 512
    document_mask: Flag = True
    order: Literal["shuffled", "sequential", "quality-ascending"] = "shuffled"

    @model_validator(mode="before")
    @classmethod
    def _former_keys(cls, values: Any) -> Any:
        for key, now in FORMER_DATA_KEYS.items():
            if isinstance(values, Mapping) and key in values:
                raise ValueError(f"data.{key} is no longer a key; write {now}")
        return values

    @model_validator(mode="after")
    def _rules(self) -> DataConfig:
        for key, sources in [
            ("data.sources", self.sources),
            *((f"data.stages.{i}.sources", stage.sources) for i, stage in enumerate(self.stages)),
        ]:
            paths = [os.path.normpath(source.path) for source in sources]
            twice = next((path for path in paths if paths.count(path) > 1), None)
            if twice is not None:
                raise ValueError(
                    f"{key} lists {twice} twice; list it once, with the sum of weights"
                )
        self._check_stages()
        self._check_caps()
        return self

    def _check_caps(self) -> None:
        """A cap is on what the whole run reads of a store, so the run must agree on it."""
        caps: dict[str, tuple[str, float | None]] = {}
        for key, sources in [
            ("data.sources", self.sources),
            *((f"data.stages.{i}.sources", stage.sources) for i, stage in enumerate(self.stages)),
        ]:
            for source in sources:
                where, cap = caps.setdefault(os.path.abspath(source.path), (key, source.max_epochs))
                if cap != source.max_epochs:
                    raise ValueError(
                        f"{source.path} has {cap_text(cap)} in {where} and "
                        f"{cap_text(source.max_epochs)} in {key}, but a cap is on what the whole "
                        "run reads of a store; write the same max_epochs in both (or in neither)"
                    )

    def _check_stages(self) -> None:
        capped = next((s for s in self.heldout if s.max_epochs is not None), None)
        if capped is not None:
            raise ValueError(
                f"data.heldout: max_epochs={capped.max_epochs} belongs to sources that are trained "
                "on; held-out rows are scored once (leave it out)"
            )
        phases = [stage.phase for stage in self.stages if stage.phase]
        starts = [stage.start for stage in self.stages if stage.start is not None]
        if phases and starts:
            raise ValueError(
                f"data.stages mix phases ({', '.join(phases)}) and fractions "
                f"({', '.join(map(str, starts))}), which could overlap; give all of them `phase`, "
                "or all of them `start`"
            )
        if len(set(phases)) < len(phases):
            raise ValueError(
                f"data.stages name a phase twice ({', '.join(phases)}); a phase has one stage"
            )
        if any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(
                f"data.stages have starts {', '.join(map(str, starts))}, which must ascend; in "
                f"order they are {', '.join(map(str, sorted(set(starts))))}"
            )


def cap_text(max_epochs: float | None) -> str:
    return "no max_epochs" if max_epochs is None else f"max_epochs={max_epochs:g}"


def first_step(start: float, steps: int) -> int:
    """The step (0 is the first) at which a stage begins that starts at the fraction `start`."""
    return int(start * steps + 1e-9)
