"""The real allocator's snapshot in the simulator's types.

Enters: what `torch.cuda.memory._snapshot()` returns, here or from a pickle of another machine. Leaves: a `MemoryMap`
for the same pictures, the settings, and the trace of what was asked for, which `monitor.allocator_check` replays.
Reading needs no GPU, taking a snapshot does.

Source: torch 2.13.0, torch/cuda/memory.py, `_snapshot` (the form of the dictionary). Chapter 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlmcourse.planner.alloc_trace import ALLOC, EMPTY_CACHE, FREED, AllocEvent, AllocTrace
from vlmcourse.planner.allocator_settings import AllocatorSettings, parse_allocator_settings
from vlmcourse.planner.memory_map import ALLOCATED, FREE, WAITING, BlockView, MemoryMap, SegmentView

STATES = {
    "active_allocated": ALLOCATED,
    "active_awaiting_free": WAITING,
    "active_pending_free": WAITING,
    "inactive": FREE,
}
TAKES = ("segment_alloc", "segment_map")
GIVES_BACK = ("segment_free", "segment_unmap")


OLD_NAME = "PYTORCH_CUDA_ALLOC_CONF"
"""Under which a snapshot has the text of settings, whatever variable it came from."""


class SnapshotError(ValueError):
    """A snapshot that cannot be read, or a trace that does not tell everything from the first allocation on."""


def record_history(max_entries: int = 1_000_000) -> None:
    """Let the real allocator keep a trace, without stacks; call it before anything is on the GPU.

    Args:
        max_entries: events kept; where there are more, the oldest are lost, and the trace cannot be replayed.

    Raises:
        RuntimeError: if this torch has no CUDA or sees no GPU.
    """
    _check_gpu()
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=max_entries)


def take_snapshot() -> dict[str, Any]:
    """Return the real allocator's snapshot.

    Raises:
        RuntimeError: if this torch has no CUDA or sees no GPU.
    """
    _check_gpu()
    return torch.cuda.memory._snapshot()  # type: ignore[return-value]


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        built = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a CPU build"
        raise RuntimeError(
            f"torch {torch.__version__} {built} and sees no GPU, so there is no CUDA allocator to ask: record a trace "
            "with monitor.alloc_trace and replay it in planner.fragmentation, or read a snapshot from another machine"
        )


def read_map(snapshot: Mapping[str, Any], device: int = 0) -> MemoryMap:
    """Return a snapshot's segments and blocks.

    Args:
        snapshot: of `torch.cuda.memory._snapshot()`.
        device: index of the GPU.

    Returns:
        The map. The owner of a block is the text that `torch.cuda.memory._set_memory_metadata` had set when it was
        allocated, where the trace still has that; "" otherwise. Segments of the private pools of CUDA graphs are in it.

    Raises:
        SnapshotError: if the snapshot has another form, or its blocks do not tile their segments.
    """
    owners = {
        entry["addr"]: entry.get("user_metadata", "")
        for entry in trace_entries(snapshot, device)
        if entry["action"] == "alloc"
    }
    try:
        segments = [
            _read_segment(segment, owners) for segment in snapshot["segments"] if segment.get("device", 0) == device
        ]
    except KeyError as error:
        raise SnapshotError(
            f"the snapshot has no {error}: it must be what torch.cuda.memory._snapshot() of torch 2.1 or newer returns"
        ) from error
    found = MemoryMap(tuple(sorted(segments, key=lambda segment: segment.address)))
    if problems := found.problems():
        raise SnapshotError(f"the snapshot contradicts itself: {'; '.join(problems[:3])}")
    return found


def _read_segment(segment: Mapping[str, Any], owners: Mapping[int, str]) -> SegmentView:
    blocks, address = [], segment["address"]
    for block in segment["blocks"]:
        state = STATES.get(block["state"])
        if state is None:
            raise SnapshotError(f"a block is {block['state']!r}: must be one of {', '.join(STATES)}")
        at = block.get("address", address)
        requested_bytes = 0 if state == FREE else block.get("requested_size", block["size"])
        owner = "" if state == FREE else owners.get(at, "")
        blocks.append(BlockView(at, block["size"], state, requested_bytes, owner))
        address = at + block["size"]
    is_small, is_expandable = segment["segment_type"] == "small", bool(segment.get("is_expandable", False))
    where = (segment["address"], segment["total_size"], is_small, is_expandable, segment["stream"])
    return SegmentView(*where, tuple(blocks))


def trace_entries(snapshot: Mapping[str, Any], device: int) -> Sequence[Mapping[str, Any]]:
    """Return the entries of one GPU's trace, oldest first; none if nothing was recorded."""
    traces = snapshot.get("device_traces", [])
    return traces[device] if device < len(traces) else []


def read_settings(snapshot: Mapping[str, Any]) -> AllocatorSettings:
    """Return the settings that the real allocator ran with.

    A memory fraction is not in a snapshot, and so neither that limit nor garbage collection, which needs it, is
    returned: give `compare_with_simulator` settings of your own where a program sets one.

    Raises:
        SnapshotError: if the snapshot does not hold them.
    """
    found = snapshot.get("allocator_settings")
    if not isinstance(found, Mapping):
        raise SnapshotError("the snapshot has no 'allocator_settings', as torch 2.2 and newer write: pass settings=")
    limit = found.get("max_split_size", -1)
    divisions = found.get("roundup_power2_divisions", {})
    written = parse_allocator_settings(found.get(OLD_NAME, ""), memory_fraction=1.0)
    return replace(
        written,
        # Without a limit it is the largest number there is, which as a signed one is -1.
        max_split_bytes=None if limit < 0 or limit >= 2**62 else limit,
        expandable_segments=bool(found.get("expandable_segments", False)),
        roundup_divisions=tuple(divisions.values()) if divisions else written.roundup_divisions,
        garbage_collection_fraction=0.0,
        memory_fraction=None,
    )


# --- The trace --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RealTrace:
    """What was asked of the real allocator, and what it then held."""

    trace: AllocTrace
    reserved_bytes: tuple[int, ...]
    """Of the device, after each event of the trace; from the segments that were taken and given back."""
    before_segments: frozenset[int]
    """Events of `empty_cache` with a new segment right after: the allocator itself may have made room for it."""


def read_trace(snapshot: Mapping[str, Any], device: int = 0) -> RealTrace:
    """Return the events of a snapshot from the first allocation on.

    A block counts as free from `free_completed` on: until then another stream uses it. Segments given back are taken
    for a call of `empty_cache`, before a request that fails too: the allocator empties its cache before it gives up.

    Raises:
        SnapshotError: if there is no trace, or it began after the first allocation.
    """
    entries = trace_entries(snapshot, device)
    if not entries:
        raise SnapshotError(
            f"the snapshot has no trace of GPU {device}: call record_history() before the program allocates anything"
        )
    pools = {tuple(entry.get("pool_id", (0, 0))) for entry in entries} - {(0, 0)}
    if pools:
        raise SnapshotError(
            f"the trace has blocks of {len(pools)} private pools, which CUDA graphs and torch.cuda.MemPool make: the "
            "simulator has none; record without them"
        )
    events: list[AllocEvent] = []
    reserved_after: list[int] = []
    live: dict[int, int] = {}
    before_segments: set[int] = set()
    reserved, num_keys = 0, 0
    for i, entry in enumerate(entries):
        action, size_bytes = entry["action"], entry.get("size", 0)
        if action in TAKES:
            reserved += size_bytes
        elif action in GIVES_BACK:
            reserved -= size_bytes
            following = entries[i + 1]["action"] if i + 1 < len(entries) else ""
            if following not in GIVES_BACK:
                if following in TAKES:
                    before_segments.add(len(events))
                events.append(AllocEvent(EMPTY_CACHE))
                reserved_after.append(reserved)
        elif action == "alloc":
            live[entry["addr"]] = num_keys
            label = entry.get("user_metadata", "")
            events.append(AllocEvent(ALLOC, num_keys, size_bytes, label, stream=entry["stream"]))
            reserved_after.append(reserved)
            num_keys += 1
        elif action == "free_completed":
            if entry["addr"] not in live:
                raise SnapshotError(
                    f"event {i} frees a block of {size_bytes} bytes that the trace never saw: it began too late, or "
                    "has lost its oldest events; record before the first allocation, and with more entries"
                )
            events.append(AllocEvent(FREED, live.pop(entry["addr"])))
            reserved_after.append(reserved)
    total = sum(segment["total_size"] for segment in snapshot["segments"] if segment.get("device", 0) == device)
    if reserved != total:
        raise SnapshotError(
            f"by its trace the allocator holds {reserved} bytes, by its segments {total}: a trace must begin before "
            "the first allocation; call record_history() first thing in the program"
        )
    return RealTrace(AllocTrace(tuple(events)), tuple(reserved_after), frozenset(before_segments))
