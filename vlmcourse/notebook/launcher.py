"""Starts ranks, passes on what they print, and sees to it that all of them end.

Enters: a command and the number of ranks. Leaves: a `RanksResult`, or a `RankFailure` that names the rank that failed
first. Plain Python without torch or IPython: the magic, the command line and the tests share it. Each rank is a process
in a session of its own, with a guard beside it (see `guard.py`), however it is started (see `starting.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmcourse.machine import num_usable_cores
from vlmcourse.notebook.failure import RankEnd, RankFailure, RankHang, RankTimeout, build_failure
from vlmcourse.notebook.hang.doctor import HangDoctor, watch_ranks
from vlmcourse.notebook.jobs import open_job_folder
from vlmcourse.notebook.rank_group import OnIdle, OnText, RankGroup
from vlmcourse.notebook.rank_names import name_ranks
from vlmcourse.notebook.starting import DirectRank, Starter

MAX_RANKS = 64
ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class RanksResult:
    """A run in which every rank ended well."""

    ends: tuple[RankEnd, ...]
    seconds: float


def run_ranks(
    argv: Sequence[str],
    nproc: int,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    on_line: OnText | None = None,
    on_progress: OnText | None = None,
    on_idle: OnIdle | None = None,
    private_dir: Path | None = None,
    starter: Starter | None = None,
    doctor: HangDoctor | None = None,
) -> RanksResult:
    """Run a command on `nproc` ranks of this machine and wait for them.

    Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and a fair share of the
    cores as OMP_NUM_THREADS. Its standard output and error arrive together, in order. Whatever ends this call, an
    exception or an interrupt included, no rank is left running.

    Args:
        argv: the command, such as `[sys.executable, "-m", "vlmcourse.cli", "train", "configs/tiny.toml"]`.
        nproc: number of ranks, 1 to 64; more than there are cores is allowed.
        timeout_s: seconds after which all ranks are stopped.
        env: variables added to this process's environment.
        on_line: called with (rank, line) for every finished line, in this thread.
        on_progress: called with (rank, text) for the changing state of a line that is overwritten with carriage
            returns; its last state also arrives through `on_line`.
        on_idle: called many times a second, also when nothing is printed.
        private_dir: a folder that is removed if this process is killed while the ranks run; by default one of the run.
        starter: how to start a rank; by default `argv` in a process of its own.
        doctor: says why ranks hang, where they listen to it; stops them early if they hang for certain.
    Returns:
        How each rank ended, and the seconds that the run took.
    Raises:
        ValueError: if an argument cannot be used, or the command does not exist.
        RankFailure: if a rank failed; the others were stopped. `RankTimeout` if time ran out, `RankHang` if they hang.
        RuntimeError: if the machine could not start a rank.
    """
    check_run(argv, nproc, timeout_s)
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = private_dir or stack.enter_context(open_job_folder()).path
        start_rank = starter or (lambda environment: DirectRank(argv, environment, folder))
        group = RankGroup(folder, on_line, on_progress, on_idle)
        port = stack.enter_context(reserve_port())
        try:
            for rank in range(nproc):
                group.start(rank, start_rank, build_environment(rank, nproc, port, env or {}))
            watch_ranks(group, started_s + timeout_s, doctor)
        finally:
            unfinished = group.unfinished
            group.stop()
        group.drain()
    ends = tuple(group.ends)
    if any(end.exit_code != 0 and not end.was_stopped for end in ends):
        raise build_failure(ends, {})
    if unfinished:
        raise explain_stop(unfinished, ends, timeout_s, doctor)
    return RanksResult(ends, time.monotonic() - started_s)


def check_run(argv: Sequence[str], nproc: int, timeout_s: float) -> None:
    """Refuse arguments of `run_ranks` that cannot be used.

    Raises:
        ValueError: naming the argument and the rule.
    """
    check_rank_count(nproc)
    if not timeout_s > 0:
        raise ValueError(f"timeout_s = {timeout_s}: must be more than 0 seconds")
    if not argv or shutil.which(argv[0]) is None:
        raise ValueError(f"argv = {list(argv)}: must begin with a program that exists")


def explain_stop(
    unfinished: Sequence[int], ends: Sequence[RankEnd], timeout_s: float, doctor: HangDoctor | None
) -> RankFailure:
    """Make the exception for ranks that were stopped although none had failed."""
    if doctor is not None and doctor.is_deadlock:
        return RankHang(
            f"{doctor.text}\n  All {len(ends)} ranks were stopped: none could ever have gone on.", ends=ends
        )
    return RankTimeout(f"stopped after {timeout_s:g} s: {describe_unfinished(unfinished, len(ends))}", ends=ends)


def check_rank_count(nproc: int) -> None:
    """Refuse a number of ranks that cannot be meant.

    Raises:
        ValueError: if it is below 1 or above 64.
    """
    if not 1 <= nproc <= MAX_RANKS:
        raise ValueError(
            f"{nproc} ranks: must be from 1 to {MAX_RANKS} on one machine, and are best no more than its cores or GPUs"
        )


def describe_unfinished(unfinished: Sequence[int], nproc: int) -> str:
    """Say which ranks were still running."""
    if len(unfinished) == nproc:
        return f"all {nproc} ranks were still running" if nproc > 1 else "its rank was still running"
    finished = [rank for rank in range(nproc) if rank not in unfinished]
    verb = "was" if len(unfinished) == 1 else "were"
    return f"{name_ranks(unfinished)} {verb} still running, {name_ranks(finished)} had finished"


def build_environment(rank: int, nproc: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of one rank, as `torch.distributed` and `init_ranks` read it."""
    threads = max(1, num_usable_cores() // nproc)
    with contextlib.suppress(KeyError, ValueError):
        # Someone who set fewer threads meant it; more than the share would slow every rank down.
        threads = min(threads, max(1, int(os.environ["OMP_NUM_THREADS"])))
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        **extra,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
    }


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """Give a free port for rank 0 to listen on, and on Linux keep other programs from being handed it meanwhile."""
    with socket.socket() as holder:
        holder.bind((ADDRESS, 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()  # elsewhere a bound socket would receive, and drop, what is sent to rank 0
            yield port
            return
        # Bound without this option, nobody else was given the same port; with it, and as long as this socket does not
        # listen, rank 0 may bind it too.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield port
