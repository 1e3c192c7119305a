from __future__ import annotations

import dataclasses

import pytest

from vlmcourse.planner.fabric import Fabric, Group, exposed_s, fabric_of, group_of
from vlmcourse.planner.network import RING_PASSES, Link
from vlmcourse.presets import get_cluster

NODE = Link(latency_s=1.0, bytes_per_s=100.0)
NETWORK = Link(latency_s=10.0, bytes_per_s=10.0)
FABRIC = Fabric(node=NODE, network=NETWORK, devices_per_node=4, call_s=0.0)


@pytest.mark.parametrize("kind", RING_PASSES)
def test_one_node_has_the_ring_of_its_link(kind: str) -> None:
    # An all-to-all is no ring, but of the same messages and bytes.
    assert FABRIC.estimate_s(kind, 800, Group(4, 4), "ring") == NODE.estimate_s(kind, 800, 4)
    assert FABRIC.estimate_s(kind, 800, Group(1, 1)) == 0


def test_groups_fill_nodes_one_after_the_other() -> None:
    assert group_of(8, 1, 4) == Group(8, 4) and group_of(8, 1, 4).num_nodes == 2
    assert group_of(2, 1, 8) == Group(2, 2) and group_of(2, 1, 8).num_nodes == 1
    assert group_of(8, 2, 4) == Group(8, 2)  # ranks 0, 2, 4, ...: two on each node
    assert group_of(3, 8, 4) == Group(3, 1)


def test_an_all_reduce_over_two_nodes_by_hand() -> None:
    group = Group(8, 4)
    # Ring: 14 messages of which 2 x 2 cross nodes; 2 x 7/8 of 800 B sent by each rank, at 4 network cards' 40 B/s.
    assert FABRIC.estimate_s("all-reduce", 800, group, "ring") == pytest.approx(4 * 10 + 10 * 1 + 1400 / 40)
    # Tree: up and down a chain of 4 and one level between nodes; 2 x 800 B.
    assert FABRIC.estimate_s("all-reduce", 800, group, "tree") == pytest.approx(2 * 3 * 1 + 2 * 1 * 10 + 1600 / 40)
    # Hierarchical: 600 B in 3 messages in the node, twice; 200 B a rank over two nodes: 2 messages, 200 B sent.
    assert FABRIC.estimate_s("all-reduce", 800, group, "hierarchical") == pytest.approx(2 * (3 + 6) + 2 * 10 + 20)
    assert FABRIC.estimate_s("all-reduce", 800, group) == pytest.approx(58)


def test_an_all_to_all_sends_to_both_at_once() -> None:
    # 100 B to each: 3 messages in the node (3 + 3 s), 4 between nodes (40 + 40 s).
    assert FABRIC.estimate_s("all-to-all", 800, Group(8, 4)) == pytest.approx(80)
    assert FABRIC.estimate_s("all-gather", 800, Group(8, 4), "hierarchical") == pytest.approx(3 + 6 + 10 + 10)


def test_a_node_of_one_rank_leaves_the_network_alone() -> None:
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        assert FABRIC.estimate_s(kind, 800, Group(4, 1), "ring") == NETWORK.estimate_s(kind, 800, 4)


@pytest.mark.parametrize("kind", RING_PASSES)
@pytest.mark.parametrize("group", [Group(4, 4), Group(16, 4), Group(4, 1)])
def test_twice_the_bandwidth_halves_what_is_not_latency(kind: str, group: Group) -> None:
    bare = Fabric(
        node=dataclasses.replace(NODE, latency_s=0.0),
        network=dataclasses.replace(NETWORK, latency_s=0.0),
        devices_per_node=4,
        call_s=0.0,
    )
    fast = dataclasses.replace(
        bare,
        node=dataclasses.replace(bare.node, bytes_per_s=200.0),
        network=Link(latency_s=0.0, bytes_per_s=20.0),
    )
    assert fast.estimate_s(kind, 800, group) == pytest.approx(bare.estimate_s(kind, 800, group) / 2)


def test_trees_win_for_small_payloads_over_many_nodes_and_not_for_large_ones() -> None:
    fabric = dataclasses.replace(fabric_of(get_cluster("h100x16")), call_s=0.0)

    def by(algorithm: str, size: float, num_ranks: int) -> float:
        return fabric.estimate_s("all-reduce", size, Group(num_ranks, 8), algorithm)

    assert by("tree", 1e3, 256) < by("ring", 1e3, 256) / 5
    assert by("ring", 1e10, 16) < by("tree", 1e10, 16)


def test_what_there_is_not_is_refused_by_name() -> None:
    alone = dataclasses.replace(FABRIC, network=None)
    with pytest.raises(ValueError, match="spans 2 nodes.*set network_bytes_per_s"):
        alone.estimate_s("all-reduce", 1, Group(8, 4))
    with pytest.raises(ValueError, match="set network_bytes_per_s"):
        alone.send_s(1, crosses_nodes=True)
    with pytest.raises(ValueError, match="no tree all-gather"):
        FABRIC.estimate_s("all-gather", 1, Group(4, 4), "tree")
    with pytest.raises(ValueError, match="choose one of ring"):
        FABRIC.estimate_s("all-gather", 1, Group(4, 4), "butterfly")
    with pytest.raises(ValueError, match="all-sum"):
        FABRIC.estimate_s("all-sum", 1, Group(4, 4))
    with pytest.raises(ValueError, match="num_parts = 0"):
        exposed_s(1, 1, 0)


def test_a_cluster_has_the_links_of_its_datasheets() -> None:
    fabric = fabric_of(get_cluster("h100x16"), 1.0)
    assert fabric.node.bytes_per_s == 450e9 and fabric.devices_per_node == 8
    assert fabric.network is not None and fabric.network.bytes_per_s == 50e9
    assert fabric_of(get_cluster("h100x8")).network is None
    assert fabric.send_s(50e9, crosses_nodes=True) == pytest.approx(1.0, rel=1e-3)
    ethernet = fabric_of(get_cluster("h100x16"), 1.0, "ethernet").network
    assert ethernet is not None and ethernet.latency_s > fabric.network.latency_s
    with pytest.raises(ValueError, match="choose one of infiniband, roce, ethernet"):
        fabric_of(get_cluster("h100x16"), 1.0, "carrier pigeon")


def test_communication_hides_behind_computing_but_for_its_last_part() -> None:
    assert exposed_s(10, 100, 1) == 10  # in one part, nothing is hidden
    assert exposed_s(10, 100, 10) == 1
    assert exposed_s(100, 10, 10) == pytest.approx(91)  # computing hides all of its shares but the first
    assert exposed_s(10, 100, 10, lost_fraction=0.5) == pytest.approx(1 + 4.5)
    assert exposed_s(0, 100, 4) == 0

    def by_events(communication: float, computing: float, parts: int) -> float:
        free = 0.0
        for part in range(1, parts + 1):
            free = max(free, computing * part / parts) + communication / parts
        return free - computing

    for communication, computing, parts in ((7, 3, 4), (3, 7, 5), (5, 5, 2)):
        assert exposed_s(communication, computing, parts) == pytest.approx(by_events(communication, computing, parts))
