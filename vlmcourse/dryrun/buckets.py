"""DDP on a group that returns no values: two things that its reducer does otherwise.

Enters: a model in `DistributedDataParallel` on the `fake` group. Leaves: the same, able to run backward.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with types.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def let_ddp_play(model: DistributedDataParallel) -> None:
    """Let DDP reduce its buckets in their first order and wait for nobody, in place; once a model."""
    model.register_comm_hook(None, _reduce_bucket)
    kept: Any = _KeptBuckets(model.reducer)
    model.reducer = kept


def _reduce_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Do what DDP does without a hook; its own way waits for a value that the fake group does not return."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class _KeptBuckets:
    """DDP's reducer, which keeps its first buckets.

    After a real first step it orders them anew, by values that ranks exchange; there are as many bytes in either order.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
