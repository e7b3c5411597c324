"""A curation as a value: sources, steps in order, and what is written at the end."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, SerializeAsAny, ValidationError, model_validator

from stepwell.data.sources.spec import SourceSpec
from stepwell.data.steps import StepConfig
from stepwell.files import write_text
from stepwell.schema import Flag, Fraction, Positive, Section, assign, explain, read_toml
from stepwell.types import ConfigError, nearest

# kind -> where its class is. Imported when a recipe names it: some need heavy libraries.
STEPS = {
    "langid": "stepwell.data.langid:LangId",
    "gopher-quality": "stepwell.data.quality.gopher:GopherQuality",
    "gopher-repetition": "stepwell.data.quality.repetition:GopherRepetition",
    "c4": "stepwell.data.quality.c4:C4",
    "fineweb": "stepwell.data.quality.fineweb:FineWeb",
    "code-quality": "stepwell.data.quality.code:CodeQuality",
    "quality-score": "stepwell.data.quality.classifier:QualityScore",
    "quality-threshold": "stepwell.data.quality.buckets:QualityThreshold",
    "quality-top": "stepwell.data.quality.buckets:QualityTop",
    "quality-buckets": "stepwell.data.quality.buckets:QualityBuckets",
    "perplexity": "stepwell.curate.perplexity:Perplexity",
    "perplexity-buckets": "stepwell.data.quality.perplexity:PerplexityBuckets",
    "pii": "stepwell.data.safety.pii:Pii",
    "toxic-words": "stepwell.data.safety.toxicity:ToxicWords",
    "toxicity": "stepwell.data.safety.toxicity:Toxicity",
    "exact-dedup": "stepwell.data.dedup.exact:ExactDedup",
    "line-dedup": "stepwell.data.dedup.lines:LineDedup",
    "substring-dedup": "stepwell.data.dedup.substring:SubstringDedup",
    "fuzzy-dedup": "stepwell.data.dedup.fuzzy:FuzzyDedup",
    "semantic-dedup": "stepwell.data.dedup.semantic:SemanticDedup",
    "decontaminate": "stepwell.data.decontam.step:Decontaminate",
}


class StoreSpec(Section):
    """The token stores. tokenizer: a folder or file with a tokenizer.json; or vocab_size: of a
    byte-level BPE that is trained on the kept documents, on tokenizer_bytes of their text where
    there is more. by: one store for each value of `source`
    or of a label such as `quality_bucket`. heldout: the share of documents (chosen by their ids)
    that goes to stores of their own. scores: the label that is kept for each document, for
    data.order = "quality-ascending"."""

    tokenizer: str | None = None
    vocab_size: Positive | None = None
    tokenizer_bytes: Positive = 256 << 20
    by: str = "source"
    heldout: Fraction = 0.0
    scores: str | None = None

    @model_validator(mode="after")
    def _rules(self) -> StoreSpec:
        if (self.tokenizer is None) == (self.vocab_size is None):
            raise ValueError(
                f"store.tokenizer={self.tokenizer!r} and store.vocab_size={self.vocab_size}: give "
                "one of the two, a tokenizer's folder or the size of one to train"
            )
        return self


class Outputs(Section):
    """documents: how kept documents are written. removed_text: keep the text of what was removed.
    formats: what the token stores are also written as."""

    documents: Literal["parquet", "jsonl"] = "parquet"
    removed_text: Flag = True
    formats: tuple[Literal["megatron", "mds", "litdata"], ...] = ()


class Recipe(Section):
    """shard_bytes: text of a shard, the unit of work after reading; batch_bytes: text that a step
    sees at once. Neither changes what is kept."""

    sources: Annotated[tuple[SourceSpec, ...], Field(min_length=1)]
    steps: tuple[SerializeAsAny[StepConfig], ...] = ()
    store: StoreSpec | None = None
    outputs: Outputs = Outputs()
    shard_bytes: Positive = 64 << 20
    batch_bytes: Positive = 4 << 20

    @model_validator(mode="after")
    def _rules(self) -> Recipe:
        names = [source.name for source in self.sources]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"two sources are called {twice!r}; a name stands for one source (several paths of "
                "one source are a list: path = [...])"
            )
        for i, step in enumerate(self.steps):
            for name in step.sources:
                if name not in names:
                    raise ValueError(
                        f"steps.{i}.sources names {name!r}{nearest(name, names)}; the sources are "
                        f"{', '.join(names)}"
                    )
        if self.outputs.formats and self.store is None:
            raise ValueError(
                f"outputs.formats={list(self.outputs.formats)} are made from token stores; add a "
                "[store] table, or leave formats out"
            )
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
        """Raises ConfigError for a missing file, broken TOML, unknown keys and broken rules."""
        return cls.parse(read_toml(path), overrides, f"the recipe {path}")

    @classmethod
    def parse(
        cls,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        where: str = "the recipe",
    ) -> Recipe:
        """`values` with `overrides` (dotted key -> value or its text) applied. Raises ConfigError,
        which lists the problems; `where` names the origin of the values."""
        overrides = dict(overrides or {})
        of_steps = {key: overrides.pop(key) for key in [*overrides] if key.startswith("steps.")}
        values = assign(values, overrides, cls)
        steps = values.get("steps", [])
        if not isinstance(steps, list):
            raise ConfigError(f"{where} is not valid: steps must be a list of tables, [[steps]]")
        steps = _assigned(steps, of_steps)
        values["steps"] = tuple(_step(step, i, where) for i, step in enumerate(steps))
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, where)) from error

    def to_dict(self) -> dict[str, Any]:
        """What `parse` makes an equal recipe of; it holds what JSON and TOML can."""
        return self.model_dump(exclude_none=True, mode="json")

    def save(self, path: Path) -> None:
        write_text(path, tomli_w.dumps(self.to_dict()))


def step_class(kind: str) -> type[StepConfig]:
    """Raises ConfigError for an unknown kind."""
    if kind not in STEPS:
        raise ConfigError(
            f"unknown kind of step {kind!r}{nearest(kind, STEPS)}; there are {', '.join(STEPS)}"
        )
    module, _, name = STEPS[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def _assigned(steps: list[Any], overrides: Mapping[str, Any]) -> list[Any]:
    """Each `steps.N.key` set, as the class of step N reads it."""
    steps = list(steps)
    for dotted, value in overrides.items():
        _, number, *rest = dotted.split(".", 2)
        if not rest or not number.isdigit() or int(number) >= len(steps):
            raise ConfigError(
                f"cannot set {dotted}: there are {len(steps)} steps, counted from 0, and a key is "
                "written steps.N.KEY"
            )
        step = steps[int(number)]
        if isinstance(step, Mapping) and step.get("kind") in STEPS:
            steps[int(number)] = assign(step, {rest[0]: value}, step_class(step["kind"]))
    return steps


def _step(values: Any, number: int, where: str) -> StepConfig:
    if isinstance(values, StepConfig):
        return values
    if not isinstance(values, Mapping) or not isinstance(values.get("kind"), str):
        raise ConfigError(
            f"{where} is not valid: steps.{number} needs a kind; there are {', '.join(STEPS)}"
        )
    found = step_class(values["kind"])
    try:
        return found.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            explain(error, found, f"steps.{number} ({values['kind']}) of {where}")
        ) from error
