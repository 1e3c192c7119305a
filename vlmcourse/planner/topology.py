"""Which GPUs of a machine are close to each other, and on which of them each parallel axis belongs.

Enters: the text that `nvidia-smi topo -m` prints, and the sizes of the axes. Leaves: `FastDomain`s, and a `Placement`:
an order of the GPUs in which the ranks of a tensor-parallel group share a domain. Tensor parallelism exchanges
activations several times a layer, all others less, so it gets the fastest links. Chapter 1.

Source: NVIDIA, nvidia-smi manual, section "topo", for the names of the connections.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmcourse.layout import AXES
from vlmcourse.values import suggest_choice

CONNECTIONS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe root",
    "NODE": "PCIe roots of one NUMA node",
    "SYS": "the link between CPU sockets",
}
"""What lies between two devices, the fastest first; NV stands for NV1, NV18 and so on."""
FAST_LEVELS = (("NV",), ("PIX", "PXB"))
"""Connections that make a fast domain: NVLink where a machine has any, else PCIe switches."""
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
GPU_NAME = re.compile(r"GPU(\d+)")
TIMEOUT_S = 60
SAMPLES = Path(__file__).with_name("sample_topologies")
SAMPLE_NAMES = ("nvlink8", "pcie8", "nvlink_pairs")
"""Machines to read about where there is none: 8 GPUs on NVSwitch, 8 on PCIe switches, 2 pairs with NVLink bridges."""


@dataclass(frozen=True)
class Topology:
    """How the GPUs of one machine are connected."""

    links: tuple[tuple[str, ...], ...]
    """For each pair of GPUs a name such as NV18, PIX or SYS; X on the diagonal."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the machine."""
        return len(self.links)

    def level(self, gpu: int, other: int) -> str:
        """Return the key of `CONNECTIONS` for a pair of GPUs."""
        return "NV" if self.links[gpu][other].startswith("NV") else self.links[gpu][other]


@dataclass(frozen=True)
class FastDomain:
    """GPUs each of which reaches each other one over a fast connection."""

    gpus: tuple[int, ...]
    connection: str
    """The slowest connection inside, such as NV18; empty for a GPU on its own."""

    def __str__(self) -> str:
        """Show the GPUs and what connects them."""
        return f"GPUs {', '.join(map(str, self.gpus))}" + (f" ({self.connection})" if self.connection else "")


@dataclass(frozen=True)
class Placement:
    """Where the ranks of each axis go on one machine."""

    visible_devices: tuple[int, ...]
    """Local rank -> GPU: what CUDA_VISIBLE_DEVICES lists, in this order."""
    is_inside: dict[str, bool]
    """For each axis larger than 1 whether all its groups lie inside a fast domain."""
    explanation: str

    @property
    def environment(self) -> dict[str, str]:
        """What to set before the ranks start; `nvidia-smi` numbers GPUs by their bus, and CUDA must do so too."""
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.visible_devices)),
        }

    def __str__(self) -> str:
        """Say it in words."""
        return self.explanation


def read_topology() -> Topology | None:
    """Ask this machine's driver; None where there is no `nvidia-smi`, or it knows of no GPU.

    Raises:
        ValueError: if it prints something else than a table.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=TIMEOUT_S)
    return parse_topology(done.stdout) if done.returncode == 0 else None


def read_sample(name: str) -> str:
    """Return the text of a sample machine.

    Args:
        name: one of `SAMPLE_NAMES`.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in SAMPLE_NAMES:
        raise ValueError(f"there is no sample topology {name!r}: {suggest_choice(name, SAMPLE_NAMES)}")
    return (SAMPLES / f"{name}.txt").read_text(encoding="utf-8")


def parse_topology(text: str) -> Topology:
    """Read the table of `nvidia-smi topo -m`.

    Network cards, CPU affinities and the legend are passed over; so are the escapes that underline the header.

    Args:
        text: all that it printed.

    Raises:
        ValueError: if there is no table of GPUs, or a row of it is cut off or has an unknown connection.
    """
    lines = [ESCAPES.sub("", line).split() for line in text.splitlines()]
    header = next((words for words in lines if words and words[0] == "GPU0" and words[1:2] != ["X"]), None)
    if header is None:
        raise ValueError("this is not what `nvidia-smi topo -m` prints: no line begins with the names GPU0 GPU1 ...")
    devices = header[: header.index("CPU")] if "CPU" in header else header
    columns = [column for column, name in enumerate(devices) if GPU_NAME.fullmatch(name)]
    rows = {words[0]: words[1:] for words in lines if words and words is not header and GPU_NAME.fullmatch(words[0])}
    names = [devices[column] for column in columns]
    if sorted(rows) != sorted(names):
        raise ValueError(f"the columns are {', '.join(names)} and the rows {', '.join(rows)}: both must agree")
    links = []
    for name in names:
        row = rows[name][: len(devices)]
        if len(row) < len(devices):
            raise ValueError(f"the row of {name} has {len(row)} of {len(devices)} connections: it is cut off")
        links.append(tuple(_check_connection(name, devices[column], row[column]) for column in columns))
    return _check_symmetry(Topology(tuple(links)))


def _check_connection(name: str, other: str, link: str) -> str:
    is_known = link in CONNECTIONS and link != "NV" or re.fullmatch(r"NV\d+", link)
    if (link == "X") != (name == other) or not (is_known or link == "X"):
        known = ", ".join("NV#" if key == "NV" else key for key in CONNECTIONS)
        raise ValueError(f"{name} to {other} is {link!r}: must be one of {known}, and X from a GPU to itself")
    return link


def _check_symmetry(topology: Topology) -> Topology:
    for a in range(topology.num_gpus):
        for b in range(a):
            if topology.links[a][b] != topology.links[b][a]:
                there, back = topology.links[a][b], topology.links[b][a]
                raise ValueError(f"GPU{a} to GPU{b} is {there}, and back it is {back}: both must be the same")
    return topology


def find_domains(topology: Topology) -> tuple[FastDomain, ...]:
    """Group the GPUs into fast domains: connected to each other by NVLink or, where there is none, by PCIe switches.

    The largest domain is found first, then the largest among the rest; each GPU is in exactly one. In a machine where
    NVLink joins only some pairs of a group (a ring or a cube), a domain is a part in which every pair has a link.

    Returns:
        The domains, the larger first; GPUs without a fast connection are domains of one.
    """
    num_gpus = topology.num_gpus
    pairs = [(a, b) for a in range(num_gpus) for b in range(num_gpus) if a != b]
    levels: Sequence[str] = next(
        (level for level in FAST_LEVELS if any(topology.level(a, b) in level for a, b in pairs)), ()
    )
    near = {a: {b for b in range(num_gpus) if a != b and topology.level(a, b) in levels} for a in range(num_gpus)}
    left, domains = set(range(num_gpus)), []
    while left:
        gpus = _largest_clique(near, (), sorted(left))
        domains.append(FastDomain(gpus, _slowest_link(topology, gpus)))
        left -= set(gpus)
    return tuple(domains)


def _largest_clique(
    near: Mapping[int, set[int]], chosen: tuple[int, ...], candidates: Sequence[int]
) -> tuple[int, ...]:
    """Return the first of the largest sets, made of `chosen` and some candidates, in which all are near each other."""
    best = chosen
    for position, gpu in enumerate(candidates):
        if len(chosen) + len(candidates) - position <= len(best):
            break
        rest = [other for other in candidates[position + 1 :] if other in near[gpu]]
        found = _largest_clique(near, (*chosen, gpu), rest)
        best = found if len(found) > len(best) else best
    return best


def _slowest_link(topology: Topology, gpus: Sequence[int]) -> str:
    links = {topology.links[a][b] for a in gpus for b in gpus if a != b}

    def slowness(link: str) -> tuple[int, int]:
        level = "NV" if link.startswith("NV") else link
        return list(CONNECTIONS).index(level), -int(link.removeprefix("NV")) if level == "NV" else 0

    return max(links, key=slowness, default="")


def place_axes(
    degrees: Mapping[str, int], domains: Sequence[FastDomain], ranks_per_machine: int | None = None
) -> Placement:
    """Order the GPUs of a machine so that every tensor-parallel group lies inside one fast domain.

    Ranks are numbered with tp innermost (see `layout`), so each run of `tp` neighbours in the order is one group; where
    a domain is no multiple of `tp`, what is left of it stays unused.

    Args:
        degrees: sizes by axis; axes left out are 1. Their product may span several equal machines.
        domains: of one machine.
        ranks_per_machine: how many start on each; None takes as many as there are, or as hold whole groups.

    Returns:
        The order for `CUDA_VISIBLE_DEVICES`, which axes lie inside a domain, and why.

    Raises:
        ValueError: if an axis is unknown or below 1, `tp` is larger than the largest domain or does not divide the
            ranks of a machine, or more GPUs are needed than hold whole groups.
    """
    _check_degrees(degrees)
    tp = degrees.get("tp", 1)
    largest = max(domains, key=lambda domain: len(domain.gpus))
    if tp > len(largest.gpus):
        raise ValueError(
            f"tp = {tp} is larger than the largest fast domain, {largest}: its ranks would exchange activations of "
            f"every layer over a slow connection; set tp to {len(largest.gpus)} or less"
        )
    usable = [gpu for domain in domains for gpu in domain.gpus[: len(domain.gpus) // tp * tp]]
    num_ranks = math.prod(degrees.values())
    num_gpus = sum(len(domain.gpus) for domain in domains)
    if ranks_per_machine is not None:
        if ranks_per_machine % tp:
            raise ValueError(
                f"tp = {tp} does not divide the {ranks_per_machine} ranks of a machine: a group would span two machines"
            )
        num_ranks = min(num_ranks, ranks_per_machine)
    if ranks_per_machine is None and num_ranks > num_gpus and num_ranks % len(usable):
        raise ValueError(
            f"{_describe(degrees)} need {num_ranks} GPUs, which is no multiple of the {len(usable)} of {num_gpus} GPUs "
            f"that hold whole groups of tp = {tp} on each machine: change dp_shard or dp_replicate"
        )
    if len(usable) < num_ranks and (num_ranks <= num_gpus or ranks_per_machine is not None):
        where = "" if ranks_per_machine is None else " on each machine"
        raise ValueError(
            f"{_describe(degrees)} need {num_ranks} GPUs{where}, and only {len(usable)} of {num_gpus} hold whole "
            f"groups of tp = {tp} in the domains {'; '.join(map(str, domains))}: choose a tp that divides them"
        )
    order = tuple(usable[: min(num_ranks, len(usable))])
    inside = {axis: _is_inside(axis, degrees, order, domains) for axis in AXES if degrees.get(axis, 1) > 1}
    return Placement(order, inside, _explain(degrees, domains, order, inside))


def _check_degrees(degrees: Mapping[str, int]) -> None:
    unknown = [axis for axis in degrees if axis not in AXES]
    if unknown:
        raise ValueError(f"there is no axis {unknown[0]!r}: choose among {', '.join(AXES)}")
    small = [f"{axis} = {degree}" for axis, degree in degrees.items() if degree < 1]
    if small:
        raise ValueError(f"{', '.join(small)}: must be 1 or greater")


def _is_inside(axis: str, degrees: Mapping[str, int], order: Sequence[int], domains: Sequence[FastDomain]) -> bool:
    """Whether the ranks that differ only in their place on `axis` always share a domain."""
    stride = math.prod(degrees.get(inner, 1) for inner in AXES[AXES.index(axis) + 1 :])
    span = stride * degrees[axis]
    if len(order) % span:
        return False  # some group, or all of them, span machines
    domain_of = {gpu: number for number, domain in enumerate(domains) for gpu in domain.gpus}
    groups: dict[tuple[int, int], set[int]] = {}
    for rank, gpu in enumerate(order):
        groups.setdefault((rank // span, rank % stride), set()).add(domain_of[gpu])
    return all(len(group) == 1 for group in groups.values())


def _explain(
    degrees: Mapping[str, int], domains: Sequence[FastDomain], order: Sequence[int], inside: Mapping[str, bool]
) -> str:
    tp = degrees.get("tp", 1)
    groups = [order[start : start + tp] for start in range(0, len(order), tp)] if tp > 1 else []
    sentences = [f"fast domains: {'; '.join(map(str, domains))}."]
    if groups:
        shown = ", ".join("-".join(map(str, group)) for group in groups)
        sentences.append(f"tp = {tp}: each group lies inside a domain ({shown}).")
    for axis, is_inside in inside.items():
        if axis != "tp":
            where = "stays inside a domain" if is_inside else "crosses between domains or machines"
            sentences.append(f"{axis} = {degrees[axis]}: {where}.")
    num_machines = math.prod(degrees.values()) // len(order)
    on_each = f" on each of {num_machines} machines" if num_machines > 1 else ""
    sentences.append(f"CUDA_VISIBLE_DEVICES={','.join(map(str, order))}{on_each} puts them there.")
    return " ".join(sentences)


def _describe(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "no axes"
