"""What the loops do about over-optimised rewards: each knob on and off."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.config import Run
from stepwell.eval.grade import Verdict
from stepwell.eval.items import load_prompts
from stepwell.metrics import read_events
from stepwell.parallel.mesh import Mesh
from stepwell.posttrain.grpo import grpo
from stepwell.posttrain.policy.kl_control import raised
from stepwell.posttrain.ppo.ppo import ppo
from stepwell.posttrain.preference.online_dpo import online_dpo
from stepwell.posttrain.rewards.composite import Dimension, Rewards, Scorer, composite, open_rewards
from stepwell.sections.methods import GRPO
from stepwell.sections.rewards import RewardTerm
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.weights import TOKENIZER
from stepwell.types import Completion, ConfigError, TrainingError
from tests import runs
from tests.runs import measured, settings

LOOPS = {"grpo": grpo, "ppo": ppo, "online-dpo": online_dpo}
WINDOW = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    fingerprint = Tokenizer.load(folder / "tokenizer").fingerprint
    for seed in (1, 2):
        run = Run.parse({}, {**runs.MODEL, "method.kind": "reward", "train.seed": seed})
        Engine(run).save(folder / f"rm{seed}", {TOKENIZER: fingerprint}).wait()
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


class Growing:
    """Rewards that rise in each rollout, and models that disagree more and more. broken: the call
    that fails (the first is that of the greedy answers)."""

    def __init__(self, slope: float, calls: int = 0, broken: int | None = None):
        self.calls, self.slope, self.broken = calls, slope, broken

    def score(self, prompts, completions):
        self.calls += 1
        if self.calls == self.broken:
            raise RuntimeError("broken")
        return [
            Verdict(self.calls + 0.1 * len(set(c.token_ids)), disagreement=1 + self.slope * i)
            for i, c in ((self.calls, c) for c in completions)
        ]


def train(kind: str, folder: str, slope: float | Growing | None = 1.0, /, **more: Any):
    """A run whose reward is `Growing` (None: the world's regex); its lines and events."""
    growing = slope if isinstance(slope, Growing | None) else Growing(slope)
    values = settings("grpo", folder, **{"method.overopt_window": WINDOW, "train.steps": 9})
    values |= {"method.kind": kind, "data.seq_len": 48, "method.self_test": False}
    values |= {"precision.compute": "fp32", **more}
    if values.get("method.overopt") == "ignore":
        del values["method.overopt_window"]  # which would be refused
    run = Run.parse({}, values)
    tokenizer = Tokenizer.load("tokenizer")
    prompts, _ = load_prompts("problems.jsonl", tokenizer)
    given = {}
    if growing is not None:
        term = RewardTerm(name="judge", source="model:a,b")
        given["rewards"] = Rewards((Dimension(term, Scorer(growing.score, is_model=True)),))
    LOOPS[kind](run, prompts, tokenizer, **given)
    return measured(Path(folder)), read_events(folder)


def alarms(events):
    return [event for event in events if event["event"] == "overoptimisation"]


def test_an_alarm_is_logged_once_and_measured(world):
    lines, events = train("grpo", "warned")
    (alarm,) = alarms(events)
    assert alarm["step"] == lines[2 * WINDOW - 1]["step"]
    assert set(alarm["signs"]) == {"disagreement"}
    assert "aggregate = 'min'" in alarm["advice"]
    assert [("overopt/signs" in line) for line in lines] == [False] * 5 + [True] * 4
    assert lines[5]["overopt/disagreement"] == pytest.approx((1 + 6) / (1 + 3), abs=0.01)
    assert lines[0]["reward/disagreement"] == pytest.approx(3, abs=1)
    assert all(0 <= line["rollout/repetition"] <= 1 for line in lines)
    # 0.1 for each kind of token in an answer, and at most 6 of them.
    spreads = [line["reward/spread"] for line in lines]
    assert 0 <= min(spreads) < max(spreads) < 0.6
    assert "reward/agreement" not in lines[0]  # members' scores are not told


def test_no_alarm_where_models_agree_or_none_is_asked_or_learnt(world):
    assert alarms(train("grpo", "agree", 0.0)[1]) == []
    lines, events = train("grpo", "ignored", **{"method.overopt": "ignore"})
    assert alarms(events) == []
    assert not any("overopt/signs" in line for line in lines)
    lines, _ = train("grpo", "verified", None)
    assert not any("rollout/repetition" in line for line in lines)


@pytest.mark.parametrize("kind", ["grpo", "online-dpo"])
def test_an_alarm_stops_the_run_with_all_saved(world, kind):
    folder = f"stopped-{kind}"
    with pytest.raises(TrainingError, match="over-optimised") as error:
        train(kind, folder, **{"method.overopt": "stop"})
    step = measured(Path(folder))[-1]["step"]
    assert f"checkpoint of step {step} is saved" in str(error.value)
    assert (Path(folder) / "checkpoints" / f"step-{step:08d}").exists()
    with pytest.raises(TrainingError, match="overopt warn goes on"):
        train(kind, folder, **{"method.overopt": "stop"})
    assert measured(Path(folder))[-1]["step"] == step
    lines, events = train(kind, folder, **{"method.overopt": "warn"})
    assert lines[-1]["step"] == 9
    assert len(alarms(events)) == 1


def test_what_it_knows_is_in_the_checkpoint(world):
    """Broken off after four rollouts, it alarms where an undisturbed run does."""
    # The broken process would end, and with it what it was writing.
    often = {"checkpoint.every_steps": 1, "checkpoint.asynchronous": False}
    with pytest.raises(RuntimeError, match="broken"):
        train("grpo", "halves", Growing(1.0, broken=6), **often)
    _, events = train("grpo", "halves", Growing(1.0, calls=5), **often)
    assert [e["event"] for e in events].count("resume") == 1
    _, wanted = train("grpo", "whole", **often)
    for got, want in zip(alarms(events), alarms(wanted), strict=True):
        assert got["step"] == want["step"] == 2 * WINDOW
        assert (got["signs"], got["reward"]) == (want["signs"], want["reward"])


@pytest.mark.parametrize("kind", ["grpo", "ppo", "online-dpo"])
def test_the_budget_stops_the_run(world, kind):
    leash = {} if kind == "online-dpo" else {"method.kl_coef": 1e-6}
    values = {"optim.lr": 0.03, "method.group_size": 3, "train.steps": 5, **leash}
    free, _ = train(kind, f"free-{kind}", None, **values)
    far = [line["kl/reference"] for line in free]
    assert abs(far[0]) < 1e-4 < max(far)
    budget = max(far) * 0.9
    over = next(line["step"] for line in free if line["kl/reference"] > budget)
    with pytest.raises(TrainingError, match="over method.kl_budget"):
        train(kind, f"over-{kind}", None, **values, **{"method.kl_budget": budget})
    assert measured(Path(f"over-{kind}"))[-1]["step"] == over
    event = next(e for e in read_events(f"over-{kind}") if e["event"] == "kl_budget")
    assert event["kl"] > event["budget"] == pytest.approx(budget)
    within = {"method.kl_budget": max(far) * 1.1}
    assert train(kind, f"within-{kind}", None, **values, **within)[0][-1]["step"] == 5


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_over_the_budget_the_coefficient_is_raised(world, kind):
    values = {"optim.lr": 0.03, "method.kl_coef": 0.1, "train.steps": 8, "method.group_size": 3}
    free, _ = train(kind, f"loose-{kind}", None, **values)
    more = {"method.kl_budget": 1e-3, "method.over_budget": "raise"}
    held, _ = train(kind, f"held-{kind}", None, **values, **more)
    coefs = [line["kl/coef"] for line in held]
    wanted = 0.1
    for line, coef in zip(held, coefs, strict=True):
        assert coef == pytest.approx(wanted)
        wanted = raised(wanted, line["kl/reference"], 1e-3)
    assert coefs[-1] > 0.2
    assert held[-1]["train/objective"] != free[-1]["train/objective"]
    assert any(e["event"] == "kl_budget" for e in read_events(f"held-{kind}"))


def test_raised():
    assert raised(0.1, 2.0, 4.0) == raised(0.1, 4.0, 4.0) == 0.1
    assert raised(0.1, 5.0, 4.0) == pytest.approx(0.125)
    assert raised(0.1, 6.0, 4.0) == raised(0.1, 60.0, 4.0) == pytest.approx(0.15)
    assert raised(0.1, 60.0, 0.0) == 0.1


def test_the_worst_of_several_models(world):
    """aggregate and k change the reward; the disagreement is the models' deviation."""
    answers = [Completion(0, (40, 50), (60 + i, 70), (0.0, 0.0), "", "stop") for i in range(6)]
    run = Run.parse({}, {**runs.MODEL, "data.seq_len": 16, "precision.compute": "fp32"})

    def verdicts(source: str, **term: Any) -> list[Verdict]:
        terms = (RewardTerm(name="judge", source=source, **term),)
        method = GRPO(rewards=terms)
        mesh = Mesh(1, 0, 0, torch.device("cpu"))
        rewards = open_rewards(method, Tokenizer.load("tokenizer"), mesh, run)
        return rewards.score([None] * 6, answers)  # pyright: ignore[reportArgumentType]

    one, two = (verdicts(f"model:rm{i}") for i in (1, 2))
    pairs = [
        (a.reward, b.reward)
        for a, b in zip(one, two, strict=True)
        if a.reward is not None and b.reward is not None
    ]
    assert len(pairs) == 6
    both = verdicts("model:rm1,rm2")
    assert [v.reward for v in both] == pytest.approx([sum(p) / 2 for p in pairs], abs=1e-6)
    worst = verdicts("model:rm1,rm2", aggregate="min")
    assert [v.reward for v in worst] == pytest.approx([min(p) for p in pairs], abs=1e-6)
    sds = [abs(a - b) / 2**0.5 for a, b in pairs]
    assert [v.disagreement for v in both] == pytest.approx(sds, abs=1e-6)
    less = verdicts("model:rm1,rm2", aggregate="mean-k-sd", k=2.0)
    wanted = [sum(p) / 2 - 2 * sd for p, sd in zip(pairs, sds, strict=True)]
    assert [v.reward for v in less] == pytest.approx(wanted, abs=1e-6)
    assert one[0].disagreement is None
    weighted = verdicts("model:rm1,rm2", weight=-3.0)
    assert [v.disagreement for v in weighted] == pytest.approx([3 * s for s in sds], abs=1e-5)
    terms = [RewardTerm(name=n, source="exact") for n in "ab"]
    assert composite(terms, [Verdict(1.0, disagreement=0.5), Verdict(1.0)]).disagreement == 0.5
    assert composite(terms, [Verdict(1.0), Verdict(1.0)]).disagreement is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kl_budget": 1.0}, "nearest is a small one, method.kl_coef=1e-6"),
        ({"over_budget": "raise", "kl_coef": 0.1}, "method.kl_budget, which is 0"),
        ({"kind": "ppo", "kl_budget": 1.0, "over_budget": "raise", "kl_controller": "adaptive"},
         "method.kl_target is the budget"),
        ({"kind": "online-dpo", "over_budget": "raise"}, "nearest legal value is 'stop'"),
        ({"kind": "online-dpo", "kl_budget": 1.0, "loss": {"kind": "simpo"}}, "value is 0"),
        ({"overopt_window": 2}, "overopt_window"),
        ({"rewards": [{"name": "a", "source": "model:x", "aggregate": "min"}]}, "leave it at"),
        ({"rewards": [{"name": "a", "source": "exact", "aggregate": "min"}]}, "leave it at"),
        ({"rewards": [{"name": "a", "source": "model:x,y", "k": 2.0}]}, "leave it out"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Run.parse({"method": {"kind": "grpo", **values}}, {})


def test_limits_are_legal():
    for values in (
        {"kl_budget": 1.0, "kl_coef": 1e-6, "overopt_window": 3},
        {"kind": "ppo", "kl_budget": 1.0, "kl_controller": "adaptive"},
        {"kind": "online-dpo", "kl_budget": 1.0},
        {"rewards": [{"name": "a", "source": "model:x,y", "aggregate": "mean-k-sd", "k": 0.0}]},
    ):
        Run.parse({"method": {"kind": "grpo", **values}}, {})
