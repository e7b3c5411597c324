"""`stepwell curate INPUT ... --out FOLDER`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stepwell.commands.inputs import Inputs, counted, parse_options, read_documents, shown

if TYPE_CHECKING:
    from stepwell.data.pipeline import Report, Step


@dataclass
class Curate:
    """Reads documents, drops what is no good, and counts every drop with its reason.

    Writes kept.jsonl, removed.jsonl (each with its reason) and report.json to a new folder.
    """

    inputs: Inputs
    """Rows (.jsonl, .jsonl.gz, .parquet), files of text (.txt, .md, .rst) or code, folders of them;
    stdlib-code, stdlib-prose."""
    out: str
    """The new folder."""
    filters: Literal["prose", "code", "none"] = "prose"
    """prose: Gopher's quality rules; code: those of Codex; none: only what is unreadable goes."""
    no_dedup: bool = False
    """Keep exact copies, which are dropped otherwise."""
    text_column: str = "text"
    """The column that holds the text."""
    json: bool = False
    """Print the report as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("curate", Curate, argv)
    from stepwell.data.pipeline import run_pipeline

    documents = shown(read_documents(options.inputs, options.text_column), "documents")
    report = run_pipeline(documents, steps_of(options), options.out)
    print(json.dumps(report.to_json()) if options.json else report_text(report, options.out))
    return 0


def steps_of(options: Curate) -> list[tuple[str, Step]]:
    from stepwell.data.dedup.exact import exact_dedup
    from stepwell.data.pipeline import drop_if
    from stepwell.data.quality import code_quality, gopher_quality

    steps: list[tuple[str, Step]] = []
    if options.filters == "prose":
        steps.append(("gopher_quality", drop_if(gopher_quality)))
    if options.filters == "code":
        steps.append(("code_quality", drop_if(code_quality)))
    if not options.no_dedup:
        steps.append(("exact_dedup", exact_dedup))
    return steps


def report_text(report: Report, folder: str) -> str:
    kept = counted(report.kept.docs, "document")
    lines = [
        f"read {counted(report.read, 'record')}",
        f"kept {kept}, {report.kept.size_text}: {folder}",
    ]
    for step, drops in report.steps.items():
        for reason, count in sorted(drops.by_reason.items(), key=lambda item: -item[1]):
            lines.append(f"  dropped {count:>8,}  {step}: {reason}")
    return "\n".join(lines)
