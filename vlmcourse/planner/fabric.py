"""The links of a cluster, and how long collectives take over them when a group's ranks stand on several nodes.

Enters: a `Cluster` and its device, or two measured `Link`s; a group of ranks. Leaves: seconds by algorithm: ring, tree,
hierarchical. Each is a number of messages that follow each other times a latency, and bytes over a bandwidth
(alpha-beta). What a collective costs on one link is in `network.py`. Chapter 7.

Every device is taken to have its own share of the network, as machines with one network card a device have: the g ranks
of a group on one node together send g times as fast into the network as one. Other groups are taken to use their own
devices' cards at the same time. A network in which far nodes share fewer cables is not described.

Source: Thakur et al. 2005 for ring and its counts; Sanders et al. 2009, "Two-tree algorithms for full bandwidth
    broadcast, reduction and scan", for trees; for latencies and for the messages of a ring that cross nodes the tuning
    model of NCCL (github.com/NVIDIA/nccl, src/graph/tuning.cc: ring and tree, protocol Simple).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from vlmcourse.planner.hardware import get_device
from vlmcourse.planner.network import RING_PASSES, Link, ring_messages, ring_sent_bytes
from vlmcourse.presets import Cluster

NVLINK_LATENCY_S, PCIE_LATENCY_S = 3.4e-6, 5.7e-6
"""Of one message of a ring inside a node."""
NETWORK_LATENCIES_S = {"infiniband": 14.0e-6, "roce": 14.0e-6, "ethernet": 50.0e-6}
"""Of one message between nodes. NCCL's model has one number for networks; that of plain Ethernet, whose messages go
through the operating system, is a round guess: measure with `parallel/links.py`."""
CALL_S = 8.4e-6
"""Of any collective, before its first message."""
LINK_FRACTION = 0.8
"""Of a datasheet's bandwidth, what large collectives reach: NVIDIA's nccl-tests print about 360 of 450 GB/s for an
all-reduce inside a DGX H100 without its switch's own arithmetic; taken for all links."""
ALGORITHMS = ("ring", "tree", "hierarchical")


class Group(NamedTuple):
    """Ranks that take part in one collective."""

    num_ranks: int
    ranks_per_node: int
    """At most, on one node."""

    @property
    def num_nodes(self) -> int:
        """Nodes that it spans."""
        return -(-self.num_ranks // self.ranks_per_node)


def group_of(num_ranks: int, stride: int, devices_per_node: int) -> Group:
    """Return the group of every `stride`-th of consecutive ranks, which fill one node after the other.

    Args:
        num_ranks: of the group.
        stride: ranks from one of the group to the next: the product of the degrees of all axes further inside.
        devices_per_node: ranks on one node.
    """
    return Group(num_ranks, min(num_ranks, max(1, devices_per_node // stride)))


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The links of a cluster."""

    node: Link
    """Between devices of a node."""
    network: Link | None = None
    """Between nodes, for each device; None where there is one node."""
    devices_per_node: int
    call_s: float = CALL_S

    def estimate_s(self, kind: str, payload_bytes: float, group: Group, algorithm: str = "best") -> float:
        """Estimate the seconds of one collective.

        Args:
            kind: a key of `network.RING_PASSES`: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast.
            payload_bytes: the whole tensor, counted once; see `network.ring_sent_bytes`.
            group: who takes part; one rank alone takes no time.
            algorithm: one of `ALGORITHMS`, or best, the fastest of those that there are for this kind: trees for
                all-reduce, hierarchical for all but all-to-all and broadcast.

        Raises:
            ValueError: if the kind or the algorithm is not known or there is none for this kind, a number is out of
                range, or the group spans nodes and the fabric has no network.
        """
        if algorithm not in (*ALGORITHMS, "best"):
            raise ValueError(f"algorithm {algorithm!r} is unknown: choose one of {', '.join(ALGORITHMS)}, or best")
        if group.num_nodes > 1 and self.network is None:
            raise ValueError(
                f"a group of {group.num_ranks} ranks, {group.ranks_per_node} on a node, spans {group.num_nodes} nodes, "
                "and this cluster has no network: set network_bytes_per_s"
            )
        if group.num_ranks == 1 and not ring_sent_bytes(kind, payload_bytes, 1):
            return 0.0
        known = {"ring": self._ring_s(kind, payload_bytes, group)}
        if kind == "all-to-all":
            known = {"ring": self._all_to_all_s(payload_bytes, group)}
        if kind == "all-reduce":
            known["tree"] = self._tree_s(payload_bytes, group)
        if kind in ("all-reduce", "all-gather", "reduce-scatter") and group.num_nodes > 1:
            known["hierarchical"] = self._hierarchical_s(kind, payload_bytes, group)
        if algorithm != "best" and algorithm not in known:
            raise ValueError(f"there is no {algorithm} {kind} over this group: choose one of {', '.join(known)}")
        return self.call_s + (min(known.values()) if algorithm == "best" else known[algorithm])

    def send_s(self, payload_bytes: float, *, crosses_nodes: bool) -> float:
        """Estimate the seconds of one message from a rank to another.

        Raises:
            ValueError: if it crosses nodes and the fabric has no network.
        """
        link = self.network if crosses_nodes else self.node
        if link is None:
            raise ValueError("a message between nodes, and this cluster has no network: set network_bytes_per_s")
        return link.latency_s + payload_bytes / link.bytes_per_s

    def _rate(self, group: Group) -> float:
        """Return the bytes a second at which each rank of a ring over all of the group can send."""
        if group.num_nodes == 1 or self.network is None:
            return self.node.bytes_per_s
        if group.ranks_per_node == 1:
            return self.network.bytes_per_s
        return min(self.node.bytes_per_s, group.ranks_per_node * self.network.bytes_per_s)

    def _ring_s(self, kind: str, payload_bytes: float, group: Group) -> float:
        """As many rings as ranks on a node, each through another network card."""
        messages, sent = ring_messages(kind, group.num_ranks), ring_sent_bytes(kind, payload_bytes, group.num_ranks)
        if group.num_nodes == 1 or self.network is None:
            return messages * self.node.latency_s + sent / self.node.bytes_per_s
        # A part that goes around once crosses each border between nodes at most once.
        crossing = RING_PASSES[kind] * min(group.num_nodes, group.num_ranks - 1)
        latency_s = crossing * self.network.latency_s + (messages - crossing) * self.node.latency_s
        return latency_s + sent / self._rate(group)

    def _tree_s(self, payload_bytes: float, group: Group) -> float:
        """A chain inside a node, two trees over nodes: up and down, every rank sends the whole tensor about twice."""
        latency_s = 2 * (group.ranks_per_node - 1) * self.node.latency_s
        if group.num_nodes > 1 and self.network is not None:
            latency_s += 2 * math.log2(group.num_nodes) * self.network.latency_s
        return latency_s + 2 * payload_bytes / self._rate(group)

    def _hierarchical_s(self, kind: str, payload_bytes: float, group: Group) -> float:
        """Inside the node all of it, between nodes each rank its part: one after the other."""
        assert self.network is not None
        inside, part = group.ranks_per_node, payload_bytes / group.ranks_per_node
        node_kinds = {"all-reduce": ("reduce-scatter", "all-gather")}.get(kind, (kind,))
        node_s = sum(self.node.estimate_s(of_node, payload_bytes, inside) for of_node in node_kinds)
        return node_s + self.network.estimate_s(kind, part, group.num_nodes)

    def _all_to_all_s(self, payload_bytes: float, group: Group) -> float:
        """What goes to ranks of the node and what goes to others travel at the same time."""
        each, inside = payload_bytes / group.num_ranks, group.ranks_per_node - 1
        outside = group.num_ranks - group.ranks_per_node
        node_s = inside * (self.node.latency_s + each / self.node.bytes_per_s)
        if not outside or self.network is None:
            return node_s
        return max(node_s, outside * (self.network.latency_s + each / self.network.bytes_per_s))


@lru_cache(maxsize=64)
def fabric_of(cluster: Cluster, link_fraction: float = LINK_FRACTION, network: str = "infiniband") -> Fabric:
    """Return the links of a cluster as its datasheets have them, with what collectives reach of it.

    Args:
        cluster: its device must be a name in `hardware.DEVICES`.
        link_fraction: of the datasheets' bandwidth.
        network: between nodes: infiniband, roce or ethernet.

    Raises:
        ValueError: if the device or the kind of network is not known.
    """
    if network not in NETWORK_LATENCIES_S:
        raise ValueError(f"network = {network!r}: choose one of {', '.join(NETWORK_LATENCIES_S)}")
    device = get_device(cluster.device)
    has_nvlink = device.link_bytes_per_s > device.host_link_bytes_per_s
    between = None
    if cluster.network_bytes_per_s:
        bytes_per_s = cluster.network_bytes_per_s * link_fraction
        between = Link(latency_s=NETWORK_LATENCIES_S[network], bytes_per_s=bytes_per_s)
    return Fabric(
        node=Link(
            latency_s=NVLINK_LATENCY_S if has_nvlink else PCIE_LATENCY_S,
            bytes_per_s=device.link_bytes_per_s * link_fraction,
        ),
        network=between,
        devices_per_node=cluster.devices_per_node,
    )


def exposed_s(communication_s: float, computing_s: float, num_parts: int, lost_fraction: float = 0.0) -> float:
    """Return what communication in equal parts adds to the computing that it runs beside.

    A part can be sent when its share of the computing is done (or, of what is gathered ahead, is needed before it), one
    part after the other. So the last part is never hidden: the end is the later of computing and one part more, and of
    communication and one share of computing more.

    Args:
        communication_s: of all parts.
        computing_s: of all shares.
        num_parts: such as gradient buckets, or layers whose weights are gathered; 1 hides nothing.
        lost_fraction: of the hidden time, what the computing takes longer.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts = {num_parts}: must be 1 or more")
    end_s = max(computing_s + communication_s / num_parts, communication_s + computing_s / num_parts)
    shown_s = end_s - computing_s
    return shown_s + lost_fraction * (communication_s - shown_s)
