"""What surrounds the steps of every loop: folders, signals, saving, and the numbers shown."""

import math
import os
import signal
from pathlib import Path

import pytest
import torch

from stepwell import hardware
from stepwell.config import Run
from stepwell.data.packing import pack_rows
from stepwell.data.shared_prompts import whole_lengths
from stepwell.launch import stopping
from stepwell.metrics import read_events, read_lines
from stepwell.models.flops import count_parameters
from stepwell.train.folder import differing_keys, flat_keys
from stepwell.train.losses import Loss, LossSums, cross_entropy
from stepwell.train.start import open_session
from stepwell.train.step_flops import step_flops
from stepwell.types import CheckpointError, ConfigError, DataError, Interrupted
from tests.oracle import LENGTH, base_run, global_batch
from tests.parallel.ranks import run_ranks


def session_run(folder: Path, **overrides):
    return base_run(**{"dir": str(folder), "precision.param": "fp32", **SINGLE, **overrides})


SINGLE = {"precision.compute": "fp32", "precision.reduce": "fp32"}


def take_step(session, **more):
    batch = global_batch()
    stats = session.engine.forward_backward(batch, cross_entropy(session.run.loss))
    info = session.engine.optim_step()
    session.record(batch, stats, info, more)
    return stats, info


def test_a_bad_step_is_looked_at_with_its_own_noise(tmp_path):
    """Noise is drawn by the step's number, also in the pass that looks for the cause."""
    noise = {"method.kind": "sft", "method.neftune_alpha": 5.0, "train.micro_batch_rows": 7}
    run, seen = session_run(tmp_path, **noise), []
    plain = cross_entropy(run.loss)

    def fn(outputs, batch):
        seen.append(outputs.logprobs_BT.detach())
        sums, metrics = plain.fn(outputs, batch)
        return LossSums({name: total * math.nan for name, total in sums.items()}, metrics)

    with open_session(run, console=False) as session:
        info = session.step(global_batch(), Loss(plain.needs, plain.denominators, fn))
        assert session.engine.step == info.step == 1
    assert info.skipped
    assert torch.equal(*seen)


def checkpoints(folder: Path) -> list[int]:
    return sorted(
        int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*")
    )


def signalled_run(run, signals):
    """Signals before the steps of these numbers, from 0."""
    with open_session(run, console=False) as session:
        while not session.finished:
            for number in signals.get(session.engine.step, ()):
                os.kill(os.getpid(), number)
            take_step(session)
            session.after_step({})


def run_to(run, stop=None):
    """Steps until the run or step `stop` is done; what the loop had saved, and the session."""
    with open_session(run, console=False) as session:
        found = session.extra
        while not session.finished and session.engine.step != stop:
            take_step(session)
            session.after_step({"place": session.engine.step})
    return found, session


def test_a_session_saves_goes_on_and_ends(tmp_path):
    run = session_run(tmp_path, **{"checkpoint.every_steps": 3, "checkpoint.keep_last": 9})
    assert run_to(run, stop=4)[0] is None
    assert checkpoints(tmp_path) == [3]
    assert run_to(run)[0] == {"place": 3}
    assert checkpoints(tmp_path) == [3, 6, 9, 10]
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 11))
    found, session = run_to(run)
    assert found == {"place": 10}
    assert session.finished
    assert [event["event"] for event in read_events(tmp_path)] == ["resume"]
    assert Run.load(tmp_path / "run.toml") == run


def test_keep_last_is_kept(tmp_path):
    run_to(session_run(tmp_path, **{"checkpoint.every_steps": 2, "checkpoint.keep_last": 2}))
    assert checkpoints(tmp_path) == [8, 10]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_step_and_saves(tmp_path, number):
    run = session_run(tmp_path, **{"checkpoint.every_steps": 99, "checkpoint.asynchronous": True})
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=r"stopped at step 2 of 10 and saved; the") as error:
        signalled_run(run, {1: [number]})
    assert error.value.exit_code == 130
    assert checkpoints(tmp_path) == [2]
    assert signal.getsignal(number) == before
    (event,) = read_events(tmp_path)
    assert (event["event"], event["step"], event["signal"]) == ("interrupted", 2, number.name)
    assert run_to(run)[1].finished


def test_a_second_signal_stops_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.0)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signalled_run(session_run(tmp_path), {1: [signal.SIGINT, signal.SIGTERM]})
    assert checkpoints(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_that_comes_twice_at_once_is_one_request(tmp_path):
    with pytest.raises(Interrupted):
        signalled_run(session_run(tmp_path), {1: [signal.SIGINT, signal.SIGINT]})
    assert checkpoints(tmp_path) == [2]


@pytest.mark.parametrize("order", [1, -1])
def test_slurms_two_signals_are_one_request(tmp_path, order):
    with pytest.raises(Interrupted):
        signalled_run(session_run(tmp_path), {1: [signal.SIGUSR1, signal.SIGTERM][::order]})
    assert checkpoints(tmp_path) == [2]
    assert read_events(tmp_path)[-1]["signal"] == "SIGTERM"


def test_a_signal_during_the_last_step_changes_nothing(tmp_path):
    signalled_run(session_run(tmp_path), {9: [signal.SIGTERM]})
    assert checkpoints(tmp_path) == [10]


def _one_rank_is_told(folder):
    with open_session(session_run(Path(folder)), console=False) as session:
        if session.engine.mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            for _ in range(3):
                take_step(session)
                session.after_step({})
        except Interrupted as error:
            return str(error)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path):
    first, second = run_ranks(_one_rank_is_told, 2, str(tmp_path))
    assert first == second
    assert first.startswith("stopped at step 1 of 10 and saved")
    assert checkpoints(tmp_path) == [1]


def test_another_run_in_the_folder_is_refused_and_left_alone(tmp_path):
    run = session_run(tmp_path)
    run_to(run, stop=10)
    other = session_run(tmp_path, **{"optim.lr": 0.5, "model.tied": False})
    with (
        pytest.raises(ConfigError, match=r"\(model\.tied, optim\.lr\); choose another dir"),
        open_session(other, console=False),
    ):
        pass
    assert Run.load(tmp_path / "run.toml") == run
    assert checkpoints(tmp_path) == [10]


@pytest.mark.parametrize("init", [None, "nowhere"])
def test_a_start_that_fails_leaves_no_run_behind(tmp_path, init):
    """Neither its own files nor those of an engine that is trained along."""
    run = session_run(tmp_path, **{"guard.action": "rewind"})
    other = run.model_copy(update={"model": run.model.model_copy(update={"init": init})})
    with (
        pytest.raises(CheckpointError if init else DataError),
        open_session(run, console=False, others={"critic": (other, None)}),
    ):
        raise DataError("unusable")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_kill_while_an_engine_along_is_saved_anew_loses_nothing(tmp_path):
    """After a rewind its checkpoint is written again: the old one stands aside for a moment."""
    run = session_run(tmp_path)
    for again in (False, True):
        with open_session(run, console=False, others={"critic": (run, None)}) as session:
            assert (session.extra is not None) == again
            session.save({"place": 1})
        place = tmp_path / "critic" / "checkpoints" / "step-00000000"
        place.rename(place.with_name(f".{place.name}.replaced"))


def test_a_folder_without_a_checkpoint_may_be_taken_over(tmp_path):
    run_to(session_run(tmp_path), stop=2)
    other = session_run(tmp_path, **{"optim.lr": 0.5})
    run_to(other, stop=2)
    assert Run.load(tmp_path / "run.toml") == other
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("key", "value", "free"),
    [
        ("name", "x", True),
        ("dir", "elsewhere", True),
        ("log.tensorboard", True, True),
        ("layout.dp_shard", 1, True),
        ("checkpoint.every_steps", 7, True),
        ("checkpoint.keep_last", 7, True),
        ("train.micro_batch_rows", 7, True),
        ("train.log_every", 7, True),
        ("checkpoint.branch_from", "x", False),
        ("data.order", "sequential", False),
        ("data.sources", '[{path = "x"}]', False),
        ("optim.schedule.warmup_steps", 1, False),
        ("train.seed", 7, False),
        ("train.steps", 7, False),
        ("guard.window", 32, False),
    ],
)
def test_only_what_changes_no_number_may_change(key, value, free):
    run = Run.parse({}, {"train.steps": 10})
    changed = Run.parse(run.model_dump(), {key: value})
    assert differing_keys(run, changed) == ([] if free else [key])


def test_flat_keys():
    assert flat_keys({"a": {"b": 1, "c": {"d": 2}}, "e": [3]}) == {"a.b": 1, "a.c.d": 2, "e": [3]}


def test_flops_of_a_step_count_documents_and_not_padding():
    """By hand: attention within each document, the head and what follows the last attention where
    there is a loss, backward twice."""
    docs = [([1] * 11, [0] * 6 + [1] * 5), ([2] * 4, [0, 1, 1, 1])]
    run = base_run()
    batch = pack_rows(docs, LENGTH, rows=[[0, 1], []])
    assert whole_lengths(batch) == [10, 3]
    assert batch.num_rows == 2
    counts, model = count_parameters(run.model), run.model
    after = 2 * model.d_model * (model.num_heads * model.head_dim + 3 * model.d_ff)
    body = 13 * 2 * (counts.attention + counts.mlp) - (13 - 8) * after
    # The last block's queries are those from the first loss token of a document on.
    pairs = (model.num_layers * (10**2 + 3**2) - 5**2) / 2
    attention = 4 * model.num_heads * model.head_dim * pairs
    head = 8 * 2 * model.vocab_size * model.d_model
    assert step_flops(run, batch) == pytest.approx(3 * (body + attention + head))
    assert step_flops(run, batch.rows(1, 2)) == 0


def test_displayed_numbers(tmp_path):
    run = session_run(tmp_path, **{"train.log_every": 2, "loss.z_loss": 0.0})
    with open_session(run, console=False) as session:
        shown = [take_step(session, **{"reward/mean": 0.25}) for _ in range(4)]
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4]
    peak, _ = hardware.peak_flops_per_s(hardware.detect(), "fp32")
    batch = global_batch()
    for line, (stats, info) in zip(lines, shown[1::2], strict=True):
        assert line["train/loss"] == stats.metrics["loss"]
        assert line["train/objective"] == pytest.approx(line["train/loss"], rel=1e-6)
        assert line["train/grad_norm"] == info.grad_norm
        assert line["train/lr"] == run.optim.lr
        assert line["train/tokens"] == int((batch.docs_BT >= 0).sum())
        assert line["train/loss_tokens"] == int((batch.weights_BT != 0).sum())
        seconds = line["time/step_s"]
        assert line["speed/tokens_per_s"] == pytest.approx(line["train/tokens"] / seconds)
        assert line["speed/mfu"] == pytest.approx(step_flops(run, batch) / seconds / peak)
        assert line["reward/mean"] == 0.25
        assert line["speed/hfu"] == line["speed/mfu"]
        assert 2**26 < line["memory/peak_bytes"] <= hardware.peak_rss_bytes()


def test_hfu_adds_the_head_that_is_computed_twice(tmp_path):
    run = session_run(tmp_path, **{"loss.keep_logits": "never"})
    batch = global_batch()
    with open_session(run, console=False) as session:
        stats = session.engine.forward_backward(batch, cross_entropy(run.loss))
        session.record(batch, stats, session.engine.optim_step())
        peak = session.peak_flops_per_s
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    extra = (line["speed/hfu"] - line["speed/mfu"]) * line["time/step_s"] * peak
    head = 2 * run.model.vocab_size * run.model.d_model
    assert extra == pytest.approx(line["train/loss_tokens"] * head, rel=1e-6)


def test_hfu_adds_the_blocks_that_are_computed_twice(tmp_path):
    """Full recomputation: all but each block's last product, and attention within documents."""
    run = session_run(tmp_path, **{"remat.mode": "full"})
    batch = global_batch()
    with open_session(run, console=False) as session:
        stats = session.engine.forward_backward(batch, cross_entropy(run.loss))
        session.record(batch, stats, session.engine.optim_step())
        peak = session.peak_flops_per_s
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    extra = (line["speed/hfu"] - line["speed/mfu"]) * line["time/step_s"] * peak
    model, lengths = run.model, whole_lengths(batch)
    width, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    products = 2 * model.d_model * (2 * width + 2 * keys + 2 * model.d_ff)
    pairs = sum(n * n for n in lengths) / 2
    wanted = model.num_layers * (products * sum(lengths) + 4 * width * pairs)
    # In the last block's attention a document begins with its first token with a loss, and after it
    # only those with one go on.
    unasked = sum((17 - 1 - n) ** 2 for n in (16, 1, 0, 9)) + (8 - 1 - 2) ** 2 + (12 - 1 - 7) ** 2
    wanted -= 4 * width * (unasked + (6 - 1 - 1) ** 2) / 2
    after = 2 * model.d_model * (width + 2 * model.d_ff)
    wanted -= after * (sum(lengths) - line["train/loss_tokens"])
    assert extra == pytest.approx(wanted, rel=1e-6)


def _shown_on_ranks(folder):
    run = session_run(Path(folder))
    from stepwell.data.loader import rank_rows

    with open_session(run, console=False) as session:
        mesh, batch = session.engine.mesh, global_batch()
        share = rank_rows(batch.num_rows, mesh.data_rank, mesh.data_world)
        mine = batch.rows(share.start, share.stop)
        stats = session.engine.forward_backward(mine, cross_entropy(run.loss))
        session.record(mine, stats, session.engine.optim_step())
        return session.peak_flops_per_s


def test_mfu_and_tokens_are_over_all_ranks(tmp_path):
    peaks = run_ranks(_shown_on_ranks, 2, str(tmp_path))
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    batch, run = global_batch(), session_run(tmp_path)
    assert line["train/tokens"] == int((batch.docs_BT >= 0).sum())
    flops = line["speed/mfu"] * line["time/step_s"] * peaks[0]
    assert flops == pytest.approx(step_flops(run, batch), rel=1e-6)


def test_a_branch_of_another_method_is_refused(tmp_path):
    run_to(session_run(tmp_path / "trunk"))
    point = str(tmp_path / "trunk" / "checkpoints" / "step-00000010")
    other = session_run(
        tmp_path / "branch", **{"checkpoint.branch_from": point, "method.kind": "sft"}
    )
    with (
        pytest.raises(ConfigError, match=r"is of a pretrain run.*set model\.init"),
        open_session(other, console=False),
    ):
        pass


def test_given_weights_are_the_start_and_not_read_on_resume(tmp_path):
    run = session_run(tmp_path)
    with open_session(run, console=False) as session:
        state = {k: torch.full_like(v, 0.5) for k, v in session.engine.iter_state()}

    def once():
        yield from state.items()

    with open_session(run, once(), console=False) as session:
        assert all((v == 0.5).all() for _, v in session.engine.iter_state())
        take_step(session)
        session.save({})

    def never():
        raise AssertionError("read on resume")
        yield

    with open_session(run, never(), console=False) as session:
        assert session.engine.step == 1
