import html.parser
import re
from dataclasses import replace
from html import escape

import pytest

from stepwell.config import Run
from stepwell.plan.cluster import cluster
from stepwell.plan.dims import find_model
from stepwell.plan.explain.answer import Review, Searched
from stepwell.plan.explain.knobs import knobs
from stepwell.plan.explain.page import render, write_page
from stepwell.plan.explain.pictures import (
    WIDTH,
    color_of_stage,
    machine,
    machines,
    memory_bars,
    memory_of_stage,
    place_of,
    waterfall_chart,
)
from stepwell.plan.explain.reasons import explain, part_text
from stepwell.plan.footprint.footprint import footprint
from stepwell.plan.job import Arrangement, Job, job_of
from stepwell.plan.measured.gap import gap
from stepwell.plan.search.candidates import Candidate
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.search import search
from stepwell.plan.search.space import Pins, Task
from stepwell.plan.steptime.waterfall import LEAST_SHARE, waterfall
from tests.diagnose.test_report import CHROMIUM, brightness, look

H100 = cluster("h100-sxm")
EIGHT = find_model("llama3-8b")


@pytest.fixture(scope="module")
def answer():
    prices = Prices(EIGHT.dims, H100, EIGHT.config)
    pins = Pins(pp=2, tp=2, max_cp=1)
    found = search(EIGHT.dims, H100, 16, 8192, 32 * 8192, pins, prices=prices)
    turned = knobs(prices, found.task, found.best.layout, EIGHT.config)
    return Searched(
        found, explain(found, prices, deep=False), found.found[:1], (), tuple(turned), 10**12
    )


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.ids.append(dict(attrs)["id"])


def test_the_page_has_every_part_and_asks_for_nothing(answer):
    text = render(answer)
    page = Page(text)
    wanted = ["layout", "why", "memory", "time", "runners-up", "binding", "knobs", "traffic"]
    assert [i for i in wanted if i in page.ids] == wanted
    assert not any({"src", "href"} & set(attrs) for _, attrs in page.tags)
    assert not re.search(r"https?://", text)
    assert "<script" not in text
    best = answer.best
    assert f"{best.step_s:.2f} s" in text
    assert f"{best.peak_bytes / 2**30:.1f} GiB" in text
    assert sum(tag == "svg" for tag, _ in page.tags) == 4


def test_a_name_is_escaped(answer):
    dims = replace(answer.ranking.task.dims, name="<script>x</script>")
    ranking = replace(answer.ranking, task=replace(answer.ranking.task, dims=dims))
    assert "<script>x" not in render(replace(answer, ranking=ranking))


def test_places_are_those_of_the_mesh():
    layout = Arrangement(128, 1, 8, tp=2, cp=3, dp_shard=2, dp_replicate=2, pp=2)
    places = [place_of(rank, layout) for rank in range(layout.num_gpus)]
    assert len(set(places)) == 48
    assert places[0] == (0, 0, 0, 0, 0)
    assert places[1].tp == 1
    assert places[2].cp == 1
    assert places[6].dp_shard == 1
    assert places[12].dp_replicate == 1
    assert places[24] == (1, 0, 0, 0, 0)


def test_pictures_count_right(answer):
    job = answer.best.job
    assert machine(job).count(">GPU ") == 8
    # A square for each GPU: 2 stages of one machine each.
    assert machines(job).count("<rect") == 16 + 2
    for rank in range(job.layout.pp):
        held = memory_of_stage(job, rank)
        assert sum(held.values()) == pytest.approx(footprint(job, rank).total, rel=1e-9)
    assert "MFU" in waterfall_chart(answer.best)
    big = replace(job.layout, pp=64, dp_shard=256, tp=8)
    many = machines(Job(job.dims, big, H100))
    assert "and 32 more stages" in many
    assert "+ 232" in many


def test_many_stages_have_colours_of_their_own_and_fill_the_width(answer):
    job = answer.best.job
    deep = Job(job.dims, replace(job.layout, pp=32, dp_shard=4, dp_replicate=1, tp=8, cp=1), H100)
    assert len({color_of_stage(stage, 32) for stage in range(32)}) == 32
    assert [color_of_stage(stage, 8) for stage in (0, 7)] == ["--s0", "--s7"]
    drawn = machines(deep)
    right = max(float(x) for x in re.findall(r'<rect x="([0-9.]+)"', drawn))
    assert right > 0.7 * WIDTH
    assert drawn.count(">stage ") == 32


def test_ranks_that_are_not_drawn_are_told(answer):
    job = answer.best.job
    many = replace(job.layout, pp=32, dp_shard=1, dp_replicate=1, schedule="1f1b")
    few = replace(many, pp=16)
    drawn = [
        memory_bars(replace(answer.best, job=Job(job.dims, layout, H100))) for layout in (many, few)
    ]
    assert "ranks 8 to 23 are between" in drawn[0]
    assert "between" not in drawn[1]
    assert drawn[0].count(">rank ") == 16


def test_the_chart_has_the_losses_of_the_text(answer):
    chart = waterfall_chart(answer.best)
    for loss in waterfall(answer.best.step)[1:]:
        assert (f">{escape(part_text(loss.name))}<" in chart) == (loss.share >= LEAST_SHARE), (
            loss.name
        )


def test_a_run_as_configured_has_a_page(tmp_path):
    run = Run.parse({"train": {"global_batch_rows": 8, "micro_batch_rows": 1}})
    job = job_of(run, 8, H100)
    prices = Prices(job.dims, H100)
    task = Task(job.dims, H100, 8, run.data.seq_len, 8)
    found = Candidate(job, prices.memory(job.layout), prices.time(job.layout))
    turned = tuple(knobs(prices, task, job.layout, run.model))
    slow = gap(job, 2 * found.step_s)
    path = write_page(Review(run, task, found, turned, (), None, slow, ()), tmp_path / "a.html")
    page = Page(path.read_text("utf-8"))
    assert "gap" in page.ids
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]
    with pytest.raises(OSError, match="a.html"):  # a file, not a folder
        write_page(Review(run, task, found, (), (), None, None, ()), tmp_path / "a.html" / "b")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium on the PATH")
def test_no_horizontal_scroll_on_a_phone(answer, tmp_path):
    write_page(answer, tmp_path / "report.html")
    seen = look(tmp_path, 360, dark=True)
    assert seen["overflow"] == 0
    assert seen["title"] == "llama3-8b on 16 x h100-sxm"
    assert brightness(seen["page"]) < 60 < 200 < brightness(seen["text"])
    assert brightness(seen["label"]) > 130
