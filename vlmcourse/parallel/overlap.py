"""Show by a trace how much of the communication of a step hides behind its computation.

Enters: a function that runs one step on this rank. Leaves: a `StepTrace`: when this rank computed and when collectives
were on their way, and the fraction of the second that lies within the first. On a CPU, computation is what PyTorch's
operators do on any thread and a collective lasts from its call to its end in gloo; on a GPU both are kernels. Times are
each rank's own, from its step's start: clocks of ranks are not compared. Chapter 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
"""Start and end in seconds since the step began."""
GLOO = "gloo:"
NCCL_KERNELS = ("ncclDevKernel", "ncclKernel")
STEP = "vlmcourse step"
MICROSECOND = 1e-6


@dataclass(frozen=True, kw_only=True)
class Communication:
    """One collective on its way."""

    name: str
    """Such as gloo:all_reduce."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What one rank did in one step; plain data that can travel to a notebook."""

    seconds: float
    """From the step's start to the end of everything in it."""
    compute: tuple[Interval, ...]
    """Merged: they do not touch each other."""
    communication: tuple[Communication, ...]
    """In order of their start; some may be on their way together."""

    @property
    def communication_s(self) -> float:
        """Time in which at least one collective was on its way."""
        return total_s(self._communicating())

    @property
    def overlapped_s(self) -> float:
        """Time in which this rank computed while a collective was on its way."""
        return total_s(intersect(self.compute, self._communicating()))

    @property
    def overlapped_fraction(self) -> float:
        """Part of the communication that is hidden; 0 where there is none."""
        return self.overlapped_s / self.communication_s if self.communication_s else 0.0

    def _communicating(self) -> tuple[Interval, ...]:
        return merge((part.start_s, part.end_s) for part in self.communication)


def trace_step(step: Callable[[], object], device: torch.device) -> StepTrace:
    """Run one step under PyTorch's profiler.

    Args:
        step: runs forward, backward and whatever belongs to it; every rank must call this. Run it once or twice before:
            DDP arranges its buckets in the first steps.
        device: this rank's.

    Returns:
        The trace of this rank.

    Raises:
        RuntimeError: if the profiler saw no computation.
    Communicates: what the step does.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else each start and stop prints a line of its own
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        with torch.profiler.record_function(STEP):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return read_trace(profiler.events() or (), device.type == "cuda")


def read_trace(events: Iterable[Any], on_gpu: bool) -> StepTrace:
    """Sort a profiler's events into computation and communication.

    Args:
        events: `torch.autograd.profiler_util.FunctionEvent`s of one step, `STEP` among them.
        on_gpu: whether to look at kernels instead of operators.

    Raises:
        RuntimeError: if there is no step or no computation among them.
    """
    listed = list(events)
    began_us = min((event.time_range.start for event in listed if event.name == STEP), default=None)
    if began_us is None:
        raise RuntimeError("the profiler recorded no step: it may have been off, or another one was on")

    def interval(event: Any) -> Interval:
        return tuple(MICROSECOND * (moment - began_us) for moment in (event.time_range.start, event.time_range.end))  # type: ignore[return-value]

    where = DeviceType.CUDA if on_gpu else DeviceType.CPU
    there = [event for event in listed if event.device_type == where]
    sent = [event for event in there if event.name.startswith(NCCL_KERNELS if on_gpu else GLOO)]
    computed = [event for event in there if event not in sent] if on_gpu else [e for e in there if is_operator(e.name)]
    compute = merge(map(interval, computed))
    if not compute:
        raise RuntimeError("the profiler saw no computation in this step: run forward and backward in it")
    communication = [
        Communication(name=event.name, start_s=start, end_s=end)
        for event in sorted(sent, key=lambda event: event.time_range.start)
        for start, end in [interval(event)]
    ]
    ends = [compute[-1][1], *(part.end_s for part in communication)]
    return StepTrace(seconds=max(ends), compute=compute, communication=tuple(communication))


def is_operator(name: str) -> bool:
    """Whether an event on a CPU is an operator at work, and not a collective, a wait or a frame around others."""
    return name.startswith("aten::")


def merge(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the union of some intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def intersect(first: Iterable[Interval], second: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return where two unions of intervals, as `merge` returns them, are both."""
    a, b, common = list(first), list(second), []
    while a and b:
        start, end = max(a[0][0], b[0][0]), min(a[0][1], b[0][1])
        if start < end:
            common.append((start, end))
        (a if a[0][1] < b[0][1] else b).pop(0)
    return tuple(common)


def subtract(first: Iterable[Interval], second: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return where the first of two unions of intervals, as `merge` returns them, is and the second is not."""
    left: list[Interval] = []
    holes = list(second)
    at = 0
    for start, end in first:
        while at < len(holes) and holes[at][1] <= start:
            at += 1
        cut = at
        while cut < len(holes) and holes[cut][0] < end:
            if start < holes[cut][0]:
                left.append((start, holes[cut][0]))
            start = max(start, holes[cut][1])
            cut += 1
        if start < end:
            left.append((start, end))
    return tuple(left)


def total_s(intervals: Iterable[Interval]) -> float:
    """Return the length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)
