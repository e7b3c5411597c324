"""A run's model as this rank holds it: built on the meta device, laid out, drawn or loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from stepwell.config import Run
from stepwell.models.lora import LoraLinear
from stepwell.models.lora_shapes import is_adapter
from stepwell.models.transformer import Decoder, Piece, init_rule
from stepwell.parallel import adapters
from stepwell.parallel.apply import parallelize
from stepwell.parallel.fsdp import DTYPES
from stepwell.parallel.init import Rule, init_parameters, normal_
from stepwell.parallel.mesh import Mesh
from stepwell.parallel.pipeline import Pipeline, full_shapes, pieces_of
from stepwell.train.adapters import Fingerprint, drawn_fingerprint, load_adapter, seen_by
from stepwell.types import CheckpointError


class Pieces:
    """Uninitialised until `draw` or `load`.

    decoders: one, or a pipeline rank's stages. base: the fingerprint of what adapters are trained
    over. frozen: weights are held in compute precision, and none is trained.
    """

    def __init__(self, run: Run, mesh: Mesh, frozen: bool):
        self.run, self.mesh = run, mesh
        self.base = drawn_fingerprint(run)
        self.pipeline: Pipeline | None = None
        if run.layout.pp == 1:
            self.decoders = [self._build(None, frozen)]
        else:
            places = pieces_of(run.model, run.layout, mesh.place.pp)
            self.decoders = [self._build(place, frozen) for place in places]
            self.pipeline = Pipeline(self.decoders, mesh, run)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `Engine.named_parameters`."""
        if self.pipeline is not None:
            return ((name, parameter) for _, name, parameter in self.pipeline.named_parameters())
        return (pair for decoder in self.decoders for pair in decoder.named_parameters())

    def draw(self) -> None:
        """Every weight from the run's seed; adapters begin."""
        run = self.run
        for decoder in self.decoders:
            init_parameters(decoder, run.train.seed, self._init_rule)
        for name, layer in self._quantised_layers().items():
            weight_MD = torch.empty(layer.out_features, layer.in_features, device=self.mesh.device)
            normal_(weight_MD, run.train.seed, name, init_rule(run.model, name)[1])
            adapters.set_quantised(layer, name, weight_MD, run, self.mesh)
        self._start_adapters()

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As `Engine.load_weights`."""
        parameters, fingerprint = dict(self.named_parameters()), Fingerprint()
        quantised = self._quantised_layers()
        shapes = full_shapes(self.run.model)
        missing = set(shapes)
        if self.run.lora.rank:
            weights = seen_by(fingerprint, weights, self.run.lora)
        for name, tensor in weights:
            if name not in shapes:
                raise CheckpointError(f"the weights have {name!r}, which the model has not")
            if tensor.shape != shapes[name]:
                raise CheckpointError(
                    f"{name} has shape {tuple(tensor.shape)} in the weights but "
                    f"{tuple(shapes[name])} in the model"
                )
            missing.discard(name)
            if name in quantised:
                adapters.set_quantised(quantised[name], name, tensor, self.run, self.mesh)
            elif name in parameters:  # else another pipeline stage's
                adapters.copy_full(parameters[name], tensor)
        if missing:
            raise CheckpointError(f"the weights lack {sorted(missing)[:5]}")
        if self.run.lora.rank:
            self.base = fingerprint.value
        self._start_adapters()

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Base and adapters whole, one at a time. Every rank must run through it together."""
        if self.pipeline is not None:
            return self.pipeline.iter_full(adapters.all_shapes(self.run))
        (decoder,) = self.decoders
        return adapters.full_tensors(decoder)

    def merged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """`full_tensors` of the plain model that base and adapters make."""
        pairs = self.full_tensors()
        return adapters.merged(pairs, self.run.lora) if self.run.lora.rank else pairs

    def _build(self, piece: Piece | None, frozen: bool) -> Decoder:
        with torch.device("meta"):
            precision = self.run.precision
            dtype = DTYPES[precision.compute if frozen else precision.param]
            decoder = Decoder(self.run.model, piece).to(dtype).requires_grad_(not frozen)
            adapters.add_adapters(decoder, self.run)
        parallelize(decoder, self.mesh, self.run)
        return decoder

    def _init_rule(self, name: str, shape: torch.Size) -> Rule:
        if is_adapter(name):
            return adapters.adapter_rule(name, shape)
        return init_rule(self.run.model, name)

    def _quantised_layers(self) -> dict[str, LoraLinear]:
        """Name of the weight -> layer that has it in 4 bits."""
        if self.run.lora.quantize == "none":
            return {}
        found = (pair for decoder in self.decoders for pair in adapters.adapted(decoder))
        return {f"{name}.weight": layer for name, layer in found}

    def _start_adapters(self) -> None:
        if self.run.lora.rank:
            adapters.init_adapters(self.decoders, self.run.train.seed)
            adapters.reset_magnitudes(self.decoders)
            if self.run.lora.init is not None:
                load_adapter(self.run, self.named_parameters(), self.base)
