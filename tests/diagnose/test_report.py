import functools
import html.parser
import http.server
import json
import math
import re
import shutil
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepwell.config import Run
from stepwell.diagnose.report import (
    Accuracy,
    Answer,
    Curve,
    Figure,
    Funnel,
    MemoryRow,
    ReportData,
    Sample,
    Speed,
    Stage,
    bytes_text,
    count_text,
    flops_text,
    median,
    percent_text,
    read_run,
    render,
    seconds_text,
    write_report,
    wsd_phases,
)
from stepwell.metrics import RunLog
from stepwell.types import DataError, StepwellError

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
MIB = 2**20
LONG = "x" * 400
EVIL = "<script>document.title='hit'</script><img src=http://example.com/x onerror=alert(1)>"


def example() -> ReportData:
    return ReportData(
        title="Quickstart & more",
        summary="From raw text to a model.",
        figures=[Figure("bits per byte", "1.412", "held out")],
        stages=[
            Stage("curate", 4.2, None, {"documents": 1893}, "1,204 of 1,893 kept"),
            Stage("pretrain", 251.3, 4_915_200, {"lr": 0.001, "path": LONG}),
            Stage("grpo", 118.7, 1_310_720),
        ],
        funnel=Funnel(1893, {"short": 301, "duplicate": 388}, 1204, {"code": 800, "docs": 404}),
        curves=[
            Curve(
                "Pretraining loss",
                range(1, 301),
                [2 + 6 * math.exp(-i / 40) for i in range(300)],
                "loss",
                phases=[("warm-up", 0, 20), ("stable", 20, 240), ("decay", 240, 300)],
            )
        ],
        rewards=[Curve("Held-out", [0, 20, 40], [0.41, 0.6, 0.727], "accuracy", percent=True)],
        accuracy=[
            Accuracy("sft", 0.412, 0.371, 0.455, 512),
            Accuracy("grpo", 0.727, 0.688, 0.766, 512),
        ],
        accuracy_note="None was seen in training.",
        speed=[Speed("pretrain", [1, 2, 3], [19_000.4, 19_520.6, 30_000.0], [0.4, 0.41, 0.5])],
        peak_flops_per_s=412e9,
        peak_source="measured bf16 matmul",
        flop_convention="6N + 6*L*d*s",
        memory=[
            MemoryRow("activations", 53 * MIB),
            MemoryRow("peak", 225 * MIB, 220 * MIB),
        ],
        memory_note="The peak is in the loss.",
        samples=[
            Sample(
                f"12 + 7 = {EVIL}",
                [Answer("sft", EVIL, False), Answer("grpo", LONG, True), Answer("raw", "?")],
                "19",
            )
        ],
        events=[
            {"event": "resume", "step": 120, "time": 1.0, "checkpoint": LONG},
            {"event": "skip", "step": 171, "time": 2.0, "reason": EVIL, "ids": [1, 2]},
        ],
        config={"run.toml": f'name = "{EVIL}"\n# {LONG}'},
        versions={"torch": "2.13.0", "python": "3.11"},
        hardware="AMD EPYC, 2 threads",
    )


class Page(html.parser.HTMLParser):
    """Texts by section, table rows by section, and every attribute."""

    def __init__(self, text: str):
        super().__init__()
        self.section = "top"
        self.rows: dict[str, list[list[str]]] = {}
        self.words: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self._cell = True
            self.rows[self.section][-1].append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data):
        self.words[self.section] = self.words.get(self.section, "") + data
        if self._cell:
            self.rows[self.section][-1][-1] += data

    def table(self, section: str) -> list[list[str]]:
        return [[" ".join(cell.split()) for cell in row] for row in self.rows[section][1:]]


@pytest.fixture(scope="module")
def text() -> str:
    return render(example())


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


# --- every number shown is the number in the data --------------------------------------------


def test_headline(page):
    words = " ".join(page.words["top"].split())
    for expected in (
        "bits per byte 1.412 held out",
        "accuracy after grpo 72.7 % +31.5 points over sft",
        "time 6:14 3 stages",
        "tokens trained on 6,225,920",
        "tokens/s 19,521 pretrain, MFU 41.0 %",
    ):
        assert expected in words or expected.replace(" ", "") in words.replace(" ", "")


def test_stage_table(page):
    rows = page.table("stages")
    assert [row[1:] for row in rows] == [
        ["4.2 s", "–"],
        ["4:11", "4,915,200"],
        ["1:59", "1,310,720"],
    ]
    assert rows[0][0] == "curate 1,204 of 1,893 keptdocuments = 1893"
    assert "lr = 0.001" in rows[1][0]


def test_funnel(page, text):
    assert page.table("curation") == [
        ["came in", "1,893", "100.0 %"],
        ["dropped: duplicate", "388", "20.5 %"],
        ["dropped: short", "301", "15.9 %"],
        ["kept", "1,204", "63.6 %"],
        ["kept: code", "800", "42.3 %"],
        ["kept: docs", "404", "21.3 %"],
    ]
    widths = re.findall(r'<i style="width: ([\d.]+)%">', text)
    assert widths == ["100.00", "20.50", "15.90", "63.60", "42.26", "21.34"]


def test_accuracy(page):
    assert page.table("accuracy") == [
        ["sft", "41.2 %", "37.1 – 45.5 %", "512"],
        ["grpo", "72.7 %", "68.8 – 76.6 %", "512"],
    ]
    assert "None was seen in training." in page.words["accuracy"]
    assert "41.2 %" in page.words["accuracy"].split("after")[0]  # the label on the bar


def test_speed_states_the_median_the_peak_and_the_convention(page):
    assert page.table("speed") == [["pretrain", "19,521", "41.0 %"]]
    assert "over a peak of 412 GFLOP/s (measured bf16 matmul)" in page.words["speed"]
    assert "6N + 6*L*d*s" in page.words["speed"]


def test_memory(page):
    assert page.table("memory") == [
        ["activations", "53.0 MiB", "–", "–"],
        ["peak", "225.0 MiB", "220.0 MiB", "+2.3 %"],
    ]


def test_samples_are_marked(page, text):
    assert re.findall(r'class="answer( right| wrong|)"', text) == [" wrong", " right", ""]
    assert page.words["samples"].count("✗ wrong") == page.words["samples"].count("✓ right") == 1
    assert "expected: 19" in page.words["samples"]


def test_events(page):
    first, second = page.table("events")
    assert first[:2] == ["120", "resume"]
    assert second == ["171", "skip", f"reason: {EVIL}, ids: [1, 2]"]
    assert first[2] == f"checkpoint: {LONG[:299]}…"
    assert "resume: 1" in page.words["events"]


def test_setup(page):
    assert f'name = "{EVIL}"' in page.words["setup"]
    for expected in ("torch 2.13.0", "python 3.11", "AMD EPYC, 2 threads"):
        assert expected in page.words["setup"]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (count_text(12345), "12,345"),
        (count_text(12_345_678), "12.3 M"),
        (count_text(1_500_000_000), "1.50 B"),
        (count_text(None), "–"),
        (seconds_text(4.25), "4.2 s"),
        (seconds_text(59.97), "1:00"),
        (seconds_text(3725), "1:02:05"),
        (percent_text(0.0), "0.0 %"),
        (bytes_text(1.5 * 2**30), "1.50 GiB"),
        (flops_text(989.4e12), "989.4 TFLOP/s"),
        (median([3.0, 1.0, 2.0]), 2.0),
        (median([4.0, 1.0, math.nan, 2.0, 3.0]), 2.5),
        (median([]), None),
    ],
)
def test_figures(found, expected):
    assert found == expected


# --- the page as a page ----------------------------------------------------------------------


def test_inserted_text_is_escaped_and_nothing_is_fetched(page, text):
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "link", "iframe", "object", "embed"}
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "action"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_charts_have_titles_and_colours_that_follow_the_scheme(page, text):
    charts = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(charts) == 5
    assert all(chart["role"] == "img" and chart["aria-labelledby"] for chart in charts)
    assert "prefers-color-scheme: dark" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_a_partial_run_still_reports():
    assert Page(render(ReportData())).words["top"].split()[-2:] == ["Stepwell", "report"]
    for name in ("stages", "curves", "accuracy", "speed", "memory", "samples", "events"):
        only = ReportData(**{name: getattr(example(), name)})
        assert "<section" in render(only)
    bare = ReportData(
        stages=[Stage("sft")],
        accuracy=[Accuracy("sft", 0.5)],
        speed=[Speed("sft", [], [])],
        memory=[MemoryRow("peak", 0.0, 0.0)],
        samples=[Sample("?", [])],
        events=[{}],
        curves=[Curve("Loss", [], [])],
    )
    assert Page(render(bare)).table("accuracy") == [["sft", "50.0 %", "–", "–"]]


def test_long_lists_say_what_is_left_out():
    data = ReportData(
        events=[{"event": "skip", "step": i} for i in range(150)],
        samples=[Sample(str(i), []) for i in range(20)],
    )
    page = Page(render(data))
    assert "100 of 150 events are shown" in page.words["events"]
    assert "12 of 20 samples are shown" in page.words["samples"]
    assert "skip: 150" in page.words["events"]


def test_writing_is_whole_or_not_at_all(tmp_path):
    path = write_report(example(), tmp_path / "deep" / "report.html")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    (tmp_path / "file").write_text("")
    with pytest.raises(StepwellError, match="cannot write"):
        write_report(example(), tmp_path / "file" / "report.html")


# --- a run's folder --------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path) -> Path:
    run = Run.parse(
        {
            "name": "arith",
            "train": {"steps": 50},
            "optim": {"schedule": {"kind": "wsd", "warmup_steps": 5, "decay_steps": 10}},
        }
    )
    run.save(tmp_path / "run.toml")
    with RunLog(tmp_path, console=False) as log:
        for step in range(1, 51):
            log.log(
                step,
                {
                    "train/loss": 5.0 / step,
                    "train/tokens": 1000,
                    "time/step_s": 0.5,
                    "speed/tokens_per_s": 2000.0,
                    "speed/mfu": 0.25,
                },
            )
        log.event("skip", 7, reason="spike")
    sample = {"prompt": "1+1=", "completion": "2", "expected": "2", "reward": 1.0}
    lines = [json.dumps({**sample, "completion": "3", "reward": 0.0}), json.dumps(sample), '{"half']
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_a_single_run_reports_from_its_folder(run_dir):
    data = read_run(run_dir)
    assert data.title == "arith"
    assert list(data.curves[0].values) == [5.0 / step for step in range(1, 51)]
    assert data.curves[0].phases == [("warm-up", 0, 5), ("stable", 5, 40), ("decay", 40, 50)]
    page = Page(write_report(run_dir, run_dir / "report.html").read_text("utf-8"))
    ((stage, time, tokens),) = page.table("stages")
    assert (time, tokens) == ("25.0 s", "50,000")
    assert "steps = 50 of 50" in stage
    assert page.table("speed") == [["pretrain", "2,000", "25.0 %"]]
    assert page.table("events") == [["7", "skip", "reason: spike"]]
    assert page.words["samples"].count("✓ right") == 1
    assert "wrong" not in page.words["samples"]
    assert "[optim.schedule]" in page.words["setup"]


@pytest.mark.parametrize(
    ("log_every", "logged", "trained"),
    [
        (1, [1, 2, 3], 3),
        (10, [10, 20, 25], 25),  # the last step is always logged
        (1, [501, 502], 2),  # a branch goes on from its trunk's step
    ],
)
def test_time_and_tokens_are_of_all_steps_however_few_are_logged(
    tmp_path, log_every, logged, trained
):
    Run.parse({"train": {"steps": 600, "log_every": log_every}}).save(tmp_path / "run.toml")
    with RunLog(tmp_path, console=False) as log:
        for step in logged:
            log.log(step, {"train/tokens": 1000, "time/step_s": 0.5})
    (stage,) = read_run(tmp_path).stages
    assert (stage.seconds, stage.tokens) == (0.5 * trained, 1000 * trained)


def test_schedules_without_phases_have_none():
    run = Run.parse({"optim": {"schedule": {"kind": "cosine"}}})
    assert wsd_phases(run) == []


def test_a_folder_without_a_run_and_damaged_samples_are_named(run_dir):
    with pytest.raises(DataError, match="not a run's folder"):
        write_report(run_dir / "checkpoints", run_dir / "report.html")
    (run_dir / "samples.jsonl").write_text("{broken\n")
    with pytest.raises(DataError, match="damaged"):
        read_run(run_dir)


# --- in a browser ----------------------------------------------------------------------------

FRAME = """<body style="margin:0"><iframe id=f src=report.html style="border:0;width:WIDTHpx;
height:900px"></iframe><script>f.onload = () => {
  const d = f.contentDocument, w = d.documentElement.clientWidth, css = f.contentWindow;
  const wide = [...d.querySelectorAll("main *")].filter(
    e => !(e instanceof css.SVGElement) && e.getBoundingClientRect().right > w + 0.5);
  const axis = d.querySelector("svg.chart text");
  document.title = JSON.stringify({overflow: d.documentElement.scrollWidth - w, width: w,
    wide: wide.map(e => e.outerHTML.slice(0, 80)),
    page: css.getComputedStyle(d.body).backgroundColor,
    text: css.getComputedStyle(d.body).color, title: d.title,
    font: axis.getBoundingClientRect().height, label: css.getComputedStyle(axis).fill});
}</script>"""


@contextmanager
def serving(folder: Path):
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def look(folder: Path, width: int, dark: bool) -> dict:
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    with serving(folder) as (address, asked):
        done = subprocess.run(
            [
                CHROMIUM or "",
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                f"--user-data-dir={folder / 'profile'}",
                *scheme,
                "--virtual-time-budget=4000",
                "--dump-dom",
                f"{address}/frame.html",
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert set(asked) <= {"/frame.html", "/report.html", "/favicon.ico"}
    found = re.search(r"<title>(.*?)</title>", done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found.group(1)))


@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium on the PATH")
@pytest.mark.parametrize("width", [360, 1200])
def test_no_horizontal_scroll_and_readable_in_light_and_dark(tmp_path, width):
    write_report(example(), tmp_path / "report.html")
    light, dark = (look(tmp_path, width, dark) for dark in (False, True))
    for seen in (light, dark):
        assert seen["width"] == width
        assert seen["overflow"] == 0
        assert seen["wide"] == []
        assert seen["title"] == "Quickstart & more"  # the sample's script did not run
        assert seen["font"] >= 9
    assert brightness(light["page"]) > 200 > 100 > brightness(light["text"])
    assert brightness(dark["page"]) < 60 < 200 < brightness(dark["text"])
    assert brightness(light["label"]) < 130 < brightness(dark["label"])


def brightness(color: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", color)[:3])) / 3
