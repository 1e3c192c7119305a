"""The end of process groups that a worker's earlier cases made."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def forget_groups() -> None:
    """Destroy all groups but that of all ranks; every rank calls this between two cases.

    Each group of gloo has threads that wake a hundred times a second: a worker of many cases would end up with little
    else to do.
    """
    world = dist.GroupMember.WORLD
    dist.barrier()  # nobody is still inside a collective of a group that goes
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)
    gc.collect()


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function after the groups of what was called before it have gone."""
    forget_groups()
    return function(*args)
