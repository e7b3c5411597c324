"""GRPO: the gradient against plain autograd, the numbers shown, and real processes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.cli import main
from stepwell.config import Run
from stepwell.data.loader import rank_rows
from stepwell.data.packing import pack_rows
from stepwell.eval.grade import Prompt, Verdict
from stepwell.generate import Request, Sampling
from stepwell.metrics import read_lines
from stepwell.models.transformer import ForwardOptions
from stepwell.posttrain.advantages import group_advantages
from stepwell.posttrain.grpo import clipped_objective, pack_rollouts, policy_loss
from stepwell.posttrain.rollout import Group, Rollouts
from stepwell.sections.methods import GRPO
from stepwell.train.engine import Engine
from stepwell.types import Completion
from tests import oracle, runs
from tests.oracle import assert_same, base_run
from tests.parallel.ranks import run_ranks
from tests.runs import final_weights, finish, killed, measured, settings, words


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def policy_run(**overrides: Any) -> Run:
    values = {"method.kind": "grpo", "method.max_new_tokens": 8, "optim.clip_norm": 0.0}
    return base_run(**{**values, **overrides})


def some_rollouts() -> Rollouts:
    """Three groups of answers of very different lengths; one answer has no reward, and one group
    is dead."""
    generator = torch.Generator().manual_seed(1)
    rewards: list[list[float | None]] = [[1, 0, 0, 0], [0.5, None, 2, -1], [1, 1, 1, 1]]
    groups = []
    for number, group in enumerate(rewards):
        ids = torch.randint(0, oracle.VOCAB, (3 + number,), generator=generator).tolist()
        completions = []
        for answer in range(4):
            length = 1 + (3 * answer + number) % 8
            tokens = torch.randint(0, oracle.VOCAB, (length,), generator=generator).tolist()
            completions.append(
                Completion(answer, tuple(ids), tuple(tokens), (-4.0,) * length, "", "length")
            )
        verdicts = tuple(Verdict(reward) for reward in group)
        groups.append(Group(Prompt("", tuple(ids)), tuple(completions), verdicts))
    return Rollouts(tuple(groups))


def policy_gradient(run: Run, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """Runs in each rank: gradients of the first update."""
    method = run.method
    assert isinstance(method, GRPO)
    engine = Engine(run)
    batch = pack_rollouts(some_rollouts(), method, oracle.LENGTH, pad_id=0)
    share = rank_rows(batch.num_rows, engine.mesh.data_rank, engine.mesh.data_world)
    batch = batch.rows(share.start, share.stop)
    stats = engine.forward_backward(batch, policy_loss(method), temperature)
    found = {"loss": torch.tensor(stats.loss, dtype=torch.float64)}
    for name, parameter in engine.decoder.named_parameters():
        assert parameter.grad is not None
        found[name] = oracle.full(parameter.grad)
    return found


def naive_gradient(run: Run, temperature: float) -> dict[str, torch.Tensor]:
    """Plain autograd of -A * logp, each answer alone."""
    method = run.method
    assert isinstance(method, GRPO)
    decoder: Any = Engine(run).decoder
    options = ForwardOptions(needs=frozenset({"logits"}), dtype=torch.float64)
    total, count, value = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for group in some_rollouts().groups:
        advantages = group_advantages([group.rewards], method.advantage)[0]
        for completion, advantage in zip(group.completions, advantages, strict=True):
            ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
            num_tokens, num_answer = len(ids) - 1, len(completion.token_ids)
            logits = decoder(
                ids[None, :-1],
                torch.arange(num_tokens)[None],
                torch.tensor([0, num_tokens], dtype=torch.int32),
                options=options,
            ).logits_BTV[0]
            logprobs = (logits / temperature).log_softmax(-1)[torch.arange(num_tokens), ids[1:]]
            weight = 1.0 if method.aggregate == "token" else 1.0 / num_answer
            total = total - advantage * weight * logprobs[-num_answer:].sum()
            count += weight * num_answer
            value -= weight * num_answer * advantage
    (total / count).backward()
    found = {name: p.grad for name, p in decoder.named_parameters()}
    return {"loss": torch.tensor(value / count, dtype=torch.float64), **found}


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
@pytest.mark.parametrize("advantage", ["std", "none"])
def test_first_update_is_the_plain_policy_gradient(aggregate, advantage):
    """The ratio is exactly 1, so the loss is the mean of -A; a sequence mean is 0 while its
    gradient is not."""
    run = policy_run(
        **{
            "method.aggregate": aggregate,
            "method.advantage": advantage,
            "train.micro_batch_rows": 2,
        }
    )
    for temperature in (1.0, 0.7):
        got, wanted = policy_gradient(run, temperature), naive_gradient(run, temperature)
        # Advantages and weights travel in float32.
        assert_same(got, wanted, 1e-5)
        if aggregate == "sequence":
            assert got["loss"].abs() < 1e-7
            assert got["blocks.0.attn.wq.weight"].abs().max() > 1e-3


def test_no_split_changes_the_gradient():
    wanted = policy_gradient(policy_run(**{"train.micro_batch_rows": 100}))
    assert_same(policy_gradient(policy_run(**{"train.micro_batch_rows": 1})), wanted, 1e-12)
    run = policy_run(**{"train.micro_batch_rows": 2})
    for got in run_ranks(policy_gradient, 2, run):
        assert_same(got, wanted, 1e-12)


def test_rollouts_are_packed_token_in_token_out():
    method = policy_run().method
    assert isinstance(method, GRPO)
    rollouts = some_rollouts()
    batch = pack_rollouts(rollouts, method, oracle.LENGTH, pad_id=0)
    found, wanted = [], []
    for row in range(batch.num_rows):
        for doc in batch.docs_BT[row].unique():
            if doc >= 0:
                at = (batch.docs_BT[row] == doc) & (batch.weights_BT[row] != 0)
                advantages = batch.extra["advantages"][row][at].unique().tolist()
                found.append((batch.targets_BT[row][at].tolist(), advantages))
    for group in rollouts.groups:
        advantages = group_advantages([group.rewards], "std")[0]
        for completion, advantage in zip(group.completions, advantages, strict=True):
            wanted.append((list(completion.token_ids), [pytest.approx(advantage)]))
    assert len(found) == len(wanted)
    for tokens, advantages in wanted:
        assert any(tokens == t and advantages == a for t, a in found)
    assert batch.extra["old_logprobs"].isnan().all()
    trained = batch.weights_BT != 0
    assert (batch.extra["sampler_logprobs"][trained] == -4).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.5, 1.0, -1.28, 0.0, True),
        (1.5, -1.0, 1.5, 1.5, False),
        (0.5, 1.0, -0.5, -0.5, False),
        (0.5, -1.0, 0.8, 0.0, True),
        (1.2, 0.0, 0.0, 0.0, False),
    ],
)
def test_clipping(ratio, advantage, value, slope, clipped):
    """PPO's four corners, with bounds 0.2 below and 0.28 above; slope: d value / d log-prob."""
    logprob = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    found, binds = clipped_objective(
        logprob, torch.zeros(()), torch.tensor(advantage, dtype=torch.float64), 0.2, 0.28
    )
    found.backward()
    assert logprob.grad is not None
    assert found.item() == pytest.approx(value)
    assert logprob.grad.item() == pytest.approx(slope)
    assert bool(binds) == clipped


@pytest.mark.parametrize(("compute", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_sampling_after_a_step_uses_the_new_weights(compute, tolerance):
    """Version, and log-probabilities as a scoring pass on the stepped weights has them."""
    single = {"precision.param": "fp32", "precision.reduce": "fp32", "precision.compute": compute}
    run = policy_run(**single, **{"optim.lr": 0.1})
    method = run.method
    assert isinstance(method, GRPO)
    engine = Engine(run)
    requests = [Request(i, (1 + i, 2, 3), seed=i) for i in range(6)]
    sampling = Sampling(temperature=0.8, max_new_tokens=8)
    batch = pack_rollouts(some_rollouts(), method, oracle.LENGTH, pad_id=0)

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
    values |= {"precision.compute": "fp32", "method.group_size": 4, "method.temperature": 0.7}
    values |= {"checkpoint.every_steps": 3, "checkpoint.keep_last": 9}
    assert main(words("grpo", values)) == 0
    lines, samples = measured(world / "two"), read_lines(world / "two" / "samples.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [row["step"] for row in samples] == [s for s in (2, 4, 6, 8) for _ in range(8)]
    moved = 0
    for rollout, (first, second) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        rows = samples[8 * rollout : 8 * rollout + 8]
        expected = objective_at_ratio_one(rows, 4)
        assert first["train/objective"] == pytest.approx(expected, abs=1e-5)
        assert first["train/clipped_share"] == 0
        assert first["train/kl_sampler"] == pytest.approx(0, abs=1e-6)
        for line in (first, second):
            assert line["reward/mean"] == pytest.approx(sum(r["reward"] for r in rows) / 8)
            assert line["rollout/length"] == pytest.approx(sum(r["num_tokens"] for r in rows) / 8)
            assert line["train/loss_tokens"] == sum(r["num_tokens"] for r in rows)
        assert {row["policy_version"] for row in rows} == {2 * rollout}
        if line["reward/dead_groups"] < 1:
            moved += 1
            assert second["train/kl_sampler"] > 1e-6
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
    assert [row["step"] for row in samples[0]] == [s for s in range(1, 31) for _ in range(6)]
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
    assert read_lines(world / "stopped" / "samples.jsonl")[-1]["step"] == last


def three_ranks(folder):
    """More ranks than prompts in a step: one rank has nothing to sample."""
    os.chdir(folder)
    values = settings("grpo", "ranks", **{"train.steps": 3, "precision.compute": "fp32"})
    return main(words("grpo", values))


def test_ranks_share_the_prompts_and_every_sample_is_written(world):
    assert run_ranks(three_ranks, 3, world) == [0, 0, 0]
    alone = settings("grpo", "alone", **{"train.steps": 3, "precision.compute": "fp32"})
    assert main(words("grpo", alone)) == 0
    got, wanted = (read_lines(world / name / "samples.jsonl") for name in ("ranks", "alone"))
    assert got[:6] == wanted[:6]
    assert len(got) == len(wanted) == 18
    for one, other in zip(measured(world / "ranks"), measured(world / "alone"), strict=True):
        assert one["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-9)
        assert one["train/loss_tokens"] == other["train/loss_tokens"]
