"""Every recipe that ships parses, reloads equal, and builds (on the meta device: no memory)."""

from importlib.resources import files
from pathlib import Path

import pytest
import torch

from stepwell.commands.curate import find_recipe, shipped_curations
from stepwell.commands.run_arguments import Arguments, load_run, shipped_recipes
from stepwell.config import Run
from stepwell.curate.recipe import Recipe
from stepwell.models.transformer import Decoder
from stepwell.plan.cluster import cluster
from stepwell.plan.footprint.footprint import fits, footprint
from stepwell.plan.job import job_of
from stepwell.plan.memory.ledger import predict_memory
from stepwell.presets import preset

QUICKSTART = 256 * 4096 + 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 704 + 2 * 256) + 256
# Parameters: by hand for the quickstart's, as published for the others.
RECIPES = {
    "quickstart-pretrain": QUICKSTART,
    "quickstart-sft": QUICKSTART,
    "quickstart-grpo": QUICKSTART,
    "quickstart-ppo": QUICKSTART,
    "quickstart-smollm2-sft": 134_515_008,
    "quickstart-smollm2-grpo": 134_515_008,
    "smollm2-sft": 134_515_008,
    "smollm2-reward": 134_515_008 + 576,
    "smollm2-sft-lora": 134_515_008,
    "smollm2-dpo-lora": 134_515_008,
    "smollm2-grpo-lora": 134_515_008,
    "llama3-8b-pretrain": 8_030_261_248,
}


def recipe(name: str) -> Run:
    method = name.removesuffix("-lora").rpartition("-")[2]
    return load_run(method, Arguments(recipe=name))


def test_every_recipe_is_in_the_table():
    assert {path.stem for path in shipped_recipes()} == set(RECIPES)


def test_every_other_recipe_is_a_curation():
    shipped = set(Path(str(files("stepwell.recipes"))).glob("*.toml"))
    assert shipped - set(shipped_recipes()) == set(shipped_curations())
    assert {path.stem for path in shipped_curations()} == {"curate-mixed", "quickstart-curate"}


@pytest.mark.parametrize("path", shipped_curations(), ids=lambda path: path.stem)
def test_a_curation_loads_by_its_name(path):
    assert find_recipe(path.stem) == path
    recipe = Recipe.load(path)
    assert recipe.sources
    assert recipe.steps


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_reloads_equal(name, tmp_path):
    run = recipe(name)
    run.save(tmp_path / "run.toml")
    assert Run.load(tmp_path / "run.toml") == run
    assert run.name == name
    assert run.dir.startswith("runs/")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_builds(name):
    with torch.device("meta"):
        decoder = Decoder(recipe(name).model)
    assert sum(p.numel() for p in decoder.parameters()) == RECIPES[name]


def test_the_stages_of_the_quickstart_share_a_model():
    first, *others = (recipe(f"quickstart-{stage}").model for stage in ("pretrain", "sft", "grpo"))
    for other in others:
        assert other.init is not None
        assert other.model_copy(update={"init": None}) == first


def test_the_stages_of_smollm2_follow_each_other():
    sft, dpo, grpo = (recipe(f"smollm2-{stage}-lora") for stage in ("sft", "dpo", "grpo"))
    assert (dpo.model.init, grpo.model.init) == (sft.dir, dpo.dir)
    for run in (sft, dpo, grpo):
        assert run.lora.rank == 16
        assert run.precision.compute == "bf16"
        assert run.model.model_copy(update={"init": None}) == preset("smollm2-135m")
        assert predict_memory(run, device="cpu").peak_bytes < 4e9


def test_published_dimensions():
    smollm2 = recipe("smollm2-sft").model
    assert smollm2.model_copy(update={"init": None}) == preset("smollm2-135m")
    llama3 = preset("llama3-8b").model_copy(update={"rope_scaling": None, "max_seq_len": 8192})
    assert recipe("llama3-8b-pretrain").model == llama3


def test_llama3_8b_fits_its_64_accelerators():
    run = recipe("llama3-8b-pretrain")
    assert run.train.global_batch_rows * run.data.seq_len == 2**22
    job = job_of(run, 64, cluster("h100-sxm"))
    assert fits(footprint(job), job.cluster)


def test_llama3_8b_says_of_its_memory_what_the_ledgers_say():
    text = files("stepwell.recipes").joinpath("llama3-8b-pretrain.toml").read_text()
    comment = " ".join(line.lstrip("# ") for line in text.split("[layout]")[0].splitlines())
    for replicate in (1, 8):
        layout = {"layout.dp_replicate": replicate, "layout.dp_shard": 64 // replicate}
        run = Run.parse(recipe("llama3-8b-pretrain").model_dump(exclude_none=True), layout)
        ledger = predict_memory(run, 64, device="cuda")
        whole = footprint(job_of(run, 64, cluster("h100-sxm")))
        said = [f"{whole.allocated / 1e9:.0f} GB", f"{whole.total / 1e9:.0f} GB"]
        if replicate == 1:
            said.append(f"{ledger.resting_bytes / 1e9:.1f} GB of weights and moments")
            said.append(f"of a row ({ledger.items.activations / 1e9:.0f} GB)")
        for words in said:
            assert words in comment, words
