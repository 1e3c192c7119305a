"""Count what a rank waits for other ranks as communication, whoever waits: PyTorch, an engine, a layer.

Enters: a `StepClock` inside of a step. Leaves: its phase "communication" open whenever the thread that trains is in one
of the few places where all collectives end. On a CPU these are `Work.wait`, which every call of `torch.distributed`
makes unless it is asked not to, and `wait_tensor`, by which functional collectives and `DTensor`s do. On a GPU a
collective that is not asked to be asynchronous runs in the stream that computes, so the calls themselves count too.

DDP waits in C++: see `step_clock.mark_tail`. Chapter 6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from vlmcourse.monitor.step_clock import StepClock

CALLS = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "broadcast"),
    *("reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "reduce", "barrier"),
)
"""Functions of `torch.distributed` that on a GPU run in the computing stream unless asked otherwise."""


@contextmanager
def watch_waits(clock: StepClock) -> Iterator[None]:
    """Let the clock count this rank's waits while the context is open; those of other threads are not looked at.

    Args:
        clock: nothing is watched where it cannot tell communication.
    """
    if not (clock.tells_communication and dist.is_available() and dist.is_initialized()):
        yield
        return
    places: list[tuple[Any, str]] = [(dist.Work, "wait"), (functional, "wait_tensor")]
    if clock.device.type == "cuda":
        places += [(dist, name) for name in CALLS if hasattr(dist, name)]
    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, _counted(getattr(owner, name), clock)))
        yield


def _counted(function: Callable[..., Any], clock: StepClock) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not clock.sees_this_thread():
            return function(*args, **kwargs)
        with clock.phase("communication"):
            return function(*args, **kwargs)

    return call
