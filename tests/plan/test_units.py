"""Every size is told with digits that can be read, on both sides of each unit's border."""

import pytest

from stepwell.hardware import GIB
from stepwell.plan.units import count_of, in_gib, nearest_of, seconds_text, size_text, tokens_text

MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(35.9 * GIB, "35.9 GiB"), (GIB, "1.0 GiB"), (GIB - MIB, "1,023.0 MiB"), (MIB, "1.0 MiB"),
     (MIB - 1024, "1,023.0 KiB"), (0, "0.0 KiB"), (-2 * GIB, "-2.0 GiB")],
)  # fmt: skip
def test_sizes(num_bytes, text):
    assert size_text(num_bytes) == text


def test_a_number_may_take_the_unit_of_another():
    assert size_text(12 * MIB, like=2 * GIB) == "0.0 GiB"
    assert seconds_text(0.02, like=2) == "0.02 s"
    assert in_gib(0.05 * GIB) == "0.1"
    assert in_gib(0.05 * GIB - MIB) == "50.2 MiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.13, "9.13 s"), (0.1, "0.10 s"), (0.0999, "99.9 ms"), (0.01, "10.0 ms"),
     (0.00999, "9.99 ms"), (1e-4, "0.10 ms"), (9.9e-5, "99.0 us"), (0, "0.0 us")],
)  # fmt: skip
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text
    assert seconds_text(seconds, sign=True) == "+" + text


@pytest.mark.parametrize(
    ("num_tokens", "text"),
    [(16 << 20, "16M"), (3 << 19, "1.5M"), (1 << 20, "1M"), ((1 << 20) - 1024, "1023k"),
     (1024, "1k"), (1023, "1,023"), (1_000_000, "976.562k")],
)  # fmt: skip
def test_tokens(num_tokens, text):
    assert tokens_text(num_tokens) == text


def test_one_row_is_no_rows():
    assert [count_of(n, "row") for n in (1, 2, 2048)] == ["1 row", "2 rows", "2,048 rows"]


def test_two_that_are_as_near_are_both_named():
    assert nearest_of(3, [1, 2, 4, 8]) == "the nearest legal values are 2 and 4"
    assert nearest_of(5, [1, 2, 4, 8, 4]) == "the nearest legal value is 4"
