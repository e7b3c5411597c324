"""What loops that train on their own samples do about over-optimised rewards: they say what is to
be seen, and keep within a budget of divergence or end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepwell.posttrain.answers import Answer
from stepwell.posttrain.overoptimisation.detector import Alarm, Watch, read
from stepwell.posttrain.policy.kl_control import raised
from stepwell.posttrain.policy.loss import REFERENCE, SAMPLER
from stepwell.posttrain.rewards.composite import Rewards
from stepwell.posttrain.rollout import Rollouts
from stepwell.posttrain.sampling.pipeline import RolloutStream
from stepwell.sections.methods import SampledMethod
from stepwell.train.session import Session
from stepwell.types import TrainingError

EVENT, BUDGET = "overoptimisation", "kl_budget"


class Overopt:
    """Watches rewards that a model has learnt; all ranks see the same rollouts.

    state: of a checkpoint, empty at the start. kl: of the last rollout, nats an answer.
    """

    def __init__(self, session: Session, rewards: Rewards, state: Mapping[str, Any]):
        method = session.run.method
        assert isinstance(method, SampledMethod)
        self.session, self.method = session, method
        learnt = any(d.scorer.is_model and d.term.weight for d in rewards.dimensions)
        self.watches = learnt and method.overopt != "ignore"
        self.watch = Watch(method.overopt_window)
        self.alarm: Alarm | None = None
        self.kl: float | None = None
        self.load(state)

    def load(self, state: Mapping[str, Any]) -> None:
        self.watch = Watch(self.method.overopt_window)
        self.watch.load(state)
        self.alarm = None

    def state(self) -> dict[str, Any]:
        return self.watch.state() if self.watches else {}

    def see(self, rollouts: Rollouts, kl: float | None) -> dict[str, float]:
        """What the rollout's lines say of it."""
        self.alarm, self.kl = None, kl
        found = {} if kl is None else {"kl/reference": kl}
        reading = read(rollouts, kl) if self.watches else None
        if reading is None:
            return found
        self.alarm = self.watch.see(self.session.engine.step, reading)
        if reading.disagreement is not None:
            found["reward/disagreement"] = reading.disagreement
        if reading.agreement is not None:
            found["reward/agreement"] = reading.agreement
        if reading.spread is not None:
            found["reward/spread"] = reading.spread
        return {**found, "rollout/repetition": reading.repetition, **self.watch.metrics()}

    def next_coef(self, coef: float) -> float:
        """Of the divergence in the next rollout: with over_budget "raise" it grows while the
        divergence is over its budget, and never falls."""
        if self.kl is None or self.method.over_budget != "raise":
            return coef
        return raised(coef, self.kl, self.method.kl_budget)

    def after_rollout(self, stream: RolloutStream, extra: dict[str, Any]) -> None:
        """`stream.after_step`, and what is to be done about the rollout just trained on. Raises
        TrainingError with all saved where the method says to stop."""
        why = self._trouble()
        stream.after_step(extra, save=why is not None)
        if why is not None:
            self.session.wait()
            raise TrainingError(f"{why} The checkpoint of step {self.session.engine.step} is saved")

    def check_stopped(self) -> None:
        """Raises TrainingError where the checkpoint that the run goes on from was saved because of
        an alarm that was to stop it."""
        if self.watches and self.watch.alarmed and self.method.overopt == "stop":
            raise TrainingError(
                f"the run was stopped at step {self.session.engine.step} because its reward may be "
                f"over-optimised (event {EVENT!r} in events.jsonl); --method.overopt warn goes on"
            )

    def _trouble(self) -> str | None:
        """Why the run has to end, with the events written."""
        step = self.session.engine.step
        if self.alarm is not None:
            signs = {k: shift._asdict() for k, shift in self.alarm.signs.items()}
            details = {"reward": self.alarm.reward._asdict(), "signs": signs}
            text, window = self.alarm.text(), self.alarm.window
            self.session.log.event(EVENT, step, advice=text, window=window, **details)
            if self.method.overopt == "stop":
                return f"{text}. --method.overopt warn only reports it."
        budget = self.method.kl_budget
        if budget and self.kl is not None and self.kl > budget:
            self.session.log.event(BUDGET, step, kl=self.kl, budget=budget)
            if self.method.over_budget == "stop":
                return (
                    f"the divergence from the reference is {self.kl:.4g} nats an answer, over "
                    f"method.kl_budget={budget:g}; take the weights as they are, or go on from "
                    "them in another dir (checkpoint.branch_from) with a larger method.kl_coef or "
                    "budget (method.over_budget='raise' raises the coefficient instead)."
                )
        return None


def divergence(answers: Sequence[Answer]) -> float | None:
    """KL of the sampling policy from the reference, nats an answer: the mean of the sampled tokens'
    sum of k1. None without answers."""
    trained = [a for a in answers if a.num_trained]
    sums = [float((a.streams[SAMPLER] - a.streams[REFERENCE]).sum()) for a in trained]
    return sum(sums) / len(sums) if sums else None
