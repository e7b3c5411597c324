"""A completion server that speaks vLLM's protocol around our own sampler."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from stepwell.generate import Request, Sampling, Snapshot, generate
from stepwell.models.decode import DecodeWeights
from stepwell.models.flops import parameter_shapes
from stepwell.models.hf import load_hf, read_hf_config

Change = Callable[[dict[str, Any]], Any]


class Served:
    """snapshot: what it samples from. weights: the folder that it loads anew when it is told to.
    change: makes another answer of each choice. faults: how many requests fail first, and how."""

    def __init__(self, snapshot: Snapshot, weights: Path | None = None):
        self.snapshot, self.weights = snapshot, weights
        self.change: Change = lambda choice: choice
        self.faults: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.models = ["policy"]
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(path)
        if path == "/v1/models":
            return {"data": [{"id": name} for name in self.models]}
        if path == "/collective_rpc":
            assert self.weights is not None
            cfg = read_hf_config(self.weights)
            weights = DecodeWeights.pack(
                cfg, load_hf(self.weights, parameter_shapes(cfg)), torch.float32
            )
            self.snapshot = Snapshot(weights, self.snapshot.version + 1)
            return {}
        if path == "/reset_prefix_cache":
            return {}
        self.bodies.append(body)
        sampling = Sampling(
            temperature=body["temperature"],
            top_p=body["top_p"],
            eos_ids=tuple(body["stop_token_ids"]),
            max_new_tokens=body["max_tokens"],
        )
        request = Request(0, tuple(body["prompt"]), seed=body["seed"])
        (done,) = generate(self.snapshot.weights, [request], sampling)
        choice = {
            "text": "as the server has it",
            "finish_reason": done.finish_reason,
            "token_ids": list(done.token_ids),
            "prompt_token_ids": body["prompt"],
            "logprobs": {
                "tokens": [f"token_id:{i}" for i in done.token_ids],
                "token_logprobs": list(done.logprobs),
            },
        }
        return {"choices": [self.change(choice)]}


@contextmanager
def serving(served: Served) -> Iterator[Served]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def _reply(self, body: dict[str, Any]) -> None:
            fault = served.faults.pop(0) if served.faults else 0
            if fault == 1:  # says nothing for a while
                time.sleep(0.6)
                return
            code, text = fault or 200, b'{"error": "made up"}'
            if not fault:
                text = json.dumps(served.answer(self.path, body)).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
