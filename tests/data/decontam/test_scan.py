"""What is found in documents: the known answers, and that an index agrees with the plain rules."""

import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.data.decontam.benchmarks import Benchmark, Item
from stepwell.data.decontam.index import Index, build_index, open_index
from stepwell.data.decontam.rules import RULES, is_found
from stepwell.data.decontam.scan import MAX_PLACES, find_hits
from stepwell.data.decontam.texts import Part
from stepwell.data.word_hashes import hash_words

QUESTION = (
    "A merchant who bought seventeen barrels of cider sells one third of them at the harbour "
    "before noon; how many barrels remain in his dark cellar?"
)
PASSAGE = " ".join(f"The old bridge number {i} was built by masons of the town." for i in range(9))
ITEMS = (
    Item("q", QUESTION, ("eleven barrels", "twelve barrels"), ("twelve barrels",)),
    Item("p", "when did the masons of the town leave the bridge", (), ("in spring",), PASSAGE),
    Item("a", "A.", ("A.", "..."), ("A.",)),
    Item("d", "...", (), ("...",)),
    Item("s", "Predators eat", ("lions", "bunnies that live in holes"), ("lions",)),
)  # fmt: skip


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Index:
    folder = tmp_path_factory.mktemp("index") / "index"
    build_index([Benchmark("set", "sha", True, ITEMS)], folder)
    return open_index(folder)


def parts(index: Index, text: str, rule: str = "tulu3") -> dict[str, str]:
    return {index.item_ids[h.item]: h.part for h in find_hits([text], index, RULES[rule])[0]}


def test_the_question_has_26_words():
    assert len(hash_words([QUESTION]).hashes) == 26


@pytest.mark.parametrize("rule", RULES)
def test_wrapping_case_and_line_ends_hide_nothing(index, rule):
    words = QUESTION.split()
    lines = [" ".join(words[i : i + 8]) for i in range(0, len(words), 8)]
    text = "Some page.\r\n\r\n" + "\r\n".join(lines).upper() + "\r\n\r\nMore text."
    assert parts(index, text, rule) == {"q": "question"}


@pytest.mark.parametrize("rule", RULES)
def test_trivial_items_are_never_flagged(index, rule):
    text = "A. ... a. A! ... Predators eat. A. A. A. A. A. A. A. A. ... twelve barrels in spring"
    assert parts(index, text, rule) == {}


def test_question_answer_and_passage(index):
    assert parts(index, f"{QUESTION} Twelve barrels!") == {"q": "question+answer"}
    choices = "A) eleven barrels B) twelve barrels"
    assert parts(index, f"{QUESTION}\n{choices}") == {"q": "question+answer"}
    assert parts(index, f"Twelve barrels. {QUESTION}") == {"q": "question"}
    window = int(index.windows_I[0])
    assert window == 30 + 3 + 3
    filler = " ".join(f"x{i}" for i in range(window))
    assert parts(index, f"{QUESTION} {filler} twelve barrels") == {"q": "question+answer"}
    assert parts(index, f"{QUESTION} {filler} x twelve barrels") == {"q": "question"}
    assert parts(index, PASSAGE) == {"p": "passage"}
    assert parts(index, f"{PASSAGE} {ITEMS[1].question}?") == {"p": "question"}
    assert parts(index, f"{PASSAGE} {ITEMS[1].question}? In spring.") == {"p": "question+answer"}


def test_a_short_question_needs_what_follows_it(index):
    assert parts(index, "Predators eat: A. lions B. bunnies that live in holes") == {
        "s": "question+answer"
    } or parts(index, "Predators eat: A. lions B. bunnies that live in holes") == {"s": "question"}
    assert parts(index, "lions a bunnies that live in holes") == {}
    assert parts(index, "predators eat lions and bunnies that live in holes") == {}


def test_a_long_answer_alone_is_an_answer(tmp_path):
    solution = " ".join(f"step{i} follows" for i in range(20))
    items = (Item("1", "Prove that every even number above two is fine.", (), (solution,)),)
    build_index([Benchmark("set", "sha", True, items)], tmp_path / "i")
    index = open_index(tmp_path / "i")
    assert parts(index, f"so {solution}.") == {"1": "answer"}
    text = f"{items[0].question} {' '.join(['and'] * 900)} {solution}"
    assert parts(index, text) == {"1": "question+answer"}


def test_hits_come_strongest_first(index):
    (hits,) = find_hits([f"{PASSAGE}\n{QUESTION}"], index, RULES["tulu3"])
    assert [h.part for h in hits] == ["question", "passage"]
    assert hits[0].share == 1.0
    assert hits[0].word == len(hash_words([PASSAGE]).hashes)
    assert hits[1].word == 0


WORDS = st.lists(st.sampled_from([f"w{i}" for i in range(12)]), min_size=0, max_size=40)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(questions=st.lists(WORDS, min_size=1, max_size=8), documents=st.lists(WORDS, max_size=5))
def test_an_index_agrees_with_the_rules(tmp_path_factory, questions, documents):
    """For every rule, text and document: found over the index exactly when `is_found` says so."""
    # Parts of the questions, so that there is something to be found.
    documents = [*documents, questions[0][:12], questions[-1][3:] + ["x"] + questions[0]]
    items = tuple(Item(str(i), " ".join(q) or "x") for i, q in enumerate(questions))
    folder = tmp_path_factory.mktemp("index") / "index"
    build_index([Benchmark("set", "sha", True, items)], folder)
    index = open_index(folder)
    texts = [" ".join(d) for d in documents]
    for rule in RULES.values():
        n = index.manifest["benchmarks"][0]["gpt3_n"] if rule.n is None else rule.n
        for text, hits in zip(texts, find_hits(texts, index, rule), strict=True):
            expected = {
                int(index.items_T[t])
                for t in range(len(index.items_T))
                if is_found(
                    rule,
                    index.words_of(t),
                    hash_words([text]).hashes,
                    n,
                    shared=index.shared_of(rule, t),
                )
            }
            assert {h.item for h in hits} == expected


LONG = st.lists(
    st.text("abcdefghij", min_size=1, max_size=6), min_size=13, max_size=40, unique=True
)
SPACE = st.sampled_from([" ", "\n", "\r\n", "\t", "  \n ", ", ", " -- ", "\u00a0", "\\n"])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(words=LONG, data=st.data())
def test_no_dress_hides_a_question_of_13_words(tmp_path_factory, words, data):
    folder = tmp_path_factory.mktemp("index") / "index"
    build_index([Benchmark("set", "sha", True, (Item("1", " ".join(words)),))], folder)
    cases = st.sampled_from([str.upper, str.lower, str.title])
    spaces = data.draw(st.lists(SPACE, min_size=len(words), max_size=len(words)))
    dressed = "".join(data.draw(cases)(w) + s for w, s in zip(words, spaces, strict=True))
    text = f"Zzz yyy.{spaces[0]}{dressed}{spaces[-1]}xxx www"
    for rule in RULES.values():
        (hits,) = find_hits([text], open_index(folder), rule)
        assert [h.item for h in hits] == [0]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=200), max_size=5))
def test_documents_without_overlap_are_never_flagged(index, texts):
    """No word of these texts is in the benchmark: each gets a prefix of its own."""
    foreign = [" ".join(f"zq{word}" for word in text.split()) for text in texts]
    for rule in RULES.values():
        assert find_hits(foreign, index, rule) == [[] for _ in texts]


def test_a_document_that_repeats_itself_costs_little(index):
    """One n-gram is looked at MAX_PLACES times; the question after them is found all the same."""
    head = " ".join(QUESTION.split()[:9])
    text = f"{head}. " * (MAX_PLACES * 50)
    assert parts(index, text) == {}
    assert parts(index, text + QUESTION) == {"q": "question"}


def test_other_scripts(tmp_path: Path):
    items = (Item("zh", "小明有三个苹果，给了小红一个，又买了五个，现在他一共有几个苹果？"),)
    build_index([Benchmark("set", "sha", True, items)], tmp_path / "i")
    index = open_index(tmp_path / "i")
    wrapped = "\n".join(textwrap.wrap(items[0].question, 6))
    assert parts(index, f"题目：\n{wrapped}\n答案") == {"zh": "question"}
    assert parts(index, "小明有三个苹果。天气很好，我们去公园。") == {}


def test_texts_of_a_batch_don_t_flow_into_each_other(index):
    words = QUESTION.split()
    halves = [" ".join(words[:6]), " ".join(words[6:12]), " ".join(words[12:])]
    # The last half of 26 words is 14: above the threshold by itself.
    found = find_hits(halves[:2], index, RULES["tulu3"])
    assert found == [[], []]
    assert find_hits([], index, RULES["tulu3"]) == []
    assert np.all(index.parts_T <= Part.FOLLOWED_BY_CHOICES)


SCENE = (
    "For which of these two scenes does the main character who tells of it in the first person do "
    "something that is clearly wrong by the ordinary standards of a town? Scene one: {} "
    "Scene two: {}"
)
SCENES = [
    f"I brought my {a} {b} to the {c} {d} because it was {e} and nobody there had seen one before."
    for a, b, c, d, e in zip(
        ("red", "old", "new", "tame", "best", "last"),
        ("drum", "goat", "lamp", "cart", "coat", "book"),
        ("town", "lake", "hill", "yard", "barn", "fair"),
        ("square", "shore", "top", "wall", "door", "stall"),
        ("late", "warm", "dark", "cold", "wet", "dry"),
        strict=True,
    )
]


@pytest.mark.parametrize("rule", RULES)
def test_an_item_does_not_condemn_others_of_its_template(tmp_path, rule):
    items = tuple(
        Item(str(i), SCENE.format(one, " ".join(reversed(one.split()))))
        for i, one in enumerate(SCENES)
    )
    build_index([Benchmark("scenes", "sha", True, items)], tmp_path / "i")
    index = open_index(tmp_path / "i")
    for i, item in enumerate(items):
        wrapped = "\r\n".join(textwrap.wrap(f"Once more. {item.question} And so on.", 40))
        assert parts(index, wrapped.upper(), rule) == {str(i): "question"}
    assert parts(index, SCENE, rule) == {}
    # Without others beside it, it is no template.
    build_index([Benchmark("scenes", "sha", True, items[:1])], tmp_path / "j")
    assert parts(open_index(tmp_path / "j"), SCENE, "gpt3") == {"0": "question"}


def test_a_short_question_of_a_template_needs_only_its_own_words(tmp_path):
    items = tuple(
        Item(str(i), "Which of the following statements is true", (f"a {x} b {x}", f"c{x} d e {x}"))
        for i, x in enumerate(("p", "q", "r", "s", "t"))
    )
    build_index([Benchmark("set", "sha", True, items)], tmp_path / "i")
    index = open_index(tmp_path / "i")
    for i, item in enumerate(items):
        text = f"{item.question}? A. {item.choices[0]} B. {item.choices[1]}"
        assert parts(index, text) == {str(i): "question"}
