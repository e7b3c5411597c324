"""`stepwell plan --measured`: numbers, traces and runs."""

import json
import re

import pytest
from tests.plan.measured import traces

from stepwell.commands.plan import main
from stepwell.commands.plan_options import measured
from stepwell.commands.run_arguments import find_recipe
from stepwell.config import Run
from stepwell.plan.cluster import cluster
from stepwell.plan.job import job_of
from stepwell.types import ConfigError, DataError

RECIPE = "llama3-8b-pretrain"
WORDS = [RECIPE, "--gpus", "64", "--quick"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    job = job_of(Run.load(find_recipe(RECIPE)), 64, cluster("h100-sxm"))
    folder = tmp_path_factory.mktemp("trace")
    return traces.write(folder / "rank0.json.gz", traces.planned(job, links=3.0, waits_ms=500))


def said(capsys):
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def test_a_number_or_a_path(tmp_path):
    file = tmp_path / "mfu=3.json"  # a key of a file's name is no measure
    file.write_text("{}")
    assert measured(str(file)) == file
    assert measured(str(tmp_path)) == tmp_path
    assert measured("mfu=0.3") == {"mfu": 0.3}
    for text in (str(tmp_path / "missing"), "missing.json", "missing.json.gz"):
        with pytest.raises(ConfigError, match=r"no such trace or run's folder"):
            measured(text)
    with pytest.raises(ConfigError, match=r"KEY=NUMBER.*or a run's folder"):
        measured("fast")


def test_a_trace_beside_the_plan_of_a_recipe(capsys, path, tmp_path):
    page = tmp_path / "plan.html"
    assert main([*WORDS, "--measured", str(path), "--html", str(page)]) == 0
    text = said(capsys)
    for part in ("rank0.json.gz, one whole step of rank 0", "part of a step measured predicted",
                 "data ranks' messages, exposed", "data network", "What loses most",
                 "the network gives", "the longest 5", "Knobs by predicted gain",
                 "gains of the measured step"):  # fmt: skip
        assert part in text
    html = page.read_text("utf-8")
    for part in ("Measured against predicted", "Messages measured", "What loses most"):
        assert part in html


def test_a_run_that_does_not_say_how_many_ranks_it_had(capsys, tmp_path):
    """Never guessed; the two sides: how many is said, or the layout says it."""
    recipe = Run.load(find_recipe("quickstart-pretrain"))
    rows = [{"step": i, "time": 0.0, "time/step_s": 0.05} for i in range(1, 6)]
    for dp_shard, gpus, told in ((-1, [], True), (-1, ["--gpus", "2"], False), (2, [], False)):
        folder = tmp_path / f"{dp_shard}-{len(gpus)}"
        folder.mkdir()
        layout = recipe.layout.model_copy(update={"dp_shard": dp_shard})
        recipe.model_copy(update={"layout": layout}).save(folder / "run.toml")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [str(folder / "run.toml"), "--measured", str(folder), *gpus, "--quick"]
        if told:
            with pytest.raises(ConfigError, match=r"leaves .* open .* say how many .*--gpus N"):
                main(words)
        else:
            assert main(words) == 0
            assert "the median of 4 steps" in said(capsys)


def test_a_trace_as_json(capsys, path):
    assert main([*WORDS, "--measured", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    told = found["measured"]
    assert sum(line["measured_s"] for line in told["lines"]) == pytest.approx(
        told["time/step_s"], rel=2e-3
    )
    assert told["predicted_s"] == pytest.approx(found["time/step_s"])
    assert told["causes"][0]["name"] == "exposed data"
    (data,) = told["messages"]
    assert data["exposed_s"] + data["hidden_s"] == pytest.approx(data["busy_s"])
    assert told["rates"]["network"] < 0.5 * 0.764
    # What a knob gains is of the measured step.
    best = found["knobs"][0]
    assert best["time/step_s"] == pytest.approx((1 - best["gain"]) * told["time/step_s"], rel=1e-6)


def test_a_model_with_what_was_run_held_fixed(capsys, path):
    words = ["--model", "llama3-8b", "--gpus", "64", "--seq-len", "4k", "--quick"]
    words += ["--global-batch-tokens", "4M", "--zero", "3", "--reshard", "always", "--tp", "1"]
    words += ["--cp", "1", "--pp", "1", "--micro-batch", "1", "--recompute", "none"]
    words += ["--precision", "bf16"]
    assert main([*words, "--measured", str(path)]) == 0
    text = said(capsys)
    assert "part of a step measured predicted" in text
    assert "another layout" not in text
    with pytest.raises(ConfigError, match="of 64 ranks, and 32 are planned; give --gpus 64"):
        main([*words[:3], "32", *words[4:], "--measured", str(path)])


def test_the_same_layout_by_a_model_and_by_a_recipe(capsys):
    """What the options leave open is said; with all of them it is the recipe's step."""
    words = ["--model", "llama3-8b", "--gpus", "64", "--seq-len", "4096", "--quick"]
    words += ["--global-batch-tokens", "4M", "--zero", "3", "--tp", "1", "--cp", "1", "--pp", "1"]
    words += ["--micro-batch", "1", "--recompute", "none", "--measured", "step_s=9.5"]
    assert main([*words]) == 0
    assert "of --dp-replicate, --reshard, --reduce-gradients, too" in said(capsys)
    words += ["--dp-replicate", "1", "--reshard", "always", "--reduce-gradients", "micro-batch"]
    assert main([*words, "--json"]) == 0
    by_model = json.loads(capsys.readouterr().out)
    assert not any("hold fixed" in line for line in by_model["assumed"])
    assert main(["llama3-8b-pretrain", "--gpus", "64", "--quick", "--json"]) == 0
    by_recipe = json.loads(capsys.readouterr().out)
    assert by_model["time/step_s"] == pytest.approx(by_recipe["time/step_s"])


def test_a_trace_that_is_none(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(DataError, match="no whole step"):
        main([*WORDS, "--measured", str(path)])


def test_likely_suspects_come_first_and_say_what_would_gain(capsys):
    assert main([*WORDS, "--measured", "mfu=0.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    suspects = found["measured"]["suspects"]
    assert [s["likely"] for s in suspects] == sorted((s["likely"] for s in suspects), reverse=True)
    names = [s["name"] for s in suspects]
    assert names.index("the network") < names.index("slow products")
    network = suspects[names.index("the network")]
    products = suspects[names.index("slow products")]
    # Where messages are slow, what saves them gains more.
    gain = {k["name"]: k["gain"] for k in products["eased_by"]}
    assert network["eased_by"][0]["gain"] > 2 * gain.get(network["eased_by"][0]["name"], 0.0)
    # Each knob gains of the measured step what the likely causes leave it.
    gains = found["measured"]["gains"]
    assert all(least <= most for least, most in gains.values())
    assert gains["ZeRO-1"][1] == pytest.approx(network["eased_by"][0]["gain"], abs=0.02)
    assert {knob["name"] for knob in found["knobs"]} <= gains.keys()
    assert main([*WORDS, "--measured", "mfu=0.2"]) == 0
    assert "gain if measured a step" in said(capsys)
    assert main(WORDS) == 0
    assert "if measured" not in said(capsys)
