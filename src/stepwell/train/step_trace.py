"""The trace of one step, for `stepwell plan RECIPE --measured RUN`: what ran when, as Kineto's
Chrome trace."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from stepwell.config import Run
from stepwell.files import whole_file
from stepwell.parallel.mesh import Mesh

TRACES = "traces"
QUIET = ("KINETO_LOG_LEVEL", "99")  # the library tells standard error of every start


class StepTrace:
    """Records step `log.profile_step` from the end of the one before, which is how long
    `time/step_s` lasts, into `<dir>/traces/step-N-rank-R.json.gz`. One rank of each pipeline stage
    does: those beside it run the same."""

    def __init__(self, run: Run, mesh: Mesh):
        place = mesh.place
        alike = place.dp_replicate or place.dp_shard or place.cp or place.tp
        self._number = 0 if alike else run.log.profile_step
        self._path = Path(run.dir) / TRACES / f"step-{self._number}-rank-{mesh.rank}.json.gz"
        self._device = mesh.device.type
        self._ranks = {"rank": mesh.rank, "world_size": mesh.world}
        self._running: tuple[Any, Any] | None = None

    def begin(self, step: int) -> None:
        """What is recorded of `step` begins here; what was before is dropped."""
        self.close()
        if step != self._number:
            return
        from torch.profiler import ProfilerActivity, profile, record_function

        os.environ.setdefault(*QUIET)
        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler, span = profile(activities=activities), record_function(f"ProfilerStep#{step}")
        profiler.start()
        if self._ranks["world_size"] == 1:  # of several, torch tells it itself
            profiler.add_metadata_json("distributedInfo", json.dumps(self._ranks))
        span.__enter__()
        self._running = profiler, span

    def end(self) -> None:
        """Writes the trace if one is recorded."""
        if self._running is None:
            return
        profiler, path = self._running[0], self._path
        self.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
            plain = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(plain))
            with (
                plain.open("rb") as source,
                whole_file(path) as temporary,
                gzip.open(temporary, "wb", 6) as packed,
            ):
                shutil.copyfileobj(source, packed)

    def close(self) -> None:
        """Stops a recording that is not to be written."""
        if self._running is None:
            return
        profiler, span = self._running
        self._running = None
        span.__exit__(None, None, None)
        profiler.stop()
