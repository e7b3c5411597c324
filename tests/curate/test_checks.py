"""What is refused before the first document is read."""

import pytest

from stepwell.curate.checks import check_recipe
from stepwell.curate.executors.local import LocalExecutor
from stepwell.curate.plan import make_plan
from stepwell.curate.recipe import Recipe, step_class
from stepwell.curate.run import WORK, curate
from stepwell.data.batches import SCHEMA, to_batch
from stepwell.data.steps import DocumentStep
from stepwell.types import ConfigError, Document, StepwellError
from tests.curate import corpus

TEXT = "The harbour lay silent in the early morning light, and the boats had not yet left. " * 5


def parsed(steps, **more):
    sources = [{"name": "a", "path": "a.jsonl"}]
    return Recipe.parse({"sources": sources, "steps": steps, **more})


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"kind": "langid", "model": "no.bin"}, "there is no language model no.bin"),
        ({"kind": "langid", "keep": ["xx"]}, "langid knows no language 'xx'"),
        ({"kind": "quality-score", "model": "no"}, "holds no quality classifier"),
        ({"kind": "toxicity", "model": "no"}, "holds no quality classifier"),
        ({"kind": "toxic-words", "lists": "no"}, "there is no word list no"),
        ({"kind": "c4", "bad_words": "no"}, "bad_words='no' must be"),
        ({"kind": "decontaminate", "index": "no"}, "no holds no contamination index"),
        ({"kind": "fuzzy-dedup", "against": ["no"]}, "no is no dedup index"),
        ({"kind": "semantic-dedup", "embedder": "no"}, "embedder = 'no' must be"),
        ({"kind": "perplexity", "model": "no"}, "no"),
        ({"kind": "quality-top", "keep": 0.5}, "needs the label 'quality', which no step before"),
        ({"kind": "quality-threshold", "min_score": 0.5}, "needs the label 'quality'"),
        ({"kind": "quality-buckets"}, "needs the label 'quality'"),
        ({"kind": "perplexity-buckets"}, "needs the label 'perplexity'"),
    ],
)
def test_what_a_step_lacks_is_said_with_its_number(tmp_path, monkeypatch, step, said):
    monkeypatch.chdir(tmp_path)
    recipe = parsed([{"kind": "gopher-quality"}, step])
    with pytest.raises(StepwellError) as error:
        check_recipe(recipe)
    assert str(error.value).startswith(f"steps.1 ({step['kind']})")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("steps", "store", "said"),
    [
        ([], {"by": "text"}, "there is no label 'text'"),
        ([], {"by": "langage"}, "the labels are none"),
        (
            ["langid"],
            {"by": "langage"},
            r"mean 'language'\?\); the labels are language, ",
        ),
        (["langid"], {"by": "language_score"}, "may differ from document to document"),
        (["langid"], {"scores": "language"}, "of these there are language_score"),
        (["langid"], {"scores": "text"}, "there is no label 'text'"),
        (["langid"], {"by": "language", "scores": "language_score"}, None),
        ([], {"vocab_size": 257}, "the nearest legal value is 26"),
    ],
)
def test_a_store_goes_by_labels_that_fit(steps, store, said):
    recipe = parsed([{"kind": k} for k in steps], store={"vocab_size": 300, **store})
    if said is None:
        check_recipe(recipe)
        return
    with pytest.raises(ConfigError, match=said):
        check_recipe(recipe)


def test_a_tokenizer_that_is_none_is_refused(tmp_path):
    with pytest.raises(StepwellError, match="no tokenizer at"):
        check_recipe(parsed([], store={"tokenizer": str(tmp_path / "nowhere")}))


def test_buckets_are_labels_of_later_steps():
    steps = [{"kind": "langid"}, {"kind": "quality-buckets", "label": "language_score"}]
    check_recipe(parsed(steps, store={"vocab_size": 300, "by": "quality_bucket"}))
    wrong = [{"kind": "langid"}, {"kind": "quality-buckets", "label": "language"}]
    with pytest.raises(ConfigError, match="needs a number in the label 'language'"):
        check_recipe(parsed(wrong))


PLAIN = ["langid", "gopher-quality", "gopher-repetition", "c4", "fineweb", "code-quality", "pii"]


@pytest.mark.parametrize("kind", PLAIN)
def test_what_a_document_step_says_it_adds_is_what_it_adds(kind):
    batch = to_batch([Document(str(i), TEXT, "a") for i in range(3)], 0)
    step = step_class(kind).model_validate({"kind": kind})
    assert isinstance(step, DocumentStep)
    made = step(batch).kept.schema
    added = {made.field(i).name: made.field(i).type for i in range(len(SCHEMA), len(made))}
    assert added == dict(step.adds())


def test_a_late_mistake_costs_nothing_that_is_done(tmp_path):
    corpus.write(tmp_path / "raw")
    values = corpus.recipe(tmp_path / "raw")
    values["steps"].append({"kind": "decontaminate", "index": str(tmp_path / "none")})
    plan = make_plan(Recipe.parse(values))
    with pytest.raises(StepwellError, match=r"steps\.2 \(decontaminate\)"):
        list(curate(plan, tmp_path / "out", LocalExecutor(1)))
    assert not (tmp_path / "out").exists()
    # One that shows itself only in the decision: what was read by then stays.
    values["steps"][2] = {"kind": "fuzzy-dedup", "save_index": str(tmp_path / "index")}
    plan = make_plan(Recipe.parse(values))
    running = curate(plan, tmp_path / "out", LocalExecutor(1))
    next(running)
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "letter").write_text("dear")
    with pytest.raises(StepwellError, match="no dedup index"):
        list(running)
    assert len(list((tmp_path / "out" / WORK).glob("s00/[0-9]*"))) == 2
