"""How far the policy that sampled is from the policy that is trained, on the sampled tokens.

The two differ by rounding, by updates in between (stale weights), or because the sampler chose from
another distribution (truncated support, another temperature). Always measured; corrected by
truncated importance weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepwell.generate import Sampling
from stepwell.parallel.mesh import Mesh, all_reduce_max, all_reduce_sum
from stepwell.types import ConfigError

# Beyond these a warning is due. A sampler in bfloat16 beside a trainer in float32 stays at about a
# tenth of each.
MAX_KL = 0.01
MIN_SAMPLE_SHARE = 0.9
MAX_RATIO_BIAS = 0.05


def importance_weights(logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """min(p_trainer / p_sampler, cap), element-wise and without gradient: what each token's policy
    loss is multiplied by (truncated importance sampling, Ionides 2008; between sampler and trainer:
    Yao et al. 2025, fengyao.notion.site/off-policy-rl). cap 0: ones.

    logprobs: the trainer's, at the sampling temperature, before the rollout's first update.
    """
    if cap == 0:
        return torch.ones_like(logprobs)
    with torch.no_grad():
        return (logprobs - sampler_logprobs).exp().clamp(max=cap)


def check_replayable(sampling: Sampling) -> None:
    """Raises ConfigError for samples whose probabilities the trainer can't compute again: it takes
    the temperature, but normalises over the whole vocabulary."""
    if sampling.temperature == 0:
        raise ConfigError(
            "temperature=0 takes the likeliest token always, so a group has one answer and no "
            "gradient; choose a temperature above 0 (1 is usual)"
        )
    for name, value, whole in (("top_k", sampling.top_k, 0), ("top_p", sampling.top_p, 1.0)):
        if value != whole:
            raise ConfigError(
                f"{name}={value} samples from a part of the vocabulary, but the trainer's "
                f"probabilities are over all of it; the only value to train with is {name}={whole}"
            )


@dataclass(frozen=True)
class Agreement:
    """Over the sampled tokens of a step. max_abs, mean_abs: of the difference of log-probabilities.
    kl: of the sampler from the trainer (k3 estimate, >= 0), nats a token. ratio: the mean of
    p_trainer / p_sampler, 1 when both are over one support. sample_share: the effective sample size
    (sum w)^2 / sum w^2 of these ratios, as a share of the tokens.
    """

    num_tokens: int
    max_abs: float
    mean_abs: float
    kl: float
    ratio: float
    sample_share: float

    def metrics(self) -> dict[str, float]:
        return {
            "sampler/max_abs": self.max_abs,
            "sampler/mean_abs": self.mean_abs,
            "sampler/kl": self.kl,
            "sampler/ratio": self.ratio,
            "sampler/sample_share": self.sample_share,
        }

    def warning(self, staleness: int, max_kl: float = MAX_KL) -> str | None:
        """What is wrong and the likeliest reason; None if nothing is. staleness: how many updates
        the sampling weights lag behind."""
        wrong = []
        if not self.kl <= max_kl:
            wrong.append(f"a divergence of {self.kl:.3g} nats a token (at most {max_kl:g})")
        if not self.sample_share >= MIN_SAMPLE_SHARE:
            wrong.append(
                f"an effective sample size of {self.sample_share:.1%} (at least "
                f"{MIN_SAMPLE_SHARE:.0%})"
            )
        # A mean of ratios scatters by its standard error; three of them are no accident.
        spread = max(1 / self.sample_share - 1, 0.0) ** 0.5 if self.sample_share else 0.0
        scatter = 3 * self.ratio * spread / max(self.num_tokens, 1) ** 0.5
        biased = abs(self.ratio - 1) > MAX_RATIO_BIAS + scatter
        if biased:
            wrong.append(f"a mean ratio of {self.ratio:.3g} (1 over one support)")
        if not wrong:
            return None
        if staleness > 0:
            reason = (
                f"stale weights: they lag {staleness} updates behind; lower method.max_staleness, "
                "method.updates_per_rollout or optim.lr"
            )
        elif biased:
            reason = (
                "support: the sampler's distribution is not over the trainer's vocabulary (top-p, "
                "top-k, a penalty or a masked token)"
            )
        else:
            reason = (
                "precision: the same weights in other arithmetic; sample in the trainer's "
                "precision.compute"
            )
        return f"sampler and trainer disagree: {', '.join(wrong)}. Likely {reason}"


@dataclass
class Gauge:
    """Adds up what a loss sees, micro-batch by micro-batch; `read` ends a step."""

    sums: list[Tensor] = field(default_factory=list)
    maxima: list[Tensor] = field(default_factory=list)
    whole_rows: bool = False

    @torch.no_grad()
    def add(
        self,
        logprobs_BT: Tensor,
        sampler_logprobs_BT: Tensor,
        weights_BT: Tensor,
        whole_rows: bool = False,
    ) -> None:
        """Tokens with a weight count once each. whole_rows: as the loss has it, so that all context
        ranks see the same tokens."""
        self.whole_rows = whole_rows
        seen = weights_BT != 0
        log_ratio = (logprobs_BT - sampler_logprobs_BT).detach()[seen].double()
        ratio = log_ratio.exp()
        parts = [
            torch.ones_like(ratio),
            log_ratio.abs(),
            torch.expm1(log_ratio) - log_ratio,
            ratio,
            ratio.square(),
        ]
        self.sums.append(torch.stack([part.sum() for part in parts]))
        if log_ratio.numel():
            self.maxima.append(log_ratio.abs().amax())

    def read(self, mesh: Mesh) -> Agreement:
        """Over all ranks, the same on every rank, which must call it together; begins anew."""
        zero = torch.zeros((), dtype=torch.float64)
        sums = torch.stack([part.cpu() for part in self.sums]).sum(0) if self.sums else zero
        place = mesh.place
        counts = place.tp == 0 and (place.cp == 0 or not self.whole_rows)  # others saw the same
        sums = sums.expand(5).clone() if counts else torch.zeros(5, dtype=torch.float64)
        largest = torch.stack([zero, *(part.cpu() for part in self.maxima)]).amax()
        self.sums, self.maxima = [], []
        count, absolute, kl, ratio, square = all_reduce_sum(sums, mesh).tolist()
        largest = float(all_reduce_max(largest, mesh))
        if not count:
            return Agreement(0, 0.0, 0.0, 0.0, 1.0, 1.0)
        share = ratio**2 / (square * count) if square else 0.0
        return Agreement(int(count), largest, absolute / count, kl / count, ratio / count, share)
