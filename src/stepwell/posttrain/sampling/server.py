"""Samples from an OpenAI-compatible completion server that takes and gives token ids (vLLM's).

Token in, token out: prompts are sent as ids, and the answer's ids and log-probabilities are the
server's own. A server that returns text alone can't be trained on: its text, encoded again, may be
other tokens than those that were sampled.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import torch

from stepwell.generate import Progress, Request, Sampling, Snapshot
from stepwell.models.decode import prefill
from stepwell.tokenizer import Tokenizer
from stepwell.types import Completion, ConfigError, StepwellError

TOKEN_ID = "token_id:"
# Log-probabilities of a token by server and trainer: the same model in bfloat16 and float32 differs
# by a few hundredths, another model by units.
MAX_DIFFERENCE = 0.5
RETRIED = (408, 425, 429, 500, 502, 503, 504)


class ServerError(StepwellError):
    """The server cannot be reached, or doesn't answer as it must."""


@dataclass(frozen=True)
class ServerSampler:
    """url: up to and without /v1. model: as the server calls it. version: of the weights that the
    server has. timeout_s: of one request; it is tried `retries` times more where the fault may pass
    (no connection, a time-out, the server's own errors). num_concurrent: requests at once.
    """

    url: str
    model: str
    version: int = 0
    timeout_s: float = 600.0
    retries: int = 4
    num_concurrent: int = 64
    first_wait_s: float = 0.5

    @classmethod
    def connect(cls, url: str, model: str | None = None, **more: Any) -> ServerSampler:
        """Of the only model that the server has, unless one is named. Raises ConfigError."""
        url = url.rstrip("/").removesuffix("/v1")
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"method.server={url!r} must begin with http:// or https://")
        server = cls(url, model or "", **more)
        names = [str(row.get("id")) for row in server.call("GET", "/v1/models").get("data", [])]
        if model is None and len(names) != 1:
            raise ConfigError(
                f"method.server={url!r} has {len(names)} models ({', '.join(names[:5])}); serve "
                "the one to be trained alone"
            )
        if model is not None and model not in names:
            raise ConfigError(f"method.server={url!r} has no model {model!r}: {', '.join(names)}")
        return replace(server, model=model or names[0])

    # --- sampling ----------------------------------------------------------------------------

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        tokenizer: Tokenizer | None = None,
        num_slots: int = 0,
    ) -> list[Completion]:
        """As the engine's. Raises ServerError where the server is at fault."""
        reports = self.stream(requests, sampling, tokenizer)
        done = {c.request_id: c for report in reports for c in report.done}
        return [done[request.id] for request in requests]

    def stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        tokenizer: Tokenizer | None = None,
        every_tokens: int = 0,
    ) -> Iterator[Progress]:
        """A report an answer, as they end."""
        pool = ThreadPoolExecutor(min(self.num_concurrent, max(len(requests), 1)), "server")
        try:
            answers = [pool.submit(self._complete, r, sampling, tokenizer) for r in requests]
            for answer in as_completed(answers):
                yield Progress((answer.result(),), ())
        finally:
            pool.shutdown(cancel_futures=True)

    def _complete(
        self, request: Request, sampling: Sampling, tokenizer: Tokenizer | None
    ) -> Completion:
        wanted = (request.max_new_tokens or sampling.max_new_tokens) - len(request.sampled)
        prompt = [*request.prompt_ids, *request.sampled]
        choice = self._choice(prompt, wanted, sampling, request.seed)
        ids, logprobs = tokens_of(choice, prompt, wanted)
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise ServerError(
                f"{self.url} ended an answer with {reason!r}; 'stop' or 'length' was due"
            )
        ids, logprobs = (*request.sampled, *ids), (*request.sampled_logprobs, *logprobs)
        body = ids[:-1] if ids[-1] in sampling.eos_ids else ids
        text = str(choice.get("text", "")) if tokenizer is None else tokenizer.decode(body)
        cuts = [at for stop in sampling.stop if (at := text.find(stop)) >= 0]
        return Completion(
            request_id=request.id,
            prompt_ids=request.prompt_ids,
            token_ids=ids,
            logprobs=logprobs,
            text=text[: min(cuts)] if cuts else text,
            finish_reason=reason,
            policy_version=self.version,
        )

    def _choice(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling, seed: int
    ) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed % 2**63,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stop_token_ids": list(sampling.eos_ids),
            "skip_special_tokens": False,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        choices = self.call("POST", "/v1/completions", body).get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise ServerError(f"{self.url} gave {choices!r:.80}, not one choice")
        return choices[0]

    # --- the server --------------------------------------------------------------------------

    def check(self, snapshot: Snapshot, temperature: float) -> None:
        """Asks for a token, so that what can't be trained on is refused before a step. Raises
        ConfigError for a server without token ids or log-probabilities, for log-probabilities that
        leave the temperature out, and for another model than the trainer's."""
        vocab_size = snapshot.weights.cfg.vocab_size
        prompt = list(range(1, min(9, vocab_size)))
        try:
            found = [
                tokens_of(self._choice(prompt, 1, Sampling(t, max_new_tokens=1), 0), prompt, 1)
                for t in (temperature, 1.0)
            ]
        except ServerError as error:
            raise ConfigError(
                f"method.server={self.url!r} can't be trained on: {error}. It has to take prompts "
                "as token ids and to return `token_ids` and `logprobs` from /v1/completions, as "
                "vLLM does; leave method.server out to sample with the engine itself"
            ) from error
        weights = snapshot.weights
        with torch.inference_mode():
            tokens = torch.tensor(prompt, device=weights.device)
            _, logits_V = prefill(weights, weights.rope(len(prompt)), tokens)
        for t, ((token,), (logprob,)) in zip((temperature, 1.0), found, strict=True):
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    f"method.server={self.url!r} sampled id {token}, but model.vocab_size="
                    f"{vocab_size}; it serves another model"
                )
            own = float((logits_V.double() / t).log_softmax(-1)[token])
            plain = float(logits_V.double().log_softmax(-1)[token])
            if abs(logprob - own) <= MAX_DIFFERENCE:
                if abs(logprob - plain) < abs(logprob - own) and abs(plain - own) > 0.05:
                    raise ConfigError(_without_temperature(self.url, t))
                continue
            if abs(logprob - plain) <= MAX_DIFFERENCE:
                raise ConfigError(_without_temperature(self.url, t))
            raise ConfigError(
                f"method.server={self.url!r} gives a token the log-probability {logprob:.3f}, the "
                f"run's own weights give it {own:.3f}; it serves another model, or other weights"
            )

    def reload(self, version: int) -> ServerSampler:
        """Lets the server load the weights in its model's folder anew, and forget every cached
        prefix (vLLM with VLLM_SERVER_DEV_MODE=1). Raises ServerError."""
        self.call("POST", "/collective_rpc", {"method": "reload_weights"})
        self.call("POST", "/reset_prefix_cache", {})
        return replace(self, version=version)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer's JSON (empty for none). Raises ServerError after the last try."""
        trouble, wait_s = "", self.first_wait_s
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(wait_s)
                wait_s *= 2
            try:
                return self._call_once(method, path, body)
            except urllib.error.HTTPError as error:
                trouble = f"{error.code} {error.reason}: {_message(error)}"
                if error.code not in RETRIED:
                    raise ServerError(f"{self.url}{path} refuses: {trouble}") from error
            except (OSError, http.client.HTTPException) as error:  # no connection, or a time-out
                trouble = f"{type(error).__name__}: {error}"
        raise ServerError(
            f"{self.url}{path} does not answer, {self.retries + 1} times in a row; the last "
            f"trouble was {trouble}"
        )

    def _call_once(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            text = response.read()
        try:
            found = json.loads(text) if text.strip() else {}
        except ValueError as error:
            raise ServerError(f"{self.url}{path} answers with what is no JSON: {error}") from error
        if not isinstance(found, dict):
            return {"value": found}
        return found


def tokens_of(
    choice: dict[str, Any], prompt: Sequence[int], max_tokens: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids and log-probabilities of an answer. Raises ServerError where the server gave none, or
    such as don't fit together."""
    given = choice.get("logprobs") or {}
    logprobs = given.get("token_logprobs")
    ids = choice.get("token_ids")
    if ids is None:
        names = given.get("tokens") or []
        if names and all(str(name).startswith(TOKEN_ID) for name in names):
            ids = [int(str(name).removeprefix(TOKEN_ID)) for name in names]
    if not ids:
        raise ServerError("the server returned no token ids")
    if not logprobs:
        raise ServerError("the server returned no log-probabilities")
    if len(ids) != len(logprobs):
        raise ServerError(
            f"the server returned {len(ids)} token ids but {len(logprobs)} log-probabilities"
        )
    if len(ids) > max_tokens:
        raise ServerError(f"the server returned {len(ids)} tokens, {max_tokens} were asked for")
    seen = choice.get("prompt_token_ids")
    if seen is not None and list(seen) != list(prompt):
        raise ServerError(
            f"the server read {len(seen)} prompt tokens, which are not the {len(prompt)} that it "
            "was sent"
        )
    bad = [x for x in logprobs if not isinstance(x, int | float) or not -math.inf < x <= 1e-3]
    if bad:
        raise ServerError(f"the server returned the log-probability {bad[0]!r}")
    return tuple(int(i) for i in ids), tuple(float(x) for x in logprobs)


def check_staleness(server: ServerSampler, version: int, max_updates: int) -> None:
    """Raises ConfigError where the trainer has left the server's weights too far behind.

    max_updates: that method.max_staleness allows."""
    if version - server.version > max_updates:
        raise ConfigError(
            f"the weights of method.server={server.url!r} are of version {server.version}, and the "
            f"trainer's are of version {version}: more than method.max_staleness allows "
            f"({max_updates} updates). Set method.server_weights to the folder that the server "
            "loads, so that it gets new ones; or leave method.server out"
        )


def _without_temperature(url: str, temperature: float) -> str:
    return (
        f"method.server={url!r} gives log-probabilities at temperature 1, but method.temperature="
        f"{temperature:g} is sampled from; start vLLM with --logprobs-mode processed_logprobs, or "
        "set method.temperature=1.0"
    )


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says, at most a few hundred characters."""
    try:
        return error.read().decode(errors="replace").strip()[:300]
    except (OSError, http.client.HTTPException) as trouble:
        return f"(its message cannot be read: {trouble})"
