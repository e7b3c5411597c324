"""Tokenizers: any Hugging Face `tokenizer.json`, and byte-level BPE trained here.

Encoding and training are done by the `tokenizers` library; this file knows which ids begin and
end a text, which template renders a chat, and whether two tokenizers are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from stepwell.files import write_text
from stepwell.types import ConfigError, DataError

PAD, EOS, END = "<|pad|>", "<|eos|>", "<|end|>"
DEFAULT_SPECIALS = (PAD, EOS, "<|system|>", "<|user|>", "<|assistant|>", END)
DEFAULT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('unknown role ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
NUM_BYTES = 256
MAX_VOCAB = 1 << 20  # the trainer reserves memory for this many before it reads anything
KNOWN_EOS = (EOS, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]")
TURN_ENDS = (END, "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|eom_id|>")

# One process may use every core; ranks that share a machine must not oversubscribe it.
os.environ.setdefault(
    "TOKENIZERS_PARALLELISM",
    "false" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 else "true",
)


class Tokenizer:
    """Text to ids and back. Immutable, so any number of threads may encode with one.

    eos_id ends a text; stop_ids: every id that ends an answer, eos_id first.

    spec: the text of a `tokenizer.json`.
    config: the values of a `tokenizer_config.json`; its `eos_token`, `bos_token`, `pad_token` and
    `chat_template` count. Without an `eos_token` the best known end-of-text token is taken.

    Raises DataError for a spec that is no tokenizer and for one without an end-of-text token.
    """

    def __init__(self, spec: str, config: Mapping[str, Any] | None = None, where: str = "the spec"):
        self._spec = spec
        self._config = dict(config or {})
        self._core = _bare_core(spec, where)
        vocabulary = self._core.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{where} has an empty vocabulary")
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.eos_token: str = self._eos(where)
        self.eos_id: int = self._id(self.eos_token)
        self.bos_token: str | None = self._named("bos_token")
        self.pad_token: str = self._named("pad_token") or self.eos_token
        self.pad_id: int = self._id(self.pad_token)
        self.chat_template: str | None = _template(self._config.get("chat_template"))
        ends = [vocabulary[t] for t in (*TURN_ENDS, *KNOWN_EOS) if t in self.special_tokens]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([self.eos_id, *ends]))

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads a `tokenizer.json`, or a folder that holds one beside its `tokenizer_config.json`
        and `chat_template.jinja`. Raises DataError for a missing or unusable file."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise DataError(
                f"no tokenizer at {path}: give a tokenizer.json, or a folder that holds one"
            )
        try:
            spec = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the tokenizer {file}: {error}") from error
        return cls(spec, _read_config(file.parent), where=str(file))

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        specials: Sequence[str] = DEFAULT_SPECIALS,
        chat_template: str | None = DEFAULT_TEMPLATE,
    ) -> Tokenizer:
        """Byte-level BPE (GPT-2's bytes and splitting) with each digit a token of its own.

        specials: `<|pad|>` and `<|eos|>` must be among them. The vocabulary comes out smaller than
        `vocab_size` when the texts hold fewer pairs that occur twice.
        Raises ConfigError for a vocabulary too small for the bytes or above MAX_VOCAB, DataError
        for no text.
        """
        smallest = NUM_BYTES + len(specials)
        if vocab_size < smallest:
            raise ConfigError(
                f"vocab_size={vocab_size} cannot hold {NUM_BYTES} bytes and {len(specials)} "
                f"special tokens; the smallest is {smallest}"
            )
        if vocab_size > MAX_VOCAB:
            raise ConfigError(
                f"vocab_size={vocab_size} exceeds the largest, {MAX_VOCAB}; vocabularies have "
                "256 thousand ids at most in practice"
            )
        missing = {PAD, EOS} - set(specials)
        if missing:
            raise ConfigError(f"specials lack {sorted(missing)}, which end and pad every text")
        core = tokenizers.Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        core.decoder = decoders.ByteLevel()
        core.post_processor = processors.ByteLevel(trim_offsets=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(specials),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        core.train_from_iterator(_some_text(texts), trainer)
        config = {"eos_token": EOS, "pad_token": PAD, "bos_token": None}
        return cls(core.to_str(), config | {"chat_template": chat_template})

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which Transformers' `AutoTokenizer`
        reads too. Each file is whole or absent. Raises DataError when the disk refuses."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot write the tokenizer {folder}: {error.strerror}") from error
        config = self._config | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "bos_token": self.bos_token,
            "clean_up_tokenization_spaces": False,
        }
        config.pop("auto_map", None)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        _write(folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False))
        # Last, because a folder that has it is taken for a whole tokenizer.
        _write(folder / "tokenizer.json", self._spec)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of `text` and nothing more. special: whether the name of a special token in the
        text becomes that token (templates need it; text from outside must not have it)."""
        return self._encoder(special).encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        encoder = self._encoder(special)
        return [e.ids for e in encoder.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """ids, and for each the half-open range of characters that it came from."""
        encoding = self._core.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        return self._core.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def decode_batch(self, batch: Iterable[Iterable[int]], skip_special: bool = False) -> list[str]:
        rows = [[int(i) for i in ids] for ids in batch]
        return self._core.decode_batch(rows, skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        return self._core.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        return self._core.id_to_token(token_id)

    @cached_property
    def bos_id(self) -> int | None:
        """The id that every text starts with; None when none is put there, also where a
        `bos_token` is declared but not used (SmolLM2, GPT-2)."""
        if self.bos_token is None:
            return None
        bos_id = self._id(self.bos_token)
        if "add_bos_token" in self._config:
            return bos_id if self._config["add_bos_token"] else None
        ids = tokenizers.Tokenizer.from_str(self._spec).encode("a").ids
        return bos_id if ids[:1] == [bos_id] else None

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        added = self._core.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the ids of all tokens and the order of all merges."""
        model = json.loads(self._spec)["model"]
        merges = [m.split(" ") if isinstance(m, str) else m for m in model.get("merges", [])]
        vocabulary = sorted(self._core.get_vocab(with_added_tokens=True).items())
        content = json.dumps([model.get("type"), vocabulary, merges], separators=(",", ":"))
        return hashlib.sha256(content.encode("utf-8")).hexdigest()

    @cached_property
    def _plain_core(self) -> tokenizers.Tokenizer:
        core = _bare_core(self._spec, "the spec")
        core.encode_special_tokens = True
        return core

    def _encoder(self, special: bool) -> tokenizers.Tokenizer:
        return self._core if special else self._plain_core

    def _named(self, key: str) -> str | None:
        value = self._config.get(key)
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) and self.token_id(value) is not None else None

    def _eos(self, where: str) -> str:
        eos = self._named("eos_token")
        if eos is None and self._config.get("eos_token") is None:
            eos = next((t for t in KNOWN_EOS if self.token_id(t) is not None), None)
        if eos is None:
            raise DataError(
                f"{where} has no end-of-text token: name one of its tokens as `eos_token` in "
                f"tokenizer_config.json (tried {self._config.get('eos_token') or list(KNOWN_EOS)})"
            )
        return eos

    def _id(self, token: str) -> int:
        token_id = self._core.token_to_id(token)
        assert token_id is not None, token
        return token_id


def _bare_core(spec: str, where: str) -> tokenizers.Tokenizer:
    """The tokenizer without what would add, cut or pad ids, or trim offsets."""
    try:
        values = json.loads(spec)
        values.update(post_processor=None, truncation=None, padding=None)
        return tokenizers.Tokenizer.from_str(json.dumps(values))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{where} is not a tokenizer.json: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            values = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {file}: {error}") from error
        if not isinstance(values, dict):
            raise DataError(f"{file} must hold a JSON object, not {type(values).__name__}")
        config.update(values)
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text("utf-8")
    return config


def _template(value: Any) -> str | None:
    """The default among several named templates."""
    if isinstance(value, list):
        value = next((t["template"] for t in value if t.get("name") == "default"), None)
    return value


def _some_text(texts: Iterable[str]) -> Iterator[str]:
    texts = (text for text in texts if text)
    first = next(texts, None)
    if first is None:
        raise DataError("there is no text to train a tokenizer on")
    return chain([first], texts)


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
