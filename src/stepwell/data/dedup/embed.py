"""Documents as vectors: the mean of static token vectors, unit length.

WordLlama's package holds such vectors (distilled from language models' input embeddings, 256
dimensions) and its tokenizer, so that nothing is downloaded. Any folder with a `tokenizer.json` and
a `.safetensors` file of one matrix (Model2Vec's layout) does as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.data.dedup.exact import normalise
from stepwell.data.files import stamp
from stepwell.types import ConfigError, DataError

WORDLLAMA = "wordllama"
PIECE_CHARACTERS = 1 << 16  # tokenised at once: a document of 100 MB is many pieces


@dataclass(frozen=True)
class StaticEmbedder:
    """vectors: (tokens, dimensions) float32."""

    tokenizer: Any
    vectors: np.ndarray

    @property
    def num_dimensions(self) -> int:
        return self.vectors.shape[1]

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(texts, dimensions) float32 of unit length; zeros for a text without tokens. A text's
        vector doesn't depend on the others."""
        rows = np.zeros((len(texts), self.num_dimensions), np.float32)
        for i, text in enumerate(texts):
            ids, counts = np.unique(self._ids(text), return_counts=True)
            total = counts.astype(np.float64) @ self.vectors[ids].astype(np.float64)
            norm = np.sqrt(np.sum(total * total))
            if norm > 0:
                rows[i] = total / norm
        return rows

    def _ids(self, text: str) -> np.ndarray:
        # Blanks and line feeds are tokens too, and would be most of an indented or wrapped text.
        text, size = normalise(text), PIECE_CHARACTERS
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        encoded = self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        ids = np.array([i for piece in encoded for i in piece.ids], np.int64)
        return ids[ids < len(self.vectors)]


def load_embedder(name: str) -> StaticEmbedder:
    """WordLlama's, or the one in a folder. Raises ConfigError for a folder that holds none and
    where the package isn't installed."""
    return _load_embedder(name, () if name == WORDLLAMA else stamp(name))


@lru_cache(maxsize=4)
def _load_embedder(name: str, _stamp: object) -> StaticEmbedder:
    if name == WORDLLAMA:
        spec = find_spec(WORDLLAMA)
        if spec is None or spec.origin is None:
            raise ConfigError(
                "embedder = 'wordllama' needs the package wordllama: pip install stepwell[dedup]"
            )
        folder = Path(spec.origin).parent
        return _load(
            folder / "tokenizers" / "l2_supercat_tokenizer_config.json",
            folder / "weights" / "l2_supercat_256.safetensors",
        )
    folder = Path(name)
    weights = sorted(folder.glob("*.safetensors"))
    if not (folder / "tokenizer.json").is_file() or len(weights) != 1:
        raise ConfigError(
            f"embedder = {name!r} must be 'wordllama' or a folder with tokenizer.json and one "
            ".safetensors file of token vectors"
        )
    return _load(folder / "tokenizer.json", weights[0])


def _load(tokenizer_file: Path, weights: Path) -> StaticEmbedder:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    try:
        tensors = load_file(weights)
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{weights.parent} holds no embedder that can be read: {error}") from error
    matrices = [t for t in tensors.values() if t.ndim == 2]
    if len(matrices) != 1:
        raise ConfigError(f"{weights} holds {len(matrices)} matrices; token vectors are one")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return StaticEmbedder(tokenizer, matrices[0].astype(np.float32))
