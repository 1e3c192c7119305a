"""Count what a rank waits for other ranks as communication, whoever waits: PyTorch, an engine, a layer.

Enters: a `StepClock` inside of a step. Leaves: its phase "communication" open whenever the thread that trains is in one
of the few places where all collectives end. On a CPU these are `Work.wait`, which every call of `torch.distributed`
makes unless it is asked not to, and `wait_tensor`, by which functional collectives and `DTensor`s do. On a GPU a
collective that is not asked to be asynchronous runs in the stream that computes, so the calls themselves count too.

A function that is watched is replaced once, however many clocks watch it, from whatever threads; the last one to leave
puts it back. DDP waits in C++: see `step_clock.mark_tail`. Chapter 6.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from vlmcourse.monitor.step_clock import StepClock

CALLS = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "broadcast"),
    *("reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "reduce", "barrier"),
)
"""Functions of `torch.distributed` that on a GPU run in the computing stream unless asked otherwise."""


@dataclass
class Watched:
    """A function that is replaced, and the clocks for which it is."""

    original: Callable[..., Any]
    clocks: list[StepClock] = field(default_factory=list)
    replacement: Callable[..., Any] | None = None


_watched: dict[tuple[Any, str], Watched] = {}
"""By owner and name; as much a fact of the process as the functions of the owners are."""
_lock = threading.Lock()


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
            stack.enter_context(_watch(owner, name, clock))
        yield


@contextmanager
def _watch(owner: Any, name: str, clock: StepClock) -> Iterator[None]:
    """Let a clock count the calls of `owner.name` while the context is open."""
    with _lock:
        place = _watched.get((owner, name)) or Watched(getattr(owner, name))
        if place.replacement is None:
            place.replacement = _counted(place.original, place.clocks)
            setattr(owner, name, place.replacement)
            _watched[owner, name] = place
        place.clocks.append(clock)
    try:
        yield
    finally:
        with _lock:
            place.clocks.remove(clock)
            # Whoever has replaced ours since then may still call it: it stays under theirs, and counts for nobody.
            if not place.clocks:
                del _watched[owner, name]
                if getattr(owner, name) is place.replacement:
                    setattr(owner, name, place.original)


def _counted(function: Callable[..., Any], clocks: list[StepClock]) -> Callable[..., Any]:
    """Return the function, whose calls count as communication of those clocks that see the calling thread."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for clock in tuple(clocks):
                if clock.sees_this_thread():
                    stack.enter_context(clock.phase("communication"))
            return function(*args, **kwargs)

    return call
