"""Fragmentation: replay a trace of allocations, find the request that did not fit, and compare what is said to help.

Enters: an `AllocTrace` and `AllocatorSettings`. Leaves: bytes allocated and reserved after every event, the moment at
which a free total did not hold one request, and a table of remedies on the same trace. Simulated, not measured: the
bytes are those of `planner.allocator`. Chapter 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.planner.alloc_trace import ALLOC, EMPTY_CACHE, FREED, GIVE, AllocEvent, AllocTrace
from vlmcourse.planner.allocator import CachingAllocator
from vlmcourse.planner.allocator_settings import MAX_SMALL_BYTES, MIB, AllocatorSettings, parse_allocator_settings
from vlmcourse.planner.memory_map import MemoryMap
from vlmcourse.planner.out_of_memory import SimulatedOutOfMemoryError, format_size

DEVICE_STEP_BYTES = 2 * MIB
"""How exactly the smallest device is searched for: the allocator asks for multiples of this."""


@dataclass(frozen=True)
class Refusal:
    """The moment at which a request could not be served."""

    event: int
    """Position of the request in the trace."""
    owner: str
    requested_bytes: int
    segment_bytes: int
    """What the allocator would have had to get from the device."""
    device_free_bytes: int
    """What the device has left."""
    free_bytes: int
    """The sum of the holes in the request's pool, after all that could be given back was."""
    largest_free_bytes: int
    """The largest of these holes."""
    allocated_bytes: int
    reserved_bytes: int
    map: MemoryMap
    message: str
    """PyTorch's error, with the simulated numbers."""

    @property
    def total_free_bytes(self) -> int:
        """Holes and the rest of the device together."""
        return self.free_bytes + self.device_free_bytes

    @property
    def is_fragmentation(self) -> bool:
        """Whether what is free would have been enough, had it been in one piece."""
        return self.total_free_bytes >= self.requested_bytes

    def explain(self) -> str:
        """Say in two sentences why the request did not fit."""
        first = (
            f"A request of {format_size(self.requested_bytes)} did not fit: {format_size(self.total_free_bytes)} were "
            f"free, {format_size(self.free_bytes)} of them in holes of its pool and "
            f"{format_size(self.device_free_bytes)} outside."
        )
        if not self.is_fragmentation:
            return f"{first} That is less than the request: no arrangement would have helped."
        return (
            f"{first} The largest hole has {format_size(self.largest_free_bytes)}, and a new segment would take "
            f"{format_size(self.segment_bytes)}: enough in sum, and nowhere in one piece."
        )


@dataclass(frozen=True)
class Replay:
    """What became of a trace."""

    trace: AllocTrace
    settings: AllocatorSettings
    device_bytes: int | None
    allocated_bytes: tuple[int, ...]
    """After each event; ends early where a request was refused."""
    reserved_bytes: tuple[int, ...]
    num_device_calls: int
    """cudaMalloc, cudaFree, mapping and unmapping: calls that may stop the GPU."""
    num_retries: int
    """Requests served only after all unused segments had been given back."""
    end_map: MemoryMap
    """After the last event."""
    refusal: Refusal | None

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes in blocks that tensors held."""
        return max(self.allocated_bytes, default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that the allocator held."""
        return max(self.reserved_bytes, default=0)

    @property
    def peak_event(self) -> int:
        """The event at which the most bytes were allocated, the first of several."""
        return self.allocated_bytes.index(self.peak_allocated_bytes)

    @property
    def unused_fraction(self) -> float:
        """Of the peak of reserved bytes, the part above the peak of allocated ones."""
        return 1 - self.peak_allocated_bytes / self.peak_reserved_bytes if self.peak_reserved_bytes else 0.0


def replay(
    trace: AllocTrace,
    settings: AllocatorSettings | None = None,
    device_bytes: int | None = None,
    end: int | None = None,
) -> Replay:
    """Run a trace through the simulated allocator.

    Args:
        trace: what was asked for.
        settings: of the allocator; PyTorch's defaults if left out.
        device_bytes: what the device has; None never runs out.
        end: stop before this event; None plays all.

    Returns:
        The course of it, up to the request that was refused, if one was.

    Raises:
        ValueError: if the trace frees a key that is not in use, or uses one twice.
    """
    allocator = CachingAllocator(settings, device_bytes)
    allocated, reserved = [], []
    refusal = None
    for i, event in enumerate(trace.events[:end]):
        try:
            play_event(allocator, event)
        except SimulatedOutOfMemoryError as error:
            refusal = _refusal(i, event, allocator, error)
        except KeyError as error:
            raise ValueError(
                f"event {i} frees allocation {event.key}, which is not in use: the trace is broken"
            ) from error
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
        if refusal is not None:
            break
    return Replay(
        trace,
        allocator.settings,
        device_bytes,
        tuple(allocated),
        tuple(reserved),
        len(allocator.actions),
        allocator.num_retries,
        allocator.memory_map(),
        refusal,
    )


def play_event(allocator: CachingAllocator, event: AllocEvent) -> None:
    """Let one event happen.

    Raises:
        SimulatedOutOfMemoryError: if a request does not fit.
        KeyError: if a key that is not in use is freed.
    """
    if event.kind == ALLOC:
        allocator.malloc(event.key, event.size_bytes, event.label, event.stream)
    elif event.kind == FREED:
        allocator.free(event.key)
    elif event.kind == GIVE:
        allocator.give(event.key, event.label)
    elif event.kind == EMPTY_CACHE:
        allocator.empty_cache()


def _refusal(i: int, event: AllocEvent, allocator: CachingAllocator, error: SimulatedOutOfMemoryError) -> Refusal:
    found = allocator.memory_map()
    is_small = allocator.settings.round_size(event.size_bytes) <= MAX_SMALL_BYTES
    holes = found.holes(is_small, event.stream)
    return Refusal(
        event=i,
        owner=event.label,
        requested_bytes=event.size_bytes,
        segment_bytes=error.segment_bytes,
        device_free_bytes=error.device_free_bytes,
        free_bytes=sum(holes),
        largest_free_bytes=max(holes, default=0),
        allocated_bytes=error.allocated_bytes,
        reserved_bytes=error.reserved_bytes,
        map=found,
        message=str(error),
    )


def smallest_device(trace: AllocTrace, settings: AllocatorSettings | None = None) -> int:
    """Return the fewest bytes of a device on which the trace runs to its end, to 2 MiB.

    Peak reserved bytes on a large device say too much: unused segments are given back before a request fails. The
    search halves the range between what is allocated at most and what is reserved where nothing runs out, and so takes
    it that more memory never hurts.
    """
    free_run = replay(trace, settings)
    fits = -(-free_run.peak_reserved_bytes // DEVICE_STEP_BYTES) * DEVICE_STEP_BYTES
    fails = free_run.peak_allocated_bytes // DEVICE_STEP_BYTES * DEVICE_STEP_BYTES - DEVICE_STEP_BYTES
    while fits - fails > DEVICE_STEP_BYTES:
        middle = (fits + fails) // 2 // DEVICE_STEP_BYTES * DEVICE_STEP_BYTES
        if middle <= fails or middle < 1:
            break
        if replay(trace, settings, middle).refusal is None:
            fits = middle
        else:
            fails = middle
    return fits


# --- Remedies -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remedy:
    """One row of the table: a way to run the same samples."""

    name: str
    settings: str
    """The text for `PYTORCH_ALLOC_CONF`; "" for the defaults."""
    num_sizes: int
    """Different sizes that are asked for."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """On a device that is large enough."""
    smallest_device_bytes: int
    """The smallest device on which it runs to the end."""
    num_device_calls: int
    """cudaMalloc, cudaFree, mapping and unmapping, on a device that is large enough."""

    @property
    def unused_fraction(self) -> float:
        """Of the peak of reserved bytes, the part above the peak of allocated ones."""
        return 1 - self.peak_allocated_bytes / self.peak_reserved_bytes if self.peak_reserved_bytes else 0.0


def compare_remedies(
    trace: AllocTrace, bucketed: AllocTrace | None = None, max_split_size_mb: int = 64
) -> tuple[Remedy, ...]:
    """Replay a trace with each remedy.

    Args:
        trace: of steps on batches as they come.
        bucketed: of steps on the same samples in batches of a few shapes; its rows are left out without it.
        max_split_size_mb: of the row with that setting.

    Returns:
        Rows, the first without any remedy.
    """
    cases: dict[str, tuple[AllocTrace, str]] = {
        "nothing": (trace, ""),
        "empty_cache() before every step": (trace.with_cache_emptied(), ""),
        "largest batch first": (trace.with_largest_step_first(), ""),
        f"max_split_size_mb:{max_split_size_mb}": (trace, f"max_split_size_mb:{max_split_size_mb}"),
        "roundup_power2_divisions:8": (trace, "roundup_power2_divisions:8"),
        "expandable_segments:True": (trace, "expandable_segments:True"),
    }
    if bucketed is not None:
        cases["batches of a few shapes"] = (bucketed, "")
        cases["a few shapes, largest first"] = (bucketed.with_largest_step_first(), "")
    return tuple(measure_remedy(name, *case) for name, case in cases.items())


def measure_remedy(name: str, trace: AllocTrace, settings_text: str) -> Remedy:
    """Replay a trace with a text of settings, on a device that is large enough and on ever smaller ones."""
    settings = parse_allocator_settings(settings_text)
    run = replay(trace, settings)
    return Remedy(
        name,
        settings_text,
        len(trace.sizes),
        run.peak_allocated_bytes,
        run.peak_reserved_bytes,
        smallest_device(trace, settings),
        run.num_device_calls,
    )
