"""The online DPO loop: what it trains on and shows, what each knob does, and processes that are
killed."""

import json
import math
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stepwell.cli import main
from stepwell.config import Run
from stepwell.metrics import read_events, read_lines
from stepwell.posttrain.preference.displacement import Monitor, watch
from stepwell.train.engine import Stats
from stepwell.train.start import open_session
from stepwell.types import ConfigError, TrainingError
from tests import runs
from tests.parallel.ranks import run_ranks
from tests.runs import final_weights, finish, killed, measured, settings, start, words

LN2 = math.log(2)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def command(folder: str, **more: Any) -> list[str]:
    usual = {"data.seq_len": 48, "method.group_size": 4, "precision.compute": "fp32"}
    return words("online-dpo", settings("grpo", folder, **{**usual, **more}))


def trained(folder: str, **more: Any) -> list[dict[str, Any]]:
    """A run of these settings in this process; its lines of metrics."""
    assert main(command(folder, **more)) == 0
    return measured(Path(folder))


def sampled(folder: str | Path) -> list[dict[str, Any]]:
    return [row for row in read_lines(Path(folder) / "samples.jsonl") if not row["greedy"]]


def test_best_with_worst_and_the_numbers_shown(world):
    """The rows of a rollout say which were paired, and its line how many were and were not."""
    lines = trained("shown", **{"train.steps": 5, "method.temperature": 0.8})
    rows = sampled("shown")
    by_rollout = {n: [r for r in rows if r["rollout"] == n] for n in range(rows[-1]["rollout"] + 1)}
    with_pairs = [group for group in by_rollout.values() if any(r["role"] for r in group)]
    for line, found in zip(lines, with_pairs, strict=True):
        counts = Counter[str]()
        for group in (found[:4], found[4:]):
            rewards = [row["reward"] for row in group]
            roles = [row["role"] for row in group]
            if len(set(rewards)) == 1:
                assert set(roles) == {""}
                counts["tie"] += 1
                continue
            assert roles.index("chosen") == rewards.index(max(rewards))
            assert roles.index("rejected") == rewards.index(min(rewards))
            assert roles.count("") == 2
            counts["made"] += 1
        assert line["pairs/made"] == counts["made"]
        assert line["pairs/tie"] == counts["tie"]
        assert line["pairs/reward_gap"] == 1
        assert line["reward/mean"] == pytest.approx(sum(r["reward"] for r in found) / 8)
        assert line["reward/accuracy"] == line["reward/mean"]
        chosen = [row["num_tokens"] for row in found if row["role"]]
        assert line["train/loss_tokens"] == sum(chosen)
        assert line["sampler/kl"] == pytest.approx(0, abs=1e-6)
        assert {row["policy_version"] for row in found} == {line["step"] - 1}
    assert lines[0]["train/objective"] == pytest.approx(LN2, abs=1e-6)
    assert lines[0]["kl/reference"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["kl/reference"] > 0.01
    assert [r["rollout"] for r in read_lines(world / "shown" / "samples.jsonl") if r["greedy"]] == [
        *[-1] * 8,
        *[rows[-1]["rollout"]] * 8,
    ]


RICH = {
    "train.steps": 14,
    "checkpoint.every_steps": 4,
    "method.updates_per_rollout": 2,
    "method.minibatches": 2,
    "method.refresh_every": 5,
    "method.displacement_window": 4,
}


def test_killed_twice_it_ends_as_if_undisturbed(world):
    """In the middle of a rollout's updates; the reference has followed the policy before."""
    assert finish(command("straight", **RICH), world, world / "log")[0] == 0
    for num_lines in (7, 11):
        killed(command("broken", **RICH), world, world / "log", world / "broken", num_lines)
    code, log = finish(command("broken", **RICH), world, world / "log")
    assert code == 0, log
    assert measured(world / "broken") == measured(world / "straight")
    samples = [read_lines(world / name / "samples.jsonl") for name in ("broken", "straight")]
    assert samples[0] == samples[1]
    runs.assert_equal(final_weights(world / "broken"), final_weights(world / "straight"))
    told = [e["step"] for e in read_events(world / "straight") if e["event"] == "reference"]
    assert len(told) == 2
    kept = [int(p.name[5:]) for p in (world / "straight/reference/checkpoints").iterdir()]
    assert set(kept) <= set(told)
    assert max(told) in kept
    code, log = finish(command("broken", **RICH), world, world / "log")
    assert (code, "nothing to do" in log) == (0, True)
    assert read_lines(world / "broken" / "samples.jsonl") == samples[1]


@pytest.mark.slow
def test_killed_while_sampling_it_ends_as_if_undisturbed(world):
    long = {"method.max_new_tokens": 120, "data.seq_len": 320, "train.steps": 2}
    long |= {"checkpoint.every_steps": 1, "method.verifier": "regex:zz|[a-c]{2}"}
    assert finish(command("whole", **long), world, world / "log")[0] == 0
    last = sampled(world / "whole")[-1]["rollout"]
    partial = world / "cut" / "rollouts" / f"{last:08d}.rank0000.partial"
    process = start(command("cut", **long), world, world / "log")
    deadline = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        if partial.exists() and partial.read_bytes().count(b"\n") >= 6:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.0005)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, (world / "log").read_text()
    assert finish(command("cut", **long), world, world / "log")[0] == 0
    rows = [read_lines(world / name / "samples.jsonl") for name in ("whole", "cut")]
    assert rows[0] == rows[1]
    runs.assert_equal(final_weights(world / "cut"), final_weights(world / "whole"))


def test_a_refreshed_reference_is_the_policy(world):
    """After a refresh loss and divergence begin anew; without, they don't. On the host it is the
    same."""
    few = {"train.steps": 4}
    fixed = trained("fixed", **few)
    moving = trained("moving", **few, **{"method.refresh_every": 2})
    assert moving[:2] == fixed[:2]
    assert moving[2]["train/objective"] == pytest.approx(LN2, abs=1e-6)
    assert moving[2]["kl/reference"] == pytest.approx(0, abs=1e-5)
    assert fixed[2]["kl/reference"] > 0.01
    host = {"method.refresh_every": 2, "method.reference": "host"}
    assert trained("host", **few, **host) == moving


def test_a_branch_finds_its_trunks_reference(world):
    values = {"method.refresh_every": 1, "train.steps": 1}
    assert main(command("trunk", **values)) == 0
    values |= {"train.steps": 2, "checkpoint.branch_from": "trunk"}
    assert main(command("branch", **values)) == 0
    assert measured(world / "branch")[0]["kl/reference"] == pytest.approx(0, abs=1e-5)


def test_adapters_and_their_reference(world):
    lora = {"lora.rank": 2, "optim.lr": 0.03, "train.steps": 3}
    off = trained("off", **lora, **{"method.reference": "adapter-off"})
    apart = trained("apart", **lora)
    for one, other in zip(off, apart, strict=True):
        assert one["train/objective"] == pytest.approx(other["train/objective"], rel=1e-4)
    assert off[2]["kl/reference"] > 0.001
    # Going on from adapters: they are part of the reference.
    further = {**lora, "lora.init": "apart"}
    assert trained("further", **further)[0]["train/objective"] == pytest.approx(LN2, abs=1e-6)
    moving = trained("moving-lora", **lora, **{"method.refresh_every": 1})
    assert moving[1]["train/objective"] == pytest.approx(LN2, abs=1e-5)


@pytest.mark.parametrize("kind", ["simpo", "ipo", "dpop", "orpo"])
def test_other_losses_of_pairs(world, kind):
    lines = trained(kind, **{"method.loss.kind": kind, "train.steps": 2})
    has_reference = kind in ("ipo", "dpop")
    assert ("kl/reference" in lines[0]) == has_reference
    assert ("train/logps/chosen_shift" in lines[0]) == has_reference
    if kind == "ipo":
        assert lines[0]["train/objective"] == pytest.approx(25, rel=1e-4)


def test_ties_end_a_run_that_learns_nothing(world, capsys):
    """Every answer scores the same; after max_empty rollouts that is enough, and samples tell."""
    tied = {"method.verifier": "regex:.*", "method.max_empty": 2}
    assert main(command("tied", **tied)) == 5
    assert "2 rollouts in a row have no pair (the last: 2 tie)" in capsys.readouterr().err
    events = [e for e in read_events(world / "tied") if e["event"] == "no_pairs"]
    assert [(e["rollout"], e["tie"]) for e in events] == [(0, 2), (1, 2)]
    assert {row["role"] for row in sampled("tied")} == {""}
    assert len(sampled("tied")) == 16


@pytest.mark.parametrize("wanted", ["warn", "stop", "ignore"])
def test_displacement_is_seen(world, wanted):
    """Chosen answers that fall while the margin grows."""
    values = settings("grpo", f"falls-{wanted}", **{"method.kind": "online-dpo"})
    window = {} if wanted == "ignore" else {"method.displacement_window": 4}
    keys = {"method.displacement": wanted, **window}
    run, monitor = Run.parse({}, {**values, **keys, "method.self_test": False}), Monitor(4)
    with open_session(run, console=False) as session:
        for step in range(12):
            shifts = {"logps/chosen_shift": -2.0 * step, "logps/rejected_shift": -7.0 * step}
            session.stats = Stats(0.0, shifts, 1, 1, 0)
            if wanted == "stop" and step == 4:
                with pytest.raises(TrainingError, match="likelihood displacement"):
                    watch(session, monitor)
                break
            watch(session, monitor)
    seen = [e for e in read_events(run.dir) if e["event"] == "displacement"]
    assert len(seen) == (wanted != "ignore")


def two_ranks(folder: Path) -> int:
    os.chdir(folder)
    return main(command("ranks", **RANKS))


RANKS = {"train.steps": 4, "method.refresh_every": 2, "method.prompts_per_step": 3}


def test_ranks_train_as_one_process(world):
    """Shards of the model and of the pairs; a prompt more than ranks."""
    assert run_ranks(two_ranks, 2, world) == [0, 0]
    assert main(command("alone", **RANKS)) == 0
    got, wanted = sampled("ranks"), sampled("alone")
    assert [r["completion"] for r in got[:12]] == [r["completion"] for r in wanted[:12]]
    assert [r["role"] for r in got[:12]] == [r["role"] for r in wanted[:12]]
    for one, other in zip(measured(world / "ranks"), measured(world / "alone"), strict=True):
        for name in ("train/objective", "reward/mean", "pairs/made", "kl/reference"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method.loss.kind": "kto"}, "must be one of dpo, robust, ipo, hinge, simpo"),
        ({"method.loss.desirable_weight": 2.0}, "unknown key 'method.loss.desirable_weight'"),
        ({"method.loss.kind": "simpo", "method.reference": "host"}, "leave it at 'separate'"),
        ({"method.loss.kind": "orpo", "method.refresh_every": 3}, "the nearest legal value is 0"),
        ({"method.refresh_every": 1, "method.reference": "adapter-off"}, "'separate' or 'host'"),
        ({"method.group_size": 1}, "group_size"),
        ({"method.displacement_window": 3}, "displacement_window"),
    ],
)
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Run.parse({"method": {"kind": "online-dpo"}}, values)


def test_limits_are_legal():
    for values in (
        {"method.loss.kind": "simpo"},
        {"method.refresh_every": 1, "method.reference": "host"},
        {"method.group_size": 2, "method.displacement_window": 4, "method.max_empty": 1},
    ):
        Run.parse({"method": {"kind": "online-dpo"}}, values)


def test_prompts_must_leave_room_for_two_answers(world, capsys):
    """A pair is in one row: 2 * (prompt + answer - 1) places."""
    ids = 4 + 6  # a prompt's tokens and an answer's
    check = {"data.seq_len": 2 * (ids - 1)}
    assert main([*command("room", **check), "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fault"] is None
    check["data.seq_len"] -= 1
    assert main([*command("room", **check), "--check"]) == 3
    assert "raise data.seq_len to 18" in capsys.readouterr().err
