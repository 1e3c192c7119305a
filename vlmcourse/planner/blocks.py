"""Blocks of device memory and the two sets that a caching allocator keeps of those that are free.

Enters: addresses and sizes in bytes. Leaves: a doubly linked list of `Block`s a segment, and `FreePool`s that find the
smallest free block for a request. No rule of when to split or to ask for more is here, see `planner.allocator`.

Source: torch 2.13.0, c10/cuda/CUDACachingAllocator.cpp, `Block`, `BlockPool`, `BlockComparatorSize`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from vlmcourse.planner.memory_map import ALLOCATED, FREE, BlockView, MemoryMap, SegmentView


@dataclass(eq=False, slots=True)
class ExpandableRange:
    """A range of addresses, most of it not backed by memory: what one expandable segment may grow over."""

    address: int
    size_bytes: int
    page_bytes: int
    """Memory is mapped and unmapped in pages of this size, 2 MiB in the small pool, 20 in the large one."""


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of addresses in one state, in a list with its neighbours in the segment."""

    address: int
    size_bytes: int
    stream: int
    pool: FreePool
    range: ExpandableRange | None = None
    """The expandable segment that it is in, if it is in one."""
    is_mapped: bool = True
    """Whether memory is behind the addresses; False only in an expandable segment."""
    is_allocated: bool = False
    requested_bytes: int = 0
    owner: str = ""
    prev: Block | None = None
    next: Block | None = None
    searches_before: int = 0
    """Of its pool, when it was last put there: its age counts from then."""

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    @property
    def age(self) -> int:
        """Searches of its pool since it was put there."""
        return self.pool.num_searches - self.searches_before

    def insert_between(self, before: Block | None, after: Block | None) -> None:
        """Take a place in the list between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


@dataclass(eq=False)
class FreePool:
    """The free blocks of the small or of the large pool, in the order of (stream, size, address)."""

    is_small: bool
    num_searches: int = 0
    """Counted only while garbage is collected."""
    _keys: list[tuple[int, int, int]] = field(default_factory=list)
    _blocks: dict[tuple[int, int, int], Block] = field(default_factory=dict)
    _unmapped_keys: list[tuple[int, int]] = field(default_factory=list)
    _unmapped: dict[tuple[int, int], Block] = field(default_factory=dict)

    def put(self, block: Block) -> None:
        """Add a free block."""
        block.searches_before = self.num_searches
        key = (block.stream, block.size_bytes, block.address)
        bisect.insort(self._keys, key)
        self._blocks[key] = block

    def take(self, block: Block) -> None:
        """Remove a free block; its size must be what it was when it was put in."""
        key = (block.stream, block.size_bytes, block.address)
        del self._keys[bisect.bisect_left(self._keys, key)]
        del self._blocks[key]

    def put_unmapped(self, block: Block) -> None:
        """Add a stretch of addresses without memory."""
        key = (block.stream, block.address)
        bisect.insort(self._unmapped_keys, key)
        self._unmapped[key] = block

    def take_unmapped(self, block: Block) -> None:
        """Remove a stretch of addresses without memory."""
        key = (block.stream, block.address)
        del self._unmapped_keys[bisect.bisect_left(self._unmapped_keys, key)]
        del self._unmapped[key]

    def from_size(self, stream: int, size_bytes: int) -> Iterator[Block]:
        """Yield the stream's free blocks of at least this size, smallest first, lowest address first among equals."""
        for key in self._keys[bisect.bisect_left(self._keys, (stream, size_bytes, -1)) :]:
            if key[0] != stream:
                return
            yield self._blocks[key]

    def largest_first(self, stream: int) -> list[Block]:
        """Return the stream's free blocks, largest first."""
        return list(self.from_size(stream, 0))[::-1]

    def unmapped(self, stream: int) -> list[Block]:
        """Return the stream's stretches without memory, lowest address first."""
        return [self._unmapped[key] for key in self._unmapped_keys if key[0] == stream]

    def all_free(self) -> list[Block]:
        """Return the free blocks of all streams in the pool's order."""
        return [self._blocks[key] for key in self._keys]


def merge_into(block: Block, neighbour: Block | None) -> bool:
    """Let `block` take in a free neighbour, which leaves its pool; return whether it did.

    Both must be mapped, or both not. `block` itself must be in no pool.
    """
    if neighbour is None or neighbour.is_allocated or neighbour.is_mapped != block.is_mapped:
        return False
    pool = neighbour.pool
    (pool.take if neighbour.is_mapped else pool.take_unmapped)(neighbour)
    if block.prev is neighbour:
        block.address = neighbour.address
        block.insert_between(neighbour.prev, block.next)
    else:
        block.insert_between(block.prev, neighbour.next)
    block.size_bytes += neighbour.size_bytes
    return True


def view_blocks(blocks: list[Block]) -> MemoryMap:
    """Return mapped blocks as segments: one for each cudaMalloc, and for each mapped stretch of an expandable range."""
    segments = []
    for head in sorted(blocks, key=lambda block: block.address):
        if head.prev is not None and head.prev.is_mapped:
            continue
        views, block = [], head
        while block is not None and block.is_mapped:
            state = ALLOCATED if block.is_allocated else FREE
            views.append(BlockView(block.address, block.size_bytes, state, block.requested_bytes, block.owner))
            block = block.next
        size_bytes = sum(view.size_bytes for view in views)
        where = (head.address, size_bytes, head.pool.is_small, head.range is not None, head.stream)
        segments.append(SegmentView(*where, tuple(views)))
    return MemoryMap(tuple(segments))
