"""Rollouts sampled ahead: which weights they see, and that no timing, stop or kill changes them."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.config import Run
from stepwell.data.packing import pack_rows
from stepwell.eval.grade import Prompt
from stepwell.generate import Progress, Snapshot
from stepwell.metrics import read_events
from stepwell.posttrain.rollout import ByVerifier, Rollouts
from stepwell.posttrain.sampling.pipeline import FOLDER, rollout_stream
from stepwell.posttrain.verifiers.exact import regex
from stepwell.sections.methods import GRPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.losses import cross_entropy
from stepwell.train.session import Session
from stepwell.train.start import open_session
from stepwell.types import Interrupted
from tests import runs
from tests.runs import assert_equal

REWARDS = ByVerifier(regex("[a-m]"))
Seen = dict[int, Rollouts]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def some_run(folder: str, **more: Any) -> Run:
    values = {"method.kind": "grpo", "checkpoint.every_steps": 3, "method.max_new_tokens": 40}
    length = {"data.seq_len": 64, "checkpoint.keep_last": 1, "checkpoint.asynchronous": False}
    return Run.parse({}, runs.settings("grpo", folder, **values, **length, **more))


@dataclass
class Hooked:
    """The engine's weights, with something done before every report: a machine that is slow, a
    signal, a fault."""

    snapshot: Snapshot
    before_report: Callable[[int, int], None]

    @property
    def version(self) -> int:
        return self.snapshot.version

    def stream(self, *arguments: Any, **more: Any) -> Iterator[Progress]:
        for i, report in enumerate(self.snapshot.stream(*arguments, **more)):
            self.before_report(self.version, i)
            yield report


class Killed(Exception):
    pass


def killing(at: int) -> Callable[[int], None]:
    def die(number: int) -> None:
        if number == at:
            raise Killed

    return die


def prompts_of(tokenizer: Tokenizer) -> Callable[[int], list[Prompt]]:
    rows = [json.loads(line) for line in Path("problems.jsonl").read_text().splitlines()]
    prompts = [Prompt(r["prompt"], tuple(tokenizer.encode(r["prompt"])), r) for r in rows]
    return lambda number: prompts[2 * number : 2 * number + 2]


def train(
    run: Run,
    before_step: Callable[[int], None] = lambda number: None,
    before_report: Callable[[int, int], None] | None = None,
    during: Callable[[Session], None] = lambda session: None,
) -> tuple[Seen, dict[str, torch.Tensor]]:
    """A loop of the plainest kind; what it took, and the weights at its end."""
    tokenizer, seen = Tokenizer.load("tokenizer"), {}
    assert isinstance(run.method, GRPO)
    source_of = None if before_report is None else lambda s: Hooked(s, before_report)
    with (
        open_session(run, tokenizer=tokenizer.fingerprint, console=False) as session,
        rollout_stream(
            session, prompts_of(tokenizer), REWARDS, tokenizer, source_of=source_of
        ) as stream,
    ):
        during(session)
        number = (session.extra or {"rollouts": 0})["rollouts"]
        while not session.finished:
            seen[number] = stream.take(number, {"rollouts": number})
            metrics = stream.metrics(seen[number])
            assert metrics["rollout/staleness"] == min(number, run.method.max_staleness)
            before_step(number)
            docs = [(ids, mask) for ids, mask, _ in seen[number].documents()]
            session.step(pack_rows(docs, 64), cross_entropy(run.loss), more=metrics)
            number += 1
            stream.after_step({"rollouts": number})
        return seen, session.engine.full_state_dict()


@pytest.fixture(scope="module")
def undisturbed(world) -> dict[int, tuple[Seen, dict[str, torch.Tensor]]]:
    return {s: train(some_run(f"whole-{s}", **{"method.max_staleness": s})) for s in (0, 1, 3)}


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_rollouts_see_the_weights_of_their_turn(undisturbed, staleness):
    seen, _ = undisturbed[staleness]
    assert {n: r.policy_version for n, r in seen.items()} == {
        n: max(0, n - staleness) for n in range(6)
    }
    first = undisturbed[0][0]
    for n in range(6):
        assert (seen[n] == first[n]) == (n == 0 or staleness == 0)


def test_timing_changes_nothing(undisturbed):
    def slow_sampling(version: int, report: int) -> None:
        time.sleep(0.02)

    def slow_training(number: int) -> None:
        time.sleep(0.1)

    for i in range(2):
        got, weights = train(
            some_run(f"timing-{i}", **{"method.max_staleness": 1}),
            before_step=slow_training if i else lambda number: None,
            before_report=None if i else slow_sampling,
        )
        assert got == undisturbed[1][0]
        assert_equal(weights, undisturbed[1][1])


@pytest.mark.parametrize(("staleness", "at"), [(0, 4), (1, 1), (1, 3), (3, 4)])
def test_a_run_that_dies_gets_the_same_rollouts_again(undisturbed, staleness, at):
    """Before its first checkpoint, right after one, and later; twice."""
    run = some_run(f"dies-{staleness}-{at}", **{"method.max_staleness": staleness})
    for _ in range(2):
        with pytest.raises(Killed):
            train(run, killing(at))
    got, weights = train(run)
    wanted, wanted_weights = undisturbed[staleness]
    assert min(got) == 3 * (at // 3)
    assert got == {n: wanted[n] for n in got}
    assert_equal(weights, wanted_weights)
    assert not [e for e in read_events(run.dir) if e["event"] == "rollout_lost"]


@pytest.mark.parametrize("staleness", [0, 1])
def test_sampling_that_breaks_off_goes_on_in_the_middle(undisturbed, staleness):
    """The error reaches the loop; the second time only the rest is sampled."""
    reports: list[tuple[int, int]] = []

    def fault(version: int, report: int) -> None:
        reports.append((version, report))
        if (version, report) == (2, 2) and reports.count((2, 2)) == 1:
            raise Killed("in the middle")

    run = some_run(f"breaks-{staleness}", **{"method.max_staleness": staleness})
    with pytest.raises(Killed, match="in the middle"):
        train(run, before_report=fault)
    partial = Path(run.dir, FOLDER, f"{2 + staleness:08d}.rank0000.partial")
    lines = [json.loads(line) for line in partial.read_text().splitlines()]
    assert (lines[0]["number"], lines[0]["version"]) == (2 + staleness, 2)
    assert 0 < sum(len(line["tokens"]) for line in lines[1:]) < 6 * 40
    got, weights = train(run, before_report=fault)
    wanted, wanted_weights = undisturbed[staleness]
    assert got == {n: wanted[n] for n in got}
    assert_equal(weights, wanted_weights)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_signal_while_sampling_saves_and_goes_on(undisturbed, staleness):
    sessions: list[Session] = []

    def signalled(version: int, report: int) -> None:
        if (version, report) == (2, 1):
            os.kill(os.getpid(), signal.SIGTERM)
            while not sessions[-1].requests.first:
                time.sleep(0.01)

    run = some_run(f"signal-{staleness}", **{"method.max_staleness": staleness})
    with pytest.raises(Interrupted):
        train(run, before_report=signalled, during=sessions.append)
    step = sessions[0].engine.step
    assert step in ((2,) if staleness == 0 else (3, 4)), "the step under way ends"
    got, weights = train(run)
    wanted, wanted_weights = undisturbed[staleness]
    assert got == {n: wanted[n] for n in range(step, 6)}
    assert_equal(weights, wanted_weights)


def test_a_rewind_takes_the_queue_of_its_checkpoint(undisturbed):
    """Rollouts that were sampled before the checkpoint stay; later ones are of the weights that the
    loop has now."""
    run = some_run("rewind", **{"method.max_staleness": 1})
    with pytest.raises(Killed):
        train(run, killing(3))
    tokenizer = Tokenizer.load("tokenizer")
    with (
        open_session(run, tokenizer=tokenizer.fingerprint, console=False) as session,
        rollout_stream(session, prompts_of(tokenizer), REWARDS, tokenizer) as stream,
    ):
        before = [stream.take(n, {"rollouts": n}) for n in (3, 4)]
        assert before == [undisturbed[1][0][3], before[1]]
        stream.rewind(3)
        assert [stream.take(n, {"rollouts": n}) for n in (3, 4)] == before
        docs = [(ids, mask) for ids, mask, _ in before[0].documents()]
        session.step(pack_rows(docs, 64), cross_entropy(run.loss))
        stream.rewind(3)
        assert stream.take(3, {"rollouts": 3}) == before[0], "it was queued"
        after = stream.take(4, {"rollouts": 4})
        assert after != before[1]
        assert after.policy_version == session.engine.updates == 4


def test_a_queue_that_is_gone_is_sampled_anew_and_said(undisturbed):
    run = some_run("gone", **{"method.max_staleness": 1})
    with pytest.raises(Killed):
        train(run, killing(4))
    for path in Path(run.dir, FOLDER).iterdir():
        path.unlink()

    with pytest.raises(AssertionError):  # staleness is 0 where 1 is due
        train(run)
    (event,) = [e for e in read_events(run.dir) if e["event"] == "rollout_lost"]
    assert event["rollout"] == 3


def test_only_what_a_checkpoint_needs_is_kept(undisturbed):
    """Those since the checkpoint before the last, which is there until the last is complete."""
    assert sorted(int(path.name[:8]) for path in Path("whole-0", FOLDER).iterdir()) == [3, 4, 5]
    run = some_run("kept", **{"method.max_staleness": 1})
    with pytest.raises(Killed):
        train(run, killing(4))
    numbers = sorted(int(path.name[:8]) for path in Path("kept", FOLDER).iterdir())
    assert numbers[:2] == [3, 4]
    assert min(numbers) == 3


def test_other_prompts_in_the_same_step(world):
    """Refills have their own file and the weights of the moment."""
    run = some_run("refill", **{"method.max_staleness": 1})
    tokenizer = Tokenizer.load("tokenizer")
    prompts = [Prompt(t, tuple(tokenizer.encode(t)), {}) for t in ("1+1=", "2+2=")]
    with (
        open_session(run, tokenizer=tokenizer.fingerprint, console=False) as session,
        rollout_stream(session, lambda n: prompts[:1], REWARDS, tokenizer) as stream,
    ):
        first = stream.take(0, {"rollouts": 0})
        more = [stream.take_more(0, i, prompts[1:], {"rollouts": 0}) for i in (1, 2)]
        assert more[0].groups[0].prompt == prompts[1]
        assert more[0] != more[1]
        assert stream.take_more(0, 1, prompts[1:], {"rollouts": 0}) == more[0]
        assert {r.policy_version for r in (first, *more)} == {0}
        names = {p.name.split(".rank")[0] for p in Path(run.dir, FOLDER).glob("*.jsonl")}
        assert names == {"00000000", "00000000.1", "00000000.2"}
