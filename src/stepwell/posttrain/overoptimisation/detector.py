"""An alarm for over-optimised rewards that needs no gold reward: it compares the last rollouts with
the run's first ones.

What it looks at: how far several reward models disagree about the policy's answers (2310.02743,
2312.09244), the answers' length (2310.03716) and repetition, and the divergence from the reference
(2210.10760). The last three may be what the task asks for: lab `reward`, where gold itself is
optimised, moves two of them. What tells is whether there is still something to gain. In a policy
that is the first one tilted by exp(reward x), the reward rises with x at its variance. Once it
hardly varies between the answers to a prompt, or several models no longer agree on which of them is
better, a policy that moves on follows the reward's errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from stepwell.posttrain.rollout import Rollouts

SPAN = 16
# A change counts if it is so many standard errors,
LEAST_T = 3.0
# the disagreement so many times what it was, and its growth so much of each unit of reward gained,
LEAST_DISAGREEMENT = 1.5
LEAST_SHARE = 0.1
# the models' rank correlation at most such a part of what it was,
MOST_AGREEMENT = 0.5
# the reward's spread between a prompt's answers at most such a part of what it was,
MOST_SPREAD = 1 / 3
# the mean length so many times, or a part of, what it was,
LEAST_LENGTH = 1.5
# the share of repeated tokens so much more,
LEAST_REPETITION = 0.1
# and the divergence so many nats an answer more.
LEAST_KL = 5.0
STRONG = ("disagreement", "agreement")
WEAK = ("spread", "length", "repetition", "kl")
NUM_WEAK = 2


class Reading(NamedTuple):
    """Means over a rollout's rewarded answers. length: in tokens of the policy. repetition: the
    share of an answer's tokens that also stand among the 16 before them. kl: nats an answer from
    the reference, None without one. disagreement: of several reward models, in the reward's unit;
    agreement: the rank correlation of their scores (see `agreement`). Both are None where there
    aren't several. spread: the standard deviation of the reward (see `spread`)."""

    reward: float
    length: float
    repetition: float
    kl: float | None = None
    disagreement: float | None = None
    agreement: float | None = None
    spread: float | None = None


class Shift(NamedTuple):
    """A mean over the run's first rollouts, over the last ones, and the difference over its
    standard error (Welch's)."""

    before: float
    now: float
    t: float

    @property
    def gain(self) -> float:
        return self.now - self.before


class Alarm(NamedTuple):
    """step: of the optimiser. signs: what was seen, by name. reward: of the proxy."""

    step: int
    window: int
    reward: Shift
    signs: dict[str, Shift]

    def text(self) -> str:
        """What was seen, and what to do next."""
        return (
            f"the reward may be over-optimised: over the last {self.window} rollouts it is "
            f"{self.reward.gain:.3g} above where it began, while "
            + "; ".join(_words(name, shift) for name, shift in self.signs.items())
            + ". Next: read the last answers of samples.jsonl; keep the policy nearer "
            "(method.kl_budget, a larger method.kl_coef, fewer steps, or --method.overopt stop); "
            "take the worst of several reward models, if they err apart (source model:A,B with "
            "aggregate = 'min'); bound the score by the term's low and high; add a dimension for "
            "what is gamed (repetition:3, overlong:LIMIT:CACHE); or label the latest answers and "
            "train the reward model anew"
        )


@dataclass
class Watch:
    """`see` says once when the mean reward of the last `window` rollouts is clearly above that of
    the first `window`, and there is a strong sign, or two weak ones, of which one is the spread or,
    with a single reward model, the length."""

    window: int
    start: list[Reading] = field(default_factory=list)
    recent: list[Reading] = field(default_factory=list)
    alarmed: bool = False

    def see(self, step: int, reading: Reading) -> Alarm | None:
        if not all(math.isfinite(x) for x in reading if x is not None):
            return None
        if len(self.start) < self.window:
            self.start = [*self.start, reading]
            return None
        self.recent = [*self.recent, reading][-self.window :]
        if self.alarmed or len(self.recent) < self.window:
            return None
        reward, signs = self._shift("reward"), self.signs()
        assert reward is not None
        strong = any(name in STRONG for name in signs)
        several = any(r.disagreement is not None for r in (*self.start, *self.recent))
        telling = "spread" in signs or ("length" in signs and not several)
        weak = telling and sum(name in WEAK for name in signs) >= NUM_WEAK
        self.alarmed = bool(reward.t > LEAST_T and (strong or weak))
        return Alarm(step, self.window, reward, signs) if self.alarmed else None

    def signs(self) -> dict[str, Shift]:
        """What is to be seen, by name; nothing until there are two windows."""
        if len(self.recent) < self.window:
            return {}
        shifts = {name: self._shift(name) for name in (*STRONG, *WEAK)}
        reward = self._shift("reward")
        gained = 0.0 if reward is None else reward.gain
        return {
            name: shift
            for name, shift in shifts.items()
            if shift is not None and is_sign(name, shift, gained)
        }

    def metrics(self) -> dict[str, float]:
        """overopt/signs: how many there are. overopt/NAME: over what it was at the beginning, for
        repetition and kl as a difference, else as a ratio."""
        if len(self.recent) < self.window:
            return {}
        found: dict[str, float] = {"overopt/signs": len(self.signs())}
        for name in (*STRONG, *WEAK):
            shift = self._shift(name)
            if shift is None:
                continue
            if name in ("repetition", "kl"):
                found[f"overopt/{name}"] = shift.gain
            elif shift.before > 0:
                found[f"overopt/{name}"] = shift.now / shift.before
        return found

    def state(self) -> dict[str, Any]:
        return {
            "start": [list(reading) for reading in self.start],
            "recent": [list(reading) for reading in self.recent],
            "alarmed": self.alarmed,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.start = [Reading(*values) for values in state.get("start", [])]
        self.recent = [Reading(*values) for values in state.get("recent", [])]
        self.alarmed = state.get("alarmed", False)

    def _shift(self, name: str) -> Shift | None:
        """None where a rollout had no such number."""
        before, now = ([getattr(r, name) for r in part] for part in (self.start, self.recent))
        if None in before or None in now:
            return None
        return shift(before, now)


def is_sign(name: str, shift: Shift, reward_gain: float = 0.0) -> bool:
    """Whether a change is clear, and large enough to speak of over-optimisation. reward_gain: of
    the proxy since the beginning."""
    if name == "length":
        larger = max(shift.now, shift.before) >= LEAST_LENGTH * min(shift.now, shift.before)
        return abs(shift.t) > LEAST_T and larger
    if name in ("agreement", "spread"):
        most = MOST_AGREEMENT if name == "agreement" else MOST_SPREAD
        return shift.t < -LEAST_T and shift.now <= most * max(shift.before, 0.0)
    if shift.t <= LEAST_T:
        return False
    if name == "disagreement":
        enough = shift.gain >= LEAST_SHARE * max(reward_gain, 0.0)
        return enough and shift.now >= LEAST_DISAGREEMENT * shift.before
    return shift.gain >= (LEAST_REPETITION if name == "repetition" else LEAST_KL)


def shift(before: Sequence[float], now: Sequence[float]) -> Shift:
    """t is infinite where neither varies, and 0 where nothing has moved."""
    x, y = np.asarray(before, np.float64), np.asarray(now, np.float64)
    gain = float(y.mean() - x.mean())
    error = math.sqrt(x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y))
    scale = max(abs(float(x.mean())), abs(float(y.mean())))
    if abs(gain) <= 1e-12 * scale:
        return Shift(float(x.mean()), float(y.mean()), 0.0)
    t = gain / error if error > 1e-12 * scale else math.copysign(math.inf, gain)
    return Shift(float(x.mean()), float(y.mean()), t)


def read(rollouts: Rollouts, kl: float | None = None) -> Reading | None:
    """Of all ranks' answers that have a reward; None without any."""
    groups = [
        [
            (completion, verdict)
            for completion, verdict in zip(group.completions, group.verdicts, strict=True)
            if verdict.reward is not None
        ]
        for group in rollouts.groups
    ]
    pairs = [pair for group in groups for pair in group]
    if not pairs:
        return None
    spreads = [verdict.disagreement for _, verdict in pairs]
    known = [spread for spread in spreads if spread is not None]
    answers = [
        [token for token, mine in zip(c.token_ids, c.mask, strict=True) if mine] for c, _ in pairs
    ]
    return Reading(
        reward=float(np.mean([v.reward for _, v in pairs if v.reward is not None])),
        length=float(np.mean([len(answer) for answer in answers])),
        repetition=float(np.mean([repeated_share(answer) for answer in answers])),
        kl=kl,
        disagreement=float(np.mean(known)) if len(known) == len(spreads) else None,
        agreement=agreement([[verdict.members for _, verdict in group] for group in groups]),
        spread=spread([[v.reward for _, v in group if v.reward is not None] for group in groups]),
    )


def spread(rewards_GD: Sequence[Sequence[float]]) -> float | None:
    """The standard deviation of the rewards of the D answers to each of G prompts about the
    prompt's mean; where no prompt has two answers, of all. None for fewer than two."""
    several = [group for group in rewards_GD if len(group) > 1]
    groups = several or [[reward for group in rewards_GD for reward in group]]
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < 1:
        return None
    return math.sqrt(sum(float(np.var(group)) * len(group) for group in groups) / freedom)


def agreement(members_GDK: Sequence[Sequence[Sequence[float]]]) -> float | None:
    """Spearman's correlation of K models' scores over the D answers to each of G prompts, the mean
    of all pairs of models: whether they still rank answers alike, whatever their units, constants
    and outliers. Where no prompt has two answers, ranks are those among all answers.

    None for fewer than two models or three answers, and where a model tells no answers apart.
    """
    several = [group for group in members_GDK if len(group) > 1]
    groups = several or [[scores for group in members_GDK for scores in group]]
    num_models = {len(scores) for group in groups for scores in group}
    if len(num_models) != 1 or min(num_models) < 2 or sum(map(len, groups)) < 3:
        return None
    ranks_DK = np.concatenate([_centred_ranks(group) for group in groups])
    if (np.ptp(ranks_DK, axis=0) == 0).any():
        return None
    correlations = np.corrcoef(ranks_DK.T)
    return float(correlations[np.triu_indices(len(correlations), 1)].mean())


def _centred_ranks(scores_DK: Sequence[Sequence[float]]) -> np.ndarray:
    """Of each model among the D answers, ties shared, from -0.5 to 0.5."""
    ranks_DK = rankdata(np.asarray(scores_DK, np.float64), axis=0)
    return (ranks_DK - (len(ranks_DK) + 1) / 2) / len(ranks_DK)


def repeated_share(tokens: Sequence[int], span: int = SPAN) -> float:
    """The share of tokens that also stand among the `span` before them. Within a fixed span it
    hardly grows with length (Covington and McFall 2010, moving-average type-token ratio)."""
    again = [token in tokens[max(i - span, 0) : i] for i, token in enumerate(tokens)]
    return sum(again) / len(again) if again else 0.0


def _words(name: str, shift: Shift) -> str:
    before, now = f"{shift.before:.3g}", f"{shift.now:.3g}"
    return {
        "disagreement": f"reward models disagree by {now} about an answer, at first by {before}",
        "agreement": f"reward models' ranks of answers correlate by {now}, at first by {before}",
        "spread": f"the reward varies by {now} between a prompt's answers, at first by {before}",
        "length": f"answers have {now} tokens, at first {before}",
        "repetition": f"a share of {now} of tokens repeats one of the 16 before, at first {before}",
        "kl": f"the divergence from the reference is {now} nats an answer, at first {before}",
    }[name]
