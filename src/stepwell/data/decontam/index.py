"""A saved index of benchmarks: hashes of n-grams, sorted, and the texts that they come from.

A folder of numpy arrays, lists in JSON, and `manifest.json`; arrays are memory-mapped, so that
processes share them. `T` texts (the parts of all items), `G` n-grams of a table.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.data import word_hashes
from stepwell.data.decontam.benchmarks import Benchmark, Item, Keys, keys_of
from stepwell.data.decontam.rules import (
    GPT3_LENGTHS,
    MAX_HOLDERS,
    RULES,
    Rule,
    gpt3_length,
    telling,
)
from stepwell.data.decontam.texts import MIN_WORDS, ItemText, Part, answer_window, texts_of_items
from stepwell.data.files import file_sha256, new_folder
from stepwell.data.word_hashes import Words, hash_words, ngrams
from stepwell.types import DataError

VERSION = 2
FORMAT = "stepwell contamination index"
TABLES = tuple(dict.fromkeys(rule.table for rule in RULES.values()))
TABLE_COLUMNS = ("grams", "owners", "places", "shared")
TEXT_COLUMNS = ("items", "parts", "leads", "bounds", "hashes", "windows", "benchmarks")
SLOTS_PER_GRAM = 16


@dataclass(frozen=True)
class Table:
    """lengths: of the n-grams in it. grams_G: uint64, sorted. owners_G, places_G: uint32, the text
    and the first word in it. shared: bool, for each word of all texts whether the n-gram that
    begins there is left out because it is a template's. slots: bool, True wherever the high bits of
    some gram point."""

    lengths: tuple[int, ...]
    grams_G: np.ndarray
    owners_G: np.ndarray
    places_G: np.ndarray
    shared: np.ndarray

    @cached_property
    def slots(self) -> np.ndarray:
        slots = np.zeros(1 << self._num_bits, bool)
        slots[self.grams_G >> self._shift] = True
        return slots

    def maybe(self, grams: np.ndarray) -> np.ndarray:
        """False where a gram is certainly not in the table; True for one in SLOTS_PER_GRAM of the
        others."""
        return self.slots[grams >> self._shift]

    @property
    def _num_bits(self) -> int:
        return max(len(self.grams_G) * SLOTS_PER_GRAM, 2).bit_length()

    @property
    def _shift(self) -> np.uint64:
        return np.uint64(64 - self._num_bits)


@dataclass(frozen=True)
class Index:
    """items_T, parts_T: the item and the Part that a text is. leads_T: `ItemText.lead`. bounds_T1:
    text t is the words hashes[bounds[t]:bounds[t + 1]]. windows_I: for each item, where its answer
    may stand. benchmarks_I: the benchmark of each item, and item_ids and item_keys their ids and
    keys, all in order."""

    manifest: Mapping[str, Any]
    item_ids: Sequence[str]
    item_keys: Sequence[Keys]
    items_T: np.ndarray
    parts_T: np.ndarray
    leads_T: np.ndarray
    bounds_T1: np.ndarray
    hashes: np.ndarray
    windows_I: np.ndarray
    benchmarks_I: np.ndarray
    tables: Mapping[str, Table]

    def name_of(self, item: int) -> str:
        """`benchmark/item`."""
        benchmark = self.manifest["benchmarks"][self.benchmarks_I[item]]
        return f"{benchmark['name']}/{self.item_ids[item]}"

    def words_of(self, text: int) -> np.ndarray:
        return self.hashes[self.bounds_T1[text] : self.bounds_T1[text + 1]]

    def shared_of(self, rule: Rule, text: int) -> np.ndarray:
        """For each word of a text: `Table.shared`."""
        return self.tables[rule.table].shared[self.bounds_T1[text] : self.bounds_T1[text + 1]]

    def length_of(self, rule: Rule, text: int) -> int:
        """The rule's n for a text, or all of its words where it has fewer."""
        benchmark = self.manifest["benchmarks"][self.benchmarks_I[self.items_T[text]]]
        n = benchmark["gpt3_n"] if rule.n is None else rule.n
        return min(n, int(self.bounds_T1[text + 1] - self.bounds_T1[text]))

    @cached_property
    def answers(self) -> Mapping[int, list[int]]:
        """item -> its texts that are answers."""
        found: dict[int, list[int]] = {}
        for text in np.flatnonzero(self.parts_T == Part.ANSWER).tolist():
            found.setdefault(int(self.items_T[text]), []).append(text)
        return found


def build_index(benchmarks: Sequence[Benchmark], folder: str | Path) -> None:
    """Writes a new folder. Raises DataError for no benchmark, two of one name, and a folder that
    exists."""
    if not benchmarks:
        raise DataError("an index needs at least one benchmark")
    names = Counter(benchmark.name for benchmark in benchmarks)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise DataError(f"two benchmarks are called {twice[0]!r}; name one NAME=FILE")
    items = [(b, item) for b, benchmark in enumerate(benchmarks) for item in benchmark.items]
    texts: list[tuple[int, ItemText]] = []
    first = 0
    for benchmark in benchmarks:
        texts += [(first + i, text) for i, text in texts_of_items(benchmark.items)]
        first += len(benchmark.items)
    words = hash_words([text.text for _, text in texts])
    items_T = np.array([i for i, _ in texts], np.uint32)
    parts_T = np.array([text.part for _, text in texts], np.uint8)
    benchmarks_I = np.array([b for b, _ in items], np.uint32)
    arrays = {
        "items": items_T,
        "parts": parts_T,
        "leads": np.array([text.lead for _, text in texts], np.uint32),
        "bounds": words.bounds,
        "hashes": words.hashes,
        "windows": np.array([answer_window(item) for _, item in items], np.uint32),
        "benchmarks": benchmarks_I,
    }
    lengths_T = np.diff(words.bounds)
    longest_I = np.zeros(len(items), np.int64)
    asks_T = _is_question(parts_T)
    np.maximum.at(longest_I, items_T[asks_T], lengths_T[asks_T])
    gpt3 = [gpt3_length(longest_I[benchmarks_I == b].tolist()) for b in range(len(benchmarks))]
    holders_T = _holders(texts)
    tables = {}
    for name in TABLES:
        n_T = np.array(gpt3)[benchmarks_I[items_T]] if name == "gpt3" else int(name)
        n_T = np.minimum(n_T, lengths_T)
        columns = _table(words, n_T, holders_T, benchmarks_I[items_T])
        arrays |= {f"{name}-{column}": columns[column] for column in TABLE_COLUMNS}
        tables[name] = np.unique(n_T[n_T >= MIN_WORDS]).tolist()
    rows = [
        {
            "name": benchmark.name,
            "sha256": benchmark.sha256,
            "own_ids": benchmark.own_ids,
            "num_items": len(benchmark.items),
            "num_too_short": int((longest_I[benchmarks_I == b] < MIN_WORDS).sum()),
            "num_dropped": len(benchmark.dropped),
            "gpt3_n": gpt3[b],
        }
        for b, benchmark in enumerate(benchmarks)
    ]
    lists = {
        "ids": [item.id for _, item in items],
        "keys": [keys_of(item) for _, item in items],
        "texts": [_shown(item) for _, item in items],
    }
    _write(Path(folder), rows, tables, arrays, lists)


def _shown(item: Item) -> str:
    """For people."""
    parts = (item.passage, item.question, *item.choices)
    return "\n".join(part.strip() for part in parts if part.strip())


def item_text(folder: str | Path, name: str) -> str | None:
    """What the item `benchmark/id` of an index asks, with its passage and choices. None where the
    index has no such item; raises DataError as `open_index` does."""
    index = open_index(folder)
    numbers = [i for i in range(len(index.item_ids)) if index.name_of(i) == name]
    if not numbers:
        return None
    return _read_list(Path(folder), "texts")[numbers[0]]


def _holders(texts: Sequence[tuple[int, ItemText]]) -> np.ndarray:
    """Who holds each text: the first item that has it, word for word. Several questions on one
    passage hold it as one."""
    first: dict[str, int] = {}
    return np.array([first.setdefault(text.text, item) for item, text in texts], np.int64)


def _is_question(parts: np.ndarray) -> np.ndarray:
    return (parts != Part.ANSWER) & (parts != Part.PASSAGE)


def _table(
    words: Words, n_T: np.ndarray, holders_T: np.ndarray, benchmarks_T: np.ndarray
) -> dict[str, np.ndarray]:
    """The n-grams of each text, n_T words long; none of a text of fewer than MIN_WORDS, and none
    that more than MAX_HOLDERS items of its benchmark hold, unless a text has no other."""
    text_of_word = np.repeat(np.arange(len(n_T)), np.diff(words.bounds))
    parts = [(np.zeros(0, np.uint64), np.zeros(0, np.int64))]
    for n in np.unique(n_T[n_T >= MIN_WORDS]).tolist():
        grams, places = ngrams(words, n)
        mine = (n_T[text_of_word[places]] == n) & telling(words.hashes, places, n)
        parts.append((grams[mine], places[mine]))
    grams = np.concatenate([g for g, _ in parts])
    places = np.concatenate([p for _, p in parts])
    order = np.argsort(grams, kind="stable")
    grams, places = grams[order], places[order]
    owners = text_of_word[places]
    is_shared = _is_shared(grams, benchmarks_T[owners], holders_T[owners])
    left_T = np.bincount(owners, ~is_shared, len(n_T))
    is_shared &= left_T[owners] > 0
    shared = np.zeros(len(words.hashes), bool)
    shared[places[is_shared]] = True
    grams, places, owners = (column[~is_shared] for column in (grams, places, owners))
    return {
        "grams": grams,
        "owners": owners.astype(np.uint32),
        "places": (places - words.bounds[owners]).astype(np.uint32),
        "shared": shared,
    }


def _is_shared(grams: np.ndarray, benchmarks: np.ndarray, holders: np.ndarray) -> np.ndarray:
    """Which entries belong to a gram that more than MAX_HOLDERS holders of one benchmark have."""
    if not len(grams):
        return np.zeros(0, bool)
    order = np.lexsort([holders, benchmarks, grams])
    grams, benchmarks, holders = grams[order], benchmarks[order], holders[order]
    new = np.r_[True, (grams[1:] != grams[:-1]) | (benchmarks[1:] != benchmarks[:-1])]
    counted = new | np.r_[True, holders[1:] != holders[:-1]]
    group = np.cumsum(new) - 1
    found = np.empty(len(grams), bool)
    found[order] = np.bincount(group, counted)[group] > MAX_HOLDERS
    return found


def _write(
    folder: Path,
    benchmarks: list[dict[str, Any]],
    tables: Mapping[str, list[int]],
    arrays: Mapping[str, np.ndarray],
    lists: Mapping[str, list[Any]],
) -> None:
    with new_folder(folder) as target:
        for name, array in arrays.items():
            np.save(target / f"{name}.npy", array)
        for name, values in lists.items():
            (target / f"{name}.json").write_text(json.dumps(values), "utf-8")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "words_version": word_hashes.VERSION,
            "min_words": MIN_WORDS,
            "gpt3_lengths": GPT3_LENGTHS,
            "max_holders": MAX_HOLDERS,
            "benchmarks": benchmarks,
            "tables": tables,
            "files": {path.name: file_sha256(path) for path in sorted(target.iterdir())},
        }
        manifest["digest"] = _digest(manifest)
        (target / "manifest.json").write_text(json.dumps(manifest, indent=1), "utf-8")


def open_index(folder: str | Path) -> Index:
    """Opened once a process, as long as the manifest stays the same.

    Raises DataError for a folder without an index, one of another version, and a damaged one.
    """
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        raise DataError(
            f"{folder} holds no contamination index; `stepwell decontam-index` makes one"
        )
    return _open(Path(folder), path.read_text("utf-8", errors="replace"))


@lru_cache(maxsize=4)
def _open(folder: Path, manifest_text: str) -> Index:
    manifest = _checked_manifest(folder, manifest_text)
    for name, expected in manifest["files"].items():
        if not (folder / name).is_file() or file_sha256(folder / name) != expected:
            raise DataError(f"{folder / name} is missing or damaged; make the index anew")
    arrays = {name: _load(folder, name) for name in TEXT_COLUMNS}
    tables = {
        name: Table(
            tuple(lengths),
            *(_load(folder, f"{name}-{column}") for column in TABLE_COLUMNS),
        )
        for name, lengths in manifest["tables"].items()
    }
    return Index(
        manifest,
        _read_list(folder, "ids"),
        [Keys(*keys) for keys in _read_list(folder, "keys")],
        items_T=arrays["items"],
        parts_T=arrays["parts"],
        leads_T=arrays["leads"],
        bounds_T1=arrays["bounds"],
        hashes=arrays["hashes"],
        windows_I=arrays["windows"],
        benchmarks_I=arrays["benchmarks"],
        tables=tables,
    )


def _checked_manifest(folder: Path, text: str) -> dict[str, Any]:
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise DataError(f"{folder}/manifest.json is damaged ({error}); make it anew") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{folder} holds no contamination index")
    versions = (manifest.get("version"), manifest.get("words_version"))
    if versions != (VERSION, word_hashes.VERSION):
        raise DataError(
            f"{folder} is an index of version {versions[0]}.{versions[1]}, but this Stepwell reads "
            f"{VERSION}.{word_hashes.VERSION}; make it anew with `stepwell decontam-index`"
        )
    if manifest.pop("digest", "") != _digest(manifest):
        raise DataError(f"{folder}/manifest.json is damaged; make the index anew")
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_list(folder: Path, name: str) -> list[Any]:
    return json.loads((folder / f"{name}.json").read_text("utf-8"))


def _load(folder: Path, name: str) -> np.ndarray:
    path = folder / f"{name}.npy"
    # An empty array cannot be mapped.
    empty = np.load(path, mmap_mode=None) if path.stat().st_size <= 128 else None
    return np.load(path, mmap_mode="r") if empty is None else empty
