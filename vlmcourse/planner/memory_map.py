"""A picture in numbers of a caching allocator at one moment: segments, and the blocks that they are cut into.

Enters: what the simulator (`planner.allocator`) holds, or a snapshot of the real allocator (`monitor.cuda_snapshot`).
Leaves: the same types for both, with the sums that say how fragmented memory is. Chapter 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ALLOCATED = "allocated"
WAITING = "waiting"
"""Freed by the program, and still in use on another stream."""
FREE = "free"
STATES = (ALLOCATED, WAITING, FREE)


@dataclass(frozen=True)
class BlockView:
    """One block: a part of a segment that a tensor holds, or a hole."""

    address: int
    size_bytes: int
    state: str
    """One of `STATES`."""
    requested_bytes: int = 0
    """What was asked for; the rest of the block is lost to rounding. 0 where it is free."""
    owner: str = ""
    """What the bytes are, such as weights or activations; "" where nobody knows, or the block is free."""


@dataclass(frozen=True)
class SegmentView:
    """Bytes that the allocator got from the device at once, or one mapped stretch of an expandable segment."""

    address: int
    size_bytes: int
    is_small: bool
    """Of the pool for requests of up to 1 MiB."""
    is_expandable: bool
    stream: int
    blocks: tuple[BlockView, ...]
    """From the lowest address up."""

    @property
    def is_unused(self) -> bool:
        """Whether no block is in use, so that `empty_cache` could give the segment back."""
        return all(block.state == FREE for block in self.blocks)


@dataclass(frozen=True)
class MemoryMap:
    """All segments at one moment, from the lowest address up."""

    segments: tuple[SegmentView, ...]

    def blocks(self) -> Iterator[BlockView]:
        """Yield every block, from the lowest address up."""
        for segment in self.segments:
            yield from segment.blocks

    @property
    def reserved_bytes(self) -> int:
        """What the allocator holds of the device (`torch.cuda.memory_reserved`)."""
        return sum(segment.size_bytes for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        """Blocks that tensors hold, rounding included (`torch.cuda.memory_allocated`)."""
        return sum(block.size_bytes for block in self.blocks() if block.state == ALLOCATED)

    @property
    def rounding_bytes(self) -> int:
        """Of the allocated bytes, those that nobody asked for."""
        return self.allocated_bytes - sum(b.requested_bytes for b in self.blocks() if b.state == ALLOCATED)

    @property
    def free_bytes(self) -> int:
        """Reserved bytes that are in no use: the sum of the holes."""
        return sum(self.holes())

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that a hole could serve: what `free_bytes` promises and may not keep."""
        return max(self.holes(), default=0)

    def holes(self, is_small: bool | None = None, stream: int | None = None) -> tuple[int, ...]:
        """Return the sizes of the free blocks in bytes, largest first.

        Args:
            is_small: of one pool only; None takes both.
            stream: of one stream only, which is where a block may be used again; None takes all.
        """
        return tuple(
            sorted(
                (
                    block.size_bytes
                    for segment in self.segments
                    for block in segment.blocks
                    if block.state == FREE and is_small in (None, segment.is_small) and stream in (None, segment.stream)
                ),
                reverse=True,
            )
        )

    def by_owner(self) -> dict[str, int]:
        """Return allocated bytes by owner."""
        found: dict[str, int] = {}
        for block in self.blocks():
            if block.state == ALLOCATED:
                found[block.owner] = found.get(block.owner, 0) + block.size_bytes
        return found

    def problems(self) -> list[str]:
        """Say where blocks do not tile their segments or segments lie over each other; an empty list is right."""
        found, end = [], 0
        for segment in self.segments:
            if segment.address < end:
                found.append(f"the segment at {segment.address:#x} begins before the one below it ends, at {end:#x}")
            at, last_state = segment.address, ""
            for block in segment.blocks:
                if block.address != at:
                    found.append(f"a block at {block.address:#x} does not follow on the one that ends at {at:#x}")
                if block.state == last_state == FREE:
                    found.append(f"the free block at {block.address:#x} was not merged with the free one below it")
                if not 0 <= block.requested_bytes <= block.size_bytes or block.size_bytes <= 0:
                    found.append(
                        f"the block at {block.address:#x} has {block.size_bytes} bytes for {block.requested_bytes}"
                    )
                at, last_state = at + block.size_bytes, block.state
            end = segment.address + segment.size_bytes
            if at != end:
                found.append(f"the segment at {segment.address:#x} ends at {end:#x}, its blocks at {at:#x}")
        return found
