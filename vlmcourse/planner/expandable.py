"""Expandable segments: one range of addresses a pool and stream, to which memory is mapped page by page.

Enters: free pools (`planner.blocks`) and a device that says how many bytes are left. Leaves: a block of the size asked
for, made of free memory and of pages mapped behind it, or None; and unmapped pages when memory is given back.

A segment from cudaMalloc never grows, so a request a little larger than all holes needs a new one. A range of
addresses does grow: the hole at its end and new pages together serve the request. And a hole in its middle is given
back page by page, where cudaFree takes whole segments only.

Source: torch 2.13.0, c10/cuda/CUDACachingAllocator.cpp, note "Expandable Segments", `find_expandable_block`,
`map_block`, `try_allocate_expandable_block`, `unmap_block`. Chapter 5.
"""

from __future__ import annotations

from typing import Protocol

from vlmcourse.planner.allocator_settings import round_up
from vlmcourse.planner.blocks import Block, ExpandableRange, FreePool, merge_into


class Device(Protocol):
    """What mapping needs of the allocator."""

    def take_bytes(self, action: str, address: int, size_bytes: int) -> bool:
        """Reserve bytes of the device; False where there are not that many."""
        ...

    def give_bytes(self, action: str, address: int, size_bytes: int) -> None:
        """Give bytes back to the device."""
        ...

    def new_range(self, page_bytes: int) -> ExpandableRange:
        """Return a new range of addresses, larger than the device's memory."""
        ...

    def drop_range(self, taken: ExpandableRange) -> None:
        """Forget a range with no memory behind it."""
        ...


def allocate_expandable(device: Device, pool: FreePool, stream: int, size_bytes: int, page_bytes: int) -> Block | None:
    """Return a free block of at least `size_bytes` at the lowest address that can hold one, taken out of its pool.

    Returns:
        None if the device has too few bytes left; pages mapped before that stay, as free blocks.
    """
    candidate = _find_room(device, pool, stream, size_bytes, page_bytes)
    if not candidate.is_mapped and not _map(device, candidate, min(candidate.size_bytes, size_bytes)):
        return None
    while candidate.size_bytes < size_bytes:  # free memory with addresses behind it: map those, and merge
        following = candidate.next
        assert following is not None and not following.is_mapped
        missing = size_bytes - candidate.size_bytes
        if not _map(device, following, min(missing, following.size_bytes)):
            return None
        candidate = following
    pool.take(candidate)
    return candidate


def _find_room(device: Device, pool: FreePool, stream: int, size_bytes: int, page_bytes: int) -> Block:
    """Return the first of the neighbours, free or without memory, that have room together."""
    for unmapped in pool.unmapped(stream):
        before = unmapped.prev
        first = before if before is not None and not before.is_allocated else unmapped
        room, block = 0, first
        while block is not None and not block.is_allocated and room < size_bytes:
            room += block.size_bytes
            block = block.next
        if room >= size_bytes:
            return first
    taken = device.new_range(page_bytes)
    whole = Block(taken.address, taken.size_bytes, stream, pool, range=taken, is_mapped=False)
    pool.put_unmapped(whole)
    return whole


def _map(device: Device, block: Block, size_bytes: int) -> bool:
    """Put memory behind the first bytes of an unmapped block, in whole pages, and make them a free block."""
    assert block.range is not None and not block.is_mapped and size_bytes <= block.size_bytes
    mapped_bytes = round_up(size_bytes, block.range.page_bytes)
    if not device.take_bytes("segment_map", block.address, mapped_bytes):
        return False
    pool = block.pool
    pool.take_unmapped(block)
    block.is_mapped = True
    if mapped_bytes < block.size_bytes:
        rest = Block(
            block.address + mapped_bytes,
            block.size_bytes - mapped_bytes,
            block.stream,
            pool,
            range=block.range,
            is_mapped=False,
        )
        rest.insert_between(block, block.next)
        pool.put_unmapped(rest)
        block.size_bytes = mapped_bytes
    merge_into(block, block.prev)
    merge_into(block, block.next)
    pool.put(block)
    return True


def unmap_free_pages(device: Device, block: Block) -> None:
    """Give back the whole pages of a free block; what is left of it on either side stays free."""
    assert block.range is not None
    pool, page_bytes, base = block.pool, block.range.page_bytes, block.range.address
    end = block.address + block.size_bytes
    first = base + round_up(block.address - base, page_bytes)
    last = base + (end - base) // page_bytes * page_bytes
    if first >= last:
        return
    pool.take(block)
    for address, size_bytes in ((block.address, first - block.address), (last, end - last)):
        if size_bytes:
            rest = Block(address, size_bytes, block.stream, pool, range=block.range)
            is_below = address < first
            rest.insert_between(block.prev if is_below else block, block if is_below else block.next)
            pool.put(rest)
    block.address, block.size_bytes, block.is_mapped = first, last - first, False
    device.give_bytes("segment_unmap", first, last - first)
    merge_into(block, block.prev)
    merge_into(block, block.next)
    if block.is_split:
        pool.put_unmapped(block)
    else:
        device.drop_range(block.range)
