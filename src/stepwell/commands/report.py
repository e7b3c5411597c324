"""`stepwell report RUN`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from stepwell.commands.inputs import Place, last_run, parse_options


@dataclass
class Report:
    """Writes a run as one self-contained HTML page: curves, speed, memory, events, samples."""

    run: Positional[str]
    """A run's folder, or a quickstart's: then its own page is named, or its last run's written."""
    out: Place = None
    """The page; without it, report.html in the run's folder."""
    json: bool = False
    """Print the result as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("report", Report, argv)
    from stepwell.diagnose.report import write_report

    folder = Path(options.run)
    run = last_run(folder) or folder
    if run != folder and options.out is None and (folder / "report.html").is_file():
        path = folder / "report.html"
    else:
        path = write_report(run, Path(options.out) if options.out else run / "report.html")
    print(json.dumps({"report": str(path)}) if options.json else path)
    return 0
