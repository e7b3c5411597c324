"""What each of a method's models holds in memory: policy, critic, reference, reward models. No
torch.

With bf16 arithmetic on float32 masters a trained parameter takes 16 bytes (gradient 4, master 4,
two moments 8), a frozen one 2; four equal models in PPO 36 (`memory.method_bytes_per_parameter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod

from stepwell.config import Run
from stepwell.models.flops import parameter_shapes
from stepwell.models.lora_shapes import adapter_shapes, is_trained, target_shapes
from stepwell.parallel.remat import DTYPE_BYTES
from stepwell.parallel.rules import AxisSizes, axis_sizes
from stepwell.plan.memory.ledger import nf4_bytes_per_parameter
from stepwell.plan.memory.shards import Held, held, held_by_block, held_by_root, parts_of_rank
from stepwell.sections.methods import DPO, GRPO, PPO, OnlineDPO
from stepwell.sections.model import LoraConfig, ModelConfig


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of one model on one rank. parameters: frozen weights, in the precision that they are
    computed in. gradients: all of a step, together. master: trained weights. moments: the
    optimiser's. host: what of it is kept off the device between rollouts."""

    parameters: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        return self.parameters + self.gradients + self.master + self.moments

    def named(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def predict_models(
    run: Run,
    world: int = 1,
    critic: ModelConfig | None = None,
    rewards: Mapping[str, ModelConfig] | None = None,
) -> dict[str, ModelBytes]:
    """By name, each model of the run on the pipeline rank where they take the most.

    critic: the dimensions of one that does not start from the policy. rewards: those of the reward
    models, which every rank holds whole. A model that takes nothing of its own (the policy with its
    adapters off) is there with zeros.
    """
    axes = axis_sizes(run.layout, world)
    found = {"policy": _trained(run, axes)}
    if (own := critic_of(run, critic)) is not None:
        found["critic"] = _trained(own, axes)
    if (place := reference_place(run)) is not None:
        model = run.model.model_copy(update={"head": "lm"})
        frozen = _frozen(run.model_copy(update={"model": model, "lora": LoraConfig()}), axes)
        found["reference"] = {
            "separate": ModelBytes(parameters=frozen),
            "host": ModelBytes(host=frozen),
        }.get(place, ModelBytes())
    for name, model in (rewards or {}).items():
        elements = sum(prod(shape) for shape in parameter_shapes(model).values())
        found[name] = ModelBytes(elements * DTYPE_BYTES[run.precision.compute])
    return found


def critic_of(run: Run, critic: ModelConfig | None = None) -> Run | None:
    """The run of a critic that is a model of its own. critic: as in `predict_models`."""
    if not isinstance(run.method, PPO) or run.method.critic != "separate":
        return None
    model = critic or run.model.model_copy(update={"head": "score", "num_labels": 1})
    return run.model_copy(update={"model": model})


def reference_place(run: Run) -> str | None:
    """`method.reference` where the method scores by a reference in its steps, else None."""
    method = run.method
    if isinstance(method, GRPO | PPO):
        return method.reference if method.kl_coef else None
    if isinstance(method, DPO | OnlineDPO):
        return method.reference if method.loss.needs_reference else None
    return None


def _trained(run: Run, axes: AxisSizes) -> ModelBytes:
    p = DTYPE_BYTES[run.precision.param]
    away, released = run.offload, run.optim.release_gradients
    sizes = [_parts(run, axes, rank) for rank in range(axes.pp)]
    trained, frozen = max(sizes, key=lambda s: s[0].shard * p + s[0].optimizer_bytes + s[1])
    if away.parameters:
        return ModelBytes(host=frozen + 2 * p * trained.shard + trained.optimizer_bytes)
    return ModelBytes(
        parameters=frozen,
        gradients=0 if released else p * trained.shard,
        master=p * trained.shard,
        moments=0 if away.optimizer else trained.optimizer_bytes,
    )


def _frozen(run: Run, axes: AxisSizes) -> int:
    a = DTYPE_BYTES[run.precision.compute]
    return a * max(_whole_model(run, axes, rank).shard for rank in range(axes.pp))


def _parts(run: Run, axes: AxisSizes, pp_rank: int) -> tuple[Held, int]:
    """What a pipeline rank trains, and the bytes of what it doesn't."""
    whole, lora = _whole_model(run, axes, pp_rank), run.lora
    if lora.rank == 0:
        return whole, 0
    parts = parts_of_rank(run, pp_rank)
    blocks, last = [i for part in parts for i in part.blocks], any(part.last for part in parts)

    def mine(shapes: Mapping[str, tuple[int, ...]]) -> Held:
        there = {n: s for n, s in shapes.items() if int(n.split(".")[1]) in blocks}
        return held(run, axes, there)

    shapes = parameter_shapes(run.model)
    head = held(run, axes, {n: s for n, s in shapes.items() if last and is_trained(n, lora)})
    trained = head.plus(mine(adapter_shapes(run.model, lora)))
    frozen = (whole.shard - head.shard) * DTYPE_BYTES[run.precision.compute]
    if lora.quantize == "nf4":  # not sharded
        targets = mine({f"{n}.weight": s for n, s in target_shapes(run.model, lora).items()})
        frozen -= targets.shard * DTYPE_BYTES[run.precision.compute]
        per_weight = nf4_bytes_per_parameter(double_quantised=lora.double_quantize)
        frozen += round(targets.whole * per_weight)
    return trained, frozen


def _whole_model(run: Run, axes: AxisSizes, pp_rank: int) -> Held:
    parts = parts_of_rank(run, pp_rank)
    blocks = sum(len(part.blocks) for part in parts)
    return held_by_root(run, axes, parts).plus(held_by_block(run, axes), blocks)
