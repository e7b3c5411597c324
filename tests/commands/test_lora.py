"""A run with adapters by its commands: trained, killed, gone on, exported, started from."""

import json

import pytest
import torch
from tests.runs import assert_equal, killed, make_world, measured, settings, words

from stepwell import cli
from stepwell.models.flops import parameter_shapes
from stepwell.models.hf import load_hf, read_hf_config
from stepwell.models.peft import load_peft, read_peft_config
from stepwell.train.run_checkpoints import latest
from stepwell.train.weights import checkpoint_weights, read_model

ADAPTED = {
    "lora.rank": 4,
    "lora.dropout": 0.2,
    "lora.quantize": "nf4",
    "checkpoint.every_steps": 2,
    "checkpoint.asynchronous": "false",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("lora"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(words("sft", settings("sft", "whole", **ADAPTED))) == 0
        yield folder


def merged(folder):
    last = latest(folder)
    assert last is not None
    return dict(checkpoint_weights(last, read_model(str(last))))


def run(capsys, *arguments: str) -> str:
    code = cli.main(list(arguments))
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_adapters(world):
    command = words("sft", settings("sft", "again", **ADAPTED))
    killed(command, world, world / "log", world / "again", 3)
    assert cli.main(command) == 0
    assert_equal(merged(world / "again"), merged(world / "whole"))
    assert measured(world / "again")[-1] == measured(world / "whole")[-1]


def test_exports_are_merged_or_the_adapters_alone(world, capsys):
    run(capsys, "export", "whole", "--out", "merged", "--dtype", "fp32")
    cfg = read_hf_config("merged")
    found = dict(load_hf("merged", parameter_shapes(cfg)))
    assert_equal(found, merged(world / "whole"))
    said = json.loads(run(capsys, "export", "whole", "--out", "peft", "--adapter", "--json"))
    apart = said.pop("base_difference")
    assert 0.005 < apart < 0.15
    assert said == {"folder": "peft", "base": "base", "quantize": "nf4"}
    text = run(capsys, "export", "whole", "--out", "peft-text", "--adapter")
    assert "trained over the base in nf4 (4 bits)" in text
    assert f"are {apart:.1%} of their length (mean) from the whole ones" in text
    lora = read_peft_config("peft", cfg)
    assert (lora.rank, lora.dropout) == (4, 0.2)
    adapters = dict(load_peft("peft", cfg, lora))
    assert max(value.abs().max() for value in adapters.values()) > 0


def test_the_error_of_4_bits_is_reported_on_request(world, capsys):
    line = run(capsys, "export", "whole", "--out", "again4", "--four-bit-error", "--json")
    errors = json.loads(line)["four_bit_error"]
    assert len(errors) == 14
    assert all(0.005 < error < 0.15 for error in errors.values())
    text = run(capsys, "export", "whole", "--out", "text4", "--four-bit-error")
    assert "blocks.0.attn.wq:" in text


@pytest.mark.parametrize(
    ("words_", "code", "said"),
    [
        ("export base --out x --adapter", 4, "holds a whole model, no adapter"),
        ("export whole --out x --adapter --four-bit-error", 2, "leave out it or --adapter"),
        ("export base --out x --four-bit-error", 4, "holds a whole model, no adapter"),
    ],
)
def test_what_cannot_be_exported_is_said(world, capsys, words_, code, said):
    assert cli.main(words_.split()) == code
    assert said in capsys.readouterr().err
    assert not (world / "x").exists()


def test_the_next_run_starts_from_the_merged_weights(world):
    values = settings("sft", "next", **{"model.init": "whole", "train.steps": 1, "optim.lr": 1e-12})
    assert cli.main(words("sft", values)) == 0
    after = merged(world / "next")
    for name, value in merged(world / "whole").items():
        assert torch.allclose(after[name], value, atol=1e-6), name
