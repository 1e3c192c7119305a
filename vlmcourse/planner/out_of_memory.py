"""PyTorch's out-of-memory error with its numbers, and how it writes sizes.

Enters: bytes. Leaves: the message that training ends with when no block and no segment can be had, for the simulator.
Source: torch 2.13.0, c10/cuda/CUDACachingAllocator.cpp, `malloc` and `format_size`. Chapter 5.
"""

from __future__ import annotations

from dataclasses import dataclass


def format_size(size_bytes: int) -> str:
    """Return a size as PyTorch's error messages write it."""
    if size_bytes <= 2**10:
        return f"{size_bytes} bytes"
    for unit_bytes, name in ((2**10, "KiB"), (2**20, "MiB")):
        if size_bytes <= unit_bytes * 2**10:
            return f"{size_bytes / unit_bytes:.2f} {name}"
    return f"{size_bytes / 2**30:.2f} GiB"


@dataclass(eq=False)
class SimulatedOutOfMemoryError(RuntimeError):
    """No block and no segment for a request, after all that could be given back was; the message is PyTorch's."""

    requested_bytes: int
    """What the program asked for."""
    segment_bytes: int
    """What the allocator asked the device for: the number of the message."""
    device_bytes: int
    allowed_bytes: int | None
    """What may be reserved, where a memory fraction is set."""
    allocated_bytes: int
    reserved_bytes: int

    @property
    def device_free_bytes(self) -> int:
        """What nobody has reserved of the device."""
        return self.device_bytes - self.reserved_bytes

    @property
    def unallocated_bytes(self) -> int:
        """Reserved by PyTorch but unallocated."""
        return self.reserved_bytes - self.allocated_bytes

    def __str__(self) -> str:
        allowed = "" if self.allowed_bytes is None else f"{format_size(self.allowed_bytes)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.segment_bytes)}. GPU 0 has a total capacity of "
            f"{format_size(self.device_bytes)} of which {format_size(self.device_free_bytes)} is free. {allowed}Of the "
            f"allocated memory {format_size(self.allocated_bytes)} is allocated by PyTorch, and "
            f"{format_size(self.unallocated_bytes)} is reserved by PyTorch but unallocated. (simulated)"
        )
