import json
import math
from dataclasses import replace

import pytest

from stepwell.config import Run
from stepwell.plan.cluster import cluster
from stepwell.plan.job import job_of
from stepwell.plan.measured.gap import SLOWEST, measured_step_s
from stepwell.plan.measured.source import measured_at, newest_trace, step_seconds
from stepwell.plan.steptime.step import predict_step
from stepwell.presets import preset
from stepwell.types import ConfigError, DataError
from tests.plan.measured import traces

RUN = Run.parse({"model": preset("llama3-8b").model_dump(exclude_none=True)}, {
    "layout.compile": True, "data.seq_len": 4096, "train.global_batch_rows": 128,
    "train.micro_batch_rows": 1, "layout.dp_shard": 64,
})  # fmt: skip
JOB = job_of(RUN, 64, cluster("h100-sxm"))


def finished(folder, times, run=RUN):
    run.save(folder / "run.toml")
    rows = [{"step": i, "time": 0.0, "time/step_s": t} for i, t in enumerate(times, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_folder_is_its_median_step(tmp_path):
    finished(tmp_path, [90.0, 8.0, *[4.0] * 5, 6.0, 6.1, 6.2])
    assert step_seconds(tmp_path) == (4.0, 8)  # the first fifth warms up
    found = measured_at(tmp_path, JOB, RUN.model, RUN)
    assert found.measured_s == 4.0
    assert found.source == f"{tmp_path}, the median of 8 steps"
    assert found.comparison is None
    assert found.suspects


def test_a_run_folder_with_a_trace_is_compared_part_by_part(tmp_path):
    finished(tmp_path, [4.0] * 10)
    (tmp_path / "traces").mkdir()
    path = traces.write(tmp_path / "traces/step-20-rank-0.json.gz", traces.planned(JOB, links=2.0))
    for name in ("step-20-rank-8.json.gz", "step-3-rank-0.json.gz", "other.json"):
        (tmp_path / "traces" / name).write_text("not looked at")
    assert newest_trace(tmp_path) == path
    found = measured_at(tmp_path, JOB, RUN.model, RUN, deep=False)
    assert found.comparison is not None
    assert found.source.endswith(
        "one whole step of rank 0; the median of 8 steps in metrics.jsonl is 4 s"
    )
    (tmp_path / "metrics.jsonl").unlink()
    without = measured_at(tmp_path, JOB, RUN.model, RUN, deep=False)
    assert without.source == f"{path}, one whole step of rank 0"
    assert without.measured_s == found.measured_s
    alone = measured_at(path, JOB, RUN.model, deep=False)
    assert alone.measured_s == found.measured_s
    assert alone.source == f"{path}, one whole step of rank 0"


def test_the_step_of_a_method_that_samples_is_no_training_pass(tmp_path):
    method = {"method.kind": "grpo", "method.prompts_per_step": 16, "method.group_size": 8}
    sampled = Run.parse({"model": RUN.model.model_dump(exclude_none=True)}, method)
    finished(tmp_path, [4.0] * 10, sampled)
    with pytest.raises(ConfigError, match=r"a step of grpo samples .*--measured step_s=.*trace"):
        measured_at(tmp_path, JOB, RUN.model, sampled)


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no run.toml"):
        measured_at(tmp_path, JOB, RUN.model, RUN)
    finished(tmp_path, [])
    with pytest.raises(DataError, match="holds no step"):
        measured_at(tmp_path, JOB, RUN.model, RUN)
    finished(tmp_path, [4.0])
    other = Run.parse(RUN.model_dump(exclude_none=True), {"layout.zero": 2, "optim.lr": 1.0})
    with pytest.raises(ConfigError, match=r"differs from what is planned in layout; plan its own"):
        measured_at(tmp_path, JOB, RUN.model, other)
    with pytest.raises(ConfigError, match=rf"stepwell plan {tmp_path}/run.toml --measured"):
        measured_at(tmp_path, JOB, RUN.model)
    finished(tmp_path, [0.1])
    with pytest.raises(ConfigError, match="cannot be: a step of 0.1 s would be an MFU of"):
        measured_at(tmp_path, JOB, RUN.model, RUN)


def test_seconds_that_nothing_explains_are_refused_whatever_they_come_as(tmp_path):
    most = SLOWEST * predict_step(JOB).total_s
    tokens = JOB.layout.global_batch_tokens
    assert measured_step_s({"step_s": most}, JOB) == most
    assert measured_step_s({"tokens_per_s": 1.001 * tokens / most}, JOB) < most
    finished(tmp_path, [0.99 * most] * 10)
    assert measured_at(tmp_path, JOB, RUN.model, RUN).suspects
    said = r"is of no such step.*over 100 times the .* s predicted on 64 x h100-sxm.*another unit"
    for given in (
        {"step_s": 1.001 * most},
        {"step_s": math.inf},
        {"mfu": 1e-6},
        {"tokens_per_s": 0.999 * tokens / most},
    ):
        with pytest.raises(ConfigError, match=said):
            measured_step_s(given, JOB)
    finished(tmp_path, [1.01 * most] * 10)
    with pytest.raises(ConfigError, match=said):
        measured_at(tmp_path, JOB, RUN.model, RUN)


def test_a_trace_of_a_smaller_model_cannot_be(tmp_path):
    small = replace(JOB, dims=replace(JOB.dims, num_layers=4))
    path = traces.write(tmp_path / "t.json", traces.planned(small))
    with pytest.raises(ConfigError, match=r"t.json cannot be: .*MFU of"):
        measured_at(path, JOB, RUN.model)


def test_knobs_of_a_trace_heed_the_recipes_other_keys(tmp_path):
    keys = {"lora.rank": 8, "lora.quantize": "nf4", "method.kind": "sft"}
    run = Run.parse(RUN.model_dump(exclude_none=True), keys)
    job = job_of(run, 64, cluster("h100-sxm"))
    path = traces.write(tmp_path / "t.json", traces.planned(job, slower={"products": 1.5}))
    found = measured_at(path, job, run.model, run, deep=False).comparison
    assert found is not None
    refused = {knob.name: knob.refused for knob in found.knobs}
    assert "lora.quantize='nf4'" in refused["products in 8 bits"]
