from dataclasses import replace
from itertools import product

import pytest

from stepwell.hardware import ACCELERATORS, GIB
from stepwell.plan.cluster import LINKS, cluster, read_cluster
from stepwell.plan.memory.host import of_machine
from stepwell.types import ConfigError


def test_cards_without_links_between_them_talk_at_the_rate_of_pcie(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('gpu = "l40s"\npcie_gb_per_s = 50\n', encoding="utf-8")
    assert read_cluster(path).scaleup_bytes_per_s == 50e9
    path.write_text('gpu = "h100-sxm"\npcie_gb_per_s = 50\n', encoding="utf-8")
    assert read_cluster(path).scaleup_bytes_per_s == cluster("h100-sxm").scaleup_bytes_per_s


def test_every_accelerator_has_links():
    assert set(LINKS) == set(ACCELERATORS)
    with pytest.raises(ConfigError, match="h100-sxm"):
        cluster("h100-sxn")


def test_a_group_leaves_the_scale_up_domain_where_its_ranks_do():
    hopper, domain, pcie = cluster("h100-sxm"), cluster("gb200"), cluster("l40s")
    assert hopper.link(8, 1, world=64) == hopper.link(1, 8, world=64) == "scaleup"
    assert hopper.link(16, 1, world=16) == hopper.link(2, 8, world=16) == "network"
    assert domain.link(9, 8, world=72) == "scaleup"
    assert domain.link(10, 8, world=80) == "network"
    assert pcie.link(8, 1, world=8) == "pcie"
    assert pcie.link(16, 1, world=16) == "network"


def test_a_link_is_the_slowest_of_all_groups():
    """Against every group in turn, also those that a border cuts though the first is whole."""
    machines = replace(cluster("h100-nvl"), gpus_per_node=8, scaleup_gpus=4)
    for num_ranks, stride, blocks in product(range(2, 10), range(1, 7), range(1, 6)):
        block = num_ranks * stride
        groups = [
            [k * block + b + i * stride for i in range(num_ranks)]
            for k, b in product(range(blocks), range(stride))
        ]
        cut = [any(len({r // size for r in g}) > 1 for g in groups) for size in (4, 8)]
        slowest = "network" if cut[1] else "pcie" if cut[0] else "scaleup"
        assert machines.link(num_ranks, stride, blocks * block) == slowest


def test_a_cluster_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'gpu = "h100-sxm"\nname = "mine"\ngpus_per_node = 4\nscaleup_gpus = 4\n'
        "network_gbit_per_s = 100\nmemory_gib = 64\nhost_memory_gib = 512\n"
    )
    mine, usual = read_cluster(path), cluster("h100-sxm")
    assert (mine.name, mine.gpus_per_node, mine.scaleup_gpus) == ("mine", 4, 4)
    assert mine.network_bytes_per_s == 12.5e9
    assert mine.scaleup_bytes_per_s == usual.scaleup_bytes_per_s == 450e9
    assert mine.accelerator.memory_bytes == 64 * GIB
    assert mine.host_memory_bytes == 512 * GIB
    assert usual.host_memory_bytes is None


def test_a_machine_of_another_size_has_links_among_all_of_it(tmp_path):
    path = tmp_path / "mine.toml"
    for gpu, size, domain in (("h100-sxm", 4, 4), ("h100-nvl", 4, 2), ("h100-nvl", 1, 1),
                              ("gb200", 8, 72)):  # fmt: skip
        path.write_text(f'gpu = "{gpu}"\ngpus_per_node = {size}\n')
        assert read_cluster(path).scaleup_gpus == domain
    for domain in (1, 2, 4, 8, 16):
        path.write_text(f'gpu = "h100-sxm"\nscaleup_gpus = {domain}\n')
        assert read_cluster(path).scaleup_gpus == domain


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "scaleup_gpus = 3",
            "scaleup_gpus=3 must divide gpus_per_node=8.*nearest legal values are 2 and 4",
        ),
        ("scaleup_gpus = 12", "nearest legal values are 8 and 16"),
        ("network_gbit_per_s = 0", "network_gbit_per_s"),
        ("netwrk_gbit_per_s = 100", "network_gbit_per_s"),
        ("gpus_per_node = 0", "gpus_per_node"),
    ],
)
def test_a_wrong_cluster_is_refused(tmp_path, line, said):
    path = tmp_path / "mine.toml"
    path.write_text(f'gpu = "h100-sxm"\n{line}\n')
    with pytest.raises(ConfigError, match=said):
        read_cluster(path)
    with pytest.raises(ConfigError, match=r"cannot read the cluster file .*none.toml"):
        read_cluster(tmp_path / "none.toml")


def test_consumer_cards_are_in_smaller_machines():
    assert cluster("h100-sxm").host_room_bytes(8) == 2048 * GIB
    assert cluster("rtx4090").host_room_bytes(8) == 512 * GIB
    assert cluster("l4").host_room_bytes(8) == 768 * GIB
    assert replace(cluster("rtx4090"), host_memory_bytes=GIB).host_room_bytes(1) == GIB


@pytest.mark.parametrize(("used", "gib"), [(1, 64), (2, 128), (8, 512), (64, 512)])
def test_memory_that_nobody_gives_is_that_beside_the_cards_in_use(used, gib):
    """The same in every question."""
    here = cluster("rtx4090")
    assert here.host_room_bytes(used) == gib * GIB
    assert of_machine({"processes": 1.0}, used, here).room == gib * GIB
    given = replace(here, host_memory_bytes=100 * GIB)
    assert of_machine({"processes": 1.0}, used, given).room == 100 * GIB
