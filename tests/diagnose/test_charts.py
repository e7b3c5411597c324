import math
import re
import xml.etree.ElementTree as ET

import pytest

from stepwell.diagnose.charts import bar_chart, line_chart, paired_bar_chart, smoothed, thin


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()).strip() for e in ET.fromstring(svg).iter() if e.tag == "text"]


@pytest.fixture(scope="module")
def line() -> str:
    return line_chart(
        "Loss <1>",
        [("training", range(100), [8 - i / 20 for i in range(100)]), ("held out", [0, 99], [8, 3])],
        y_label="loss",
        phases=[("warm-up", 0, 10), ("stable", 10, 99)],
    )


def test_a_chart_is_an_element_with_a_title_and_a_description(line):
    root = ET.fromstring(line)
    assert root.tag == "svg"
    assert root.get("role") == "img"
    by_id = {e.get("id"): e for e in root.iter() if e.get("id")}
    title, description = (by_id[name].text for name in (root.get("aria-labelledby") or "").split())
    assert title == "Loss <1>"
    assert description == "training: 8 at 0, 3.05 at 99; held out: 8 at 0, 3 at 99"


def test_all_colours_are_variables(line):
    assert "var(--c1)" in line
    assert "var(--c2)" in line
    bars = bar_chart("Bars", [("a", 0.5, 0.4, 0.6, "50 %")], percent=True)
    pairs = paired_bar_chart("Memory", [("peak", 1.0, 2.0)])
    for svg in (line, bars, pairs):
        assert not re.search(r"#[0-9a-fA-F]{6}\b", re.sub(r'(id|href)="[^"]*"', "", svg))


def test_nothing_is_fetched_and_ids_do_not_clash(line):
    other = line_chart("Other", [("a", [1, 2], [3, 4])])
    for svg in (line, other):
        assert "http" not in svg
        assert "<script" not in svg
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (line, other)]
    assert not ids[0] & ids[1]
    for svg, known in zip((line, other), ids, strict=True):
        assert set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg))
        for pair in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg):
            assert (pair[0] or pair[1]) in known


def test_texts_are_texts(line):
    found = texts(line)
    for expected in ("step", "loss", "warm-up", "stable", "training", "held out"):
        assert expected in found
    assert "72.7 %" in texts(bar_chart("Bars", [("grpo", 0.727, None, None, "72.7 %")]))


def test_the_same_input_gives_the_same_chart():
    draw = lambda: line_chart("Loss", [("a", range(50), [1.0] * 50)])
    assert draw() == draw()


def test_gaps_and_emptiness():
    svg = line_chart("Loss", [("a", [1, 2, 3], [1.0, math.nan, math.inf])])
    assert "1 at 1, 1 at 1" in svg
    assert "no finite value" in line_chart("Loss", [("a", [1], [math.nan])])
    assert "<svg" in line_chart("Loss", [("a", [], [])])


def test_thinning_keeps_the_mean():
    x, y = thin(range(1000), [float(i) for i in range(1000)], most=100)
    assert len(x) == 100
    assert y[0] == pytest.approx(4.5)
    assert sum(y) / 100 == pytest.approx(499.5)
    x, y = thin([1, 2, 3, 4], [math.nan, math.nan, 3.0, math.nan], most=2)
    assert math.isnan(y[0])
    assert y[1] == 3.0


def test_smoothing_leaves_a_straight_line_alone():
    line = [2.0 * i for i in range(100)]
    assert smoothed(line) == pytest.approx(line)
    assert math.isnan(smoothed([1.0, math.nan, 1.0])[1])
