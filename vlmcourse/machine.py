"""This machine: how many CPU cores a process may use, counted once for the launcher, the ranks and `vlmcourse doctor`,
and the words that a measurement is printed with.

Enters: the machine, and the limits of a container. Leaves: a number; a line. No torch.
"""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux shows a container the limits that it runs under."""


def num_usable_cores() -> int:
    """Return the cores that this process may use: its affinity, and a container's CPU limit where that is lower.

    Half a core counts as none, but one core is always there. A limit is CPU time for each period of time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for read_limit in (_limit_of_version_2, _limit_of_version_1):
        with contextlib.suppress(OSError, ValueError):
            cores = min(cores, read_limit())
    return max(1, cores)


def _limit_of_version_2() -> int:
    """Return the whole cores of `cpu.max`; ValueError where it says `max`, which is no limit."""
    quota, period = (CGROUP / "cpu.max").read_text().split()
    return int(quota) // int(period)


def _limit_of_version_1() -> int:
    """Return the whole cores of the older pair of files; ValueError where the quota is -1, which is no limit."""
    quota, period = (int((CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    if quota < 0:
        raise ValueError(f"cpu.cfs_quota_us = {quota} is no limit")
    return quota // period


def describe_machine() -> str:
    """Say where numbers are from: cores that may be used, the processor, the system and Python."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # Linux alone has this file
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{num_usable_cores()} cores of {model}, {platform.system()}, Python {platform.python_version()}"
