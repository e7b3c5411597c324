"""A reference that becomes the policy of a later step, and is found again by a run that goes on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.models.flops import parameter_shapes
from stepwell.parallel.mesh import on_main
from stepwell.posttrain.ppo.placement import open_reference
from stepwell.train import checkpoint
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
        on_main(lambda: checkpoint.remove_leftovers(session.dir / FOLDER), session.engine.mesh)
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
        folder = session.dir / FOLDER
        with self._held.weights() as weights:
            place = checkpoint.step_folder(folder, engine.step)
            saved = checkpoint.save_checkpoint(
                place, weights, {}, {"step": engine.step}, engine.mesh
            )
            saved.wait()
        if engine.mesh.is_main:
            wanted = [state.get(KEY, 0) for state in checkpoint.loop_states(session.dir)]
            checkpoint.prune(folder, 1, keep_also=wanted)
        session.log.event("reference", engine.step, is_policy_of_step=engine.step)
        session.pause()

    def go_to(self, step: int) -> None:
        """Becomes the policy of an earlier refresh. Raises CheckpointError if that is gone."""
        run, engine = self.session.run, self.session.engine
        if step == self.step:
            return
        if step == 0:
            self._held = open_reference(run, engine, engine.mesh, self._first)
        else:
            shapes = parameter_shapes(run.model.model_copy(update={"head": "lm"}))
            place = checkpoint.step_folder(self.session.dir / FOLDER, step)
            self._held.become(checkpoint.load_weights(place, shapes))
        self.step = step
