"""datatrove's quality filters over a file of texts: what each decides, and its CPU time, one behind
the other (where a text's words are split once for all of them) and each alone.

Usage: datatrove_filters.py TEXTS.jsonl OUT.json whitespace|default. `whitespace` gives it words
that white space separates and the sentences of its own fallback; `default` is its English (spaCy).
"""

from __future__ import annotations

import json
import sys
import time

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.utils import word_tokenizers


class SplitTokenizer(word_tokenizers.WhitespaceTokenizer):
    def word_tokenize(self, text: str) -> list[str]:
        return text.split()


def main(texts_path: str, out: str, words: str) -> None:
    if words == "whitespace":
        tokenizer = SplitTokenizer()
        word_tokenizers.load_word_tokenizer = lambda language: tokenizer
    with open(texts_path, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    # C4's comes last: it changes the text.
    filters = {
        "gopher-quality": GopherQualityFilter(),
        "gopher-repetition": GopherRepetitionFilter(),
        "fineweb": FineWebQualityFilter(),
        "c4": C4QualityFilter(),
    }
    for rule in filters.values():
        rule.filter(Document("Warm up. Once more.", "0"))
    seconds = dict.fromkeys(filters, 0.0)
    verdicts: dict[str, list[str]] = {name: [] for name in filters}
    cleaned = []
    for i, text in enumerate(texts):
        doc = Document(text, str(i))
        for name, rule in filters.items():
            begin = time.process_time()
            result = rule.filter(doc)
            seconds[name] += time.process_time() - begin
            verdicts[name].append("" if result is True else result[1])
        cleaned.append(doc.text)
    alone = {}
    for name, rule in filters.items():
        docs = [Document(text, str(i)) for i, text in enumerate(texts)]
        begin = time.process_time()
        for doc in docs:
            rule.filter(doc)
        alone[name] = time.process_time() - begin
    result = {"seconds": seconds, "alone": alone, "verdicts": verdicts, "cleaned": cleaned}
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
