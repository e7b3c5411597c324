"""Pipeline parallelism by torch.distributed.pipelining: its stages and schedules around the pieces
of a decoder (GPipe, 1811.06965, and the others that parallel/schedules.py names).

Every rank of a pipeline has all micro-batches of its data share, so stages pass on activations
alone: x_ND, N tokens of a micro-batch on this rank, D d_model. Where the embedding is also the
head, the first stage owns it: the last stage's copy gives its gradient to the owner before the
step and takes the weights over after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from stepwell.config import Run
from stepwell.models.transformer import Decoder, Piece
from stepwell.parallel.adapters import named_tensors
from stepwell.parallel.fsdp import DTYPES
from stepwell.parallel.init import global_name, local_part
from stepwell.parallel.mesh import Mesh, all_gather_objects
from stepwell.parallel.schedules import (
    ZERO_BUBBLE,
    next_micro_batches,
    num_stages,
    rank_of_stage,
    split_blocks,
    stages_of_rank,
)
from stepwell.sections.layout import LayoutConfig
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError, TrainingError

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
EMBEDDING = "embed.weight"

# (piece, x_ND or None for the first one, number of the micro-batch) -> x_ND, or for the last piece
# the scalar that is minimised (anything in a pass without gradients).
Forward = Callable[[Decoder, Tensor | None, int], Any]


def pieces_of(model: ModelConfig, layout: LayoutConfig, pp_rank: int) -> list[Piece]:
    """What a pipeline rank holds of the model, in the model's order."""
    blocks, last = split_blocks(model.num_layers, layout), num_stages(layout) - 1
    return [
        Piece(blocks[s].start, blocks[s].stop, first=s == 0, last=s == last)
        for s in stages_of_rank(pp_rank, layout)
    ]


def check_halves(layout: LayoutConfig) -> None:
    """Raises ConfigError for a zero-bubble schedule on a torch (2.11) whose second half of the
    backward pass cannot pass autograd functions written in Python, such as norms and the loss."""
    if layout.pp == 1 or layout.pp_schedule not in ZERO_BUBBLE:
        return
    node = _Same.apply(torch.zeros(1, requires_grad=True)).grad_fn
    try:
        node._input_metadata  # noqa: B018 - what torch's second half asks of every node
    except RuntimeError:
        raise ConfigError(
            f"layout.pp_schedule={layout.pp_schedule!r} needs a newer torch than "
            f"{torch.__version__} (2.13 will do); the nearest that works here is "
            "'interleaved-1f1b'"
        ) from None


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def is_copy(piece: Piece, name: str) -> bool:
    """Whether a piece's parameter is a copy of one that the first piece owns."""
    return name == EMBEDDING and not piece.first


def full_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Name -> shape of every parameter of the whole model, in its order."""
    with torch.device("meta"):
        return {name: p.shape for name, p in Decoder(model).named_parameters()}


class Pipeline:
    """The pieces of this rank, as stages. Every rank of a pipeline must call each method together,
    with the same numbers."""

    def __init__(self, pieces: Sequence[Decoder], mesh: Mesh, run: Run):
        assert mesh.pp_group is not None
        self.pieces = list(pieces)
        self.layout = run.layout
        self.mesh, self.group = mesh, mesh.pp_group
        self.dtype, self.d_model = DTYPES[run.precision.compute], run.model.d_model
        self.stages = stages_of_rank(mesh.place.pp, run.layout)
        self.last_rank = rank_of_stage(num_stages(run.layout) - 1, run.layout)
        self.tied = run.model.shares_embedding
        self.trains_embedding = run.lora.rank == 0
        self.checked = False
        self._built: dict[bool, tuple[tuple[int, int], list[Any], list[_Stage]]] = {}

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the outputs."""
        return self.last_rank == self.mesh.place.pp

    @property
    def receive_bytes(self) -> int:
        """What is received or being received now, and not used up yet."""
        stages = (stage for _, _, built in self._built.values() for stage in built)
        return sum(info.buffer.nbytes for stage in stages for info in stage.buffers)

    def micro_batches(self, wanted: int) -> int:
        """How many micro-batches a pass must have that needs `wanted`."""
        return next_micro_batches(wanted, self.layout)

    def forward_backward(self, num_micro_batches: int, num_tokens: int, forward: Forward) -> None:
        """Adds the gradient of the sum of all micro-batches' objectives; num_tokens: N.

        Raises TrainingError on every rank if the numbers differ between ranks, and if after the
        first pass a parameter has no gradient.
        """
        self._run(num_micro_batches, num_tokens, forward, backward=True)
        self._collect_tied_gradient()
        if not self.checked:
            self._check_gradients()
            self.checked = True

    @torch.no_grad()
    def forward(self, num_micro_batches: int, num_tokens: int, forward: Forward) -> None:
        """One pass without gradients; results are what `forward` keeps of the last piece."""
        self._run(num_micro_batches, num_tokens, forward, backward=False)

    @torch.no_grad()
    def share_tied_weights(self) -> None:
        """Gives the copy of a tied embedding the owner's values: after a step, or a load."""
        if not self.tied:
            return
        owner, copy = self._tied()
        if owner is not None and copy is not None:
            copy.copy_(owner)
        elif owner is not None:
            self._send(local_part(owner), self.last_rank)
        elif copy is not None:
            local_part(copy).copy_(self._receive(local_part(copy), 0))

    @torch.no_grad()
    def iter_full(self, shapes: dict[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model's state in its order, whole, on every rank, one at a time."""
        owners, mine = self._owners(), self._named_tensors()
        for name, shape in shapes.items():
            owner, dtype = owners[name]
            if owner == self.mesh.place.pp:
                tensor = mine[name]()
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                full = full.detach().to(self.mesh.device).contiguous()
            else:
                full = torch.empty(shape, dtype=dtype, device=self.mesh.device)
            dist.broadcast(full, self._global(owner), self.group)
            yield name, full

    def _named_tensors(self) -> dict[str, Callable[[], Tensor]]:
        """Name -> how this rank gets the tensor, without copies."""
        return {
            global_name(name): tensor
            for piece in self.pieces
            for name, tensor in named_tensors(piece)
            if not is_copy(piece.piece, global_name(name))
        }

    def named_parameters(self) -> Iterator[tuple[Decoder, str, nn.Parameter]]:
        """(piece, global name, parameter), without copies."""
        for piece in self.pieces:
            for name, parameter in piece.named_parameters():
                if not is_copy(piece.piece, global_name(name)):
                    yield piece, global_name(name), parameter

    def from_last(self, value: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The value of the rank with the last piece, on all ranks of the pipeline."""
        if value is None:
            value = torch.empty(tuple(shape), dtype=dtype, device=self.mesh.device)
        value = value.to(self.mesh.device).contiguous()
        dist.broadcast(value, self._global(self.last_rank), self.group)
        return value

    def object_from_last(self, value: Any) -> Any:
        """As `from_last`, for any value of our own making."""
        box = [value]
        source = self._global(self.last_rank)
        dist.broadcast_object_list(box, source, self.group, self.mesh.device)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks of the pipeline."""
        values: list[Any] = [None] * self.layout.pp
        dist.all_gather_object(values, value, self.group)
        return values

    # --- inside ------------------------------------------------------------------------------

    def _run(
        self, num_micro_batches: int, num_tokens: int, forward: Forward, backward: bool
    ) -> None:
        key = (num_micro_batches, num_tokens)
        self._agree(key)
        if backward not in self._built or self._built[backward][0] != key:
            self._built[backward] = (key, *self._build(*key, backward))
        _, schedules, stages = self._built[backward]
        for stage in stages:
            stage.compute = forward
        try:
            for schedule in schedules:
                schedule.step(target=torch.zeros(num_micro_batches), return_outputs=False)
        finally:
            for stage in stages:
                stage.compute = None
                stage.kept.clear()
                stage.clear_runtime_states()

    def _agree(self, key: tuple[int, int]) -> None:
        """Raises TrainingError, on all ranks, where messages would not fit each other.

        Beyond that, NCCL wants all ranks in a group's first operation, and torch's first message
        between some of them may be one.
        """
        m, N = key
        ends = torch.tensor([m, N, -m, -N], device=self.mesh.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX, self.group)
        most_m, most_N, least_m, least_N = ends.abs().tolist()
        if (most_m, most_N) != (least_m, least_N):
            raise TrainingError(
                f"a pipeline's ranks need the same rows: this one has {m} micro-batches of {N} "
                f"tokens, the others from {least_m} to {most_m} of {least_N} to {most_N}"
            )

    def _build(
        self, num_micro_batches: int, num_tokens: int, backward: bool
    ) -> tuple[list[Any], list[_Stage]]:
        """Torch's schedules, to be run one after another, and the stages in them."""
        layout = self.layout
        if layout.pp_schedule in ZERO_BUBBLE and not backward:
            return self._build_down_and_up(num_micro_batches, num_tokens)
        stages = [
            self._stage(piece, index, num_stages(layout), num_tokens, backward)
            for piece, index in zip(self.pieces, self.stages, strict=True)
        ]
        schedule = SCHEDULES[layout.pp_schedule](
            stages if layout.pp_stages_per_rank > 1 else stages[0],
            num_micro_batches,
            loss_fn=_as_it_is if backward else None,
            scale_grads=False,
        )
        return [schedule], stages

    def _build_down_and_up(
        self, num_micro_batches: int, num_tokens: int
    ) -> tuple[list[Any], list[_Stage]]:
        """Torch's V-shaped schedules can't leave the backward pass out: a pipeline for each leg."""
        p, rank = self.layout.pp, self.mesh.place.pp
        down, up = (
            self._stage(piece, index, p, num_tokens, False)
            for piece, index in zip(self.pieces, (rank, p - 1 - rank), strict=True)
        )
        up.stage_index_to_group_rank = {i: p - 1 - i for i in range(p)}
        up.before = down
        return [ScheduleGPipe(leg, num_micro_batches) for leg in (down, up)], [down, up]

    def _stage(
        self, piece: Decoder, index: int, number: int, num_tokens: int, backward: bool
    ) -> _Stage:
        def activation() -> Tensor:
            shape = (num_tokens, self.d_model)
            return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=backward)

        return _Stage(
            piece,
            index,
            number,
            self.mesh.device,
            input_args=() if index == 0 else (activation(),),
            output_args=(_objective("meta") if index == number - 1 else activation(),),
            group=self.group,
            received=activation(),
        )

    def _collect_tied_gradient(self) -> None:
        """Adds the copy's gradient to the owner's."""
        if not (self.tied and self.trains_embedding):
            return
        owner, copy = self._tied()
        if owner is not None and copy is not None:
            _gradient(owner).add_(_gradient(copy))
        elif owner is not None:
            _gradient(owner).add_(self._receive(_gradient(owner), self.last_rank))
        elif copy is not None:
            self._send(_gradient(copy), 0)
        if copy is not None:
            copy.grad = None

    def _send(self, value: Tensor, pp_rank: int) -> None:
        dist.send(value.to(self.mesh.device).contiguous(), self._global(pp_rank), self.group)

    def _receive(self, like: Tensor, pp_rank: int) -> Tensor:
        """On the device of `like`, which offload may have put on the host."""
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self.mesh.device)
        dist.recv(buffer, self._global(pp_rank), self.group)
        return buffer.to(like.device)

    def _tied(self) -> tuple[Tensor | None, Tensor | None]:
        """The owner of the tied embedding and its copy, where this rank has them."""
        by_end = {
            piece.piece.first: piece.embed.weight
            for piece in self.pieces
            if piece.embed is not None
        }
        return by_end.get(True), by_end.get(False)

    def _check_gradients(self) -> None:
        missing = [
            name for _, name, p in self.named_parameters() if p.requires_grad and p.grad is None
        ]
        found = sorted({name for names in all_gather_objects(missing, self.mesh) for name in names})
        if found:
            raise TrainingError(
                f"{len(found)} parameters got no gradient from the first backward pass under "
                f"layout.pp_schedule={self.layout.pp_schedule!r}: {', '.join(found[:5])}"
            )

    def _owners(self) -> dict[str, tuple[int, torch.dtype]]:
        """Name -> pipeline rank of its owner, and what it is there."""
        mine = {name: tensor().dtype for name, tensor in self._named_tensors().items()}
        ranks = enumerate(self.gather(mine))
        return {name: (rank, dtype) for rank, found in ranks for name, dtype in found.items()}

    def _global(self, pp_rank: int) -> int:
        return dist.get_global_rank(self.group, pp_rank)


class _Stage(PipelineStage):
    """A stage that computes by a given function, which is told the micro-batch's number.

    Torch has a buffer for each micro-batch's activations and gradients; these have one only from
    the time it is to be received until the backward pass has used it. before: the stage on the same
    rank whose outputs, in `kept`, are this one's inputs.
    """

    def __init__(self, *args: Any, received: Tensor, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.received = received
        self.compute: Forward | None = None
        self.index = 0
        self.kept: dict[int, Tensor] = {}
        self.before: _Stage | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.index = fwd_chunk_id
        found = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            self._release(self.args_recv_info[fwd_chunk_id])
        return found

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            self._release(self.args_recv_info[bwd_chunk_id])
            self._release(self.grad_recv_info[bwd_chunk_id])

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id], self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward:
            self._allocate(self.grad_recv_info[bwd_chunk_id], False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    @property
    def buffers(self) -> list[Any]:
        """Torch's records of what this stage receives from others."""
        of_chunks = (*self.args_recv_info.values(), *self.grad_recv_info.values())
        return [info for infos in of_chunks for info in infos if hasattr(info, "buffer")]

    def _allocate(self, infos: Sequence[Any], requires_grad: bool) -> None:
        for info in infos:
            info.buffer = torch.empty_like(self.received, device=self.device)
            info.buffer.requires_grad_(requires_grad)

    def _release(self, infos: Sequence[Any]) -> None:
        for info in infos:
            info.buffer = torch.empty(0, device=self.device)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_forward_infra(*args, **kwargs)
        self._release(self.buffers)
        return found

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_backward_infra(*args, **kwargs)
        self._release(self.buffers)
        return found

    def forward_maybe_with_nosync(self, *inputs: Tensor) -> Tensor:
        assert self.compute is not None
        assert isinstance(self.submod, Decoder)
        if self.is_first and self.before is not None:
            inputs = (self.before.kept.pop(self.index),)
        found = self.compute(self.submod, inputs[0] if inputs else None, self.index)
        if not self.is_last:
            return found.clone() if found._is_view() else found  # detached in place later
        if self.has_backward:
            return torch.stack([found.double()])
        if not self.submod.piece.last:
            self.kept[self.index] = found
        return _objective(self.device)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch 2.11 greets its neighbours, also where a V puts them on the same rank, which gloo
        cannot send to. (Later versions do not ask.)"""
        greetings = super()._get_init_p2p_neighbors_ops()
        return [op for op in greetings if op.group_peer != self.group_rank]

    def _post_metadata_inference_cleanup(self) -> None:
        """Torch would clear all gradients here, also those of an earlier pass of the same step."""


def _objective(device: torch.device | str) -> Tensor:
    return torch.zeros(1, dtype=torch.float64, device=device)


def _as_it_is(output: Tensor, target: Tensor) -> Tensor:
    """The loss function of a stage whose output is the loss."""
    return output


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return local_part(parameter.grad)
