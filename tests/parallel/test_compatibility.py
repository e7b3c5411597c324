"""The table in docs/layouts.md is what the rules say, and what it allows works."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.config import Run
from stepwell.data.loader import rank_rows
from stepwell.data.packing import pack_rows
from stepwell.parallel.compatibility import FEATURES, combined, num_ranks, refusal, table
from stepwell.parallel.mesh import init_distributed
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from tests.layouts import MODEL
from tests.oracle import LENGTH, assert_same, base_run, documents, take_step
from tests.parallel.ranks import run_ranks

DOCS = Path(__file__).parents[2] / "docs" / "layouts.md"
BEGIN, END = "<!-- table: python -m stepwell.parallel.compatibility -->", "<!-- end of table -->"
# Their numbers are rounded on purpose; the others must equal those of one process.
ROUNDED = {"fp16", "fp8", "adamw8bit"}
ADAPTED = {"lora.rank": 4}  # what MODEL's matrices can have
SAME_ALONE = ("optim.kind", "optim.release_gradients", "optim.clip_norm", "guard.action")


def test_the_documented_table_is_the_rules():
    text = DOCS.read_text("utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == table().strip()


def test_every_feature_works_alone():
    for name in FEATURES:
        assert refusal(combined(name, name) or {}) is None, name


def test_a_refusal_names_both_settings():
    settings = combined("zbv", "ZeRO 3")
    assert settings is not None
    reason = refusal(settings)
    assert reason is not None
    assert "pp_schedule='zbv'" in reason
    assert "reshard_after_forward='always'" in reason


def pairs() -> list[tuple[str, str]]:
    """What the table allows, each feature alone among them."""
    found = itertools.combinations_with_replacement(FEATURES, 2)
    return [(a, b) for a, b in found if (s := combined(a, b)) is not None and refusal(s) is None]


def batch():
    """As many rows as the longest pipeline wants micro-batches, for four shares."""
    rows = [[0], [1], [3, 4], [5, 6], [7], [8], [0], [2]] * 2
    return pack_rows(documents(), LENGTH, rows=rows)


def run_of(pair: tuple[str, str]) -> Run:
    settings = combined(*pair)
    assert settings is not None
    fitted = ADAPTED if "lora.rank" in settings else {}
    if "adamw8bit" in pair:
        # The smallest with moments of whole blocks.
        fitted = {"model.d_model": 256} | ({"lora.rank": 16} if fitted else {})
    values = {**MODEL, **settings}
    if settings.get("optim.release_gradients"):
        values["train.micro_batch_rows"] = 16
    if ROUNDED & {*pair}:
        values |= {"model.d_ff": 32, "model.d_model": 32, "model.head_dim": 16}
        values |= {f"precision.{k}": "fp32" for k in ("compute", "reduce", "param")}
        values |= {"precision.compute": "bf16", "precision.fp8.min_dim": 16} | settings
    values |= {"train.global_batch_rows": 16, **fitted}
    return base_run(**values)


def all_steps(wanted: list[tuple[str, str]]):
    results = []
    for pair in wanted:
        run = run_of(pair)
        engine = Engine(run, mesh=init_distributed(run.layout))
        share = rank_rows(16, engine.mesh.data_rank, engine.mesh.data_world)
        mine = batch().rows(share.start, share.stop)
        rounded = engine.release is not None or ROUNDED & {*pair}
        results.append(_weights_after(engine, mine) if rounded else take_step(engine, mine))
    return results


def _weights_after(engine: Engine, mine):
    """Of a step whose gradients are gone when it is over, or scaled before."""
    for _ in range(8):  # fp16 halves its scale of the loss first: 4 times with wide gradients
        engine.forward_backward(mine, cross_entropy(engine.run.loss))
        info = engine.optim_step()
        if not info.skipped:
            break
        assert info.verdict is not None
        assert info.verdict.watched == "loss_scale"
    assert not info.skipped
    return {f"weight/{name}": value for name, value in engine.iter_state(merged=False)}


def kept_alone(pair: tuple[str, str]) -> dict[str, Any]:
    """The settings that one process needs, too, to find the same."""
    settings = combined(*pair) or {}
    kept = {k: v for k, v in settings.items() if k in SAME_ALONE or k.startswith("lora.")}
    kept.pop("optim.release_gradients", None)
    return kept | ADAPTED if "lora.rank" in kept else kept


def alone(run: Run):
    engine = Engine(run)
    return take_step(engine, batch())


@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_the_table_allows_equals_one_process(ranks):
    wanted = [pair for pair in pairs() if num_ranks(combined(*pair) or {}) == ranks]
    assert len(wanted) > 10
    references: dict[tuple, dict[str, torch.Tensor]] = {}
    for some in (wanted[i : i + 20] for i in range(0, len(wanted), 20)):
        results = run_ranks(all_steps, ranks, some, timeout_s=900)
        for i, pair in enumerate(some):
            kept = kept_alone(pair)
            for found in (rank[i] for rank in results):
                if ROUNDED & {*pair}:
                    assert all(math.isfinite(x.double().sum()) for x in found.values()), pair
                    continue
                key = tuple(sorted(kept.items()))
                if key not in references:
                    values = {**MODEL, "train.global_batch_rows": 16, **kept}
                    references[key] = alone(base_run(**values))
                reference = references[key]
                assert_same(found, {n: reference[n] for n in found}, 1e-9, str(pair))
