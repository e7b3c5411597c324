import json

import pytest
from tests.data.test_chat import CHATML, make

from stepwell.config import Run
from stepwell.data.chat import UnusableRow
from stepwell.data.chat_formats import ChatRules, chat_rules, read_tools, standard_row
from stepwell.data.sft_data import build_sft_store, render_row
from stepwell.sections.methods import SFT
from stepwell.types import ConfigError, DataError

USER = {"role": "user", "content": "How are you?"}
FINE = {"role": "assistant", "content": "Fine."}
SYSTEM = {"role": "system", "content": "Be kind."}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
# In the manner of the templates that know tools: definitions first, results as a role.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + (c.function.arguments | tojson) }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def trained(tokenizer, row, rules=None) -> str:
    ids, mask = render_row(tokenizer, row, rules or ChatRules())
    return tokenizer.decode([i for i, kept in zip(ids, mask, strict=True) if kept])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [SYSTEM, USER, FINE]},
        {"messages": [USER, FINE], "system": "Be kind."},
        {"messages": [SYSTEM, USER, FINE], "system": "Not this one."},
        {"prompt": [SYSTEM, USER], "completion": [FINE]},
        {"prompt": [USER], "completion": "Fine.", "system": "Be kind."},
        {"prompt": "How are you?", "completion": [FINE], "system": "Be kind."},
        {"instruction": "How are you?", "input": "", "output": "Fine.", "system": "Be kind."},
        {"instruction": "How are you?", "output": "Fine.", "system": "Be kind."},
        {
            "system": "Be kind.",
            "conversations": [
                {"from": "human", "value": "How are you?"},
                {"from": "gpt", "value": "Fine.", "weight": None},
            ],
        },
        {"conversations": [SYSTEM, USER, FINE]},
    ],
)
def test_every_format_gives_the_same_tokens(row):
    tokenizer = make(CHATML)
    assert render_row(tokenizer, row) == render_row(tokenizer, {"messages": [SYSTEM, USER, FINE]})


def test_an_alpaca_input_stands_below_the_instruction():
    row = {"instruction": "Add.", "input": "1 + 2", "output": "3"}
    assert standard_row(row)["messages"][0]["content"] == "Add.\n\n1 + 2"


def test_other_names_by_a_column_map():
    rules = ChatRules(
        columns={"messages": "dialog", "role": "speaker", "content": "text", "tools": "functions"},
        roles={"me": "user", "you": "assistant"},
    )
    row = {
        "dialog": [{"speaker": "me", "text": "How are you?"}, {"speaker": "you", "text": "Fine."}],
        "functions": [WEATHER],
    }
    assert standard_row(row, rules) == {"messages": [USER, FINE], "tools": [WEATHER]}
    rules = ChatRules(columns={"prompt": "question", "completion": "answer"})
    row = {"question": "1", "answer": "2", "messages": None}
    assert standard_row(row, rules) == {"prompt": "1", "completion": "2", "tools": None}
    sharegpt = ChatRules(format="sharegpt", columns={"messages": "items"})
    row = {"items": [{"from": "human", "value": "x"}]}
    assert standard_row(row, sharegpt)["messages"] == [{"role": "user", "content": "x"}]


def test_a_format_may_be_named():
    row = {"messages": [USER, FINE], "instruction": "a", "output": "b"}
    found = standard_row(row, ChatRules(format="alpaca"))["messages"]
    assert [m["content"] for m in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "rules", "reason", "message"),
    [
        ({"x": 1}, ChatRules(), "missing_column", r"it has 'x'"),
        ({"prompt": "a", "completions": "b"}, ChatRules(), "missing_column",
         "needs 'completion' .did you mean 'completions'"),
        ({"prompt": "a"}, ChatRules(columns={"completion": "answer"}), "missing_column",
         "needs 'answer'"),
        ({"messages": []}, ChatRules(format="sharegpt"), "missing_column", "'conversations'"),
        ({"prompt": 1, "completion": "b"}, ChatRules(), "wrong_type", "int and str"),
        ({"prompt": [USER], "completion": ""}, ChatRules(), "empty_completion", "empty"),
        ({"instruction": "a", "output": ""}, ChatRules(), "empty_completion", "empty"),
        ({"instruction": ["a"], "output": "b"}, ChatRules(), "wrong_type", "must be text"),
        ({"messages": [USER], "tools": "{"}, ChatRules(), "bad_tools", "no JSON"),
        ({"messages": [USER], "tools": 3}, ChatRules(), "bad_tools", "list of definitions"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, ChatRules(), "bad_tools",
         "list of calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, ChatRules(), "bad_tools",
         "no name"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_say_why(row, rules, reason, message):
    with pytest.raises(UnusableRow, match=message) as caught:
        standard_row(row, rules)
    assert caught.value.reason == reason


def test_tools_are_rendered_and_their_results_are_not_trained():
    tokenizer = make(TOOLS)
    as_text = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    row = {
        "tools": json.dumps([WEATHER]),
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [{"function": as_text}]},
            {"role": "tool", "content": "3 degrees", "name": None},
            FINE,
        ],
    }
    ids, _ = render_row(tokenizer, row)
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>tools\n" + json.dumps([WEATHER]))
    assert '"Oslo"' in text
    assert '\\"Oslo' not in text, "arguments are encoded once"
    assert trained(tokenizer, row) == 'weather{"city": "Oslo"}<|im_end|>Fine.<|im_end|>'
    sharegpt = {
        "tools": [WEATHER],
        "conversations": [
            {"from": "human", "value": USER["content"]},
            {"from": "function_call", "value": json.dumps(as_text)},
            {"from": "observation", "value": "3 degrees"},
            {"from": "gpt", "value": "Fine."},
        ],
    }
    assert render_row(tokenizer, sharegpt) == render_row(tokenizer, row)


def test_tool_definitions_are_read_from_either_form():
    assert read_tools(None) is read_tools("") is read_tools([]) is None
    assert read_tools(json.dumps(WEATHER)) == read_tools([json.dumps(WEATHER)]) == [WEATHER]


CHAT = [SYSTEM, USER, FINE, {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "3"}]  # fmt: skip


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("roles", "last", "expected"),
    [
        (("assistant",), False, ["Fine.", "3"]),
        (("assistant",), True, ["3"]),
        (("user",), False, ["How are you?", "1 + 2?"]),
        (("user", "assistant"), False, ["How are you?", "Fine.", "1 + 2?", "3"]),
        (("system",), False, ["Be kind."]),
        (("system", "user", "assistant"), True, ["3"]),
    ],
)
def test_masks_by_role(marked, roles, last, expected):
    template = CHATML
    if marked:
        template = (
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
            "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
            "{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
            "{% endfor %}"
        )
    rules = ChatRules(train_on=roles, last_turn_only=last)
    text = trained(make(template), {"messages": CHAT}, rules)
    assert text == "".join(f"{part}<|im_end|>" for part in expected)


def test_plain_prompts_are_the_users():
    tokenizer = make(None, with_bos=True)
    row = {"prompt": "1 + 2 = ", "completion": "3"}
    assert trained(tokenizer, row) == "3<|eos|>"
    assert trained(tokenizer, row, ChatRules(train_on=("user",))) == "1 + 2 = "
    both = ChatRules(train_on=("user", "assistant"))
    assert trained(tokenizer, row, both) == "1 + 2 = 3<|eos|>"


def test_prompts_of_messages_are_never_trained():
    row = {"prompt": [USER, FINE, USER], "completion": [FINE]}
    rules = ChatRules(train_on=("user", "assistant"))
    assert trained(make(CHATML), row, rules) == "Fine.<|im_end|>"


def test_roles_that_no_message_has_leave_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [USER, FINE]}))
    rules = ChatRules(train_on=("tool",))
    with pytest.raises(UnusableRow, match="all zeros"):
        render_row(make(CHATML), {"messages": [USER, FINE]}, rules)
    with pytest.raises(DataError, match=r"no row of .* 1 x mask_all_zeros .*--preview"):
        build_sft_store(path, make(CHATML), tmp_path / "s", rules=rules)


def test_the_keys_of_a_run_become_rules():
    values = {
        "method.format": "sharegpt",
        "method.columns.role": "speaker",
        "method.roles.user": "me",
        "method.train_on": '["user", "tool"]',
        "method.last_turn_only": True,
    }
    method = Run.parse({"method": {"kind": "sft"}}, values).method
    assert isinstance(method, SFT)
    assert chat_rules(method) == ChatRules(
        "sharegpt", {"role": "speaker"}, {"me": "user"}, ("user", "tool"), True
    )
    assert chat_rules(SFT()) == ChatRules()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"columns.prompt": "a", "columns.completion": "a"},
         "method.columns: prompt and completion are both 'a'"),
        ({"roles.user": "x", "roles.tool": "x"}, "method.roles: user and tool are both 'x'"),
        ({"train_on": "[]"}, r"nearest legal value is \['assistant'\]"),
        ({"train_on": '["user", "user"]'}, r"nearest legal value is \['user'\]"),
        ({"columns.promt": "a"}, "did you mean 'method.columns.prompt'"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Run.parse({"method": {"kind": "sft"}}, {f"method.{k}": v for k, v in values.items()})
