"""`stepwell tokenizer train | encode INPUT ... --out FOLDER`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.commands.inputs import Inputs, counted, parse_options, read_documents, shown
from stepwell.types import ConfigError, DataError, Document, nearest

if TYPE_CHECKING:
    from stepwell.data.store import TokenStore

HELP = """usage: stepwell tokenizer {train,encode} INPUT ... --out FOLDER

  train    a byte-level BPE on documents: a folder that Transformers' AutoTokenizer reads too
  encode   documents to a token store, which `stepwell pretrain` reads

stepwell tokenizer train --help describes its options."""


@dataclass
class Train:
    """Trains a byte-level BPE. Digits are tokens of their own; the tokenizer carries a chat
    template."""

    inputs: Inputs
    """What `stepwell curate` reads, or the folders that it wrote."""
    out: str
    """The folder to write."""
    vocab_size: int = 4096
    """How many ids there may be; fewer come out of a short text."""
    overwrite: bool = False
    """Replace an earlier tokenizer."""
    text_column: str = "text"
    """The column that holds the text."""
    json: bool = False
    """Print the result as JSON."""


@dataclass
class Encode:
    """Turns documents into a token store: memory-mapped shards and a manifest."""

    inputs: Inputs
    """What `stepwell curate` reads, or the folders that it wrote."""
    tokenizer: str
    """A tokenizer.json, or a folder that holds one."""
    out: str
    """The new folder."""
    text_column: str = "text"
    """The column that holds the text."""
    json: bool = False
    """Print the result as JSON."""


def main(argv: Sequence[str]) -> int:
    actions = {"train": train, "encode": encode}
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if argv[0] not in actions:
        close = nearest(argv[0], actions)
        raise ConfigError(f"tokenizer {argv[0]!r} is neither train nor encode{close}")
    return actions[argv[0]](argv[1:])


def train(argv: Sequence[str]) -> int:
    options = parse_options("tokenizer train", Train, argv)
    from stepwell.tokenizer import Tokenizer

    check_place(options.out, options.overwrite)
    documents = shown(read_documents(options.inputs, options.text_column), "documents")
    texts = (item.text for item in documents if isinstance(item, Document))
    tokenizer = Tokenizer.train(texts, options.vocab_size)
    tokenizer.save(options.out)
    if options.json:
        result = {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
        print(json.dumps({"folder": options.out, **result}))
    else:
        print(_vocabulary_text(tokenizer.vocab_size, options.vocab_size, options.out))
    return 0


def check_place(out: str, overwrite: bool) -> None:
    """Raises DataError, before any work, where a tokenizer is already or can't be written."""
    folder = Path(out)
    try:
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder} is a file; name a folder for the tokenizer")
        if (folder / "tokenizer.json").exists() and not overwrite:
            raise DataError(
                f"{folder} holds a tokenizer already; choose another folder, or give --overwrite"
            )
        there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror}") from error


def _vocabulary_text(num_ids: int, wanted: int, folder: str) -> str:
    text = f"a vocabulary of {num_ids:,}: {folder}"
    if num_ids < wanted:
        text += f"\n  {num_ids:,} of the {wanted:,} asked for: the text gives no more merges"
    return text


def encode(argv: Sequence[str]) -> int:
    options = parse_options("tokenizer encode", Encode, argv)
    from stepwell.data.store import build_store
    from stepwell.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(options.tokenizer)
    documents = shown(read_documents(options.inputs, options.text_column), "documents")
    num_dropped = 0

    def seen():
        nonlocal num_dropped
        for item in documents:
            num_dropped += not isinstance(item, Document)
            yield item

    store = build_store(seen(), tokenizer, options.out)
    print(_store_text(store, options.out, num_dropped, options.json))
    return 0


def _store_text(store: TokenStore, folder: str, num_dropped: int, as_json: bool) -> str:
    counts = {"documents": store.num_docs, "tokens": store.num_tokens, "dropped": num_dropped}
    if as_json:
        return json.dumps({"folder": folder, **counts})
    docs, tokens = counted(store.num_docs, "document"), counted(store.num_tokens, "token")
    text = f"{docs}, {tokens}: {folder}"
    return text + (f"\n  dropped {num_dropped:,} (unreadable or empty)" if num_dropped else "")
