"""Memory of a machine: offload, staging, batches, and both sides of what it has."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from stepwell.config import Run
from stepwell.data.batch import padding
from stepwell.hardware import GIB
from stepwell.parallel.lever_rules import host_bytes
from stepwell.parallel.rules import axis_sizes
from stepwell.plan.cluster import cluster
from stepwell.plan.memory.host import host_memory, staged_bytes
from stepwell.plan.memory.models import predict_models
from stepwell.presets import PRESETS
from stepwell.train.engine import Engine
from tests.oracle import base_run

H100 = cluster("h100-sxm")
MODEL = PRESETS["llama3-8b"].model_dump(exclude_none=True)


def run_of(**settings: Any) -> Run:
    return Run.parse({"model": MODEL}, {"data.seq_len": 4096, **settings})


def test_offload_is_that_of_all_ranks_of_the_machine():
    run = run_of(**{"offload.optimizer": True, "offload.activations": True})
    for world, ranks in [(4, 4), (8, 8), (64, 8)]:
        found = host_memory(run, world, H100)
        of_rank = host_bytes(run, axis_sizes(run.layout, world))
        assert found.ranks_per_machine == ranks
        for key, num_bytes in of_rank.items():
            assert found.items[f"offload.{key}"] == ranks * num_bytes
        expected = ranks * (of_rank["optimizer"] // 4 + of_rank["activations"])
        assert found.pinned == pytest.approx(expected, rel=1e-6)
        assert found.most == found.total + found.pinned


def test_an_8b_on_one_machine():
    """Masters and two moments are 12 bytes a parameter: 96 GB for a checkpoint that is on its way,
    wherever they live."""
    plain = host_memory(run_of(), 8, H100)
    assert plain.items["checkpoint"] == pytest.approx(12 * 8.03e9, rel=0.01)
    assert "offload.optimizer" not in plain.items
    assert plain.pinned == 0
    away = host_memory(run_of(**{"offload.parameters": True}), 8, H100)
    assert away.items["offload.parameters"] == pytest.approx(16 * 8.03e9, rel=0.01)
    assert away.items["checkpoint"] == pytest.approx(plain.items["checkpoint"], rel=0.01)
    assert away.total > plain.total
    spread = host_memory(run_of(), 64, H100)
    assert spread.items["checkpoint"] == pytest.approx(plain.items["checkpoint"] / 8, rel=0.01)
    waits = host_memory(run_of(**{"checkpoint.asynchronous": False}), 8, H100)
    assert "checkpoint" not in waits.items
    few = host_memory(run_of(**{"lora.rank": 8}), 8, H100)
    assert few.items["checkpoint"] < plain.items["checkpoint"] / 100


def test_what_is_staged_is_what_the_engine_saves():
    run = base_run()
    later = run.checkpoint.model_copy(update={"asynchronous": True})
    run = run.model_copy(update={"checkpoint": later})
    engine = Engine(run)
    saved = [*dict(engine.named_parameters()).values(), *engine.optimizer.state_dict().values()]
    found = sum(tensor.numel() * tensor.element_size() for tensor in saved)
    assert staged_bytes(predict_models(run, 1)) == pytest.approx(found, rel=0.01)
    assert staged_bytes(predict_models(run, 2)) == pytest.approx(found / 2, rel=0.05)


def test_a_reference_on_the_host():
    settings = {"method.kind": "grpo", "method.kl_coef": 0.1, "method.reference": "host"}
    run = run_of(**settings)
    found = host_memory(run, 8, H100)
    assert found.items["reference"] == 8 * predict_models(run, 8)["reference"].host
    assert found.items["reference"] == pytest.approx(2 * 8.03e9, rel=0.01)
    assert found.pinned == found.items["reference"]
    assert "reference" not in host_memory(run_of(), 8, H100).items


def test_batches():
    rows = padding(4, 256)
    tensors = [getattr(rows, name) for name in vars(rows)]
    per_token = sum(t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    assert per_token == 32
    run = run_of(**{"train.global_batch_rows": 16})
    assert host_memory(run, 8, H100).items["batches"] == 8 * 2 * 2 * 4096 * 32


def test_both_sides_of_what_the_machine_has():
    run = run_of(**{"offload.parameters": True})
    need = host_memory(run, 8, H100).total
    usual = host_memory(run, 8, H100)
    assert (usual.room, usual.fits, usual.as_json()["available"]) == (8 * 256 * GIB, True, None)
    enough = host_memory(run, 8, replace(H100, host_memory_bytes=need))
    assert enough.fits
    assert enough.shortage is None
    short = host_memory(run, 8, replace(H100, host_memory_bytes=need - 1))
    assert short.fits is False
    assert short.shortage
    assert "for 8 ranks a machine (offload.parameters 1" in short.shortage
    assert f"more than its {(need - 1) / GIB:.1f} GiB" in short.shortage
    least = re.search(r"from host_memory_gib=(\d+) on", short.shortage)
    assert least
    for gib, fits in ((int(least[1]), True), (int(least[1]) - 1, False)):
        assert host_memory(run, 8, replace(H100, host_memory_bytes=gib * GIB)).fits == fits
    assert "asynchronous=false" in short.shortage
    without = run_of(**{"offload.parameters": True, "checkpoint.asynchronous": False})
    assert host_memory(without, 8, replace(H100, host_memory_bytes=need - 1)).fits
    less = host_memory(without, 8, H100).total
    poor = replace(H100, host_memory_bytes=less - 1)
    assert "asynchronous" not in (host_memory(run, 8, poor).shortage or "asynchronous")
    assert host_memory(run_of(), 8, H100).fits
    assert not host_memory(run_of(), 8, replace(H100, host_memory_bytes=less // 4)).fits
    assert short.text.startswith(f"{need / GIB:,.1f} of {(need - 1) / GIB:,.1f} GiB (offload")
    assert json.loads(json.dumps(short.as_json()))["total"] == need
