"""What every training loop does around its steps: the run's folder, resuming, logging, saving,
and stopping on a signal."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepwell import hardware
from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.loader import State
from stepwell.launch.stopping import Requests
from stepwell.metrics import SHOWN_ITEMS, RunLog, read_events
from stepwell.models.flops import flops_per_token
from stepwell.parallel.mesh import (
    Mesh,
    all_gather_objects,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    on_main,
)
from stepwell.train import checkpoint, run_checkpoints, shadow
from stepwell.train.engine import Engine, Stats, StepInfo
from stepwell.train.folder import RECIPE
from stepwell.train.guard import GuardStop, Verdict
from stepwell.train.guard_events import (
    is_overflow,
    kept_for_replay,
    replay_command,
)
from stepwell.train.losses import Loss
from stepwell.train.probe import first_non_finite, non_finite_state
from stepwell.train.step_flops import recomputed_flops, step_flops
from stepwell.train.step_trace import StepTrace
from stepwell.train.streams import Stream, batch_number
from stepwell.train.weights import TOKENIZER
from stepwell.types import Interrupted

More = Mapping[str, float] | Callable[[], Mapping[str, float]] | None
# A run, and the weights that it starts from (None: those of its model.init, or drawn).
Trained = tuple[Run, Iterable[tuple[str, Tensor]] | None]

# What a checkpoint's `extra` holds besides the loop's own.
METRICS, METHOD, MACHINE = "metrics", "method", "machine"
OWN = (METRICS, METHOD, MACHINE, TOKENIZER)
# What the command that was stopped would do, by whether bad steps are skipped.
AGAIN = {
    True: "The same command goes on from the last checkpoint and counts bad steps anew.",
    False: "The same command would stop there again.",
}


class Due(NamedTuple):
    """save: a checkpoint. stop: the signal that asks for it, 0 for none."""

    save: bool
    stop: int


class Session:
    """An engine in a run's folder.

    extra: what the loop saved with the last checkpoint (its data position), None at the start.
    others: further engines that are trained along (a critic), by name. They are saved in
    `<dir>/<name>` before the run's own engine, and go on where it does.
    tokenizer: the fingerprint that checkpoints carry.
    console: whether the log is shown. stats: of the last step.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        log: RunLog,
        extra: dict[str, Any] | None,
        tokenizer: str | None = None,
        console: bool = True,
        others: Mapping[str, Engine] | None = None,
    ):
        self.others = dict(others or {})
        self.run, self.engine, self.log, self.tokenizer = run, engine, log, tokenizer
        self.dir = Path(run.dir)
        self.extra = extra
        self.requests = Requests()
        self._console = console
        self.stats: Stats | None = None
        self._drawn: tuple[str, int, tuple[Any, ...]] = ("", 0, ())
        self._bad: dict[str, Any] = {}
        self._saving: checkpoint.SaveHandle | None = None
        self._last_saved = engine.step
        self._evaluation: tuple[int, dict[str, float]] = (-1, {})
        device = hardware.detect()
        peak, self.peak_source = hardware.peak_flops_per_s(device, run.precision.compute)
        self.peak_flops_per_s = peak * engine.mesh.world
        self.trace = StepTrace(run, engine.mesh)
        self.pause()

    @property
    def finished(self) -> bool:
        return self.engine.step >= self.run.train.steps

    def draw(self, stream: Stream, name: str) -> tuple[Batch, State]:
        """The next batch of the stream `name` that is not left out; those that are get logged."""
        while True:
            batch, state = next(stream)
            if not self.is_jumped(name, batch_number(state, self.run), batch.sample_ids):
                return batch, state

    def is_jumped(self, stream: str, number: int, ids: Iterable[Any]) -> bool:
        """Whether batch `number` (from 1) is left out; logs that with all ranks' `ids`. If not, it
        is taken to be that of the next step. Every rank must call it together."""
        if not self.engine.guard.is_jumped(stream, number):
            self.engine.guard.takes(stream, number)
            self._drawn = (stream, number, tuple(ids))
            return False
        step, every = self.engine.step + 1, self._gathered(ids)
        self.log.event("jump", step, stream=stream, batch=number, sample_ids=every)
        return True

    def step(
        self,
        batch: Batch,
        loss: Loss,
        temperature: float = 1.0,
        more: More = None,
        denominators: Mapping[str, float] | None = None,
    ) -> StepInfo:
        """One step of the engine, logged. After one with action "rewind" call `rewind`.
        more: what else its line says; a function is asked once the gradients are there.
        denominators: as in `Engine.forward_backward`.

        Raises GuardStop, with the event written, when the guard gives up.
        """
        engine = self.engine
        self.stats = stats = engine.forward_backward(batch, loss, temperature, denominators)
        found = dict(more() if callable(more) else more or {})
        differences = self.check_precision(batch, loss, temperature, denominators)
        try:
            info = engine.optim_step()
        except GuardStop as stop:
            if differences:  # the step has no line of its own
                self.log.log(engine.step + 1, differences)
            step = engine.step + 1
            details = self._describe(step, stop.verdict, batch, loss, temperature)
            raise self._stopped(stop, details, step) from None
        self.record(batch, stats, info, {**found, **differences}, always=bool(differences))
        if info.skipped:
            self._bad = self._describe(info.step, info.verdict, batch, loss, temperature)
            if info.verdict.action == "skip":
                details = self._bad | self._replayable(info.step, self._bad)
                self.log.event("skip", info.step, **details)
            self.pause()
        return info

    def _describe(
        self, step: int, verdict: Verdict, batch: Batch, loss: Loss, temperature: float
    ) -> dict[str, Any]:
        """What the guard saw at `step`, in which rows, and what is not finite: the first layer,
        weights and moments."""
        stream, number, ids = self._drawn
        finding, bad_state = None, []
        if not math.isfinite(verdict.value):
            finding = first_non_finite(self.engine, batch, loss, temperature, step - 1)
            bad_state = non_finite_state(self.engine)
        return {
            **{k: v for k, v in verdict._asdict().items() if k != "action"},
            "stream": stream,
            "batch": number,
            "sample_ids": self._gathered(ids or batch.sample_ids),
            "first_non_finite": finding._asdict() if finding else None,
            "non_finite_state": bad_state,
        }

    def _replayable(self, step: int, details: dict[str, Any]) -> dict[str, str]:
        """How the step can be looked at again, for its event."""
        if is_overflow(details):
            return {}
        steps = on_main(lambda: run_checkpoints.steps_of(self.dir), self.engine.mesh)
        if self._saving is not None:
            steps.append(self._last_saved)
        command = replay_command(self.run, step, steps)
        return {"replay": command} if command else {}

    def _stopped(self, stop: GuardStop, details: dict[str, Any], step: int) -> GuardStop:
        """Logs that the guard gave up at `step`; its error with what was found."""
        details = details | self._replayable(step, details)
        self.log.event("stop", step, **details)
        message = f"{stop} {AGAIN[self.run.guard.action == 'skip']}"
        if names := details["non_finite_state"]:
            message += f" Not finite themselves: {some_names(names)}."
        if "replay" in details:
            message += f" To look at the step: {details['replay']}"
        return GuardStop(message, stop.verdict, stop.grad_norm)

    def _gathered(self, ids: Iterable[Any]) -> list[Any]:
        mesh = self.engine.mesh
        mine = tuple(ids) if mesh.counts_rows else ()
        return [i for part in all_gather_objects(mine, mesh) for i in part]

    def rewind(self, steps_per_batch: int = 1) -> dict[str, Any] | None:
        """Back to the last checkpoint before the suspects (the oldest, if none is old enough), with
        these left out and the learning rate lowered. Returns what the loop had saved there, None
        for nothing.

        The checkpoint is written anew with this knowledge, and later ones are removed: a run that
        is killed afterwards goes on from there as if it had not been.
        """
        self.wait()
        engine, guard, config = self.engine, self.engine.guard, self.run.guard
        before, bad_step = guard.state(), engine.step
        newest = bad_step - config.suspect_steps * steps_per_batch
        target = on_main(lambda: run_checkpoints.newest_until(self.dir, newest), engine.mesh)
        extra = engine.load(target)
        for name, other in self.others.items():
            other.load(beside(target, name))
        if self._bad["non_finite_state"] and (names := non_finite_state(engine)):
            raise self._hopeless(names, target, bad_step)
        guard.rewound(before, bad_step, *self._drawn[:2])
        self.remove_after(engine.step)
        self.log.close()
        earlier = [e for e in read_events(self.dir) if e["event"] == "rewind"]
        self.log = open_log(self.run, engine, self._console, fresh=False)
        for event in earlier:  # what was learnt stays, also where its steps are done again
            if event["step"] > engine.step:
                details = {k: v for k, v in event.items() if k not in ("event", "step", "time")}
                self.log.event("rewind", engine.step, **details)
        self.log.event(
            "rewind",
            engine.step,
            to_step=engine.step,
            bad_step=bad_step,
            **self._bad,
            recent_losses=before["good"]["loss"][-10:],
            rewinds=guard.rewinds,
            jumped=guard.jumped,
            lr_scale=guard.lr_scale,
            cooldown_until=guard.cooldown_until,
        )
        self._evaluation = (engine.step, extra[METRICS]) if METRICS in extra else (-1, {})
        extra = {key: value for key, value in extra.items() if key not in OWN}
        self.save(extra)
        self.wait()
        self.pause()
        return extra or None

    def _hopeless(self, names: list[str], target: Path, bad_step: int) -> GuardStop:
        """The stop where a rewind would find the same weights again."""
        reason = f"{self._bad['reason']}, and going back is no use: {target} holds the same trouble"
        verdict = Verdict("stop", reason, self._bad["watched"], self._bad["value"])
        stop = GuardStop(f"{reason}. Start from weights that are finite.", verdict, math.nan)
        return self._stopped(
            stop, {**self._bad, "reason": reason, "non_finite_state": names}, bad_step
        )

    def record(
        self,
        batch: Batch,
        stats: Stats,
        info: StepInfo,
        more: dict[str, float] | None = None,
        always: bool = False,
    ) -> None:
        """Logs one step. batch: this rank's rows of it. always: also between train.log_every.

        Tokens per second count all tokens that are not padding; MFU is `step_flops` over the time
        and the peak of all ranks (PaLM, 2204.02311, appendix B), HFU adds what was computed twice
        (logits, and blocks under `remat`). Peak memory is that of this rank's process (CPU, with
        its libraries) or of its tensors (CUDA). The time runs from the last step's end, so that
        reading data and handing over a checkpoint are in it.
        """
        seconds = time.perf_counter() - self._mark
        self._write_trace(info.step)
        self.pause()
        mesh = self.engine.mesh
        counts = [step_flops(self.run, batch), recomputed_flops(self.run, mesh.sizes, batch)]
        local = torch.tensor(counts, dtype=torch.float64) * mesh.counts_rows
        flops, twice = all_reduce_sum(local, mesh).tolist()
        twice += stats.num_twice_tokens * flops_per_token(self.run.model, 1).head
        if info.step % self.run.train.log_every and not self.finished and not always:
            return
        scale, loss = self.engine.loss_scale, stats.metrics.get("loss", stats.loss)
        self.log.log(
            info.step,
            {
                **({"train/loss": loss} if self.run.method.shows_loss else {}),
                "train/objective": stats.loss,
                **{f"train/{k}": v for k, v in stats.metrics.items() if k != "loss"},
                "train/grad_norm": info.grad_norm,
                **({} if info.update_norm is None else {"train/update_norm": info.update_norm}),
                "train/lr": info.lr,
                "train/skipped": int(info.skipped),
                "train/tokens": stats.num_tokens,
                "train/loss_tokens": stats.num_loss_tokens,
                "time/step_s": seconds,
                "speed/tokens_per_s": stats.num_tokens / seconds,
                "speed/mfu": flops / seconds / self.peak_flops_per_s,
                "speed/hfu": (flops + twice) / seconds / self.peak_flops_per_s,
                "memory/peak_bytes": peak_bytes(self.engine.mesh.device),
                **({"precision/loss_scale": scale.value} if scale is not None else {}),
                **(more or {}),
            },
        )

    def _write_trace(self, step: int) -> None:
        """A disk that is full does not end the run."""
        try:
            self.trace.end()
        except OSError as error:
            self.log.event("warning", step, text=f"the step's trace is not written: {error}")

    def check_precision(
        self,
        batch: Batch,
        loss: Loss,
        temperature: float,
        denominators: Mapping[str, float] | None,
    ) -> dict[str, float]:
        """Every precision.fp8.shadow_every steps, between forward_backward and optim_step: how far
        the gradients are from those without fp8, for the step's line; reported when that is too
        far. Its time is left out of the step's. Empty in other steps."""
        fp8, step = self.run.precision.fp8, self.engine.step + 1
        if not fp8.shadow_every or step % fp8.shadow_every:
            return {}
        start = time.perf_counter()
        numbers = self.engine.shadow(batch, loss, temperature, denominators)
        seconds = time.perf_counter() - start
        self._mark += seconds
        difference = numbers[shadow.DIFFERENCE]
        if not difference <= fp8.shadow_tolerance:
            self.log.event(
                "fp8_drift",
                step,
                difference=difference,
                tolerance=fp8.shadow_tolerance,
                layers=shadow.worst(numbers),
            )
        return {**numbers, "time/shadow_s": seconds}

    @property
    def evaluation_due(self) -> bool:
        every = self.run.train.eval_every
        return every > 0 and (self.engine.step % every == 0 or self.finished)

    def record_evaluation(self, metrics: dict[str, float]) -> None:
        """Logs held-out metrics of the weights as they are; a checkpoint of this step carries
        them."""
        self.log.log(self.engine.step, metrics)
        self._evaluation = (self.engine.step, metrics)
        self.pause()

    def pause(self) -> None:
        """Leaves the time since the last step out of the next one (evaluation, first batch)."""
        self.trace.begin(self.engine.step + 1)
        self._mark = time.perf_counter()

    def due(self) -> Due:
        """What has to be done after this step. Every rank must call it together."""
        step = self.engine.step
        flag = torch.tensor(self.requests.first or 0)
        stop = int(all_reduce_max(flag, self.engine.mesh))
        keep, evaluated = self.run.checkpoint, self._evaluation[0] == step
        # An update may take several steps, so that none of them is a multiple.
        passed = step // keep.every_steps > self._last_saved // keep.every_steps
        due = passed or self.finished or stop or (keep.keep_best and evaluated)
        return Due(bool(due) and step != self._last_saved, stop)

    def after_step(self, extra: dict[str, Any], due: Due | None = None) -> None:
        """Saves when a checkpoint is due. Raises Interrupted after a signal, with all saved."""
        step, due = self.engine.step, due or self.due()
        if due.save:
            self.save(extra)
        if due.stop and not self.finished:
            self.wait()
            self.log.event("interrupted", step, signal=signal.Signals(due.stop).name)
            raise Interrupted(
                f"stopped at step {step} of {self.run.train.steps} and saved; "
                "the same command goes on from there"
            )

    def save(self, extra: dict[str, Any]) -> None:
        self.wait()
        step = self.engine.step
        evaluated, metrics = self._evaluation
        extra = {**extra, METHOD: self.run.method.kind, MACHINE: machine(self.engine.mesh)}
        if self.tokenizer is not None:
            extra[TOKENIZER] = self.tokenizer
        if evaluated == step:
            extra[METRICS] = metrics
        for name, other in self.others.items():
            other.save(run_checkpoints.step_folder(self.dir / name, step), {}).wait()
        self._saving = self.engine.save(run_checkpoints.step_folder(self.dir, step), extra)
        self._last_saved = step

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, those of the other engines too."""
        if self.engine.mesh.is_main:
            for folder in (self.dir, *(self.dir / name for name in self.others)):
                run_checkpoints.remove_after(folder, step)

    def wait(self) -> None:
        """Until the checkpoint under way is complete; then old ones are removed."""
        if self._saving is None:
            return
        self._saving.wait()
        self._saving = None
        barrier(self.engine.mesh)
        if self.engine.mesh.is_main:
            keep = self.run.checkpoint
            wanted = kept_for_replay(read_events(self.dir), run_checkpoints.steps_of(self.dir))
            run_checkpoints.prune(self.dir, keep.keep_last, keep.keep_best, keep_also=wanted)
            for name in self.others:
                run_checkpoints.prune(
                    self.dir / name, 1, keep_also=run_checkpoints.steps_of(self.dir)
                )


def open_log(run: Run, engine: Engine, console: bool, fresh: bool) -> RunLog:
    """Writes run.toml, and opens the log."""
    if engine.mesh.is_main:
        run.save(Path(run.dir) / RECIPE)
    return RunLog(
        Path(run.dir),
        run.log,
        rank=engine.mesh.rank,
        last_step=-1 if fresh else engine.step,
        num_steps=run.train.steps,
        name=run.name,
        console=console,
        settings=run.model_dump(),
    )


def beside(start: Path, name: str) -> Path:
    """The checkpoint of the engine `name` that was saved with `start`."""
    return start.parents[1] / name / start.parent.name / start.name


def some_names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_ITEMS} more" if len(names) > SHOWN_ITEMS else ""
    return ", ".join(names[:SHOWN_ITEMS]) + more


def machine(mesh: Mesh) -> dict[str, Any]:
    """What rounding depends on besides the run's settings; on every rank that of this one."""
    device = mesh.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(mesh.device)
    return {
        "ranks": mesh.world,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": device,
    }


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return hardware.peak_rss_bytes()
