"""The reader of published runs, on rows of four sources (their `source` cells say which)."""

import csv

import pytest

from stepwell.hardware import GIB
from stepwell.plan.calibration.machines import OMNI_PATH, network_bytes_per_s
from stepwell.plan.calibration.published import read_row
from stepwell.plan.calibration.table import read_runs, read_table, shipped_table
from stepwell.plan.cluster import GBIT
from stepwell.types import DataError

ROWS = ("lf0001", "dg0055", "bs0143", "mb0050", "tt0033", "sk0001")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, str]]:
    with open(shipped_table(), newline="", encoding="utf-8") as file:
        return {row["id"]: row for row in csv.DictReader(file) if row["id"] in ROWS}


def write(path, rows, drop=()):
    columns = [name for name in rows[0] if name not in drop]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_llm_foundry_s_mpt_70b(rows):
    run = read_row(rows["lf0001"], "lf0001")
    dims, layout = run.job.dims, run.job.layout
    assert (dims.tied, dims.mlp, dims.learned_positions) == (True, "gelu", 2048)
    assert dims.parameters() == pytest.approx(64862437376, rel=1e-3)
    assert (layout.program, layout.zero, layout.dp_shard) == ("fsdp", 3, 512)
    assert (layout.num_micro_batches, layout.recompute) == (1, "full")
    assert (layout.compiled, layout.attention_kernel) == (False, "triton")
    assert (run.step_s, run.fits, run.source_key) == (16.2685, True, "llm-foundry")


def test_nvidia_s_llama_70b(rows):
    run = read_row(rows["dg0055"], "dg0055")
    layout, machines = run.job.layout, run.job.cluster
    assert (layout.tp, layout.pp, layout.stages_per_rank, layout.cp) == (4, 4, 5, 2)
    assert (layout.program, layout.schedule, layout.zero) == ("megatron", "interleaved-1f1b", 1)
    assert (layout.num_micro_batches, layout.attention_kernel) == (64, "native")
    assert layout.overlap_tp
    assert layout.sequence_parallel
    assert machines.network_bytes_per_s == 400 * GBIT


def test_a_run_out_of_memory_has_no_step_time(rows):
    run = read_row(rows["bs0143"], "bs0143")
    assert (run.fits, run.step_s, run.peak_bytes) == (False, None, None)
    assert not run.job.layout.flash
    assert not run.job.layout.overlap_data
    assert run.job.cluster.scaleup_gpus == 4


def test_experts_their_width_and_their_heads(rows):
    run = read_row(rows["mb0050"], "mb0050")
    dims = run.job.dims
    assert dims.experts is not None
    assert (dims.experts.num_experts, dims.experts.top_k, dims.experts.d_ff) == (128, 8, 768)
    assert (dims.head_dim, dims.q_width) == (128, 4096)
    assert dims.parameters() == pytest.approx(30.5e9, rel=0.01)
    assert dims.parameters(active=True) == pytest.approx(3.3e9, rel=0.03)
    assert (run.job.layout.precision, run.job.layout.recipe) == ("fp8", "tensorwise")


def test_every_other_layer_is_said_in_the_notes(rows):
    assert read_row(rows["tt0033"], "tt0033").job.layout.recompute == "every"


def test_of_several_printed_rates_one_is_used(rows):
    row = rows["lf0001"] | {"step_time_s": ""}
    assert read_row(row, "x").step_s == pytest.approx(4096 * 2048 / 1007 / 512)
    assert read_row(row | {"step_time_s": "16"}, "x").step_s == 16


def test_memory_is_in_gib(rows):
    row = rows["lf0001"] | {"peak_mem_gib": "10", "mem_kind": "torch peak reserved"}
    assert read_row(row, "x").peak_bytes == 10 * GIB


@pytest.mark.parametrize(
    ("change", "rows_of_micro_batch"),
    [({}, 4), ({"tp": "8", "pp": "8", "dp": "8"}, 1), ({"global_batch_sequences": "512"}, 1)],
)
def test_a_micro_batch_that_is_not_printed(rows, change, rows_of_micro_batch):
    run = read_row(rows["lf0001"] | {"micro_batch": "", "step_time_s": ""} | change, "x")
    assert run.job.layout.micro_batch_rows == rows_of_micro_batch


def test_latent_attention_shared_experts_and_dense_layers(rows):
    dims = read_row(rows["sk0001"], "sk0001").job.dims
    assert dims.experts is not None
    assert (dims.experts.num_shared, dims.experts.num_dense_layers) == (2, 1)
    assert (dims.d_ff, dims.score_dim) == (11264, 160)


def test_missing_columns_are_named(rows, tmp_path):
    path = write(tmp_path / "t.csv", list(rows.values()), drop=("tp", "vocab"))
    with pytest.raises(DataError, match="lacks the columns vocab, tp"):
        read_table(path)
    measured = ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib")
    path = write(tmp_path / "t.csv", list(rows.values()), drop=measured)
    with pytest.raises(DataError, match="no measured column"):
        read_table(path)


def test_numbers_and_flags_as_data_frames_write_them(rows):
    row = rows["dg0055"]
    floats = {k: f"{v}.0" if v.isdigit() and k != "id" else v for k, v in row.items()}
    assert read_row(floats | {"sp": "True"}, "x") == read_row(row, "x")


def test_optional_columns_may_be_missing(rows, tmp_path):
    optional = ("notes", "vpp", "sp", "interconnect", "config_key", "quality", "fit", "workload")
    path = write(tmp_path / "t.csv", [rows["lf0001"]], drop=optional)
    (run,) = read_runs(path)
    assert (run.config_key, run.quality, run.workload) == ("lf0001", "A", "pretrain")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_gpus": "many"}, "n_gpus='many' is not a number"),
        ({"n_gpus": "-8"}, "n_gpus='-8' must be above 0"),
        ({"step_time_s": "nan"}, "step_time_s='nan' is not a finite number"),
        ({"step_time_s": "inf"}, "step_time_s='inf' is not a finite number"),
        ({"vocab": "1"}, "vocab=1 must be at least 2"),
        ({"n_layers": "1.5"}, "n_layers='1.5' is not a whole number"),
        ({"d_model": ""}, "d_model is not printed"),
        ({"tp": "3"}, "n_gpus=512 is no multiple of tp x pp x cp = 3"),
        ({"precision": "fp9"}, "precision='fp9' is none of bf16, fp16"),
        ({"precision": ""}, "no precision printed"),
        ({"global_batch_sequences": "4097"}, "no multiple of micro_batch x dp"),
        ({"gpu": "h100-sxn"}, "unknown accelerator 'h100-sxn'"),
        ({"gpu": "a100-80g", "precision": "fp8"}, "no peak for 'fp8'"),
        ({"step_time_s": "", "tokens_per_s_per_gpu": ""}, "tflops_per_gpu alone says no time"),
    ],
)
def test_broken_rows_are_counted_with_their_reason(rows, tmp_path, change, reason):
    good = rows["lf0001"]
    table = read_table(write(tmp_path / "t.csv", [good, {**good, "id": "bad", **change}]))
    assert [run.row_id for run in table.runs] == ["lf0001"]
    assert list(table.skipped) == ["bad"]
    assert reason in table.skipped["bad"]
    assert sum(table.reasons().values()) == 1


def test_a_missing_column_is_named_once(rows, tmp_path):
    path = write(tmp_path / "t.csv", [rows["lf0001"]], drop=("vocab", "d_ff"))
    with pytest.raises(DataError) as caught:
        read_table(path)
    assert str(caught.value).count("vocab") == 1


def test_any_gate_has_three_matrices(rows):
    row = {**rows["dg0055"], "mlp_kind": "geglu"}
    assert read_row(row, "x").job.dims == read_row(rows["dg0055"], "x").job.dims


def test_megatron_may_divide_gradients_too(rows):
    row = {**rows["dg0055"], "zero_stage": "2", "notes": "Megatron"}
    assert read_row(row, "x").job.layout.program == "megatron"
    assert read_row({**row, "notes": ""}, "x").job.layout.program == "fsdp"


def test_rows_of_one_name_are_both_there(rows, tmp_path):
    row = rows["lf0001"]
    again = row | {"step_time_s": "16"}
    table = read_table(write(tmp_path / "t.csv", [row, again, row]))
    assert [run.row_id for run in table.runs] == ["lf0001", "lf0001 (line 3)"]
    assert table.runs[1].step_s == 16
    assert table.skipped == {"lf0001 (line 4)": "the row of line 2 once more"}


@pytest.mark.parametrize(
    ("words", "gbit"),
    [
        ("NVLink4 900 GB/s bidir; 8x400 Gb/s IB per node", 400),
        ("Selene: NVLink3 + 8x HDR 200 Gb/s IB per node", 200),
        ("A100-SXM4-80GB; 4x100 Gb/s RoCE per node", 50),
        ("nvlink; InfiniBand/RoCE 1600 Gb/s per node", 200),
        ("NVLink; RDMA 400 Gb/s per GPU", 400),
        ("p5.48xlarge: NVLink; EFA 3200 Gb/s per node", 400),
        ("V100 4/node NVLink, Omni-Path (Jean Zay)", 100),
        ("4x100 Gb/s Omni-Path per node", 50),
        ("NVLink5", None),
        ("", None),
    ],
)
def test_the_network_in_words(words, gbit):
    found = network_bytes_per_s(words, 8)
    assert found == (None if gbit is None else pytest.approx(gbit * GBIT))


def test_rings_get_little_of_omni_path(rows):
    row = next(r for r in rows.values() if "Omni-Path" in r["interconnect"])
    machines = read_row(row, "x").job.cluster
    assert (machines.ring_share, machines.network_bytes_per_s) == (OMNI_PATH, 100 * GBIT)
    other = read_row({**row, "interconnect": "4x100 Gb/s IB per node"}, "x").job.cluster
    assert (other.ring_share, other.network_bytes_per_s) == (1.0, 100 * GBIT)


def test_what_notes_say_of_a_program(rows):
    """Any row will do: facts of a step are read from the notes of each."""
    row = next(r for r in rows.values() if r["zero_stage"] == "3" and r["gpu"] == "h100-sxm")

    def layout(notes):
        return read_row({**row, "source_key": "x", "notes": notes}, "x").job.layout

    plain = layout("")
    assert plain.reduce_every_micro_batch
    assert not layout("no_sync").reduce_every_micro_batch
    assert (plain.gradient_precision, layout("sums in bf16").gradient_precision) == ("fp32", "bf16")
    kernels = [layout(notes).attention_kernel for notes in ("", "cuDNN attention")]
    assert kernels == ["older", "native"]
    assert layout("MoE all-to-all overlap on").overlap_ep
    assert not plain.overlap_ep


def test_the_shipped_table_is_used_nearly_whole():
    table = read_table(shipped_table())
    assert len(table.runs) + len(table.skipped) == 787
    assert len(table.runs) >= 765
    assert all("printed" in why or "alone" in why for why in table.reasons())
