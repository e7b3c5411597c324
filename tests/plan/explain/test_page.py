import html.parser
import re
from dataclasses import replace

import pytest

from stepwell.config import Run
from stepwell.plan.cluster import cluster
from stepwell.plan.dims import find_model
from stepwell.plan.explain.answer import Review, Searched
from stepwell.plan.explain.knobs import gap, knobs
from stepwell.plan.explain.page import render, write_page
from stepwell.plan.explain.pictures import (
    machine,
    machines,
    memory_of_stage,
    place_of,
    waterfall_chart,
)
from stepwell.plan.explain.reasons import explain
from stepwell.plan.job import Arrangement, Job, job_of
from stepwell.plan.search.search import Candidate, Prices, search
from stepwell.plan.search.space import Pins, Task
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
    held = memory_of_stage(job, 0)
    assert sum(held.values()) == pytest.approx(answer.best.memory.total, rel=0.5)
    assert "MFU" in waterfall_chart(answer.best)
    big = replace(job.layout, pp=64, dp_shard=256, tp=8)
    many = machines(Job(job.dims, big, H100))
    assert "and 32 more stages" in many
    assert "+ 232" in many


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
    with pytest.raises(OSError, match="nowhere"):
        write_page(Review(run, task, found, (), (), None, None, ()), tmp_path / "nowhere" / "a")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium on the PATH")
def test_no_horizontal_scroll_on_a_phone(answer, tmp_path):
    write_page(answer, tmp_path / "report.html")
    seen = look(tmp_path, 360, dark=True)
    assert seen["overflow"] == 0
    assert seen["title"] == "llama3-8b on 16 x h100-sxm"
    assert brightness(seen["page"]) < 60 < 200 < brightness(seen["text"])
    assert brightness(seen["label"]) > 130
