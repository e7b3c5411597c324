"""A server that we didn't write: `transformers serve`."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from stepwell.generate import Snapshot
from stepwell.models.decode import DecodeWeights
from stepwell.models.flops import parameter_shapes
from stepwell.models.hf import load_hf, read_hf_config
from stepwell.posttrain.sampling.server import ServerSampler
from stepwell.types import ConfigError
from tests import runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The tests' untrained model as a Hugging Face folder."""
    world = runs.make_world(tmp_path_factory.mktemp("world"))
    code, log = runs.finish(
        ["export", "base", "--out", "hf", "--tokenizer", "tokenizer"], world, world / "log"
    )
    assert code == 0, log
    return world / "hf"


@pytest.fixture(scope="module")
def url(exported, tmp_path_factory):
    pytest.importorskip("fastapi", reason="pip install 'stepwell[serving]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "--host", "127.0.0.1", "--port", str(port)]
    argv = ["transformers", *words, "--device", "cpu", str(exported)]
    code = (
        f"import sys; sys.argv = {argv!r}; from transformers.cli.transformers import main; main()"
    )
    log = (tmp_path_factory.mktemp("server") / "log").open("w+")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=log, stderr=subprocess.STDOUT, env=environment
    )
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while time.monotonic() < deadline:
            assert process.poll() is None, Path(log.name).read_text()
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2).read()
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        process.kill()
        process.wait()
        log.close()


def test_a_server_of_text_alone_is_refused_with_what_it_said(exported, url):
    """It takes no token ids and returns none, so nothing that it samples could be trained on."""
    cfg = read_hf_config(exported)
    weights = DecodeWeights.pack(cfg, load_hf(exported, parameter_shapes(cfg)), torch.float32)
    server = ServerSampler.connect(url, timeout_s=60)
    assert str(exported) in server.model
    with pytest.raises(ConfigError, match="can't be trained on") as refusal:
        server.check(Snapshot(weights, 0), 1.0)
    assert "prompt" in str(refusal.value) or "token ids" in str(refusal.value)


def test_the_server_itself_works(exported, url):
    """So the refusal above is not that of a server that is down."""
    server = ServerSampler.connect(url, timeout_s=60)
    body = {"model": server.model, "prompt": "1+1=", "max_tokens": 4}
    answer = server.call("POST", "/v1/completions", body)
    (choice,) = answer["choices"]
    assert isinstance(choice["text"], str)
    assert choice.get("logprobs") is None
