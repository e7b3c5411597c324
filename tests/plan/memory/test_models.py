"""The bytes of a method's models: closed forms, and places."""

import subprocess
import sys

import pytest

from stepwell.commands.header import header_text, plan_of, size_text
from stepwell.commands.ranks import Ranks
from stepwell.config import Run
from stepwell.models.flops import count_parameters
from stepwell.plan.memory.ledger import method_bytes_per_parameter
from stepwell.plan.memory.models import ModelBytes, predict_models

SIZE = {"num_layers": 6, "d_model": 512, "num_heads": 8, "d_ff": 1536, "vocab_size": 16_384}


def run_of(method: str, layout=None, lora=None, **keys) -> Run:
    values = {"model": SIZE, "layout": layout or {}, "lora": lora or {}}
    return Run.parse({**values, "method": {"kind": method, **keys}})


def test_planning_imports_no_torch():
    code = "import sys, stepwell.plan.memory.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_closed_forms():
    """Bytes a parameter of equal models: PPO 36, GRPO with a KL 18, without 16, DPO 18."""
    run = run_of("ppo")
    n = count_parameters(run.model).total
    score = run.model.model_copy(update={"head": "score"})
    found = predict_models(run, rewards={"reward r": score})
    assert found["policy"] == ModelBytes(gradients=4 * n, master=4 * n, moments=8 * n)
    assert found["reference"] == ModelBytes(parameters=2 * n)
    # A critic and a reward model have one row more than the tied policy.
    extra = SIZE["d_model"]
    assert found["critic"].total == 16 * (n + extra)
    assert found["reward r"].total == 2 * (n + extra)
    total = sum(held.total for held in found.values()) - 18 * extra
    assert total == method_bytes_per_parameter("ppo") * n == 36 * n
    for method, keys, wanted in (
        ("grpo", {"kl_coef": 0.1}, 18),
        ("grpo", {}, 16),
        ("dpo", {"reference": "separate"}, 18),
        ("dpo", {}, 16),  # its reference is sums in a file
        ("online-dpo", {}, 18),
        ("sft", {}, 16),
    ):
        models = predict_models(run_of(method, **keys))
        assert sum(held.total for held in models.values()) == wanted * n, method


def test_places():
    n = count_parameters(run_of("ppo").model).total
    host = predict_models(run_of("ppo", reference="host"))["reference"]
    assert (host.total, host.host) == (0, 2 * n)
    lora = {"rank": 8}
    off = predict_models(run_of("ppo", reference="adapter-off", lora=lora))
    assert off["reference"] == ModelBytes()
    assert "reference" not in predict_models(run_of("ppo", kl_coef=0.0))
    shared = predict_models(run_of("ppo", critic="shared"))
    assert "critic" not in shared
    assert shared["policy"].total == 16 * (n + SIZE["d_model"])


def test_adapters_are_trained_and_their_base_is_frozen():
    lora = {"rank": 8, "targets": [r"blocks\.\d+\.attn\.w[qv]"]}
    run = run_of("ppo", lora=lora, critic="separate")
    n = count_parameters(run.model).total
    q, v = (512, 512), (run.model.num_kv_heads * run.model.head_dim, 512)
    q = (run.model.num_heads * run.model.head_dim, 512)
    adapters = 6 * 8 * (sum(q) + sum(v))
    policy = predict_models(run)["policy"]
    assert policy == ModelBytes(2 * n, 4 * adapters, 4 * adapters, 8 * adapters)
    critic = predict_models(run)["critic"]
    assert critic.master == 4 * (adapters + 512)
    assert critic.parameters == 2 * n


def test_ranks_divide_what_is_trained_and_frozen():
    alone = predict_models(run_of("ppo"))
    for layout, world, shares in (
        ({"dp_shard": 4}, 4, 4),
        ({"dp_replicate": 2, "dp_shard": 2}, 4, 2),
        ({"tp": 2}, 2, 2),
    ):
        for name, held in predict_models(run_of("ppo", layout), world).items():
            assert held.total == pytest.approx(alone[name].total / shares, rel=0.01), layout
    stages = predict_models(run_of("ppo", {"pp": 2}), 2)
    assert alone["policy"].total / 2 < stages["policy"].total < alone["policy"].total


def test_offload_and_release_leave_the_device():
    n = count_parameters(run_of("ppo").model).total
    run = run_of("ppo")
    offload = run.offload.model_copy(update={"optimizer": True})
    found = predict_models(run.model_copy(update={"offload": offload}))["policy"]
    assert found.named() | {"host": 0} == ModelBytes(0, 4 * n, 4 * n).named()
    optim = run.optim.model_copy(update={"release_gradients": True})
    assert predict_models(run.model_copy(update={"optim": optim}))["policy"].gradients == 0


def test_the_header_shows_them():
    run = run_of("ppo", reference="host")
    models = predict_models(run)
    text = header_text(run)
    total = sum(held.total for held in models.values())
    assert f"state of 3 models: {size_text(total)}" in text
    assert f"policy: gradients {size_text(models['policy'].gradients)}, master" in text
    assert f"reference: on the host {size_text(models['reference'].host)}" in text
    plan = plan_of(run, Ranks())
    assert plan["memory"]["models"]["critic"] == models["critic"].named()
    assert "state of" not in header_text(run_of("grpo"))
    lora = {"rank": 8}
    assert "reference: nothing of its own" in header_text(
        run_of("grpo", kl_coef=0.1, reference="adapter-off", lora=lora)
    )
