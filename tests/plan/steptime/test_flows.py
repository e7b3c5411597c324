"""How long collectives take: rings on one machine and over several, exchanges, switches."""

from dataclasses import replace

import pytest

from stepwell.plan.cluster import cluster
from stepwell.plan.comms.step import Sent
from stepwell.plan.steptime.flows import NEAR_HOP, flows

H100 = cluster("h100-sxm")
GB = 10**9


def sent(kind: str, num_ranks: int, stride: int = 1, axis: str = "dp_shard", calls: int = 1):
    return Sent(kind, axis, "test", "backward", num_ranks, stride, GB, calls, num_ranks * stride)


def one(*args, machines=H100, copies: int = 1, **more):
    (found,) = flows([sent(*args, **more)], machines, copies)
    return found


def test_a_ring_in_a_machine_takes_its_bytes_over_the_links():
    found = one("all-gather", 8)
    assert found.scaleup_s == pytest.approx(GB * 7 / 8 / 450e9)
    assert (found.network_s, found.hops) == (0, pytest.approx(7 * NEAR_HOP))


def test_a_ring_over_machines_uses_every_card_of_a_machine():
    """Eight cards of 50 GB/s pass 400 GB/s; one rank of each machine has one card."""
    found, alone = one("all-gather", 64), one("all-gather", 8, stride=8)
    assert found.network_s == pytest.approx(GB * 63 / 64 / 400e9)
    assert alone.network_s == pytest.approx(GB * 7 / 8 / 50e9)
    assert found.hops == pytest.approx(7 * NEAR_HOP + 7)


def test_a_ring_is_no_faster_than_the_links_inside_its_machines():
    slow = replace(H100, scaleup_bytes_per_s=300e9)
    found = one("all-gather", 64, machines=slow)
    assert found.scaleup_s == pytest.approx(GB * 63 / 64 / 300e9)
    assert found.network_s == 0


def test_reductions_to_all_climb_trees():
    assert one("all-reduce", 1024).hops < one("all-gather", 1024).hops / 5


def test_an_exchange_sends_a_token_once_to_a_machine():
    """Of 8 copies about 4 go to the other of two machines, but the token crosses once."""
    whole, many = (one("all-to-all", 16, axis="ep", copies=n).network_s for n in (1, 8))
    assert many / whole == pytest.approx((1 - 0.5**8) / 8 / 0.5)


def test_without_a_switch_a_pair_has_the_links_between_the_two():
    v100 = replace(cluster("v100-32g"), gpus_per_node=4, scaleup_gpus=4)
    assert one("all-reduce", 2, machines=v100).scaleup_s == pytest.approx(GB / 50e9)
    assert one("all-reduce", 4, machines=v100).scaleup_s == pytest.approx(1.5 * GB / 150e9)


@pytest.mark.parametrize(("gpus", "rate"), [(4, 150e9), (8, 450e9)])
def test_boards_of_four_have_no_switch(gpus, rate):
    board = replace(H100, gpus_per_node=gpus, scaleup_gpus=gpus)
    assert one("all-gather", 2, machines=board).scaleup_s == pytest.approx(GB / 2 / rate)
    assert one("all-gather", gpus, machines=board).scaleup_s == pytest.approx(
        GB * (gpus - 1) / gpus / 450e9
    )


def test_bytes_are_known_apart_from_what_they_wait_for():
    """One rank a machine sends as much as eight, over a ninth of the links' rate."""
    alone = one("all-gather", 8, stride=8)
    assert alone.moved_s == one("all-gather", 8).moved_s == one("all-gather", 8).scaleup_s
    assert alone.network_s == pytest.approx(9 * alone.moved_s)


def test_stages_of_a_pipeline_send_to_a_neighbour():
    assert one("send", 4, axis="pp").scaleup_s == pytest.approx(GB / 450e9)
    assert one("send", 4, stride=8, axis="pp").network_s == pytest.approx(GB / 50e9)


def test_of_stages_that_share_machines_one_neighbour_is_on_another():
    found = one("send", 4, stride=4, axis="pp")
    assert found.network_s == pytest.approx(GB / 2 / 50e9)
    assert found.scaleup_s == pytest.approx(GB / 2 / 450e9)
    assert found.hops == pytest.approx((1 + NEAR_HOP) / 2)


def test_calls_add_up_by_axis_and_phase():
    (found,) = flows([sent("all-gather", 8), sent("all-gather", 8, calls=3)], H100)
    assert found.seconds(1, 1, 0) == pytest.approx(4 * one("all-gather", 8).seconds(1, 1, 0))


@pytest.mark.parametrize(("stride", "hops"), [(1, NEAR_HOP), (8, 1.0)])
def test_a_context_ring_s_message_goes_to_a_neighbour(stride, hops):
    """Not around the ring; and it is waited for once, by whom it is sent."""
    assert one("send", 8, stride=stride, axis="cp").hops == hops
    assert one("recv", 8, stride=stride, axis="cp").hops == 0


def test_one_rank_a_machine_gathers_in_a_logarithmic_number_of_steps():
    """Shards beside tensor ranks that fill the machine (PAT); two a machine go round a ring."""
    assert one("all-gather", 256, stride=8).hops == 8
    assert one("reduce-scatter", 256, stride=8).hops == 8
    assert one("all-gather", 256, stride=4).hops == pytest.approx(NEAR_HOP + 127)


def test_cards_without_fast_links_send_over_pcie_inside_a_machine():
    """And over their network cards only to other machines."""
    cards = cluster("l40s")
    inside, outside = (one("all-gather", n, machines=cards) for n in (8, 16))
    assert inside.scaleup_s == pytest.approx(GB * 7 / 8 / 31e9)
    assert (inside.network_s, inside.hops) == (0, pytest.approx(7 * NEAR_HOP))
    assert outside.scaleup_s == pytest.approx(GB * 15 / 16 / 31e9)  # 8 cards of 12.5 GB/s are more
    exchanged = one("all-to-all", 8, machines=cards, axis="ep")
    assert (exchanged.scaleup_s, exchanged.network_s) == (inside.scaleup_s, 0)
    assert one("send", 8, machines=cards, axis="pp").scaleup_s == pytest.approx(GB / 31e9)


def test_pairs_with_a_bridge_have_two_cards_to_leave_on():
    pairs = cluster("h100-pcie")
    assert one("all-gather", 2, machines=pairs).scaleup_s == pytest.approx(GB / 2 / 300e9)
    assert one("all-gather", 8, machines=pairs).scaleup_s == pytest.approx(GB * 7 / 8 / 126e9)
    assert one("all-gather", 4, stride=2, machines=pairs).scaleup_s == pytest.approx(
        GB * 3 / 4 / 63e9
    )
    assert one("send", 4, stride=2, machines=pairs, axis="pp").scaleup_s == pytest.approx(GB / 63e9)


def test_a_network_that_is_slow_for_rings_is_not_for_messages_between_two():
    slow = replace(H100, ring_share=0.2)
    for kind, axis, times in (
        ("all-gather", "dp_shard", 5),
        ("all-to-all", "ep", 5),
        ("send", "pp", 1),
    ):
        before, after = (one(kind, 4, stride=8, axis=axis, machines=m) for m in (H100, slow))
        assert after.network_s == pytest.approx(times * before.network_s)


@pytest.mark.parametrize(
    ("num_stages", "stride", "wraps", "far"),
    [
        (4, 2, True, 0.0),  # one machine
        (3, 2, True, 0.0),  # alone in the world
        (8, 2, True, 0.5),
        (5, 2, False, 0.5),
        (5, 2, True, 1.0),  # the fifth stage is alone, and sends to the first
        (6, 2, True, 0.5),
        (2, 8, False, 1.0),
    ],
)
def test_stages_beside_a_border(num_stages, stride, wraps, far):
    (found,) = flows([sent("send", num_stages, stride, "pp")], H100, wraps=wraps)
    assert found.network_s == pytest.approx(far * GB / 50e9)
    assert found.scaleup_s == pytest.approx((1 - far) * GB / 450e9)


def test_stages_that_a_border_cuts_apart_are_no_neighbours():
    """Groups of three stages on 6 of 8 cards: the second group lies on two machines."""
    cut = replace(sent("send", 3, 2, "pp"), world=24)
    (found,) = flows([cut], H100)
    assert found.network_s == pytest.approx(GB / 2 / 50e9)
