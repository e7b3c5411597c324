import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepwell.data.chat import UnusableRow
from stepwell.data.sft_data import build_sft_store, render_row
from stepwell.data.store import TokenStore
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError

MESSAGES = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["how much is 1 + 2 then? 3. " * 20], 300)


def trained(tokenizer, store, i) -> str:
    return tokenizer.decode(store.doc(i)[store.doc_mask(i).astype(bool)])


def test_rows_become_documents_and_faults_are_counted(tokenizer, tmp_path):
    lines = [
        {"messages": MESSAGES},
        {"prompt": "1 + 2 = ", "completion": "3"},
        {"prompt": [*MESSAGES, MESSAGES[0]], "completion": [MESSAGES[1]]},
        {"question": "?"},
        {"prompt": "p", "completions": "q"},
        {"prompt": "p", "completion": 3},
        {"prompt": "p", "completion": ""},
        {"messages": MESSAGES[:1]},
        {"messages": [{"role": "robot", "content": "x"}, MESSAGES[1]]},
        {"messages": "hello"},
        {"messages": [{"role": "user", "content": "<|end|>"}, MESSAGES[1]]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n{broken")
    store, report = build_sft_store(path, tokenizer, tmp_path / "s")
    assert [trained(tokenizer, store, i) for i in range(3)] == ["2<|end|>", "3<|eos|>", "2<|end|>"]
    assert tokenizer.decode(store.doc(0)) == "<|user|>1 + 1<|end|><|assistant|>2<|end|>"
    assert (report.rows, report.kept, report.trained_tokens) == (12, 3, 6)
    assert report.tokens == store.num_tokens
    assert report.drops.by_reason == {
        "missing_column": 2, "wrong_type": 1, "empty_completion": 1, "mask_all_zeros": 1,
        "template_refused": 1, "bad_messages": 1, "control_token": 1, "broken_json": 1,
    }  # fmt: skip
    assert "unknown role robot" in report.drops.examples["template_refused"][0]["detail"]
    assert "did you mean 'completions'?" in report.drops.examples["missing_column"][1]["detail"]
    assert TokenStore.open(tmp_path / "s", tokenizer, verify=True).num_docs == 3


def test_parquet_equals_jsonl(tokenizer, tmp_path):
    pq.write_table(pa.table({"messages": [MESSAGES] * 3}), tmp_path / "rows.parquet")
    store, report = build_sft_store(tmp_path / "rows.parquet", tokenizer, tmp_path / "s", 2)
    assert (report.rows, store.num_docs) == (2, 2)
    assert store.doc(1).tolist() == render_row(tokenizer, {"messages": MESSAGES})[0]


def test_nothing_usable_leaves_nothing(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x"}\n' * 3)
    with pytest.raises(DataError, match="3 x missing_column"):
        build_sft_store(path, tokenizer, tmp_path / "s")
    assert list(tmp_path.iterdir()) == [path]


def test_messages_need_a_template_but_plain_text_does_not(tmp_path):
    tokenizer = Tokenizer.train(["how much is 1 + 2 then? 3. " * 20], 300, chat_template=None)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}))
    with pytest.raises(DataError, match="no chat template"):
        build_sft_store(path, tokenizer, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert render_row(tokenizer, {"prompt": "1", "completion": "2"})[1][-2:] == [1, 1]
    with pytest.raises(UnusableRow):
        render_row(tokenizer, {"prompt": "1"})
