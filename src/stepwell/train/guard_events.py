"""What events.jsonl knows of the guard's acts: which checkpoints are wanted to look at them again,
which settings a step was taken with, and what a killed process had not finished."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepwell.config import Run
from stepwell.files import write_text
from stepwell.metrics import EVENTS_FILE, encode, read_events
from stepwell.train.guard import Guard

# Checkpoints that stay, besides those of `checkpoint.keep_last`, for `stepwell replay`.
KEPT_FOR_REPLAY = 2
# In a resume's event: the count of refused steps that a restart after a stop forgets.
FORGOTTEN = "forgotten_skips_in_a_row"

Event = Mapping[str, Any]


def replay_command(run: Run, step: int, checkpoints: Sequence[int]) -> str | None:
    """What shows the step again; None where it cannot be replayed."""
    from_first = run.checkpoint.branch_from is None and step <= run.checkpoint.every_steps
    replayable = run.method.kind in ("pretrain", "sft")
    if not replayable or not (from_first or any(found < step for found in checkpoints)):
        return None
    return f"stepwell replay {run.dir} --step {step}"


def kept_for_replay(events: Sequence[Event], checkpoints: Sequence[int]) -> list[int]:
    """Of the steps of the checkpoints, those that the last acts of the guard are replayed from: the
    newest one before a refused step, and the one that a rewind went back to."""
    kept: list[int] = []
    for event in reversed(events):
        if event["event"] not in ("skip", "stop", "rewind") or is_overflow(event):
            continue
        last = event["step"] - (event["event"] != "rewind")
        earlier = [step for step in checkpoints if step <= last]
        if earlier and max(earlier) not in kept:
            kept.append(max(earlier))
        if len(kept) == KEPT_FOR_REPLAY:
            break
    return sorted(kept)


def is_overflow(event: Event) -> bool:
    """Whether fp16's loss scale refused the step, as it does now and then."""
    return event.get("watched") == "loss_scale"


def drop_undone_rewinds(run_dir: str | Path, guard: Guard) -> None:
    """Takes the rewinds out of events.jsonl that no checkpoint knows of: a process was killed
    between the two, and the run comes by them again. One rank calls it."""
    events = read_events(run_dir)
    kept = [e for e in events if e["event"] != "rewind" or e["rewinds"] <= guard.rewinds]
    if len(kept) < len(events):
        path = Path(run_dir) / EVENTS_FILE
        write_text(path, "".join(json.dumps(encode(e)) + "\n" for e in kept))


def stopped_after(events: Sequence[Event], step: int) -> bool:
    """Whether the guard has stopped the run, which goes on from `step` now because its user wants
    it to; also when that restart was killed before its first checkpoint."""
    return any(
        e["event"] == "stop" or (e["event"] == "resume" and e["step"] == step and FORGOTTEN in e)
        for e in events
    )


def settings_at(events: Sequence[Event], guard: Guard, since: int, step: int) -> None:
    """Gives the guard what was decided for the steps after `step`: what the rewinds left out and
    made of the learning rate, and a restart after a stop. since: the step of the checkpoint that
    the guard's state is from, which knows the rewinds up to it; -1 for the first weights."""
    for event in events:
        if event["event"] == "rewind" and since < event["step"] <= step:
            guard.rewinds = event["rewinds"]
            guard.jumped = {k: [list(span) for span in v] for k, v in event["jumped"].items()}
            guard.lr_scale, guard.cooldown_until = event["lr_scale"], event["cooldown_until"]
        elif event["event"] == "resume" and event["step"] == step and FORGOTTEN in event:
            guard.skips_in_a_row = 0
