"""What a table of runs is refused for, whole or by the row: each rule on both of its sides."""

import csv
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.hardware import GIB
from stepwell.plan.calibration.checks import check_measured
from stepwell.plan.calibration.facts import with_facts
from stepwell.plan.calibration.published import MEASURED_AS, read_row
from stepwell.plan.calibration.table import READ, like, read_table, shipped_table
from stepwell.plan.cluster import GBIT
from stepwell.plan.steptime.step import least_step_s, predict_step
from stepwell.types import ConfigError, DataError

ROWS = ("lf0001", "dg0055", "mb0050", "tt0033")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, str]]:
    """A dense model with FSDP on 512 GPUs, one with TP 4, PP 4 and CP 2, and one with experts."""
    with open(shipped_table(), newline="", encoding="utf-8") as file:
        return {row["id"]: row for row in csv.DictReader(file) if row["id"] in ROWS}


def refused(row: dict[str, str], reason: str) -> None:
    with pytest.raises((DataError, ConfigError)) as caught:
        read_row(row, "x")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "bad", "reason", "good"),
    [
        ("dg0055", {"n_layers": "17", "n_params_total": "", "n_params_active": ""},
         "pp=4 x vpp=5 are more stages than",
         {"n_layers": "18", "n_params_total": "", "n_params_active": "", "tflops_per_gpu": "",
          "mfu_pct": ""}),
        ("dg0055", {"vpp": "1000"}, "pp=4 x vpp=1000 are more stages", {"vpp": "20"}),
        ("dg0055", {"vpp": "1.5"}, "vpp='1.5' is not a whole number", {"vpp": "2.0"}),
        ("lf0001", {"vpp": "2"}, "vpp=2 is of a pipeline, and pp=1 has none", {"vpp": "1"}),
        ("dg0055", {"n_kv_heads": "13"}, "n_heads=64 is no multiple", {"n_kv_heads": "16"}),
        ("dg0055", {"n_kv_heads": "1", "tp": "64", "pp": "1", "cp": "1", "vpp": "", "dp": "",
                    "n_heads": "32", "d_model": "8192"}, "tp=64 does not divide n_heads=32",
         {"n_kv_heads": "8"}),
        ("dg0055", {"d_model": "8193"}, "d_model=8193 is no multiple of n_heads=64",
         {"d_model": "8193", "head_dim": "128"}),
        ("dg0055", {"d_ff": "28674"}, "tp=4 does not divide d_ff=28674", {"d_ff": "28676"}),
        ("dg0055", {"seq_len": "8200"}, "seq_len=8200 does not divide into the 16 parts",
         {"seq_len": "8208"}),
        ("lf0001", {"ep": "8"}, "ep=8 without n_experts", {"ep": "1"}),
        ("mb0050", {"ep": "3"}, "ep=3 does not divide n_experts=128", {"ep": "4"}),
        ("mb0050", {"ep": "128"}, "does not divide the", {"ep": "1"}),
        ("mb0050", {"top_k": "129"}, "top_k=129 is more than n_experts=128",
         {"top_k": "128", "n_params_active": "", "tflops_per_gpu": "", "step_time_s": "100",
          "tokens_per_s_per_gpu": "", "mfu_pct": ""}),
        ("lf0001", {"top_k": "2"}, "top_k='2' without n_experts", {"top_k": ""}),
        ("lf0001", {"workload": "banana"}, "workload='banana' is none of pretrain, sft, lora",
         {"workload": "SFT"}),
        ("lf0001", {"sp": "maybe"}, "sp='maybe' is neither true nor false", {"sp": "False"}),
        ("lf0001", {"attention": "flesh"}, "(did you mean 'flash'?)", {"attention": "FLASH"}),
        ("lf0001", {"fit": "fits"}, "fit='fits' is none of ok, OOM", {"fit": "OK"}),
        ("lf0001", {"fit": "oom"}, "fit=OOM, and yet a step was measured",
         {"fit": "oom", "step_time_s": "", "tokens_per_s_per_gpu": ""}),
        ("lf0001", {"dp": "256"}, "dp=256 is not n_gpus / (tp x pp x cp) = 512", {"dp": "512"}),
        ("lf0001", {"zero_stage": "4"}, "zero_stage='4' is none of", {"zero_stage": "HSDP"}),
        ("lf0001", {"shard_group": "7"}, "groups of 7 ranks", {"shard_group": "8"}),
        ("lf0001", {"gpu": "A100"}, "gpu='A100' is of several: a100-40g, a100-80g",
         {"gpu": "H100-SXM"}),
        ("lf0001", {"precision": "mxfp8"}, "h100-sxm has no units for", {"precision": "BF16"}),
        ("dg0055", {"schedule": "zbv"}, "schedule='zbv' cannot have vpp=5; the nearest is 2",
         {"schedule": "zbv", "vpp": "2"}),
        ("lf0001", {"schedule": "zbv"}, "pp=1 has none", {"schedule": "1f1b"}),
        ("lf0001", {"imbalance": ".5"}, "imbalance='.5' must be at least 1", {"imbalance": "1"}),
        ("lf0001", {"trained_share": "2"}, "must be at most 1", {"trained_share": "1"}),
        ("lf0001", {"offload": "optimizer+x"}, "offload='x' is none of", {"offload": "none"}),
        ("lf0001", {"step_time_s": "0.001"}, "beats the peak", {"step_time_s": "16"}),
        ("lf0001", {"peak_mem_gib": "60000"}, "more than the 79.1 GiB of h100-sxm",
         {"peak_mem_gib": "79"}),
    ],
)  # fmt: skip
def test_a_cell_that_cannot_be(rows, name, bad, reason, good):
    refused(rows[name] | bad, reason)
    read_row(rows[name] | good, "x")


def test_the_peak_and_the_memory_are_limits(rows):
    job = read_row(rows["lf0001"], "x").job
    least, has = least_step_s(job), job.cluster.accelerator.memory_bytes
    step = predict_step(job)
    assert least == pytest.approx(step.model_flops / step.peak_flops_per_s)
    check_measured(job, least, has)
    with pytest.raises(DataError, match="beats the peak"):
        check_measured(job, 0.999 * least, None)
    with pytest.raises(DataError, match="peak_mem_gib"):
        check_measured(job, None, has + GIB)


def test_capitals_do_not_count(rows):
    row = rows["dg0055"]
    enums = ("precision", "attention", "mlp_kind", "activation_checkpointing", "gpu", "fit")
    shouted = row | {name: row[name].upper() for name in enums}
    assert read_row(shouted, "x").job == read_row(row, "x").job


def test_what_a_row_says_itself_decides(rows):
    row = rows["dg0055"] | {"network_gbit_per_s": "123", "moment_precision": "bf16"}
    row |= {"compiled": "false", "overlap_ep": "yes", "reduce_gradients": "micro-batch"}
    row |= {"offload": "optimizer activations", "program": "fsdp", "tied": "true"}
    job = read_row(row, "x").job
    assert job.cluster.network_bytes_per_s == 123 * GBIT
    layout = job.layout
    assert (layout.moment_precision, layout.compiled, layout.overlap_ep) == ("bf16", False, True)
    assert layout.reduce_every_micro_batch
    assert (layout.offload_optimizer, layout.offload_parameters) == (True, False)
    assert layout.offload_activations
    assert (layout.program, job.dims.tied) == ("fsdp", True)
    assert with_facts(layout, {}) == layout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"interconnect": "InfiniBand NDR"}, "interconnect='InfiniBand NDR' says no rate"),
        ({"interconnect": "400Gbps IB"}, "interconnect='400Gbps IB' says no rate"),
        ({"interconnect": ""}, "no rate of the network: its GPU's usual 400 Gbit/s each"),
        ({"attention": ""}, "no attention: flash"),
        ({"activation_checkpointing": ""}, "no activation_checkpointing: its program's default"),
        ({"micro_batch": ""}, "no micro_batch: one row in a pipeline, else up to four"),
        ({"zero_stage": ""}, "no zero_stage: 1"),
        ({"gpus_per_node": ""}, "no gpus_per_node: h100-sxm's usual 8"),
        ({"peak_mem_gib": "50", "mem_kind": "guess"}, "mem_kind='guess': taken as nvidia-smi's"),
    ],
)
def test_what_is_assumed_is_said(rows, change, said):
    row = rows["lf0001"] | {"interconnect": "400 Gbit/s per GPU"}
    assert read_row(row, "x").assumed == ()
    (found,) = read_row(row | change, "x").assumed
    assert found.startswith(said)


def test_a_network_matters_only_between_machines(rows):
    row = rows["lf0001"] | {"interconnect": "", "n_gpus": "8", "dp": "8", "step_time_s": ""}
    assert not read_row(row, "x").assumed


def write(path, rows, separator=",", encoding="utf-8", columns: Callable[[str], str] = str):
    with open(path, "w", newline="", encoding=encoding) as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow([columns(name) for name in rows[0]])
        writer.writerows(row.values() for row in rows)
    return path


def test_a_spreadsheet_s_file(rows, tmp_path):
    """A byte order mark, columns in capitals; not other separators, whose name is said."""
    path, some = tmp_path / "t.csv", [rows["lf0001"]]
    plain = read_table(write(path, some)).runs
    assert read_table(write(path, some, encoding="utf-8-sig")).runs == plain
    assert read_table(write(path, some, columns=str.upper)).runs == plain
    for separator, words in ((";", "semicolons"), ("\t", "tabs")):
        with pytest.raises(DataError, match=f"by {words}; commas are needed"):
            read_table(write(path, some, separator))


def test_nothing_of_a_table_is_lost(rows, tmp_path):
    path, row = tmp_path / "t.csv", rows["lf0001"]
    odd = write(path, [row | {"zero_stge": "2"}])
    assert read_table(odd).unread == ("zero_stge",)
    lines = write(path, [row, row | {"id": "b"}, row | {"id": "c"}]).read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2] + ",more", "c,short", ""]))
    found = read_table(path)
    assert [run.row_id for run in found.runs] == ["lf0001"]
    assert list(found.skipped) == ["b", "c"]
    assert list(found.reasons()) == ["cells: …, columns: …"]


def test_files_that_are_no_tables(rows, tmp_path):
    with pytest.raises(DataError, match=r"there is no table .*none.csv"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"cannot be read: Is a directory$"):
        read_table(tmp_path)
    for encoding in ("utf-16", "utf-16-le"):
        path = write(tmp_path / "t.csv", [rows["lf0001"]], encoding=encoding)
        with pytest.raises(DataError, match="is no text in UTF-8; save it as CSV in UTF-8"):
            read_table(path)


@pytest.mark.parametrize("lines", [0, 1])
def test_a_table_without_rows(rows, tmp_path, lines):
    path = write(tmp_path / "t.csv", [rows["lf0001"]])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(DataError, match="is empty" if lines == 0 else "no rows"):
        read_table(path)


def test_columns_that_are_there_twice_or_misspelt(rows, tmp_path):
    path = write(tmp_path / "t.csv", [rows["lf0001"]])
    text = path.read_text()
    path.write_text(text.replace("cp,", "pp,", 1))
    with pytest.raises(DataError, match="has the columns pp twice"):
        read_table(path)
    path.write_text(text.replace("n_layers,", "num_layers,", 1).replace(",tp,", ",xx,", 1))
    with pytest.raises(DataError) as caught:
        read_table(path)
    assert str(caught.value).endswith("n_layers (did you mean 'num_layers'?), tp")


def test_alike_reasons_add_up():
    assert like("tp=3 does not divide n_heads=64") == like("tp=5 does not divide n_heads=32")
    assert like("0.001 s beat 1,024 h100-sxm, 1e-05 s") == "… s beat … h100-sxm, … s"
    assert like("gpu='x' is none of a, b") != like("fit='x' is none of a, b")


PAGE = Path(__file__).parents[3] / "docs" / "planner-calibration.md"


def words_of_page() -> dict[str, list[str]]:
    """Column -> its words, of the page's table."""
    table = PAGE.read_text(encoding="utf-8").split("| column | words |")[1].split("\n\n")[0]
    lines = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    return {
        name.strip(" `"): re.findall(r"`([^`]+)`", words.split(";")[0]) for name, words in lines
    }


def test_the_page_has_the_words_that_are_read(rows):
    known = words_of_page()
    assert known.pop("mem_kind") == list(MEASURED_AS)
    for name, words in known.items():
        with pytest.raises(DataError) as caught:
            read_row(rows["dg0055"] | {name: "zzz"}, "x")
        legal = re.search(r"is none of (.*)", str(caught.value))
        assert legal is not None, name
        assert legal[1].split(", ") == words, name
    everywhere = set(re.findall(r"\w+", PAGE.read_text(encoding="utf-8")))
    assert everywhere >= READ


@pytest.mark.parametrize(("times", "legal"), [(99.0, True), (101.0, False)])
def test_a_step_that_nothing_explains(rows, times, legal):
    row = rows["lf0001"] | {"tokens_per_s_per_gpu": "", "tflops_per_gpu": "", "mfu_pct": ""}
    predicted = predict_step(read_row(row, "x").job).total_s
    slow = row | {"step_time_s": f"{times * predicted}"}
    if legal:
        assert read_row(slow, "x").step_s == pytest.approx(times * predicted)
    else:
        refused(slow, "is over 100 times what is predicted; on 512 h100-sxm nothing explains more")
