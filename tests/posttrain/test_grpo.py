"""The GRPO loop: the numbers shown, what each knob does, and real processes that are killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from stepwell.cli import main
from stepwell.data.packing import pack_rows
from stepwell.generate import Request, Sampling
from stepwell.metrics import read_lines
from stepwell.posttrain.advantages import group_advantages
from stepwell.posttrain.answers import answers_of
from stepwell.posttrain.policy_batch import minibatches, with_advantages
from stepwell.posttrain.policy_loss import policy_loss
from stepwell.train.engine import Engine
from tests import oracle, runs
from tests.parallel.ranks import run_ranks
from tests.posttrain.policy_cases import method_of, policy_run, some_rollouts
from tests.runs import final_weights, finish, killed, measured, settings, words


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.mark.parametrize(("compute", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_sampling_after_a_step_uses_the_new_weights(compute, tolerance):
    """Version, and log-probabilities as a scoring pass on the stepped weights has them."""
    single = {"precision.param": "fp32", "precision.reduce": "fp32", "precision.compute": compute}
    run = policy_run(**single, **{"optim.lr": 0.1})
    method, engine = method_of(run), Engine(run)
    requests = [Request(i, (1 + i, 2, 3), seed=i) for i in range(6)]
    sampling = Sampling(temperature=0.8, max_new_tokens=8)
    answers = with_advantages(answers_of(some_rollouts()), method)
    (batch,) = minibatches(answers, method, oracle.LENGTH, 0, engine.mesh, [0])

    def off(completions):
        docs = [
            ([*c.prompt_ids, *c.token_ids], [0] * len(c.prompt_ids) + [1] * len(c.token_ids))
            for c in completions
        ]
        sampled = [[0.0] * len(c.prompt_ids) + list(c.logprobs) for c in completions]
        packed = pack_rows(docs, oracle.LENGTH, extra={"sampled": sampled})
        scored = engine.logprobs(packed, temperature=0.8)
        return ((scored - packed.extra["sampled"]) * packed.weights_BT).abs().max().item()

    before = engine.generate(requests, sampling)
    assert {c.policy_version for c in before} == {0}
    assert off(before) < tolerance
    engine.forward_backward(batch, policy_loss(method))
    assert not engine.optim_step().skipped
    after = engine.generate(requests, sampling)
    assert {c.policy_version for c in after} == {1}
    assert off(after) < tolerance
    assert off(before) > 10 * tolerance
    assert [c.token_ids for c in before] != [c.token_ids for c in after]


def sampled(folder: Path) -> list[dict[str, Any]]:
    """What was sampled to train on."""
    return [row for row in read_lines(folder / "samples.jsonl") if not row["greedy"]]


def objective_at_ratio_one(samples: list[dict[str, Any]], group_size: int) -> float:
    """Mean of -A over all sampled tokens, from the rows of samples.jsonl."""
    total, count = 0.0, 0
    for first in range(0, len(samples), group_size):
        group = samples[first : first + group_size]
        advantages = group_advantages([[row["reward"] for row in group]], "std")[0]
        for row, advantage in zip(group, advantages, strict=True):
            total -= advantage * row["num_tokens"]
            count += row["num_tokens"]
    return total / count


def test_shown_numbers_and_old_logprobs_of_several_updates(world):
    """With two updates a rollout the ratio is 1 at the first and no longer at the second."""
    values = settings("grpo", "two", **{"method.updates_per_rollout": 2, "train.steps": 8})
    values |= {"method.importance_cap": 0.0}
    values |= {"precision.compute": "fp32", "method.group_size": 4, "method.temperature": 0.7}
    values |= {"checkpoint.every_steps": 3, "checkpoint.keep_last": 9}
    assert main(words("grpo", values)) == 0
    lines, samples = measured(world / "two"), sampled(world / "two")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [row["step"] for row in samples] == [s for s in (2, 4, 6, 8) for _ in range(8)]
    moved = 0
    for rollout, (first, second) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        rows = samples[8 * rollout : 8 * rollout + 8]
        expected = objective_at_ratio_one(rows, 4)
        assert first["train/objective"] == pytest.approx(expected, abs=1e-5)
        assert first["train/clipped_share"] == 0
        assert first["train/kl_old"] == 0
        for line in (first, second):
            assert line["reward/mean"] == pytest.approx(sum(r["reward"] for r in rows) / 8)
            assert line["rollout/length"] == pytest.approx(sum(r["num_tokens"] for r in rows) / 8)
            assert line["train/loss_tokens"] == sum(r["num_tokens"] for r in rows)
            assert "train/loss" not in line
            # The first verifiable dimension alone: right is a reward of 1.
            assert line["reward/accuracy"] == line["reward/mean"] == line["reward/regex/mean"]
            assert line["sampler/kl"] == pytest.approx(0, abs=1e-6)
            assert line["sampler/sample_share"] == pytest.approx(1, abs=1e-4)
        assert {row["policy_version"] for row in rows} == {2 * rollout}
        if line["reward/dead_groups"] < 1:
            moved += 1
            assert second["train/kl_old"] > 1e-6
            assert second["train/objective"] < expected
    assert moved
    # Rollouts end at even steps: the checkpoint that is due at step 3 is written at 4.
    names = [folder.name for folder in sorted((world / "two" / "checkpoints").iterdir())]
    assert names == ["step-00000004", "step-00000006", "step-00000008"]


def test_killed_twice_it_ends_as_if_undisturbed(world):
    values = {"train.steps": 30, "checkpoint.every_steps": 4}
    straight = words("grpo", settings("grpo", "straight", **values))
    assert finish(straight, world, world / "log")[0] == 0
    broken = words("grpo", settings("grpo", "broken", **values))
    for num_lines in (7, 22):
        killed(broken, world, world / "log", world / "broken", num_lines)
    assert finish(broken, world, world / "log")[0] == 0
    got, wanted = (measured(world / name) for name in ("broken", "straight"))
    assert got == wanted
    assert [line["step"] for line in got] == list(range(1, 31))
    samples = [read_lines(world / name / "samples.jsonl") for name in ("broken", "straight")]
    assert samples[0] == samples[1]
    assert [row["step"] for row in sampled(world / "broken")] == [
        s for s in range(1, 31) for _ in range(6)
    ]
    runs.assert_equal(final_weights(world / "broken"), final_weights(world / "straight"))
    code, output = finish(broken, world, world / "log")
    assert code == 0
    assert "nothing to do" in output
    assert read_lines(world / "broken" / "samples.jsonl") == samples[1]


def test_the_first_sigterm_saves(world):
    command = words("grpo", settings("grpo", "stopped", **{"train.steps": 500}))
    metrics = world / "stopped" / "metrics.jsonl"
    assert runs.stop_after(command, world, world / "log", metrics, 3, signal.SIGTERM) == 130
    last = measured(world / "stopped")[-1]["step"]
    assert f"stopped at step {last} of 500 and saved" in (world / "log").read_text()
    assert sampled(world / "stopped")[-1]["step"] == last


def three_ranks(folder):
    """More ranks than prompts in a step: one rank has nothing to sample."""
    os.chdir(folder)
    values = settings("grpo", "ranks", **{"train.steps": 3, "precision.compute": "fp32"})
    return main(words("grpo", values))


def test_ranks_share_the_prompts_and_every_sample_is_written(world):
    assert run_ranks(three_ranks, 3, world) == [0, 0, 0]
    alone = settings("grpo", "alone", **{"train.steps": 3, "precision.compute": "fp32"})
    assert main(words("grpo", alone)) == 0
    got, wanted = (sampled(world / name) for name in ("ranks", "alone"))
    assert got[:6] == wanted[:6]
    assert len(got) == len(wanted) == 18
    for one, other in zip(measured(world / "ranks"), measured(world / "alone"), strict=True):
        assert one["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-9)
        assert one["train/loss_tokens"] == other["train/loss_tokens"]
