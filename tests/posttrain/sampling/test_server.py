"""Samples from a completion server: token in, token out, and what can't be trained on."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.cli import main
from stepwell.config import Run
from stepwell.data.packing import pack_rows
from stepwell.eval.grade import Prompt
from stepwell.generate import Request, Sampling, Snapshot
from stepwell.metrics import read_lines
from stepwell.models.decode import DecodeWeights, prefill
from stepwell.models.flops import parameter_shapes
from stepwell.posttrain.rollout import ByVerifier, collect
from stepwell.posttrain.sampling.pipeline import rollout_stream
from stepwell.posttrain.sampling.server import (
    ServerError,
    ServerSampler,
    check_staleness,
    tokens_of,
)
from stepwell.posttrain.verifiers.exact import regex
from stepwell.tokenizer import Tokenizer
from stepwell.train.checkpoint import load_weights
from stepwell.train.losses import cross_entropy
from stepwell.train.run_checkpoints import latest
from stepwell.train.start import open_session
from stepwell.types import ConfigError
from tests import runs
from tests.models.test_decode import config, random_decoder
from tests.posttrain.sampling.completion_server import Served, serving
from tests.runs import measured, words


def snapshot(seed: int = 0) -> Snapshot:
    decoder = random_decoder(config(), seed)
    return Snapshot(DecodeWeights.pack(decoder.cfg, decoder.state_dict().items(), torch.float32), 0)


@pytest.fixture
def served():
    with serving(Served(snapshot())) as found:
        yield found


def sampler(served: Served, **more: Any) -> ServerSampler:
    return ServerSampler.connect(served.url, **{"first_wait_s": 0.01, "timeout_s": 0.3, **more})


REQUESTS = [Request(7, (5, 6), seed=3), Request(8, (5, 6), seed=2**64 - 1, max_new_tokens=3)]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_server_samples_what_the_engine_would(served, temperature):
    sampling = Sampling(temperature, max_new_tokens=6, eos_ids=(3, 9))
    requests = [replace(r, seed=r.seed % 2**63) for r in REQUESTS]
    server = sampler(served, version=4)
    wanted = served.snapshot.generate(requests, sampling)
    got = server.generate(requests, sampling)
    assert [replace(c, policy_version=0, text="") for c in got] == wanted
    assert {c.policy_version for c in got} == {4}
    assert {c.text for c in got} == {"as the server has it"}
    assert [body["max_tokens"] for body in served.bodies] in ([6, 3], [3, 6])
    # An answer that was left unfinished goes on from its tokens.
    begun = replace(requests[0], sampled=got[0].token_ids[:2], sampled_logprobs=(-1.0, -2.0))
    (more,) = server.generate([begun], sampling)
    assert more.token_ids[:2] == got[0].token_ids[:2]
    assert more.logprobs[:2] == (-1.0, -2.0)
    assert len(more.token_ids) <= 6


def test_ids_may_come_as_tokens(served):
    served.change = lambda choice: {k: v for k, v in choice.items() if k != "token_ids"}
    sampling = Sampling(max_new_tokens=6)
    (got,) = sampler(served).generate(REQUESTS[:1], sampling)
    assert got.token_ids == served.snapshot.generate(REQUESTS[:1], sampling)[0].token_ids


def without(key: str):
    return lambda choice: {**choice, key: None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: {**c, "token_ids": None, "logprobs": {**c["logprobs"], "tokens": ["a"]}},
            "no token ids",
        ),
        (without("logprobs"), "no log-probabilities"),
        (lambda c: {**c, "token_ids": [1, 2]}, "2 token ids but 1 log-prob"),
        (lambda c: {**c, "prompt_token_ids": [1]}, "read 1 prompt tokens"),
        (
            lambda c: {**c, "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1, -1]}},
            "2 tokens, 1 were asked for",
        ),
        (lambda c: {**c, "logprobs": {"token_logprobs": [None]}}, "log-probability None"),
        (lambda c: {**c, "logprobs": {"token_logprobs": [-9.0]}}, "serves another model"),
        (lambda c: {**c, "token_ids": [10**6]}, "sampled id 1000000"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(served, change, message):
    served.change = change
    with pytest.raises(ConfigError, match=message):
        sampler(served).check(served.snapshot, 1.0)
    served.change = lambda choice: choice
    sampler(served).check(served.snapshot, 1.0)


def test_another_model_is_refused(served):
    with pytest.raises(ConfigError, match="serves another model"):
        sampler(served).check(snapshot(1), 1.0)


def test_log_probabilities_that_leave_the_temperature_out(served):
    """As vLLM's are by default: sampled at a temperature, given at 1."""
    plain = served.snapshot

    def raw(choice: dict[str, Any]) -> dict[str, Any]:
        prompt, ids = choice["prompt_token_ids"], choice["token_ids"]
        _, logits = prefill(plain.weights, plain.weights.rope(len(prompt)), torch.tensor(prompt))
        return {**choice, "logprobs": {"token_logprobs": [float(logits.log_softmax(-1)[ids[0]])]}}

    served.change = raw
    sampler(served).check(plain, 1.0)
    with pytest.raises(ConfigError, match="processed_logprobs"):
        sampler(served).check(plain, 0.3)


@pytest.mark.parametrize("fault", [1, 500, 503, 429])
def test_passing_faults_are_tried_again(served, fault):
    server = sampler(served, retries=2)
    wanted = server.generate(REQUESTS[:1], Sampling(max_new_tokens=2))
    served.faults = [fault] * 2
    assert server.generate(REQUESTS[:1], Sampling(max_new_tokens=2)) == wanted
    served.faults = [fault] * 3
    with pytest.raises(ServerError, match="3 times in a row"):
        server.generate(REQUESTS[:1], Sampling(max_new_tokens=2))


def test_a_refusal_is_not_tried_again(served):
    server = sampler(served)
    served.faults = [400]
    with pytest.raises(ServerError, match="400 .*made up"):
        server.generate(REQUESTS[:1], Sampling(max_new_tokens=2))
    assert served.bodies == []


def test_a_server_is_known_by_its_only_model(served):
    assert sampler(served).model == "policy"
    assert ServerSampler.connect(f"{served.url}/v1/").url == served.url
    served.models = ["a", "b"]
    with pytest.raises(ConfigError, match=r"2 models \(a, b\)"):
        sampler(served)
    assert sampler(served, model="b").model == "b"
    with pytest.raises(ConfigError, match="no model 'c'"):
        sampler(served, model="c")
    with pytest.raises(ConfigError, match="must begin with http"):
        ServerSampler.connect("localhost:8000")
    with pytest.raises(ServerError, match="does not answer, 1 times"):
        ServerSampler.connect("http://127.0.0.1:9", retries=0)


def test_staleness_is_bounded():
    server = ServerSampler("http://there", "m", version=3)
    check_staleness(server, 5, 2)
    with pytest.raises(ConfigError, match="more than method.max_staleness allows"):
        check_staleness(server, 6, 2)


def test_ids_must_be_there():
    with pytest.raises(ServerError, match="no token ids"):
        tokens_of({"text": "a"}, [1], 5)


# --- a run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def steps(folder: str, url: str | None, **more: Any) -> list[tuple[int, list[Any]]]:
    """(staleness, answers' ids) of each rollout of a short run."""
    values = {"method.server": url} if url else {}
    run = Run.parse(
        {},
        runs.settings(
            "grpo", folder, **{"method.kind": "grpo", "train.steps": 3, **values, **more}
        ),
    )
    tokenizer, found = Tokenizer.load("tokenizer"), []
    prompts = [Prompt("1+1=", tuple(tokenizer.encode("1+1=")), {})]
    rewards = ByVerifier(regex("[a-m]"))
    with (
        open_session(run, tokenizer=tokenizer.fingerprint, console=False) as session,
        rollout_stream(session, lambda n: prompts, rewards, tokenizer) as stream,
    ):
        for number in range(3):
            rollouts = stream.take(number, {"rollouts": number})
            documents = rollouts.documents()
            batch = pack_rows(
                [(ids, mask) for ids, mask, _ in documents],
                32,
                extra={"sampler": [streams["sampler_logprobs"] for *_, streams in documents]},
            )
            stale = int(stream.metrics(rollouts)["rollout/staleness"])
            if not stale:
                trained = batch.weights_BT != 0
                own = session.engine.logprobs(batch)[trained]
                torch.testing.assert_close(batch.extra["sampler"][trained], own, atol=1e-4, rtol=0)
            found.append((stale, [ids for ids, *_ in documents]))
            session.step(batch, cross_entropy(run.loss))
            stream.after_step({"rollouts": number + 1})
    return found


FP32 = {"precision.compute": "fp32", "precision.param": "fp32"}


def test_a_run_puts_every_version_on_the_server(world):
    """Exported, loaded by the server, and sampled from: the log-probabilities are the engine's."""
    with serving(Served(snapshot(), Path("served"))) as served:
        got = steps("with-server", served.url, **{"method.server_weights": "served", **FP32})
    assert [stale for stale, _ in got] == [0, 0, 0]
    assert served.calls.count("/collective_rpc") == served.calls.count("/reset_prefix_cache") == 3
    assert {len(ids) for _, ids in got} == {3}
    assert (Path("served") / "tokenizer.json").is_file()


def test_a_server_that_keeps_its_weights_is_left_behind(world):
    decoder = dict(open_weights())
    cfg = Run.parse({}, runs.settings("grpo", "x", **{"method.kind": "grpo"})).model
    weights = DecodeWeights.pack(cfg, decoder.items(), torch.float32)
    with serving(Served(Snapshot(weights, 0))) as served:
        with pytest.raises(
            ConfigError, match="are of version 0, and the trainer's are of version 1"
        ):
            steps("on-policy", served.url, **FP32)
        with pytest.raises(ConfigError, match=r"of version 2.*allows \(1 updates\)"):
            steps("stale", served.url, **FP32, **{"method.max_staleness": 1})
        got = steps("staler", served.url, **FP32, **{"method.max_staleness": 3})
    assert [stale for stale, _ in got] == [0, 1, 2]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("grpo", {"lora.rank": 2}),
        ("ppo", {}),
        ("ppo", {"method.critic": "shared"}),
        ("online-dpo", {}),
    ],
)
def test_every_method_that_samples_asks_the_server(world, method, more):
    """Each rollout is the server's, with the weights of its step, and PPO's export has no score."""
    folder, weights = f"{method}-{len(more)}", Path(f"served-{method}-{len(more)}")
    values = {"method.server_weights": weights, "train.steps": 2, **FP32, **more}
    with serving(Served(snapshot(), weights)) as served:
        values["method.server"] = served.url
        assert main(words(method, runs.settings("grpo", folder, **values))) == 0
    assert served.calls.count("/collective_rpc") == 2
    lines, samples = measured(Path(folder)), read_lines(Path(folder) / "samples.jsonl")
    drawn = [row["policy_version"] for row in samples if not row["greedy"]]
    assert set(drawn) == {0, 1}
    assert sum(body["max_tokens"] > 1 for body in served.bodies) == len(drawn)  # others are trials
    for line in lines:
        assert line["sampler/kl"] == pytest.approx(0, abs=1e-6)


def open_weights():
    cfg = Run.parse({}, runs.settings("grpo", "x", **{"method.kind": "grpo"})).model
    folder = latest("base") or Path("base")
    return load_weights(folder, parameter_shapes(cfg))


def test_collecting_from_a_server(served):
    tokenizer = Tokenizer.train(["one two three " * 9], 270)
    prompts = [Prompt("one", (5, 6), {})]
    rewards = ByVerifier(lambda prompts, completions: [float(len(completions[0]))])
    got = collect(sampler(served), prompts, 2, Sampling(max_new_tokens=4), rewards, tokenizer)
    assert [len(c.token_ids) for c in got.groups[0].completions] == [4, 4]
    assert None not in got.groups[0].rewards


def test_settings_that_exclude_each_other(world):
    def run(**more: Any) -> Run:
        method = {f"method.{key}": value for key, value in more.items()}
        return Run.parse({}, runs.settings("grpo", "x", **{"method.kind": "grpo", **method}))

    run(server="http://there", server_weights="served")
    with pytest.raises(ConfigError, match="there is no method.server"):
        run(server_weights="served")
    with pytest.raises(ConfigError, match="nearest legal value is 0"):
        run(server="http://there", server_weights="served", max_staleness=1)
