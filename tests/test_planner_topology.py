"""Reading `nvidia-smi topo -m`, finding what is close to what, and putting tensor parallelism there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vlmcourse.planner import topology
from vlmcourse.planner.topology import (
    SAMPLE_NAMES,
    FastDomain,
    find_domains,
    parse_topology,
    place_axes,
    read_sample,
    read_topology,
)

PAIRS = find_domains(parse_topology(read_sample("nvlink_pairs")))
SWITCHES = find_domains(parse_topology(read_sample("pcie8")))
NVSWITCH = find_domains(parse_topology(read_sample("nvlink8")))


def table(*rows: str) -> str:
    """Return what is printed for GPUs without network cards; each row lists its connections."""
    names = [f"GPU{number}" for number in range(len(rows))]
    lines = ["\t".join(["", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    lines += ["\t".join([name, *row.split(), "0-7", "0", "", "N/A"]) for name, row in zip(names, rows, strict=True)]
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", ""])


def test_the_samples_are_read_whole() -> None:
    nvlink8, pcie8, pairs = (parse_topology(read_sample(name)) for name in SAMPLE_NAMES)
    assert nvlink8.num_gpus == pcie8.num_gpus == 8 and pairs.num_gpus == 4
    assert {link for row in nvlink8.links for link in row} == {"X", "NV18"}, "network cards are not GPUs"
    assert pcie8.links[4] == ("SYS", "SYS", "SYS", "SYS", "X", "PIX", "NODE", "NODE")
    assert pairs.links == (
        ("X", "PHB", "NV4", "SYS"),
        ("PHB", "X", "SYS", "NV4"),
        ("NV4", "SYS", "X", "PHB"),
        ("SYS", "NV4", "PHB", "X"),
    )


def test_a_table_of_spaces_or_of_one_gpu_is_read_too() -> None:
    text = table("X PHB", "PHB X").replace("\t", "    ")
    assert parse_topology(text).links == (("X", "PHB"), ("PHB", "X"))
    assert parse_topology(table("X")).links == (("X",),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line begins with the names GPU0 GPU1"),
        ("command not found", "no line begins with the names GPU0 GPU1"),
        ("\n".join(table("X NV4", "NV4 X").splitlines()[:2]), "the columns are GPU0, GPU1 and the rows GPU0"),
        (table("X NV4", "NV4 X").partition("\tX\t0-7\t0\t\tN/A\n\n")[0], "the row of GPU1 has "),
        (table("X NVX", "NVX X"), "GPU0 to GPU1 is 'NVX': must be one of NV#, PIX"),
        (table("X NV", "NV X"), "GPU0 to GPU1 is 'NV': must be"),
        (table("NV4 X", "X NV4"), "GPU0 to GPU0 is 'NV4'"),
        (table("X NV4", "SYS X"), "GPU1 to GPU0 is SYS, and back it is NV4"),
    ],
)
def test_what_is_no_table_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_topology(text)


def test_fast_domains_are_nvlink_where_there_is_any_and_pcie_switches_elsewhere() -> None:
    assert (FastDomain(tuple(range(8)), "NV18"),) == NVSWITCH
    assert (FastDomain((0, 2), "NV4"), FastDomain((1, 3), "NV4")) == PAIRS
    # The first socket's two switches are behind a third one; the second socket's are connected by the CPU.
    assert (FastDomain((0, 1, 2, 3), "PXB"), FastDomain((4, 5), "PIX"), FastDomain((6, 7), "PIX")) == SWITCHES


def test_gpus_without_a_fast_connection_are_alone() -> None:
    domains = find_domains(parse_topology(table("X SYS PHB", "SYS X NODE", "PHB NODE X")))
    assert domains == tuple(FastDomain((gpu,), "") for gpu in range(3))
    assert str(domains[0]) == "GPUs 0" and str(PAIRS[0]) == "GPUs 0, 2 (NV4)"


def test_in_a_cube_of_links_every_pair_of_a_domain_has_one() -> None:
    """Eight V100: two fully linked groups of four, and a link from each GPU to its like in the other group."""

    def link(a: int, b: int) -> str:
        if a == b:
            return "X"
        return ("NV2" if (a + b) % 2 else "NV1") if a // 4 == b // 4 else "NV2" if abs(a - b) == 4 else "SYS"

    cube = parse_topology(table(*(" ".join(link(a, b) for b in range(8)) for a in range(8))))
    assert find_domains(cube) == (FastDomain((0, 1, 2, 3), "NV1"), FastDomain((4, 5, 6, 7), "NV1"))


def test_pairs_are_brought_together_for_tensor_parallelism() -> None:
    placed = place_axes({"dp_shard": 2, "tp": 2}, PAIRS)
    assert placed.visible_devices == (0, 2, 1, 3)
    assert placed.environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,2,1,3"}
    assert placed.is_inside == {"dp_shard": False, "tp": True}
    assert "tp = 2: each group lies inside a domain (0-2, 1-3)" in str(placed)
    assert "dp_shard = 2: crosses between domains" in str(placed)


def test_an_axis_inside_a_domain_is_named_as_such() -> None:
    assert place_axes({"tp": 2, "dp_shard": 4}, NVSWITCH).is_inside == {"dp_shard": True, "tp": True}
    assert place_axes({"cp": 2, "dp_shard": 2}, PAIRS).is_inside == {"dp_shard": False, "cp": True}
    assert place_axes({"cp": 2, "tp": 2}, PAIRS).is_inside == {"cp": False, "tp": True}
    assert place_axes({}, PAIRS).visible_devices == (0,)


def test_groups_do_not_span_domains_of_other_sizes() -> None:
    assert place_axes({"tp": 2, "dp_shard": 4}, SWITCHES).visible_devices == tuple(range(8))
    domains = (FastDomain((0, 1, 2), "NV4"), FastDomain((3, 4, 5), "NV4"))
    placed = place_axes({"tp": 2, "dp_shard": 2}, domains)
    assert placed.visible_devices == (0, 1, 3, 4), "2 stays unused: 2-3 would cross"
    with pytest.raises(ValueError, match="need 6 GPUs, and only 4 of 6 hold whole groups of tp = 2"):
        place_axes({"tp": 2, "dp_shard": 3}, domains)


def test_several_machines_repeat_the_order_of_one() -> None:
    placed = place_axes({"pp": 2, "dp_shard": 4, "tp": 4}, NVSWITCH)
    assert len(placed.visible_devices) == 8
    assert placed.is_inside == {"pp": False, "dp_shard": False, "tp": True}
    assert "on each of 4 machines" in placed.explanation
    domain = (FastDomain(tuple(range(6)), "NV4"),)
    straddling = place_axes({"dp_shard": 3, "cp": 2, "tp": 2}, domain)
    assert straddling.is_inside == {"dp_shard": False, "cp": False, "tp": True}, "ranks 4-7 are on both machines"
    assert "cp = 2: crosses between domains or machines" in str(straddling)
    with pytest.raises(ValueError, match="need 12 GPUs, which is no multiple of the 8"):
        place_axes({"dp_shard": 3, "tp": 4}, NVSWITCH)


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tp": 4}, r"tp = 4 is larger than the largest fast domain, GPUs 0, 2 \(NV4\).*set tp to 2 or less"),
        ({"tp": 0}, "tp = 0: must be 1 or greater"),
        ({"ddp": 2}, "there is no axis 'ddp'"),
    ],
)
def test_tensor_parallelism_over_slow_connections_is_refused(degrees: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        place_axes(degrees, PAIRS)


def test_this_machine_is_asked_where_it_has_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology.shutil, "which", lambda name: None)
    assert read_topology() is None
    monkeypatch.setattr(topology.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    answers = [
        subprocess.CompletedProcess([], 0, read_sample("pcie8"), ""),
        subprocess.CompletedProcess([], 9, "No devices were found", ""),
    ]
    monkeypatch.setattr(topology.subprocess, "run", lambda *_, **__: answers.pop(0))
    found = read_topology()
    assert found is not None and find_domains(found) == SWITCHES
    assert read_topology() is None


def test_a_sample_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'pcie8'"):
        read_sample("pcie4")


def test_topology_works_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import vlmcourse.planner.topology"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
