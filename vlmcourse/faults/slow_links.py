"""A network that takes longer: every collective of this process pays a latency, and time for its bytes.

Enters: a model on ranks. Leaves: for as long as the context is open, waits that end later. DDP's all-reduces go through
a hook of its own; all others, and messages between stages, end in `Work.wait` or `wait_tensor`. Numbers stay the same.
Chapter 6.

Source: the cost of a message, latency + bytes / bandwidth, is Hockney 1994's (the alpha-beta model).
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with types.
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def slow_links(model: nn.Module, latency_s: float, bytes_per_s: float = float("inf")) -> Iterator[None]:
    """Make communication of this process slow; use it on all ranks, and once with a model.

    Args:
        model: DDP's is given a communication hook, which it keeps, though without delay, after the context.
        latency_s: added to each wait.
        bytes_per_s: of gradients under DDP, added for each bucket.

    Raises:
        RuntimeError: of PyTorch, if the model has a communication hook already.
    """
    delay = {"latency_s": latency_s, "s_per_byte": 1 / bytes_per_s}
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(delay, _reduce_late)
    with ExitStack() as stack:
        for owner, name in ((dist.Work, "wait"), (functional, "wait_tensor")):
            stack.enter_context(mock.patch.object(owner, name, _late(getattr(owner, name), latency_s)))
        try:
            yield
        finally:
            delay.update(latency_s=0.0, s_per_byte=0.0)


def _reduce_late(delay: dict[str, float], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks, and hand it over late."""
    num_bytes = bucket.buffer().numel() * bucket.buffer().element_size()

    def wait(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        time.sleep(delay["latency_s"] + num_bytes * delay["s_per_byte"])
        return done.value()

    group = dist.group.WORLD
    assert group is not None, "DDP has begun, so there is a process group"
    return allreduce_hook(group, bucket).then(wait)


def _late(function: Callable[..., Any], latency_s: float) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(latency_s)
        return function(*args, **kwargs)

    return call
