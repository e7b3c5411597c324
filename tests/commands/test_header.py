"""The header says what the run is; its figures are those of the ledger and of the settings."""

from stepwell.cli import main
from stepwell.commands.header import header_text, size_text
from stepwell.config import Run
from stepwell.models.flops import count_parameters
from stepwell.plan.memory import predict_memory


def test_a_pretraining_run():
    run = Run.parse({}, {"name": "x", "train.steps": 200, "train.global_batch_rows": 24})
    text = header_text(run)
    assert f"x: {count_parameters(run.model).total:,} parameters (llama), bf16, adamw" in text
    assert "200 steps of 12,288 tokens (24 rows of 512) = 2,457,600 tokens" in text
    assert size_text(predict_memory(run).peak_bytes) in text
    assert "ranks" not in text


def test_ranks_need_less_each():
    run = Run.parse({}, {"model.d_model": 1024, "model.num_layers": 12})
    assert predict_memory(run, 4).peak_bytes < predict_memory(run).peak_bytes
    assert size_text(predict_memory(run, 4).peak_bytes) in header_text(run, 4)
    assert "on each of 4 ranks" in header_text(run, 4)


def test_a_grpo_run_counts_answers():
    run = Run.parse({"method": {"kind": "grpo", "prompts_per_step": 4, "group_size": 3}})
    assert "4 prompts x 3 answers = 12 answers of at most 64 tokens" in header_text(run)


def test_sizes():
    assert size_text(155 * 2**20) == "155 MiB"
    assert size_text(1536 * 2**20) == "1.5 GiB"


def test_check_starts_nothing(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["pretrain", "quickstart-pretrain", "--check", "--dir", str(folder)]) == 0
    assert "4,000,000 parameters" in capsys.readouterr().out
    assert not folder.exists()


def test_check_still_refuses_what_cannot_be(capsys):
    assert main(["pretrain", "--check", "--model.num_kv_heads", "3"]) == 2
    assert "num_kv_heads=3" in capsys.readouterr().err
