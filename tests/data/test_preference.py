import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.test_chat import CHATML, LLAMA3, THINKING, make

from stepwell.data.chat import UnusableRow, render_chat, render_completion
from stepwell.data.judged import Labelled, cut_prompt, fit_pair, pair_limit
from stepwell.data.preference import load_labelled, load_pairs, load_steps
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError

TEXTS = ["how much is 1 + 2 then? 3. It is 3, said he. " * 20]
USER = {"role": "user", "content": "1 + 2?"}
GOOD, BAD = {"role": "assistant", "content": "3"}, {"role": "assistant", "content": "It is 4."}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


def test_every_form_of_a_pair_gives_the_same_documents(tokenizer, tmp_path):
    forms = [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "3", "rejected": "It is 4."},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "1 + 2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "1 + 2?", "chosen": [GOOD], "rejected": [BAD]},
        {
            "prompt": [{"from": "human", "value": "1 + 2?"}],
            "chosen": {"from": "gpt", "value": "3"},
            "rejected": {"from": "gpt", "value": "It is 4."},
        },
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ]
    pairs, drops = load_pairs(write(tmp_path / "p.jsonl", forms), tokenizer, 64)
    assert drops.total == 0
    assert len(pairs) == len(forms)
    for pair in pairs:
        assert [list(x) for x in pair.chosen] == list(render_chat(tokenizer, [USER, GOOD]))
        assert [list(x) for x in pair.rejected] == list(render_chat(tokenizer, [USER, BAD]))
        assert pair.chosen[0] == pair.prompt_ids + pair.chosen_ids
        assert pair.rejected_prompt_ids is None
        assert not pair.truncated


def test_texts_with_and_without_a_prompt(tokenizer, tmp_path):
    forms = [
        {"prompt": "It is", "chosen": " 3.", "rejected": " 35"},
        {"chosen": "It is 3.", "rejected": "It is 35"},
        {"chosen": "he said:\n3", "rejected": "he said:\n4"},
        {"chosen": "It is", "rejected": "It is 3"},
        {"chosen": "3", "rejected": "4"},
    ]
    pairs, drops = load_pairs(write(tmp_path / "p.jsonl", forms), tokenizer, 64)
    assert drops.total == 0
    decode = tokenizer.decode
    parts = [[decode(x) for x in (p.prompt_ids, p.chosen_ids, p.rejected_ids)] for p in pairs]
    assert parts == [
        ["It is", " 3.<|eos|>", " 35<|eos|>"],
        ["It is", " 3.<|eos|>", " 35<|eos|>"],
        ["he said:\n", "3<|eos|>", "4<|eos|>"],
        ["It", " is<|eos|>", " is 3<|eos|>"],
        ["", "3<|eos|>", "4<|eos|>"],
    ]


def test_margin_and_other_columns_are_kept_and_parquet_reads_alike(tokenizer, tmp_path):
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 2, "topic": "sums", "n": 0}
    rows = [row, {**row, "margin": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    from_json, _ = load_pairs(write(tmp_path / "p.jsonl", rows), tokenizer, 64)
    from_parquet, _ = load_pairs(tmp_path / "p.parquet", tokenizer, 64)
    assert [p.margin for p in from_json] == [2.0, None] == [p.margin for p in from_parquet]
    assert from_json[0].columns == {"topic": "sums", "n": 0} == from_parquet[1].columns
    assert from_json[0].item == "p.jsonl:1"
    assert from_json[0].chosen == from_parquet[0].chosen


@pytest.mark.parametrize("template", [CHATML, LLAMA3, THINKING])
@pytest.mark.parametrize("with_bos", [False, True])
def test_each_answer_equals_its_own_full_rendering(template, with_bos, tmp_path):
    tokenizer = make(template, with_bos or template is LLAMA3)
    long = [BAD, USER, {"role": "assistant", "content": "4, I think."}]
    rows = [{"prompt": [USER, GOOD, USER], "chosen": [GOOD], "rejected": long}]
    (pair,), _ = load_pairs(write(tmp_path / "p.jsonl", rows), tokenizer, 512)
    for side, answer in ((pair.chosen, [GOOD]), (pair.rejected, long)):
        whole = render_chat(tokenizer, [USER, GOOD, USER, *answer], train_from=3)
        assert [list(x) for x in side] == list(whole)
        assert side[0].count(tokenizer.bos_id) == (tokenizer.bos_id is not None)
    assert 0 in (pair.rejected_mask or ()), "the user's turn in between is not trained"


def test_a_template_that_renders_the_prompts_differently(tmp_path):
    template = (
        "{% if messages|length > 2 %}{{ 'many ' }}{% endif %}{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
        "{% endif %}{% endfor %}"
    )
    tokenizer = make(template)
    rows = [{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD, USER, GOOD]}]
    (pair,), _ = load_pairs(write(tmp_path / "p.jsonl", rows), tokenizer, 512)
    assert pair.rejected_prompt_ids is not None
    assert pair.rejected_prompt_ids != pair.prompt_ids
    assert list(pair.rejected[0]) == render_chat(tokenizer, [USER, BAD, USER, GOOD])[0]
    assert list(pair.chosen[0]) == render_chat(tokenizer, [USER, GOOD])[0]


def test_unusable_pairs_are_dropped_with_reasons(tokenizer, tmp_path):
    good = {"prompt": "1 + 2", "chosen": "3", "rejected": "4"}
    rows = [
        good,
        {**good, "rejected": "3"},
        {"prompt": "p", "chosen": "3"},
        {**good, "rejected": [BAD]},
        {**good, "prompt": 3},
        {**good, "chosen": ""},
        {**good, "margin": True},
        {**good, "margin": float("nan")},
        {**good, "prompt": "1 + 2 " * 40},
        {**good, "chosen": "3 " * 40 + "3", "rejected": "3 " * 40 + "4"},
        {"chosen": [USER, USER], "rejected": [USER, BAD]},
    ]
    pairs, drops = load_pairs(write(tmp_path / "p.jsonl", rows), tokenizer, 64)
    assert len(pairs) == 1
    assert drops.by_reason == {
        "identical_answers": 2, "missing_column": 1, "wrong_type": 2, "empty_completion": 1,
        "bad_margin": 2, "too_long": 1, "mask_all_zeros": 1,
    }  # fmt: skip
    with pytest.raises(DataError, match="no row of .*2 x identical_answers"):
        load_pairs(write(tmp_path / "q.jsonl", rows[1:2] * 2), tokenizer, 64)
    assert len(load_pairs(tmp_path / "p.jsonl", tokenizer, 64, max_rows=1)[0]) == 1


def rendering(prompt: int, answer: int, first: int = 0):
    return list(range(first, first + prompt + answer)), [0] * prompt + [1] * answer


def test_truncation_keeps_10_and_3_of_30_and_3():
    pair = fit_pair(rendering(25, 30), rendering(25, 3, 1), 64, None, 10, 20)
    assert (len(pair.prompt_ids), len(pair.chosen_ids), len(pair.rejected_ids)) == (10, 10, 3)
    assert pair.prompt_ids == tuple(range(15, 25))
    assert pair.truncated
    exact = fit_pair(rendering(10, 10), rendering(10, 3, 1), 33, None, 10, 20)
    assert not exact.truncated
    assert len(exact.chosen[0]) + len(exact.rejected[0]) == 33
    assert fit_pair(rendering(10, 10), rendering(10, 3, 1), 32, None, 10).truncated


def test_no_answer_left_is_dropped_and_one_token_is_enough():
    with pytest.raises(UnusableRow, match="no token of the answer is left within 10 tokens"):
        fit_pair(rendering(10, 5), rendering(10, 5, 1), 21)
    pair = fit_pair(rendering(10, 5), rendering(10, 5, 1), 22)
    assert (len(pair.chosen_ids), len(pair.rejected_ids)) == (1, 1)


def test_a_cut_prompt_keeps_its_bos():
    assert cut_prompt((7, 1, 2, 3), 3, bos_id=7) == (7, 2, 3)
    assert cut_prompt((7, 1, 2, 3), 3) == (1, 2, 3)
    assert cut_prompt((7, 1, 2, 3), 1, bos_id=7) == (7,)
    assert cut_prompt((7, 1), 2, bos_id=7) == (7, 1)


@pytest.mark.parametrize(
    ("chosen", "rejected", "seq_len", "limit"),
    [(10, 10, 20, 20), (10, 11, 20, 10), (30, 5, 20, 15), (5, 30, 20, 15), (30, 30, 21, 10)],
)
def test_both_answers_are_cut_to_one_length_that_fits(chosen, rejected, seq_len, limit):
    assert pair_limit(chosen, rejected, seq_len) == limit
    assert min(chosen, limit) + min(rejected, limit) <= seq_len


def test_labels_of_kto(tokenizer, tmp_path):
    row = {"prompt": "1 + 2 =", "completion": " 3"}
    labels = [True, False, 1, 0.0, -100, None, -1, "true", 0.5]
    rows = [{**row, "label": label} for label in labels] + [row]
    rows.append({"prompt": [USER], "completion": "3", "label": True, "id": 0})
    found, drops = load_labelled(write(tmp_path / "k.jsonl", rows), tokenizer, 64)
    assert [r.label for r in found] == [True, False, True, False, True]
    assert all(type(r.label) is bool for r in found)
    assert drops.by_reason == {"unlabelled": 2, "bad_label": 3, "missing_column": 1}
    ids, mask = render_completion(tokenizer, "1 + 2 =", " 3")
    assert found[0].rendering == (tuple(ids), tuple(mask))
    assert list(found[-1].rendering[0]) == render_chat(tokenizer, [USER, GOOD])[0]
    assert found[-1].columns == {"id": 0}


def test_numbers_and_classes(tokenizer, tmp_path):
    rows = [{"text": "It is 3.", "label": label} for label in (0.5, 2, -7, float("inf"), True, 3)]
    rows.append({"messages": [USER, GOOD], "label": 1})
    path = write(tmp_path / "k.jsonl", rows)
    numbers, drops = load_labelled(path, tokenizer, 64, kind="number")
    assert [r.label for r in numbers] == [0.5, 2.0, -7.0, 3.0, 1.0]
    assert drops.by_reason == {"bad_label": 2}
    assert tokenizer.decode(numbers[0].rendering[0]) == "It is 3.<|eos|>"
    classes, drops = load_labelled(path, tokenizer, 64, kind="class", num_labels=3)
    assert [r.label for r in classes] == [2, 1, 1]
    assert drops.by_reason == {"bad_label": 4}
    with pytest.raises(DataError, match="missing_column"):
        load_labelled(write(tmp_path / "b.jsonl", [{"text": "x", "label": True}]), tokenizer, 64)


def test_a_labelled_answer_is_cut_or_dropped(tokenizer, tmp_path):
    row = {"prompt": "1 + 2 =", "completion": " 3" * 30, "label": True}
    path = write(tmp_path / "k.jsonl", [row])
    prompt_tokens = len(tokenizer.encode("1 + 2 ="))
    (found,), _ = load_labelled(path, tokenizer, prompt_tokens + 1)
    assert isinstance(found, Labelled)
    assert found.truncated
    assert len(found.completion_ids) == 1
    with pytest.raises(DataError, match="too_long"):
        load_labelled(path, tokenizer, prompt_tokens)


@pytest.mark.parametrize("prompt", ["1 + 2 = ", [USER]])
def test_the_last_token_of_each_step_is_known(tokenizer, tmp_path, prompt):
    rows = [
        {"prompt": prompt, "completions": ["It is", "3."], "labels": [True, 0.25], "n": 1},
        {"prompt": prompt, "completions": ["It is\n", "3.", "4"], "labels": [-100, None, False]},
    ]
    found, drops = load_steps(write(tmp_path / "s.jsonl", rows), tokenizer, 64)
    assert drops.total == 0
    assert [r.labels for r in found] == [(1.0, 0.25), (None, None, 0.0)]
    first = found[0]
    ends = [tokenizer.decode(first.ids[: end + 1]) for end in first.step_ends]
    head = tokenizer.decode(first.prompt_ids)
    assert ends == [f"{head}It is\n", f"{head}It is\n3.\n"]
    assert first.ids[-1] == tokenizer.eos_id
    assert first.columns == {"n": 1}


def test_unusable_steps(tokenizer, tmp_path):
    good = {"prompt": "p", "completions": ["It is 3", "said he"], "labels": [1, 0]}
    rows = [
        good,
        {**good, "labels": [1]},
        {**good, "labels": [1, 1.5]},
        {**good, "labels": [1, -1]},
        {**good, "labels": [-100, -100]},
        {**good, "completions": ["", "x"]},
        {**good, "completions": [], "labels": []},
        {"prompt": "p", "completions": ["a"]},
        {**good, "prompt": "1 + 2 " * 30},
        {**good, "completions": ["It is 3", "said he " * 40]},
        {**good, "completions": ["It is 3", "said he " * 40], "labels": [None, 1]},
    ]
    found, drops = load_steps(write(tmp_path / "s.jsonl", rows), tokenizer, 40)
    assert [len(r.steps) for r in found] == [2, 1]
    assert found[1].truncated
    assert not found[1].end_ids
    assert drops.by_reason == {
        "wrong_type": 3, "bad_label": 2, "unlabelled": 1, "missing_column": 1, "too_long": 2,
    }  # fmt: skip


def test_a_prompt_of_steps_is_cut_from_the_front(tokenizer, tmp_path):
    rows = [{"prompt": "1 + 2 " * 30, "completions": ["It is 3"], "labels": [1]}]
    path = write(tmp_path / "s.jsonl", rows)
    (row,), _ = load_steps(path, tokenizer, 40, max_prompt_tokens=4)
    assert len(row.prompt_ids) == 4
    assert row.truncated
