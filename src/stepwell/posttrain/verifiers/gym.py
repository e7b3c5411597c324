"""Problems and scorers of reasoning-gym (extra `reasoning-gym`), all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepwell.eval.grade import Verifier
from stepwell.posttrain.verifiers.exact import ANSWER
from stepwell.types import ConfigError, nearest

# Sets whose scorers give a wrong answer nothing (others give junk some credit).
GYM_SETS = (
    "base_conversion",
    "basic_arithmetic",
    "caesar_cipher",
    "calendar_arithmetic",
    "chain_sum",
    "countdown",
    "gcd",
    "gsm_symbolic",
    "lcm",
    "letter_counting",
    "number_sorting",
    "spell_backward",
    "word_sorting",
)
SOLVED = 0.99


def gym(name: str) -> Verifier:
    """The scorer of a reasoning-gym set, binarised at 0.99; it needs the column `entry`, the set's
    own row. The text is cut to its final answer first.

    Raises ConfigError for a set that is not among GYM_SETS, or when the package is missing.
    """
    score = _gym_dataset(name, size=1, seed=0).score_answer

    def verify(prompts: Sequence[str], completions: Sequence[str], entry: Sequence[dict], **_: Any):
        rewards: list[float | None] = []
        for text, row in zip(completions, entry, strict=True):
            marked = ANSWER.findall(text)
            rewards.append(float(score((marked[-1] if marked else text).strip(), row) >= SOLVED))
        return rewards

    return verify


def gym_rows(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` problems of a reasoning-gym set: prompt, answer and the set's own row `entry`."""
    return [
        {"prompt": row["question"], "answer": row["answer"], "entry": row}
        for row in _gym_dataset(name, size=count, seed=seed)
    ]


def _gym_dataset(name: str, size: int, seed: int) -> Any:
    if name not in GYM_SETS:
        raise ConfigError(
            f"reasoning-gym set {name!r} is not on the list of those whose scorer gives no credit "
            f"for junk{nearest(name, GYM_SETS)}; listed: {', '.join(GYM_SETS)}"
        )
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "verifier 'gym:...' needs the package: pip install 'stepwell[reasoning-gym]'"
        ) from error
    return reasoning_gym.create_dataset(name, size=size, seed=seed)
