"""Stages, and whether capped sources last."""

import subprocess
import sys
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.config import Run
from stepwell.data.curriculum import Span, Supply, check_supply, rows_given, spans, take
from stepwell.data.order import choose_sources
from stepwell.sections.data import first_step
from stepwell.types import ConfigError


def found(stages, **more):
    """(name, first, stop) of a run of 100 steps."""
    stages = [{**stage, "sources": [{"path": "b"}]} for stage in stages]
    run = Run.parse({"data": {"stages": stages}}, {"train.steps": 100, **more})
    return [tuple(span) for span in spans(run.data, run.optim.schedule, run.train.steps)]


def test_without_stages_all_is_one_span():
    assert found([]) == [("sources", 0, 100)]


def test_stages_by_phase():
    wsd = {"optim.schedule.warmup_steps": 10, "optim.schedule.decay_steps": 20}
    assert found([{"phase": "decay"}], **wsd) == [("sources", 0, 80), ("stages.0", 80, 100)]
    assert found([{"phase": "stable"}], **wsd) == [
        ("sources", 0, 10),
        ("stages.0", 10, 80),
        ("sources", 80, 100),
    ]
    every = [{"phase": phase} for phase in ("decay", "warmup", "stable")]
    assert found(every, **wsd) == [
        ("stages.1", 0, 10),
        ("stages.2", 10, 80),
        ("stages.0", 80, 100),
    ]
    steady = {"optim.schedule.kind": "constant", "optim.schedule.warmup_steps": 10}
    assert found([{"phase": "stable"}], **steady) == [("sources", 0, 10), ("stages.0", 10, 100)]


def test_stages_by_fraction():
    assert found([{"start": 0.8}, {"start": 0.95}]) == [
        ("sources", 0, 80),
        ("stages.0", 80, 95),
        ("stages.1", 95, 100),
    ]
    assert found([{"start": 0.0}]) == [("stages.0", 0, 100)]


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_stage_that_starts_at_n_of_m_steps_starts_there(steps, step):
    """0.29 * 100 is 28.999999999999996."""
    step = step % steps
    assert first_step(step / steps, steps) == step


# --- caps ----------------------------------------------------------------------------------------


def test_what_streams_have_given_adds_up():
    states = {
        "sources": {"data": [["a", 9, 0.5], ["b", 9, 0.5]], "counts": [3, 4]},
        "stages.0": {"data": [["b", 9, 1.0]], "counts": [5]},
    }
    assert rows_given(states) == {"a": 3, "b": 9}
    assert rows_given(states, but="sources") == {"b": 5}


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 300)), min_size=1, max_size=5),
    st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_the_forecast_is_what_is_dealt(sources, part):
    weights = [weight for weight, _ in sources]
    caps = [cap for _, cap in sources]
    num_rows = int(part * sum(caps))
    given_rows: dict[str, float] = {}
    take([Supply(str(k), w, c) for k, (w, c) in enumerate(sources)], given_rows, num_rows)
    total = sum(weights)
    _, counts, _ = choose_sources([w / total for w in weights], [0] * len(caps), num_rows, caps)
    for k, count in enumerate(counts):
        assert abs(given_rows.get(str(k), 0) - count) <= 2 * len(caps)


def supply(**rows):
    return [Supply(name, 1.0, count) for name, count in rows.items()]


def test_a_run_that_outlasts_its_caps_is_refused_with_numbers():
    steps = [Span("sources", 0, 25)]
    check_supply(steps, {"sources": supply(a=40, b=60)}, 8, 4, {}, 0)
    with pytest.raises(ConfigError) as error:
        check_supply(steps, {"sources": supply(a=40, b=59)}, 8, 4, {}, 0)
    for part in ("data.sources runs dry", "steps 1 to 25", "800 tokens", "792", "steps by 1"):
        assert part in str(error.value)
    check_supply(steps, {"sources": supply(a=40, b=inf)}, 8, 4, {}, 0)


def test_stages_share_what_a_source_may_give():
    steps = [Span("sources", 0, 10), Span("stages.0", 10, 20)]
    check_supply(steps, {"sources": supply(a=60), "stages.0": supply(a=60, b=inf)}, 8, 4, {}, 0)
    with pytest.raises(ConfigError, match=r"data\.stages\.0 runs dry: steps 11 to 20"):
        check_supply(steps, {"sources": supply(a=60), "stages.0": supply(a=60)}, 8, 4, {}, 0)


def test_a_branch_counts_from_its_streams():
    steps, sources = [Span("sources", 0, 25)], {"sources": supply(a=60)}
    state = {"sources": {"data": [["a", 9, 1.0]], "counts": [45]}}
    check_supply(steps, sources, 8, 4, state, 22)
    with pytest.raises(ConfigError, match="steps 20 to 25"):
        check_supply(steps, sources, 8, 4, state, 19)


# --- dealing under caps --------------------------------------------------------------------------

MIXTURES = st.lists(
    st.tuples(st.integers(1, 100), st.one_of(st.none(), st.integers(0, 60))),
    min_size=1,
    max_size=5,
)


@given(MIXTURES, st.lists(st.integers(1, 50), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_capped_dealing(mixture, pieces):
    """Never above a cap; exact while no cap is reached; the same in any pieces; and between two
    exhaustions shares are in proportion."""
    caps = [cap for _, cap in mixture]
    total = sum(weight for weight, _ in mixture)
    weights = [weight / total for weight, _ in mixture]
    num_samples = sum(pieces)
    if None not in caps:
        num_samples = min(num_samples, sum(caps))
    zeros = [0] * len(caps)
    whole, counts, since = choose_sources(weights, zeros, num_samples, caps)
    assert all(cap is None or count <= cap for count, cap in zip(counts, caps, strict=True))
    assert sum(counts) == num_samples
    got, now, mark, left = [], zeros, zeros, num_samples
    for piece in pieces:
        some, now, mark = choose_sources(weights, now, min(piece, left), caps, mark)
        got += some.tolist()
        left -= len(some)
    assert got == whole.tolist()
    if left == 0:
        assert (now, mark) == (counts, since)
    free = [0 if cap is None else cap for cap in caps]
    full = [cap is not None and count >= cap for count, cap in zip(counts, caps, strict=True)]
    if not any(full):
        uncapped, _, _ = choose_sources(weights, zeros, num_samples)
        assert np.array_equal(whole, uncapped)
    running = [k for k in range(len(caps)) if not full[k]]
    dealt = sum(counts[k] - since[k] for k in running)
    shares = sum(weights[k] for k in running)
    for k in running:
        wanted = weights[k] / shares * dealt
        assert abs(counts[k] - since[k] - wanted) <= len(caps), free


def test_no_torch_is_imported():
    code = (
        "import sys, stepwell.data.curriculum, stepwell.train.curriculum\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
