"""A step of the real program on ranks that are not there: the model, the engine and the optimiser
as they are, under fake tensors and a fake process group (`plan/dryrun/fakes`), watched from below
(`plan/dryrun/watch`).

What is counted is what the program itself holds and sends: parameters, gradients, optimiser state,
activations and every collective. What only a device has is not: its allocator's fragmentation, its
context, NCCL's buffers, the workspace of kernels.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.hardware import GIB
from stepwell.parallel.adapters import quantised_bytes
from stepwell.parallel.init import local_part
from stepwell.parallel.mesh import Mesh
from stepwell.parallel.rules import axis_sizes
from stepwell.parallel.schedules import next_micro_batches, num_stages, rank_of_stage
from stepwell.plan.comms.step import Sent
from stepwell.plan.dryrun.fakes import Answers, fake_device, fake_ranks
from stepwell.plan.dryrun.watch import Issued, Watch, watching
from stepwell.plan.memory.ledger import MemoryLedger
from stepwell.train.engine import Engine
from stepwell.train.host_optim import HostOptimizer
from stepwell.train.losses import Loss, LossSums, cross_entropy, masked_sum, token_count
from stepwell.types import ConfigError

FEW_BYTES = 256  # of messages that are left out where traffic is compared
ON_HOST = "on the host, "  # before what is offloaded, in the name of an item
ON_THEIR_WAY = (
    "with offload.activations the ledger has the tensors that are on their way between host and "
    "device (also in its peak), and a dry run, which copies at once, has none"
)
PASSED_ON = ("send", "recv", "all-to-all")  # what context ranks do, and those that shard do not


class Beside(NamedTuple):
    """A model that is there beside the one that is trained first: frozen (no loss), or trained
    after it with `loss`. whole: every rank has all of it."""

    run: Run
    loss: Loss | None = None
    whole: bool = False


class Held(NamedTuple):
    """Bytes of a model that is there beside another one."""

    parameters: int
    gradients: int = 0
    optimizer: int = 0


@dataclass(frozen=True)
class Counted:
    """One rank's step. parameters, gradients (when the step begins), optimizer: bytes of state on
    the device. host: on the host, by what is offloaded; of activations the most that waits there.
    gathered, activations: when the first backward pass begins, weights that FSDP2 has handed out
    and all else that is held by then. peaks: the most that is held in each phase, state included.
    issued: collectives; `group` is the axis. beside: of other models that are there, by name."""

    rank: int
    pp_rank: int
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    peaks: dict[str, int]
    issued: list[Issued] = field(default_factory=list)
    wall_s: float = 0.0
    beside: dict[str, Held] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks.values())

    @property
    def not_compared(self) -> dict[str, str]:
        """Items of which what is counted is not what is predicted, and why."""
        return {"activations": ON_THEIR_WAY} if "activations" in self.host else {}


@dataclass(frozen=True)
class DryRun:
    """ranks: one of each kind of pipeline rank, those with the same stages being alike."""

    world: int
    num_micro_batches: int
    ranks: list[Counted]

    @property
    def busiest(self) -> Counted:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    def against(
        self, ledgers: Mapping[int, MemoryLedger], sent: Mapping[int, Sequence[Sent]]
    ) -> list[Difference]:
        """What was predicted of each rank of the pipeline (`predict_rank`, for an accelerator;
        `collectives`), beside what was counted."""
        rows = []
        for rank in self.ranks:
            if rank.pp_rank in ledgers:
                alone = self.world == 1 and not rank.gathered
                rows += _of_memory(rank, ledgers[rank.pp_rank], alone)
            if rank.pp_rank in sent:
                rows += _of_traffic(rank, sent[rank.pp_rank])
        return rows

    def lines(self) -> list[str]:
        """For people: memory of each rank, then what the busiest sends, by axis and kind."""
        names = ("parameters", "gradients", "optimizer", "gathered", "activations", "peak")
        rows = [
            f"dry run on {self.world} ranks, {self.num_micro_batches} micro-batches; GiB a rank",
            f"{'pipeline rank':<14}" + "".join(f"{name:>13}" for name in names),
        ]
        for rank in self.ranks:
            sizes = (*(getattr(rank, name) for name in names[:-1]), rank.peak_bytes)
            rows.append(f"{rank.pp_rank:<14}" + "".join(f"{n / GIB:>13.3f}" for n in sizes))
        rows.append(f"{'axis':<14}{'collective':<16}{'ranks':>7}{'calls':>9}{'GiB sent':>12}")
        for (axis, kind, num_ranks), (calls, wire) in _sums(self.busiest.issued).items():
            rows.append(f"{axis:<14}{kind:<16}{num_ranks:>7}{calls:>9}{wire / GIB:>12.3f}")
        return rows

    def as_json(self) -> dict[str, Any]:
        ranks = [
            {
                **{k: v for k, v in asdict(rank).items() if k != "issued"},
                "peak_bytes": rank.peak_bytes,
                "not_compared": rank.not_compared,
                "collectives": [
                    {"axis": x.group, **{k: v for k, v in x._asdict().items() if k != "group"}}
                    for x in rank.issued
                ],
            }
            for rank in self.ranks
        ]
        return {
            "world": self.world,
            "num_micro_batches": self.num_micro_batches,
            "ranks": ranks,
        }


class Difference(NamedTuple):
    """Bytes of one item of a rank, as predicted and as counted."""

    pp_rank: int
    item: str
    predicted: float
    counted: float

    @property
    def relative(self) -> float:
        """predicted / counted - 1; infinite where only one of them is nothing."""
        if self.counted:
            return self.predicted / self.counted - 1
        return 0.0 if not self.predicted else math.inf


def _of_memory(rank: Counted, ledger: MemoryLedger, alone: bool) -> list[Difference]:
    forward, optimizer = ledger.phases["forward"], ledger.phases["optimizer"]
    casts = forward.working_copies if alone else 0  # nothing is gathered: autograd keeps them
    pairs = {
        "parameters": (optimizer.parameters, rank.parameters),
        "gradients": (ledger.gradient_bytes, rank.gradients),
        "optimizer": (optimizer.optimizer, rank.optimizer),
        "activations": (forward.activations + forward.logits + casts, rank.activations),
        "peak": (ledger.peak_bytes, rank.peak_bytes),
    }
    for item in rank.not_compared:
        del pairs[item]
    for key, counted in rank.host.items():
        pairs[f"{ON_HOST}{key}"] = (ledger.host.get(key, 0), counted)
    return [Difference(rank.pp_rank, item, *pair) for item, pair in pairs.items()]


def _of_traffic(rank: Counted, sent: Sequence[Sent]) -> list[Difference]:
    """By axis, kind and phase, as bytes on the wire. Messages of a few bytes, by which the program
    agrees on shapes, counts and norms, are left out."""
    predicted = _on_wire((one.axis, one) for one in sent)
    counted = _on_wire((one.group, one) for one in rank.issued)
    names = sorted(predicted.keys() | counted.keys())
    rows = [Difference(rank.pp_rank, name, predicted[name], counted[name]) for name in names]
    return [row for row in rows if row.predicted or row.counted]


def _on_wire(found: Iterable[tuple[str, Sent | Issued]]) -> defaultdict[str, float]:
    table: defaultdict[str, float] = defaultdict(float)
    for axis, one in found:
        if one.num_bytes > FEW_BYTES:
            table[f"{axis} {one.kind}, {one.phase}"] += one.calls * one.wire_bytes
    return table


def _sums(issued: Iterable[Issued]) -> dict[tuple[str, str, int], tuple[int, float]]:
    table: dict[tuple[str, str, int], tuple[int, float]] = {}
    for one in issued:
        key = (one.group, one.kind, one.num_ranks)
        calls, wire = table.get(key, (0, 0.0))
        table[key] = (calls + one.calls, wire + one.calls * one.wire_bytes)
    return table


def dry_run(
    run: Run,
    world: int,
    pp_ranks: Sequence[int] | None = None,
    loss: Loss | None = None,
    gpus_per_node: int = 8,
    num_micro_batches: int | None = None,
    rows: Callable[[Run, int], Batch] | None = None,
    beside: Mapping[str, Beside] | None = None,
) -> DryRun:
    """One step of `run` on `world` ranks, with full rows and a loss on every token.

    pp_ranks: which ranks of the pipeline (by default one of each kind). loss: by default the next
    token's cross-entropy. num_micro_batches: instead of the run's own. rows: what so many rows are,
    by default `full_rows`. beside: other models that are there. layout.compile,
    layout.deterministic and the adapters that lora.init names are left out.

    Raises ConfigError for an impossible layout and for optim.kind="adamw8bit", and TrainingError
    among real ranks.
    """
    axes = axis_sizes(run.layout, world)
    if run.optim.kind == "adamw8bit":
        raise ConfigError(
            "optim.kind='adamw8bit' steps in compiled code, which a dry run cannot look into; the "
            "nearest that it can is 'adamw', and plan.memory's ledger knows both"
        )
    run = plain_run(run)
    chosen = distinct_ranks(run) if pp_ranks is None else list(pp_ranks)
    for pp_rank in chosen:
        if not 0 <= pp_rank < axes.pp:
            raise ConfigError(
                f"pp_ranks has {pp_rank}, which is not among the {axes.pp} ranks of the pipeline; "
                f"the nearest is {min(max(pp_rank, 0), axes.pp - 1)}"
            )
    wanted = num_micro_batches or -(-rows_of_rank(run, axes) // run.train.micro_batch_rows)
    m = next_micro_batches(wanted, run.layout) if axes.pp > 1 else wanted
    loss = loss or stand_in(run)
    answers, found = Answers(), []
    # The rank with the outputs first: it tells the others of them.
    has_last = rank_of_stage(num_stages(run.layout) - 1, run.layout)
    for pp_rank in sorted(chosen, key=lambda rank: rank != has_last):
        rank = pp_rank * (world // axes.pp)
        answers.listen()
        place = fake_ranks(run.layout, world, rank, gpus_per_node, run.offload.parameters)
        with place as mesh, fake_device(answers):
            batch = (rows or full_rows)(run, m * run.train.micro_batch_rows)
            others = {n: one._replace(run=plain_run(one.run)) for n, one in (beside or {}).items()}
            found.append(count_step(run, mesh, batch, loss, others))
    return DryRun(world, m, sorted(found, key=lambda rank: rank.pp_rank))


def plain_run(run: Run) -> Run:
    layout = run.layout.model_copy(update={"compile": False, "deterministic": False})
    lora = run.lora.model_copy(update={"init": None})
    return run.model_copy(update={"layout": layout, "lora": lora})


def rows_of_rank(run: Run, axes: Any) -> int:
    return -(-run.train.global_batch_rows // (axes.dp_replicate * axes.dp_shard))


def distinct_ranks(run: Run) -> list[int]:
    """Of pipeline ranks that hold alike stages and wait alike, the first; always the last rank."""
    layout = run.layout
    return list(range(layout.pp)) if layout.pp <= 2 else [0, 1, layout.pp - 1]


def full_rows(run: Run, num_rows: int) -> Batch:
    """Rows of one document each, every token with a loss."""
    T = run.data.seq_len
    tokens_BT = torch.zeros(num_rows, T, dtype=torch.int64)
    return Batch(
        tokens_BT=tokens_BT,
        targets_BT=tokens_BT,
        weights_BT=torch.ones(num_rows, T),
        positions_BT=torch.arange(T).repeat(num_rows, 1),
        docs_BT=torch.zeros(num_rows, T, dtype=torch.int32),
        sample_ids=tuple(range(num_rows)),
    )


def stand_in(run: Run) -> Loss:
    """The run's cross-entropy; of a model without a head for words, the sum of its scores."""
    if run.model.has_lm_head:
        return cross_entropy(run.loss)

    def fn(outputs: Any, batch: Batch) -> LossSums:
        return LossSums({"tokens": masked_sum(outputs.scores_BTC[..., 0], batch.weights_BT)}, {})

    return Loss(frozenset({"scores"}), token_count, fn)


def count_step(
    run: Run, mesh: Mesh, batch: Batch, loss: Loss, beside: Mapping[str, Beside] | None = None
) -> Counted:
    """A whole step of this rank, counted: the same on real ranks and on fake ones. Models beside it
    that are trained take their step after it."""
    began = time.perf_counter()
    others, engine = beside or {}, Engine(run, mesh=mesh)
    engines = {name: engine_beside(one, mesh) for name, one in others.items()}
    parameters, state = parameters_of(engine), state_of(engine)
    watch = Watch(lambda: gathered_weights(engine))
    for one in (engine, *engines.values()):
        watch.put_on_host(on_host(one))
        watch.hold([*parameters_of(one), *state_of(one)])
    resting = watch.live
    gradients: dict[str, int] = {}
    with watching(watch):
        gradient_bytes = _step(engine, batch, loss, watch)
        for name, one in engines.items():
            own = others[name].loss
            gradients[name] = 0 if own is None else _step(one, batch, own, watch)
    moment = watch.after_forward
    assert moment is not None, "no backward pass began"
    four_bits = {name: quantised_bytes(one.pieces)[0] for name, one in engines.items()}
    own_bits, _ = quantised_bytes(engine.pieces)
    all_bits = own_bits + sum(four_bits.values())
    held = {
        name: Held(
            bytes_of(parameters_of(one)) + four_bits[name], gradients[name], bytes_of(state_of(one))
        )
        for name, one in engines.items()
    }
    away = run.offload.parameters
    return Counted(
        rank=mesh.rank,
        pp_rank=mesh.place.pp,
        parameters=own_bits + (0 if away else bytes_of(parameters)),
        gradients=0 if away else gradient_bytes,
        optimizer=0 if away or run.offload.optimizer else bytes_of(state),
        gathered=moment.gathered,
        activations=moment.live - moment.gathered - resting,
        peaks={phase: peak + all_bits for phase, peak in watch.peaks.items()},
        issued=by_axis(watch.issued, mesh),
        wall_s=time.perf_counter() - began,
        beside=held,
        host=_host_bytes(engine, gradient_bytes),
    )


def on_host(engine: Engine) -> list[Tensor]:
    """What the program keeps on the host, which is the device's neighbour under another name."""
    if engine.run.offload.parameters:
        return [*parameters_of(engine), *state_of(engine)]
    if not engine.frozen and isinstance(engine.optimizer, HostOptimizer):
        held = [x for one in engine.optimizer.weights for x in (one.master, one.buffer)]
        return [*held, *state_of(engine)]
    return []


def _host_bytes(engine: Engine, gradient_bytes: int) -> dict[str, int]:
    offload, found = engine.run.offload, {}
    if offload.optimizer:
        found["optimizer"] = bytes_of(on_host(engine))
    if offload.parameters:
        found["parameters"] = bytes_of(on_host(engine)) + gradient_bytes
    if engine.activation_offload is not None:
        found["activations"] = engine.activation_offload.peak_host_bytes
    return found


def engine_beside(one: Beside, mesh: Mesh) -> Engine:
    alone = Mesh(1, 0, 0, mesh.device)
    return Engine(one.run, mesh=alone if one.whole else mesh, frozen=one.loss is None)


def _step(engine: Engine, batch: Batch, loss: Loss, watch: Watch) -> int:
    """The bytes of its gradients."""
    watch.stepping = False
    engine.forward_backward(batch, loss)
    found = bytes_of(p.grad for p in parameters_of(engine) if p.grad is not None)
    watch.stepping = True
    engine.optim_step()
    return found


def parameters_of(engine: Engine) -> list[Tensor]:
    return [p for piece in engine.pieces for p in piece.parameters()]


def state_of(engine: Engine) -> list[Tensor]:
    if engine.frozen:
        return []
    return [x for x in engine.optimizer.state_dict().values() if x.dim()]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of the storages behind them on this rank, each counted once."""
    storages = {}
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def gathered_weights(engine: Engine) -> Iterator[Tensor]:
    """What FSDP2 hands out, whether it is there now or not."""
    for module in (module for piece in engine.pieces for module in piece.modules()):
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group is not None else ():
                yield from getattr(parameter, "all_gather_outputs", ())


def by_axis(issued: Iterable[Issued], mesh: Mesh) -> list[Issued]:
    """With the axis in place of the group's name, as in `comms`; an axis that has all ranks shares
    the world's group, and gives it its name. Neighbours among whom weights are kept are of
    dp_shard. What a pipeline's passes send is of phase "pipeline", whichever pass it is of."""
    names, context = {"": "world"}, ""
    if torch.distributed.group.WORLD is not None:
        names[torch.distributed.group.WORLD.group_name] = "world"
    if mesh.cp_group is not None:
        context = mesh.cp_group.group_name
        names[context] = "cp"
    if mesh.device_mesh is not None:
        for axis in mesh.device_mesh.mesh_dim_names or ():
            group = mesh.device_mesh.get_group(axis)
            names[group.group_name] = "dp_shard" if axis == "fsdp" else axis
    calls: dict[Issued, int] = defaultdict(int)
    for one in issued:
        axis = names.get(one.group, "dp_shard")
        if one.group == context and one.kind in PASSED_ON:  # where weights have the same group
            axis = "cp"
        phase = "pipeline" if axis == "pp" and one.phase != "optimizer" else one.phase
        calls[one._replace(group=axis, phase=phase, calls=0)] += one.calls
    return [one._replace(calls=number) for one, number in calls.items()]
