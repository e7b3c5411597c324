"""A proposal as people and programs read it: which weights, why, and how sure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import tomli_w

from stepwell.mix.propose import DomainProposal, Proposal

SURE = 0.95


def as_json(proposal: Proposal) -> dict[str, Any]:
    return asdict(proposal) | {"weights": proposal.weights}


def as_text(proposal: Proposal) -> str:
    """A line a domain, then what they add up to."""
    head = (
        f"{'domain':<14}{'tokens':>14}{'natural':>9}{'proposed':>10}{'5-95 %':>15}{'epochs':>8}"
        f"{'cap':>7}  direction"
    )
    width = max([14, *(len(domain.name) + 2 for domain in proposal.domains)])
    head = head[:6].ljust(width) + head[14:]
    lines = [head, *(_line(domain, width) for domain in proposal.domains)]
    targets = ", ".join(f"{name} {weight:g}" for name, weight in proposal.targets.items())
    return "\n".join(
        [
            *lines,
            "",
            f"target ({targets}): {proposal.natural_loss:.4f} nats natural, "
            f"{proposal.proposed_loss:.4f} proposed; gain {proposal.gain:.4f} "
            f"({proposal.gain_low:.4f} to {proposal.gain_high:.4f}), less {proposal.optimism:.4f} "
            "by which a chosen optimum flatters itself",
            f"law: {proposal.law} from {proposal.num_runs} runs; of runs left out of the fit it "
            f"ranks the target at {proposal.spearman:.3f} and errs by {proposal.noise:.4f}"
            + (
                ""
                if proposal.seed_noise is None
                else f"; copies of a mixture differ by {proposal.seed_noise:.4f}"
            ),
            f"decision: the {proposal.decision} weights, because {proposal.why}",
        ]
    )


def _line(domain: DomainProposal, width: int) -> str:
    return (
        f"{domain.name:<{width}}{domain.unique_tokens:>14,}{domain.natural:>9.3f}"
        f"{domain.proposed:>10.3f}{f'{domain.low:.3f}-{domain.high:.3f}':>15}"
        f"{domain.epochs:>8.2f}{domain.cap:>7.2f}  {direction(domain)}"
    )


def direction(domain: DomainProposal) -> str:
    """Up, down or unsure, with the share of draws that say so and what moves the target."""
    share, word = max((domain.share_up, "up"), (domain.share_down, "down"))
    said = f"{word} in {share:.0%} of draws" if share >= SURE else "unsure"
    if share < SURE:
        said += f" (up in {domain.share_up:.0%}, down in {domain.share_down:.0%})"
    capped = "; at its cap" if domain.proposed > domain.cap - 1e-4 and domain.cap < 1 else ""
    return f"{said}; a hundredth more changes the target by {domain.effect:+.4f}{capped}"


def as_recipe(proposal: Proposal, paths: dict[str, str], max_epochs: dict[str, float]) -> str:
    """The recommended `[[data.sources]]`, ready for a recipe; domains of no weight are left out."""
    sources = [
        {"path": paths[name], "weight": round(weight, 4), "max_epochs": max_epochs[name]}
        for name, weight in proposal.weights.items()
        if round(weight, 4) > 0
    ]
    return tomli_w.dumps({"data": {"sources": sources}})
