import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from stepwell.data import word_hashes
from stepwell.data.decontam import index as module
from stepwell.data.decontam.benchmarks import Benchmark, Item, keys_of
from stepwell.data.decontam.index import TABLES, build_index, item_text, open_index
from stepwell.data.decontam.texts import Part, texts_of_items
from stepwell.data.word_hashes import hash_words, rolling
from stepwell.types import DataError


def sentence(first: int, num: int) -> str:
    return " ".join(f"w{i}" for i in range(first, first + num))


def benchmark(name: str, *items: Item) -> Benchmark:
    return Benchmark(name, f"sha of {name}", False, items)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    items = [
        Item("1", sentence(0, 20), ("x",), ("yes indeed",), sentence(100, 60)),
        Item("2", "Why?"),
    ]
    build_index(
        [benchmark("one", *items), benchmark("two", Item("a", sentence(50, 9)))], tmp_path / "i"
    )
    return tmp_path / "i"


def test_it_comes_back_as_it_was_written(folder):
    index = open_index(folder)
    assert [index.name_of(i) for i in range(3)] == ["one/1", "one/2", "two/a"]
    assert [Part(p) for p in index.parts_T] == [
        Part.ANSWER,
        Part.QUESTION,
        Part.PASSAGE,
        Part.QUESTION,
    ]
    assert index.answers == {0: [0]}
    assert index.item_keys[1] == keys_of(Item("x", "WHY?"))
    assert item_text(folder, "one/1") == f"{sentence(100, 60)}\n{sentence(0, 20)}\nx"
    assert item_text(folder, "one/3") is None
    assert np.array_equal(index.words_of(1), hash_words([sentence(0, 20)]).hashes)
    rows = index.manifest["benchmarks"]
    assert [(r["num_items"], r["num_too_short"], r["gpt3_n"]) for r in rows] == [
        (2, 1, 8),
        (1, 0, 9),
    ]
    assert isinstance(index.tables["8"].grams_G, np.memmap)
    assert open_index(str(folder)).tables["8"].grams_G is index.tables["8"].grams_G


@pytest.mark.parametrize("name", TABLES)
def test_tables_hold_the_ngrams_of_every_text(folder, name):
    table = open_index(folder).tables[name]
    assert (np.diff(table.grams_G.astype(object)) >= 0).all()
    n = {"gpt3": (8, 8, 9), "8": (8, 8, 8), "10": (10, 10, 9)}[name]
    counts = [20 - n[0] + 1, 60 - n[1] + 1, 9 - n[2] + 1]
    assert np.bincount(table.owners_G, minlength=4).tolist() == [0, *counts]
    assert table.lengths == tuple(sorted(set(n)))
    for gram, owner, place in zip(table.grams_G, table.owners_G, table.places_G, strict=True):
        text = open_index(folder).words_of(int(owner))
        length = n[int(owner) - 1]
        assert rolling(text[place : place + length], length)[0] == gram
    assert table.maybe(table.grams_G).all()
    others = np.random.default_rng(0).integers(0, 2**64, 20_000, np.uint64)
    assert table.maybe(others).mean() < 2 / module.SLOTS_PER_GRAM


def test_damage_and_other_versions_are_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="holds no contamination index"):
        open_index(tmp_path)
    for name in ("10-grams.npy", "10-shared.npy", "ids.json", "keys.json", "texts.json"):
        copy = tmp_path / f"damaged-{name}"
        shutil.copytree(folder, copy)
        content = bytearray((copy / name).read_bytes())
        content[-1] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} is missing or damaged"):
            open_index(copy)
        (copy / name).unlink()
        with pytest.raises(DataError, match=f"{name} is missing or damaged"):
            open_index(copy)
    manifest = json.loads((folder / "manifest.json").read_text())
    for change, message in (
        ({"version": 0}, "version 0.1, but this Stepwell reads 2.1"),
        ({"words_version": 9}, "version 2.9"),
        ({"format": "x"}, "holds no contamination index"),
        ({"tables": {}}, "manifest.json is damaged"),
    ):
        (folder / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(DataError, match=message):
            open_index(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="manifest.json is damaged"):
        open_index(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert open_index(folder)
    monkeypatch.setattr(word_hashes, "VERSION", 2)
    with pytest.raises(DataError, match="reads 2.2"):
        module._open.__wrapped__(folder, json.dumps(manifest))


def test_what_makes_no_index(folder, tmp_path):
    with pytest.raises(DataError, match="at least one"):
        build_index([], tmp_path / "x")
    with pytest.raises(DataError, match="two benchmarks are called 'a'"):
        build_index(
            [benchmark("a", Item("1", "q")), benchmark("a", Item("1", "q"))], tmp_path / "x"
        )
    with pytest.raises(DataError, match="exists already"):
        build_index([benchmark("a", Item("1", "q"))], folder)
    assert not (tmp_path / "x").exists()


def test_trivial_benchmarks_make_an_empty_index(tmp_path):
    build_index([benchmark("a", Item("1", "A."), Item("2", "..."))], tmp_path / "x")
    index = open_index(tmp_path / "x")
    assert [len(table.grams_G) for table in index.tables.values()] == [0, 0, 0]
    assert index.manifest["benchmarks"][0]["num_too_short"] == 2


def texts_of(*items: Item) -> list[tuple[int, Part, str, int]]:
    return [(i, t.part, t.text, t.lead) for i, t in texts_of_items(items)]


def test_a_question_counts_alone_from_8_words_or_13_if_it_is_shared():
    assert texts_of(Item("1", sentence(0, 7))) == []
    assert texts_of(Item("1", sentence(0, 8))) == [(0, Part.QUESTION, sentence(0, 8), 0)]
    twice = [Item("1", sentence(0, 12)), Item("2", sentence(0, 12))]
    assert texts_of(*twice) == []
    twice = [Item("1", sentence(0, 13)), Item("2", sentence(0, 13))]
    assert [t[0] for t in texts_of(*twice)] == [0, 1]


def test_a_short_question_counts_with_what_follows_it():
    item = Item(
        "1", "Predators eat", ("lions", "small bunnies"), ("small bunnies of the whole wood",)
    )
    found = texts_of(item)
    assert (0, Part.FOLLOWED_BY_ANSWER, "predators eat small bunnies of the whole wood", 8) in found
    assert (
        0,
        Part.FOLLOWED_BY_ANSWER,
        "predators eat answer small bunnies of the whole wood",
        9,
    ) in found
    lettered = "predators eat options a lions b small bunnies"
    assert (0, Part.FOLLOWED_BY_CHOICES, lettered, 8) in found
    assert {part for _, part, _, _ in found} == {
        Part.ANSWER, Part.FOLLOWED_BY_ANSWER, Part.FOLLOWED_BY_CHOICES,
    }  # fmt: skip


def test_a_passage_below_50_words_is_a_premise():
    short = texts_of(Item("1", "how many", passage=sentence(0, 49)))
    assert [(p, t) for _, p, t, _ in short] == [
        (Part.QUESTION, sentence(0, 49) + " how many"),
        (Part.QUESTION, sentence(0, 49) + " question how many"),
    ]
    assert texts_of(Item("1", "how many", passage=sentence(0, 50))) == [
        (0, Part.PASSAGE, sentence(0, 50), 0)
    ]


def template(i: int) -> str:
    return f"{sentence(0, 20)} {' '.join(f'own{i}x{j}' for j in range(9))}"


def shared_words(folder: Path, *items: Item) -> list[list[bool]]:
    build_index([benchmark("a", *items), benchmark("b", Item("1", template(0)))], folder)
    index = open_index(folder)
    return [index.shared_of(module.RULES["tulu3"], t).tolist() for t in range(len(index.items_T))]


def test_a_template_is_what_more_than_three_items_hold(tmp_path):
    three, four = ([Item(str(i), template(i)) for i in range(n)] for n in (3, 4))
    assert not any(map(any, shared_words(tmp_path / "3", *three)))
    *mine, other = shared_words(tmp_path / "4", *four)
    # 13 of its 8-grams lie in the 20 words; the other benchmark has no template.
    assert mine == [[True] * 13 + [False] * 16] * 4
    assert not any(other)


def test_one_passage_of_several_questions_is_no_template(tmp_path):
    passage = sentence(0, 60)
    asked = [
        Item(str(i), " ".join(f"q{i}x{j}" for j in range(9)), passage=passage) for i in range(6)
    ]
    assert not any(map(any, shared_words(tmp_path / "i", *asked)))


def test_a_text_that_is_nothing_but_template_keeps_it(tmp_path):
    items = [Item(str(i), template(i)) for i in range(4)]
    *others, bare, _ = shared_words(tmp_path / "i", *items, Item("bare", sentence(0, 20)))
    assert not any(bare)
    assert all(map(any, others))
