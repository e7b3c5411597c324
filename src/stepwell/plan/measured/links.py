"""Messages of a traced step beside those that the plan sends, axis by axis. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stepwell.plan.comms.collectives import collectives
from stepwell.plan.comms.step import Sent
from stepwell.plan.job import Job
from stepwell.plan.measured.likeness import axis_name
from stepwell.plan.measured.parts import Measured, Messages
from stepwell.plan.steptime.coefficients import SHIPPED, Coefficients
from stepwell.plan.steptime.flows import ring_rate
from stepwell.plan.steptime.step import ledger


@dataclass(frozen=True)
class Link:
    """One axis's messages. link: that they cross. expected: bytes/s that the prediction counts on,
    rated: by the link's vendor. predicted_bytes, predicted_s: that the plan sends, and takes if
    nothing hides it; 0 of an axis that it has no messages of."""

    axis: str
    link: str
    messages: Messages
    expected: float
    rated: float
    predicted_bytes: float
    predicted_s: float


def links_of(measured: Measured, job: Job) -> Iterator[Link]:
    by_axis: dict[str, list[Sent]] = {}
    for sent in collectives(job):
        by_axis.setdefault(axis_name(sent.axis), []).append(sent)
    seconds = message_seconds(job, SHIPPED)
    for axis, messages in measured.messages.items():
        sent = by_axis.get(axis, [])
        heaviest = max(sent, key=lambda s: s.wire_bytes * s.calls, default=None)
        link, rated, share = _rate(heaviest or _unplanned(axis, messages), job)
        bytes_sent = sum(s.wire_bytes * s.calls for s in sent)
        yield Link(axis, link, messages, share * rated, rated, bytes_sent, seconds.get(axis, 0.0))


def _unplanned(axis: str, messages: Messages) -> Sent:
    """Of a group of neighbours."""
    return Sent("all-gather", axis, "", "forward", messages.group, 1, 0, 0, messages.group)


def _rate(sent: Sent, job: Job) -> tuple[str, float, float]:
    """The link, its rate for a rank of the group, and the share of it that is expected."""
    cluster = job.cluster
    near = min(sent.num_ranks, max(1, cluster.scaleup_gpus // sent.stride))
    if near >= sent.num_ranks and sent.axis != "pp":
        return "scaleup", cluster.scaleup_bytes_per_s, SHIPPED.scaleup
    if sent.stride * sent.num_ranks <= cluster.gpus_per_node and sent.axis != "pp":
        return "pcie", cluster.pcie_bytes_per_s, SHIPPED.scaleup
    if sent.axis in ("pp", "ep"):
        far = sent.stride * sent.num_ranks > cluster.scaleup_gpus
        if not far:
            return "scaleup", cluster.scaleup_bytes_per_s, SHIPPED.scaleup
        return "network", cluster.network_bytes_per_s, SHIPPED.network
    rate = ring_rate(cluster, near)
    if rate < cluster.scaleup_bytes_per_s:
        return "network", rate, SHIPPED.network
    return "scaleup", rate, SHIPPED.scaleup


def message_seconds(job: Job, rates: Coefficients) -> dict[str, float]:
    """By axis, if nothing hides them."""
    found: dict[str, float] = {}
    for flow in ledger(job).flows:
        axis = axis_name(flow.axis)
        seconds = flow.seconds(rates.scaleup, rates.network, rates.hop_s)
        found[axis] = found.get(axis, 0.0) + seconds
    return found
