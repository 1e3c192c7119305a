"""The first few of the ranks at hand as a run of their own, and back: one start of processes measures several sizes.

Enters: the ranks that were started. Leaves: for a while, a process group of the first N of them, for which everything
is as if only they had been started; the others wait without using a core. Models that were wrapped before lose their
group by it: build them anew. Chapter 6.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vlmcourse.parallel.ranks import Ranks, group_timeout_s, shutdown_ranks

_times = itertools.count()
"""How often this process has regrouped: names in the store must be new, and alike on all ranks."""


class Regrouping:
    """Changes the process group of this process, as all ranks do alike; a context that puts the whole group back."""

    def __init__(self, ranks: Ranks) -> None:
        """Take over the group; all ranks must do this.

        Args:
            ranks: this process's place. One process without a group is fine.
        """
        self.ranks = ranks
        self._store: dist.Store | None = None
        self._timeout_s = group_timeout_s()
        self._name, self._turn = f"fewer-ranks-{next(_times)}", 0

    def __enter__(self) -> Regrouping:
        if dist.is_initialized():
            self._store = distributed_c10d._get_default_store()
            dist.barrier(device_ids=_device_ids(self.ranks))  # nobody may leave what another has not joined yet
            shutdown_ranks()
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            shutdown_ranks()
            self._turn += 1
            self._join(self.ranks.world_size)

    @contextmanager
    def only(self, num_ranks: int) -> Iterator[Ranks | None]:
        """Let the first ranks be alone in the world; all ranks must call this.

        Args:
            num_ranks: 1 to all. One rank has no process group, as in a run that was started without a launcher.

        Yields:
            The place among them; None on a rank that is not one of them, which waits at the end.

        Raises:
            ValueError: if there are not so many ranks.
            RuntimeError: on a rank that waited, if one of the others failed or took longer than a collective may.
        Communicates: a rendezvous of these ranks, and of all at the end.
        """
        if not 1 <= num_ranks <= self.ranks.world_size:
            raise ValueError(f"num_ranks = {num_ranks} of {self.ranks.world_size}: start more ranks, or ask for fewer")
        rank, failed = self.ranks.rank, True
        self._turn += 1
        try:
            if rank >= num_ranks:
                yield None
            else:
                if num_ranks > 1:
                    self._join(num_ranks)
                yield Ranks(
                    rank=rank,
                    local_rank=self.ranks.local_rank,
                    world_size=num_ranks,
                    device=self.ranks.device,
                    backend=self.ranks.backend if num_ranks > 1 else "none",
                )
            failed = False
        finally:
            shutdown_ranks()
            self._meet(failed=failed)

    def _meet(self, *, failed: bool) -> None:
        """Wait for all ranks, by the store: there may be no group in common."""
        if self._store is None:
            return
        name = f"{self._name}-{self._turn}"
        if failed:
            self._store.set(f"{name}-all", "failed")
            return
        if self._store.add(f"{name}-done", 1) == self.ranks.world_size:
            self._store.set(f"{name}-all", "done")
        try:
            self._store.wait([f"{name}-all"], timedelta(seconds=self._timeout_s))
        except dist.DistError as error:
            raise RuntimeError(
                f"rank {self.ranks.rank}: the other ranks were not done within {self._timeout_s:g} s: do less at a "
                "time, or give init_ranks a longer timeout_s"
            ) from error
        if self._store.get(f"{name}-all") == b"failed":
            raise RuntimeError(f"rank {self.ranks.rank}: another rank failed; its error says why")

    def _join(self, num_ranks: int) -> None:
        assert self._store is not None, "several ranks have a store"
        is_gpu = self.ranks.device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.ranks.backend == "nccl" else "gloo",
            store=dist.PrefixStore(f"{self._name}-{self._turn}", self._store),
            rank=self.ranks.rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=self._timeout_s),
            device_id=self.ranks.device if is_gpu else None,
        )
        dist.barrier(device_ids=_device_ids(self.ranks))


def _device_ids(ranks: Ranks) -> list[int] | None:
    return [torch.cuda.current_device()] if ranks.device.type == "cuda" else None
