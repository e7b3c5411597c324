"""`stepwell pretrain` as real processes: going on exactly, stopping, refusing, switching data."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from stepwell.cli import main
from stepwell.config import Run
from stepwell.data.curriculum import rows_given
from stepwell.data.store import StoreWriter, TokenStore
from stepwell.metrics import read_events, read_lines
from stepwell.train.pretrain import open_data, open_stores, pretrain
from stepwell.train.run_checkpoints import latest, read_state
from stepwell.train.streams import stream_name
from stepwell.types import ConfigError, DataError
from tests import runs
from tests.parallel.ranks import run_ranks
from tests.runs import final_weights, finish, killed, measured, settings, words, write_store

WSD = {
    "optim.schedule.kind": "wsd",
    "optim.schedule.decay_steps": 20,
    "data.stages": '[{phase = "decay", sources = [{path = "best"}]}]',
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def test_killed_twice_it_ends_as_if_undisturbed(world):
    """Law 5, with evaluations, asynchronous checkpoints and the decay phase on other data."""
    values = {
        "train.steps": 60,
        "checkpoint.every_steps": 7,
        "train.eval_every": 10,
        "train.eval_rows": 3,
        "data.heldout": '[{path = "heldout"}]',
        **WSD,
    }
    straight = words("pretrain", settings("pretrain", "straight", **values))
    assert finish(straight, world, world / "log")[0] == 0
    broken = words("pretrain", settings("pretrain", "broken", **values))
    rng = random.Random(5)
    for num_lines in (rng.randint(9, 25), rng.randint(35, 55)):
        killed(broken, world, world / "log", world / "broken", num_lines)
    code, output = finish(broken, world, world / "log")
    assert code == 0
    assert "[resume at step" in output
    got, wanted = (measured(world / name) for name in ("broken", "straight"))
    assert got == wanted
    steps = [line["step"] for line in got if "train/loss" in line]
    assert steps == list(range(1, 61))
    runs.assert_equal(final_weights(world / "broken"), final_weights(world / "straight"))
    code, output = finish(broken, world, world / "log")
    assert code == 0
    assert "was finished before (broken); nothing to do" in output
    assert measured(world / "broken") == wanted


def test_the_first_sigterm_saves_and_says_how_to_go_on(world):
    """A real `python -m stepwell.cli`, with its exit code."""
    values = settings("pretrain", "stopped", **{"train.steps": 2000, "checkpoint.every_steps": 999})
    command = [sys.executable, "-m", "stepwell.cli", *words("pretrain", values)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=world)
    metrics, deadline = world / "stopped" / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    last = measured(world / "stopped")[-1]["step"]
    assert f"stopped at step {last} of 2000 and saved; the same command goes on" in errors
    assert (world / "stopped" / "checkpoints" / f"step-{last:08d}").is_dir()
    event = read_events(world / "stopped")[-1]
    assert (event["event"], event["signal"], event["step"]) == ("interrupted", "SIGTERM", last)


def test_another_runs_folder_is_refused_naming_the_keys(world, capsys):
    first = settings("pretrain", "mine")
    assert main(words("pretrain", first)) == 0
    other = {**first, "optim.lr": 0.02, "train.seed": 4, "checkpoint.branch_from": "x"}
    assert main(words("pretrain", other)) == 2
    message = capsys.readouterr().err
    assert "other settings (checkpoint.branch_from, optim.lr, train.seed)" in message
    assert "--fresh" in message
    assert "checkpoint.branch_from='mine'" in message
    assert Run.load("mine/run.toml").optim.lr == 0.01
    free = {**first, "checkpoint.every_steps": 3, "train.micro_batch_rows": 4, "name": "new"}
    assert main(words("pretrain", free)) == 0
    assert "nothing to do" in capsys.readouterr().out


def until_told(folder, values):
    """In each rank: the run, and SIGTERM once its third step is logged."""
    os.chdir(folder)
    metrics = Path(values["dir"]) / "metrics.jsonl"

    def tell():
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    return main(words("pretrain", values))


def test_a_run_goes_on_with_another_number_of_ranks(world):
    """Sample order and, to rounding, losses are those of one process."""
    values = {"train.steps": 60, "precision.compute": "fp32", "train.micro_batch_rows": 1}
    assert main(words("pretrain", settings("pretrain", "single", **values))) == 0
    broken = settings("pretrain", "resharded", **values)
    assert run_ranks(until_told, 2, world, broken) == [130, 130]
    assert 3 <= len(measured(world / "resharded")) < 60
    assert main(words("pretrain", broken)) == 0
    got, wanted = (measured(world / name) for name in ("resharded", "single"))
    assert [line["step"] for line in got] == list(range(1, 61))
    for one, other in zip(got, wanted, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)
        assert one["train/loss_tokens"] == other["train/loss_tokens"]


def test_the_decay_phase_reads_its_own_sources(world, monkeypatch):
    """Each source's windows are known by their tokens."""
    from stepwell.train.engine import Engine

    seen = []
    original = Engine.forward_backward
    monkeypatch.setattr(
        Engine,
        "forward_backward",
        lambda self, batch, *rest: (seen.append(batch), original(self, batch, *rest))[1],
    )
    run = Run.parse({}, settings("pretrain", "decay", **{**WSD, "optim.schedule.decay_steps": 2}))
    assert [stream_name(run, step) for step in (0, 3, 4, 5)] == [
        "sources",
        "sources",
        "stages.0",
        "stages.0",
    ]
    assert pretrain(run) == 6
    stores = [TokenStore.open(name) for name in ("store", "best")]
    texts = [store.read(0, store.num_tokens).tolist() for store in stores]
    for step, batch in enumerate(seen):
        text = texts[step >= 4]
        for sample, row in zip(batch.sample_ids, batch.tokens_BT.tolist(), strict=True):
            assert row == text[sample * 32 : (sample + 1) * 32]
    lrs = [line["train/lr"] for line in measured(world / "decay")]
    assert lrs[:4] == [0.01] * 4
    assert 0 < lrs[5] < lrs[4] <= 0.01


def rows_read(folder: Path) -> dict[str, int]:
    """By store, over all streams of the last checkpoint."""
    last = latest(folder)
    assert last is not None
    extra = read_state(last)["extra"]
    given = rows_given(
        {k: v for k, v in extra.items() if k.startswith(("sources", "stages", "trunk"))}
    )
    return {name: given.get(TokenStore.open(name).fingerprint, 0) for name in ("store", "best")}


CAPPED = {
    "train.steps": 12,
    "checkpoint.every_steps": 3,
    "data.sources": '[{path = "store"}, {path = "best", weight = 0.5, max_epochs = 0.5}]',
    "data.stages": '[{start = 0.25, sources = [{path = "best", max_epochs = 0.5}, '
    '{path = "store"}]}, {start = 0.75, sources = [{path = "store"}]}]',
}


def test_capped_stages_go_on_exactly_wherever_the_run_is_stopped(world):
    """Killed within each of three stages; the cap counts the first two together."""
    straight = words("pretrain", settings("pretrain", "capped", **CAPPED))
    assert finish(straight, world, world / "log")[0] == 0
    broken = words("pretrain", settings("pretrain", "capped-broken", **CAPPED))
    for num_lines in (2, 5, 10):
        killed(broken, world, world / "log", world / "capped-broken", num_lines)
    assert finish(broken, world, world / "log")[0] == 0
    assert measured(world / "capped-broken") == measured(world / "capped")
    runs.assert_equal(final_weights(world / "capped-broken"), final_weights(world / "capped"))
    rows = (TokenStore.open("best").num_tokens - 1) // 32
    assert rows_read(world / "capped") == {"best": rows // 2, "store": 48 - rows // 2}


def test_caps_that_end_the_data_are_refused_before_the_run(world):
    few = '[{path = "store", max_epochs = 1.0}]'
    values = settings("pretrain", "few", **{"train.steps": 60, "data.sources": few})
    with pytest.raises(ConfigError, match=r"data\.sources runs dry: .* need 7,680 tokens"):
        pretrain(Run.parse({}, values))
    assert not Path("few").exists()
    rows = (TokenStore.open("store").num_tokens - 1) // 32
    assert pretrain(Run.parse({}, {**values, "train.steps": rows // 4})) == rows // 4
    over = {**values, "dir": "few-on", "checkpoint.branch_from": "few"}
    with pytest.raises(ConfigError, match=f"steps {rows // 4 + 1} to {rows // 4 + 2} need"):
        pretrain(Run.parse({}, {**over, "train.steps": rows // 4 + 2}))
    lifted = {**over, "data.sources": '[{path = "store"}]', "train.steps": rows // 4 + 2}
    assert pretrain(Run.parse({}, lifted)) == 2


def test_a_branch_may_decay_on_stages_that_its_trunk_has_not(world):
    """One trunk, another mixture in the decay; the store of both goes on in its order."""
    trunk = settings("pretrain", "stable", **{"train.steps": 4})
    assert main(words("pretrain", trunk)) == 0
    stage = '[{phase = "decay", sources = [{path = "best"}, {path = "store"}]}]'
    decay = {"train.steps": 8, "optim.schedule.decay_steps": 4, "data.stages": stage}
    branch = {**trunk, **decay, "dir": "annealed", "checkpoint.branch_from": "stable"}
    assert main(words("pretrain", branch)) == 0
    assert rows_read(world / "annealed") == {"store": 16 + 8, "best": 8}
    whole = {**trunk, **decay, "dir": "annealed-whole"}
    assert main(words("pretrain", whole)) == 0
    assert measured(world / "annealed") == measured(world / "annealed-whole")[4:]


def test_quality_ascending_needs_scores(world):
    values = settings("pretrain", "ascending", **{"data.order": "quality-ascending"})
    with pytest.raises(DataError, match="the store store has no scores"):
        pretrain(Run.parse({}, values))


def test_a_branch_starts_from_a_checkpoints_whole_state(world):
    """Without a change of schedule a branch repeats the trunk, bit for bit; with one it decays."""
    trunk = settings("pretrain", "trunk", **{"checkpoint.every_steps": 3})
    assert main(words("pretrain", trunk)) == 0
    point = {"checkpoint.branch_from": "trunk/checkpoints/step-00000003"}
    assert main(words("pretrain", {**trunk, "dir": "again", **point})) == 0
    assert measured(world / "again") == measured(world / "trunk")[3:]
    runs.assert_equal(final_weights(world / "again"), final_weights(world / "trunk"))
    decay = {**trunk, "dir": "branch", **point, **WSD, "optim.schedule.decay_steps": 3}
    assert main(words("pretrain", decay)) == 0
    assert [line["train/lr"] for line in measured(world / "branch")][-1] < 0.01


def test_a_skipped_step_names_its_samples(world):
    """A bound that every later step exceeds: the guard refuses them, with their rows."""
    values = {
        "guard.spike_factor": 1.0001,
        "guard.loss_spike": 0.0,
        "guard.min_history": 1,
        "guard.max_skips_in_a_row": 99,
    }
    run = Run.parse({}, settings("pretrain", "skips", **values, **{"optim.lr": 1.0}))
    pretrain(run)
    skips = [event for event in read_events("skips") if event["event"] == "skip"]
    assert skips
    store = TokenStore.open("store")
    for event in skips:
        assert len(event["sample_ids"]) == 4
        assert all(0 <= i < store.num_tokens // 32 for i in event["sample_ids"])
        assert "spike_factor" in event["reason"]
    skipped = [line["step"] for line in measured(world / "skips") if line["train/skipped"]]
    assert skipped == [event["step"] for event in skips]


def test_shown_numbers_are_what_they_say(world):
    """Tokens, tokens a second and MFU, from the rows and the definition."""
    from stepwell import hardware
    from stepwell.models.flops import count_parameters

    run = Run.parse(
        {}, settings("pretrain", "shown", **{"train.steps": 2, "precision.compute": "fp32"})
    )
    pretrain(run)
    lines = read_lines(world / "shown" / "metrics.jsonl")
    peak, _ = hardware.peak_flops_per_s(hardware.detect(), "fp32")
    store = TokenStore.open("store")
    from stepwell.data.loader import pretrain_stream

    stream = pretrain_stream([(store, 1.0)], 32, 4, seed=0)
    counts, model = count_parameters(run.model), run.model
    for line in lines:
        batch, _ = next(stream)
        flops = 0.0
        for docs, weights in zip(batch.docs_BT, batch.weights_BT, strict=True):
            for doc in docs.unique():
                length = int((docs == doc).sum())
                flops += length * 2 * (counts.attention + counts.mlp)
                # Query and key, then weights and values: half of length^2 pairs each. The last
                # block's attention is for documents with a loss.
                layers = model.num_layers - int(not weights[docs == doc].any())
                flops += layers * 2 * 2 * model.num_heads * model.head_dim * length**2 / 2
            flops += int(weights.sum()) * 2 * model.vocab_size * model.d_model
            # After the last block's attention a token without a loss needs nothing more.
            idle = int(((docs >= 0) & (weights == 0)).sum())
            heads = model.num_heads * model.head_dim
            flops -= idle * 2 * model.d_model * (heads + 3 * model.d_ff)
        assert line["train/tokens"] == 4 * 32
        assert line["train/loss_tokens"] == int(batch.weights_BT.sum())
        assert line["speed/tokens_per_s"] == pytest.approx(128 / line["time/step_s"])
        assert line["speed/mfu"] == pytest.approx(3 * flops / line["time/step_s"] / peak)


def test_sources_that_cannot_be_are_refused(world):
    write_store(world / "foreign", 9, fingerprint="0" * 64)
    run = Run.parse({}, settings("pretrain", "refused"))
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        pretrain(Run.parse({}, {"dir": "refused"}))
    foreign = Run.parse(
        {}, settings("pretrain", "refused", **{"data.heldout": '[{path = "foreign"}]'})
    )
    with pytest.raises(DataError, match="foreign was made with another tokenizer"):
        open_stores(foreign, foreign.data.heldout)
    named = {"data.tokenizer": "tokenizer", "data.sources": '[{path = "foreign"}]'}
    with pytest.raises(DataError, match=r"foreign was made .* 0{12}\) than data\.tokenizer='tok"):
        pretrain(Run.parse({}, settings("pretrain", "refused", **named)))
    started = {"model.init": "base", "data.sources": '[{path = "foreign"}]'}
    with pytest.raises(ConfigError, match="the store foreign .* does not fit the model base"):
        pretrain(Run.parse({}, settings("pretrain", "refused", **started)))
    small = Run.parse({}, {**settings("pretrain", "refused"), "model.vocab_size": 300})
    with pytest.raises(DataError, match=r"store has 320 ids, but model\.vocab_size=300"):
        pretrain(small)
    assert not Path("refused").exists()
    assert len(open_stores(run, run.data.sources)) == 1


def test_fresh_starts_over(world, capsys):
    values = words("pretrain", settings("pretrain", "over", **{"train.steps": 2}))
    assert main(values) == 0
    assert main([*values, "--fresh", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps_done"] == 2
    assert [line["step"] for line in measured(world / "over")] == [1, 2]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"data.sources": '[{path = "gone"}]'}, "gone"),
        ({"data.tokenizer": "gone"}, "no tokenizer at gone"),
        ({"data.order": "quality-ascending"}, 'scores = "quality"'),
        ({"data.sources": '[{path = "store", max_epochs = 0.1}]'}, "runs dry"),
        ({"checkpoint.branch_from": "gone"}, "gone"),
        ({"checkpoint.branch_from": "kept"}, "lies in the run's own folder"),
    ],
)
def test_what_cannot_start_is_known_before_fresh_and_by_check(world, capsys, change, wrong):
    values = settings("pretrain", "kept", **{"train.steps": 8})
    assert main(words("pretrain", values)) == 0
    assert main([*words("pretrain", values), "--check"]) == 0
    for option in ("--fresh", "--check"):
        assert main([*words("pretrain", {**values, **change}), option]) in (2, 3, 4)
        assert wrong in capsys.readouterr().err
    assert measured(world / "kept")[-1]["step"] == 8
    assert latest("kept") is not None


def test_one_store_under_two_paths_is_refused(world):
    Path("linked").symlink_to("store")
    both = '[{path = "store", max_epochs = 1.0}, {path = "linked", max_epochs = 1.0}]'
    run = Run.parse({}, settings("pretrain", "twice", **{"data.sources": both}))
    with pytest.raises(ConfigError, match="linked hold the same tokens"):
        pretrain(run)
    stage = '[{start = 0.5, sources = [{path = "linked"}]}]'
    with pytest.raises(ConfigError, match=r"data\.stages\.0: the stores .*linked hold the same"):
        pretrain(Run.parse({}, settings("pretrain", "twice", **{"data.stages": stage})))
    assert not Path("twice").exists()


def test_a_branch_within_a_stage_may_have_other_stages(world):
    """What its trunk's stage has read still counts for the caps, also after the branch's stop."""
    best = '[{start = 0.5, sources = [{path = "best"}]}]'
    trunk = settings("pretrain", "staged", **{"train.steps": 8, "data.stages": best})
    assert main(words("pretrain", trunk)) == 0
    mixed = '[{start = 0.5, sources = [{path = "best"}, {path = "store"}]}]'
    more = {"train.steps": 12, "data.stages": mixed, "checkpoint.every_steps": 1}
    branch = {**trunk, **more, "dir": "restaged", "checkpoint.branch_from": "staged"}
    killed(words("pretrain", branch), world, world / "log", world / "restaged", 2)
    assert finish(words("pretrain", branch), world, world / "log")[0] == 0
    assert rows_read(world / "restaged") == {"store": 16 + 8, "best": 16 + 8}
    straight = {**branch, "dir": "restaged-straight"}
    assert main(words("pretrain", straight)) == 0
    assert measured(world / "restaged") == measured(world / "restaged-straight")
    rows = (TokenStore.open("best").num_tokens - 1) // 32
    capped = mixed.replace('"best"', f'"best", max_epochs = {16 / rows + 1e-6}')
    capped = {**branch, "dir": "restaged-capped", "data.stages": capped}
    assert main(words("pretrain", capped)) == 0
    assert rows_read(world / "restaged-capped") == {"store": 16 + 16, "best": 16}


@pytest.mark.parametrize(
    ("epochs", "said"), [(0.4, "only the worst 40%"), (1.5, "last epoch reads only"), (1.0, "")]
)
def test_an_ascending_order_that_ends_within_an_epoch_is_warned_of(world, epochs, said):
    folder = Path(f"scored-{epochs}")
    with StoreWriter(folder, "f" * 64, 320, with_scores=True) as writer:
        for number in range(100):
            writer.add(np.arange(32), score=float(number))
    steps = round(epochs * 25)
    more = {"data.order": "quality-ascending", "train.steps": steps}
    more["data.sources"] = f'[{{path = "{folder}"}}]'
    run = Run.parse({}, settings("pretrain", f"asc-{epochs}", **more))
    warnings = open_data(run).warnings
    assert bool(warnings) == bool(said)
    assert all(said in line and "the best are not read last" in line for line in warnings)
