from dataclasses import replace

import pytest

from stepwell.data.preference import load_steps
from stepwell.eval.grade import Prompt, answer_seeds
from stepwell.generate import Request, Sampling
from stepwell.labs.symbols import tokenizer_of
from stepwell.posttrain.reward_model.prm import aggregate, split_steps
from stepwell.posttrain.reward_model.search import (
    Path,
    beam_search,
    best_first,
    best_of_n,
    scored,
    step_ends,
)
from stepwell.train.engine import Engine
from stepwell.types import ConfigError
from tests.oracle import base_run
from tests.runs import write_rows

SYMBOLS = "0123456789\n"
TOKENIZER = tokenizer_of(SYMBOLS)
SAMPLING = Sampling(eos_ids=TOKENIZER.stop_ids, max_new_tokens=24)
PROMPTS = [Prompt("", (2, 3)), Prompt("", (5, 4, 12)), Prompt("", (7,))]


@pytest.fixture(scope="module")
def engine():
    sizes = {"model.vocab_size": TOKENIZER.vocab_size, "model.max_seq_len": 32}
    return Engine(base_run(**sizes, **{"model.init_std": 0.1}))


def even_share(prompts):
    """Scores of steps that a program can give: the share of even digits, smoothed."""

    def score(docs, ends):
        found = []
        for ids, places in zip(docs, ends, strict=True):
            prompt = next(p for p in prompts if tuple(ids[: len(p.ids)]) == p.ids)
            starts = [len(prompt.ids), *(place + 1 for place in places[:-1])]
            steps = [ids[a : b + 1] for a, b in zip(starts, places, strict=True)]
            texts = [TOKENIZER.decode(step) for step in steps]
            assert all(text.endswith("\n") for text in texts), texts
            found.append([chance_of(text) for text in texts])
        return found

    return score


def chance_of(step: str) -> float:
    digits = [int(c) for c in step if c.isdigit()]
    return (1 + sum(d % 2 == 0 for d in digits)) / (2 + len(digits))


@pytest.mark.parametrize(
    "text", ["12\n3\n", "12\n3", "1", "\n\n1\n\n2\n 3", "1\n\n\n", "1\n2\n\n", " 4\n \n5"]
)
def test_step_ends_are_those_of_split_steps(text):
    tokenizer = tokenizer_of(SYMBOLS + " ")
    ids = tokenizer.encode(text)
    ends = step_ends([*ids, tokenizer.eos_id], tokenizer)
    starts = [0, *(end + 1 for end in ends)]
    cut = [tokenizer.decode(ids[a : b + 1]) for a, b in zip(starts, ends, strict=False)]
    assert cut == split_steps(text)


def test_blanks_have_no_steps():
    assert step_ends(TOKENIZER.encode("\n\n"), TOKENIZER) == []
    assert step_ends([TOKENIZER.eos_id], TOKENIZER) == []
    assert step_ends([], TOKENIZER) == []
    (blank,) = scored([Path((2,), (TOKENIZER.eos_id,))], even_share([]), TOKENIZER)
    assert (blank.score, blank.chances) == (0.0, ())


def test_a_token_of_two_steps_ends_the_first():
    """`\\n1` ends a step, and is the beginning of the next one if there is more."""
    tokenizer = tokenizer_of([*SYMBOLS, "\n1"])
    both = tokenizer.token_id("\n1")
    assert both is not None
    ids = [5, both, 6]
    assert step_ends(ids, tokenizer) == [1, 2]
    assert step_ends(ids[:2], tokenizer) == [1]
    seen = []
    paths = [Path((7,), tuple(ids)), Path((7,), tuple(ids[:2]))]
    scored(paths, lambda d, e: seen.extend([d, e]) or [[0.5] * len(x) for x in e], tokenizer)
    assert seen == [[[7, *ids, 12], [7, *ids[:2]]], [[2, 4], [2]]]


def test_a_model_reads_the_rows_that_it_was_trained_on(tmp_path):
    """The same ids up to the last separator, and scores at the same places."""
    row = {"prompt": "12", "completions": ["3", "45", "6"], "labels": [1, 1, 0]}
    (stepwise,), _ = load_steps(write_rows(tmp_path / "rows.jsonl", [row]), TOKENIZER, 32)
    trained = [*stepwise.prompt_ids, *(i for step in stepwise.steps for i in step)]
    seen = []
    head = tuple(TOKENIZER.encode("12"))
    for text in ("3\n45\n6", "3\n45\n6\n"):
        path = Path(head, (*TOKENIZER.encode(text), TOKENIZER.eos_id))
        scored([path], lambda d, e: seen.append((d, e)) or [[0.5] * 3], TOKENIZER)
    places, count = [], len(head)
    for step in stepwise.steps:
        count += len(step)
        places.append(count - 1)
    assert seen == [([trained], [places])] * 2


def naive_beam(engine, prompt, width, expand, max_steps, how, seed):
    """One path and one request at a time."""
    beam, spent = [Path(tuple(prompt.ids))], 0
    for round_ in range(max_steps):
        candidates = []
        for path in beam:
            if path.ended or path.cut:
                candidates.append(path)
                continue
            ids = (*path.prompt_ids, *path.token_ids)
            for one in answer_seeds(seed, ids, expand if round_ else width * expand):
                left = 24 - len(path.token_ids)
                request = Request(0, ids, one, left)
                sampling = replace(SAMPLING, stop=("\n",))
                (found,) = engine.generate([request], sampling, tokenizer=TOKENIZER)
                tokens = (*path.token_ids, *found.token_ids)
                spent += len(found.token_ids)
                ended = tokens[-1] == TOKENIZER.eos_id
                text = TOKENIZER.decode([t for t in tokens if t != TOKENIZER.eos_id])
                steps = split_steps(text) if text.strip() else []
                chances = [chance_of(step) for step in steps]
                score = aggregate(chances, how) if chances else 0.0
                cut = not ended and len(tokens) == 24
                candidates.append(
                    Path(path.prompt_ids, tokens, (), tuple(chances), score, ended, cut)
                )
        by_text = {}
        for candidate in candidates:
            by_text.setdefault(candidate.token_ids, candidate)
        beam = sorted(by_text.values(), key=lambda c: -c.score)[:width]
    return sorted(beam, key=lambda c: not c.ended), spent


@pytest.mark.parametrize("how", ["min", "product", "last", "mean"])
def test_beam_search_against_one_path_at_a_time(engine, how):
    found = beam_search(
        engine,
        PROMPTS,
        even_share(PROMPTS),
        SAMPLING,
        TOKENIZER,
        2,
        3,
        max_steps=4,
        how=how,
        seed=1,
    )
    for prompt, one in zip(PROMPTS, found, strict=True):
        paths, spent = naive_beam(engine, prompt, 2, 3, 4, how, 1)
        assert [p.token_ids for p in one.paths] == [p.token_ids for p in paths]
        assert [p.score for p in one.paths] == pytest.approx([p.score for p in paths])
        assert [(p.ended, p.cut) for p in one.paths] == [(p.ended, p.cut) for p in paths]
        assert one.num_tokens == spent
        assert len(one.paths) <= 2
    alone = beam_search(
        engine,
        PROMPTS[1:2],
        even_share(PROMPTS),
        SAMPLING,
        TOKENIZER,
        2,
        3,
        max_steps=4,
        how=how,
        seed=1,
    )
    assert alone == found[1:2]


def test_a_wider_beam_and_more_answers_score_higher(engine):
    def mean(found):
        return sum(one.best.score for one in found) / len(found)

    prompts = [Prompt("", (2 + i, 3)) for i in range(8)]
    given = (engine, prompts, even_share(prompts), SAMPLING, TOKENIZER)
    beams = [mean(beam_search(*given, w, e, how="mean", seed=2)) for w, e in ((1, 1), (4, 4))]
    bests = [mean(best_of_n(*given[:2], n, *given[2:], how="mean", seed=2)) for n in (1, 16)]
    assert beams[1] > beams[0] + 0.1
    assert bests[1] > bests[0] + 0.1
    other = beam_search(*given, 4, 4, how="mean", seed=3)
    assert other != beam_search(*given, 4, 4, how="mean", seed=2)


def test_best_of_n_ranks_whole_answers(engine):
    found = best_of_n(engine, PROMPTS, 8, even_share(PROMPTS), SAMPLING, TOKENIZER, seed=1)
    for one in found:
        for kind in (True, False):
            scores = [path.score for path in one.paths if path.ended == kind]
            assert scores == sorted(scores, reverse=True)
        assert [path.ended for path in one.paths] == sorted(
            (path.ended for path in one.paths), reverse=True
        )
        assert all(path.score == pytest.approx(min(path.chances, default=0)) for path in one.paths)
        assert one.num_tokens >= sum(len(path.token_ids) for path in one.paths)
    text = found[0].best.text(TOKENIZER)
    assert set(text) <= set(SYMBOLS)


def test_limits_bind(engine):
    """One step: nothing goes on after its separator. One token: every answer is cut or ended."""
    (one,) = beam_search(
        engine, PROMPTS[:1], even_share(PROMPTS), SAMPLING, TOKENIZER, 8, 2, max_steps=1, seed=1
    )
    assert any(not path.ended for path in one.paths)
    assert all(len(path.step_ends) <= 1 for path in one.paths)
    short = replace(SAMPLING, max_new_tokens=1)
    (one,) = beam_search(engine, PROMPTS[:1], even_share(PROMPTS), short, TOKENIZER, 4, 2, seed=1)
    assert all(len(path.token_ids) == 1 and path.ended != path.cut for path in one.paths)
    assert one.num_tokens == 8
    twice = [Path((1,), (2,), score=0.1), Path((1,), (3,), score=0.2), Path((1,), (2,), score=0.1)]
    assert [path.token_ids for path in best_first(twice)] == [(3,), (2,)]


def test_refusals(engine):
    given = (engine, PROMPTS, even_share(PROMPTS))
    with pytest.raises(ConfigError, match="width=0: the nearest legal value is 1"):
        beam_search(*given, SAMPLING, TOKENIZER, width=0)
    with pytest.raises(ConfigError, match="leave stop strings out"):
        beam_search(*given, replace(SAMPLING, stop=("x",)), TOKENIZER)
    with pytest.raises(ConfigError, match="separator of steps is empty"):
        beam_search(*given, SAMPLING, TOKENIZER, separator="")
    with pytest.raises(ConfigError, match="no aggregation of steps"):
        beam_search(*given, SAMPLING, TOKENIZER, how="max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="n=0"):
        best_of_n(engine, PROMPTS, 0, even_share(PROMPTS), SAMPLING, TOKENIZER)
