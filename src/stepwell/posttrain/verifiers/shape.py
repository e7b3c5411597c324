"""Penalties for an answer's shape: too long, or repeating itself."""

from __future__ import annotations


def soft_overlong(num_tokens: int, limit: int, cache: int) -> float:
    """0 up to limit - cache tokens, then down linearly to -1 at the limit (DAPO, 2503.14476,
    equation 13)."""
    over = num_tokens - (limit - cache)
    if over <= 0:
        return 0.0
    return -1.0 if num_tokens >= limit else -over / cache


def repeated_share(text: str, size: int) -> float:
    """The share of a text's n-grams of words that occurred before in it; 0 for one that is shorter
    than two n-grams. As a penalty: 2502.03373, appendix B."""
    words = text.split()
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
