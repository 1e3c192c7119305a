"""How many cores there are: the affinity, and a container's limit on CPU time where that is lower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vlmcourse import machine
from vlmcourse.commands import doctor
from vlmcourse.machine import num_usable_cores
from vlmcourse.notebook import launcher
from vlmcourse.parallel import ranks


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 cores, with the folder where a container's limits would be."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("not a limit", 8),
        ("", 8),
    ],
)
def test_a_limit_of_cgroup_version_2_counts_where_it_is_lower(cgroup: Path, cpu_max: str, cores: int) -> None:
    (cgroup / "cpu.max").write_text(cpu_max + "\n")
    assert num_usable_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3), ("50000", 1)])
def test_a_limit_of_cgroup_version_1_counts_too(cgroup: Path, quota: str, cores: int) -> None:
    (cgroup / "cpu").mkdir()
    (cgroup / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (cgroup / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert num_usable_cores() == cores


def test_without_a_limit_the_affinity_counts_and_without_that_all_cores(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_usable_cores() == 8
    monkeypatch.delattr(machine.os, "sched_getaffinity")
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 6)
    assert num_usable_cores() == 6
    monkeypatch.setattr(machine.os, "cpu_count", lambda: None)
    assert num_usable_cores() == 1


def test_the_launcher_the_ranks_and_the_doctor_count_alike(cgroup: Path) -> None:
    (cgroup / "cpu.max").write_text("300000 100000\n")
    assert launcher.build_environment(0, 1, 1, {})["OMP_NUM_THREADS"] == "3"
    assert doctor.check_cores().value == "3"
    before = torch.get_num_threads()
    try:
        ranks.init_ranks()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
