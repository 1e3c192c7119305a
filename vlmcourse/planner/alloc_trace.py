"""A trace of allocations: what a program asked of the allocator and gave back, in order.

Enters: events, recorded from real steps (`monitor.alloc_trace`) or from a GPU (`monitor.cuda_snapshot`). Leaves: the
same trace with other sizes, or with steps added, to be replayed (`planner.fragmentation`). Chapter 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

ALLOC, FREED, GIVE, MARK, EMPTY_CACHE = "alloc", "free", "give", "mark", "empty_cache"


@dataclass(frozen=True, slots=True)
class AllocEvent:
    """One thing that happened."""

    kind: str
    """alloc, free (of a key), give (a key's bytes have another owner), mark (a step begins) or empty_cache."""
    key: int = -1
    """Which allocation; a key is used once in a trace."""
    size_bytes: int = 0
    """Of an alloc."""
    label: str = ""
    """The owner of an alloc and of a give; the name of a mark."""
    phase: str = ""
    """Of an alloc: forward, backward or update; "" outside of steps."""
    stream: int = 0


@dataclass(frozen=True)
class AllocTrace:
    """Events of one process, from before its first allocation."""

    events: tuple[AllocEvent, ...]
    scale: int = 1
    """What every size was multiplied by after it was recorded; 1 is as recorded."""

    @property
    def num_allocs(self) -> int:
        """Requests of more than 0 bytes."""
        return sum(event.kind == ALLOC and event.size_bytes > 0 for event in self.events)

    @property
    def sizes(self) -> set[int]:
        """The different sizes that were asked for, in bytes."""
        return {event.size_bytes for event in self.events if event.kind == ALLOC and event.size_bytes}

    @property
    def marks(self) -> list[tuple[int, str]]:
        """Where steps begin: position of the event, name."""
        return [(i, event.label) for i, event in enumerate(self.events) if event.kind == MARK]

    def peak_requested_bytes(self) -> int:
        """Return the most bytes asked for and not yet given back: no allocator can do with less."""
        live: dict[int, int] = {}
        total = peak = 0
        for event in self.events:
            if event.kind == ALLOC:
                live[event.key] = event.size_bytes
                total += event.size_bytes
                peak = max(peak, total)
            elif event.kind == FREED:
                total -= live.pop(event.key)
        return peak

    def scaled(self, factor: int) -> AllocTrace:
        """Return the trace with every size multiplied, as if each tensor had `factor` times the elements.

        It keeps which tensors live together and how their sizes compare, not what a model of that size would do: wider
        layers make weights grow faster than activations, and attention's tensors grow with the sequence. Say so where
        its figures are shown; `scale` holds the factor.

        Raises:
            ValueError: if `factor` is below 1.
        """
        if factor < 1:
            raise ValueError(f"factor = {factor}: must be 1 or greater")
        events = (replace(event, size_bytes=event.size_bytes * factor) for event in self.events)
        return AllocTrace(tuple(events), self.scale * factor)

    def with_cache_emptied(self) -> AllocTrace:
        """Return the trace with `torch.cuda.empty_cache()` called before every step: the remedy that F15 is about."""
        events: list[AllocEvent] = []
        for event in self.events:
            events += [AllocEvent(EMPTY_CACHE), event] if event.kind == MARK else [event]
        return AllocTrace(tuple(events), self.scale)

    def with_largest_step_first(self) -> AllocTrace:
        """Return the trace with the step of the highest peak run once before all others: preallocation.

        PyTorch's tuning guide advises it for inputs of variable length: one forward and backward pass on the largest
        batch, without an update, leaves cached blocks behind that all smaller batches fit into. The pass is made of
        what its step allocates and frees again within itself before the update; what stays, such as gradients that
        outlive the step, is freed at its end, as `zero_grad` does.

        Raises:
            ValueError: if the trace has no step.
        """
        if not self.marks:
            raise ValueError("the trace has 0 steps: at least 1 is needed; mark where steps begin while recording")
        bounds = [*(i for i, _ in self.marks), len(self.events)]
        steps = [self.events[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
        largest = max(steps, key=_peak_of_step)
        first_key = 1 + max((event.key for event in self.events), default=0)
        warm_up = _as_warm_up(largest, first_key)
        return AllocTrace((*self.events[: bounds[0]], *warm_up, *self.events[bounds[0] :]), self.scale)


def _peak_of_step(events: Sequence[AllocEvent]) -> int:
    """Return the most bytes that a step's forward and backward have added to what was there before it.

    What its update makes is left out: the first step's makes the optimizer's state, however small its batch is.
    """
    sizes: dict[int, int] = {}
    total = peak = 0
    for event in events:
        if event.kind == ALLOC and event.phase != "update":
            sizes[event.key] = event.size_bytes
            total += event.size_bytes
            peak = max(peak, total)
        elif event.kind == FREED:
            total -= sizes.pop(event.key, 0)
    return peak


def _as_warm_up(events: Iterable[AllocEvent], first_key: int) -> list[AllocEvent]:
    """Return a step's own allocations of forward and backward, with new keys, all freed by the end."""
    new_keys, keys = itertools.count(first_key), dict[int, int]()
    found: list[AllocEvent] = []
    for event in events:
        if event.kind == MARK:
            found.append(replace(event, label=f"warm-up on {event.label}"))
        elif event.kind == ALLOC and event.phase != "update":
            keys[event.key] = next(new_keys)
            found.append(replace(event, key=keys[event.key]))
        elif event.kind == GIVE and event.key in keys:
            found.append(replace(event, key=keys[event.key]))
        elif event.kind == FREED and event.key in keys:
            found.append(replace(event, key=keys.pop(event.key)))
    return [*found, *(AllocEvent(FREED, key) for key in keys.values())]
