import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.data.dedup.verify import jaccard, jaccard_of_texts, num_shared

SETS = st.sets(st.integers(0, 30), max_size=12)


def array(items) -> np.ndarray:
    return np.array(sorted(items), np.uint64)


@given(SETS, SETS)
def test_as_python_sets_say(a, b):
    assert num_shared(array(a), array(b)) == len(a & b)
    assert jaccard(array(a), array(b)) == (len(a & b) / len(a | b) if a | b else 0)


def test_of_texts():
    words = [f"w{i}" for i in range(24)]
    text = " ".join(words)
    assert jaccard_of_texts(text, text.upper()) == 1
    # 20 shingles each; another last word changes one of them.
    assert jaccard_of_texts(text, " ".join([*words[:-1], "other"])) == pytest.approx(19 / 21)
    # A word in the middle changes five.
    assert jaccard_of_texts(text, " ".join([*words[:9], "x", *words[10:]])) == pytest.approx(
        15 / 25
    )
    assert jaccard_of_texts("short", "Short!") == 1
    assert jaccard_of_texts("short", "shorter") == 0
    assert jaccard_of_texts("", "") == 0
