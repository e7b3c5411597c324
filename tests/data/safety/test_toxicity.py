from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import ValidationError

from stepwell.data.batches import to_batch, with_column
from stepwell.data.quality.training import Example, Settings, train_classifier
from stepwell.data.safety.toxicity import (
    Toxicity,
    ToxicWords,
    masked,
    pieces_of,
    read_lists,
    toxic_words,
    toxicity,
)
from stepwell.types import ConfigError, DataError, Document

# Mild words stand for the lists' real ones.
ENGLISH = ["darn", "heck no", "ass", "h3ck", "D'oh", "b&b", "two words here"]


@pytest.fixture
def lists(tmp_path) -> Path:
    (tmp_path / "en.txt").write_text("\n".join(ENGLISH) + "\n\n", "utf-8")
    (tmp_path / "de.json").write_text(json.dumps(["Mist", "Große Güte", "heck"]), "utf-8")
    (tmp_path / "ja.txt").write_text("ばか\n", "utf-8")
    (tmp_path / "hi.txt").write_text("गधा\n", "utf-8")
    (tmp_path / "package.json").write_text(json.dumps({"name": "words"}), "utf-8")
    return tmp_path


def batch_of(*texts: str, languages: list[str | None] | None = None) -> pa.RecordBatch:
    batch = to_batch([Document(str(i), t, "web") for i, t in enumerate(texts)], 0)
    return with_column(batch, "language", languages, pa.string()) if languages else batch


def counts(lists: Path, text: str, *languages: str) -> dict[str, int]:
    return dict(toxic_words(text, list(read_lists(str(lists), languages).values())))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Darn, DARN it; darn!", {"darn": 3}),
        ("I said heck  no. Heck-no! HECK\nNO", {"heck no": 3}),
        ("what the heck", {}),
        ("a classic assassin passes Scunthorpe, darning", {}),
        ("kick-ass 'ass' (ass)", {"ass": 3}),
        ("d’oh d'oh doh", {"d'oh": 2}),
        ("a b&b, ab&b, b & b", {"b&b": 1}),
        ("\uff44\uff41\uff52\uff4e d\u200barn", {"darn": 2}),
        ("two words here, two words there", {"two words here": 1}),
        ("two two words here", {"two words here": 1}),
        ("", {}),
    ],
)
def test_whole_words_and_phrases(lists, text, expected):
    assert counts(lists, text, "en") == expected


def test_scripts_without_blanks_and_with_vowel_signs(lists):
    assert counts(lists, "おまえはばかだ、ばか", "ja") == {"ばか": 2}
    assert counts(lists, "वह गधा है", "hi") == {"गधा": 1}
    assert counts(lists, "गध गधाओं", "hi") == {}


def test_a_document_is_held_against_its_own_language(lists):
    texts = ["heck", "heck", "heck", "heck"]
    batch = batch_of(*texts, languages=["en", "de", "fr", None])
    step = ToxicWords(lists=str(lists))
    assert step(batch).kept["toxic_words"].to_pylist() == [0, 1, None, 1]
    assert step(batch).kept.schema.field("toxic_words").type == pa.int32()
    every = ToxicWords(lists=str(lists), by_language=False)
    assert every(batch).kept["toxic_words"].to_pylist() == [1, 1, 1, 1]
    english = ToxicWords(lists=str(lists), by_language=False, languages=("en",))
    assert english(batch).kept["toxic_words"].to_pylist() == [0, 0, 0, 0]


def test_one_file_is_for_every_language(tmp_path):
    (tmp_path / "banned.txt").write_text("darn\n")
    step = ToxicWords(lists=str(tmp_path / "banned.txt"))
    kept = step(batch_of("darn", "darn", languages=["fr", None])).kept
    assert kept["toxic_words"].to_pylist() == [1, 1]


def test_max_hits_on_both_sides(lists):
    batch = batch_of("none", "darn", "darn darn ass")
    for limit, kept in [(0, 1), (1, 2), (2, 2), (3, 3)]:
        assert ToxicWords(lists=str(lists), max_hits=limit)(batch).kept.num_rows == kept
    removed = ToxicWords(lists=str(lists), max_hits=1)(batch).removed.to_pylist()
    assert [r["reason"] for r in removed] == ["toxic_words"]
    assert removed[0]["detail"] == "3 > 1: d*** x2, a** x1"


def test_max_fraction_on_both_sides(lists):
    batch = batch_of("darn " + "x" * 35)  # 4 of 40 characters
    assert ToxicWords(lists=str(lists), max_fraction=0.1)(batch).kept.num_rows == 1
    outcome = ToxicWords(lists=str(lists), max_fraction=0.09)(batch)
    assert outcome.kept.num_rows == 0
    assert "0.1000 > 0.09" in outcome.removed["detail"][0].as_py()


def test_the_audit_masks_words():
    from collections import Counter

    hits = Counter({f"word{i}": i for i in range(1, 8)}) + Counter({"heck no": 9})
    text = masked(hits)
    assert text.startswith("h*** n* x9, w**** x7")
    assert text.endswith("and 3 more")
    assert "heck" not in text


def test_a_list_that_is_written_anew_is_read_anew(tmp_path):
    path = tmp_path / "en.txt"
    path.write_text("heck\n")
    assert read_lists(str(tmp_path))["en"].words == {"heck"}
    assert read_lists(str(tmp_path)) is read_lists(str(tmp_path))
    path.write_text("darn\nheck\n")
    assert read_lists(str(tmp_path))["en"].words == {"darn", "heck"}
    assert read_lists(str(path))["en"].words == {"darn", "heck"}


def test_lists_that_are_none(tmp_path, lists):
    with pytest.raises(ConfigError, match="there is no word list"):
        read_lists(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no list for 'dee' .did you mean 'de'"):
        read_lists(str(lists), ("dee",))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="holds no word lists"):
        read_lists(str(empty))
    (tmp_path / "fr.json").write_text("[1, 2")
    with pytest.raises(DataError, match="is no word list"):
        read_lists(str(tmp_path / "fr.json"))
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(DataError, match="needs an entry a line"):
        read_lists(str(tmp_path / "blank.txt"))


KIND = "what a lovely day to walk in the garden with a good friend"
UGLY = "you stupid awful person go away I hate you so much idiot"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> str:
    rng = random.Random(0)
    examples = [
        Example(" ".join(rng.choices(words.split(), k=12)), level)
        for words, level in ((UGLY, 1), (KIND, 0))
        for _ in range(150)
    ]
    folder = tmp_path_factory.mktemp("classifiers") / "toxic"
    train_classifier(examples, folder, "binary", Settings(min_count=1, dim=8, epochs=20))
    return str(folder)


def test_classifier_scores_and_cuts(classifier):
    batch = batch_of(KIND, UGLY, " \n ")
    outcome = Toxicity(model=classifier)(batch)
    low, high, none = outcome.kept["toxicity"].to_pylist()
    assert low < 0.3 < 0.7 < high <= 1
    assert none is None
    assert outcome.kept.schema.field("toxicity").type == pa.float32()
    cut = Toxicity(model=classifier, max_score=0.5)(batch)
    assert cut.kept["id"].to_pylist() == ["0", "2"]
    assert cut.removed["reason"].to_pylist() == ["toxic"]
    assert Toxicity(model=classifier, max_score=1.0)(batch).kept.num_rows == 3


def test_the_worst_piece_counts(classifier):
    long = " ".join([KIND] * 60 + [UGLY] * 2 + [KIND] * 60)
    whole, by_piece = (toxicity([long], classifier, chunk_characters=n)[0] for n in (10**6, 110))
    assert whole is not None
    assert by_piece is not None
    assert whole < 0.5 < by_piece


def test_texts_do_not_matter_to_each_other(classifier):
    texts = [KIND, UGLY * 30, "", KIND + " " + UGLY]
    assert toxicity(texts, classifier) == [toxicity([t], classifier)[0] for t in texts]


@pytest.mark.parametrize("size", [100, 101, 7, 1])
def test_pieces_are_the_text(size):
    text = f"{KIND} {UGLY}\n{KIND * 9}"
    pieces = pieces_of(text, size)
    assert all(0 < len(piece) <= size for piece in pieces)
    assert "".join(pieces).replace(" ", "") == "".join(text.split())
    assert pieces_of("  ", size) == []


def test_a_long_text_is_cut_in_linear_time():
    assert len(pieces_of("x" * 3_000_000, 100)) == 30_000


def test_models_that_are_none(tmp_path):
    with pytest.raises(DataError, match="holds no quality classifier"):
        toxicity(["x"], str(tmp_path))
    scored = [Example(f"text number {i} of level {i % 6}", i % 6) for i in range(300)]
    train_classifier(scored, tmp_path / "edu", "scores", Settings(min_count=1, dim=4, epochs=1))
    with pytest.raises(ConfigError, match="kind 'scores'.*needs one of kind 'binary'"):
        toxicity(["x"], str(tmp_path / "edu"))


def test_rules_of_the_knobs():
    with pytest.raises(ValidationError, match="greater than or equal to 100"):
        Toxicity(model="m", chunk_characters=99)
    assert Toxicity(model="m", chunk_characters=100).chunk_characters == 100
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Toxicity(model="m", max_score=1.5)
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        ToxicWords(lists="x", max_hits=-1)
