import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers, processors

from stepwell.tokenizer import DEFAULT_SPECIALS, Tokenizer
from stepwell.types import ConfigError, DataError

TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 20,
    "def add(a, b):\n    return a + b\n" * 20,
    "Zoë's naïve café — 12345 + 678 = 13023 日本語\n" * 5,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 400)


def word_level(words: list[str], specials: list[str], bos: str | None = None) -> str:
    """The text of a small tokenizer.json, optionally one that starts each text with `bos`."""
    vocabulary = {word: i for i, word in enumerate([*specials, *words])}
    core = Core(models.WordLevel(vocabulary, unk_token=words[0]))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(specials)
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return core.to_str()


@pytest.mark.parametrize(
    "text", [*TEXTS, "", " ", "\n\n\t x", "never seen: ñ ∑ 🦊\r\n", "a\x00b", "<|eos|> inside"]
)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_every_digit_is_a_token(tokenizer):
    ids = tokenizer.encode("1234567")
    assert [tokenizer.decode([i]) for i in ids] == list("1234567")


def test_special_tokens_are_first_and_only_special_on_request(tokenizer):
    assert [tokenizer.token_id(t) for t in DEFAULT_SPECIALS] == list(range(len(DEFAULT_SPECIALS)))
    assert tokenizer.encode("<|eos|>") == [tokenizer.eos_id]
    assert tokenizer.eos_id not in tokenizer.encode("<|eos|>", special=False)
    assert tokenizer.bos_id is None
    assert tokenizer.stop_ids == (tokenizer.eos_id, tokenizer.token_id("<|end|>"))


def test_batch_equals_one_by_one(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(t) for t in TEXTS]
    ids = tokenizer.encode_batch(TEXTS)
    assert tokenizer.decode_batch(ids) == TEXTS


def test_threads_may_share_a_tokenizer(tokenizer):
    """Half of them encode special names as tokens, half as text."""
    text = "a<|eos|>b" * 50

    def encode(special):
        return [tokenizer.encode_batch([text] * 4, special=special) for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(encode, [True, False] * 8))
    for special, got in zip([True, False] * 8, results, strict=True):
        assert got == [[tokenizer.encode(text, special=special)] * 4] * 20


def test_training_is_deterministic_and_fingerprints_tell_tokenizers_apart(tokenizer):
    again, other = Tokenizer.train(TEXTS, 400), Tokenizer.train(TEXTS, 290)
    assert again.fingerprint == tokenizer.fingerprint
    assert other.fingerprint != tokenizer.fingerprint


def test_saved_folder_loads_here_and_in_transformers(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert Tokenizer.load(tmp_path / "tokenizer.json").fingerprint == tokenizer.fingerprint
    assert again.chat_template == tokenizer.chat_template
    auto = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    assert (auto.eos_token_id, auto.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    assert auto.bos_token_id is None
    for text in TEXTS:
        assert auto(text)["input_ids"] == tokenizer.encode(text)
    auto.save_pretrained(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").fingerprint == tokenizer.fingerprint
    assert Tokenizer.load(tmp_path / "again").chat_template == tokenizer.chat_template


def test_a_folder_without_the_template_is_no_tokenizer(tokenizer, tmp_path):
    """As when the process is killed between the two files."""
    (tmp_path / "tokenizer_config.json" / "in the way").mkdir(parents=True)
    with pytest.raises(DataError, match="cannot write"):
        tokenizer.save(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


def test_encode_adds_cuts_and_pads_nothing():
    values = json.loads(word_level(["?", "a", "b"], ["<s>", "</s>"], bos="<s>"))
    values["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    values["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
    }  # fmt: skip
    tokenizer = Tokenizer(json.dumps(values), {"bos_token": {"content": "<s>"}})
    assert tokenizer.encode("a b a b") == [3, 4, 3, 4]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_a_bos_that_is_declared_but_not_used_is_none():
    spec = word_level(["?", "a"], ["<s>", "</s>"])
    assert Tokenizer(spec, {"bos_token": "<s>"}).bos_id is None
    assert Tokenizer(spec, {"bos_token": "<s>", "add_bos_token": True}).bos_id == 0
    assert Tokenizer(spec, {"bos_token": "<s>"}).bos_token == "<s>"


def test_fingerprint_ignores_how_merges_are_written(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["model"]["merges"] = [" ".join(pair) for pair in values["model"]["merges"]]
    assert Tokenizer(json.dumps(values)).fingerprint == tokenizer.fingerprint
    values["model"]["merges"].reverse()
    assert Tokenizer(json.dumps(values)).fingerprint != tokenizer.fingerprint


def test_refusals(tmp_path):
    with pytest.raises(DataError, match="no tokenizer at"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe broken")
    with pytest.raises(DataError, match="cannot read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(word_level(["?", "a"], ["<x>"]))
    with pytest.raises(DataError, match="no end-of-text token"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(DataError, match="must hold a JSON object"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="the smallest is 262"):
        Tokenizer.train(TEXTS, 261)
    with pytest.raises(DataError, match="no text"):
        Tokenizer.train(["", ""], 300)
    with pytest.raises(ConfigError, match="vocab_size=99999999999 exceeds the largest, 1048576"):
        Tokenizer.train(TEXTS, 99_999_999_999)
