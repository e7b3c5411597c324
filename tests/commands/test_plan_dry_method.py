"""A method's training step on fake ranks, all its models there, beside what is predicted."""

import json

import pytest

from stepwell.cli import main
from stepwell.commands.plan_dry_method import count, lines, models_beside
from stepwell.config import Run
from stepwell.plan.cluster import cluster
from stepwell.train.losses import Loss

H100 = cluster("h100-sxm")
MODEL = {
    "num_layers": 3, "d_model": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
    "d_ff": 1024, "vocab_size": 4096,
}  # fmt: skip
PAIR = [{"name": "reward", "source": "model:a"}]


WORK = {"prompts_per_step": 8, "group_size": 4, "max_new_tokens": 128}


def run_of(method: dict, **more) -> Run:
    work = WORK if method["kind"] != "dpo" else {}
    values = {"model": MODEL, "data": {"seq_len": 256}, "train": {"micro_batch_rows": 1}}
    return Run.parse({**values, "method": {**work, **method}, **more})


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("method", "more", "beside"),
    [
        ({"kind": "ppo", "rewards": PAIR}, {}, {"critic", "reference", "reward"}),
        slow({"kind": "ppo", "critic": "shared", "kl_coef": 0.0}, {"layout": {"tp": 2}}, set()),
        slow({"kind": "grpo", "kl_coef": 0.01}, {"layout": {"tp": 2}}, {"reference"}),
        slow({"kind": "grpo"}, {"lora": {"rank": 4, "quantize": "nf4"}}, set()),
        slow({"kind": "dpo", "reference": "separate"}, {"remat": {"mode": "full"}}, {"reference"}),
        slow({"kind": "dpo", "reference": "adapter-off"}, {"lora": {"rank": 4}}, set()),
    ],
)
def test_what_is_predicted_is_what_the_program_holds(method, more, beside):
    """State within 3 %, activations and every moment's peak within 10 %; keys and values to the
    byte."""
    run = run_of(method, **more)
    found, rows = count(run, 4, H100)
    assert set(found.ranks[0].beside) == beside
    state = [one for one in rows if "activations" not in one.item and "peak" not in one.item]
    if run.method.kind != "dpo":
        (cache,) = (one for one in state if one.item == "keys and values")
        slots, length = 4 * -(-8 // (4 // run.layout.tp)), 256  # answers of a rank
        assert cache.counted == cache.predicted == slots * length * 2 * 3 * 2 * 64 * 2
        peaks = {one.item for one in rows if "peak" in one.item}
        assert peaks == {"peak", "packing, peak", "sampling, peak", "scoring, peak"}
        state = [one for one in state if one.item not in ("keys and values", "sampler's copy")]
    for one in state:
        assert abs(one.relative) <= 0.03, one
    for one in rows:
        assert abs(one.relative) <= 0.10, one
    assert len(state) == 3 + len(beside) + 2 * ("critic" in beside)
    told = "\n".join(lines(found, rows))
    assert "the real training step of every model on 4 fake ranks" in told
    assert all(one.item in told for one in rows)


def test_a_parked_reference_is_not_on_the_device():
    others = models_beside(run_of({"kind": "ppo", "reference": "host"}))
    assert set(others) == {"critic"}
    assert isinstance(others["critic"].loss, Loss)


@pytest.mark.slow
def test_models_beside_are_real():
    """A frozen model adds what it holds to every moment, a critic the worst of two steps."""
    alone = count(run_of({"kind": "ppo", "kl_coef": 0.0}), 2, H100)[0].ranks[0]
    both = count(run_of({"kind": "ppo"}), 2, H100)[0].ranks[0]
    added = both.beside["reference"].parameters
    assert added > 0
    for phase, peak in both.peaks.items():
        assert peak == alone.peaks[phase] + added
    critic = both.beside["critic"]
    assert critic.gradients == critic.parameters
    assert critic.optimizer == 2 * critic.parameters


def test_the_command_shows_it(capsys):
    words = ["--model.num_layers", "2", "--model.d_model", "256", "--model.vocab_size", "4096"]
    words = ["plan", *words, "--gpus", "2", "--method", "grpo", "--prompts", "4", "--dry-run"]
    assert main([*words, "--prompt-tokens", "64", "--answer-tokens", "64", "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    rows = {one["item"]: one for one in answer["dry_run"]["predicted_and_counted"]}
    assert rows["reference's parameters"]["counted"] == rows["reference's parameters"]["predicted"]
    assert "dry run: the policy, reference" in err
    assert answer["fits"]
