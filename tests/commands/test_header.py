"""The header says what the run is; its figures are those of the ledger and of the settings."""

import json
import re
import subprocess
import sys
from math import prod

import pytest

from stepwell.cli import main
from stepwell.commands import plan
from stepwell.commands.header import header_text, parts_text, plan_of, size_text
from stepwell.commands.ranks import Ranks
from stepwell.config import Run
from stepwell.hardware import device_kind
from stepwell.models.flops import count_parameters
from stepwell.models.lora_shapes import adapter_shapes
from stepwell.parallel.lever_rules import share_in_8_bits
from stepwell.plan import units
from stepwell.plan.memory.ledger import predict_memory

# As in the text: a size, with its unit.
SIZE = r"([\d,.]+) (KiB|MiB|GiB)"
LAYOUTS = {
    "one": ({}, Ranks()),
    "one in a group": ({}, Ranks(1, grouped=True)),
    "zero 3": ({}, Ranks(4, grouped=True)),
    "zero 1": ({"layout.zero": 1}, Ranks(4, grouped=True)),
    "pipeline": ({"layout.pp": 2, "layout.zero": 1}, Ranks(4, grouped=True)),
    "offload": ({"offload.optimizer": True, "offload.activations": True}, Ranks()),
    "large": ({"model.d_model": 2048, "model.num_layers": 24}, Ranks(2, grouped=True)),
}


def four(**settings) -> Run:
    return Run.parse({}, {"train.global_batch_rows": 16, "train.micro_batch_rows": 2, **settings})


def test_a_pretraining_run():
    run = Run.parse({}, {"name": "x", "train.steps": 200, "train.global_batch_rows": 24})
    text = header_text(run)
    assert f"x: {count_parameters(run.model).total:,} parameters (llama), bf16, adamw" in text
    assert "200 steps of 12,288 tokens (24 rows of 512) = 2,457,600 tokens" in text
    assert size_text(predict_memory(run, device=device_kind()).peak_bytes) in text
    assert "rank" not in text


def test_ranks_need_less_each():
    run = Run.parse({}, {"model.d_model": 1024, "model.num_layers": 12})
    assert (
        predict_memory(run, 4, device=device_kind()).peak_bytes
        < predict_memory(run, device=device_kind()).peak_bytes
    )
    text = header_text(run, Ranks(4, grouped=True))
    assert size_text(predict_memory(run, 4, device=device_kind()).peak_bytes) in text
    assert "on each of 4 ranks" in text


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_add_up_to_the_total(name):
    settings, ranks = LAYOUTS[name]
    run = four(**settings)
    lines = header_text(run, ranks).splitlines()
    place = next(i for i, line in enumerate(lines) if "predicted memory" in line)
    found = re.search(SIZE, lines[place])
    assert found
    parts = re.findall(SIZE, lines[place + 1])
    assert {unit for _, unit in parts} == {found[2]}
    total = sum(round(10 * float(size.replace(",", ""))) for size, _ in parts)
    assert total == round(10 * float(found[1].replace(",", "")))
    memory = plan_of(run, ranks)["memory"]
    assert sum(memory["items"].values()) == memory["peak_bytes"]
    assert memory["by_phase"][memory["phase"]] == memory["peak_bytes"]


@pytest.mark.parametrize("pp", [1, 2])
def test_the_plan_of_the_recipe_has_the_same_tensors(pp, tmp_path, capsys):
    """And says so; what it adds is of the GPU, not of tensors."""
    run = four(**{"layout.pp": pp, "model.num_layers": 6})
    run.save(tmp_path / "run.toml")
    words = [str(tmp_path / "run.toml"), "--gpus", "4", "--quick"]
    assert plan.main([*words, "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["memory/items"]
    beside = ("fragmentation", "driver and libraries", "communicators")
    tensors = sum(n for name, n in items.items() if name not in beside)
    assert tensors == plan_of(run, Ranks(4, True), "cuda")["memory"]["peak_bytes"]
    assert all(items[name] > 0 for name in beside[1:])
    assert plan.main(words) == 0
    shown = rf"tensors of these\s+{re.escape(units.size_text(tensors))}\s"
    assert re.search(shown, capsys.readouterr().out)
    assert "tensors on a GPU; `stepwell plan` adds" in header_text(run, Ranks(4, True), "cuda")
    assert "tensors on a CPU; `stepwell plan` is of GPUs" in header_text(run, Ranks(4, True), "cpu")


def test_what_the_layout_is_and_what_it_keeps_where():
    text = header_text(four(**{"layout.pp": 2, "layout.zero": 1}), Ranks(4, True, assumed=True))
    assert "4 ranks (assumed: " in text
    assert ": pp 2 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 1, zero 1, pipeline 1f1b" in text
    assert re.search(r"on pipeline rank \d, which needs the most of 2\n", text)
    assert "weights (1/2 of them) " in text
    assert "weights gathered for use" in text
    # A single process casts; a rank of a group gathers.
    assert "weights cast for use" in header_text(four())
    assert "1 rank: pp 1 x" in header_text(four(), Ranks(1, grouped=True))
    levers = {
        "remat.mode": "every", "remat.every": 3, "precision.fp8.recipe": "tensorwise",
        "offload.optimizer": True, "offload.activations": True, "layout.compile": True,
    }  # fmt: skip
    run = four(**levers)
    text = header_text(run)
    assert (
        "  recomputation every 3, fp8 tensorwise, offload of optimizer and activations, "
        "blocks compiled\n" in text
    )
    host = predict_memory(run, device=device_kind()).host
    assert f"offload.optimizer {size_text(host['optimizer'])}" in text
    assert f"offload.activations {size_text(host['activations'])}" in text
    assert "recomputation" not in header_text(four())


def test_the_share_of_moments_in_8_bits_is_told():
    eight = Run.parse({}, {"optim.kind": "adamw8bit"})
    share = share_in_8_bits(eight)
    assert 0.5 < share < 1
    assert f"moments in 8 bits {share:.0%}" in header_text(eight)
    assert "moments" not in header_text(Run())


def test_a_grpo_run_counts_answers():
    run = Run.parse({"method": {"kind": "grpo", "prompts_per_step": 4, "group_size": 3}})
    assert "4 prompts x 3 answers = 12 answers of at most 64 tokens" in header_text(run)


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"kind": "dpo", "pairs_per_step": 8}, "10 steps of 8 pairs = 80; rows of 512 tokens"),
        ({"kind": "dpo", "loss": {"kind": "kto"}}, "10 steps of 16 labelled answers = 160"),
        (
            {"kind": "reward", "epochs": 2.0},
            "16 pairs = 160, or 2 passes over the data",
        ),
        ({"kind": "reward", "objective": "process"}, "10 steps of 16 rows = 160"),
    ],
)
def test_a_run_on_judged_answers_counts_what_it_takes(method, told):
    assert told in header_text(Run.parse({"method": method}, {"train.steps": 10}))


def test_a_run_with_adapters_says_what_it_trains():
    run = Run.parse({}, {"lora.rank": 4, "lora.quantize": "nf4"})
    shapes = adapter_shapes(run.model, run.lora)
    trained = sum(prod(shape) for shape in shapes.values())
    text = f"{trained:,} trained, in adapters of rank 4 over a base in nf4"
    assert text in header_text(run)
    assert "trained" not in header_text(Run())


def test_sizes():
    assert size_text(155 * 2**20) == "155 MiB"
    assert size_text(1536 * 2**20) == "1.5 GiB"
    assert size_text(1536) == "2 KiB"
    third = 2**30 // 3
    assert parts_text({"a": third, "b": third, "c": third + 1, "d": 0}) == (
        "a 0.3 GiB, b 0.3 GiB, c 0.4 GiB"
    )


def test_check_starts_nothing(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["pretrain", "quickstart-pretrain", "--check", "--dir", str(folder)]
    # The plan is shown, and then what a start would refuse.
    assert main([*words, "--data.tokenizer", str(tmp_path / "nothing")]) == 3
    shown = capsys.readouterr()
    assert "4,000,000 parameters" in shown.out
    assert f"no tokenizer at {tmp_path / 'nothing'}" in shown.err
    assert main(["pretrain", "--check", "--dir", str(folder)]) == 0  # it names no data
    assert not folder.exists()


def test_check_as_json(capsys):
    words = ["pretrain", "--check", "--json", "--layout.tp", "2", "--offload.optimizer"]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["ranks"], plan["ranks_assumed"], plan["layout"]["tp"]) == (2, True, 2)
    assert plan["offload"] == ["optimizer"]
    assert plan["memory"]["host"]["optimizer"] > 0
    assert main(["pretrain", "--check", "--json", "--layout.tp", "2", "--nproc", "4"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["ranks"], plan["ranks_assumed"], plan["layout"]["dp_shard"]) == (4, False, 2)


REFUSED = [
    ("--model.num_kv_heads 3", "num_kv_heads=3"),
    ("--nproc 8 --layout.tp 8 --model.num_heads 4 --model.num_kv_heads 4", "layout.tp=8 must"),
    ("--nproc 3 --layout.tp 2", "layout.tp=2 must divide the number of ranks, 3"),
    ("--nproc 2 --layout.pp 2 --layout.zero 2", "layout.pp=2 sums gradients"),
    ("--layout.pp 2 --layout.zero 2", "layout.pp=2 sums gradients"),
    ("--nproc 4 --train.global_batch_rows 2", "4 ranks exceed train.global_batch_rows=2"),
    ("--precision.fp8.recipe delayed --precision.compute fp16", "not 'fp16'"),
    ("--precision.fp8.recipe tensorwise --model.d_ff 200", "model.d_ff=200"),
    (
        "--optim.release_gradients true --train.global_batch_rows 8 --train.micro_batch_rows 2",
        "optim.release_gradients=true does not go with",
    ),
    ("--offload.parameters true", "needs a process group"),
    (
        "--offload.optimizer true --model.d_model 65536 --model.num_layers 96 --model.d_ff 131072",
        "of host memory",
    ),
    ("--offload.optimizer true --optim.kind muon", "not optim.kind='muon'"),
    ("--remat.mode sqrt --layout.compile true", "remat.mode='sqrt'"),
    ("--precision.fp8.recipe tensorwise --precision.fp8.keep ['*.nope']", "'*.nope'"),
    ("--nproc 0", "--nproc 0 must be at least 1"),
]


@pytest.mark.parametrize("method", ["pretrain", "sft", "grpo"])
@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_check_refuses_what_the_run_would_refuse(method, words, message, capsys):
    if method == "grpo" and "exceed" in message:
        pytest.skip("a rank may be without a prompt")
    if method == "grpo":
        words = words.replace("train.global_batch_rows", "method.prompts_per_step")
    assert main([method, "--check", *words.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("method", "key", "unit"),
    [("dpo", "pairs_per_step", "pair"), ("reward", "rows_per_step", "row")],
)
def test_ranks_share_the_units_of_the_method(method, key, unit, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    words = ["--data.path", str(rows), f"--method.{key}", "4"]
    assert main([method, "--check", *words, "--nproc", "8"]) == 2
    error = capsys.readouterr().err
    assert f"8 ranks exceed method.{key}=4, so some would have no {unit}" in error
    assert "--nproc 4" in error
    assert "global_batch_rows" not in error
    main([method, "--check", *words, "--nproc", "4"])
    assert "exceed" not in capsys.readouterr().err


def test_ranks_that_are_there_go_before_nproc(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0" if name != "WORLD_SIZE" else "1")
    assert main(["pretrain", "--check", "--offload.parameters", "true"]) == 0
    assert "1 rank: pp 1" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--check"], []])
def test_a_refusal_before_any_rank_starts_needs_no_torch(words):
    code = (
        "import sys\nfrom stepwell.cli import main\n"
        f"code = main(['pretrain', '--nproc', '8', '--layout.zero', '2', '--layout.pp', '2', "
        f"*{words!r}])\n"
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("stepwell: ")
    assert "layout.pp=2 sums gradients" in done.stderr
    assert "rank 0" not in done.stderr


def test_a_layout_of_several_ranks_in_one_process(capsys):
    assert main(["pretrain", "--layout.pp", "2", "--layout.tp", "2"]) == 2
    assert "needs 4 ranks, and this is one process; give --nproc 4" in capsys.readouterr().err
