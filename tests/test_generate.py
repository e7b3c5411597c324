"""Sampling: the same text whatever the batch, log-probabilities as scored, truncation, stopping."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stepwell import generate as generate_module
from stepwell.generate import Request, Sampling, generate, stream
from stepwell.models.decode import DecodeWeights, decode_step, prefill
from stepwell.models.transformer import Decoder, ForwardOptions
from stepwell.sections.model import ModelConfig
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError, TrainingError
from tests.models.test_decode import config, random_decoder

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(config())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = "the answer is four. das Mädchen läuft über die Straße. " * 20
    return Tokenizer.train([text], 300)


def pack(decoder: Decoder, dtype: torch.dtype) -> DecodeWeights:
    return DecodeWeights.pack(decoder.cfg, decoder.state_dict().items(), dtype)


def some_requests(cfg: ModelConfig, count: int, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 40 tokens, every third one shared with its predecessor."""
    rng = np.random.default_rng(seed)
    requests: list[Request] = []
    for i in range(count):
        prompt = tuple(int(x) for x in rng.integers(0, cfg.vocab_size, rng.integers(1, 41)))
        if i % 3 == 2:
            prompt = requests[-1].prompt_ids
        requests.append(Request(i, prompt, seed=i * 7, max_new_tokens=int(rng.integers(1, 40))))
    return requests


def scored(decoder: Decoder, prompt, answer, dtype, temperature=1.0) -> torch.Tensor:
    ids = torch.tensor([*prompt, *answer])
    T = len(ids) - 1
    options = ForwardOptions(dtype=dtype, temperature=temperature)
    borders = torch.tensor([0, T], dtype=torch.int32)
    with torch.no_grad():
        out = decoder(
            ids[None, :-1], torch.arange(T)[None], borders, ids[None, 1:], options=options
        )
    assert out.logprobs_BT is not None
    return out.logprobs_BT[0, len(prompt) - 1 :]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_has_one_text_whatever_runs_beside_it(decoder, dtype, temperature):
    weights, sampling = pack(decoder, dtype), Sampling(temperature=temperature)
    requests = some_requests(decoder.cfg, 20)
    together = generate(weights, requests, sampling, num_slots=64)
    few_slots = generate(weights, requests, sampling, num_slots=3)
    reversed_order = generate(weights, requests[::-1], sampling, num_slots=16)[::-1]
    alone = [generate(weights, [r], sampling)[0] for r in requests]
    assert together == few_slots == reversed_order == alone
    assert [len(c.token_ids) for c in together] == [r.max_new_tokens for r in requests]
    assert len({c.token_ids for c in together}) > 15


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_logprobs_equal_a_scoring_pass(decoder, dtype, tolerance, temperature):
    weights = pack(decoder, dtype)
    sampling = Sampling(temperature=temperature, top_p=0.9)
    for c in generate(weights, some_requests(decoder.cfg, 10), sampling):
        expected = scored(decoder, c.prompt_ids, c.token_ids, dtype, temperature or 1.0)
        assert (torch.tensor(c.logprobs) - expected).abs().max().item() < tolerance


def test_logprobs_equal_a_scoring_pass_in_bf16():
    """At the initialisation of training, where logits are small."""
    decoder = random_decoder(config())
    with torch.no_grad():
        for p in decoder.parameters():
            if p.dim() > 1:
                p.mul_(0.02 / 0.15)
    gaps = []
    for c in generate(pack(decoder, torch.bfloat16), some_requests(decoder.cfg, 20), Sampling()):
        expected = scored(decoder, c.prompt_ids, c.token_ids, torch.bfloat16)
        gaps.append((torch.tensor(c.logprobs) - expected).abs())
    gaps = torch.cat(gaps)
    assert gaps.mean().item() < 2e-4
    assert gaps.quantile(0.95).item() < 1e-3
    assert gaps.max().item() < 2**-8  # two steps of a bf16 logit between 0.25 and 0.5


def test_greedy_takes_the_likeliest_token(decoder):
    weights = pack(decoder, torch.float32)
    (c,) = generate(weights, [Request(0, (1, 2, 3))], Sampling(temperature=0, max_new_tokens=8))
    ids = list(c.prompt_ids)
    for token in c.token_ids:
        options = ForwardOptions(needs=frozenset({"logits"}))
        T = len(ids)
        borders = torch.tensor([0, T], dtype=torch.int32)
        with torch.no_grad():
            out = decoder(torch.tensor([ids]), torch.arange(T)[None], borders, options=options)
        assert int(out.logits_BTV[0, -1].argmax()) == token
        ids.append(token)


def test_new_weights_never_meet_old_keys(decoder):
    """Every prefix is recomputed: after a change of weights a call equals a fresh process's."""
    requests = some_requests(decoder.cfg, 6)
    generate(pack(decoder, torch.float32), requests, Sampling())
    other = random_decoder(decoder.cfg, seed=5)
    after = generate(pack(other, torch.float32), requests, Sampling(), policy_version=3)
    for c in after:
        expected = scored(other, c.prompt_ids, c.token_ids, torch.float32)
        assert (torch.tensor(c.logprobs) - expected).abs().max().item() < 1e-5
        assert c.policy_version == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top", [{}, {"top_k": 5}, {"top_p": 0.6}])
def test_ids_that_the_tokenizer_lacks_are_never_chosen(temperature, top):
    """A model's vocabulary may be padded; log-probabilities stay those over all of it."""
    text = "the answer is four. " * 20
    tokenizer = Tokenizer.train([text], 270)
    decoder = random_decoder(config(vocab_size=500))
    with torch.no_grad():  # the likeliest ids are the surplus ones
        decoder.get_parameter("embed.weight")[tokenizer.vocab_size :] *= 3
    weights = pack(decoder, torch.float32)
    requests = [Request(i, (1 + i, 2), seed=i) for i in range(12)]
    sampling = Sampling(temperature=temperature, max_new_tokens=20, **top)
    free = generate(weights, requests, sampling)
    assert max(max(c.token_ids) for c in free) >= tokenizer.vocab_size
    for c in generate(weights, requests, sampling, tokenizer=tokenizer):
        assert max(c.token_ids) < tokenizer.vocab_size
        expected = scored(decoder, c.prompt_ids, c.token_ids, torch.float32)
        assert (torch.tensor(c.logprobs) - expected).abs().max().item() < 1e-4


def test_slots_are_never_idle_and_prompts_are_read_once(decoder, monkeypatch):
    """20 requests of 10 tokens on 8 slots: 3 waves of 9 steps (the first token comes of reading
    the prompt), and one reading for each distinct prompt."""
    calls = {"step": 0, "prefill": 0}

    def counted(name, function):
        def call(*args):
            calls[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(generate_module, "decode_step", counted("step", decode_step))
    monkeypatch.setattr(generate_module, "prefill", counted("prefill", prefill))
    requests = [Request(i, (i // 4, 7), seed=i, max_new_tokens=10) for i in range(20)]
    generate(pack(decoder, torch.float32), requests, Sampling(), num_slots=8)
    assert calls == {"step": 27, "prefill": 5}


def test_eos_ids_end_a_text(decoder):
    weights = pack(decoder, torch.float32)
    request = Request(0, (5, 6), seed=1, max_new_tokens=30)
    (free,) = generate(weights, [request], Sampling())
    eos = (free.token_ids[9], free.token_ids[4])
    (cut,) = generate(weights, [request], Sampling(eos_ids=eos))
    first = min(free.token_ids.index(e) for e in eos)
    assert cut.token_ids == free.token_ids[: first + 1]
    assert cut.logprobs == free.logprobs[: first + 1]
    assert (cut.finish_reason, free.finish_reason) == ("stop", "length")


def test_stop_strings_work_across_tokens(tokenizer):
    cfg = config(vocab_size=tokenizer.vocab_size)
    weights = pack(random_decoder(cfg, seed=2), torch.float32)
    requests = [Request(i, (i + 1, 2), seed=i, max_new_tokens=25) for i in range(12)]
    free = generate(weights, requests, Sampling(), tokenizer=tokenizer)
    assert [c.text for c in free] == [tokenizer.decode(c.token_ids) for c in free]
    checked = 0
    for request, whole in zip(requests, free, strict=True):
        stop = whole.text[10:14]
        if "\ufffd" in stop or len(stop) < 4:
            continue
        (c,) = generate(weights, [request], Sampling(stop=("zzzz", stop)), tokenizer=tokenizer)
        assert c.finish_reason == "stop"
        assert c.text == whole.text[: whole.text.index(stop)]
        assert whole.token_ids[: len(c.token_ids)] == c.token_ids
        assert stop in tokenizer.decode(c.token_ids)
        assert stop not in tokenizer.decode(c.token_ids[:-1])
        checked += 1
    assert checked >= 3


def test_a_text_ends_at_the_context(decoder):
    weights = pack(decoder, torch.float32)
    prompt = tuple(range(90)) + tuple(range(30))
    (c,) = generate(weights, [Request(0, prompt)], Sampling(max_new_tokens=500))
    assert len(c.token_ids) == decoder.cfg.max_seq_len - len(prompt)
    assert c.finish_reason == "length"


@pytest.mark.parametrize("dtype", DTYPES)
def test_unfinished_answers_go_on_bit_equal(decoder, dtype):
    """Broken off at every report, also a second time while still feeding what was known."""
    weights, requests = pack(decoder, dtype), some_requests(decoder.cfg, 11)
    sampling = Sampling(temperature=0.8, eos_ids=(3,))
    wanted = generate(weights, requests, sampling, num_slots=8)
    reports = list(stream(weights, requests, sampling, num_slots=8, every_tokens=4))
    assert len(reports) > 5
    done = {c.request_id: c for report in reports for c in report.done}
    assert [done[r.id] for r in requests] == wanted
    finished = {}
    for report in reports[:-1]:
        finished |= {c.request_id: c for c in report.done}
        begun = {c.request_id: c for c in report.running}
        rest = [
            replace(r, sampled=begun[r.id].token_ids, sampled_logprobs=begun[r.id].logprobs)
            if r.id in begun
            else r
            for r in requests
            if r.id not in finished
        ]
        known = finished | {c.request_id: c for c in generate(weights, rest, sampling, num_slots=5)}
        assert [known[r.id] for r in requests] == wanted


def test_what_was_sampled_stays_as_it_was(decoder):
    """Tokens and log-probabilities of an earlier call are handed on, whatever would be sampled."""
    weights = pack(decoder, torch.float32)
    known = Request(0, (5, 6), sampled=(9, 8, 7), sampled_logprobs=(-1.0, -2.0, -3.0))
    (got,) = generate(weights, [known], Sampling(max_new_tokens=6, eos_ids=(8,)))
    assert got.token_ids[:3] == (9, 8, 7)
    assert got.logprobs[:3] == (-1.0, -2.0, -3.0)
    (longer,) = generate(weights, [Request(0, (5, 6, 9, 8, 7))], Sampling(max_new_tokens=3))
    assert got.token_ids[3:] == longer.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-42])
def test_logits_that_are_not_finite_are_no_answer(decoder, temperature):
    weights = pack(decoder, torch.float32)
    if temperature in (0.0, 1.0):
        weights = replace(weights, norm_D=torch.full_like(weights.norm_D, float("nan")))
    with pytest.raises(TrainingError, match=r"request 7: token 1 .* not finite"):
        generate(weights, [Request(7, (1, 2))], Sampling(temperature=temperature))
    fine = generate(pack(decoder, torch.float32), [Request(7, (1, 2))], Sampling(temperature=1e-9))
    assert fine[0].logprobs[0] == 0.0


def test_what_cannot_be_is_refused(decoder):
    weights = pack(decoder, torch.float32)

    def run(request, sampling=None, **options):
        requests = request if isinstance(request, list) else [request]
        return generate(weights, requests, sampling or Sampling(), **options)

    assert run([]) == []
    with pytest.raises(ConfigError, match="request 4: the prompt is empty"):
        run(Request(4, ()))
    with pytest.raises(ConfigError, match="the longest that can be continued has 127"):
        run(Request(0, (1,) * 128))
    with pytest.raises(ConfigError, match="id 100, but the vocabulary has ids 0 to 99"):
        run(Request(0, (1, 100)))
    with pytest.raises(ConfigError, match="id -1"):
        run(Request(0, (1, -1)))
    with pytest.raises(ConfigError, match="distinct"):
        run([Request(0, (1,)), Request(0, (2,))])
    with pytest.raises(ConfigError, match="tokenizer"):
        run(Request(0, (1,)), Sampling(stop=("x",)))
    with pytest.raises(ConfigError, match="num_slots=0"):
        run(Request(0, (1,)), num_slots=0)
    for bad in ({"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Sampling(**bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stop"):
        Sampling(stop="abc")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampled", "logprobs", "message"),
    [
        ((1, 2), (-1.0,), "2 sampled tokens have 1 log-probabilities"),
        ((1, 2), (-1.0, -1.0), "at most 1"),
        ((99_999,), (-1.0,), "id 99999"),
    ],
)
def test_an_unfinished_answer_that_cannot_be(decoder, sampled, logprobs, message):
    request = Request(0, (1,), sampled=sampled, sampled_logprobs=logprobs)
    with pytest.raises(ConfigError, match=message):
        generate(pack(decoder, torch.float32), [request], Sampling(max_new_tokens=2))
