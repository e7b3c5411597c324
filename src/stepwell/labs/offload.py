"""Where the bytes of Adam live, and what the link between device and host costs.

Counted between the backward pass and the step, when gradients are there too: weights, gradients,
moments, masters and buffers of an engine, by where they are (on a machine without a card both are
its memory, but different tensors). Then the arithmetic of the link: optimiser offload sends 4 bytes
a parameter down and 4 up, both at once; a step computes 6 FLOPs a parameter and token.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from stepwell.config import Run
from stepwell.data.batch import Batch, padding
from stepwell.hardware import accelerator, live_tensor_bytes
from stepwell.parallel.init import local_part
from stepwell.parallel.mesh import init_distributed
from stepwell.ranks import run_ranks
from stepwell.sections.optim import OptimConfig
from stepwell.train.adamw8bit import AdamW8bit
from stepwell.train.engine import Engine
from stepwell.train.host_optim import HostOptimizer
from stepwell.train.losses import cross_entropy
from stepwell.train.optim import build_optimizer

CLAIM = (
    "AdamW with float32 masters holds 16 bytes a parameter on the device; with the optimiser on "
    "the host 8 (and 16 there), with the parameters on the host 0, with 8-bit moments 10.03. "
    "Wherever AdamW runs, gradient norms and weights are bit-equal. A link of b bytes/s adds 4/b "
    "seconds a parameter to a step: as long as it computes some number of tokens, whatever the "
    "model's size."
)
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload.optimizer": True},
    "parameters": {"offload.parameters": True},
    "8-bit": {"optim.kind": "adamw8bit"},
}
# Bytes a parameter on the device and on the host. 8-bit: two codes, and a scale for each 256.
EXPECTED = {
    "none": (16.0, 0.0),
    "optimizer": (8.0, 16.0),
    "parameters": (0.0, 16.0),
    "8-bit": (8 + 2 * (1 + 4 / 256), 0.0),
}
# Bytes/s in each direction, with the card that is typically behind it.
LINKS: dict[str, tuple[float, str, str]] = {
    "PCIe 3 x16": (15.75e9, "v100-32g", "PCI-SIG: 8 GT/s x 16 lanes x 128/130"),
    "PCIe 4 x16": (31.5e9, "a100-80g", "PCI-SIG: 16 GT/s x 16 lanes x 128/130"),
    "PCIe 5 x16": (63.0e9, "h100-sxm", "PCI-SIG: 32 GT/s x 16 lanes x 128/130"),
    "NVLink-C2C": (450e9, "gh200", "NVIDIA GH200 datasheet: 900 GB/s, half of it each way"),
}
SIZES = {"1B": 1e9, "8B": 8e9, "70B": 70e9}
UTILISATION = 0.4  # of the card's peak, while it computes
NUM_STEPS = 3


def measure(small: bool = False) -> dict[str, Any]:
    """bytes: by mode and place, a parameter. norms: of the same steps in each mode. here: bytes/s
    of copies and parameters/s of AdamW on this machine. links: predictions from published rates."""
    found = run_ranks(_all_modes, 1)[0]
    return {
        "bytes": {mode: row["bytes"] for mode, row in found.items()},
        "norms": {mode: row["norms"] for mode, row in found.items()},
        "weights": {mode: row["weights"] for mode, row in found.items()},
        "here": _rates_here(2**20 if small else 2**24),
        "links": {name: predict(name) for name in LINKS},
    }


def predict(link: str) -> dict[str, Any]:
    """Seconds that a step waits for the copies, by model size, and the tokens a step (on one card)
    whose computing takes as long, and ten times as long."""
    bytes_per_s, card, source = LINKS[link]
    row = accelerator(card)
    flops_per_s = UTILISATION * row.peak_flops_per_s("bf16" if row.bf16_flops_per_s else "fp16")
    seconds = {name: 4 * size / bytes_per_s for name, size in SIZES.items()}
    tokens = {n: seconds[n] * flops_per_s / (6 * size) for n, size in SIZES.items()}
    return {
        "bytes_per_s": bytes_per_s,
        "card": card,
        "source": source,
        "seconds": seconds,
        "tokens_as_long": tokens,
        "tokens_for_a_tenth": {name: 10 * count for name, count in tokens.items()},
    }


def check(numbers: dict[str, Any]) -> list[str]:
    wrong = []
    for mode, places in EXPECTED.items():
        for place, wanted in zip(("device", "host"), places, strict=True):
            held = numbers["bytes"][mode][place]
            if abs(held - wanted) > 0.01 * max(wanted, 1):
                wrong.append(f"{mode}: {held:.3f} bytes a parameter on the {place}, not {wanted}")
    for mode in ("optimizer", "parameters"):
        for what in ("norms", "weights"):
            if numbers[what][mode] != numbers[what]["none"]:
                wrong.append(f"{mode}: {what} are not those without offload")
    for link, row in numbers["links"].items():
        counts = list(row["tokens_as_long"].values())
        if max(counts) - min(counts) > 1e-6 * max(counts):
            wrong.append(f"{link}: the tokens that hide the copies depend on the model's size")
    return wrong


def plot(numbers: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    modes = list(numbers["bytes"])
    device = [numbers["bytes"][mode]["device"] for mode in modes]
    host = [numbers["bytes"][mode]["host"] for mode in modes]
    left.bar(modes, device, width=0.6, label="device")
    left.bar(modes, host, bottom=device, width=0.6, label="host", color="0.75")
    left.set_ylabel("bytes a parameter, counted")
    left.legend()
    for name, row in numbers["links"].items():
        alone = row["tokens_as_long"]["8B"]
        tokens = [2.0**i for i in range(9, 21)]
        share = [100 * alone / (alone + count) for count in tokens]
        right.plot(tokens, share, label=f"{name}, {row['card']}")
    right.set_xscale("log", base=2)
    right.set_xlabel("tokens a step on one card")
    right.set_ylabel("% of the step spent on copies, predicted")
    right.legend(fontsize="small")
    return figure


# --- on the rank -----------------------------------------------------------------------------


def _all_modes() -> dict[str, dict[str, Any]]:
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step otherwise
        return {mode: _one_mode(overrides) for mode, overrides in MODES.items()}


def _one_mode(overrides: dict[str, Any]) -> dict[str, Any]:
    run = Run.parse(
        {},
        {
            "model.num_layers": 1,
            "model.d_model": 256,
            "model.d_ff": 256,
            "model.vocab_size": 16,
            "model.num_heads": 4,
            "model.num_kv_heads": 4,
            "data.seq_len": 16,
            "train.global_batch_rows": 4,
            "train.micro_batch_rows": 2,
            "optim.clip_norm": 0.5,
            **overrides,
        },
    )
    engine = Engine(run, mesh=init_distributed(run.layout))
    loss, batch = cross_entropy(run.loss), _batch(run)
    norms, held = [], {}
    for _ in range(NUM_STEPS):
        engine.forward_backward(batch, loss)
        engine.optimizer.state_dict()  # creates what no step has created yet
        held = _bytes_per_parameter(engine)
        norms.append(engine.optim_step().grad_norm)
    weights = [value.double().sum().item() for _, value in engine.iter_state()]
    return {"bytes": held, "norms": norms, "weights": weights}


def _bytes_per_parameter(engine: Engine) -> dict[str, float]:
    optimizer = engine.optimizer
    parameters = [parameter for _, parameter in engine.named_parameters()]
    working = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    device: list[Tensor] = []
    host: list[Tensor] = []
    if isinstance(optimizer, HostOptimizer):
        device += working
        host += [v for k, v in optimizer.state_dict().items() if not k.endswith(".step")]
        host += [tensor for w in optimizer.weights for tensor in (w.master, w.buffer)]
    else:
        (host if engine.run.offload.parameters else device).extend([*working, *_moments(engine)])
    num = sum(local_part(p).numel() for p in parameters)
    return {"device": live_tensor_bytes(device) / num, "host": live_tensor_bytes(host) / num}


def _moments(engine: Engine) -> list[Tensor]:
    """Every tensor behind the moments, the tables of 8-bit ones too."""
    found: list[Tensor] = []
    assert not isinstance(engine.optimizer, HostOptimizer)
    for part in engine.optimizer.parts.values():
        for state in part.state.values():
            for moment in (state["exp_avg"], state["exp_avg_sq"]):
                eight = isinstance(part, AdamW8bit) and hasattr(moment, "codes")
                found += [moment.codes, moment.scale, moment.qmap] if eight else [moment]
    return found


def _batch(run: Run) -> Batch:
    rows, length = run.train.global_batch_rows, run.data.seq_len
    batch = padding(rows, length)
    tokens_BT = torch.arange(rows * length).view(rows, length) % run.model.vocab_size
    batch.tokens_BT.copy_(tokens_BT)
    batch.targets_BT.copy_(tokens_BT.roll(-1, 1))
    batch.weights_BT.fill_(1.0)
    batch.docs_BT.fill_(0)
    batch.positions_BT.copy_(torch.arange(length).expand(rows, -1))
    return batch


# --- the rates of this machine ---------------------------------------------------------------


def _rates_here(num_elements: int) -> dict[str, Any]:
    """The best of several copies each way, and of AdamW's steps on the host."""
    cuda = torch.cuda.is_available()
    there = torch.zeros(num_elements, device="cuda" if cuda else "cpu")
    host = torch.zeros(num_elements, pin_memory=cuda)
    weight = nn.Parameter(torch.zeros(num_elements))
    optimizer = build_optimizer([("a.weight", weight)], OptimConfig())
    weight.grad = torch.ones(num_elements)
    return {
        "device": torch.cuda.get_device_name() if cuda else "the CPU's own memory",
        "threads": torch.get_num_threads(),
        "down_bytes_per_s": 4 * num_elements / _best_s(lambda: host.copy_(there)),
        "up_bytes_per_s": 4 * num_elements / _best_s(lambda: there.copy_(host)),
        "adamw_parameters_per_s": num_elements / _best_s(optimizer.step),
    }


def _best_s(work: Any, tries: int = 5) -> float:
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
