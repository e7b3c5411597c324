"""Quality filters beside datatrove's: the same decisions, and the ratio of CPU time.

    .venv/bin/python -m benchmarks.filters [--mb 6] [--rounds 3] [--words whitespace]

Reads real text from `.cache/corpus` (`stepwell.data.corpora`), some of each kind. datatrove runs in
an environment of its own (`setup_peers.sh`), in turns with Stepwell. Each disagreement is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.workload import CACHE, ROOT, SCRATCH
from stepwell.data.batches import to_batch
from stepwell.data.quality.c4 import C4
from stepwell.data.quality.fineweb import FineWeb
from stepwell.data.quality.gopher import GopherQuality
from stepwell.data.quality.repetition import GopherRepetition
from stepwell.types import Document

CORPUS = ROOT / ".cache" / "corpus"
SOURCES = (
    "books/austen", "books/kjv", "books/moby-dick", "books/sotu", "text/python-docs",
    "text/anarchism", "licences", "mail", "reference/foldoc", "languages/udhr", "code/stdlib",
)  # fmt: skip
STEPS = (GopherQuality(), GopherRepetition(), FineWeb(), C4())
ROWS_A_BATCH = 1000
# One of ours takes too little time to be measured well.
PASSES = 3
# datatrove's reason -> ours.
REASONS = {
    "gopher_short_doc": "gopher_too_few_words",
    "gopher_long_doc": "gopher_too_many_words",
    "gopher_below_avg_threshold": "gopher_short_words",
    "gopher_above_avg_threshold": "gopher_long_words",
    "gopher_too_many_hashes": "gopher_hashes",
    "gopher_too_many_ellipsis": "gopher_ellipses",
    "gopher_too_many_bullets": "gopher_bullet_lines",
    "gopher_too_many_end_ellipsis": "gopher_ellipsis_lines",
    "gopher_below_alpha_threshold": "gopher_few_letters",
    "gopher_enough_stop_words": "gopher_stop_words",
    "dup_para_frac": "gopher_duplicate_paragraphs",
    "dup_para_char_frac": "gopher_duplicate_paragraph_chars",
    "dup_line_frac": "gopher_duplicate_lines",
    "dup_line_char_frac": "gopher_duplicate_line_chars",
    **{f"top_{n}_gram": f"gopher_top_{n}gram_chars" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"gopher_duplicate_{n}gram_chars" for n in range(5, 11)},
    "empty": "fineweb_empty",
    "line_punct_ratio": "fineweb_unpunctuated_lines",
    "short_line_ratio": "fineweb_short_lines",
    "char_dup_ratio": "fineweb_duplicate_lines",
    "list_ratio": "fineweb_newlines",
    "lorem_ipsum": "c4_lorem_ipsum",
    "curly_bracket": "c4_curly_bracket",
    "too_few_sentences": "c4_few_sentences",
}


def texts_of(folder: Path, max_bytes: int) -> Iterator[str]:
    """Texts of a folder up to max_bytes, in an order that has nothing to do with their names."""
    paths = [p for p in folder.rglob("*") if p.is_file() and p.name != "labels.jsonl"]
    paths.sort(key=lambda p: hashlib.sha256(str(p.relative_to(folder)).encode()).digest())
    left = max_bytes
    for path in paths:
        body = path.read_text("utf-8", "replace")
        rows = body.splitlines() if path.suffix == ".jsonl" else [body]
        for row in rows:
            text = json.loads(row)["text"] if path.suffix == ".jsonl" else row
            left -= len(text.encode())
            if left < 0:
                return
            yield text


def collect(mb: float) -> list[str]:
    share = int(mb * 1e6 / len(SOURCES))
    texts = [text for source in SOURCES for text in texts_of(CORPUS / source, share)]
    return [text for text in texts if text.strip()]


def ours(texts: list[str]) -> dict[str, Any]:
    batches = [
        to_batch(
            [Document(str(i), t, "x") for i, t in enumerate(texts) if i // ROWS_A_BATCH == b], 0
        )
        for b in range((len(texts) - 1) // ROWS_A_BATCH + 1)
    ]
    seconds, verdicts, cleaned = {}, {}, list(texts)
    for step in STEPS:
        outcomes = [step(batch) for batch in batches]
        begin = time.process_time()
        for _ in range(PASSES):
            outcomes = [step(batch) for batch in batches]
        seconds[step.kind] = (time.process_time() - begin) / PASSES
        found = [""] * len(texts)
        for outcome in outcomes:
            for row in outcome.removed.to_pylist():
                found[int(row["id"])] = row["reason"]
            if step.kind == "c4":
                for row in outcome.kept.to_pylist():
                    cleaned[int(row["id"])] = row["text"]
        verdicts[step.kind] = found
    return {"seconds": seconds, "verdicts": verdicts, "cleaned": cleaned}


def theirs(texts_path: Path, words: str) -> dict[str, Any]:
    out = SCRATCH / "filters-out.json"
    python = CACHE / "envs" / "datatrove" / "bin" / "python"
    script = ROOT / "benchmarks" / "peers" / "datatrove_filters.py"
    subprocess.run([python, script, texts_path, out, words], check=True)
    result = json.loads(out.read_text("utf-8"))
    out.unlink()
    result["verdicts"] = {
        name: [REASONS[v] if v else "" for v in found] for name, found in result["verdicts"].items()
    }
    return result


def disagreements(a: dict[str, Any], b: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each filter: how many verdicts and reasons differ, and between which."""
    result = {}
    for name, found in a["verdicts"].items():
        pairs = list(zip(found, b["verdicts"][name], strict=True))
        result[name] = {
            "dropped": sum(bool(x) for x, _ in pairs),
            "decision": sum(bool(x) != bool(y) for x, y in pairs),
            "reason": sum(bool(x) and bool(y) and x != y for x, y in pairs),
            "pairs": {
                f"{x or 'kept'} / {y or 'kept'}": n
                for (x, y), n in Counter(p for p in pairs if p[0] != p[1]).most_common()
            },
            "numbers": [i for i, (x, y) in enumerate(pairs) if x != y][:20],
        }
    result["c4"]["text"] = sum(x != y for x, y in zip(a["cleaned"], b["cleaned"], strict=True))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.filters", description=__doc__)
    parser.add_argument("--mb", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", choices=("whitespace", "default"), default="whitespace")
    parser.add_argument("--json", help="where the numbers are written")
    args = parser.parse_args()
    texts = collect(args.mb)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    path = SCRATCH / "filters.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    rounds = [(ours(texts), theirs(path, args.words)) for _ in range(args.rounds)]
    path.unlink()
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts):,} texts, {megabytes:.1f} MB, words by {args.words}")
    table = {}
    for name in [*rounds[0][0]["seconds"], "all"]:
        mine = [seconds_of(ours_in["seconds"], name) for ours_in, _ in rounds]
        together = [seconds_of(theirs_in["seconds"], name) for _, theirs_in in rounds]
        alone = [seconds_of(theirs_in["alone"], name) for _, theirs_in in rounds]
        table[name] = {
            "ours_mb_per_cpu_s": megabytes / statistics.median(mine),
            "theirs_mb_per_cpu_s": megabytes / statistics.median(together),
            "theirs_alone_mb_per_cpu_s": megabytes / statistics.median(alone),
            "ratio": spread_of(mine, together),
            "ratio_alone": spread_of(mine, alone),
        }
        row = table[name]
        print(
            f"{name:18} ours {row['ours_mb_per_cpu_s']:7.1f} MB/s  datatrove "
            f"{row['theirs_mb_per_cpu_s']:6.2f} MB/s  ratio "
            + " ".join(f"{r:.1f}" for r in row["ratio"])
            + f"  alone {row['theirs_alone_mb_per_cpu_s']:6.2f} MB/s  ratio "
            + " ".join(f"{r:.1f}" for r in row["ratio_alone"])
        )
    differing = disagreements(*rounds[0])
    for name, found in differing.items():
        print(f"{name}: {json.dumps(found)}")
    if args.json:
        values = {"texts": len(texts), "mb": megabytes, "words": args.words, "speed": table,
                  "disagreements": differing}  # fmt: skip
        Path(args.json).write_text(json.dumps(values, indent=1) + "\n", "utf-8")


def seconds_of(seconds: dict[str, float], name: str) -> float:
    return sum(seconds.values()) if name == "all" else seconds[name]


def spread_of(mine: list[float], other: list[float]) -> list[float]:
    """The least, the median and the greatest ratio of the rounds."""
    ratios = [b / a for a, b in zip(mine, other, strict=True)]
    return [min(ratios), statistics.median(ratios), max(ratios)]


if __name__ == "__main__":
    main()
