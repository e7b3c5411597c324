import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from stepwell.cli import main
from stepwell.commands import plan_dry_run
from stepwell.commands.header import header_text
from stepwell.commands.plan_options import (
    BINARY,
    DECIMAL,
    GROUPS,
    OPTIONS,
    check_read,
    help_text,
    measured,
    number,
    parse,
)
from stepwell.commands.ranks import Ranks
from stepwell.commands.run_arguments import find_recipe
from stepwell.config import Run
from stepwell.hardware import device_kind
from stepwell.parallel.rules import check_run
from stepwell.plan.calibration.table import shipped_table
from stepwell.plan.cluster import cluster
from stepwell.plan.footprint.footprint import footprint
from stepwell.plan.job import job_of
from stepwell.plan.memory.ledger import predict_rank
from stepwell.plan.units import seconds_text
from stepwell.presets import preset
from stepwell.types import ConfigError

SMALL = ["--model", "llama3-8b", "--gpus", "8", "--seq-len", "4k", "--global-batch-tokens", "64k"]


def run(capsys, *words):
    code = main(["plan", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_rows_longer_than_the_model_was_made_for_are_told(capsys, tmp_path):
    path = tmp_path / "long.toml"
    for length, told in (("8k", False), ("16k", True)):
        words = ["--model", "smollm2-135m", "--gpus", "8", "--seq-len", length, "--quick"]
        code, out, _ = run(capsys, *words, "--write", str(path))
        assert code == 0
        written, shown = path.read_text("utf-8").replace("\n# ", " "), " ".join(out.split())
        for text in (written, shown):
            assert ("up to 16,384, though smollm2-135m was made for 8,192" in text) == told
        check_run(Run.load(path), 8)
        code, out, _ = run(capsys, *words[:-1], "--method", "dpo", "--json")
        assert code == 0
        assert ("made for 8,192" in " ".join(json.loads(out).get("assumed", []))) == told


def test_numbers_with_units():
    assert number("--x", "8k", BINARY) == 8192
    assert number("--x", "16M", BINARY) == 16 * 2**20
    assert number("--x", "1.5k", BINARY) == 1536
    assert number("--x", "4e6", BINARY) == 4_000_000
    assert number("--x", "1_000", BINARY) == number("--x", "1,000", BINARY) == 1000
    assert number("--x", "15T", DECIMAL) == 15 * 10**12
    for text, said in (("8q", "units: k, m, g, b"), ("", "no number"), ("1.0001", "value is 1$"),
                       ("0", "value is 1$"), ("-3", "positive whole number; the nearest legal value"
                       " is 1$"), ("1.5", "values are 1 and 2$"), ("1.7", "2$")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            number("--x", text, BINARY)
    assert measured("mfu=35%") == {"mfu": 0.35}
    assert measured("mfu=1") == measured("mfu=100%") == {"mfu": 1}
    for text, said in (("mfu", "KEY=NUMBER"), ("mfu=fast", "KEY=NUMBER"),
                       ("mfu=35", "mfu=0.35, or mfu=35%"), ("mfu=101%", "more than the peak"),
                       ("foo=1", "'foo' is none of step_s, mfu"), ("mfuu=1", "did you mean 'mfu'"),
                       ("step_s=3%", "only mfu is a share"), ("step_s=0", "above 0"),
                       ("step_s=nan", "above 0"), ("step_s=inf", "finite")):  # fmt: skip
        with pytest.raises(ConfigError, match=re.escape(said)):
            measured(text)


def test_what_is_offloaded_is_named_once():
    assert parse(["--offload", "any"]).pins.offload == "any"
    with pytest.raises(ConfigError, match="or none, or any alone"):
        parse(["--offload", "any,optimizer"])
    assert parse(["--offload", "optimizer,activations"]).pins.offload == (
        "optimizer",
        "activations",
    )
    with pytest.raises(ConfigError, match="names one twice; the nearest is --offload optimizer$"):
        parse(["--offload", "optimizer,optimizer"])


def test_a_small_model_is_told_in_small_units(capsys):
    small = ["--model.num_layers", "2", "--model.d_model", "128", "--gpus", "2", "--quick"]
    code, out, err = run(capsys, *small, "--seq-len", "256", "--global-batch-tokens", "2k")
    assert code == 0, err
    for digits in ("0.0 GiB", "0.00 GiB", "0.00 s", "0.000"):
        assert not re.search(rf"(?<![\d.,]){re.escape(digits)}", out)
    assert re.search(r"  \d+\.\d+ ms a step", out)
    assert re.search(r"optimizer +\d+\.\d MiB", out)


def test_options_become_pins():
    words = ["--tp=8", "--zero", "3", "--max-pp", "4", "--micro-batch", "2", "--offload", "none"]
    asked = parse([*words, "--headroom", "1.5", "--model.num_layers", "3"])
    pins = asked.pins
    assert (pins.tp, pins.zero, pins.max_pp, pins.micro_batch_rows) == (8, 3, 4, 2)
    assert pins.offload == ()
    assert pins.headroom_bytes == 1.5 * 2**30
    assert asked.overrides == {"model.num_layers": "3"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpuss", "8"], "did you mean '--gpus'"),
        (["--gpus"], "--gpus needs a value"),
        (["--gpus", "8", "--gpus", "9"], "given twice"),
        (["--json=1"], "takes no value"),
        (["--zero", "4"], "must be one of 0, 1, 2, 3"),
        (["--offload", "optimiser"], "did you mean 'optimizer'"),
        (["a", "b"], "two recipes"),
        (["--measured", "mfu=0.3", "--measured", "step_s=3"], "step_s=3 beside another"),
        (["--headroom", "x"], "number of GiB"),
        (["--headroom", "-1"], "nearest legal value is 0"),
    ],
)
def test_a_wrong_command_line_is_named(words, said):
    with pytest.raises(ConfigError, match=said):
        parse(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --model"),
        (["--model", "llama3-8b"], "give --gpus"),
        (["--model", "mixtral-8x7b", "llama3-8b-pretrain"], "does not have mixture"),
        (["--model", "llama3-8b", "x.toml"], "no recipe 'x.toml'"),
        (["--model", "llama3-8b", "--gpus", "8", "--train.steps", "3"], "belongs to a recipe"),
        (["llama3-8b-pretrain", "--tp", "8"], "set its keys instead"),
        (["llama3-8b-pretrain", "--gpus", "63"], "dp_shard"),
        (["--model", "llama3-8b", "--gpus", "8", "--gpu", "h100-sx"], "did you mean 'h100-sxm"),
        (["--model", "mixtral-8x7b", "--gpus", "8", "--method", "dpo"], "does not have mixture"),
        (["llama3-8b-pretrain", "--measured", "step_s=3"], "MFU of 107 %"),
        (["llama3-8b-pretrain", "--measured", "foo=1"], "'foo' is none of"),
        (["llama3-8b-pretrain", "--validate", "x.csv"], "llama3-8b-pretrain is not read with"),
        (["--validate", "x.csv", "--model.d_ff", "9"], "--model.d_ff is not read with --validate"),
        (["--model.num_layers", "32", "--gpus", "8"], "--model.d_model must be given"),
        ([*SMALL, "--quick", "--write", "/dev/null/x.toml"], "/dev/null is a file"),
        ([*SMALL, "--quick", "--html", "/proc/none/x.html"], "/proc cannot be written to"),
        ([*SMALL, "--quick", "--html", "/tmp"], "/tmp is a folder"),
        ([*SMALL, "--method", "dpo", "--tp", "5"], "--tp 5 must divide the 8 GPUs"),
    ],
)
def test_what_cannot_be_planned_exits_2(capsys, words, said):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err


METHOD_ONLY = {"prompts", "group-size", "prompt-tokens", "answer-tokens", "lora-rank"}
LAYOUT = {option.name for option in GROUPS["Held fixed"]}
OUTPUT = {"quick", "top", "html", "write"}
TASK = {"seq-len", "global-batch-tokens", "tokens"}
BESIDE_A_METHOD = (
    OUTPUT - {"html", "write"}
    | {"measured", "tokens"}
    | LAYOUT - {*("tp", "max-tp", "recompute", "micro-batch", "headroom")}
)
QUESTIONS = {"validate", "zero-table", "method"}


@pytest.mark.parametrize(
    ("words", "unread"),
    [
        ([], METHOD_ONLY),
        (["--method", "pretrain"], METHOD_ONLY),
        (["recipe"], METHOD_ONLY | TASK | {"top", "zero-table", "method"}),
        (
            ["--zero-table"],
            METHOD_ONLY | TASK - {"seq-len"} | LAYOUT | OUTPUT | {"measured", "dry-run", "method"},
        ),
        (["--method", "ppo"], BESIDE_A_METHOD | TASK),
        (["--method", "qlora"], BESIDE_A_METHOD | METHOD_ONLY - {"lora-rank"}),
        (["--validate", "x.csv"], set(OPTIONS) - {"validate", "json"}),
    ],
)
def test_what_a_question_does_not_read_is_refused(words, unread):
    begun = parse(words)
    for name, option in OPTIONS.items():
        value = {"choice": option.choices[-1:], "switch": [True]}.get(option.kind, [2])[0]
        asked = replace(begun, given={**begun.given, name: value})
        if name in unread - set(begun.given):
            with pytest.raises(ConfigError, match=f"--{name} is not read"):
                check_read(asked)
        elif name not in QUESTIONS:  # which would be another question
            check_read(asked)


def test_help_names_every_option():
    lines = help_text().splitlines()
    for option in OPTIONS.values():
        words = f"  --{option.name} {option.metavar}".rstrip()
        assert any(line.startswith(words + "  ") and line.endswith(option.help) for line in lines)
    assert any("llama3-405b" in line for line in lines)
    assert max(map(len, lines)) <= 110
    assert all(option.help for group in GROUPS.values() for option in group)


def test_a_model_is_searched_and_explained(capsys, tmp_path):
    recipe, page = tmp_path / "new" / "planned.toml", tmp_path / "plan.html"
    words = [*SMALL, "--quick", "--max-cp", "1", "--tokens", "1T"]
    code, out, _ = run(capsys, *words, "--write", str(recipe), "--html", str(page))
    assert code == 0
    for part in ("fits", "Why", "What binds", "Where the time goes", "What a GPU holds",
                 "What a GPU sends", "Not taken", "GPU-hours"):  # fmt: skip
        assert part in out
    planned = Run.load(recipe)
    assert planned.model.d_ff == preset("llama3-8b").d_ff
    check_run(planned, 8)
    said = re.search(r"([\d.]+) GiB a GPU.*\n# ([\d.]+) GiB of them are", recipe.read_text("utf-8"))
    assert said is not None
    assert float(said[2]) < float(said[1])
    assert re.search(r"norms [\d.]+ \w+, attention [\d.]+ \w+, mlp [\d.]+", out)
    assert "</html>" in page.read_text("utf-8")
    assert main(["pretrain", str(recipe), "--check"]) == 0
    device = "a CPU" if device_kind() == "cpu" else "a GPU"
    assert f"tensors on {device}" in capsys.readouterr().out
    on_gpus = header_text(planned, Ranks(8, grouped=True), device="cuda")
    assert f"{said[2]} GiB" in on_gpus  # the same figure


def test_what_nobody_said_is_told(capsys):
    words = ["--model", "smollm2-135m", "--gpus", "1", "--quick"]
    _, out, _ = run(capsys, *words)
    for part in ("h100-sxm in its usual", "rows of 8,192 tokens", "a batch of 4,194,304 tokens"):
        assert f"assumed: {part}" in out
    more = ["--gpu", "l4", "--seq-len", "1k", "--global-batch-tokens", "100000"]
    _, out, _ = run(capsys, *words, *more)
    assert "100,000 tokens a step are rounded to whole rows" in out
    assert "98 rows of" in out


def test_a_recipe_of_one_rank_that_offloads_parameters_says_how_it_starts(capsys, tmp_path):
    for num, said in ((1, True), (2, False)):
        path = tmp_path / f"{num}.toml"
        words = ["--model", "smollm2-135m", "--gpus", str(num), "--seq-len", "512", "--quick"]
        words += ["--offload", "parameters", "--global-batch-tokens", "4k", "--write", str(path)]
        code, _, err = run(capsys, *words)
        assert code == 0, err
        assert ("# Start it with --nproc 1" in path.read_text()) == said


def test_a_checkpoint_that_no_copy_waits_for_fits_in_less_memory_of_the_host(capsys, tmp_path):
    """The advice names the option, the option is followed, and the recipe carries it."""
    machines, recipe = tmp_path / "two.toml", tmp_path / "recipe.toml"
    machines.write_text('gpu = "rtx4090"\ngpus_per_node = 2\nhost_memory_gib = 128\n')
    words = ["--model", "llama3-8b", "--gpus", "2", "--cluster", str(machines), "--quick"]
    words += ["--tp", "1", "--cp", "1", "--pp", "1", "--micro-batch", "1", "--recompute", "full"]
    words += ["--offload", "parameters", "--write", str(recipe)]
    code, _, err = run(capsys, *words)
    assert code == 1
    assert "or with checkpoint.asynchronous=false (--checkpoint synchronous)" in err
    code, _, err = run(capsys, *words, "--checkpoint", "asynchronous")
    assert code == 1
    assert "--checkpoint asynchronous: the leanest" in err
    code, out, _ = run(capsys, *words, "--checkpoint", "synchronous")
    assert (code, "fits: " in out) == (0, True)
    assert not Run.load(recipe).checkpoint.asynchronous


def test_the_memory_that_offload_leans_on_is_told_as_assumed(capsys, tmp_path):
    """Where something goes to the host, and nobody said what the host has."""
    words, assumed = ["--model", "llama3-8b", "--gpus", "4", "--quick"], "of their own, as is usual"
    _, out, _ = run(capsys, *words, "--gpu", "rtx4090")
    assert f"machines with 256 GiB {assumed} beside 4 x rtx4090" in " ".join(out.split())
    _, out, _ = run(capsys, *words, "--gpu", "b200")
    assert assumed not in " ".join(out.split())
    known = tmp_path / "cluster.toml"
    known.write_text('gpu = "rtx4090"\nhost_memory_gib = 512\n')
    _, out, _ = run(capsys, *words, "--cluster", str(known))
    assert assumed not in " ".join(out.split())


def test_json_holds_the_layout(capsys):
    code, out, _ = run(capsys, *SMALL, "--quick", "--max-cp", "1", "--json", "--zero", "3")
    assert code == 0
    found = json.loads(out)
    assert found["fits"]
    assert found["layout"]["zero"] == 3
    assert found["pins"] == {"zero": 3, "max_cp": 1}
    assert found["memory/peak_bytes"] > 0
    assert found["time/step_s"] > 0


def test_what_does_not_fit_exits_1_and_says_from_where_on(capsys):
    words = ["--model", "llama3-405b", "--gpus", "8", "--offload", "none", "--quick"]
    code, out, err = run(capsys, *words)
    assert (code, out) == (1, "")
    assert "needs" in err
    assert "the nearest number that something fits on is --gpus 96" in err
    code, out, _ = run(capsys, *words, "--json")
    assert code == 1
    assert json.loads(out)["fits"] is False


def test_a_recipe_as_configured(capsys):
    words = ["llama3-8b-pretrain", "--quick", "--measured", "mfu=0.2"]
    code, out, _ = run(capsys, *words)
    assert code == 0
    for part in ("assumed: 64 GPUs", "Measured against predicted", "the network", "Knobs",
                 "A machine's memory"):  # fmt: skip
        assert part in out
    code, out, _ = run(capsys, *words, "--json", "--train.micro_batch_rows", "16")
    assert code == 1  # 16 rows of activations
    assert json.loads(out)["fits"] is False


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_fastest_layout_computes_in_as_many_bits_as_the_recipe(capsys, tmp_path, precision):
    """Fewer would be faster, and another run."""
    path = tmp_path / "fastest.toml"
    words = ["quickstart-pretrain", "--gpus", "2", "--precision.compute", precision]
    words += ["--checkpoint.asynchronous", "false", "--write", str(path)]
    code, _, err = run(capsys, *words)
    assert code == 0, err
    written = Run.load(path)
    assert written.precision.compute == precision
    assert not written.checkpoint.asynchronous


def test_a_measured_step_of_a_model(capsys, tmp_path):
    page = tmp_path / "plan.html"
    words = ["--model", "llama3-8b", "--gpus", "16", "--global-batch-tokens", "512k", "--quick"]
    words += ["--zero", "3", "--tp", "1", "--cp", "1", "--pp", "1", "--measured", "mfu=20%"]
    code, out, _ = run(capsys, *words, "--html", str(page))
    assert code == 0
    for part in ("Measured against predicted", "the network", "Knobs by predicted gain",
                 "(--tp 1 --cp 1 --pp 1 --zero 3)"):  # fmt: skip
        assert part in re.sub(r"\s+", " ", out)
    assert "Measured against predicted" in page.read_text("utf-8")
    _, out, _ = run(capsys, *words, "--json")
    found = json.loads(out)
    assert found["measured"]["suspects"]
    assert found["measured"]["time/step_s"] == pytest.approx(
        found["mfu"] * found["time/step_s"] / 0.2
    )
    code, _, err = run(capsys, *words[:-1], "step_s=0.001")
    assert code == 2
    assert "cannot be" in err


def test_a_recipe_whose_weights_are_not_there(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "smollm2-sft", "--quick")
    assert code == 0
    assert "134.5 million parameters" in out
    assert "assumed: the recipe's dimensions, for model.init='models/SmolLM2" in out
    assert "8 pairs of answers a step" in run(capsys, "smollm2-dpo-lora", "--quick")[1]
    (tmp_path / "models" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    code, _, err = run(capsys, "smollm2-sft", "--quick")  # something is there, and no model
    assert code in (2, 4)
    assert "--model NAME" in err
    (tmp_path / "bare.toml").write_text('[model]\ninit = "nowhere"\n[method]\nkind = "sft"\n')
    code, _, err = run(capsys, "bare.toml", "--quick")
    assert code in (2, 4)
    assert "--model NAME" in err
    code, out, _ = run(capsys, "bare.toml", "--quick", "--model", "smollm2-135m")
    assert code == 0
    assert "134.5 million parameters" in out


def test_a_cluster_of_ones_own(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('gpu = "h100-sxm"\nname = "mine"\nnetwork_gbit_per_s = 100\nmemory_gib = 60\n')
    code, out, _ = run(
        capsys,
        *SMALL,
        "--quick",
        "--max-cp",
        "1",
        "--max-pp",
        "1",
        "--cluster",
        str(path),
        "--json",
    )
    assert code == 0
    found = json.loads(out)
    assert found["cluster"]["name"] == "mine"
    assert found["memory/peak_bytes"] < 60 * 2**30
    code, _, err = run(capsys, *SMALL, "--cluster", str(path), "--gpu", "a100-80g")
    assert code == 2
    assert "leave --gpu out" in err


def test_zero_table_and_methods(capsys):
    code, out, _ = run(capsys, "--model", "llama3-70b", "--gpus", "8", "--zero-table")
    assert code == 1
    assert "ZeRO-3" in out
    code, out, _ = run(capsys, "--model", "llama3-70b", "--gpus", "64", "--zero-table", "--json")
    assert code == 0
    assert len(json.loads(out)["rows"]) == 4
    code, out, _ = run(capsys, "--model", "llama3-8b", "--gpus", "8", "--method", "qlora")
    assert code == 0
    assert "fits" in out


@pytest.mark.parametrize("method", ["ppo", "dpo", "qlora"])
def test_a_methods_plan_is_a_page_and_a_recipe_that_is_planned_alike(capsys, tmp_path, method):
    recipe, page = tmp_path / "new" / "planned.toml", tmp_path / "plan.html"
    words = ["--model", "smollm2-1.7b", "--gpus", "4", "--method", method, "--json"]
    code, out, _ = run(capsys, *words, "--write", str(recipe), "--html", str(page))
    assert code == 0
    asked = json.loads(out)["asked"]
    assert f"{asked['peak'] / 2**30:.1f} GiB" in page.read_text("utf-8")
    code, out, _ = run(capsys, str(recipe), "--gpus", "4", "--json")
    assert code == 0
    found = json.loads(out)
    if method == "qlora":
        assert found["memory/peak_bytes"] == pytest.approx(asked["peak"], rel=1e-9)
        assert found["time/step_s"] == pytest.approx(asked["step_s"], rel=1e-9)
    else:
        assert found["all_models"]["peak"] == pytest.approx(asked["peak"], rel=1e-9)
        assert found["all_models"]["times"] == pytest.approx(asked["times"], rel=1e-9)
    _, out, _ = run(capsys, str(recipe), "--gpus", "4")
    assert ("All models of the method" in out) == (method != "qlora")
    if method != "qlora":
        assert f"{asked['peak'] / 2**30:.1f} of" in out
        assert "are of one training pass of the policy" in " ".join(out.split())
        step = seconds_text(asked["step_s"])
        assert f"a whole step: {step}" in " ".join(out.split())
        assert f"a whole step: {step}" in recipe.read_text("utf-8")


@pytest.mark.parametrize(("rows", "fits"), [(4, True), (16, False)])
def test_text_json_page_and_exit_code_have_one_verdict_on_all_models(capsys, tmp_path, rows, fits):
    recipe, page = tmp_path / "planned.toml", tmp_path / "plan.html"
    run(capsys, "--model", "llama3-8b", "--gpus", "8", "--method", "ppo", "--write", str(recipe))
    words = [str(recipe), "--gpus", "8", "--quick", "--train.micro_batch_rows", str(rows)]
    code, out, _ = run(capsys, *words, "--json", "--html", str(page))
    found = json.loads(out)
    method = found["all_models"]
    assert (code == 0, found["fits"], method["fits"]) == (fits, fits, fits)
    peak, usable = found["memory/peak_bytes"], found["memory/usable_bytes"]
    assert found["memory/headroom_bytes"] == pytest.approx(usable - peak, abs=2)
    assert (peak, usable) == (round(method["peak"]), round(method["limit"]))
    assert sum(found["memory/items"].values()) == pytest.approx(peak, abs=8)
    assert found["time/step_s"] == method["step_s"] == sum(found["time/parts"].values())
    assert found["policy_training"]["memory/peak_bytes"] < peak
    for knob in found["knobs"]:
        assert knob["time/step_s"] == pytest.approx((1 - knob["gain"]) * found["time/step_s"])
    code, out, _ = run(capsys, *words)
    assert (code == 0) == fits
    said = f"{'fits' if fits else 'does not fit'}: {peak / 2**30:.1f} of {usable / 2**30:.1f} GiB"
    assert re.findall(r"^ +((?:fits|does not fit): \S+ of \S+ GiB)", out, re.M) == [said, said]
    told, verdict = page.read_text("utf-8"), "fits" if fits else "does not fit"
    assert f"{peak / 2**30:.1f} GiB" in told
    assert f"of {usable / 2**30:.1f} GiB while {method['phase']}: {verdict}" in told


def test_what_no_recipe_says_is_refused_and_nothing_is_written(capsys, tmp_path):
    path = tmp_path / "planned.toml"
    words = ["--model", "llama3-8b", "--gpus", "1", "--gpu", "l4", "--method", "grpo"]
    code, _, err = run(capsys, *words, "--write", str(path))
    assert code == 2
    assert "--write: nothing that the engine knows fits on these GPUs" in err
    assert not path.exists()


def test_derived_dimensions_are_told_by_every_question(capsys):
    words = ["--model.num_layers", "2", "--model.d_model", "256", "--gpus", "2"]
    for more in (["--zero-table"], ["--method", "lora"], ["--quick", "--seq-len", "1k"]):
        code, out, _ = run(capsys, *words, *more)
        assert code == 0
        assert "assumed: heads of 128 (--model.head_dim)" in out
        _, out, _ = run(capsys, *words, *more, "--json")
        assert "2 heads (--model.num_heads)" in json.loads(out)["assumed"]


def test_a_method_honours_what_is_held_fixed(capsys):
    words = ["--model", "smollm2-1.7b", "--gpus", "8", "--method", "dpo", "--json"]
    _, out, _ = run(capsys, *words)
    free = json.loads(out)["asked"]
    held = ["--tp", "2", "--recompute", "full", "--micro-batch", "2", "--headroom", "20"]
    more = ["--seq-len", "1k", "--global-batch-tokens", "256k"]
    _, out, _ = run(capsys, *words, *held, *more)
    found = json.loads(out)
    asked = found["asked"]
    assert asked["settings"]["layout.tp"] == 2
    assert asked["settings"]["remat.mode"] == "full"
    assert "micro-batch 2" in asked["layout"]
    assert asked["limit"] == free["limit"] - 20 * 2**30
    assert (found["workload"]["seq_len"], found["workload"]["rows"]) == (1024, 256)
    assert found["pins"]["headroom_bytes"] == 20 * 2**30
    code, _, err = run(capsys, *words, "--global-batch-tokens", "1k")
    assert code == 2
    assert "no row of 2,048 tokens" in err


def test_a_dry_run_counts_what_was_predicted(capsys):
    planned = Run.parse(
        {
            "layout": {"compile": True, "dp_shard": 2},
            "train": {"global_batch_rows": 4, "micro_batch_rows": 1},
            "data": {"seq_len": 64},
        }
    )
    found, differences = plan_dry_run.count(planned, 2, cluster("h100-sxm"))
    assert "2 of 2 micro-batches on pipeline ranks 0" in capsys.readouterr().err
    text = plan_dry_run.lines(found, differences)
    counted, predicted = (
        next(re.findall(r"[\d.]+", line) for line in text if word in line.split()[:2])
        for word in ("counted", "predicted")
    )
    assert counted[1:4] == predicted[-5:-2]  # parameters, gradients, optimiser
    calls = sum(one.calls for one in found.busiest.issued)
    sent = text[next(i for i, line in enumerate(text) if "sent by" in line) + 1 :]
    shown = [int(line.split()[-3].replace(",", "")) for line in sent[:-1]]
    few = [int(n) for n in re.findall(r" (\d+)(?:,|$)", sent[-1])]
    assert sum(shown) + sum(few) == calls > 4


def test_a_dry_run_in_json_is_part_of_the_one_answer(capsys):
    words = ["--model.num_layers", "1", "--data.seq_len", "64", "--gpus", "1", "--dry-run"]
    code, out, err = run(capsys, "quickstart-pretrain", *words, "--quick", "--json")
    assert code == 0, err
    found = json.loads(out)["dry_run"]
    items = {one["item"]: one for one in found["predicted_and_counted"]}
    assert items["gradients"]["predicted"] == items["gradients"]["counted"] > 0
    assert "micro-batches on pipeline ranks 0" in err


@pytest.mark.parametrize("chunk", [pytest.param(64, marks=pytest.mark.slow), 1024])
def test_the_memory_of_a_plan_is_that_of_its_dry_run(capsys, chunk):
    words = ["--model.num_layers", "1", "--model.vocab_size", "32000", "--loss.chunk_tokens", chunk]
    words += [
        "--train.micro_batch_rows",
        "1",
        "--data.seq_len",
        "1024",
        "--model.max_seq_len",
        1024,
    ]
    words += ["--gpus", "1", "--quick", "--dry-run", "--json"]
    code, out, err = run(capsys, "quickstart-pretrain", *map(str, words))
    assert code == 0, err
    found = json.loads(out)
    beside = ("fragmentation", "driver and libraries", "communicators")
    planned = sum(n for item, n in found["memory/items"].items() if item not in beside)
    rows = {one["item"]: one for one in found["dry_run"]["predicted_and_counted"]}
    assert planned == rows["peak"]["predicted"]
    assert planned == pytest.approx(rows["peak"]["counted"], rel=0.1)


@pytest.mark.parametrize("num_layers", [2, 9])
def test_memory_is_shown_of_the_rank_that_is_named(capsys, num_layers):
    settings = {"layout.zero": 1, "layout.pp": 2, "layout.dp_shard": 1}
    settings |= {"model.num_layers": num_layers, "train.micro_batch_rows": 2}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    words = ["quickstart-pretrain", "--gpus", "2", "--quick", *words]
    code, out, err = run(capsys, *words, "--json")
    assert code == 0, err
    found = json.loads(out)
    configured = Run.load(find_recipe(words[0]), settings)
    ledgers = [predict_rank(configured, 2, rank, device="cuda") for rank in (0, 1)]
    most = found["memory/pp_rank"]
    assert ledgers[most].peak_bytes == max(ledger.peak_bytes for ledger in ledgers)
    for name, num_bytes in ledgers[most].items.named().items():
        assert found["memory/items"].get(name, 0) == num_bytes
    held = footprint(job_of(configured, 2, cluster("h100-sxm")), most)
    modules = found["memory/activations"]
    assert sum(modules.values()) == pytest.approx(found["memory/items"]["activations"], abs=2)
    for name in ("norms", "attention", "mlp"):
        assert modules[name] > 0
        assert modules[name] == pytest.approx(held.items[name], rel=0.01)
    assert found["memory/items"]["fragmentation"] == round(held.fragmentation)
    assert f"phase on pipeline rank {most}" in run(capsys, *words)[1]


def test_the_machines_memory_is_part_of_the_verdict(capsys, tmp_path):
    """The same for a recipe and for a model, and on both sides of what is told."""
    machines = tmp_path / "cluster.toml"
    recipe = ["llama3-8b-pretrain", "--gpus", "8", "--layout.dp_shard", "8", "--quick"]
    recipe += ["--offload.optimizer", "true", "--cluster", str(machines)]
    model = ["--model", "llama3-8b", "--gpus", "8", "--seq-len", "4k", "--offload", "optimizer"]
    model += ["--global-batch-tokens", "4M", "--quick", "--cluster", str(machines)]
    for gib, fits in ((228, False), (229, True)):
        machines.write_text(f'gpu = "h100-sxm"\nhost_memory_gib = {gib}\n')
        code, out, _ = run(capsys, *recipe, "--json")
        configured = json.loads(out)
        assert (code, configured["fits"], configured["host"]["fits"]) == (1 - fits, fits, fits)
        code, out, _ = run(capsys, *recipe)
        words = " ".join(out.split())
        assert f"A machine's memory: 228.1 of {gib}.0 GiB (offload.optimizer 119.7," in words
        assert ("it fits from host_memory_gib=229 on" in words) != fits
        code, out, _ = run(capsys, *model, "--json")
        planned = json.loads(out)
        assert (code, planned["fits"]) == (1 - fits, fits)
        for key in ("offload.optimizer", "checkpoint", "processes"):
            same = planned["host"]["items"][key]
            assert same == pytest.approx(configured["host"]["items"][key], rel=0.001)
        if not fits:
            assert "host_memory_gib=" in planned["reason"]
            assert planned["gpus"] > 8


def test_a_table_of_runs_is_scored(capsys, tmp_path):
    code, _, err = run(capsys, "--validate", str(tmp_path / "none.csv"))
    assert code == 3
    assert "none.csv" in err
    columns, *rows = shipped_table().read_text().splitlines()
    good = next(row for row in rows if row.startswith("lf0001,"))
    for row, exit_code in ((good, 0), (good.replace(",h100-sxm,", ",h100-sxn,"), 3)):
        (tmp_path / "runs.csv").write_text(f"{columns}\n{row}\n")
        code, out, _ = run(capsys, "--validate", str(tmp_path / "runs.csv"))
        assert code == exit_code
        assert ("furthest off in step time" in out) == (code == 0)
        assert ("not used: unknown accelerator 'h100-sxn'" in out) == (code == 3)


def test_no_torch():
    words = ["plan", *SMALL, "--quick", "--max-cp", "1", "--max-pp", "1", "--json"]
    code = (
        "import sys; from stepwell.cli import main\n"
        f"for words in ({words!r}, ['plan', 'llama3-8b-pretrain', '--quick', '--json']):\n"
        "    assert main(words) == 0\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "False", done.stderr
