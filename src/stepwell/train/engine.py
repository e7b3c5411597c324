"""The engine: one model on any mesh, behind five verbs.

B rows, T tokens a row. Layouts, precision and accumulation live in here; a training method is a
flat loop that calls `forward_backward` and `optim_step`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepwell import generate as sampler
from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.models.decode import DecodeWeights
from stepwell.models.lora import without_adapters
from stepwell.models.transformer import Decoder
from stepwell.parallel import adapters
from stepwell.parallel.context import gather_outputs, gather_tokens, local_tokens
from stepwell.parallel.embedding_noise import embedding_noise
from stepwell.parallel.fp8_layers import fp8_linears
from stepwell.parallel.fsdp import DTYPES, begin_micro_batch
from stepwell.parallel.lever_rules import check_host
from stepwell.parallel.mesh import Mesh, init_distributed
from stepwell.parallel.offload import ActivationOffload
from stepwell.parallel.pipeline import check_halves
from stepwell.parallel.precision import delayed_scaling, loss_scale, unscale, without_fp8
from stepwell.parallel.rules import check_run
from stepwell.tokenizer import Tokenizer
from stepwell.train import checkpoint
from stepwell.train.adapters import RECORD, check_record, record_of, resolve_adapter
from stepwell.train.forward import forward, tokens_between_blocks
from stepwell.train.global_batch import Stats, Tally, global_counts, global_stats, split_rows
from stepwell.train.guard import TAKEN, Guard, Verdict
from stepwell.train.heap import keep_freed_memory
from stepwell.train.host_optim import HostOptimizer
from stepwell.train.losses import Loss
from stepwell.train.optim import Optimizer, build_optimizer, clip, grad_norm, set_lr
from stepwell.train.pieces import Pieces
from stepwell.train.release import GradientRelease
from stepwell.train.schedule import lr_fraction
from stepwell.train.shadow import compare
from stepwell.train.update_norm import predicted_update_norm
from stepwell.types import Completion, TrainingError


@dataclass(frozen=True)
class StepInfo:
    """step: number of the step just taken, from 1. grad_norm: before clipping. update_norm: of the
    change that the step makes, or would have made; None where the guard does not watch it."""

    step: int
    grad_norm: float
    lr: float
    update_norm: float | None = None
    verdict: Verdict = TAKEN

    @property
    def skipped(self) -> bool:
        return not self.verdict.ok

    @property
    def reason(self) -> str:
        return self.verdict.reason


class Engine:
    """Builds the run's model on the meta device, lays it out, and initialises or loads it.

    weights: (global name, full tensor) pairs to start from; None draws them from the seed.
    mesh: an already joined mesh; None joins the one that the environment announces.
    frozen: nothing is trained (a reference, a reward model): weights are held in compute precision,
    and there is no optimiser.
    Raises ConfigError for an impossible layout and CheckpointError for weights that don't fit.
    """

    def __init__(
        self,
        run: Run,
        weights: Iterable[tuple[str, Tensor]] | None = None,
        mesh: Mesh | None = None,
        frozen: bool = False,
    ):
        run = frozen_run(run) if frozen else resolve_adapter(run)
        self.run, self.frozen = run, frozen
        self.mesh = mesh or init_distributed(
            run.layout, "cuda" if torch.cuda.is_available() else "cpu"
        )
        if self.mesh.device.type == "cpu":
            keep_freed_memory()
        check_run(run, self.mesh.world)
        check_halves(run.layout)
        check_host(run, self.mesh.sizes, grouped=self.mesh.device_mesh is not None)
        if run.layout.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch insists on it
            torch.use_deterministic_algorithms(True)
        self.model = Pieces(run, self.mesh, frozen)
        self.pieces, self.pipeline = self.model.decoders, self.model.pipeline
        self._optimizer: Optimizer | HostOptimizer | None = None
        if not frozen:
            build = HostOptimizer if run.offload.optimizer else build_optimizer
            self._optimizer = build(self.named_parameters(), run.optim)
        if weights is None:
            self.model.draw()
            self._weights_changed()
        else:
            self.load_weights(weights)
        self.release: GradientRelease | None = None
        if run.optim.release_gradients:
            assert not isinstance(self.optimizer, HostOptimizer)
            parameters = (parameter for _, parameter in self.named_parameters())
            self.release = GradientRelease(self.optimizer, parameters)
        self.activation_offload: ActivationOffload | None = None
        if run.offload.activations:
            self.activation_offload = ActivationOffload(self.mesh.device)
            for piece in self.pieces:
                self.activation_offload.attach(piece)
        self.delayed_scaling = delayed_scaling(run, self.mesh, self.pieces)
        self.loss_scale = loss_scale(run)
        vocab_size = run.model.vocab_size if run.method.loss_in_nats else None
        self.guard = Guard(run.guard, vocab_size, run.precision.compute)
        self.step = 0
        self.updates = 0
        self._last_loss: float | None = None
        self._snapshot: sampler.Snapshot | None = None

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters (shards) under their global names; of parameters that two ends of
        a pipeline share, the first one's."""
        return self.model.named_parameters()

    @property
    def optimizer(self) -> Optimizer | HostOptimizer:
        if self._optimizer is None:
            raise TrainingError("a frozen engine scores and samples; it has no optimiser")
        return self._optimizer

    @property
    def decoder(self) -> Decoder:
        """The model, where this rank has it in one piece (no pipeline)."""
        (decoder,) = self.pieces
        return decoder

    # --- training ----------------------------------------------------------------------------

    def forward_backward(
        self,
        batch: Batch,
        loss: Loss,
        temperature: float = 1.0,
        denominators: Mapping[str, float] | None = None,
    ) -> Stats:
        """Adds the gradient of sum_k sums[k] / denominator[k] over the global batch.

        batch: this rank's rows; a rank may have fewer rows than another, or none.
        temperature: of the distribution whose log-probabilities and entropy the loss sees.
        denominators: instead of those that are counted on this batch over all ranks, where it is
        part of a larger one.
        """
        if denominators is None:
            denominators = self.count(batch, loss)
        micro_batches = split_rows(batch, self.run, self.mesh, self.pipeline)
        if self.release is not None:
            self._begin_release(len(micro_batches))
        tally = Tally(torch.zeros((), dtype=torch.float64, device=self.mesh.device))

        def objective(piece: Decoder, inputs: Tensor | None, i: int) -> Tensor:
            micro, run, mesh = micro_batches[i], self.run, self.mesh
            keys_N, noise = adapters.local_dropout_keys(micro, run, self.step, mesh), None
            if inputs is None:
                noise = embedding_noise(micro, run, self.step, mesh)
            outputs = forward(
                piece, inputs, micro, run, mesh, loss.needs, temperature, keys_N, noise
            )
            if not piece.piece.last:
                return outputs
            mine = local_tokens(micro_batches[i], self.mesh)
            if loss.whole_rows:
                mine = micro_batches[i]
                outputs = gather_outputs(outputs, mine, self.mesh)
            sums, seen = loss.fn(outputs, mine.to(self.mesh.device))
            total = sum(
                (total / (denominators[name] or 1.0) for name, total in sums.items()),
                start=torch.zeros((), device=self.mesh.device),
            )
            if not loss.whole_rows or self.mesh.place.cp == 0:  # else all have computed the same
                tally.add(total, seen)
            else:
                nothing = {name: (0 * part, 0 * count) for name, (part, count) in seen.items()}
                tally.add(0 * total, nothing)
            return total * self.loss_factor

        num_micro = len(micro_batches)
        if self.pipeline is not None:
            num_tokens = tokens_between_blocks(micro_batches[0], self.mesh)
            self.pipeline.forward_backward(num_micro, num_tokens, objective)
        else:
            for i in range(num_micro):
                begin_micro_batch(self.decoder, self.run.layout, i == num_micro - 1)
                objective(self.decoder, None, i).backward()
        stats = global_stats(tally, batch, micro_batches, self.run, self.mesh, self.pipeline)
        self._last_loss = stats.loss
        return stats

    def count(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """The loss's denominators on this batch over all ranks."""
        return global_counts(loss.denominators(batch), self.mesh)

    def optim_step(self) -> StepInfo:
        """Clips, judges, steps and clears the gradients. A step that the guard refuses leaves
        weights and optimiser state bit-unchanged; going back, if its verdict says so, is left to
        the caller. Raises GuardStop (a TrainingError) when the guard gives up."""
        if self._last_loss is None:
            raise TrainingError("optim_step() needs forward_backward() before it")
        optim = self.run.optim
        fraction = self._lr_fraction()
        lr = optim.lr * fraction
        set_lr(self.optimizer, fraction)
        if self.delayed_scaling is not None:
            self.delayed_scaling.update(self.mesh)
        if self.release is not None:
            norm = self.release.take_norm()
            self.updates, self.step, self._last_loss = self.updates + 1, self.step + 1, None
            return StepInfo(self.step, norm, lr)
        parameters = [parameter for _, parameter in self.named_parameters()]
        if self.loss_scale is not None:
            unscale(parameters, self.loss_scale.value)
        norm = grad_norm(parameters, self.mesh.pp_group)
        clip(parameters, optim.clip_norm, norm)
        watched = self.guard.watches_updates and math.isfinite(norm)
        update = predicted_update_norm(self.optimizer, self.mesh.pp_group) if watched else None
        verdict = self._overflow(norm) or self.guard.judge(self._last_loss, norm, update, lr)
        if verdict.ok:
            self.optimizer.step()
            if self.pipeline is not None and self.pipeline.trains_embedding:
                self.pipeline.share_tied_weights()
            self.updates += 1
        self.drop_gradients()
        self.step += 1
        return StepInfo(self.step, norm, lr, update, verdict)

    def drop_gradients(self) -> None:
        """Forgets what `forward_backward` has added up."""
        self.optimizer.zero_grad()
        if self.delayed_scaling is not None:
            self.delayed_scaling.forget()
        self._last_loss = None

    def shadow(
        self,
        batch: Batch,
        loss: Loss,
        temperature: float = 1.0,
        denominators: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """How far the gradients at hand are from those of the same batch without fp8: `compare`'s
        numbers, among the weights of layers in 8 bits (all, if there are none). Between
        forward_backward and optim_step, with its arguments; changes nothing, but holds the
        gradients twice meanwhile.
        """
        if self._last_loss is None:
            raise TrainingError("shadow() needs forward_backward() before it")
        named, before = dict(self.named_parameters()), self._last_loss
        gradients = {name: parameter.grad for name, parameter in named.items()}
        cuda = [self.mesh.device] if self.mesh.device.type == "cuda" else []
        try:
            for parameter in named.values():
                parameter.grad = None
            with without_fp8(self.pieces), torch.random.fork_rng(cuda):
                self.forward_backward(batch, loss, temperature, denominators)
            wanted = {name: parameter.grad for name, parameter in named.items()}
        finally:
            self._last_loss = before
            for name, parameter in named.items():
                parameter.grad = gradients[name]
        layers = [f"{name}.weight" for name in fp8_linears(self.run, self.mesh.sizes.tp)]
        if self.run.lora.rank:
            layers = [name for name, parameter in named.items() if parameter.requires_grad]
        return compare(gradients, wanted, self.mesh, set(layers or named))

    # --- scoring and sampling ----------------------------------------------------------------

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """log p(target) (B, T) in float32 on the CPU; zero where the batch has no weight."""
        return self._score(batch, "logprobs", temperature)

    def reference_logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """`logprobs` of the base, without the adapters that are trained over it. Raises
        TrainingError for a run that has none."""
        if not self.run.lora.rank:
            raise TrainingError(
                "reference_logprobs() takes the adapters off, and lora.rank=0 has none; keep a "
                "frozen engine as the reference"
            )
        with without_adapters(self.pieces):
            return self.logprobs(batch, temperature)

    def scores(self, batch: Batch) -> Tensor:
        """What the model's score says (B, T, C) in float32 on the CPU; zero where the batch has no
        weight."""
        return self._score(batch, "scores")

    def hidden(self, batch: Batch) -> Tensor:
        """The hidden states (B, T, D) that the head reads, in float32 on the CPU."""
        return self._score(batch, "hidden")

    @torch.no_grad()
    def _score(self, batch: Batch, need: str, temperature: float = 1.0) -> Tensor:
        needs, cfg = frozenset({need}), self.run.model
        micro_batches = split_rows(batch, self.run, self.mesh, self.pipeline)
        shape: tuple[int, ...] = (
            sum(micro.num_rows for micro in micro_batches),
            batch.tokens_BT.shape[1],
            *{"scores": (cfg.num_labels,), "hidden": (cfg.d_model,)}.get(need, ()),
        )
        parts: dict[int, Tensor] = {}

        def score(piece: Decoder, inputs: Tensor | None, i: int) -> Any:
            micro = micro_batches[i]
            outputs = forward(piece, inputs, micro, self.run, self.mesh, needs, temperature)
            if piece.piece.last:
                found = next(value for value in outputs if value is not None)
                parts[i] = gather_tokens(found.float(), micro, self.mesh)
            return outputs

        if self.pipeline is not None:
            num_tokens = tokens_between_blocks(micro_batches[0], self.mesh)
            self.pipeline.forward(len(micro_batches), num_tokens, score)
            known = self.pipeline.has_last
            scored = torch.cat([parts[i] for i in sorted(parts)]) if known else None
            scored = self.pipeline.from_last(scored, shape, torch.float32)
        else:
            for i in range(len(micro_batches)):
                score(self.decoder, None, i)
            scored = torch.cat([parts[i] for i in sorted(parts)])
        return scored[: batch.num_rows].cpu()

    def generate(
        self,
        requests: Sequence[sampler.Request],
        sampling: sampler.Sampling,
        tokenizer: Tokenizer | None = None,
        num_slots: int = 64,
    ) -> list[Completion]:
        """Answers to this rank's requests, in their order. Every rank must call it together.

        tokenizer: fills in the texts, and finds stop strings. num_slots: rows at once.
        """
        return self.snapshot().generate(requests, sampling, tokenizer, num_slots)

    @torch.no_grad()
    def snapshot(self) -> sampler.Snapshot:
        """The weights as they are now, to sample from: a copy that training leaves alone. Every
        rank must call it together."""
        if self._snapshot is None or self._snapshot.version != self.updates:
            self._snapshot = None  # the copy of before goes first, unless it is still sampled from
            dtype = DTYPES[self.run.precision.compute]
            packed = DecodeWeights.pack(self.run.model, self.model.merged_tensors(), dtype)
            self._snapshot = sampler.Snapshot(packed, self.updates)
        return self._snapshot

    # --- state -------------------------------------------------------------------------------

    def full_state_dict(
        self, dtype: torch.dtype | None = None, merged: bool = True
    ) -> dict[str, Tensor]:
        """Global name -> full tensor (a copy, on the CPU unless training is elsewhere)."""
        return dict(self.iter_state(dtype, merged))

    @torch.no_grad()
    def iter_state(
        self, dtype: torch.dtype | None = None, merged: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """One full parameter at a time. Every rank must run through it together.

        merged: of a run with adapters, those of the plain model that base and adapters make; else
        both apart, a base in 4 bits restored."""
        pairs = self.model.merged_tensors() if merged else self.model.full_tensors()
        for name, full in pairs:
            yield name, full.detach().to(dtype or full.dtype, copy=True)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies full tensors into the (sharded) parameters; strict both ways. Adapters begin anew
        over them, or at `lora.init`."""
        self.model.load(weights)
        self._weights_changed()

    def save(self, path: str | Path, extra: dict[str, Any]) -> checkpoint.SaveHandle:
        """Writes weights, optimiser, step, guard and `extra` (JSON-able), sharded and atomically.
        Of a run with adapters, those alone, and which base they belong to.

        Returns at once when checkpoint.asynchronous is on; `.wait()` ends it.
        """
        state = {
            "step": self.step,
            "updates": self.updates,
            "guard": self.guard.state(),
            "precision": self._precision_state(),
            "optim": self._hyperparameters(),
            "model": _dimensions(self.run),
            "extra": extra,
        }
        if self.run.lora.rank:
            state[RECORD] = record_of(self.run, self.model.base)
        return checkpoint.save_checkpoint(
            Path(path),
            self._trained_parameters(),
            self.optimizer.state_dict(),
            state,
            self.mesh,
            asynchronous=self.run.checkpoint.asynchronous,
        )

    def load(self, path: str | Path, branch: bool = False) -> dict[str, Any]:
        """Restores what `save` wrote, under any layout; returns `extra`.

        branch: learning rates and weight decay stay those of this run, and the guard counts anew.
        """
        path = Path(path)
        verified = checkpoint.verified_state(path, self.mesh)
        check_record(path, verified, self.run, self.model.base)
        state = checkpoint.load_checkpoint(
            path,
            self._trained_parameters(),
            self.optimizer.state_dict(),
            self.mesh,
            dimensions=_dimensions(self.run),
            verified=verified,
        )
        if not branch:
            self.optimizer.load_hyperparameters(state["optim"])
        self.guard.load(state["guard"])
        if branch:
            self.guard.branched()
        self._load_precision(state.get("precision", {}))
        self.step, self.updates = state["step"], state["updates"]
        self._weights_changed()
        return state["extra"]

    # --- inside ------------------------------------------------------------------------------

    @property
    def loss_factor(self) -> float:
        """What the gradients are too large by until optim_step: fp16's loss scale."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """What a checkpoint holds: all parameters, or the adapters."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def _lr_fraction(self) -> float:
        """Of every peak learning rate, for the step at hand."""
        fraction = lr_fraction(self.run.optim.schedule, self.step, self.run.train.steps)
        return fraction * self.guard.lr_scale_at(self.step)

    def _overflow(self, norm: float) -> Verdict | None:
        """Adapts the loss scale; the refusal of a step whose gradients it let overflow."""
        if self.loss_scale is None or self._last_loss is None:
            return None
        overflowed = math.isfinite(self._last_loss) and not math.isfinite(norm)
        if overflowed and self.loss_scale.at_floor:
            return None
        scale = self.loss_scale.value
        self.loss_scale.update(overflowed)
        if not overflowed:
            return None
        reason = f"a gradient overflowed fp16 at the loss scale {scale:g}, now halved"
        return Verdict("skip", reason, "loss_scale", scale)

    def _precision_state(self) -> dict[str, Any]:
        parts = {"delayed_scaling": self.delayed_scaling, "loss_scale": self.loss_scale}
        return {name: part.state() for name, part in parts.items() if part is not None}

    def _load_precision(self, state: dict[str, Any]) -> None:
        """What a checkpoint of another precision lacks starts afresh."""
        if self.delayed_scaling is not None:
            self.delayed_scaling.load(state.get("delayed_scaling", {}))
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load(state["loss_scale"])

    def _weights_changed(self) -> None:
        """After the parameters were written to otherwise than by a step."""
        self._snapshot = None
        if self.pipeline is not None:
            self.pipeline.share_tied_weights()
        if isinstance(self._optimizer, HostOptimizer):
            self._optimizer.reload_masters()

    def _hyperparameters(self) -> dict[str, dict[str, float]]:
        """The optimiser's settings for every parameter of the model."""
        mine = self.optimizer.hyperparameters()
        if self.pipeline is None:
            return mine
        return {name: value for part in self.pipeline.gather(mine) for name, value in part.items()}

    def _begin_release(self, num_micro_batches: int) -> None:
        if num_micro_batches > 1:
            raise TrainingError(
                f"optim.release_gradients=true steps within the backward pass, so a step has one "
                f"micro-batch, not {num_micro_batches}; raise train.micro_batch_rows or set "
                "optim.release_gradients=false"
            )
        if self._last_loss is not None:
            raise TrainingError(
                "optim.release_gradients=true: forward_backward() has stepped already; call "
                "optim_step() before the next one"
            )
        set_lr(self.optimizer, self._lr_fraction())


def frozen_run(run: Run) -> Run:
    """The run without what only training needs."""
    plain = type(run)()
    precision = run.precision.model_copy(
        update={"fp8": plain.precision.fp8, "loss_scale": plain.precision.loss_scale}
    )
    without = ("lora", "remat", "offload", "optim", "guard")
    update = {key: getattr(plain, key) for key in without}
    return run.model_copy(update={**update, "precision": precision})


def _dimensions(run: Run) -> dict[str, Any]:
    return run.model.model_dump(mode="json", exclude_none=True, exclude={"init", "init_std"})
