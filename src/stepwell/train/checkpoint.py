"""Checkpoints: sharded, asynchronous, atomic, verified, strict, and independent of the mesh.

A folder holds torch's distributed-checkpoint shards (one file a rank), `state.json` (step, data
state, guard, dimensions: whatever `extra` says) and `manifest.json` (bytes and sha256 of every
file). It is written under a hidden name and renamed once every rank is done, so a folder with its
proper name is complete.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stepwell.data.files import file_sha256
from stepwell.parallel.init import global_name
from stepwell.parallel.mesh import Mesh, all_gather_objects
from stepwell.train.run_checkpoints import MANIFEST, STATE, read_json, read_state, way_out
from stepwell.types import CheckpointError

_SHOWN = 5

# A single process without a group is a supported way to run, not a mistake to warn about.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


@dataclass(frozen=True)
class SaveHandle:
    """A save under way. `wait` returns the finished folder or raises its CheckpointError."""

    folder: Path
    result: Future[Path]

    def wait(self) -> Path:
        return self.result.result()

    def done(self) -> bool:
        return self.result.done()


def save_checkpoint(
    folder: str | Path,
    model_state: Mapping[str, Tensor],
    optim_state: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    mesh: Mesh,
    asynchronous: bool = False,
) -> SaveHandle:
    """Writes a checkpoint; every rank calls it with the same names. `extra` must be JSON-able.

    Asynchronous: the tensors are copied to the host first, so training may change them as soon as
    this returns. Wait for a handle before the next save or load, which use the same group.
    Raises CheckpointError (here or in `wait`) on a full disk or any other failure, on every rank;
    nothing half-written stays.
    """
    folder = Path(folder)
    state = _prefixed(model_state, optim_state)
    text = json.dumps(extra, indent=1, sort_keys=True)
    if not asynchronous:
        result: Future[Path] = Future()
        result.set_result(_write(folder, state, text, mesh))
        return SaveHandle(folder, result)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    staged = stager.stage(state)
    stager.close()
    assert isinstance(staged, dict)
    writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    handle = SaveHandle(folder, writer.submit(_write, folder, staged, text, mesh))
    writer.shutdown(wait=False)
    return handle


def load_checkpoint(
    folder: str | Path,
    model_state: Mapping[str, Tensor],
    optim_state: Mapping[str, Tensor] | None,
    mesh: Mesh,
    dimensions: Mapping[str, Any] | None = None,
    verified: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Fills the given tensors in place, whatever mesh the checkpoint came from; returns `extra`.

    Everything is checked before a tensor is touched: every file against the manifest, `dimensions`
    against `extra["model"]`, and names, shapes and dtypes both ways. With optim_state None
    only the weights are read. verified: what `verified_state` gave, if it was asked before. Raises
    CheckpointError naming what does not fit.
    """
    folder = Path(folder)
    extra = verified_state(folder, mesh) if verified is None else verified
    if dimensions is not None:
        _check_dimensions(folder, extra.get("model", {}), dimensions)
    reader = _Reader(folder)
    stored = reader.read_metadata().state_dict_metadata
    wanted = _prefixed(model_state, optim_state or {})
    if optim_state is None:
        stored = {name: value for name, value in stored.items() if name.startswith("model.")}
    _check_tensors(folder, stored, wanted, mesh)

    def read() -> None:
        group = mesh.background_group
        dcp_load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)

    _together(read, mesh, f"cannot read the checkpoint {folder}")
    return extra


def load_weights(
    folder: str | Path, shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    """(global name, full tensor) for exactly the names in `shapes`, without optimiser state.

    Each process reads on its own, one tensor at a time. Everything is checked before the first is
    read; errors as `load_checkpoint`.
    """
    folder, alone = Path(folder), Mesh(1, 0, 0, torch.device("cpu"))
    verify(folder, alone)
    reader = _Reader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    stored = {name: value for name, value in metadata.items() if name.startswith("model.")}
    dtypes = {
        name: entry.properties.dtype
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    wanted = {
        name: torch.empty(
            tuple(shape), dtype=dtypes.get(f"model.{name}", torch.float32), device="meta"
        )
        for name, shape in shapes.items()
    }
    _check_tensors(folder, stored, _prefixed(wanted, {}))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, shape in wanted.items():
            tensor = torch.empty_like(shape, device="cpu")
            one = {f"model.{name}": tensor}
            dcp_load(one, storage_reader=_Reader(folder), no_dist=True)
            yield name, tensor

    return tensors()


def verified_state(folder: str | Path, mesh: Mesh) -> dict[str, Any]:
    """`read_state` after `verify`."""
    verify(folder, mesh)
    return read_state(folder)


def verify(folder: str | Path, mesh: Mesh) -> None:
    """Compares every file with the manifest, the files divided among the ranks.

    Raises CheckpointError naming the first file that is missing, truncated or altered, and the
    newest other checkpoint of the run.
    """
    folder = Path(folder)

    def check() -> None:
        files: dict[str, dict[str, Any]] = read_json(folder, MANIFEST).get("files", {})
        if STATE not in files or ".metadata" not in files:
            raise CheckpointError(f"{folder / MANIFEST} is damaged: it does not list every file")
        for name in sorted(files)[mesh.rank :: mesh.world]:
            _verify_file(folder / name, files[name]["bytes"], files[name]["sha256"])

    try:
        _together(check, mesh, f"the checkpoint {folder} is damaged")
    except CheckpointError as error:
        raise CheckpointError(f"{error}{way_out(folder)}") from None


def _write(folder: Path, state: dict[str, Tensor], text: str, mesh: Mesh) -> Path:
    temporary = folder.with_name(f".{folder.name}.writing")
    trouble = f"cannot write the checkpoint {folder}"
    group = mesh.background_group

    def prepare() -> None:
        if mesh.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _check_space(temporary, state)

    def shards() -> dict[str, dict[str, Any]]:
        writer = FileSystemWriter(temporary)
        dcp_save(state, storage_writer=writer, process_group=group, no_dist=group is None)
        mine = sorted(temporary.glob(f"__{mesh.rank}_*"))
        if mesh.is_main:
            mine.append(temporary / ".metadata")
            _write_text(temporary / STATE, text)
            mine.append(temporary / STATE)
        return {path.name: _fingerprint(path) for path in mine}

    def publish() -> None:
        if mesh.is_main:
            files = {name: value for part in parts for name, value in sorted(part.items())}
            _write_text(temporary / MANIFEST, json.dumps({"files": files}, indent=1))
            _swap_in(temporary, folder)

    try:
        _together(prepare, mesh, trouble)
        parts = _together(shards, mesh, trouble)
        _together(publish, mesh, trouble)
    except CheckpointError:
        if mesh.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _together(work: Callable[[], Any], mesh: Mesh, trouble: str) -> list[Any]:
    """Every rank's result; if any rank failed, all raise the same CheckpointError."""
    result, error = None, None
    try:
        result = work()
    except CheckpointException as failure:
        error = "; ".join(f"rank {rank}: {exc}" for rank, (exc, _) in failure.failures.items())
    except (CheckpointError, OSError, RuntimeError, ValueError, pickle.PickleError) as failure:
        error = str(failure)
    outcomes = all_gather_objects((result, error), mesh, background=True)
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise CheckpointError(f"{trouble}: {errors[0]}")
    return [result for result, _ in outcomes]


def _prefixed(model: Mapping[str, Tensor], optim: Mapping[str, Tensor]) -> dict[str, Any]:
    state = {f"model.{global_name(name)}": value.detach() for name, value in model.items()}
    return state | {f"optim.{name}": value.detach() for name, value in optim.items()}


def _check_space(folder: Path, state: Mapping[str, Tensor]) -> None:
    needed = sum(value.numel() * value.element_size() for value in state.values())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"it needs {needed / 1e6:.1f} MB and the disk has {free / 1e6:.1f} MB free; "
            "free some space, lower checkpoint.keep_last or move the run's folder"
        )


def _swap_in(temporary: Path, folder: Path) -> None:
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _verify_file(path: Path, num_bytes: int, sha256: str) -> None:
    if not path.exists():
        raise CheckpointError(f"{path.name} is missing")
    found = path.stat().st_size
    if found != num_bytes:
        raise CheckpointError(f"{path.name} has {found} bytes instead of {num_bytes}")
    if file_sha256(path) != sha256:
        raise CheckpointError(f"{path.name} was altered: its sha256 is not the manifest's")


def _check_dimensions(folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differing = [
        f"{name} is {stored.get(name)!r} there and {value!r} here"
        for name, value in (dict.fromkeys(stored) | dict(wanted)).items()
        if stored.get(name) != value
    ]
    if differing:
        raise CheckpointError(
            f"the checkpoint {folder} is of another architecture: {'; '.join(differing)}"
        )


def _check_tensors(
    folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Tensor], mesh: Mesh | None = None
) -> None:
    """With a mesh: what its pipeline's ranks want together."""
    unfit = _unfit(stored, wanted)
    names = set(wanted)
    if mesh is not None and mesh.pp_group is not None:
        everyone: list[Any] = [None] * mesh.sizes.pp
        dist.all_gather_object(everyone, (names, unfit), group=mesh.pp_group)
        names = set().union(*(found for found, _ in everyone))
        unfit = [problem for _, found in everyone for problem in found]
    problems = _some("missing", sorted(names - set(stored)))
    problems += _some("surplus", sorted(set(stored) - names))
    problems += _some("unfitting", unfit)
    if problems:
        raise CheckpointError(f"the checkpoint {folder} does not fit: {'. '.join(problems)}")


def _unfit(stored: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> list[str]:
    unfit = []
    for name in sorted(set(stored) & set(wanted)):
        there, here = stored[name], wanted[name]
        if not isinstance(there, TensorStorageMetadata):
            unfit.append(f"{name} is not a tensor there")
        elif there.size != here.shape:
            unfit.append(f"{name} has shape {tuple(there.size)} there, {tuple(here.shape)} here")
        elif there.properties.dtype != here.dtype:
            unfit.append(f"{name} is {there.properties.dtype} there, {here.dtype} here")
    return unfit


def _some(kind: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return [f"{len(items)} {kind}: {', '.join(items[:_SHOWN])}{more}"]


_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Unpickler(pickle.Unpickler):
    """Torch keeps its index as a pickle. Only the plain records it consists of may be built, so
    an index from elsewhere cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"its index names {module}.{name}, which is not allowed there")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
        except (OSError, pickle.PickleError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
