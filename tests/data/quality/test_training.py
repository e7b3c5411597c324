"""A classifier of real text: the standard library's prose against its code."""

import json
import shutil
from functools import lru_cache
from itertools import islice

import numpy as np
import pytest

from stepwell.data.batches import to_batch
from stepwell.data.quality.classifier import QualityScore, load_classifier, prepare, read_classifier
from stepwell.data.quality.training import Example, Settings, train_classifier
from stepwell.data.sources.python_library import stdlib_code, stdlib_prose
from stepwell.types import DataError, Document

SMALL = Settings(dim=8, buckets=4096, epochs=5, heldout=0.25, max_chars=2000)


@lru_cache(maxsize=1)
def real_examples() -> list[Example]:
    prose = [d for d in islice(stdlib_prose(), 420) if isinstance(d, Document)]
    code = [d for d in islice(stdlib_code(), 260) if isinstance(d, Document)]
    return [Example(d.text, 1) for d in prose] + [Example(d.text, 0) for d in code]


def sentences(level: int, num: int, word: str) -> list[Example]:
    return [Example(f"{word} number {i} is {word} of kind {i % 7}", level) for i in range(num)]


SENTENCES = sentences(1, 60, "water") + sentences(0, 60, "stone")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier") / "model"
    settings = SMALL.model_copy(update={"epochs": 15})
    return folder, train_classifier(real_examples(), folder, "binary", settings)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The card of a model of short sentences."""
    return train_classifier(SENTENCES, tmp_path_factory.mktemp("plain") / "m", "binary", SMALL)


def test_it_tells_prose_from_code_that_it_has_not_seen(trained):
    _, card = trained
    metrics = card["metrics"]
    assert metrics["num"] == sum(card["examples"]["heldout"].values()) > 100
    # Above .95 on the library of Python 3.11, .94 on that of 3.12.
    assert metrics["precision"] > 0.9
    assert metrics["recall"] > 0.9
    assert metrics["roc_auc"] > 0.98
    assert metrics["calibration"]["error"] < 0.1


def test_the_card_is_the_models(trained):
    folder, card = trained
    assert json.loads((folder / "card.json").read_text("utf-8")) == card
    assert sorted(p.name for p in folder.iterdir()) == ["card.json", "model.bin"]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["model"]
    share = card["metrics"]["num"] / (
        card["metrics"]["num"] + sum(card["examples"]["train"].values())
    )
    assert 0.2 < share < 0.3


def test_order_changes_nothing_and_a_seed_does(tmp_path, plain):
    same = train_classifier(SENTENCES[::-1], tmp_path / "b", "binary", SMALL)
    seeded = SMALL.model_copy(update={"seed": 1})
    other = train_classifier(SENTENCES, tmp_path / "c", "binary", seeded)
    assert same == plain
    assert other["model_sha256"] != plain["model_sha256"]


@pytest.mark.parametrize(
    "knob",
    [{"dim": 4}, {"word_ngrams": 1}, {"buckets": 64}, {"epochs": 1}, {"learning_rate": 0.1},
     {"min_count": 30}, {"heldout": 0.5}, {"max_chars": 20}],
)  # fmt: skip
def test_every_setting_changes_the_model(tmp_path, plain, knob):
    other = train_classifier(SENTENCES, tmp_path / "b", "binary", SMALL.model_copy(update=knob))
    assert plain["model_sha256"] != other["model_sha256"]


def test_the_threshold_is_the_reports(tmp_path, trained):
    folder, _ = trained
    classifier = read_classifier(str(folder))
    assert classifier.card["metrics"]["threshold"] == 0.5
    never = SMALL.model_copy(update={"threshold": 1.5})
    metrics = train_classifier(SENTENCES, tmp_path / "m", "binary", never)["metrics"]
    assert (metrics["precision"], metrics["recall"]) == (None, 0.0)


def test_repeated_and_contradicting_texts(tmp_path):
    more = [*SENTENCES[:5], Example("Said twice", 0), Example("Said  twice", 1), Example(" ", 1)]
    card = train_classifier(SENTENCES + more, tmp_path / "m", "binary", SMALL)
    assert (card["examples"]["repeated"], card["examples"]["conflicting"]) == (6, 1)
    assert sum(sum(card["examples"][part].values()) for part in ("train", "heldout")) == 120


def test_scores_from_0_to_5(tmp_path):
    words = ["mud", "stone", "water", "well", "spring", "river"]
    examples = [e for level, word in enumerate(words) for e in sentences(level, 60, word)]
    card = train_classifier(examples, tmp_path / "m", "scores", SMALL)
    metrics = card["metrics"]
    assert metrics["threshold"] == 3
    assert metrics["accuracy"] > 0.9
    assert metrics["mean_absolute_error"] < 0.4
    assert metrics["precision"] > 0.9
    scores = read_classifier(str(tmp_path / "m")).score([f"{w} is {w}" for w in words])
    assert np.all(np.diff(scores) > 0)
    assert 0 <= scores.min() <= scores.max() <= 5


def test_what_cannot_be_trained_is_refused_and_leaves_nothing(tmp_path):
    for examples in (
        [],
        sentences(1, 50, "water"),
        [*sentences(1, 50, "water"), Example("x", 0), Example("x", 1)],
        [*sentences(1, 50, "water"), Example("stone", 0)],
    ):
        with pytest.raises(DataError, match="at least two labels"):
            train_classifier(examples, tmp_path / "m", "binary", SMALL)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "m").mkdir()
    with pytest.raises(DataError, match="exists already"):
        train_classifier(sentences(1, 50, "water"), tmp_path / "m", "binary", SMALL)


def test_a_texts_own_labels_mean_nothing(tmp_path):
    """fastText would take these for labels, and the end sign for the end of the text."""
    assert "__label__" not in prepare("a __label__positive b", 99).split()[1]
    hostile = [Example(f"__label__positive mud {i} </s> water", 0) for i in range(60)]
    card = train_classifier(hostile + sentences(1, 60, "water"), tmp_path / "m", "binary", SMALL)
    assert card["metrics"]["precision"] == 1.0
    model = read_classifier(str(tmp_path / "m"))
    assert sorted(model.model.get_labels()) == ["__label__negative", "__label__positive"]
    assert prepare("a\0b\n\nc \ud800", 99) == "a b c ?"
    assert prepare("abcdef", 3) == "abc"


def test_scores_dont_depend_on_the_batch(trained):
    folder, _ = trained
    texts = [e.text for e in real_examples()[::150]] + ["", "\n\n", "x"]
    docs = [Document(str(i), text, "s") for i, text in enumerate(texts)]
    step = QualityScore(model=str(folder))
    whole = step(to_batch(docs, 0)).kept
    assert str(whole.schema.field("quality").type) == "float"
    alone = [step(to_batch([doc], 0)).kept["quality"][0].as_py() for doc in docs]
    assert whole["quality"].to_pylist() == alone
    assert step(to_batch([], 0)).kept.num_rows == 0
    assert (
        "good" in QualityScore(model=str(folder), label="good")(to_batch(docs, 0)).kept.schema.names
    )
    assert load_classifier(str(folder)) is load_classifier(str(folder))


def test_damaged_models_are_refused(trained, tmp_path):
    folder, card = trained
    with pytest.raises(DataError, match="holds no quality classifier"):
        read_classifier(str(tmp_path / "none"))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert load_classifier(str(copy)) is load_classifier(str(copy))
    with (copy / "model.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="another sha256"):
        load_classifier(str(copy))
    with pytest.raises(DataError, match="another sha256"):
        read_classifier(str(copy))
    (copy / "card.json").write_text(json.dumps({**card, "format": 2}))
    with pytest.raises(DataError, match="format 2"):
        read_classifier(str(copy))
