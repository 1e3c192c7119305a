"""A simulator of PyTorch's CUDA caching allocator: the same blocks and segments for the same requests, without a GPU.

Enters: requests and frees, in order, and a device with so many bytes. Leaves: allocated and reserved bytes, a
`MemoryMap` at any moment, and PyTorch's out-of-memory error where it would come.

It follows torch 2.13.0, c10/cuda/CUDACachingAllocator.cpp: `malloc`, `get_free_block`, `alloc_block`, `should_split`,
`free_block`, `try_merge_blocks`, `release_available_cached_blocks`, `release_cached_blocks`,
`garbage_collect_cached_blocks`; sizes are in `planner.allocator_settings`, expandable segments in `planner.expandable`.
Left out on purpose: private pools of CUDA graphs, events of other streams (free a block when its last stream is done),
and where cudaMalloc puts a segment, which decides only between free blocks of equal size. Chapter 5.
"""

from __future__ import annotations

from collections.abc import Callable

from vlmcourse.planner.allocator_settings import (
    MAX_SMALL_BYTES,
    MIB,
    MIN_BLOCK_BYTES,
    AllocatorSettings,
    round_up,
)
from vlmcourse.planner.blocks import Block, ExpandableRange, FreePool, merge_into, view_blocks
from vlmcourse.planner.expandable import allocate_expandable, unmap_free_pages
from vlmcourse.planner.memory_map import MemoryMap
from vlmcourse.planner.out_of_memory import SimulatedOutOfMemoryError

UNLIMITED_BYTES = 2**50
"""What a device has that is never full."""
FIRST_ADDRESS = 2**40


class CachingAllocator:
    """The allocator of one device."""

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        device_bytes: int | None = None,
        place_segment: Callable[[int], int] | None = None,
    ) -> None:
        """Begin with nothing reserved.

        Args:
            settings: PyTorch's defaults if left out.
            device_bytes: what the device has for this allocator alone; None never runs out.
            place_segment: the address of a new segment by its size; by default each lies above all before it.

        Raises:
            ValueError: if `device_bytes` is below 1, or a memory fraction is set for a device without an end.
        """
        self.settings = settings or AllocatorSettings()
        if device_bytes is not None and device_bytes < 1:
            raise ValueError(
                f"device_bytes = {device_bytes}: must be 1 or greater, or None for a device without an end"
            )
        fraction = self.settings.memory_fraction
        if fraction is not None and device_bytes is None:
            raise ValueError(f"memory_fraction = {fraction} is a share of the device's memory: set device_bytes too")
        self.device_bytes = UNLIMITED_BYTES if device_bytes is None else device_bytes
        self.allowed_bytes = None if fraction is None else int(fraction * self.device_bytes)
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.num_retries = 0
        """Requests that were served only after all unused segments had been given back (`num_alloc_retries`)."""
        self.actions: list[tuple[str, int, int]] = []
        """Calls to the device, each of which may stop it: name as in PyTorch's traces, address, bytes."""
        self._small, self._large = FreePool(is_small=True), FreePool(is_small=False)
        self._in_use: dict[int, Block] = {}
        self._of_nothing: set[int] = set()
        """Keys of requests of 0 bytes, which have no block and are freed like others."""
        self._place_segment = place_segment or self._next_address
        self._end_address = FIRST_ADDRESS

    # --- What a program calls -------------------------------------------------------------------------------------

    def malloc(self, key: int, size_bytes: int, owner: str = "", stream: int = 0) -> Block | None:
        """Give a request a block.

        Args:
            key: what the block is called in `free`; in no use now.
            size_bytes: of the request; 0 takes no block, as in PyTorch.
            owner: what the bytes are, for the map.
            stream: where they are used; a block is used again on its own stream only.

        Returns:
            The block, at least as large as the request; None for 0 bytes.

        Raises:
            ValueError: if the key is in use, or the size is negative.
            SimulatedOutOfMemoryError: if nothing that could be given back makes room.
        """
        if key in self._in_use or key in self._of_nothing or size_bytes < 0:
            raise ValueError(
                f"request {key} of {size_bytes} bytes: its key must be in no use and its size not negative"
            )
        if not size_bytes:
            self._of_nothing.add(key)
            return None
        block_bytes = self.settings.round_size(size_bytes)
        pool = self._small if block_bytes <= MAX_SMALL_BYTES else self._large
        block = self._find_free(pool, stream, block_bytes) or self._make_room(pool, stream, block_bytes)
        if block is None:
            raise SimulatedOutOfMemoryError(
                size_bytes,
                self.settings.segment_size(block_bytes),
                self.device_bytes,
                self.allowed_bytes,
                self.allocated_bytes,
                self.reserved_bytes,
            )
        if self._should_split(block, block_bytes):
            block = _split(block, block_bytes)
        block.is_allocated, block.requested_bytes, block.owner = True, size_bytes, owner
        self._in_use[key] = block
        self.allocated_bytes += block.size_bytes
        return block

    def free(self, key: int) -> None:
        """Take a block back into the cache, merged with free neighbours.

        Raises:
            KeyError: if no block of that key is in use.
        """
        if key in self._of_nothing:
            self._of_nothing.remove(key)
            return
        block = self._in_use.pop(key)
        self.allocated_bytes -= block.size_bytes
        block.is_allocated, block.requested_bytes, block.owner = False, 0, ""
        merge_into(block, block.prev)
        merge_into(block, block.next)
        block.pool.put(block)

    def give(self, key: int, owner: str) -> None:
        """Let a block that is in use belong to another owner; a request of 0 bytes has none."""
        if key in self._in_use:
            self._in_use[key].owner = owner

    def empty_cache(self) -> None:
        """Give back all segments in no use, and the whole pages in no use of expandable ones."""
        for pool in (self._large, self._small):
            for block in pool.all_free():
                if block.range is None and not block.is_split:
                    self._release(block)
                elif block.range is not None:
                    unmap_free_pages(self, block)

    # --- Finding a block ------------------------------------------------------------------------------------------

    def _find_free(self, pool: FreePool, stream: int, block_bytes: int) -> Block | None:
        """Take the best fit out of its pool, if one serves."""
        if self._collects_garbage:
            pool.num_searches += 1
        candidates = pool.from_size(stream, block_bytes)
        block = next(candidates, None)
        if block is None:
            return None
        if block.range is not None:  # one that can grow counts as large as it can become
            for following in candidates:
                if _room(following) >= _room(block):
                    break
                block = following
        limit = self.settings.max_split_bytes
        if limit is not None:
            if block_bytes < limit <= block.size_bytes:
                return None
            if block_bytes >= limit and block.size_bytes >= block_bytes + self.settings.max_non_split_rounding_bytes:
                return None
        pool.take(block)
        return block

    def _make_room(self, pool: FreePool, stream: int, block_bytes: int) -> Block | None:
        """Ask the device for more, and again after giving back what is in no use: first a little, then all."""
        if self._collects_garbage:
            self._collect_garbage()
        block = self._new_segment(pool, stream, block_bytes)
        if block is None and self._release_oversize(pool, stream, block_bytes):
            block = self._new_segment(pool, stream, block_bytes)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._new_segment(pool, stream, block_bytes)
        return block

    def _new_segment(self, pool: FreePool, stream: int, block_bytes: int) -> Block | None:
        segment_bytes = self.settings.segment_size(block_bytes)
        if self.allowed_bytes is not None and self.reserved_bytes + segment_bytes > self.allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return allocate_expandable(self, pool, stream, block_bytes, self.settings.page_size(pool.is_small))
        if self.reserved_bytes + segment_bytes > self.device_bytes:
            return None
        address = self._place_segment(segment_bytes)
        self.take_bytes("segment_alloc", address, segment_bytes)
        return Block(address, segment_bytes, stream, pool)

    def _should_split(self, block: Block, block_bytes: int) -> bool:
        rest_bytes = block.size_bytes - block_bytes
        if block.pool.is_small or self.settings.expandable_segments:
            return rest_bytes >= MIN_BLOCK_BYTES
        limit = self.settings.max_split_bytes
        return (limit is None or block_bytes < limit) and rest_bytes > MAX_SMALL_BYTES

    # --- Giving back ----------------------------------------------------------------------------------------------

    @property
    def _collects_garbage(self) -> bool:
        return self.allowed_bytes is not None and self.settings.garbage_collection_fraction > 0

    def _collect_garbage(self) -> None:
        """Give back unused segments of the large pool that are older than the average, until below the threshold."""
        threshold = int(self.settings.garbage_collection_fraction * (self.allowed_bytes or 0))
        surplus = self.reserved_bytes - threshold
        candidates = [b for b in self._large.all_free() if not b.is_split and b.range is None]
        reclaimed, total_age = 0, sum(block.age for block in candidates)
        while surplus > 0 and reclaimed < surplus and candidates:
            average = total_age / len(candidates)  # of the round: what is given back in it counts in the next
            old = [block for block in candidates if block.age >= average]
            if not old:
                return
            for block in old:
                reclaimed += block.size_bytes
                total_age -= block.age
                candidates.remove(block)
                self._release(block)

    def _release_oversize(self, pool: FreePool, stream: int, block_bytes: int) -> bool:
        """Give back one unsplittable block that is large enough, or several; return whether that was enough."""
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        wanted_bytes = max(block_bytes, limit)
        single = next(pool.from_size(stream, wanted_bytes), None)
        if single is not None and single.range is None:
            self._release(single)
            return True
        released = 0
        for block in pool.largest_first(stream):
            if released >= wanted_bytes or block.size_bytes < limit:
                break
            if block.range is None:
                released += block.size_bytes
                self._release(block)
        return released >= wanted_bytes

    def _release(self, block: Block) -> None:
        """Give a whole segment back to the device."""
        block.pool.take(block)
        self.give_bytes("segment_free", block.address, block.size_bytes)

    # --- What expandable segments need of the device ----------------------------------------------------------------

    def take_bytes(self, action: str, address: int, size_bytes: int) -> bool:
        """Reserve bytes of the device; return False, and reserve none, where it has fewer left."""
        if self.reserved_bytes + size_bytes > self.device_bytes:
            return False
        self.reserved_bytes += size_bytes
        self.actions.append((action, address, size_bytes))
        return True

    def give_bytes(self, action: str, address: int, size_bytes: int) -> None:
        """Give bytes back to the device."""
        self.reserved_bytes -= size_bytes
        self.actions.append((action, address, size_bytes))

    def new_range(self, page_bytes: int) -> ExpandableRange:
        """Return addresses for an eighth more than the device's memory."""
        size_bytes = round_up(self.device_bytes + self.device_bytes // 8, page_bytes)
        return ExpandableRange(self._place_segment(size_bytes), size_bytes, page_bytes)

    def drop_range(self, taken: ExpandableRange) -> None:
        """Forget a range; its addresses are not used again."""

    def _next_address(self, size_bytes: int) -> int:
        address, self._end_address = self._end_address, self._end_address + round_up(size_bytes, 2 * MIB)
        return address

    def memory_map(self) -> MemoryMap:
        """Return all segments as they are now."""
        return view_blocks([*self._in_use.values(), *self._small.all_free(), *self._large.all_free()])


def _room(block: Block) -> int:
    """Return the bytes that a free block has or can get by mapping what lies behind it."""
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and not after.is_mapped else 0)


def _split(block: Block, size_bytes: int) -> Block:
    """Cut the first `size_bytes` off a free block, put the rest into its pool, and return the first part."""
    first = Block(block.address, size_bytes, block.stream, block.pool, range=block.range)
    first.insert_between(block.prev, block)
    block.address += size_bytes
    block.size_bytes -= size_bytes
    block.pool.put(block)
    return first
