"""Tasks on a Ray cluster whose nodes see the same work folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stepwell.curate.tasks import run_task
from stepwell.types import ConfigError, StepwellError


class RayExecutor:
    """address: of the cluster; None: RAY_ADDRESS, else a cluster of this machine alone.

    workers: tasks at a time; None: as many as the cluster has cores.
    """

    def __init__(self, address: str | None = None, workers: int | None = None):
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                "--executor ray needs Ray; install it with: pip install 'stepwell[ray]'"
            ) from error
        self._ray: Any = ray
        self._workers = workers
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except ConnectionError as error:
                raise ConfigError(
                    f"no Ray cluster answers at {address or os.environ.get('RAY_ADDRESS')}: {error}"
                ) from error

    def run(self, work: Path, stage: int, numbers: Sequence[int]) -> Iterator[int]:
        """The numbers of tasks as they end. A task whose node is lost runs again elsewhere.

        Raises what a task raises, and StepwellError for a node that doesn't see the work folder.
        """
        ray = self._ray
        remote = ray.remote(num_cpus=1, max_retries=3)(_task)
        waiting = list(reversed(numbers))
        running: dict[Any, int] = {}
        limit = self._workers or int(ray.cluster_resources().get("CPU", 1))
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    number = waiting.pop()
                    running[remote.remote(str(work.absolute()), stage, number)] = number
                done, _ = ray.wait(list(running), num_returns=1)
                for reference in done:
                    number = running.pop(reference)
                    self._result(reference)
                    yield number
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _result(self, reference: Any) -> None:
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise StepwellError(
                f"Ray gave a task up: {error}. What was finished is kept, and the same command "
                "goes on from there"
            ) from error


def _task(work: str, stage: int, number: int) -> None:
    if not Path(work).is_dir():
        raise ConfigError(
            f"a node of the Ray cluster does not see the work folder {work}; --out must lie on a "
            "file system that all nodes share"
        )
    run_task(Path(work), stage, number)
