"""A reference that becomes the policy of a later step, and is found again by a run that goes on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.models.flops import parameter_shapes
from stepwell.parallel.mesh import on_main
from stepwell.posttrain.ppo.placement import open_reference
from stepwell.train import checkpoint, run_checkpoints
from stepwell.train.session import Session

# Where its weights are kept, as checkpoints, in the run's folder; and what the run's own
# checkpoints call the step that they are of.
FOLDER, KEY = "reference", "refreshed"


class MovingReference:
    """step: the step whose policy it is; 0 for the weights that the run starts from."""

    def __init__(
        self, session: Session, weights: Sequence[tuple[str, Tensor]] | None = None, step: int = 0
    ):
        self.session, self.step = session, 0
        self._first = weights
        on_main(lambda: run_checkpoints.remove_leftovers(session.dir / FOLDER), session.engine.mesh)
        self._held = open_reference(session.run, session.engine, session.engine.mesh, weights)
        self.go_to(step)

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """As `Engine.logprobs`. Every rank must call it together."""
        return self._held.logprobs(batch, temperature)

    def refresh(self) -> None:
        """Becomes the policy as it is, and is written down. Older ones that no checkpoint of the
        run goes back to are removed."""
        session, engine = self.session, self.session.engine
        self._held.become(engine.iter_state())
        self.step = engine.step
        session.wait()  # a checkpoint under way uses the same group, and counts below
        self._write()
        if engine.mesh.is_main:
            wanted = [state.get(KEY, 0) for state in run_checkpoints.loop_states(session.dir)]
            run_checkpoints.prune(session.dir / FOLDER, 1, keep_also=wanted)
        session.log.event("reference", engine.step, is_policy_of_step=engine.step)
        session.pause()

    def go_to(self, step: int) -> None:
        """Becomes the policy of an earlier refresh, also by the run that this one branched from,
        which is needed no more then. Raises CheckpointError if that is gone."""
        run, engine = self.session.run, self.session.engine
        if step == self.step:
            return
        self.step = step
        if step == 0:
            self._held = open_reference(run, engine, engine.mesh, self._first)
            return
        own, trunk = run_checkpoints.step_folder(self.session.dir / FOLDER, step), None
        if run.checkpoint.branch_from is not None and not own.exists():
            trunk = run_checkpoints.of_run_or_itself(
                run.checkpoint.branch_from, "checkpoint.branch_from"
            ).parents[1]
        place = own if trunk is None else run_checkpoints.step_folder(trunk / FOLDER, step)
        shapes = parameter_shapes(run.model.model_copy(update={"head": "lm"}))
        self._held.become(checkpoint.load_weights(place, shapes))
        if trunk is not None:
            self._write()

    def _write(self) -> None:
        """Every rank must call it together, with no checkpoint under way."""
        place = run_checkpoints.step_folder(self.session.dir / FOLDER, self.step)
        with self._held.weights() as weights:
            mesh, state = self.session.engine.mesh, {"step": self.step}
            checkpoint.save_checkpoint(place, weights, {}, state, mesh).wait()
