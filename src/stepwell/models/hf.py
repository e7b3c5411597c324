"""Hugging Face folders, both ways: dimensions, weights under our global names, tokenizer files.

Weights are read and written as safetensors only, one tensor at a time; pickled files are refused.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stepwell.models.flops import parameter_shapes
from stepwell.models.hf_config import config_from_hf, config_to_hf, hf_name, our_name
from stepwell.sections.model import ModelConfig
from stepwell.types import CheckpointError, ConfigError, nearest

# What `Tokenizer.load` reads beside a tokenizer.json, whatever that is called.
TOKENIZER_NOTES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
TOKENIZER_FILES = (
    "tokenizer.json",
    *TOKENIZER_NOTES,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}


# --- reading -------------------------------------------------------------------------------------


def read_hf_config(folder: str | Path) -> ModelConfig:
    """The dimensions in `folder/config.json`. Errors: as `config_from_hf`, or CheckpointError when
    the file is missing or broken."""
    path = Path(folder) / "config.json"
    return config_from_hf(_read_json(path), where=str(path))


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies. `read` touches only the bytes it is asked for."""

    name: str
    stored_name: str
    file: Path
    shape: tuple[int, ...]

    def read(self, index: slice | tuple[slice, ...] = slice(None)) -> Tensor:
        """The tensor, or the part that `index` selects (as in `tensor[index]`), as stored."""
        with _opened(self.file) as handle:
            return handle.get_slice(self.stored_name)[index].clone()


def index_hf(folder: str | Path, wanted: Mapping[str, Sequence[int]]) -> dict[str, StoredTensor]:
    """Our name -> where it is stored, for exactly the names in `wanted` (name -> shape).

    Only headers are read. Rotary buffers are passed over; a stored head that should be tied must
    equal the embedding. Raises CheckpointError that names what is missing, surplus, of another
    shape, damaged or pickled.
    """
    folder = Path(folder)
    stored, surplus = _stored_tensors(folder)
    head, embedding = stored.get("head.weight"), stored.get("embed.weight")
    if head and embedding and "head.weight" not in wanted and "embed.weight" in wanted:
        _check_tied(stored.pop("head.weight"), embedding)
    if "score.bias" in stored and "score.bias" not in wanted:
        _check_no_bias(stored.pop("score.bias"))
    missing = [f"{name} ({hf_name(name)})" for name in wanted if name not in stored]
    surplus += [stored[name].stored_name for name in stored if name not in wanted]
    wrong = [
        f"{name} is {stored[name].shape}, expected {tuple(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != tuple(shape)
    ]
    problems = [
        f"{title}: {_some(names)}"
        for title, names in (("missing", missing), ("surplus", surplus), ("shape", wrong))
        if names
    ]
    if problems:
        hint = ""
        if missing == ["head.weight (lm_head.weight)"]:
            hint = "\n  (a model without its own head is tied: model.tied=true)"
        raise CheckpointError(
            f"the weights in {folder} do not fit the model:\n  " + "\n  ".join(problems) + hint
        )
    return {name: stored[name] for name in wanted}


def load_hf(
    folder: str | Path,
    wanted: Mapping[str, Sequence[int]],
    dtype: torch.dtype | None = torch.float32,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (our name, tensor in `dtype`; None: as stored) one at a time, in `wanted`'s order.

    wanted: name -> shape, e.g. `parameter_shapes(cfg)`. Everything is checked before the first
    tensor is read; errors as `index_hf`.
    """
    stored = index_hf(folder, wanted)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with ExitStack() as stack:
            files = {item.file for item in stored.values()}
            handles = {file: stack.enter_context(_opened(file)) for file in sorted(files)}
            for name, item in stored.items():
                yield name, _owned(handles[item.file].get_tensor(item.stored_name), dtype)

    return tensors()


def _owned(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy: what safetensors gives may be a view of the file."""
    return tensor.to(dtype or tensor.dtype, copy=True)


def read_eos_ids(folder: str | Path) -> tuple[int, ...]:
    """The ids that end a generation: generation_config.json's, else config.json's, else ()."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        ids = _read_json(path).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _stored_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Everything in the folder's weight files by our name, and the stored names that have none."""
    known: dict[str, StoredTensor] = {}
    unknown: list[str] = []
    for file in _weight_files(folder):
        with _opened(file) as handle:
            for stored_name in handle.keys():  # noqa: SIM118 (safe_open is no mapping)
                if stored_name.endswith("rotary_emb.inv_freq"):
                    continue
                name = our_name(stored_name)
                if name is None:
                    unknown.append(stored_name)
                    continue
                if name in known:
                    raise CheckpointError(f"{stored_name} is in {known[name].file} and in {file}")
                part = handle.get_slice(stored_name)
                if not part.get_dtype().startswith(("F32", "F16", "BF16", "F64")):
                    raise CheckpointError(
                        f"{stored_name} in {file} is stored as {part.get_dtype()}: only F64, F32, "
                        "BF16 and F16 are read (dequantise the model first)"
                    )
                known[name] = StoredTensor(name, stored_name, file, tuple(part.get_shape()))
    return known, unknown


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(f"{index} points at {name!r}, not a safetensors file beside")
            if not (folder / name).is_file():
                raise CheckpointError(f"{index} names {name}, which is missing")
        return [folder / name for name in names]
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        raise CheckpointError(
            f"{folder} holds pickled weights ({_some(pickled)}), which can run code when opened; "
            "only safetensors are read. Save the model again with Transformers' save_pretrained"
        )
    raise CheckpointError(f"{folder} holds neither model.safetensors nor its index")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or incomplete: {error}") from error


def _check_tied(head: StoredTensor, embedding: StoredTensor, rows: int = 8192) -> None:
    same = head.shape == embedding.shape and all(
        torch.equal(
            head.read(slice(start, start + rows)), embedding.read(slice(start, start + rows))
        )
        for start in range(0, head.shape[0], rows)
    )
    if not same:
        raise CheckpointError(
            f"{head.stored_name} in {head.file} differs from {embedding.stored_name}, but the "
            "model is tied; untie it (model.tied=false) to keep both"
        )


def _check_no_bias(bias: StoredTensor) -> None:
    if bias.read().any():
        raise CheckpointError(
            f"{bias.stored_name} in {bias.file} is not zero, and a score has no bias here; set it "
            "to zero, which moves all scores of a label by the same, or take a model without it"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not an object")
    return values


def _some(names: Sequence[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# --- writing -------------------------------------------------------------------------------------


def save_hf(
    folder: str | Path,
    cfg: ModelConfig,
    state: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    tokenizer: str | Path | None = None,
    eos_ids: Sequence[int] = (),
    bos_id: int | None = None,
    pad_id: int | None = None,
    max_shard_bytes: int = 5 * 2**30,
    overwrite: bool = False,
    scored: Literal["sequence", "token"] | None = None,
    notes: Mapping[str, Any] | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> None:
    """Writes a folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    state: (our name, full tensor) in any order, written as they come: one is in memory at a time.
    tokenizer: a folder with a tokenizer.json (or that file), copied with what tells of it beside
    it; special_tokens: names that its files give instead, e.g. {"pad_token": "<|pad|>"}. The
    folder appears whole or not at all; an earlier export there is replaced only with `overwrite`.
    scored: a model with a score alone is loaded by AutoModelForSequenceClassification, or that for
    tokens. notes: further values for config.json.

    Raises CheckpointError for tensors that are missing, surplus, of a wrong shape or not finite,
    and for a tokenizer whose ids exceed the vocabulary.
    """
    if dtype not in DTYPE_NAMES:
        legal = ", ".join(str(d) for d in DTYPE_NAMES)
        raise ConfigError(f"dtype {dtype} cannot be exported; one of {legal}")
    if cfg.head != ("lm" if scored is None else "score"):
        what = "a language model" if scored is None else "a classifier"
        raise ConfigError(f"model.head={cfg.head!r} cannot be exported as {what}")
    with whole_folder(folder, overwrite) as temporary:
        values = config_to_hf(cfg, dtype, scored) | dict(notes or {})
        ids = {
            "bos_token_id": bos_id,
            "eos_token_id": _one_or_list(eos_ids),
            "pad_token_id": pad_id,
        }
        _write_json(temporary / "config.json", {**values, **ids})
        given = {key: value for key, value in ids.items() if value is not None}
        _write_json(temporary / "generation_config.json", given)
        if tokenizer is not None:
            _copy_tokenizer(Path(tokenizer), temporary, cfg.vocab_size)
            _rename_specials(temporary, special_tokens or {})
        shapes = parameter_shapes(cfg)
        if scored == "token":  # its class has a bias
            shapes["score.bias"] = (cfg.num_labels,)
            state = chain(state, [("score.bias", torch.zeros(cfg.num_labels))])
        _write_weights(temporary, shapes, state, dtype, max_shard_bytes)


def _one_or_list(ids: Sequence[int]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


def _copy_tokenizer(source: Path, target: Path, vocab_size: int) -> None:
    folder = source.parent if source.is_file() else source
    names = TOKENIZER_FILES if source in (folder, folder / "tokenizer.json") else TOKENIZER_NOTES
    source_files = {name: folder / name for name in names if (folder / name).is_file()}
    if source.is_file():
        source_files["tokenizer.json"] = source
    if "tokenizer.json" not in source_files:
        raise CheckpointError(f"{source} holds no tokenizer.json")
    values = _read_json(source_files["tokenizer.json"])
    vocab = values.get("model", {}).get("vocab", {})
    ids = [*vocab.values()] if isinstance(vocab, dict) else [len(vocab) - 1]
    ids += [token["id"] for token in values.get("added_tokens") or ()]
    if max(ids, default=0) >= vocab_size:
        raise CheckpointError(
            f"the tokenizer in {source} has ids up to {max(ids)}, but the model's vocab_size is "
            f"{vocab_size}; they do not belong together (the nearest vocab_size is {max(ids) + 1})"
        )
    for name, file in source_files.items():
        shutil.copyfile(file, target / name)
    if "tokenizer_config.json" not in source_files:
        _write_json(
            target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}
        )


def _rename_specials(folder: Path, tokens: Mapping[str, str]) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if tokens and path.is_file():
            _write_json(path, _read_json(path) | dict(tokens))


def _write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    state: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Every tensor's place follows from the shapes, so tensors are written where they belong."""
    shards = _shard_names(shapes, dtype.itemsize, max_shard_bytes)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = ["model.safetensors"] if len(shards) == 1 else files
    places: dict[str, tuple[Path, int]] = {}
    for file, names in zip(files, shards, strict=True):
        places |= _start_file(folder / file, {n: shapes[n] for n in names}, dtype)
    written: set[str] = set()
    for name, tensor in state:
        if name not in shapes or name in written:
            what = "given twice" if name in written else "not a parameter of this model"
            raise CheckpointError(f"cannot export {name!r}: {what}{nearest(name, shapes)}")
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(
                f"cannot export {name}: it is {tuple(tensor.shape)}, expected {shapes[name]}"
            )
        _write_tensor(*places[name], name, tensor, dtype)
        del tensor  # or it would live on while the next one is made
        written.add(name)
    missing = [name for name in shapes if name not in written]
    if missing:
        raise CheckpointError(f"cannot export: no tensor came for {_some(missing)}")
    if len(files) > 1:
        weight_map = {hf_name(n): f for f, names in zip(files, shards, strict=True) for n in names}
        total = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )


def _write_tensor(file: Path, offset: int, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    values = tensor.detach().to("cpu", dtype).contiguous()
    if not torch.isfinite(values).all():
        raise CheckpointError(f"cannot export {name}: it has non-finite values in {dtype}")
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(values.view(-1).view(torch.uint8).numpy().data)


def _shard_names(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, max_shard_bytes: int
) -> list[list[str]]:
    """Names in order, a new shard where the next tensor would exceed the limit."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        num_bytes = prod(shape) * itemsize
        if shards[-1] and used + num_bytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += num_bytes
    return shards


def _start_file(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, tuple[Path, int]]:
    """Writes a safetensors header (length, JSON padded to 8 bytes) and gives each name's offset."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, starts = 0, {}
    for name, shape in shapes.items():
        end = offset + prod(shape) * dtype.itemsize
        header[hf_name(name)] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        starts[name], offset = offset, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    return {name: (file, 8 + len(text) + start) for name, start in starts.items()}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")


@contextmanager
def whole_folder(folder: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder that takes the name `folder` when the block ends without an error.

    Raises CheckpointError when `folder` is there already (with `overwrite`: when it holds anything
    that an export does not write) and when the disk refuses.
    """
    folder = Path(folder).resolve()
    _check_replaceable(folder, overwrite)
    temporary = folder.with_name(f".{folder.name}.partial")
    old = folder.with_name(f".{folder.name}.old")
    try:
        # Killed between the two renames below: the earlier export is still whole.
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        for left_over in (temporary, old):
            if left_over.exists():
                shutil.rmtree(left_over)
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():
            os.rename(folder, old)
        os.rename(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; name a folder to export to")
    names = sorted(path.name for path in folder.iterdir())
    if names and not overwrite:
        raise CheckpointError(f"{folder} is there already; name another folder, or overwrite it")
    ours = {*TOKENIZER_FILES, "config.json", "generation_config.json"}
    ours.add("model.safetensors.index.json")
    foreign = [n for n in names if n not in ours and not n.endswith(".safetensors")]
    if foreign:
        raise CheckpointError(f"{folder} holds files that no export wrote: {_some(foreign)}")
