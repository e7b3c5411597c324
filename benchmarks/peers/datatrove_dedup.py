"""datatrove's MinHash pipeline, its four stages in one process: what it keeps, and its CPU time.

Usage: datatrove_dedup.py TEXTS.jsonl SCRATCH OUT.json whitespace|default. `whitespace` gives it
words that white space separates; `default` is its English tokenizer (spaCy).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
    minhash,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils import word_tokenizers


class SplitTokenizer(word_tokenizers.WhitespaceTokenizer):
    def word_tokenize(self, text: str) -> list[str]:
        return text.split()


def main(texts_path: str, scratch: str, out: str, words: str) -> None:
    if words == "whitespace":
        minhash.load_word_tokenizer = lambda language: SplitTokenizer()
    texts, folder = Path(texts_path), Path(scratch)
    config = minhash.MinhashConfig()
    reader = JsonlReader(str(texts.parent), glob_pattern=texts.name)
    signature = MinhashDedupSignature(str(folder / "signatures"), config)
    signature.get_shingles("Warm up, once, with six words.")
    stages = [
        ([reader, signature], 1),
        ([MinhashDedupBuckets(str(folder / "signatures"), str(folder / "buckets"),
                              config=config)], config.num_buckets),
        ([MinhashDedupCluster(str(folder / "buckets"), str(folder / "removed"), config=config)], 1),
        ([reader, MinhashDedupFilter(str(folder / "removed")),
          JsonlWriter(str(folder / "kept"), compression=None)], 1),
    ]  # fmt: skip
    seconds = []
    for number, (steps, tasks) in enumerate(stages):
        begin = time.process_time()
        LocalPipelineExecutor(
            steps, tasks=tasks, workers=1, logging_dir=str(folder / f"log-{number}")
        ).run()
        seconds.append(time.process_time() - begin)
    kept = []
    for path in sorted((folder / "kept").glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            kept += [json.loads(line)["id"] for line in file]
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    Path(out).write_text(json.dumps({"seconds": seconds, "kept": kept, "peak_mb": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
