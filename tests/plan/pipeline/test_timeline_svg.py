"""The picture of a step shows every action where it is."""

import xml.etree.ElementTree as ElementTree

from stepwell.plan.pipeline.bubble import even_costs, simulate_schedule
from stepwell.plan.pipeline.timeline_svg import timeline_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_every_action_is_a_box_of_its_length():
    timeline = simulate_schedule("zbv", 2, 4, 2, even_costs(4, 1, 2, 0.5))
    root = ElementTree.fromstring(timeline_svg(timeline, "zbv <2 ranks>", " ms"))
    boxes = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(boxes) == len(timeline.events) == 2 * 2 * 4 * 3
    by_title = {(box.find(f"{SVG}title").text or ""): box for box in boxes}  # type: ignore[union-attr]
    assert len(by_title) == len(boxes)
    first = by_title["stage 0, forward of micro-batch 0: 0 to 1 ms"]
    second = by_title["stage 0, forward of micro-batch 1: 1 to 2 ms"]
    step = float(second.attrib["x"]) - float(first.attrib["x"])
    assert abs(float(first.attrib["width"]) + 0.6 - step) < 0.2
    assert first.attrib["y"] == second.attrib["y"]
    assert max(float(box.attrib["y"]) for box in boxes) > float(first.attrib["y"])
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text == "zbv <2 ranks>"


def test_numbers_are_left_out_where_they_do_not_fit():
    few, many = (timeline_svg(simulate_schedule("1f1b", 4, m)) for m in (8, 400))
    assert few.count('text-anchor="middle"') == 4 * 8 * 2
    assert many.count('text-anchor="middle"') == 0
    assert "bubble 37.5%" in few
