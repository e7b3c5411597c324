"""What pairs of answers are trained with: the table `method.loss`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from stepwell.schema import Above0, AtLeast0, Flag, Section

PairLoss = Literal["dpo", "robust", "ipo", "hinge", "kto", "simpo", "cpo", "orpo", "dpop"]
# Kinds that compare with no reference.
REFERENCE_FREE = ("simpo", "cpo", "orpo")
# A key of PreferenceLoss -> the kinds that it changes anything in.
APPLIES_TO: dict[str, tuple[str, ...]] = {
    "label_smoothing": ("dpo", "robust"),
    "length_normalised": ("dpo", "robust", "ipo", "hinge", "cpo", "dpop"),
    "divergence": ("dpo", "robust", "hinge"),
    "margin": ("simpo",),
    "positive_coef": ("dpop",),
    "sft_coef": ("dpo", "robust", "ipo", "hinge", "simpo", "cpo", "orpo", "dpop"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


class PreferenceLoss(Section):
    """What pairs of answers (or labelled answers: kto) are trained with.

    dpo: 2305.18290; with label_smoothing conservative DPO; robust divides by 1 - 2 e (2403.00409).
    ipo: 2310.12036; hinge: SLiC-HF, 2305.10425; kto: 2402.01306; simpo: 2405.14734, with margin;
    cpo: 2401.08417; orpo: 2403.07691, beta its lambda; dpop: DPO-positive, 2402.13228, with
    positive_coef. length_normalised: log-probabilities are means over the answer's tokens.
    divergence: of the policy from the reference (f-DPO, 2309.16240); alpha: of the alpha
    divergence. sft_coef: adds that much of the chosen answer's mean negative log-likelihood (RPO,
    2404.19733); none is 1 in cpo and orpo, which contain it, and 0 in the others.
    """

    kind: PairLoss = "dpo"
    beta: Above0 = 0.1
    label_smoothing: Annotated[float, Field(strict=True, ge=0, lt=0.5)] = 0.0
    length_normalised: Flag = False
    divergence: Literal["reverse-kl", "forward-kl", "js", "alpha"] = "reverse-kl"
    alpha: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.5
    margin: AtLeast0 = 0.5
    positive_coef: AtLeast0 = 50.0
    sft_coef: AtLeast0 | None = None
    desirable_weight: Above0 = 1.0
    undesirable_weight: Above0 = 1.0

    @property
    def sft_weight(self) -> float:
        if self.sft_coef is None:
            return float(self.kind in ("cpo", "orpo"))
        return self.sft_coef

    @property
    def needs_reference(self) -> bool:
        return self.kind not in REFERENCE_FREE

    @model_validator(mode="after")
    def _rules(self) -> PreferenceLoss:
        for key, kinds in APPLIES_TO.items():
            value, default = getattr(self, key), PreferenceLoss.model_fields[key].default
            if value != default and self.kind not in kinds:
                why = " (it always takes means)" if self.kind in ("simpo", "orpo") else ""
                raise ValueError(
                    f"method.loss.{key}={value!r} changes nothing in kind {self.kind!r}"
                    f"{why if key == 'length_normalised' else ''}: it belongs to "
                    f"{', '.join(kinds)}; leave it at {default!r}"
                )
        if self.alpha != 0.5 and self.divergence != "alpha":
            raise ValueError(
                f"method.loss.alpha={self.alpha:g} belongs to divergence 'alpha', not "
                f"{self.divergence!r}; leave it at 0.5"
            )
        if self.kind == "robust" and self.label_smoothing == 0:
            raise ValueError(
                "method.loss.kind='robust' corrects for a share of wrong labels, and "
                "method.loss.label_smoothing=0.0 says there are none: set that share (e.g. 0.1), "
                "or take kind 'dpo'"
            )
        return self


class PairsLoss(PreferenceLoss):
    """Of pairs alone, which is all that online-dpo makes: not kto, with its labelled answers."""

    kind: Literal["dpo", "robust", "ipo", "hinge", "simpo", "cpo", "orpo", "dpop"] = "dpo"
    desirable_weight: ClassVar[float] = 1.0
    undesirable_weight: ClassVar[float] = 1.0
