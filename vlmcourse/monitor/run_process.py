"""Whether the process that writes a run is still there: a mark of it in `run.json`, read by whoever watches the run.

Enters: nothing, or a mark. Leaves: a mark that JSON takes, or an answer; it is "cannot be told" where the process is
of another machine or container. A number alone would not do: it is given again to other processes. Chapter 6.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

SAME_START_S = 2.0
"""Start times of one process, asked for twice, differ by less: the clock that they are counted from may be set."""


def describe_process() -> dict[str, Any]:
    """Return a mark of this process: `host`, `pid_namespace` (Linux; containers have their own), `pid`, `started_s`."""
    return {**_describe_place(), "pid": os.getpid(), "started_s": psutil.Process().create_time()}


def is_process_alive(mark: Mapping[str, Any]) -> bool | None:
    """Return whether the marked process still runs; None where that cannot be told from here.

    Args:
        mark: as `describe_process` returned it, perhaps long ago, or anything else from a file.
    """
    pid, started_s = mark.get("pid"), mark.get("started_s")
    place = _describe_place()
    if (
        not isinstance(pid, int)
        or not isinstance(started_s, int | float)
        or any(mark.get(k) != place[k] for k in place)
    ):
        return None
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - started_s) < SAME_START_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return None


def _describe_place() -> dict[str, Any]:
    try:
        namespace = os.readlink("/proc/self/ns/pid") if Path("/proc/self/ns/pid").exists() else ""
    except OSError:
        namespace = ""
    return {"host": socket.gethostname(), "pid_namespace": namespace}
