from dataclasses import replace

import pytest
import torch

from stepwell import generate as sampler
from stepwell.eval.grade import Prompt, Verdict
from stepwell.generate import Sampling
from stepwell.models.decode import DecodeWeights
from stepwell.posttrain.rollout import ByVerifier, Group, Rollouts, collect
from stepwell.posttrain.verifiers.exact import exact
from stepwell.tokenizer import Tokenizer
from stepwell.types import Completion, ConfigError, DataError
from tests.models.test_decode import config, random_decoder


class SmallEngine:
    """The sampling side of an engine, on the real sampler."""

    def __init__(self, vocab_size: int):
        self.version, self.seed, self.vocab_size = 0, 0, vocab_size

    def generate(self, requests, sampling, tokenizer=None):
        decoder = random_decoder(config(vocab_size=self.vocab_size), self.seed)
        weights = DecodeWeights.pack(decoder.cfg, decoder.state_dict().items(), torch.float32)
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
EXACT = ByVerifier(exact)


def test_groups_keep_ids_scores_and_version(engine, tokenizer):
    engine.version = 7
    prompts = some_prompts(tokenizer)
    rollouts = collect(engine, prompts, 4, SAMPLING, EXACT, tokenizer, seed=3)
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
    whole = collect(engine, prompts, 3, SAMPLING, EXACT, tokenizer, seed=3)
    (alone,) = collect(engine, prompts[2:], 3, SAMPLING, EXACT, tokenizer, seed=3).groups
    tokens = [c.token_ids for c in whole.groups[2].completions]
    assert tokens == [c.token_ids for c in alone.completions]
    (other,) = collect(engine, prompts[2:], 3, SAMPLING, EXACT, tokenizer, seed=4).groups
    assert tokens != [c.token_ids for c in other.completions]


def test_stale_and_mixed_versions_are_seen(engine, tokenizer):
    old = collect(engine, some_prompts(tokenizer), 2, SAMPLING, EXACT, tokenizer)
    engine.version, engine.seed = 1, 1
    new = collect(engine, some_prompts(tokenizer), 2, SAMPLING, EXACT, tokenizer)
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
        engine, some_prompts(tokenizer), 2, SAMPLING, ByVerifier(grader, 0.1), tokenizer
    )
    assert [g.rewards for g in rollouts.groups] == [[None] * 2, [None] * 2, [0.0] * 2]
    failures = [row["failure"] for row in rollouts.rows()]
    assert (failures.count("error"), failures.count("timeout")) == (2, 2)
    assert rollouts.rows()[0]["detail"] == "RuntimeError: no"


def everything() -> Rollouts:
    """Every field set, with text that a careless reader of lines would cut."""
    text = 'a\u2028b\x85c\ud800 "d"\n'
    prompt = Prompt(text, (1, 2), {"answer": text, "n": 0.1 + 0.2, "deep": [{"x": None}]}, "i")
    completions = (
        Completion(5, (1, 2), (3, 4, 5), (-0.1, 0.0, -1e-30), text, "stop", 7, (True, False, True)),
        Completion(6, (1, 2, 3), (4,), (-1 / 3,), "", "length", 8),
    )
    verdicts = (Verdict(1 / 3, scores={"a": 0.0, "b": None}), Verdict(None, "error", text))
    return Rollouts((Group(prompt, completions, verdicts),) * 3)


def test_tokens_of_an_environment_are_not_trained():
    (ids, mask, streams), (_, whole, _), *_ = everything().documents()
    assert ids == [1, 2, 3, 4, 5]
    assert mask == [0, 0, 1, 0, 1]
    assert streams == {"sampler_logprobs": [0.0, 0.0, -0.1, 0.0, -1e-30]}
    assert whole == [0, 0, 0, 1]
    assert [row["num_tokens"] for row in everything().rows()[:2]] == [2, 1]
    assert everything().rows()[0]["scores"] == {"a": 0.0, "b": None}


def test_saved_rollouts_load_equal(engine, tokenizer, tmp_path):
    rollouts = everything()
    file = tmp_path / "deep" / "rollouts.jsonl"
    rollouts.save(file)
    assert Rollouts.load(file) == rollouts
    assert Rollouts.load(file).groups[0].prompt.item == "i"
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
        collect(engine, some_prompts(tokenizer), 0, SAMPLING, EXACT, tokenizer)
