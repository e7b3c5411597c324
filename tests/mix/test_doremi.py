import math
import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from stepwell.config import Run
from stepwell.data.store import StoreWriter, TokenStore
from stepwell.metrics import METRICS_FILE
from stepwell.mix import doremi as mix
from stepwell.train.engine import Engine
from stepwell.train.losses import cross_entropy
from stepwell.train.pretrain import pretrain
from stepwell.types import ConfigError, Interrupted
from tests.runs import MODEL, final_weights, write_store


def test_update_known_answers():
    # A third each, excess ln 2 in the first: 2 : 1 : 1.
    even, excess = np.full(3, 1 / 3), np.array([math.log(2), 0, 0])
    assert mix.doremi_update(even, excess, smoothing=1e-12) == pytest.approx([0.5, 0.25, 0.25])
    # (1 - c) of that and c of the uniform mixture.
    assert mix.doremi_update(even, excess, smoothing=0.3) == pytest.approx([0.45, 0.275, 0.275])
    # eta in the exponent: 4 : 1 : 1.
    assert mix.doremi_update(even, excess, step_size=2.0, smoothing=1e-12) == pytest.approx(
        [2 / 3, 1 / 6, 1 / 6]
    )
    # Multiplied onto the weights that were: .5 * 1 : .25 * 2 : .25 * 1.
    second = mix.doremi_update(
        np.array([0.5, 0.25, 0.25]), np.array([0, math.log(2), 0]), smoothing=1e-12
    )
    assert second == pytest.approx([0.4, 0.4, 0.2])
    assert mix.doremi_update(even, np.array([5000.0, 0, 0]))[0] == pytest.approx(1 - 2e-3 / 3)


def test_the_answer_is_the_average_over_steps():
    weights = mix.Weights.uniform(3)
    weights.step(np.array([math.log(2), 0, 0]), 1.0, 1e-12)
    weights.step(np.array([0, math.log(2), 0]), 1.0, 1e-12)
    assert weights.now_D == pytest.approx([0.4, 0.4, 0.2])
    assert weights.average == pytest.approx([0.45, 0.325, 0.225])
    again = mix.Weights.load(weights.state())
    assert again.average.tolist() == weights.average.tolist()


def test_excess_is_clipped_by_token_and_counts_active_tokens_only():
    excess_BT = torch.tensor([[1.0, -3.0, 9.0], [2.0, 4.0, 0.0]])
    weights_BT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    domains_BT = torch.tensor([[0, 0, 0], [2, 2, 2]])
    found = mix.mean_excess(excess_BT, weights_BT, domains_BT, 3)
    assert found.tolist() == [[1.0, 0.0, 6.0], [2.0, 0.0, 3.0]]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """`easy` repeats one pattern; `mixed` is random, nothing can be learnt; `hard` takes learning:
    one of 8 patterns."""
    folder = tmp_path_factory.mktemp("doremi")
    write_store(folder / "random", 0, num_docs=200)
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 320, (8, 16))
    for name, choices in (("easy", patterns[:1]), ("hard", patterns)):
        with StoreWriter(folder / name, "f" * 64, 320) as writer:
            for _ in range(200):
                writer.add(np.tile(choices[generator.integers(len(choices))], 2))
    return folder


LONGER = {"train.steps": 20}


def recipe(world, folder, names=("random", "hard"), **more):
    return Run.parse(
        {},
        {
            **MODEL,
            "dir": str(folder),
            "precision.compute": "fp32",
            "data.seq_len": 32,
            "data.sources": [{"path": str(world / name)} for name in names],
            "train.steps": 6,
            "train.global_batch_rows": 4,
            "train.micro_batch_rows": 6,
            "checkpoint.asynchronous": False,
            "optim.lr": 0.01,
            **more,
        },
    )


def batch_of(run, world, names):
    stores = [TokenStore.open(world / name) for name in names]
    engine = Engine(run)
    batch, _ = next(mix.even_stream(run, stores, engine.mesh))
    return engine, mix.with_domains(batch, stores, run.data.seq_len), stores


def test_rows_know_their_domain_and_are_dealt_evenly(world, tmp_path):
    names = ("random", "hard")
    run = recipe(world, tmp_path, **{"train.global_batch_rows": 8})
    _, batch, stores = batch_of(run, world, names)
    domains = batch.extra[mix.DOMAINS][:, 0].tolist()
    assert sorted(domains) == [0] * 4 + [1] * 4
    for row, domain in enumerate(domains):
        everything = stores[domain].read(0, stores[domain].num_tokens)
        text = batch.tokens_BT[row].numpy()
        windows = np.lib.stride_tricks.sliding_window_view(everything, len(text))
        assert (windows == text).all(1).any()


def test_the_loss_is_the_weighted_sum_of_domain_means(world, tmp_path):
    """Also over micro-batches that see one domain only."""
    run = recipe(world, tmp_path, **{"train.micro_batch_rows": 1})
    engine, batch, _ = batch_of(run, world, ("random", "hard"))
    stats = engine.forward_backward(batch, mix.domain_loss([0.8, 0.2]))
    means = []
    for d in range(2):
        weights = torch.where(batch.extra[mix.DOMAINS] == d, batch.weights_BT, 0.0)
        alone = Engine(run)
        means.append(
            alone.forward_backward(
                replace(batch, weights_BT=weights, extra={}), cross_entropy(run.loss)
            ).loss
        )
    assert stats.loss == pytest.approx(0.8 * means[0] + 0.2 * means[1], rel=1e-5)
    assert stats.metrics["loss_1"] == pytest.approx(means[1], rel=1e-5)


def test_weight_goes_where_the_proxy_is_behind_and_can_catch_up(world, tmp_path):
    reference = recipe(world, tmp_path / "reference", ("random", "hard", "easy"))
    reference = reference.model_copy(
        update={"train": reference.train.model_copy(update={"steps": 50})}
    )
    pretrain(reference)
    run = recipe(
        world,
        tmp_path / "proxy",
        ("random", "hard", "easy"),
        **{"train.steps": 50, "train.global_batch_rows": 6, "optim.lr": 0.003},
    )
    found = mix.doremi(run, reference.dir, console=False)
    random, hard, _ = found.average
    assert found.num_steps == 50
    assert found.average.sum() == pytest.approx(1)
    # At noise the reference is no better than the proxy, at the patterns it is.
    assert hard > 1.2 * random


def test_it_goes_on_exactly_where_it_was(world, tmp_path):
    reference = recipe(world, tmp_path / "reference")
    pretrain(reference)
    whole = mix.doremi(recipe(world, tmp_path / "whole", **LONGER), reference.dir, console=False)

    part = recipe(world, tmp_path / "part", **LONGER)
    stopper = threading.Thread(target=stop_after, args=(tmp_path / "part" / METRICS_FILE, 3))
    stopper.start()
    with pytest.raises(Interrupted, match="of 20 and saved"):
        mix.doremi(part, reference.dir, console=False)
    stopper.join()
    again = mix.doremi(part, reference.dir, console=False)
    assert again.state() == whole.state()
    for name, weight in final_weights(tmp_path / "whole").items():
        assert torch.equal(weight, final_weights(tmp_path / "part")[name]), name


def stop_after(metrics, num_lines):
    """A Ctrl-C once so many steps are logged."""
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < num_lines:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


def test_impossible_settings_are_refused(world, tmp_path):
    three = ("random", "hard", "easy")
    few = recipe(
        world, tmp_path / "p", three, **{"train.global_batch_rows": 2, "train.micro_batch_rows": 2}
    )
    with pytest.raises(ConfigError, match="the nearest legal value is 3"):
        mix.doremi(few, "nowhere")
    with pytest.raises(ConfigError, match="global_batch_rows=4 must give each of 1"):
        mix.doremi(recipe(world, tmp_path / "p", ("easy",)), "nowhere")
    for smoothing in (0.0, 1.0):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            mix.doremi(recipe(world, tmp_path / "p"), "nowhere", smoothing=smoothing)
