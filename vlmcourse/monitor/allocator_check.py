"""The simulated allocator against the real one: the same requests, and what each of them reserved.

Enters: a snapshot with a trace from before the first allocation. Leaves: a `Comparison` of reserved bytes after every
event, and of allocated bytes and segments at the end. Needs no GPU but for taking the snapshot. Chapter 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from vlmcourse.monitor.cuda_snapshot import SnapshotError, read_map, read_settings, read_trace, trace_entries
from vlmcourse.planner.allocator import CachingAllocator
from vlmcourse.planner.allocator_settings import AllocatorSettings
from vlmcourse.planner.fragmentation import play_event
from vlmcourse.planner.memory_map import FREE, MemoryMap
from vlmcourse.planner.out_of_memory import SimulatedOutOfMemoryError


@dataclass(frozen=True)
class Comparison:
    """How far the simulator is from the real allocator on the same requests."""

    num_events: int
    num_events_off: int
    """Events after which the two had reserved different numbers of bytes."""
    first_off: int | None
    """The first of them."""
    largest_gap_bytes: int
    """Between the reserved bytes of the two, after any event."""
    real_reserved_bytes: int
    simulated_reserved_bytes: int
    real_allocated_bytes: int
    """Blocks in use at the end, those that another stream has still to finish with included."""
    simulated_allocated_bytes: int
    real_segments: tuple[int, ...]
    """Sizes in bytes at the end, smallest first."""
    simulated_segments: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        """Whether reserved bytes after every event, and allocated bytes and segments at the end, are the same."""
        return not self.num_events_off and (self.real_allocated_bytes, self.real_segments) == (
            self.simulated_allocated_bytes,
            self.simulated_segments,
        )

    def describe(self) -> str:
        """Say it in one line."""
        only_real = Counter(self.real_segments) - Counter(self.simulated_segments)
        only_simulated = Counter(self.simulated_segments) - Counter(self.real_segments)
        return (
            f"reserved {self.simulated_reserved_bytes:,} simulated, {self.real_reserved_bytes:,} real; allocated "
            f"{self.simulated_allocated_bytes:,} and {self.real_allocated_bytes:,}; {self.num_events_off} of "
            f"{self.num_events} events off, by {self.largest_gap_bytes:,} bytes at most; "
            f"{sum(only_simulated.values())} segments only simulated, {sum(only_real.values())} only real"
        )


def compare_with_simulator(
    snapshot: Mapping[str, Any],
    device: int = 0,
    settings: AllocatorSettings | None = None,
    device_bytes: int | None = None,
) -> Comparison:
    """Replay a snapshot's trace in the simulator and compare bytes and segments.

    Segments of the simulator get the real ones' addresses in turn, since between free blocks of equal size the lower
    address is taken. On a device that can run full, where the real allocator gave back only some unused segments before
    it took a new one, the program did not ask for that (`empty_cache` gives back all): it is left to the simulator.

    Args:
        snapshot: with a trace from before the first allocation.
        device: index of the GPU.
        settings: that the real allocator ran with; by default those that the snapshot holds.
        device_bytes: what the GPU had for this process; None where it did not run full.

    Raises:
        SnapshotError: if the trace is not complete, or asks for more than `device_bytes`.
    """
    real, real_map = read_trace(snapshot, device), read_map(snapshot, device)
    settings = settings or read_settings(snapshot)
    taken = [entry["addr"] for entry in trace_entries(snapshot, device) if entry["action"] == "segment_alloc"]
    addresses = chain(taken, count(2**60, 2**42))  # more than the real one took, where the two part
    simulator = CachingAllocator(settings, device_bytes)
    if not settings.expandable_segments:
        simulator = CachingAllocator(settings, device_bytes, lambda _: next(addresses))
    gaps = []
    for i, (event, reserved) in enumerate(zip(real.trace.events, real.reserved_bytes, strict=True)):
        if i in real.before_segments and device_bytes is not None and _only_some_left(simulator, reserved):
            gaps.append(0)  # the request that follows shows whether the simulator gives back the same ones
            continue
        try:
            play_event(simulator, event)
        except SimulatedOutOfMemoryError as error:
            raise SnapshotError(f"event {i} does not fit in the simulated device: {error}") from error
        gaps.append(abs(simulator.reserved_bytes - reserved))
    simulated_map = simulator.memory_map()
    return Comparison(
        num_events=len(gaps),
        num_events_off=sum(gap > 0 for gap in gaps),
        first_off=next((i for i, gap in enumerate(gaps) if gap), None),
        largest_gap_bytes=max(gaps, default=0),
        real_reserved_bytes=real_map.reserved_bytes,
        simulated_reserved_bytes=simulator.reserved_bytes,
        real_allocated_bytes=sum(block.size_bytes for block in real_map.blocks() if block.state != FREE),
        simulated_allocated_bytes=simulator.allocated_bytes,
        real_segments=_sizes(real_map),
        simulated_segments=_sizes(simulated_map),
    )


def _only_some_left(simulator: CachingAllocator, reserved_bytes: int) -> bool:
    """Return whether `reserved_bytes` is more than what would be left if all unused segments were given back."""
    segments = simulator.memory_map().segments
    unused = sum(found.size_bytes for found in segments if all(block.state == FREE for block in found.blocks))
    return not simulator.settings.expandable_segments and reserved_bytes > simulator.reserved_bytes - unused


def _sizes(found: MemoryMap) -> tuple[int, ...]:
    return tuple(sorted(segment.size_bytes for segment in found.segments))
