"""Where the models of a method are: the reference, apart from the policy, within it, or on the
host between rollouts; and the bytes that each of them really holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.hardware import live_tensor_bytes
from stepwell.parallel.adapters import quantised_bytes
from stepwell.parallel.init import local_part
from stepwell.parallel.mesh import Mesh
from stepwell.plan.memory.models import ModelBytes
from stepwell.posttrain.ppo.critic import critic_run
from stepwell.posttrain.preference.scored_references import with_adapters
from stepwell.posttrain.reward_model.model import reward_folder
from stepwell.posttrain.rewards.composite import Rewards, reward_terms
from stepwell.sections.methods import GRPO, PPO, OnlineDPO, SampledMethod
from stepwell.sections.model import LoraConfig, ModelConfig
from stepwell.sections.rewards import RewardTerm
from stepwell.train import run_checkpoints
from stepwell.train.engine import Engine
from stepwell.train.weights import initial_weights, read_model
from stepwell.types import ConfigError

Weights = Iterable[tuple[str, Tensor]]


class Parked:
    """A frozen engine whose weights are on the host, and on the device only while they are `used`:
    one model less there while the others train."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._host = {name: _on_host(storage) for name, storage in _storages(engine).items()}
        self._release()

    @contextmanager
    def used(self) -> Iterator[Engine]:
        for name, storage in _storages(self.engine).items():
            storage.resize_(self._host[name].nbytes())
            storage.copy_(self._host[name])
        try:
            yield self.engine
        finally:
            self._release()

    def load_weights(self, weights: Weights) -> None:
        """As `Engine.load_weights`."""
        with self.used() as engine:
            engine.load_weights(weights)
            for name, storage in _storages(engine).items():
                self._host[name].copy_(storage)

    def _release(self) -> None:
        for storage in _storages(self.engine).values():
            storage.resize_(0)

    @property
    def host_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._host.values())


class Reference:
    """The policy's first weights (or later ones: `become`), frozen, wherever they are."""

    def __init__(self, policy: Engine, engine: Engine | None = None, parked: Parked | None = None):
        self.policy, self.engine, self.parked = policy, engine, parked

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """As `Engine.logprobs`. Every rank must call it together."""
        if self.parked is not None:
            with self.parked.used() as engine:
                return engine.logprobs(batch, temperature)
        if self.engine is not None:
            return self.engine.logprobs(batch, temperature)
        return self.policy.reference_logprobs(batch, temperature)

    def become(self, weights: Weights) -> None:
        """Takes these full weights in the place of its own. Every rank must call it together."""
        holder = self.parked or self.engine
        assert holder is not None, "the policy without its adapters has no weights of its own"
        holder.load_weights(weights)

    @contextmanager
    def weights(self) -> Iterator[dict[str, Tensor]]:
        """Its parameters on this rank by their global names."""
        if self.parked is not None:
            with self.parked.used() as engine:
                yield dict(engine.named_parameters())
        else:
            assert self.engine is not None
            yield dict(self.engine.named_parameters())


def open_reference(
    run: Run, policy: Engine, mesh: Mesh, weights: Weights | None = None
) -> Reference:
    """The reference that `method.reference` asks for: `weights`, or those that the run starts from,
    however far the policy has gone on since.

    Raises ConfigError where the policy without its adapters isn't what it started from.
    """
    method = run.method
    assert isinstance(method, GRPO | PPO | OnlineDPO)
    check_reference(run)
    if method.reference == "adapter-off":
        return Reference(policy)
    alone = reference_run(run)
    first = with_adapters(alone, weights or first_weights(alone), mesh)
    engine = Engine(alone, first, mesh, frozen=True)
    if method.reference == "host":
        return Reference(policy, parked=Parked(engine))
    return Reference(policy, engine)


def check_reference(run: Run) -> None:
    """Raises ConfigError for a reference that cannot be had from this run."""
    method, lora = run.method, run.lora
    assert isinstance(method, GRPO | PPO | OnlineDPO)
    if method.reference != "adapter-off":
        return
    if lora.rank == 0 and lora.init is None:
        raise ConfigError(
            "method.reference='adapter-off' is the policy without its adapters, but lora.rank=0; "
            "set lora.rank, or method.reference='separate'"
        )
    if lora.init is not None:
        raise ConfigError(
            f"method.reference='adapter-off' would be the model below the adapter {lora.init!r}, "
            "not what the policy starts from; set method.reference='separate', or name the trained "
            "run as model.init, which merges its adapter"
        )


def reference_warnings(run: Run) -> list[str]:
    host = getattr(run.method, "reference", "") == "host"
    if host and not torch.cuda.is_available():
        return [
            "method.reference='host' saves nothing on a CPU, where models train in the host's "
            "memory; 'separate' is the same without the copying"
        ]
    return []


def reference_run(run: Run) -> Run:
    """The policy's run without what only training needs. Adapters stay where they are part of what
    it starts from (an adapter to go on from, a base in 4 bits); fresh ones change nothing."""
    keeps = run.lora.init is not None or run.lora.quantize != "none"
    return run.model_copy(
        update={
            "model": run.model.model_copy(update={"head": "lm"}),
            "lora": run.lora if keeps else LoraConfig(),
        }
    )


def first_weights(run: Run) -> Weights | None:
    """Of `model.init`, or of the checkpoint that a branch came from."""
    branch = run.checkpoint.branch_from
    if run.model.init is None and branch is not None:
        folder = run_checkpoints.of_run_or_itself(branch, "checkpoint.branch_from")
        return initial_weights(run.model.model_copy(update={"init": str(folder)}), run.train.seed)
    return initial_weights(run.model, run.train.seed)


def gradient_bytes(engine: Engine) -> int:
    """Of the gradients at hand, on this rank."""
    found = (parameter.grad for _, parameter in engine.named_parameters())
    return live_tensor_bytes(grad for grad in found if grad is not None)


def measured(engine: Engine, gradient_bytes: int = 0) -> ModelBytes:
    """What an engine's tensors take on this rank's device. gradient_bytes: of those that its last
    step has cleared."""
    own = [parameter for _, parameter in engine.named_parameters()]
    trained = [p for p in own if p.requires_grad]
    moments: list[Any] = []
    if not engine.frozen:
        state = engine.optimizer.state_dict()
        moments = [moment for name, moment in state.items() if not name.endswith(".step")]
    frozen = live_tensor_bytes(p for p in own if not p.requires_grad)
    in_4_bits, _ = quantised_bytes(engine.pieces)
    return ModelBytes(
        parameters=frozen + in_4_bits,
        gradients=gradient_bytes,
        master=live_tensor_bytes(trained),
        moments=live_tensor_bytes(moments),
    )


def measured_rewards(rewards: Rewards) -> dict[str, ModelBytes]:
    """Of the reward models, by the names that `other_models` gives them."""
    found = {}
    for dimension in rewards.dimensions:
        engines = dimension.scorer.engines
        for name, engine in zip(_names(dimension.term, len(engines)), engines, strict=True):
            found[name] = measured(engine)
    return found


def other_models(run: Run) -> tuple[ModelConfig | None, dict[str, ModelConfig]]:
    """The dimensions of a critic that does not start from the policy, and of the reward models by
    name. Raises CheckpointError for a folder that holds no model."""
    method, critic, rewards = run.method, None, {}
    if not isinstance(method, SampledMethod):
        return None, {}
    if isinstance(method, PPO) and method.critic_init is not None:
        alone = critic_run(run)
        critic = None if alone is None else alone.model
    for term in reward_terms(method):
        kind, _, folders = term.source.partition(":")
        if kind == "model":
            paths = folders.split(",")
            for name, path in zip(_names(term, len(paths)), paths, strict=True):
                rewards[name] = read_model(str(reward_folder(path)))
    return critic, rewards


def _names(term: RewardTerm, count: int) -> list[str]:
    return [f"reward {term.name}" + (f" {i + 1}" if count > 1 else "") for i in range(count)]


def measured_reference(reference: Reference) -> ModelBytes:
    """Between rollouts."""
    if reference.engine is not None:
        return measured(reference.engine)
    if reference.parked is not None:
        held = measured(reference.parked.engine)
        return ModelBytes(parameters=held.parameters, host=reference.parked.host_bytes)
    return ModelBytes()


def _storages(engine: Engine) -> dict[str, Any]:
    """The storages behind the parameters of this rank, each once; DTensors' local ones."""
    found: dict[int, tuple[str, Any]] = {}
    for name, parameter in engine.named_parameters():
        storage = local_part(parameter).untyped_storage()
        found.setdefault(storage._cdata, (name, storage))
    return dict(found.values())


def _on_host(storage: Any) -> Any:
    copy = torch.UntypedStorage(storage.nbytes())
    copy.copy_(storage)
    return copy.pin_memory() if storage.device.type == "cuda" else copy
