import json
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stepwell.parallel.init import normal_
from stepwell.parallel.mesh import Mesh, init_distributed
from stepwell.sections.layout import LayoutConfig
from stepwell.sections.optim import OptimConfig
from stepwell.train import checkpoint
from stepwell.train.checkpoint import load_checkpoint, save_checkpoint, verify
from stepwell.train.optim import build_optimizer
from stepwell.train.run_checkpoints import (
    latest,
    newest_until,
    prune,
    read_state,
    remove_after,
    remove_leftovers,
    step_folder,
    steps_of,
)
from stepwell.types import CheckpointError
from tests.parallel.ranks import run_ranks

ONE = Mesh(world=1, rank=0, local_rank=0, device=torch.device("cpu"))
SHAPES = {"embed.weight": (11, 5), "blocks.0.w": (7, 5), "norm.weight": (5,)}


def _parameters(mesh, seed):
    """Sharded over dp_shard, replicated over dp_replicate; plain without a group."""
    parameters = {}
    for name, shape in SHAPES.items():
        value = torch.empty(shape)
        if mesh.device_mesh is not None:
            value = distribute_tensor(value, mesh.device_mesh["fsdp"], [Shard(0)])
        parameters[name] = torch.nn.Parameter(normal_(value, seed, name, 1.0))
    return parameters


def _step(parameters, optimizer, seed):
    for name, parameter in parameters.items():
        parameter.grad = normal_(torch.zeros_like(parameter).detach(), seed, f"{name}.grad", 1.0)
    optimizer.step()


def _full(state):
    return {
        name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
        for name, v in state.items()
    }


def _trained(mesh, seed=1):
    parameters = _parameters(mesh, seed)
    optimizer = build_optimizer(parameters.items(), OptimConfig(lr=0.1))
    for step in range(2):
        _step(parameters, optimizer, step)
    return parameters, optimizer


def _save(folder, mesh, asynchronous=False, **extra):
    parameters, optimizer = _trained(mesh)
    handle = save_checkpoint(
        folder, parameters, optimizer.state_dict(), extra, mesh, asynchronous=asynchronous
    )
    return handle.wait()


def _load(folder, mesh, dimensions=None):
    parameters = _parameters(mesh, 99)
    optimizer = build_optimizer(parameters.items(), OptimConfig(lr=0.1))
    extra = load_checkpoint(folder, parameters, optimizer.state_dict(), mesh, dimensions)
    return parameters, optimizer, extra


def _expected():
    parameters, optimizer = _trained(ONE)
    state = _full(parameters) | _full(optimizer.state_dict())
    _step(parameters, optimizer, 5)
    return state, _full(parameters)


def _equal(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def _load_and_step(folder, mesh):
    parameters, optimizer, _ = _load(folder, mesh)
    state = _full(parameters) | _full(optimizer.state_dict())
    _step(parameters, optimizer, 5)
    return state, _full(parameters)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_process_round_trip(tmp_path, asynchronous):
    folder = step_folder(tmp_path, 2)
    assert _save(folder, ONE, asynchronous, step=2, data={"epoch": 1}) == folder
    assert read_state(folder) == {"step": 2, "data": {"epoch": 1}}
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000002"]
    state, after = _load_and_step(folder, ONE)
    _equal(state, _expected()[0])
    _equal(after, _expected()[1])


def _save_on_ranks(folder, replicate):
    mesh = init_distributed(LayoutConfig(dp_replicate=replicate))
    parameters, optimizer = _trained(mesh)
    saved = _full(parameters) | _full(optimizer.state_dict())
    handle = save_checkpoint(folder, parameters, optimizer.state_dict(), {"step": 2}, mesh, True)
    # Training goes on, with collectives of its own, while the checkpoint is written.
    for step in range(20):
        _step(parameters, optimizer, 50 + step)
        torch.distributed.all_reduce(torch.ones(1000))
    return handle.wait(), sorted(path.name for path in Path(folder).iterdir()), saved


def _load_on_ranks(folder, replicate):
    return _load_and_step(folder, init_distributed(LayoutConfig(dp_replicate=replicate)))


@pytest.mark.parametrize("replicate", [1, 2])
def test_saved_on_four_ranks_while_training_goes_on_loads_on_two_three_and_one(tmp_path, replicate):
    folder = step_folder(tmp_path, 2)
    saves = run_ranks(_save_on_ranks, 4, folder, replicate)
    for returned, names, state in saves:
        assert returned == folder
        assert {".metadata", "manifest.json", "state.json", "__0_0.distcp"} <= set(names)
        _equal(state, saves[0][2])
    state, (_, after) = saves[0][2], _expected()
    results = [_load_and_step(folder, ONE)]
    for num_ranks in (2, 3):
        results += run_ranks(_load_on_ranks, num_ranks, folder, 1)
    for got_state, got_after in results:
        _equal(got_state, state)
        # Fused AdamW rounds the tail of a shard differently, so only to float32 rounding.
        torch.testing.assert_close(got_after, after, rtol=1e-5, atol=1e-6)


def test_one_process_checkpoint_loads_on_ranks(tmp_path):
    folder = _save(step_folder(tmp_path, 2), ONE)
    for state, _ in run_ranks(_load_on_ranks, 4, folder, 2):
        _equal(state, _expected()[0])


def test_asynchronous_save_keeps_the_values_of_its_moment(tmp_path):
    value = torch.arange(300_000, dtype=torch.float32)
    handle = save_checkpoint(tmp_path / "c", {"w": value}, {}, {}, ONE, asynchronous=True)
    value.fill_(-1)
    handle.wait()
    assert handle.done()
    load_checkpoint(tmp_path / "c", {"w": value}, {}, ONE)
    assert torch.equal(value, torch.arange(300_000, dtype=torch.float32))


def _flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damage_is_found_and_the_file_named(tmp_path, name, damage):
    folder = _save(step_folder(tmp_path, 2), ONE, step=2)
    path = folder / name
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "flip":
        _flip(path, path.stat().st_size // 2)
    else:
        path.unlink()
    parameters = _parameters(ONE, 99)
    before = _full(parameters)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder, parameters, None, ONE)
    assert name in str(error.value)
    _equal(_full(parameters), before)


def _damaged_on_ranks(folder):
    mesh = init_distributed(LayoutConfig())
    with pytest.raises(CheckpointError) as error:
        verify(folder, mesh)
    return str(error.value)


def test_every_rank_learns_of_damage_that_one_found(tmp_path):
    folder = step_folder(tmp_path, 2)
    run_ranks(_save_on_ranks, 3, folder, 1)
    _flip(folder / "__1_0.distcp", 900)
    errors = run_ranks(_damaged_on_ranks, 2, folder)
    assert len(set(errors)) == 1
    assert "__1_0.distcp" in errors[0]


def test_damage_names_another_checkpoint_and_the_way_to_it(tmp_path):
    folders = [_save(step_folder(tmp_path, step), ONE) for step in (2, 4, 6)]
    (folders[2] / "state.json").write_text("{")
    with pytest.raises(CheckpointError) as error:
        verify(folders[2], ONE)
    assert f"the newest other complete checkpoint is {folders[1]}" in str(error.value)
    assert f"remove the folder {folders[2]}" in str(error.value)
    shutil.rmtree(folders[2])
    verify(folders[1], ONE)
    shutil.rmtree(folders[0])
    (folders[1] / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no other complete checkpoint.*--fresh"):
        verify(folders[1], ONE)


@pytest.mark.parametrize("content", [None, "", "{}", '{"files": {}}'])
def test_a_damaged_manifest_is_an_error(tmp_path, content):
    folder = _save(step_folder(tmp_path, 2), ONE)
    (folder / "manifest.json").unlink()
    if content is not None:
        (folder / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_checkpoint(folder, _parameters(ONE, 1), None, ONE)


def test_loading_is_strict_both_ways(tmp_path):
    folder = _save(step_folder(tmp_path, 2), ONE)
    parameters = _parameters(ONE, 99)
    del parameters["norm.weight"]
    parameters["head.weight"] = torch.zeros(3)
    parameters["embed.weight"] = torch.zeros(12, 5)
    parameters["blocks.0.w"] = torch.zeros(7, 5, dtype=torch.float64)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder, parameters, None, ONE)
    for words in [
        "1 missing: model.head.weight",
        "1 surplus: model.norm.weight",
        "model.embed.weight has shape (11, 5) there, (12, 5) here",
        "model.blocks.0.w is torch.float32 there, torch.float64 here",
    ]:
        assert words in str(error.value)
    assert parameters["embed.weight"].abs().sum() == 0


def test_another_optimizer_is_named_and_weights_alone_load(tmp_path):
    folder = _save(step_folder(tmp_path, 2), ONE)
    parameters = _parameters(ONE, 99)
    muon = build_optimizer(parameters.items(), OptimConfig(kind="muon"))
    with pytest.raises(CheckpointError, match=r"optim\.blocks\.0\.w\.momentum_buffer"):
        load_checkpoint(folder, parameters, muon.state_dict(), ONE)
    load_checkpoint(folder, parameters, None, ONE)
    _equal(_full(parameters), _full(_trained(ONE)[0]))


def test_another_architecture_is_named_by_its_dimensions(tmp_path):
    folder = _save(step_folder(tmp_path, 2), ONE, model={"d_model": 5, "num_layers": 1})
    _load(folder, ONE, {"d_model": 5, "num_layers": 1})
    with pytest.raises(CheckpointError, match="num_layers is 1 there and 2 here"):
        _load(folder, ONE, {"d_model": 5, "num_layers": 2})
    with pytest.raises(CheckpointError, match="num_layers is 1 there and None here"):
        _load(folder, ONE, {"d_model": 5})


class _Evil:
    def __reduce__(self):
        return print, ("code from a checkpoint ran",)


def test_an_index_from_elsewhere_cannot_run_code(tmp_path, capsys):
    folder = _save(step_folder(tmp_path, 2), ONE)
    index = folder / ".metadata"
    index.write_bytes(pickle.dumps(_Evil()))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][".metadata"] = checkpoint._fingerprint(index)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="print, which is not allowed"):
        load_checkpoint(folder, _parameters(ONE, 1), None, ONE)
    assert "ran" not in capsys.readouterr().out


def test_saving_again_replaces(tmp_path):
    folder = _save(step_folder(tmp_path, 2), ONE, step=2, take=1)
    _save(folder, ONE, step=2, take=2)
    assert read_state(folder)["take"] == 2
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


_FULL_DISK = """
import resource, signal, sys, torch
from stepwell.parallel.mesh import Mesh
from stepwell.train.checkpoint import save_checkpoint
from stepwell.types import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
mesh = Mesh(world=1, rank=0, local_rank=0, device=torch.device("cpu"))
state = {"w": torch.zeros(100_000)}
try:
    save_checkpoint(sys.argv[1], state, {}, {}, mesh, asynchronous=sys.argv[2] == "True").wait()
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_takes_no_more_is_a_clear_error_and_leaves_nothing(tmp_path, asynchronous):
    """The kernel's own limit on file sizes stands in for the full disk."""
    run = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path / "c"), str(asynchronous)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"cannot write the checkpoint {tmp_path / 'c'}" in run.stdout
    assert list(tmp_path.iterdir()) == []


def test_too_little_free_space_is_refused_with_numbers(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3_000_000))
    with pytest.raises(CheckpointError, match=r"needs 4\.0 MB and the disk has 3\.0 MB free"):
        save_checkpoint(tmp_path / "c", {"w": torch.zeros(1_000_000)}, {}, {}, ONE)
    assert list(tmp_path.iterdir()) == []


_KILLED = """
import sys, torch
from stepwell.parallel.mesh import Mesh
from stepwell.train.checkpoint import save_checkpoint
from stepwell.train.run_checkpoints import step_folder
mesh = Mesh(world=1, rank=0, local_rank=0, device=torch.device("cpu"))
state = {f"w{i}": torch.zeros(1_000_000) for i in range(10)}
for step in range(1, 1000):
    folder = step_folder(sys.argv[1], step)
    save_checkpoint(folder, state, {}, {"step": step}, mesh, True).wait()
"""


def test_kill_9_during_a_save_leaves_a_loadable_run(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)])
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            writing = tmp_path / "checkpoints" / ".step-00000003.writing"
            if writing.exists():
                break
            time.sleep(0.0005)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    last = latest(tmp_path)
    assert last is not None
    step = read_state(last)["step"]
    assert last.name == f"step-{step:08d}"
    assert step >= 2
    state = {f"w{i}": torch.ones(1_000_000) for i in range(10)}
    load_checkpoint(last, state, {}, ONE)
    assert all(value.sum() == 0 for value in state.values())
    remove_leftovers(tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{i:08d}" for i in range(1, step + 1)]


def test_leftovers_are_ignored_cleaned_and_a_half_done_replacement_is_undone(tmp_path):
    assert latest(tmp_path) is None
    assert remove_leftovers(tmp_path) == []
    folder = _save(step_folder(tmp_path, 2), ONE, step=2)
    shutil.copytree(folder, folder.with_name(".step-00000009.writing"))
    folder.rename(folder.with_name(".step-00000002.replaced"))
    assert latest(tmp_path) is None
    assert [path.name for path in remove_leftovers(tmp_path)] == [".step-00000009.writing"]
    assert latest(tmp_path) == folder
    (folder / "manifest.json").unlink()
    assert latest(tmp_path) is None


def test_prune_keeps_the_last_and_the_best(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: None}
    for step, loss in losses.items():
        extra = {"extra": {"metrics": {} if loss is None else {"eval/loss": loss}}}
        save_checkpoint(step_folder(tmp_path, step), {"w": torch.zeros(2)}, {}, extra, ONE)
    removed = prune(tmp_path, keep_last=2, keep_best=1)
    assert [path.name for path in removed] == ["step-00000001", "step-00000003"]
    assert latest(tmp_path) == step_folder(tmp_path, 5)
    removed = prune(tmp_path, keep_last=1, keep_best=1)
    assert [path.name for path in removed] == ["step-00000004"]
    assert prune(tmp_path, keep_last=9) == []
    assert prune(tmp_path, keep_last=1, keep_also=range(9)) == []
    assert prune(tmp_path, keep_last=1) == [step_folder(tmp_path, 2)]


def test_going_back(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        newest_until(tmp_path, 9)
    for step in (0, 5, 12):
        save_checkpoint(step_folder(tmp_path, step), _parameters(ONE, 1), {}, {"step": step}, ONE)
    (step_folder(tmp_path, 12) / "manifest.json").rename(tmp_path / "kept")  # not complete
    save_checkpoint(step_folder(tmp_path, 20), _parameters(ONE, 1), {}, {"step": 20}, ONE)
    assert steps_of(tmp_path) == [0, 5, 20]
    found = [newest_until(tmp_path, step) for step in (-3, 4, 5, 19, 99)]
    assert found == [step_folder(tmp_path, step) for step in (0, 0, 5, 5, 20)]
    assert remove_after(tmp_path, 5) == [step_folder(tmp_path, 20)]
    assert steps_of(tmp_path) == [0, 5]
    assert remove_after(tmp_path, -1) == [step_folder(tmp_path, step) for step in (0, 5)]
