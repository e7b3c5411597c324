"""The policy on a completion server: which weights it has, and how it gets new ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from stepwell.generate import Snapshot
from stepwell.models.hf import save_hf
from stepwell.parallel.fsdp import DTYPES
from stepwell.parallel.mesh import on_main
from stepwell.posttrain.sampling.server import ServerSampler, check_staleness
from stepwell.sections.methods import SampledMethod
from stepwell.tokenizer import Tokenizer
from stepwell.train.session import Session
from stepwell.train.weights import with_head


class ServedPolicy:
    """With method.server_weights every new version of the weights is exported to that folder, and
    the server loads it before it samples. Without, the server keeps the weights that the run began
    with, and a trainer that has left them too far behind is refused."""

    def __init__(self, session: Session, tokenizer: Tokenizer):
        method = session.run.method
        assert isinstance(method, SampledMethod)
        assert method.server is not None
        self.session, self.method, self.tokenizer = session, method, tokenizer
        self._server = ServerSampler.connect(method.server)
        self._checked = False
        if method.server_weights is not None:
            self._server = replace(self._server, version=-1)

    def source_of(self, snapshot: Snapshot) -> ServerSampler:
        """The server with these weights, or as far behind them as is allowed. Every rank must call
        it together. Raises ConfigError, or ServerError."""
        method = self.method
        if method.server_weights is None:
            steps = method.updates_per_rollout * method.minibatches
            check_staleness(self._server, snapshot.version, method.max_staleness * steps)
        elif snapshot.version != self._server.version:
            self._publish(Path(method.server_weights))
            self._server = on_main(
                lambda: self._server.reload(snapshot.version), self.session.engine.mesh
            )
            self._checked = False
        if not self._checked and snapshot.version == self._server.version:
            on_main(
                lambda: self._server.check(snapshot, method.temperature),
                self.session.engine.mesh,
            )
            self._checked = True
        return self._server

    def _publish(self, folder: Path) -> None:
        """Exports the weights as they are now, whole or not at all, without a critic's score."""
        engine, run = self.session.engine, self.session.run
        model = run.model.model_copy(update={"head": "lm"})
        dtype = DTYPES[run.precision.compute]
        if not engine.mesh.is_main:
            for _ in engine.iter_state(dtype):  # every rank takes part in gathering
                continue
            return
        with TemporaryDirectory() as temporary:
            self.tokenizer.save(temporary)
            save_hf(
                folder,
                model,
                with_head(engine.iter_state(dtype), model, run.train.seed),
                dtype,
                tokenizer=temporary,
                eos_ids=self.tokenizer.stop_ids,
                bos_id=self.tokenizer.bos_id,
                pad_id=self.tokenizer.pad_id,
                overwrite=True,
            )
