"""The mixture that fitted laws point to, within caps on repetition, and how sure that is.

D domains, O outcomes, S draws of the bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.mix.design import proportions
from stepwell.mix.fit import (
    Law,
    LogLinear,
    Quality,
    Trees,
    bootstrap,
    cross_validate,
    fit,
    measure,
)
from stepwell.types import ConfigError, DataError

# Up to 4 epochs, repeated data are nearly as good as new ones (2305.16264).
MAX_EPOCHS = 4.0
NUM_DRAWS = 200
# A 5 % quantile of fewer is none.
LEAST_DRAWS = 20
NUM_CANDIDATES = 4096
# What counts as another weight than the natural one.
MOVED = 0.01


@dataclass(frozen=True)
class DomainProposal:
    """natural, proposed: weights. low, high: 5 and 95 % of the bootstrap's optima. share_up,
    share_down: of these optima above and below the natural weight. cap: the largest weight that
    max_epochs allows. epochs: of the proposed weight. effect: nats that the target would change by
    for a hundredth more of this domain and proportionally less of the others, at the natural
    mixture."""

    name: str
    unique_tokens: int
    natural: float
    proposed: float
    low: float
    high: float
    share_up: float
    share_down: float
    cap: float
    epochs: float
    effect: float


@dataclass(frozen=True)
class Proposal:
    """decision: "proposed", or "natural" where the gain is inside the noise; `why` says so.

    target losses are in nats, predicted. gain: their difference less `optimism`, by which an
    optimum looks better than it is to the law that it was chosen by (the mean over the bootstrap's
    draws of what the drawn law promises of its own optimum less what the law drawn from says of it;
    Efron, 1983). gain_low, gain_high: 5 and 95 % of the gain by these draws.
    noise: standard deviation of the target's error when a run is left out of the fit. seed_noise:
    of the copies of one mixture, which differ in their seeds only (None without copies).
    predicted_runs: the target of each run, predicted without it; spearman: their rank correlation
    with what was measured.
    """

    law: Law
    num_runs: int
    total_tokens: int
    targets: dict[str, float]
    domains: tuple[DomainProposal, ...]
    natural_loss: float
    proposed_loss: float
    gain: float
    optimism: float
    gain_low: float
    gain_high: float
    noise: float
    seed_noise: float | None
    spearman: float
    predicted_runs: tuple[float, ...]
    decision: str
    why: str

    @property
    def weights(self) -> dict[str, float]:
        """What is recommended, by domain."""
        return {
            domain.name: domain.proposed if self.decision == "proposed" else domain.natural
            for domain in self.domains
        }


def propose(
    names: Sequence[str],
    unique_tokens: Sequence[int],
    mixtures_RD: np.ndarray,
    losses_RO: np.ndarray,
    targets: dict[str, float],
    total_tokens: int,
    max_epochs: Sequence[float | None] | None = None,
    law: Law = "log-linear",
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    default_epochs: float = MAX_EPOCHS,
) -> Proposal:
    """The mixture with the lowest predicted target, the mean of the outcomes weighted by `targets`
    (name of each outcome, in their order -> weight).

    It stays within the range of weights that the runs have seen, and every domain is read at most
    max_epochs times (None: default_epochs) in total_tokens. The natural mixture (by size, within
    the same caps) is kept unless the gain is positive in 95 % of the draws and above the noise.
    Raises DataError where the caps leave no mixture, ConfigError for unusable targets, caps, draws.
    """
    target_O = _target(targets)
    if num_draws < LEAST_DRAWS:
        raise ConfigError(
            f"draws={num_draws} of the bootstrap have no 5 % quantile; the fewest is {LEAST_DRAWS}"
        )
    max_epochs = [None] * len(names) if max_epochs is None else max_epochs
    epochs = [default_epochs if most is None else most for most in max_epochs]
    caps_D = repetition_caps(unique_tokens, total_tokens, epochs)
    check_caps(caps_D, names, unique_tokens, total_tokens, max_epochs, default_epochs)
    natural_D = within(proportions(unique_tokens), np.zeros(len(names)), caps_D)
    low_D = np.minimum(mixtures_RD.min(0), natural_D)
    high_D = np.minimum(np.maximum(mixtures_RD.max(0), natural_D), caps_D)
    quality = cross_validate(law, mixtures_RD, losses_RO, seed)
    best = fit(law, mixtures_RD, losses_RO, seed)
    proposed_D = optimum(best, target_O, low_D, high_D, natural_D, seed)
    draws = list(bootstrap(law, mixtures_RD, losses_RO, quality, num_draws, seed))
    optima_SD = np.stack(
        [optimum(drawn, target_O, low_D, high_D, proposed_D, seed) for drawn in draws]
    )
    both = np.stack([natural_D, proposed_D])
    natural_loss, proposed_loss = (best.predict(both) @ target_O).tolist()
    optimism_S = optimism(best, draws, optima_SD, natural_D, target_O)
    gains_S = natural_loss - proposed_loss - optimism_S
    noise, spearman = target_quality(quality, losses_RO, target_O)
    seed_noise = spread_of_copies(mixtures_RD, losses_RO @ target_O)
    gain_low, gain_high = np.percentile(gains_S, [5, 95]).tolist()
    gain = float(gains_S.mean())
    decision, why = decide(gain, gain_low, max(noise, seed_noise or 0.0), spearman)
    effect_D = effects(best, target_O, natural_D)
    edges = np.percentile(optima_SD, [5, 95], axis=0)
    domains = tuple(
        DomainProposal(
            name=name,
            unique_tokens=int(unique_tokens[d]),
            natural=float(natural_D[d]),
            proposed=float(proposed_D[d]),
            low=float(edges[0, d]),
            high=float(edges[1, d]),
            share_up=float((optima_SD[:, d] > natural_D[d] + MOVED).mean()),
            share_down=float((optima_SD[:, d] < natural_D[d] - MOVED).mean()),
            cap=float(caps_D[d]),
            epochs=float(proposed_D[d] * total_tokens / unique_tokens[d]),
            effect=float(effect_D[d]),
        )
        for d, name in enumerate(names)
    )
    return Proposal(
        law=law,
        num_runs=len(mixtures_RD),
        total_tokens=total_tokens,
        targets=dict(targets),
        domains=domains,
        natural_loss=natural_loss,
        proposed_loss=proposed_loss,
        gain=gain,
        optimism=float(optimism_S.mean()),
        gain_low=gain_low,
        gain_high=gain_high,
        noise=noise,
        seed_noise=seed_noise,
        spearman=spearman,
        predicted_runs=tuple((quality.predicted_RO @ target_O).tolist()),
        decision=decision,
        why=why,
    )


def repetition_caps(
    unique_tokens: Sequence[int], total_tokens: int, max_epochs: Sequence[float]
) -> np.ndarray:
    """The largest weight of each domain (at most 1): weight * total <= epochs * unique tokens.
    Raises ConfigError for a cap that is no positive number."""
    for most in max_epochs:
        if not (math.isfinite(most) and most > 0):
            raise ConfigError(
                f"max_epochs={most:g} must be a positive number; the nearest usual value is "
                f"{MAX_EPOCHS:g}"
            )
    return np.minimum(1.0, np.asarray(max_epochs) * np.asarray(unique_tokens) / total_tokens)


def check_caps(
    caps_D: np.ndarray,
    names: Sequence[str],
    unique_tokens: Sequence[int],
    total_tokens: int,
    max_epochs: Sequence[float | None],
    default_epochs: float,
) -> None:
    """Raises DataError where the caps leave no mixture, with what would: a larger default for the
    domains that the recipe leaves to it, or larger caps of all where it leaves none."""
    if caps_D.sum() >= 1 - 1e-9:
        return
    most = math.floor(caps_D.sum() * total_tokens)
    free = [d for d, epochs in enumerate(max_epochs) if epochs is None]
    if free:
        fixed = sum(caps_D[d] for d in range(len(names)) if d not in free)
        needed = (1 - fixed) * total_tokens / sum(unique_tokens[d] for d in free)
        advice = f"raise --max-epochs to {_rounded_up(needed)} from {default_epochs:g}"
    else:
        advice = f"multiply the recipe's max_epochs by {_rounded_up(1 / float(caps_D.sum()))}"
    raise DataError(
        f"{total_tokens:,} tokens cannot be read from {', '.join(names)} within their caps on "
        f"epochs; the most is {most:,} (lower --tokens, or {advice})"
    )


def _rounded_up(number: float) -> str:
    return f"{math.ceil(number * 100 - 1e-9) / 100:g}"


def optimism(
    best: LogLinear | Trees,
    draws: Sequence[LogLinear | Trees],
    optima_SD: np.ndarray,
    natural_D: np.ndarray,
    target_O: np.ndarray,
) -> np.ndarray:
    """(S): how much more each drawn law promises of its own optimum than the law that its data were
    drawn from, which is the truth there."""
    out = []
    for drawn, optimum_D in zip(draws, optima_SD, strict=True):
        both = np.stack([natural_D, optimum_D])
        promised, true = (-np.diff(law.predict(both) @ target_O)[0] for law in (drawn, best))
        out.append(promised - true)
    return np.array(out)


def spread_of_copies(mixtures_RD: np.ndarray, targets_R: np.ndarray) -> float | None:
    """Pooled standard deviation of runs on the same mixture; None where no mixture has two."""
    _, group_R = np.unique(mixtures_RD.round(6), axis=0, return_inverse=True)
    groups = [targets_R[group_R.ravel() == g] for g in range(group_R.max() + 1)]
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return None
    return math.sqrt(sum(((group - group.mean()) ** 2).sum() for group in groups) / freedom)


def _target(targets: dict[str, float]) -> np.ndarray:
    weights_O = np.array(list(targets.values()), np.float64)
    if not len(weights_O) or not np.isfinite(weights_O).all() or weights_O.min() < 0:
        raise ConfigError(f"targets must have weights of 0 or more, not {targets}")
    if weights_O.sum() == 0:
        raise ConfigError(f"no target has a weight above 0 ({', '.join(targets)}); give one 1")
    return weights_O / weights_O.sum()


def within(mixtures: np.ndarray, low_D: np.ndarray, high_D: np.ndarray) -> np.ndarray:
    """Mixtures (..., D) with their weights scaled by one factor each until, cut at low and high,
    they sum to 1: what a cap takes from a domain goes to the others by their weights. Needs
    sum(low) <= 1 <= sum(high)."""
    spread = np.maximum(mixtures, 1e-12)
    least = np.zeros((*spread.shape[:-1], 1))
    most = np.full_like(least, 1e13)  # enough for a weight of nothing to reach any cap
    for _ in range(100):
        middle = np.sqrt(np.maximum(least, 1e-3) * most)
        below = np.clip(spread * middle, low_D, high_D).sum(-1, keepdims=True) < 1
        least, most = np.where(below, middle, least), np.where(below, most, middle)
    return np.clip(spread * most, low_D, high_D)


def optimum(
    law: LogLinear | Trees,
    target_O: np.ndarray,
    low_D: np.ndarray,
    high_D: np.ndarray,
    start_D: np.ndarray,
    seed: int = 0,
) -> np.ndarray:
    """The mixture between low and high with the lowest target.

    The log-linear law is convex in the mixture, so its optimum is the only one. Trees are searched
    by random mixtures; the best hundredth is averaged (RegMix, 2407.01492)."""
    if isinstance(law, LogLinear):
        return _convex_optimum(law, target_O, low_D, high_D, start_D)
    generator = np.random.default_rng(seed)
    drawn = generator.dirichlet(np.ones(len(low_D)), NUM_CANDIDATES)
    candidates = within(drawn, low_D, high_D)
    losses = law.predict(candidates) @ target_O
    best = candidates[np.argsort(losses, kind="stable")[: NUM_CANDIDATES // 100]]
    return within(best.mean(0), low_D, high_D)


def _convex_optimum(
    law: LogLinear,
    target_O: np.ndarray,
    low_D: np.ndarray,
    high_D: np.ndarray,
    start_D: np.ndarray,
) -> np.ndarray:
    from scipy.optimize import minimize

    found = minimize(
        lambda mixture_D: float(law.predict(mixture_D)[0] @ target_O),
        within(start_D, low_D, high_D),
        jac=lambda mixture_D: target_O @ law.gradients(mixture_D),
        bounds=list(zip(low_D, high_D, strict=True)),
        constraints={"type": "eq", "fun": lambda m: m.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-10},
    )
    return within(np.clip(found.x, low_D, high_D), low_D, high_D)


def target_quality(
    quality: Quality, losses_RO: np.ndarray, target_O: np.ndarray
) -> tuple[float, float]:
    """(noise in nats, rank correlation) of the target's predictions for runs left out."""
    found = measure((quality.predicted_RO @ target_O)[:, None], (losses_RO @ target_O)[:, None])
    return float(found.rmse_O[0]), float(found.spearman_O[0])


def decide(gain: float, gain_low: float, noise: float, spearman: float) -> tuple[str, str]:
    """(decision, why). The proposal must beat the natural mixture by more than the noise of two
    predictions (sqrt(2) times that of one), in 95 % of the draws, under a law that ranks runs it
    has not seen better than chance. Raises DataError for numbers that are not finite."""
    numbers = (gain, gain_low, noise)
    if not all(map(math.isfinite, numbers)):
        raise DataError(
            f"no decision can rest on a gain of {gain} ({gain_low} at its 5 % quantile) and a "
            f"noise of {noise}: all must be finite; look at the losses in runs.csv"
        )
    if not spearman > 0:
        return "natural", (
            f"the law ranks runs it has not seen no better than chance (rank correlation "
            f"{spearman:.2f})"
        )
    if gain_low <= 0:
        return "natural", (
            f"the gain of {gain:.4f} nats may be none: its 5 % quantile is {gain_low:.4f}"
        )
    if gain <= math.sqrt(2) * noise:
        return "natural", (
            f"the gain of {gain:.4f} nats is inside the noise of a difference of two predictions, "
            f"{math.sqrt(2) * noise:.4f}"
        )
    return "proposed", (
        f"the gain of {gain:.4f} nats is above the noise of a difference of two predictions, "
        f"{math.sqrt(2) * noise:.4f}, and its 5 % quantile is {gain_low:.4f}"
    )


def effects(law: LogLinear | Trees, target_O: np.ndarray, mixture_D: np.ndarray) -> np.ndarray:
    """Change of the target (nats) for a hundredth more of each domain, less of the others."""
    before = float((law.predict(mixture_D) @ target_O)[0])
    out = np.zeros(len(mixture_D))
    for d in range(len(mixture_D)):
        moved = mixture_D * (1 - MOVED)
        moved[d] += MOVED
        out[d] = float((law.predict(moved) @ target_O)[0]) - before
    return out
