"""The page of a method's plan: every part is there, numbers are those of the plan, and a browser
shows it."""

import re
from dataclasses import replace
from html import escape

import pytest

from stepwell.plan.cluster import cluster
from stepwell.plan.methods.evaluated import CACHE, COPY, OUTSIDE
from stepwell.plan.methods.methods import MethodPlan, plan_method
from stepwell.plan.methods.page import render, write_page
from stepwell.plan.methods.pictures import (
    MOST_GPUS,
    gpus,
    legend,
    models_chart,
    moments_chart,
    time_chart,
)
from stepwell.plan.units import in_gib, seconds_text, size_text
from stepwell.presets import PRESETS
from tests.diagnose.test_report import CHROMIUM, brightness, look
from tests.plan.explain.test_page import Page

SMALL = PRESETS["smollm2-1.7b"]


def plan(method: str, num_gpus: int = 8, gpu: str = "h100-sxm") -> MethodPlan:
    return plan_method(method, SMALL, cluster(gpu), num_gpus, name="smollm2-1.7b")


@pytest.fixture(scope="module")
def ppo() -> MethodPlan:
    return plan("ppo")


@pytest.fixture(scope="module")
def served() -> MethodPlan:
    """Where four models do not fit, servers are the nearest."""
    return plan("ppo", gpu="l4")


def test_the_page_has_every_part_and_asks_for_nothing(ppo):
    text = render(ppo)
    page = Page(text)
    wanted = ["layout", "why", "memory", "time", "alternatives", "models", "settings"]
    assert page.ids == wanted
    assert not any({"src", "href"} & set(attrs) for _, attrs in page.tags)
    assert not re.search(r"https?://", text)
    assert "<script" not in text
    assert sum(tag == "svg" for tag, _ in page.tags) == 4
    one = ppo.asked
    for said in (size_text(one.peak), seconds_text(one.step_s), "--method.kind ppo",
                 f"of {size_text(one.limit)} while {one.phase}: fits"):  # fmt: skip
        assert said in text
    for other in ppo.others:
        assert in_gib(other.peak) in text
    assert "<b>x" not in render(replace(ppo, name="<b>x"))


def test_pictures_are_of_every_gpu_moment_and_model(ppo):
    one = ppo.asked
    assert gpus(one).count('class="gpu">GPU ') == one.trainers == 8
    drawn = moments_chart(one)
    for moment, held in one.parts.items():
        assert f">{moment}<" in drawn
        assert sum(held.values()) == pytest.approx(one.phases[moment])
        assert f">{in_gib(sum(held.values()))}<" in drawn
    drawn = models_chart(one)
    assert all(f">{escape(name)}<" in drawn for name in (*one.models, COPY, CACHE))
    assert drawn.count("<text") == 2 * (4 + 2)
    drawn = time_chart(one)
    assert all(f">{name}<" in drawn for name in one.times)
    colors = [color for color, _ in legend()]
    assert len(set(colors)) == len(colors) == 8


def test_a_bar_is_as_long_as_its_bytes(ppo):
    drawn = moments_chart(ppo.asked)
    first, widths = ppo.asked.parts["training"], []
    for rect in re.findall(r"<rect [^>]*>", drawn)[: len(first)]:
        widths.append(float(re.search(r'width="([0-9.]+)"', rect)[1]))  # type: ignore[index]
    scale = sum(widths) / sum(first.values())
    assert widths == pytest.approx([n * scale for n in first.values()], abs=0.15)
    assert OUTSIDE in first


def test_gpus_that_serve_are_drawn_apart_and_many_are_cut_short(served):
    one = served.nearest
    assert one is not None
    assert one.servers
    drawn = gpus(one)
    assert drawn.count(">trains<") == one.trainers
    assert drawn.count(">samples<") == one.servers.get("sampler", 0)
    assert drawn.count(">scores<") == one.servers.get("reward", 0)
    text = render(served)
    assert "it does not fit" in text
    assert "the nearest that fits" in text
    many = gpus(plan("lora", 64).asked)
    assert many.count('class="gpu">GPU ') == MOST_GPUS
    assert f"{64 - MOST_GPUS} more that train are like these" in many


def test_a_page_where_nothing_fits_is_of_what_was_asked(tmp_path):
    found = plan_method("grpo", PRESETS["llama3-70b"], cluster("l4"), 1, name="llama3-70b")
    assert found.chosen is None
    path = write_page(found, tmp_path / "a.html")
    assert "does not fit" in path.read_text("utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium on the PATH")
def test_no_horizontal_scroll_on_a_phone(served, tmp_path):
    write_page(served, tmp_path / "report.html")
    seen = look(tmp_path, 360, dark=True)
    assert seen["overflow"] == 0
    assert seen["title"] == "ppo of smollm2-1.7b on 8 x l4"
    assert brightness(seen["page"]) < 60 < 200 < brightness(seen["text"])
    assert brightness(seen["label"]) > 130
