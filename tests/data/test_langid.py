from __future__ import annotations

import json
import tomllib
from importlib.resources import files
from itertools import islice

import pyarrow as pa
import pytest
from pydantic import ValidationError

from stepwell.data.batches import to_batch
from stepwell.data.langid import LangId, identify
from stepwell.data.langid_models import CHUNK_BYTES, LANE_BYTES, Guess, iso_code, load_model
from stepwell.data.sources.python_library import stdlib_prose
from stepwell.types import ConfigError, DataError, Document

# The first article of the Universal Declaration of Human Rights.
ARTICLES = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with "
    "reason and conscience and should act towards one another in a spirit of brotherhood.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft "
    "und Gewissen begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués "
    "de raison et de conscience et doivent agir les uns envers les autres dans un esprit de "
    "fraternité.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como "
    "están de razón y conciencia, deben comportarse fraternalmente los unos con los otros.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati "
    "di ragione e di coscienza e devono agire gli uni verso gli altri in spirito di fratellanza.",
    "pl": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Są oni "
    "obdarzeni rozumem i sumieniem i powinni postępować wobec innych w duchu braterstwa.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены "
    "разумом и совестью и должны поступать в отношении друг друга в духе братства.",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "zh": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
    "el": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
}


def batch_of(texts: list[str]) -> pa.RecordBatch:
    return to_batch([Document(str(i), t, "web") for i, t in enumerate(texts)], 0)


def guess_of(text: str) -> Guess:
    (guess,) = identify([text])
    assert guess is not None
    return guess


def removed(step: LangId, texts: list[str]) -> list[tuple[str, str]]:
    rows = step(batch_of(texts)).removed.to_pylist()
    return [(row["id"], row["reason"]) for row in rows]


@pytest.fixture(scope="module")
def prose() -> list[str]:
    docs = [d.text for d in islice(stdlib_prose(), 60) if isinstance(d, Document)]
    return [*docs, *ARTICLES.values()]


@pytest.fixture(scope="module")
def fasttext_model(tmp_path_factory) -> str:
    """Labels as GlotLID has them."""
    import fasttext

    folder = tmp_path_factory.mktemp("model")
    names = {"en": "eng_Latn", "de": "deu_Latn", "ru": "rus_Cyrl", "zh": "cmn_Hani"}
    lines = [
        f"__label__{label} {ARTICLES[code]}\n" for code, label in names.items() for _ in range(20)
    ]
    (folder / "train.txt").write_text("".join(lines), "utf-8")
    model = fasttext.train_supervised(
        str(folder / "train.txt"), dim=8, minn=1, maxn=3, bucket=2000, epoch=30, thread=1, verbose=0
    )
    model.save_model(str(folder / "model.bin"))
    (folder / "card.json").write_text(json.dumps({}))
    return str(folder)


def test_the_articles_are_told_apart():
    assert [g and g.language for g in identify(list(ARTICLES.values()))] == list(ARTICLES)


def test_lanes_give_what_py3langid_gives(prose):
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    theirs = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    lane_edges = [prose[0][:n] for n in (1, 5, LANE_BYTES - 1, LANE_BYTES, LANE_BYTES + 1)]
    texts = [
        *prose,
        *lane_edges,
        "ALL CAPITALS ARE READ AS SMALL LETTERS",
        "e\u0301te\u0301",
        "x" * 999,
    ]
    for text, guess in zip(texts, load_model("py3langid").predict(texts), strict=True):
        code, score = theirs.classify(text)
        if guess is None:
            assert score < 0.02
            continue
        assert guess.language == iso_code(code)
        assert guess.probability == pytest.approx(score, abs=2e-3)


def test_neighbours_and_cuts_do_not_matter(prose):
    alone = [load_model("py3langid").predict([text])[0] for text in prose]
    assert load_model("py3langid").predict(prose) == alone
    assert load_model("py3langid").predict(prose[::-1]) == alone[::-1]


def test_a_text_longer_than_a_chunk_of_work():
    text = (ARTICLES["de"] + " ") * (CHUNK_BYTES // len(ARTICLES["de"].encode()) + 2)
    guess = load_model("py3langid").predict([ARTICLES["en"], text, ARTICLES["fr"]])
    assert [g and g.language for g in guess] == ["en", "de", "fr"]


def test_labels_have_fixed_names_and_types():
    kept = LangId()(batch_of([ARTICLES["de"], "?"])).kept
    assert kept.schema.field("language").type == pa.string()
    assert kept.schema.field("language_score").type == pa.float32()
    assert kept["language"].to_pylist() == ["de", None]
    score, none = kept["language_score"].to_pylist()
    assert 0.9 < score <= 1
    assert none is None


def test_nothing_goes_by_default():
    assert removed(LangId(), ["", "12 34", *ARTICLES.values()]) == []


def test_keep_removes_the_others_and_says_why():
    outcome = LangId(keep=("en", "fr"))(batch_of(list(ARTICLES.values())))
    assert outcome.kept["language"].to_pylist() == ["en", "fr"]
    reasons = outcome.removed["reason"].to_pylist()
    assert set(reasons) == {"language_unwanted"}
    assert outcome.removed["detail"][0].as_py().startswith("de ")
    assert outcome.removed["detail"][0].as_py().endswith("keep en fr")


def test_threshold_on_both_sides():
    text = ARTICLES["es"][:24]
    score = guess_of(text).probability
    assert 0.1 < score < 0.999
    assert removed(LangId(threshold=score), [text]) == []
    assert removed(LangId(threshold=score + 1e-4), [text]) == [("0", "language_uncertain")]


def test_a_language_may_have_its_own_threshold():
    mixed = ARTICLES["en"][:30] + ARTICLES["de"][:30] + ARTICLES["fr"][:30]
    code, score = guess_of(mixed)
    assert 0.1 < score < 0.99
    assert removed(LangId(threshold=1.0, thresholds={code: 0.1}), [mixed]) == []
    assert removed(LangId(thresholds={code: 1.0}), [mixed]) == [("0", "language_uncertain")]


def test_unknown_languages_stay_or_go():
    texts = ["\U00011328" * 30, "too short", ARTICLES["en"]]
    assert removed(LangId(unknown="keep", keep=("en",)), texts) == []
    gone = [("0", "language_uncertain"), ("1", "language_uncertain")]
    assert removed(LangId(unknown="drop"), texts) == gone


def test_min_characters_counts_what_is_visible():
    text = "eins zwei drei vier"
    visible = len(text.replace(" ", ""))
    assert identify([text], min_characters=visible)[0] is not None
    assert identify([text], min_characters=visible + 1)[0] is None
    for wide in (text + " " * 999, " " * 999 + text):
        assert identify([wide], min_characters=visible)[0] is not None
        assert identify([wide], min_characters=visible + 1)[0] is None


def test_only_max_characters_are_read():
    text = ARTICLES["de"] * 4 + ARTICLES["ru"] * 40
    assert LangId(max_characters=400)(batch_of([text])).kept["language"][0].as_py() == "de"
    assert LangId(max_characters=9999)(batch_of([text])).kept["language"][0].as_py() == "ru"


@pytest.mark.parametrize(
    ("label", "code"),
    [
        ("__label__en", "en"), ("__label__eng_Latn", "en"), ("eng", "en"),
        ("__label__cmn_Hani", "zh"),
        ("__label__zho_Hans", "zh"), ("arb_Arab", "ar"), ("arz_Arab", "arz"), ("yue_Hant", "yue"),
        ("als_Latn", "sq"), ("__label__als", "gsw"), ("kik", "ki"), ("nob_Latn", "no"),
        ("nno", "nn"), ("ceb", "ceb"), ("zxx", "zxx"),
    ],
)  # fmt: skip
def test_labels_become_iso_codes(label, code):
    assert iso_code(label) == code


def test_a_fasttext_model_by_its_folder_or_file(fasttext_model):
    for model in (fasttext_model, fasttext_model + "/model.bin"):
        kept = LangId(model=model)(batch_of([ARTICLES[c] for c in ("en", "de", "ru", "zh")])).kept
        assert kept["language"].to_pylist() == ["en", "de", "ru", "zh"]
        assert max(kept["language_score"].to_pylist()) <= 1


def test_fasttext_reads_lines_as_blanks(fasttext_model):
    wrapped = "</s>\n" + ARTICLES["de"].replace(" ", "\n")
    one, many = identify([ARTICLES["de"], wrapped], fasttext_model)
    assert one is not None
    assert many is not None
    assert one.language == many.language
    assert many.probability == pytest.approx(one.probability, abs=0.05)


def test_a_language_the_model_lacks_is_refused(fasttext_model):
    with pytest.raises(ConfigError, match="no language 'fr'.*de en ru zh"):
        LangId(model=fasttext_model, keep=("fr",))(batch_of(["x"]))
    with pytest.raises(ConfigError, match="no language 'eng'.*did you mean"):
        LangId(keep=("eng",))(batch_of(["x"]))


def test_a_model_that_is_not_there_or_none(tmp_path):
    with pytest.raises(ConfigError, match="there is no language model"):
        identify(["x"], str(tmp_path / "lid.bin"))
    (tmp_path / "lid.bin").write_bytes(b"no model")
    with pytest.raises(DataError, match="is not a fastText model"):
        identify(["x" * 30], str(tmp_path / "lid.bin"))


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"min_characters": 500, "max_characters": 400}, "min_characters=500 must be at most"),
        ({"max_characters": 19}, "greater than or equal to 20"),
        ({"thresholds": {"de": 1.5}}, "nearest legal value is 1"),
        ({"thresholds": {"de": "0.5"}}, "must be a number from 0 to 1"),
        ({"thresholds": 0.5}, "must be a table of languages"),
        ({"keep": ("en",), "thresholds": {"de": 0.5}}, "removes anyway"),
        ({"threshold": 1.1}, "less than or equal to 1"),
    ],
)
def test_rules_of_the_knobs(knobs, words):
    with pytest.raises(ValidationError, match=words):
        LangId(**knobs)
    LangId(min_characters=400, max_characters=400)
    LangId(thresholds={"de": 1.0, "fr": 0})


def test_an_empty_batch():
    kept = LangId()(batch_of(["x"]).slice(0, 0)).kept
    assert kept.num_rows == 0
    assert "language" in kept.schema.names


def test_whole_pages_of_english_score_above_the_threshold_of_curate_mixed():
    """And entries of a dictionary, which it leaves out, do not."""
    recipe = files("stepwell").joinpath("recipes/curate-mixed.toml").read_text("utf-8")
    (step,) = [step for step in tomllib.loads(recipe)["steps"] if step["kind"] == "langid"]
    assert step["sources"] == ["web"]
    knobs = {"keep": tuple(step["keep"]), "threshold": step["threshold"]}
    docs = (d for d in stdlib_prose() if isinstance(d, Document) and len(d.text) > 2_000)
    prose = list(islice(docs, 40))
    # The page that begins with the grammar of functions is hardly prose.
    assert LangId(**knobs)(to_batch(prose, 0)).removed.num_rows <= 1
    entries = [
        "AYT\n\n   Are you there?\n\n   (1997-01-30)",
        "blat\n\n   1. {blast}.\n\n   2. See {thud}.",
    ]
    batch = to_batch([Document(str(i), text, "web") for i, text in enumerate(entries)], 0)
    assert LangId(**knobs)(batch).removed.num_rows == 2
    assert LangId(**knobs, min_characters=50)(batch).removed.num_rows == 0
