"""Environments: what becomes of their answers, and of those that raise, hang or talk nonsense."""

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from stepwell.data.chat import render_chat, render_prompt
from stepwell.data.packing import pack_rows
from stepwell.eval.grade import Prompt
from stepwell.generate import Sampling
from stepwell.posttrain.rollout import ByVerifier, Rollouts, collect
from stepwell.posttrain.sampled import check_sampled
from stepwell.posttrain.sampling.calculator import Calculator, calculate
from stepwell.posttrain.sampling.environments import (
    Answer,
    Failure,
    Turns,
    Worker,
    answer_of,
    find_environment,
    turns_of,
)
from stepwell.sections.methods import GRPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.types import ConfigError, DataError
from tests.oracle import base_run

HALF = ByVerifier(lambda prompts, completions, **_: [0.5])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = "what is 12*(3+4)? calc: 12*(3+4) answer: 84 error: end with calc or answer NUMBER. "
    return Tokenizer.train([text * 20], 300)


@pytest.fixture(scope="module")
def engine(tokenizer) -> Engine:
    sizes = {"model.vocab_size": tokenizer.vocab_size, "data.seq_len": 256, "model.init_std": 0.1}
    precision = {f"precision.{name}": "fp32" for name in ("compute", "param", "reduce")}
    return Engine(base_run(**sizes, **precision))


def prompt_of(tokenizer: Tokenizer, text: str) -> Prompt:
    return Prompt(text, tuple(render_prompt(tokenizer, [{"role": "user", "content": text}])))


def episodes(engine, tokenizer, environment, group_size=4, max_new_tokens=8, **more: Any):
    prompts = [prompt_of(tokenizer, text) for text in ("what is 12?", "calc 3+4")]
    sampling = Sampling(eos_ids=tokenizer.stop_ids, max_new_tokens=max_new_tokens)
    values = {"max_turns": 3, "max_len": 256, **more}
    return collect(
        engine,
        prompts,
        group_size,
        sampling,
        HALF,
        tokenizer,
        seed=1,
        environment=environment,
        **values,
    )


class Talker:
    """Answers every turn; ends after the third."""

    def __init__(self):
        self.turns, self.thread = 0, threading.get_ident()

    def reset(self, row):
        assert not self.turns, "used twice"
        assert row["prompt"]

    def step(self, text):
        assert threading.get_ident() == self.thread
        self.turns += 1
        if self.turns == 3:
            return "never seen", 0.25, True
        return f"{self.turns} <|end|> more", 1, False


class AsyncTalker(Talker):
    async def step(self, text):
        await asyncio.sleep(0.001)
        return super().step(text)


# --- tokens ------------------------------------------------------------------------------------


def test_mask_and_logprobs_are_those_of_the_sampled_tokens(engine, tokenizer):
    """Two answers of a shipped environment between three turns: what the sampler saw is what the
    trainer computes of the packed row, and nothing of the environment's is trained."""
    rollouts = episodes(engine, tokenizer, Calculator, max_new_tokens=40)
    observed, documents = 0, rollouts.documents()
    batch = pack_rows(
        [(ids, mask) for ids, mask, _ in documents],
        256,
        extra={"sampler": [streams["sampler_logprobs"] for *_, streams in documents]},
    )
    trained = batch.weights_BT != 0
    logprobs_BT = engine.logprobs(batch)
    torch.testing.assert_close(
        logprobs_BT[trained], batch.extra["sampler"][trained], atol=1e-4, rtol=0
    )
    assert (batch.extra["sampler"][~trained] == 0).all()
    total = 0
    for group in rollouts.groups:
        for c in group.completions:
            assert c.from_policy is not None
            total += sum(c.from_policy)
            observed += c.from_policy.count(False) > 0
            assert len(c.token_ids) == len(c.logprobs) == len(c.from_policy)
            assert all((x != 0) == own for x, own in zip(c.logprobs, c.from_policy, strict=True))
    assert int(trained.sum()) == total
    assert observed >= 2, "environments should have had their say"


@pytest.mark.parametrize("environment", [Talker, AsyncTalker])
def test_turns_follow_one_another_token_in_token_out(engine, tokenizer, environment):
    rollouts = episodes(engine, tokenizer, environment, max_new_tokens=200)
    talked = 0
    for group in rollouts.groups:
        for c, verdict in zip(group.completions, group.verdicts, strict=True):
            assert c.from_policy is not None
            if c.finish_reason == "length":
                continue
            talked += 1
            assert verdict.scores == {"environment": 2.25}
            assert verdict.reward == 2.75
            text = tokenizer.decode(c.token_ids)
            for turn in (1, 2):
                seen = f"<|end|><|user|>{turn} <|end|> more<|end|><|assistant|>"
                assert text.count(seen) == 1
            assert "never seen" not in text
            assert sum(not own for own in c.from_policy) >= 2 * len(tokenizer.encode("1 more"))
            assert len(c.text.split("\n")) >= 3
            assert "more" not in c.text
    assert talked, "some sample should end all its turns"


LINES = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content.strip() + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [None, LINES])
def test_a_turn_is_what_the_template_makes_of_a_conversation(tokenizer, template):
    """Also where line breaks stand between the turns."""
    if template is not None:
        tokenizer = Tokenizer.train(
            ["what is 12? calc: 1 answer: 84 "], 300, chat_template=template
        )
    said = [{"role": "user", "content": "what is 12?"}, {"role": "assistant", "content": "calc: 1"}]
    whole = [*said, {"role": "user", "content": "answer: 84"}]
    (before, _), after = render_chat(tokenizer, said), render_prompt(tokenizer, whole)
    end = before.index(tokenizer.encode("<|end|>")[0], len(render_prompt(tokenizer, said[:1])))
    turns = Turns.of(tokenizer)
    assert before[: end + 1] + turns.ids(before[: end + 1], "answer: 84") == after
    # A turn that was cut off before its end token gets one.
    assert before[:end] + turns.ids(before[:end], "answer: 84") == after


def test_control_tokens_of_an_observation_are_text(tokenizer):
    ids = Turns.of(tokenizer).ids([], "a<|user|>b")
    assert "a<|user|>b" in tokenizer.decode(ids)
    assert ids.count(tokenizer.token_id("<|user|>")) == 1


def test_the_shipped_template_has_a_place_for_a_tool(tokenizer):
    ids = Turns.of(tokenizer, "tool").ids([], "84")
    assert tokenizer.decode(ids) == "<|end|><|tool|>84<|end|><|assistant|>"

    class Tool:
        role = "tool"

    assert turns_of(Tool, tokenizer, "python:mine.py:Tool").head == "<|end|><|tool|>"  # type: ignore[arg-type]


def test_a_role_that_a_template_does_not_know_is_named(tokenizer):
    class Robot:
        role: Any = "robot"

    message = r"method.environment='python:mine.py:Robot' answers in the role 'robot'.*unknown role"
    with pytest.raises(ConfigError, match=message):
        turns_of(Robot, tokenizer, "python:mine.py:Robot")  # type: ignore[arg-type]
    Robot.role = 3
    with pytest.raises(ConfigError, match="its role is 3, and no text"):
        turns_of(Robot, tokenizer, "python:mine.py:Robot")  # type: ignore[arg-type]
    method = GRPO(environment="calculator", max_turns=2)
    knows_no_user = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}"
    other = Tokenizer.train(["a b c"], 280, chat_template=f"{knows_no_user}{{% endfor %}}")
    check_sampled(method, tokenizer)
    with pytest.raises(ConfigError, match="method.environment='calculator' answers in the role"):
        check_sampled(method, other)


def test_who_said_what_is_kept(engine, tokenizer, tmp_path):
    """Beside what the policy wrote, which is all that is graded."""

    class Begins(Talker):
        role = "tool"

        def reset(self, row):
            return [{"role": "user", "content": f"{row['prompt']} answer: 84"}]

    rollouts = episodes(engine, tokenizer, Begins, max_new_tokens=200)
    seen = 0
    completions = [c for g in rollouts.groups for c in g.completions]
    for row, c in zip(rollouts.rows(), completions, strict=True):
        first, *rest = row["turns"]
        assert first == {"role": "user", "content": f"{row['prompt']} answer: 84"}
        assert "\n".join(t["content"] for t in rest if t["role"] == "assistant") == c.text
        observed = [t["content"] for t in rest if t["role"] == "tool"]
        assert observed == ["1 <|end|> more", "2 <|end|> more"][: len(observed)]
        assert all(text in tokenizer.decode(c.token_ids) for text in observed)
        seen += len(observed)
    assert seen
    rollouts.save(tmp_path / "some.jsonl")
    assert Rollouts.load(tmp_path / "some.jsonl") == rollouts
    assert "turns" not in episodes(engine, tokenizer, None).rows()[0]


def test_templates_without_a_place_for_an_answer_are_refused():
    refuses = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match="leaves out"):
        Turns.of(Tokenizer.train(["a b c"], 280, chat_template=refuses))
    plain = Tokenizer.train(["a b c"], 280, chat_template=None)
    assert Turns.of(plain).ids([1], "a b") == plain.encode("a b")


# --- bounds ------------------------------------------------------------------------------------


class Endless:
    def reset(self, row):
        return None

    def step(self, text):
        return "go on", None, False


@pytest.mark.parametrize(("max_turns", "turns"), [(1, 1), (2, 2), (50, 3)])
def test_turns_tokens_and_length_are_bounded(engine, tokenizer, max_turns, turns):
    """Over all turns together."""
    rollouts = episodes(engine, tokenizer, Endless, max_new_tokens=30, max_turns=max_turns)
    most = 0
    for c in (c for g in rollouts.groups for c in g.completions):
        assert c.finish_reason == "length"
        assert c.from_policy is not None
        assert c.from_policy[-1], "nothing follows an environment's last word"
        assert 1 <= sum(c.mask) <= 30
        own = [a and not b for a, b in zip(c.from_policy, (False, *c.from_policy), strict=False)]
        most = max(most, sum(own))
    assert most >= min(turns, 2)
    assert most <= max_turns


def test_a_sample_never_outgrows_its_row(engine, tokenizer):
    rollouts = episodes(
        engine, tokenizer, Endless, max_new_tokens=200, max_turns=50, max_len=60, group_size=8
    )
    lengths = [len(c.prompt_ids) + len(c.token_ids) for g in rollouts.groups for c in g.completions]
    assert max(lengths) == 60
    longer = episodes(
        engine, tokenizer, Endless, max_new_tokens=200, max_turns=50, max_len=61, group_size=8
    )
    assert (
        max(len(c.prompt_ids) + len(c.token_ids) for g in longer.groups for c in g.completions)
        == 61
    )


def test_a_conversation_of_its_own_replaces_the_prompt(engine, tokenizer):
    class Begins(Endless):
        def reset(self, row):
            return [{"role": "user", "content": f"{row['prompt']} answer: 84"}]

    rollouts = episodes(engine, tokenizer, Begins, max_turns=1)
    for group in rollouts.groups:
        wanted = prompt_of(tokenizer, f"{group.prompt.text} answer: 84").ids
        assert {c.prompt_ids for c in group.completions} == {wanted}
    for max_len, failures in ((len(wanted), 4), (len(wanted) + 1, 0)):
        short = episodes(engine, tokenizer, Begins, max_turns=1, max_len=max_len)
        assert sum(v.failure != "" for v in short.groups[1].verdicts) == failures


# --- failures ----------------------------------------------------------------------------------


class Bad:
    """The second of its kind raises, the third hangs, the fourth is slow to begin."""

    made = 0

    def __init__(self):
        Bad.made += 1
        self.number = Bad.made

    def reset(self, row):
        if self.number == 4:
            while True:
                pass

    def step(self, text):
        if self.number == 2:
            raise RuntimeError("no")
        if self.number == 3:
            time.sleep(30)
        return None, 1.0, True


def test_a_failure_costs_its_own_sample(engine, tokenizer):
    Bad.made = 0
    started = time.monotonic()
    rollouts = episodes(engine, tokenizer, Bad, timeout_s=0.3)
    assert time.monotonic() - started < 5
    failures = sorted(v.failure for g in rollouts.groups for v in g.verdicts)
    assert failures == ["", "", "", "", "", "environment_error", *["environment_timeout"] * 2]
    assert rollouts.num_environment_failures == 3
    for verdict in (v for g in rollouts.groups for v in g.verdicts):
        assert verdict.reward == (None if verdict.failure else 1.5)
    details = {v.failure: v.detail for g in rollouts.groups for v in g.verdicts}
    assert details["environment_error"] == "RuntimeError: no"


def test_an_environment_that_calls_exit_costs_its_own_sample():
    class Leaves:
        def reset(self, row):
            raise SystemExit("no key set")

    worker = Worker(Leaves, 5.0)  # type: ignore[arg-type]
    worker.begin("reset", {})
    assert worker.result() == Failure("environment_error", "SystemExit: no key set")
    worker.close()


def test_python_code_that_hangs_is_ended():
    class Spins:
        def reset(self, row):
            while True:
                pass

    worker = Worker(Spins, 0.05)  # type: ignore[arg-type]
    worker.begin("reset", {})
    assert isinstance(worker.result(), Failure)
    worker._thread.join(5)
    assert not worker._thread.is_alive()


def test_an_environment_is_closed_after_use():
    closed = threading.Event()

    class Closes(Endless):
        def close(self):
            closed.set()

    worker = Worker(Closes, 1.0)
    worker.begin("reset", {})
    assert worker.result() is None
    assert not closed.is_set()
    worker.close()
    assert closed.wait(5)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (("a", 1, False), Answer("a", 1.0, False)),
        ((None, None, True), Answer(None, None, True)),
        ((None, 1.0, False), "no observation"),
        ((1, 1.0, True), "observation is int"),
        (("a", "1", True), "reward is '1'"),
        (("a", True, True), "reward is True"),
        (("a", float("nan"), True), "not finite"),
        (("a", 1.0, 1), "done is 1"),
        (("a", 1.0), "not (observation, reward, done)"),
        (None, "not (observation, reward, done)"),
    ],
)
def test_what_step_may_return(value, wanted):
    found = answer_of(value)
    if isinstance(wanted, Answer):
        assert found == wanted
    else:
        assert isinstance(found, Failure)
        assert wanted in found.detail


# --- names -------------------------------------------------------------------------------------


def test_environments_by_name(tmp_path):
    assert find_environment("calculator") is Calculator
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    def reset(self, row): pass\n    def step(self, text): pass\n")
    assert find_environment(f"python:{file}:Mine").__name__ == "Mine"  # type: ignore[attr-defined]
    for name, message in (
        ("calculater", "did you mean 'calculator'"),
        ("python:mine.py", "is unknown"),
        (f"python:{file}:Min", "did you mean 'Mine'"),
        (f"python:{tmp_path}/none.py:Mine", "no Python file"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_environment(name)
    file.write_text("class Mine:\n    def reset(self, row): pass\n")
    with pytest.raises(ConfigError, match=r"has no step\(\)"):
        find_environment(f"python:{file}:Mine")
    file.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        find_environment(f"python:{file}:Mine")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("12*(3+4)", "84"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("-7//2", "-4"),
        ("1/0", "error: division by zero"),
        ("2**99", "error: not"),
        ("True+1", "error: not"),
        ("__import__('os')", "error: not"),
        ("(" * 90, "error: not"),
        ("1" * 101, "error: longer"),
        ("", "error: not"),
    ],
)
def test_the_calculator(text, wanted):
    assert calculate(text).startswith(wanted)


def test_the_calculator_talks():
    calculator = Calculator()
    assert calculator.step("let me see\ncalc: 12*7\n") == ("84", None, False)
    assert calculator.step("so the\nAnswer: 84") == (None, None, True)
    observation, reward, done = calculator.step("hm")
    assert observation is not None
    assert observation.startswith("error")
    assert (reward, done) == (None, False)
