import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.config import Run
from stepwell.schema import dotted_keys
from stepwell.sections.methods import GRPO, SFT, Method, Pretrain
from stepwell.types import ConfigError


def refusal(values=None, **overrides) -> str:
    """The message with which a run is refused; keys of `overrides` have __ for a dot."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    with pytest.raises(ConfigError) as error:
        Run.parse(values or {}, dotted)
    return str(error.value)


# Round trips


floats = st.floats(min_value=1e-12, max_value=1e12, allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
optional_texts = st.none() | texts
positive = st.integers(1, 2**40)
sources = st.lists(
    st.fixed_dictionaries({"path": texts, "weight": floats}),
    max_size=3,
    unique_by=lambda source: os.path.normpath(str(source["path"])),
)
methods = st.one_of(
    st.just({"kind": "pretrain"}),
    st.fixed_dictionaries(
        {"kind": st.just("sft")}, optional={"epochs": floats, "max_rows": positive}
    ),
    st.fixed_dictionaries(
        {"kind": st.just("grpo"), "updates_per_rollout": st.integers(2, 4)},
        optional={
            "group_size": st.integers(2, 64),
            "temperature": floats,
            "advantage": st.sampled_from(["std", "none"]),
            "clip_low": st.floats(0, 1),
        },
    ),
)
runs = st.fixed_dictionaries(
    {"method": methods},
    optional={
        "name": texts,
        "dir": texts,
        "model": st.fixed_dictionaries(
            {},
            optional={
                "vocab_size": st.integers(1, 2**24),
                "norm_eps": floats,
                "rope_scaling": st.fixed_dictionaries({}, optional={"factor": st.floats(1, 64)}),
                "init": texts,
                "tied": st.booleans(),
            },
        ),
        "data": st.fixed_dictionaries({"sources": sources}, optional={"tokenizer": texts}),
        "optim": st.fixed_dictionaries({"lr": floats, "eps": floats}),
        "log": st.fixed_dictionaries({"tensorboard": st.booleans()}),
    },
)


@settings(derandomize=True)
@given(runs)
def test_a_saved_run_reloads_equal(tmp_path_factory, values):
    run = Run.parse(values)
    path = tmp_path_factory.getbasetemp() / "run.toml"
    run.save(path)
    assert Run.load(path) == run
    assert type(Run.load(path).method) is type(run.method)


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "run.toml"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        Run().save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.toml"]


def test_a_run_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Run().name = "other"  # pyright: ignore[reportAttributeAccessIssue]


# Overrides


def test_overrides_are_read_as_what_their_key_holds(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('name = "a"\n[data]\nsources = [{path = "x"}]\n')
    run = Run.load(
        path,
        {
            "name": "7",
            "optim.lr": "3e-4",
            "layout.compile": "true",
            "data.sources.0.path": "y",
            "data.stages": "[]",
            "model.init": "none",
            "model.rope_scaling.factor": "32",
            "method.kind": "grpo",
            "method.advantage": "none",
            "train.steps": "20",
        },
    )
    assert run.name == "7"
    assert run.optim.lr == 3e-4
    assert run.layout.compile is True
    assert run.data.sources[0].path == "y"
    assert run.data.stages == ()
    assert run.model.init is None
    assert run.model.rope_scaling is not None
    assert run.model.rope_scaling.factor == 32
    assert run.method == GRPO(advantage="none")
    assert run.train.steps == 20


def test_none_removes_an_optional_section():
    run = Run.parse({"model": {"rope_scaling": {"factor": 8.0}}}, {"model.rope_scaling": "none"})
    assert run.model.rope_scaling is None


def test_numbers_among_given_options():
    assert Run.parse({}, {"layout.zero": "1"}).layout.zero == 1
    for wrong in ("7", 7, "one"):
        with pytest.raises(ConfigError, match="must be one of 0, 1, 2, 3"):
            Run.parse({}, {"layout.zero": wrong})


def test_overrides_leave_the_given_values_alone():
    values = {"data": {"sources": [{"path": "x"}]}}
    Run.parse(values, {"data.sources.0.path": "y", "optim.lr": 1.0})
    assert values == {"data": {"sources": [{"path": "x"}]}}


@pytest.mark.parametrize(
    ("values", "kind"),
    [({}, Pretrain), ({"kind": "sft"}, SFT), ({"kind": "grpo"}, GRPO)],
)
def test_method_kind_chooses_the_section(values, kind):
    assert type(Run.parse({"method": values} if values else {}).method) is kind


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"name.x": "1"}, "cannot set name.x: name = 'a' is a value, not a table"),
        ({"data.sources.1.path": "x"}, "the list has 1 entries, counted from 0; '1' is none"),
        ({"data.stages.0.start": "x"}, "the list has 0 entries"),
        ({"data.sources": "x.bin"}, "written as TOML, e.g. '[{path = "),
    ],
)
def test_an_override_that_leads_nowhere(override, message):
    with pytest.raises(ConfigError) as error:
        Run.parse({"name": "a", "data": {"sources": [{"path": "x"}]}}, override)
    assert message in str(error.value)


# Unknown keys, broken values, broken files


@pytest.mark.parametrize(
    ("values", "unknown", "meant"),
    [
        ({"nmae": "x"}, "nmae", "name"),
        ({"lr": 1e-3}, "lr", "optim.lr"),
        ({"optim": {"lrr": 1e-3}}, "optim.lrr", "optim.lr"),
        ({"optim": {"schedule": {"warmup": 3}}}, "optim.schedule.warmup", None),
        ({"method": {"kind": "grpo", "group_szie": 4}}, "method.group_szie", "method.group_size"),
        ({"model": {"rope_scaling": {"factr": 8}}}, None, "model.rope_scaling.factor"),
        ({"data": {"sources": [{"pth": "x"}]}}, "data.sources.0.pth", "data.sources.0.path"),
    ],
)
def test_an_unknown_key_names_the_nearest(values, unknown, meant):
    message = refusal(values)
    if unknown:
        assert f"unknown key {unknown!r}" in message
    assert f"did you mean '{meant or 'optim.schedule.warmup_steps'}'?" in message


def kind_with(key: str) -> str:
    """A method that has this key, if it is a method's."""
    name = key.split(".")[1] if key.startswith("method.") else "kind"
    methods = get_args(get_args(Method)[0])
    return next(m.model_fields["kind"].default for m in methods if name in m.model_fields)


def test_every_key_with_a_typing_slip_is_found_again():
    for key, _ in dotted_keys(Run):
        kind = kind_with(key)
        slip = key[:-1]
        message = refusal({"method": {"kind": kind}}, **{slip.replace(".", "__"): 1})
        assert f"unknown key {slip!r} (did you mean '" in message


def test_no_number_and_no_flag_takes_another_type():
    """true is no number, text is neither, a number is no flag: for every key of a run."""
    seen = set()
    for method in (Pretrain(), SFT(), GRPO()):
        for key, field in dotted_keys(Run):
            name = key.rpartition(".")[2]
            if key.startswith("method.") and name not in type(method).model_fields:
                continue
            allowed = str(field.annotation)
            is_flag, is_number = "bool" in allowed, "int" in allowed or "float" in allowed
            values: dict[str, Any] = {"method": {"kind": method.kind}}
            for wrong in [1, "true"] if is_flag else [True, "1"] if is_number else []:
                *parents, _ = key.split(".")
                table: dict[str, Any] = values
                for parent in parents:
                    table = table.setdefault(parent, {})
                table[name] = wrong
                assert f"{key} = {wrong!r}: must be " in refusal(values)
                del table[name]
                seen.add(key)
    assert {"layout.compile", "optim.lr", "train.steps", "method.group_size"} <= seen
    assert len(seen) > 50


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": {"kind": "grop"}}, "method.kind = 'grop': must be one of pretrain, sft, dpo"),
        ({"method": {"kind": "grop"}}, "did you mean 'grpo'?"),
        ({"precision": {"compute": "fp8"}}, "8 bits are precision.fp8.recipe='tensorwise'"),
        ({"precision": {"compute": "fp6"}}, "one of bf16, fp16, fp32, fp64 (did you mean 'fp64'?)"),
        ({"method": {"group_size": 4}}, "method.kind is missing; it is one of pretrain, sft"),
        (
            {"train": {"steps": 0}},
            "train.steps = 0: must be above 0; the nearest legal value is 1 (the default is 1000)",
        ),
        ({"train": {"steps": "ten"}}, "train.steps = 'ten': must be a whole number"),
        ({"train": {"steps": "10"}}, "train.steps = '10': must be a whole number"),
        ({"train": {"steps": True}}, "train.steps = True: must be a whole number"),
        ({"train": {"steps": 2.4}}, "train.steps = 2.4: must be a whole number; the nearest is 2"),
        ({"train": {"steps": None}}, "train.steps = None: must be a whole number"),
        ({"optim": {"lr": True}}, "optim.lr = True: must be a number (the default is 0.001)"),
        ({"optim": {"lr": "3e-4"}}, "optim.lr = '3e-4': must be a number"),
        ({"optim": {"lr": -1}}, "optim.lr = -1: must be above 0 (the default is 0.001)"),
        ({"optim": {"beta2": 1}}, "optim.beta2 = 1: must be below 1 (the default is 0.95)"),
        ({"method": {"kind": "sft", "epochs": True}}, "method.epochs = True: must be a number"),
        ({"data": {"sources": [{"path": "x", "weight": True}]}}, "weight = True: must be a number"),
        ({"model": {"sliding_window": False}}, "sliding_window = False: must be a whole number"),
        ({"layout": {"compile": 1}}, "layout.compile = 1: must be true or false"),
        ({"layout": {"compile": "yes"}}, "layout.compile = 'yes': must be true or false"),
        ({"name": 3}, "name = 3: must be text"),
        ({"train": {"seed": -1}}, "must be at least 0; that is the nearest legal value"),
        ({"method": {"kind": "grpo", "clip_low": 2}}, "method.clip_low = 2: must be at most 1"),
        ({"model": {"vocab_size": 10**11}}, "must be at most 16777216"),
        ({"optim": {"lr": float("nan")}}, "optim.lr = nan: must be a finite number"),
        ({"optim": {"lr": float("inf")}}, "optim.lr = inf"),
        (
            {"optim": {"kind": "adam"}},
            "optim.kind = 'adam': must be one of adamw, adamw8bit, muon (did you mean 'adamw'?)",
        ),
        ({"data": {"sources": [{}]}}, "data.sources.0.path is missing"),
        (
            {"method": {"kind": "grpo", "rewards": ["exact"]}},
            "rewards.0 = 'exact': must be a table; the nearest legal form is {name = \"...\", "
            'source = "exact"}',
        ),
        (
            {"method": {"kind": "grpo", "rewards": {"name": "a", "source": "math"}}},
            'must be a list; the nearest legal form is [{name = "a", source = "math"}]',
        ),
        (
            {"method": {"kind": "grpo", "rewards": [["exact"]]}},
            'must be a table, e.g. {name = "...", source = "..."}',
        ),
        ({"data": {"sources": "x"}}, 'must be a list; the nearest legal form is [{path = "x"}]'),
        ({"layout": {"pp_layers": 3}}, "must be a list; the nearest legal form is [3]"),
        ({"layout": {"pp_layers": "3"}}, "must be a list, e.g. [1, 2]"),
        ({"lora": {"targets": "wq"}}, 'must be a list; the nearest legal form is ["wq"]'),
        ({"method": "sft"}, 'must be a table; the nearest legal form is {kind = "sft"}'),
        ({"method": "stf"}, 'must be a table, e.g. {kind = "pretrain"}'),
        ({"optim": {"schedule": "cosine"}}, 'the nearest legal form is {kind = "cosine"}'),
        ({"model": 3}, 'model = 3: must be a table, e.g. {family = "llama"}'),
    ],
)
def test_a_broken_value_is_named(values, message):
    assert message in refusal(values)


def test_every_problem_is_listed():
    message = refusal({"train": {"steps": 0}, "model": {"head_dim": 3}, "nmae": 1})
    assert message.startswith("the configuration is not valid:")
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"steps = ", "is not valid TOML"),
        (b"name = '\xff'", "is not UTF-8"),
        (b"[train]\nsteps = 0", "recipe.toml is not valid:\n  train.steps = 0"),
    ],
)
def test_a_broken_recipe(tmp_path, content, message):
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        Run.load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_recipe(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the recipe .*: No such file"):
        Run.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot read the recipe .*: Is a directory"):
        Run.load(tmp_path)


# Rules between fields: the value, the rule and the nearest legal value


RULES = [
    (
        {"model.num_heads": 9, "model.num_kv_heads": 4},
        ["model.num_kv_heads=4", "divide model.num_heads=9", "nearest that does is 3"],
        {"model.num_kv_heads": 3},
    ),
    ({"model.head_dim": 63}, ["model.head_dim=63", "even", "64"], {"model.head_dim": 64}),
    (
        {"model.qk_norm": True},
        ["model.qk_norm=True", "'llama'", "set qk_norm=False"],
        {"model.qk_norm": False},
    ),
    (
        {"model.family": "qwen3"},
        ["model.qk_norm=False", "'qwen3'", "set qk_norm=True"],
        {"model.qk_norm": True},
    ),
    (
        {"model.family": "qwen2"},
        ["model.qkv_bias=False", "'qwen2'", "set qkv_bias=True"],
        {"model.qkv_bias": True},
    ),
    (
        {"model.sliding_window": 128},
        ["model.sliding_window=128", "'llama'", "mistral", "leave it out"],
        {"model.sliding_window": None},
    ),
    (
        {"model.rope_scaling.low_freq_factor": 4.0},
        ["low_freq_factor=4.0", "below high_freq_factor=4.0", "1 and 4"],
        {"model.rope_scaling.low_freq_factor": 1.0},
    ),
    ({"layout.dp_shard": 0}, ["dp_shard=0", "positive", "nearest is 1"], {"layout.dp_shard": 1}),
    ({"layout.dp_shard": -2}, ["dp_shard=-2", "nearest is -1"], {"layout.dp_shard": -1}),
    (
        {"guard.min_history": 65},
        ["guard.min_history=65", "guard.window=64", "nearest legal value is 64"],
        {"guard.min_history": 64},
    ),
    (
        {
            "train.steps": 10,
            "optim.schedule.warmup_steps": 8,
            "optim.schedule.decay_steps": 4,
        },
        ["warmup_steps=8", "decay_steps=4", "exceed train.steps=10", "train.steps to 12"],
        {"train.steps": 12},
    ),
    (
        {"optim.schedule.kind": "cosine", "optim.schedule.decay_steps": 4},
        ["decay_steps=4", "'wsd'", "'cosine'", "leave it at 0"],
        {"optim.schedule.decay_steps": 0},
    ),
    (
        {"data.stages": [{"phase": "decay", "sources": [{"path": "best"}]}]},
        ["phase='decay'", "decay_steps=0", "decay_steps to 1 or more"],
        {"optim.schedule.decay_steps": 1},
    ),
    (
        {"data.stages": [{"phase": "warmup", "sources": [{"path": "best"}]}]},
        ["phase='warmup'", "warmup_steps=0", "warmup_steps to 1 or more"],
        {"optim.schedule.warmup_steps": 1},
    ),
    (
        {
            "data.stages": [{"phase": "stable", "sources": [{"path": "best"}]}],
            "optim.schedule.kind": "cosine",
        },
        ["phase='stable'", "kind='cosine'", "kind='wsd'"],
        {"optim.schedule.kind": "constant"},
    ),
    (
        {"data.stages": [{"sources": [{"path": "best"}]}]},
        ["phase=None", "start=None", "needs one of them", "start = 0.8"],
        {"data.stages.0.start": 0.0},
    ),
    (
        {"data.stages": [{"start": 0.5, "sources": []}]},
        ["the stage of start=0.5 has no sources"],
        {"data.stages.0.sources": [{"path": "best"}]},
    ),
    (
        {"data.stages": [{"start": start, "sources": [{"path": "best"}]} for start in (0.5, 0.5)]},
        ["starts 0.5, 0.5", "must ascend"],
        {"data.stages.1.start": 0.6},
    ),
    (
        {
            "data.stages": [
                {"start": start, "sources": [{"path": "best"}]} for start in (0.5, 0.55)
            ],
            "train.steps": 10,
        },
        ["starts 0.5, 0.55 begin at steps 5, 5 of train.steps=10", "move them apart"],
        {"data.stages.1.start": 0.6},
    ),
    (
        {
            "data.stages": [
                {"start": 0.5, "sources": [{"path": "best"}]},
                {"phase": "decay", "sources": [{"path": "best"}]},
            ],
            "optim.schedule.decay_steps": 1,
        },
        ["mix phases (decay) and fractions (0.5)", "all of them `start`"],
        {"data.stages.1.phase": "none", "data.stages.1.start": 0.9},
    ),
    (
        {
            "data.stages": [{"phase": "decay", "sources": [{"path": path}]} for path in ("a", "b")],
            "optim.schedule.decay_steps": 1,
            "optim.schedule.warmup_steps": 1,
        },
        ["name a phase twice (decay, decay)"],
        {"data.stages.1.phase": "warmup"},
    ),
    (
        {
            "data.stages": [{"start": 0.5, "sources": [{"path": "best"}]}],
            "method.kind": "sft",
        },
        ["data.stages (1 given) belong to pretrain, not sft"],
        {"method.kind": "pretrain"},
    ),
    (
        {"data.order": "quality-ascending", "method.kind": "sft"},
        ["data.order='quality-ascending'", "pretrain, not sft", "'sequential'"],
        {"data.order": "sequential"},
    ),
    (
        {"data.sources": [{"path": "a"}, {"path": "./a"}]},
        ["data.sources lists a twice", "sum of weights"],
        {"data.sources.1.path": "b"},
    ),
    (
        {
            "data.sources": [{"path": "a", "max_epochs": 2.0}],
            "data.stages": [{"start": 0.5, "sources": [{"path": "./a"}]}],
        },
        ["./a has max_epochs=2 in data.sources and no max_epochs in data.stages.0.sources"],
        {"data.stages.0.sources.0.max_epochs": 2.0},
    ),
    (
        {"data.heldout": [{"path": "a", "max_epochs": 2.0}]},
        ["data.heldout: max_epochs=2.0", "leave it out"],
        {"data.heldout.0.max_epochs": "none"},
    ),
    (
        {"data.seq_len": 4096},
        ["data.seq_len=4096", "model.max_seq_len=2048", "nearest legal value is 2048"],
        {"data.seq_len": 2048},
    ),
    (
        {"precision.param": "fp64"},
        ["precision.param='fp64'", "precision.compute='fp64'", "not 'bf16'"],
        {"precision.compute": "fp64"},
    ),
    (
        {"train.global_batch_rows": 32, "layout.dp_replicate": 3},
        ["global_batch_rows=32", "multiple of layout.dp_replicate=3", "nearest is 33"],
        {"train.global_batch_rows": 33},
    ),
    (
        {"method.kind": "grpo", "method.max_new_tokens": 512},
        ["max_new_tokens=512", "data.seq_len=512", "below 512", "above 512"],
        {"data.seq_len": 513},
    ),
    (
        {"method.kind": "dpo", "train.global_batch_rows": 8},
        ["global_batch_rows=8", "pretrain and sft", "dpo is method.pairs_per_step=16"],
        {"train.global_batch_rows": 32},
    ),
    (
        {"method.kind": "reward", "train.global_batch_rows": 8},
        ["reward is method.rows_per_step=16"],
        {"train.global_batch_rows": 32},
    ),
    *(
        (
            {"method.kind": kind, "train.global_batch_rows": 8},
            [f"a step of {kind} is method.prompts_per_step=16"],
            {"train.global_batch_rows": 32},
        )
        for kind in ("grpo", "ppo", "online-dpo")
    ),
    (
        {"method.kind": "dpo", "loss.label_smoothing": 0.1},
        ["loss.label_smoothing=0.1", "not to dpo", "or set method.loss.label_smoothing"],
        {"loss.label_smoothing": 0.0},
    ),
    (
        {"method.kind": "reward", "loss.z_loss": 1e-4},
        ["loss.z_loss=0.0001", "cross-entropy", "leave it at 0"],
        {"loss.z_loss": 0.0},
    ),
    (
        {"method.kind": "sft", "data.document_mask": False},
        ["data.document_mask=false", "sft packs documents", "leave it at true"],
        {"data.heldout": [{"path": "a"}]},
    ),
    (
        {"method.kind": "dpo", "data.order": "sequential"},
        ["data.order='sequential'", "pretrain, sft and reward", "value is 'shuffled'"],
        {"method.kind": "reward"},
    ),
    (
        {
            "method.kind": "grpo",
            "method.verifier": "math",
            "method.rewards": '[{name = "a", source = "exact"}]',
        },
        ["method.verifier='math'", "beside method.rewards", "add a term"],
        {"method.rewards": "[]"},
    ),
    (
        {"method.kind": "grpo", "method.max_refills": 5},
        ["method.max_refills=5", "without method.dynamic_sampling; leave it out"],
        {"method.dynamic_sampling": True},
    ),
    (
        {"method.kind": "grpo", "method.kl_estimator": "k2"},
        ["method.kl_estimator='k2'", "with method.kl_coef=0, where no reference is held"],
        {"method.kl_coef": 0.1},
    ),
    (
        {"method.kind": "grpo", "method.kl_in": "reward"},
        ["method.kl_in='reward'", "with method.kl_coef=0"],
        {"method.kl_coef": 0.1},
    ),
    (
        {"method.kind": "ppo", "method.kl_coef": 0.0, "method.reference": "host"},
        ["method.reference='host'", "with method.kl_coef=0"],
        {"method.kl_coef": 0.1},
    ),
    (
        {"method.kind": "ppo", "method.kl_target": 3.0},
        ["method.kl_target=3.0", "with method.kl_controller='fixed'"],
        {"method.kl_controller": "adaptive"},
    ),
    (
        {"method.kind": "ppo", "method.kl_horizon": 3.0},
        ["method.kl_horizon=3.0", "with method.kl_controller='fixed'"],
        {"method.kl_controller": "adaptive"},
    ),
    (
        {"method.kind": "ppo", "method.overopt": "ignore", "method.overopt_window": 5},
        ["method.overopt_window=5", "with method.overopt='ignore'"],
        {"method.overopt": "stop"},
    ),
    (
        {"method.kind": "grpo", "method.dual_clip": 3.0},
        ["method.dual_clip=3 changes nothing", "one step a rollout", "every ratio is exactly 1"],
        {"method.updates_per_rollout": 2},
    ),
    (
        {"method.kind": "grpo", "method.clip_high": 0.3},
        ["method.clip_high=0.3 changes nothing", "updates_per_rollout=2"],
        {"method.minibatches": 2},
    ),
    (
        {"method.kind": "grpo", "method.objective": "gspo", "method.clip_low": 0.2},
        ["method.clip_low=0.2 changes nothing"],
        {"method.clip_low": 3e-4},
    ),
    (
        {"method.kind": "ppo", "method.clip_low": 0.1, "method.max_staleness": 1},
        ["method.clip_low=0.1 changes nothing"],
        {"method.minibatches": 2},
    ),
    (
        {"method.kind": "online-dpo", "method.importance_cap": 0.0},
        ["method.importance_cap=0.0", "without importance weights"],
        {"method.kind": "ppo"},
    ),
    (
        {
            "method.kind": "online-dpo",
            "method.displacement": "ignore",
            "method.displacement_window": 9,
        },
        ["method.displacement_window=9", "with method.displacement='ignore'"],
        {"method.displacement": "stop"},
    ),
    (
        {"method.kind": "dpo", "method.displacement": "ignore", "method.displacement_window": 9},
        ["method.displacement_window=9", "with method.displacement='ignore'"],
        {"method.displacement": "stop"},
    ),
    (
        {"method.kind": "dpo", "method.loss.kind": "kto", "method.displacement": "stop"},
        ["method.displacement='stop'", "'kto', whose answers are not paired"],
        {"method.loss.kind": "ipo"},
    ),
    (
        {"method.kind": "sft", "method.format": "alpaca", "method.columns.prompt": "q"},
        ["method.columns.prompt='q'", "'alpaca', which reads instruction, input, output"],
        {"method.format": "auto"},
    ),
    (
        {"method.kind": "sft", "method.format": "alpaca", "method.roles.user": "me"},
        ["method.roles.user='me'", "'alpaca', which has no roles"],
        {"method.format": "sharegpt"},
    ),
    (
        {"method.kind": "dpo", "model.num_labels": 3},
        ["model.num_labels=3", "it has no score in dpo", "the nearest legal value is 1"],
        {"method.kind": "reward", "method.objective": "classification"},
    ),
    (
        {
            "method.kind": "dpo",
            "method.loss.kind": "simpo",
            "method.reference_from": "runs/other",
        },
        ["method.reference_from='runs/other'", "'simpo'", "no reference; leave it out"],
        {"method.loss.kind": "ipo"},
    ),
]


@pytest.mark.parametrize(("overrides", "named", "remedy"), RULES)
def test_a_rule_between_fields(overrides, named, remedy):
    with pytest.raises(ConfigError) as error:
        Run.parse({}, overrides)
    for part in named:
        assert part in str(error.value)
    Run.parse({}, overrides | remedy)


def clips(run: Run) -> tuple[float | None, float | None]:
    assert isinstance(run.method, GRPO)
    return run.method.clip_low, run.method.clip_high


def test_bounds_of_gspo_are_its_own(tmp_path):
    """A ratio of whole answers stays closer to 1 than a token's."""
    grpo = {"method": {"kind": "grpo"}}
    gspo = Run.parse(grpo, {"method.objective": "gspo"})
    assert clips(gspo) == (3e-4, 4e-4)
    given = Run.parse(
        grpo, {"method.objective": "gspo", "method.clip_low": 0.2, "method.minibatches": 2}
    )
    assert clips(given) == (0.2, 4e-4)
    for objective in ("clip", "cispo"):
        assert clips(Run.parse(grpo, {"method.objective": objective})) == (0.2, 0.28)
    gspo.save(tmp_path / "run.toml")
    assert Run.load(tmp_path / "run.toml") == gspo


@pytest.mark.parametrize(
    ("former", "named"),
    [
        ({"data.decay_sources": '[{path = "a"}]'}, ["[[data.stages]]", 'phase = "decay"']),
        ({"data.shuffle": "false"}, ['data.order = "shuffled"', '"sequential"']),
    ],
)
def test_a_former_key_names_its_new_form(former, named):
    with pytest.raises(ConfigError, match="is no longer a key") as error:
        Run.parse({}, former)
    for part in [*former, *named]:
        assert part in str(error.value)


def test_reading_and_checking_a_run_imports_no_torch(tmp_path):
    path = Path(tmp_path / "recipe.toml")
    path.write_text("[model]\nnum_kv_heads = 3\n")
    code = (
        "import sys; from stepwell.config import Run; from stepwell.types import ConfigError\n"
        f"try: Run.load({str(path)!r})\n"
        "except ConfigError as error: print(error)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nearest that does is 2" in done.stdout


@pytest.mark.parametrize(
    ("key", "idle", "read"),
    [
        ("optim.muon_lr=0.01", {}, {"optim.kind": "muon"}),
        ("remat.every=3", {"remat.mode": "full"}, {"remat.mode": "every"}),
        (
            "optim.schedule.final_fraction=0.1",
            {"optim.schedule.kind": "constant"},
            {"optim.schedule.kind": "linear"},
        ),
    ],
)
def test_keys_that_change_nothing_are_refused(key, idle, read):
    name, _, text = key.partition("=")
    value = float(text) if "." in text else int(text)
    Run.parse({}, {name: value, **read})
    with pytest.raises(ConfigError, match=f"{key} changes nothing with"):
        Run.parse({}, {name: value, **idle})
