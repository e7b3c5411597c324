from inspect import isabstract

import pytest

from stepwell.curate import recipe as recipes
from stepwell.curate.recipe import Recipe, step_class
from stepwell.data.steps import DocumentStep, GlobalStep
from stepwell.types import ConfigError

SOURCES = [{"name": "web", "path": "x"}, {"name": "books", "path": "y"}]


@pytest.mark.parametrize("kind", recipes.STEPS)
def test_every_kind_is_a_step_of_that_name(kind):
    found = step_class(kind)
    assert issubclass(found, DocumentStep | GlobalStep)
    assert found.model_fields["kind"].default == kind


def test_every_step_has_its_line():
    def below(cls):
        return {cls} | {inner for sub in cls.__subclasses__() for inner in below(sub)}

    classes = {step_class(kind) for kind in recipes.STEPS}
    concrete = {c for base in (DocumentStep, GlobalStep) for c in below(base)}
    ours = {c for c in concrete if c.__module__.startswith("stepwell.") and not isabstract(c)}
    assert ours - classes == set()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"steps": [{"kind": "gopher-qality"}]}, "did you mean 'gopher-quality'?"),
        ({"steps": [{"min_words": 3}]}, "steps.0 needs a kind"),
        ({"steps": [{"kind": "gopher-quality", "min_word": 3}]}, "'min_words'"),
        ({"steps": [{"kind": "gopher-quality", "min_words": "x"}]}, "steps.0 (gopher-quality)"),
        ({"steps": [{"kind": "langid", "sources": ["book"]}]}, "did you mean 'books'?"),
        ({"sources": [SOURCES[0], SOURCES[0]]}, "two sources are called 'web'"),
        ({"sources": []}, "sources"),
        ({"store": {}}, "give one of the two"),
        ({"store": {"tokenizer": "a", "vocab_size": 300}}, "give one of the two"),
        ({"outputs": {"formats": ["mds"]}}, "add a [store] table"),
        ({"outputs": {"documents": "csv"}}, "parquet, jsonl"),
        ({"shard_byte": 3}, "did you mean 'shard_bytes'?"),
    ],
)
def test_what_cannot_be_is_refused(more, said):
    with pytest.raises(ConfigError) as error:
        Recipe.parse({"sources": SOURCES, **more})
    assert said in str(error.value)


def test_it_is_the_same_value_after_a_file(tmp_path):
    steps = [{"kind": "langid", "keep": ["en"]}, {"kind": "exact-dedup", "sources": ["web"]}]
    recipe = Recipe.parse({"sources": SOURCES, "steps": steps, "store": {"vocab_size": 300}})
    recipe.save(tmp_path / "recipe.toml")
    assert Recipe.load(tmp_path / "recipe.toml") == recipe


def test_a_file_of_before_is_replaced_whole_and_never_written_over(tmp_path):
    path, before = tmp_path / "recipe.toml", tmp_path / "before"
    Recipe.parse({"sources": SOURCES}).save(path)
    before.hardlink_to(path)
    text = before.read_text("utf-8")
    Recipe.parse({"sources": SOURCES, "shard_bytes": 5}).save(path)
    assert before.read_text("utf-8") == text
    assert Recipe.load(path).shard_bytes == 5


def test_dotted_keys_reach_steps(tmp_path):
    values = {"sources": SOURCES, "steps": [{"kind": "gopher-quality"}]}
    recipe = Recipe.parse(values, {"steps.0.min_words": "7", "shard_bytes": "99"})
    assert recipe.steps[0].model_dump()["min_words"] == 7
    assert recipe.shard_bytes == 99


def test_a_recipe_that_is_no_toml_is_refused(tmp_path):
    (tmp_path / "r.toml").write_text("sources = [")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        Recipe.load(tmp_path / "r.toml")
    with pytest.raises(ConfigError, match="cannot read the recipe"):
        Recipe.load(tmp_path / "none.toml")
