"""Exact deduplication: documents whose normalised texts are equal."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator

from stepwell.types import Document, Dropped


def normalise(text: str) -> str:
    """Unicode NFC with every run of white space one blank and none at the ends; case counts."""
    text = text if text.isascii() else unicodedata.normalize("NFC", text)
    return " ".join(text.split())


def exact_dedup(docs: Iterable[Document | Dropped]) -> Iterator[Document | Dropped]:
    """Keeps the first of equal documents, untouched; drops later ones (`exact_duplicate`, the
    detail names the first) and blank ones (`blank`).

    Remembers a 128-bit hash and an id for each kept document.
    """
    first_with: dict[bytes, str] = {}
    for doc in docs:
        if isinstance(doc, Dropped):
            yield doc
            continue
        text = normalise(doc.text)
        if not text:
            yield Dropped(doc.id, doc.source, "blank")
            continue
        content = text.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if digest in first_with:
            yield Dropped(doc.id, doc.source, "exact_duplicate", f"of {first_with[digest]}")
        else:
            first_with[digest] = doc.id
            yield doc
