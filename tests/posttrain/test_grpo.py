"""The GRPO loop: the numbers shown, what each knob does, and real processes that are killed."""

import os
import signal
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from stepwell.cli import main
from stepwell.data.packing import pack_rows
from stepwell.generate import Request, Sampling
from stepwell.metrics import read_lines
from stepwell.posttrain.answers import answers_of
from stepwell.posttrain.policy.advantages import group_advantages
from stepwell.posttrain.policy.batch import minibatches, with_advantages
from stepwell.posttrain.policy.loss import policy_loss
from stepwell.train.engine import Engine
from stepwell.types import ConfigError
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


EVEN = """
def even(prompts, completions):
    return [None if len(c) % 2 else len(c) / 10 for c in completions]

def none(prompts, completions, **_):
    return [None] * len(completions)
"""


def test_answers_without_a_reward_carry_no_loss(world):
    """They are in no denominator, and have no entropy and no divergence term."""
    (world / "even.py").write_text(EVEN)
    values = settings("grpo", "unscored", **{"train.steps": 2, "method.self_test": False})
    values |= {"method.verifier": "python:even.py:even", "method.importance_cap": 0.0}
    values |= {"precision.compute": "fp32", "method.group_size": 4, "method.entropy_coef": 0.01}
    assert main(words("grpo", values)) == 0
    samples = sampled(world / "unscored")
    assert len({row["trained"] for row in samples}) == 2
    for number, line in enumerate(measured(world / "unscored")):
        rows = samples[8 * number : 8 * number + 8]
        assert [row["trained"] for row in rows] == [row["reward"] is not None for row in rows]
        known = [row for row in rows if row["trained"]]
        assert line["train/loss_tokens"] == sum(row["num_tokens"] for row in known)
        assert line["reward/not_applicable"] == 8 - len(known)
    values |= {"method.verifier": "python:even.py:none", "dir": "none"}
    assert main(words("grpo", values)) != 0
    events = read_lines(world / "none" / "events.jsonl")
    assert [e["rollout"] for e in events if e["event"] == "empty_rollout"] == [0, 1, 2]
    assert [row["rollout"] for row in sampled(world / "none")] == [0] * 8 + [1] * 8 + [2] * 8


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


def trained(world: Path, folder: str, **more: Any) -> list[dict[str, Any]]:
    """A run of these settings beside the usual ones, in this process; its lines of metrics."""
    values = settings("grpo", folder, **{"precision.compute": "fp32", **more})
    assert main(words("grpo", values)) == 0
    return measured(world / folder)


RICH = {
    "method.updates_per_rollout": 2,
    "method.minibatches": 2,
    "method.kl_coef": 0.1,
    "method.dynamic_sampling": "true",
    "method.verifier": "regex:[a-d]",
    "method.self_test": "false",  # anything meets the pattern
}


@pytest.mark.parametrize(
    ("name", "values", "kills"),
    [
        ("rich", RICH, (7, 13)),
        pytest.param("ahead", {"method.max_staleness": 2}, (6, 15), marks=pytest.mark.slow),
    ],
)
def test_killed_twice_it_ends_as_if_undisturbed(world, name, values, kills):
    """In the middle of a rollout's updates (line 7 of steps of four), and while sampling."""
    values = {"train.steps": 20, "checkpoint.every_steps": 4, **values}
    straight = words("grpo", settings("grpo", f"{name}-straight", **values))
    assert finish(straight, world, world / "log")[0] == 0
    broken = words("grpo", settings("grpo", f"{name}-broken", **values))
    for num_lines in kills:
        killed(broken, world, world / "log", world / f"{name}-broken", num_lines)
    assert finish(broken, world, world / "log")[0] == 0
    folders = [world / f"{name}-{how}" for how in ("broken", "straight")]
    got, wanted = (measured(folder) for folder in folders)
    assert got == wanted
    assert [line["step"] for line in got] == list(range(1, 21))
    samples = [read_lines(folder / "samples.jsonl") for folder in folders]
    assert samples[0] == samples[1]
    assert [row["step"] for row in samples[0] if row["greedy"]] == [0] * 8 + [20] * 8
    runs.assert_equal(final_weights(folders[0]), final_weights(folders[1]))
    code, output = finish(broken, world, world / "log")
    assert code == 0
    assert "nothing to do" in output
    assert read_lines(folders[0] / "samples.jsonl") == samples[1]


def test_sampling_ahead_is_stale_and_seen(world):
    """With a queue of one, rollout n has the weights that rollout n - 1 began with."""
    lines = trained(world, "stale", **{"method.max_staleness": 1, "train.steps": 5})
    versions = [rows[0]["policy_version"] for rows in by_step(sampled(world / "stale"))]
    assert versions == [0, 0, 1, 2, 3]
    assert [line["rollout/staleness"] for line in lines] == [0, 1, 1, 1, 1]
    assert lines[0]["sampler/kl"] < 1e-9 < min(line["sampler/kl"] for line in lines[1:])


def by_step(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(group) for _, group in groupby(rows, key=lambda row: row["step"])]


def test_dead_groups_are_replaced_and_counted(world):
    lines = trained(world, "dynamic", **{**RICH, "method.updates_per_rollout": 1, "train.steps": 8})
    refilled = 0
    steps = by_step(sampled(world / "dynamic"))
    for rows, line in zip(steps, lines[1::2], strict=True):
        groups = [rows[i : i + 3] for i in range(0, len(rows), 3)]
        alive = [len({row["reward"] for row in group}) > 1 for group in groups]
        assert line["reward/dead_groups"] == pytest.approx(1 - sum(alive) / len(alive))
        assert line["reward/mean"] == pytest.approx(sum(r["reward"] for r in rows) / len(rows))
        assert line["rollout/thrown_groups"] == sum(not g[0]["trained"] for g in groups)
        assert line["rollout/missing_groups"] == 2 - sum(g[0]["trained"] for g in groups)
        if any(alive):
            assert alive == [group[0]["trained"] for group in groups]
        assert line["rollout/refills"] <= 3
        refilled += line["rollout/refills"] > 0
    assert refilled


def test_the_leash(world):
    """The first step is at the reference; a short leash keeps the policy closer than none to speak
    of; every place of the reference says the same."""
    values = {"train.steps": 6, "optim.lr": 0.003}
    near = trained(world, "near", **values, **{"method.kl_coef": 10.0})
    far = trained(world, "far", **values, **{"method.kl_coef": 1e-9})
    assert near[0]["train/kl"] == far[0]["train/kl"] == pytest.approx(0, abs=1e-9)
    assert 0 < near[-1]["train/kl"] < far[-1]["train/kl"] / 2
    host = trained(world, "host", **values, **{"method.kl_coef": 10.0, "method.reference": "host"})
    assert host == near
    reward = {"method.kl_in": "reward", "method.kl_estimator": "k1"}
    taxed = trained(world, "taxed", **values, **reward, **{"method.kl_coef": 10.0})
    assert "train/kl" not in taxed[0]
    assert taxed[-1]["train/objective"] != near[-1]["train/objective"]


def test_adapters_off_are_the_reference_and_dropout_leaves_the_ratio_at_one(world):
    lora = {"lora.rank": 2, "lora.dropout": 0.5, "method.kl_coef": 0.1, "train.steps": 4}
    lora |= {"method.updates_per_rollout": 2, "optim.lr": 0.03}
    found = {}
    for place in ("adapter-off", "separate"):
        found[place] = trained(world, f"lora-{place}", **lora, **{"method.reference": place})
        for first in found[place][::2]:
            assert first["train/kl_old"] == first["train/clipped_share"] == 0
        # A rollout of dead groups moves nothing.
        assert any(second["train/kl_old"] > 0 for second in found[place][1::2])
    for one, other in zip(*found.values(), strict=True):
        assert one["train/kl"] == pytest.approx(other["train/kl"], rel=1e-4, abs=1e-7)


def test_entropy_is_held_up(world):
    values = {"train.steps": 8, "optim.lr": 0.003}
    held, free = (
        trained(world, f"entropy-{coef}", **values, **{"method.entropy_coef": coef})
        for coef in (1.0, 0.0)
    )
    assert held[0]["train/entropy"] == free[0]["train/entropy"]
    assert held[-1]["train/entropy"] > free[-1]["train/entropy"]


def test_cut_answers_are_left_out_and_long_ones_punished(world):
    masked = trained(world, "masked", **{"method.overlong": "mask", "train.steps": 3})
    for line, rows in zip(masked, by_step(sampled(world / "masked")), strict=True):
        ended = [row["num_tokens"] for row in rows if row["finish_reason"] == "stop"]
        assert line["train/loss_tokens"] == sum(ended) < sum(r["num_tokens"] for r in rows)
    # The limit is 6 tokens: 4, 5 and 6 of them cost 0, a half and 1 with a cache of 2.
    punished = trained(world, "punished", **{"method.overlong_cache": 2, "train.steps": 2})
    rows = sampled(world / "punished")
    for row in rows:
        fine = -max(0.0, (row["num_tokens"] - 4) / 2)
        assert row["scores"]["overlong"] == fine
        assert row["reward"] == row["scores"]["regex"] + fine
    assert punished[0]["reward/overlong/mean"] == pytest.approx(
        sum(row["scores"]["overlong"] for row in rows[:6]) / 6
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method.dual_clip": 0.9}, "dual_clip=0.9 must be above 1"),
        ({"method.dual_clip": 3.0, "method.objective": "cispo"}, "nearest legal value is 0"),
        ({"method.kl_in": "reward", "method.kl_estimator": "unbiased"}, "take 'k1'"),
        ({"method.overlong_cache": 9}, "overlong_cache=9 exceeds method.max_new_tokens=8"),
        ({"method.minibatches": 17}, "exceeds method.prompts_per_step=16"),
        ({"method.group_size": 1}, "group_size"),
    ],
)
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        policy_run(**values)


def test_limits_are_legal():
    policy_run(**{"method.overlong_cache": 8, "method.minibatches": 16, "method.group_size": 2})
    twice = {"method.updates_per_rollout": 2}
    policy_run(**{"method.dual_clip": 1.01, "method.objective": "gspo", **twice})
    policy_run(**{"method.kl_in": "reward", "method.kl_estimator": "k1", "method.kl_coef": 0.1})


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
