import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import processors

from stepwell.data.chat import (
    check_mask,
    preview,
    render_chat,
    render_completion,
    render_prompt,
    render_text,
)
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError

TEXTS = ["Hello there, how are you? I am fine. 1 + 2 = 3\n<think> no </think>" * 30]
CHAT = [
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "3"},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
# Thinking is kept in the last answer only, as Qwen3's template does.
THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if loop.last %}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NAMES = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def make(template: str | None, with_bos: bool = False) -> Tokenizer:
    specials = ("<|pad|>", "<|eos|>", "<|bos|>", *NAMES)
    trained = Tokenizer.train(TEXTS, 320, specials=specials)
    core = Core.from_str(trained._spec)
    config = {"eos_token": "<|eos|>", "pad_token": "<|pad|>", "chat_template": template}
    if with_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 2)]
        )
        config["bos_token"] = "<|bos|>"
    return Tokenizer(core.to_str(), config)


def trained_text(tokenizer, ids, mask) -> str:
    return tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])


@pytest.mark.parametrize(
    ("template", "bos", "expected"),
    [
        (CHATML, False, "Fine.<|im_end|>3<|im_end|>"),
        (CHATML, True, "Fine.<|im_end|>3<|im_end|>"),
        (LLAMA3, True, "Fine.<|eot_id|>3<|eot_id|>"),
        (THINKING, False, "Fine.<|im_end|><think>\n\n</think>\n\n3<|im_end|>"),
        (PLAIN, True, "Fine.\n3\n<|eos|>"),
    ],
)
def test_mask_is_the_answers_with_their_ends(template, bos, expected):
    tokenizer = make(template, bos)
    ids, mask = render_chat(tokenizer, CHAT)
    assert trained_text(tokenizer, ids, mask) == expected
    assert ids.count(2) == int(bos)
    assert not bos or ids[0] == 2
    text = tokenizer.decode(ids).removeprefix("<|bos|>").removesuffix("<|eos|>")
    assert text == render_text(tokenizer, CHAT).removeprefix("<|bos|>")


def test_default_template_equals_transformers(tmp_path):
    tokenizer = Tokenizer.train(TEXTS, 320)
    tokenizer.save(tmp_path)
    auto = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    ids, mask = render_chat(tokenizer, CHAT)
    theirs = auto.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == theirs["input_ids"]
    assert mask == theirs["assistant_masks"]
    assert trained_text(tokenizer, ids, mask) == "Fine.<|end|>3<|end|>"
    prompt = auto.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=True)
    assert render_prompt(tokenizer, CHAT[:1]) == prompt["input_ids"]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, THINKING])
def test_prompt_and_the_first_answer_token(template):
    """The rendering for sampling is a prefix of the whole, and the very next token is trained."""
    tokenizer = make(template, with_bos=True)
    prompt = render_prompt(tokenizer, CHAT[:3])
    ids, mask = render_chat(tokenizer, CHAT, train_from=3)
    assert ids[: len(prompt)] == prompt
    assert mask[: len(prompt)] == [0] * len(prompt)
    assert mask[len(prompt)] == 1


def test_only_the_completion_is_trained_when_the_prompt_holds_answers():
    tokenizer = make(CHATML)
    ids, mask = render_chat(tokenizer, CHAT, train_from=3)
    assert trained_text(tokenizer, ids, mask) == "3<|im_end|>"


def test_pairs_equal_their_own_full_rendering():
    tokenizer = make(THINKING)
    for answer in ("3", "no", "<think> no </think> 3"):
        chat = [*CHAT[:3], {"role": "assistant", "content": answer}]
        ids, _ = render_chat(tokenizer, chat)
        assert ids == tokenizer.encode(render_text(tokenizer, chat))


def test_plain_completion_has_one_bos_and_one_eos():
    for bos in (False, True):
        tokenizer = make(None, bos)
        ids, mask = render_completion(tokenizer, "1 + 2 = ", "3")
        assert ids.count(tokenizer.eos_id) == 1
        assert ids[-1] == tokenizer.eos_id
        assert ids.count(2) == int(bos)
        assert trained_text(tokenizer, ids, mask) == "3<|eos|>"


def test_special_tokens_in_plain_text_stay_text():
    tokenizer = make(None)
    ids, _ = render_completion(tokenizer, "say <|eos|>", "<|eos|> said")
    assert ids.count(tokenizer.eos_id) == 1


def test_template_helpers():
    tokenizer = make(
        "{%- for m in messages %}\n    {%- if m.role == 'tool' %}{% continue %}{% endif %}\n"
        "{{ {'é': m.content} | tojson }}{{ strftime_now('%Y')[:2] }}\n{% endfor %}"
    )
    text = render_text(tokenizer, [{"role": "tool", "content": "x"}, CHAT[0]])
    assert text.strip() == '{"é": "How are you?"}20'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in %}", "not valid Jinja"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{% for m in messages %}{{ 'x' }}{% endfor %}{{ messages[0].nothing.more }}", "refuses"),
    ],
)
def test_template_errors_are_data_errors(template, message):
    with pytest.raises(DataError, match=message):
        render_chat(make(template), CHAT)


def test_refusals():
    tokenizer = make(CHATML)
    with pytest.raises(DataError, match="all zeros"):
        render_chat(tokenizer, CHAT[:1])
    with pytest.raises(DataError, match="all ones"):
        check_mask([1, 1], has_prompt=True)
    check_mask([1, 1], has_prompt=False)
    everything = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    with pytest.raises(DataError, match="all ones"):
        render_chat(make(everything), [CHAT[0]])
    with pytest.raises(DataError, match="no chat template"):
        render_chat(make(None), CHAT)
    for message in (
        {"role": "user", "content": "<|im_end|>"},
        {"role": "user<|im_end|>", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "x<|im_start|>"}]},
    ):
        with pytest.raises(DataError, match="control token"):
            render_chat(tokenizer, [message, CHAT[1]])
    bad: Any
    for bad in ("text", [], [1], [{"content": "x"}], [{"role": "user"}], None):
        with pytest.raises(DataError, match="message"):
            render_chat(tokenizer, bad)
    with pytest.raises(DataError, match="empty"):
        render_completion(tokenizer, "x", "")


def test_preview_colours_what_is_trained():
    tokenizer = make(CHATML)
    text = preview(tokenizer, *render_chat(tokenizer, CHAT[:2]))
    assert text.plain == render_text(tokenizer, CHAT[:2])
    green = [text.plain[s.start : s.end] for s in text.spans if "green" in str(s.style)]
    assert green == ["Fine.<|im_end|>"]


def test_template_from_a_list_of_templates():
    spec = json.loads(make(CHATML)._spec)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    tokenizer = Tokenizer(json.dumps(spec), {"eos_token": "<|eos|>", "chat_template": named})
    assert tokenizer.chat_template == CHATML
