"""What can be known to be wrong before the first document is read."""

from __future__ import annotations

import pyarrow as pa

from stepwell.curate.recipe import Recipe, StoreSpec
from stepwell.data.steps import StepConfig
from stepwell.tokenizer import DEFAULT_SPECIALS, MAX_VOCAB, NUM_BYTES, Tokenizer
from stepwell.types import CheckpointError, ConfigError, DataError, StepwellError, nearest

Labels = dict[str, pa.DataType]
# package -> the extra that brings it.
EXTRAS = {
    "fasttext": "fasttext",
    "lightgbm": "trees",
    "pydivsufsort": "dedup",
    "wordllama": "dedup",
}


def check_recipe(recipe: Recipe) -> None:
    """Opens what the steps and the store read, and follows the labels through the steps. Raises
    StepwellError that names the key."""
    labels: Labels = {}
    for i, step in enumerate(recipe.steps):
        where = f"steps.{i} ({step.kind})"
        for name, kind in step.needs().items():
            found = _label(name, labels, f"{where} needs the label {name!r}")
            if kind == "number" and not is_number(found):
                raise ConfigError(
                    f"{where} needs a number in the label {name!r}, and it holds {found}; labels "
                    f"with numbers before it: {_named(labels, numbers=True)}"
                )
        _check_files(step, where)
        labels |= step.adds()
    if recipe.store is not None:
        check_store(recipe.store, labels)


def check_store(store: StoreSpec, labels: Labels) -> None:
    """labels: that documents have at the end."""
    if store.by != "source":
        found = _label(store.by, labels, f"store.by = {store.by!r}: there is no label {store.by!r}")
        if not (pa.types.is_string(found) or pa.types.is_integer(found)):
            raise ConfigError(
                f"store.by = {store.by!r} holds {found}, which may differ from document to "
                "document; it is 'source' or a label of words or whole numbers, such as a bucket"
            )
    if store.scores is not None:
        what = f"store.scores = {store.scores!r}: there is no label {store.scores!r}"
        found = _label(store.scores, labels, what)
        if not is_number(found):
            raise ConfigError(
                f"store.scores = {store.scores!r} holds {found} and must be a label with numbers; "
                f"of these there are {_named(labels, numbers=True)}"
            )
    if store.tokenizer is not None:
        Tokenizer.load(store.tokenizer)
    smallest = NUM_BYTES + len(DEFAULT_SPECIALS)
    if store.vocab_size is not None and not smallest <= store.vocab_size <= MAX_VOCAB:
        near = min(max(store.vocab_size, smallest), MAX_VOCAB)
        raise ConfigError(
            f"store.vocab_size={store.vocab_size} must be {smallest} (the bytes and the special "
            f"tokens) to {MAX_VOCAB}; the nearest legal value is {near}"
        )


def is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)


def _label(name: str, labels: Labels, what: str) -> pa.DataType:
    if name not in labels:
        raise ConfigError(
            f"{what}, which no step before adds{nearest(name, labels)}; the labels are "
            f"{_named(labels)}"
        )
    return labels[name]


def _named(labels: Labels, numbers: bool = False) -> str:
    names = [name for name, kind in labels.items() if not numbers or is_number(kind)]
    return ", ".join(names) or "none"


def _check_files(step: StepConfig, where: str) -> None:
    try:
        step.check()
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        extra = f": pip install 'stepwell[{EXTRAS[name]}]'" if name in EXTRAS else ""
        raise ConfigError(f"{where} needs the package {name}{extra}") from error
    except StepwellError as error:
        kinds = (ConfigError, DataError, CheckpointError)
        kind = next((k for k in kinds if isinstance(error, k)), StepwellError)
        raise kind(f"{where}: {error}") from error
