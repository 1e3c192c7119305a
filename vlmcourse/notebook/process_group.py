"""Joining and leaving the process group around a cell, on a rank's side."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from vlmcourse.notebook.jobs import JobFolder
from vlmcourse.parallel.ranks import Ranks, init_ranks, limit_groups, shutdown_ranks

LEAVE_LAST_S = 2.0
"""How long rank 0 waits for the others at the end; then a rank that waits for it in vain loses its connection."""


def join_group(timeout_s: float) -> Ranks:
    """Initialise the process group, and let the cell do it again as a script under `torchrun` would.

    Args:
        timeout_s: seconds that joining and each collective may take.
    """
    ranks = init_ranks(timeout_s)
    accept_second_init(ranks)
    return ranks


def limit_collectives(timeout_s: float) -> None:
    """Let every collective that begins from now on take at most so long, in every group that there is."""
    limit_groups(list(distributed_c10d._world.pg_map), timeout_s)


def accept_second_init(ranks: Ranks) -> None:
    """Make `init_process_group` in a cell a noted no-op while the group of the cell exists.

    A script written for `torchrun` then runs unchanged. A call that asks for another number of ranks, or another rank,
    raises ValueError. After the cell's own `destroy_process_group` the call works as always.
    """
    original = dist.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            original(*args, **kwargs)
            return
        asked = signature.bind(*args, **kwargs).arguments
        world_size, rank = asked.get("world_size", -1), asked.get("rank", -1)
        if world_size not in (-1, ranks.world_size) or rank not in (-1, ranks.rank):
            raise ValueError(
                f"rank {ranks.rank}: init_process_group was asked for rank={rank}, world_size={world_size}, but this "
                f"cell runs on {ranks.world_size} ranks: leave both out, or change -n"
            )
        if ranks.is_main:
            print(
                f"note: %%torchrun has already initialised the process group ({ranks.backend}, {ranks.world_size} "
                "ranks): init_process_group changes nothing here"
            )

    dist.init_process_group = init_process_group
    distributed_c10d.init_process_group = init_process_group


def leave_group(ranks: Ranks, folder: JobFolder) -> None:
    """Leave the process group at the end of a cell; rank 0 leaves last, because the others' store lives in it."""
    folder.write_done(ranks.rank)
    if (
        ranks.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    ):  # there the store lives in `torchrun`
        end_s = time.monotonic() + LEAVE_LAST_S
        while len(folder.read_done()) < ranks.world_size and time.monotonic() < end_s:
            time.sleep(0.002)
    shutdown_ranks()
    # An interrupt from here on need not be explained by a traceback out of the interpreter's shutdown.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
