from dataclasses import replace

import pytest
import torch

from stepwell import generate as sampler
from stepwell.eval.grade import Prompt
from stepwell.generate import Sampling
from stepwell.models.decode import DecodeWeights
from stepwell.posttrain.rollout import Rollouts, collect
from stepwell.posttrain.verifiers import exact
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError, DataError
from tests.models.test_decode import config, random_decoder


class SmallEngine:
    """The sampling side of an engine, on the real sampler."""

    def __init__(self, vocab_size: int):
        self.version, self.seed, self.vocab_size = 0, 0, vocab_size

    def generate(self, requests, sampling, tokenizer=None):
        decoder = random_decoder(config(vocab_size=self.vocab_size), self.seed)
        weights = DecodeWeights.pack(decoder.cfg, decoder.state_dict(), torch.float32)
        return sampler.generate(
            weights, requests, sampling, tokenizer=tokenizer, policy_version=self.version
        )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["what is one and one? two. " * 20], 290)


@pytest.fixture
def engine(tokenizer) -> SmallEngine:
    return SmallEngine(tokenizer.vocab_size)


def some_prompts(tokenizer, texts=("1+1=", "2+2=", "what?")) -> list[Prompt]:
    return [Prompt(t, tuple(tokenizer.encode(t)), {"answer": str(i)}) for i, t in enumerate(texts)]


SAMPLING = Sampling(max_new_tokens=6)


def test_groups_keep_ids_scores_and_version(engine, tokenizer):
    engine.version = 7
    prompts = some_prompts(tokenizer)
    rollouts = collect(engine, prompts, 4, SAMPLING, exact, tokenizer, seed=3)
    assert [g.prompt for g in rollouts.groups] == prompts
    assert rollouts.policy_version == 7
    assert rollouts.staleness(9) == 2
    for group in rollouts.groups:
        assert len({c.token_ids for c in group.completions}) == 4
        for c, reward in zip(group.completions, group.rewards, strict=True):
            assert c.prompt_ids == group.prompt.ids
            assert reward == exact([""], [c.text], answer=[group.prompt.columns["answer"]])[0]
    for (ids, mask, streams), row in zip(rollouts.documents(), rollouts.rows(), strict=True):
        assert sum(mask) == row["num_tokens"] == 6
        assert mask == sorted(mask)
        assert tokenizer.decode(ids[-6:]) == row["completion"]
        assert len(streams["sampler_logprobs"]) == len(ids)


def test_a_prompt_gets_the_same_answers_in_any_company(engine, tokenizer):
    prompts = some_prompts(tokenizer)
    whole = collect(engine, prompts, 3, SAMPLING, exact, tokenizer, seed=3)
    (alone,) = collect(engine, prompts[2:], 3, SAMPLING, exact, tokenizer, seed=3).groups
    tokens = [c.token_ids for c in whole.groups[2].completions]
    assert tokens == [c.token_ids for c in alone.completions]
    (other,) = collect(engine, prompts[2:], 3, SAMPLING, exact, tokenizer, seed=4).groups
    assert tokens != [c.token_ids for c in other.completions]


def test_stale_and_mixed_versions_are_seen(engine, tokenizer):
    old = collect(engine, some_prompts(tokenizer), 2, SAMPLING, exact, tokenizer)
    engine.version, engine.seed = 1, 1
    new = collect(engine, some_prompts(tokenizer), 2, SAMPLING, exact, tokenizer)
    mixed = Rollouts(old.groups + new.groups)
    with pytest.raises(DataError, match=r"\[0, 1\]"):
        _ = mixed.policy_version
    assert mixed.staleness(1) == 1


def test_failures_are_counted_apart(engine, tokenizer):
    def grader(prompts, completions, answer):
        if answer == ["0"]:
            raise RuntimeError("no")
        if answer == ["1"]:
            while True:
                pass
        return [0.0]

    rollouts = collect(
        engine, some_prompts(tokenizer), 2, SAMPLING, grader, tokenizer, timeout_s=0.1
    )
    assert [g.rewards for g in rollouts.groups] == [[None] * 2, [None] * 2, [0.0] * 2]
    assert (rollouts.num_errors, rollouts.num_timeouts) == (2, 2)
    assert rollouts.rows()[0]["detail"] == "RuntimeError: no"


def test_saved_rollouts_load_equal(engine, tokenizer, tmp_path):
    rollouts = collect(engine, some_prompts(tokenizer), 2, SAMPLING, exact, tokenizer)
    file = tmp_path / "deep" / "rollouts.jsonl"
    rollouts.save(file)
    assert Rollouts.load(file) == rollouts
    assert [p.name for p in file.parent.iterdir()] == ["rollouts.jsonl"]
    file.write_text(file.read_text("utf-8")[:-40], "utf-8")
    with pytest.raises(DataError, match="line 3"):
        Rollouts.load(file)
    with pytest.raises(DataError, match="cannot read"):
        Rollouts.load(tmp_path / "none.jsonl")
    broken = replace(rollouts.groups[0].prompt, columns={"answer": object()})
    bad = Rollouts((replace(rollouts.groups[0], prompt=broken),))
    with pytest.raises(TypeError):
        bad.save(tmp_path / "bad.jsonl")
    assert not list(tmp_path.glob("*bad*"))


def test_group_size(engine, tokenizer):
    with pytest.raises(ConfigError, match="group_size=0"):
        collect(engine, some_prompts(tokenizer), 0, SAMPLING, exact, tokenizer)
