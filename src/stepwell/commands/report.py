"""`stepwell report RUN`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from stepwell.commands.inputs import parse_options


@dataclass
class Report:
    """Writes a run as one self-contained HTML page: curves, speed, memory, events, samples."""

    run: Positional[str]
    """A run's folder."""
    out: str | None = None
    """The page; without it, report.html in the run's folder."""
    json: bool = False
    """Print the result as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("report", Report, argv)
    from stepwell.diagnose.report import write_report

    out = Path(options.out) if options.out else Path(options.run) / "report.html"
    path = write_report(options.run, out)
    print(json.dumps({"report": str(path)}) if options.json else path)
    return 0
