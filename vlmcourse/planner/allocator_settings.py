"""The settings of PyTorch's CUDA caching allocator: what may be set, what a text of settings means, and its sizes.

Enters: a text such as `max_split_size_mb:128,expandable_segments:True`, as `PYTORCH_ALLOC_CONF` holds it. Leaves:
`AllocatorSettings`, which say how a request is rounded and how large a new segment is. Left out on purpose: settings of
pinned host memory, which change nothing on the device; and `backend:cudaMallocAsync`, another allocator.

Source: torch 2.13.0, c10/core/AllocatorConfig.h and .cpp (constants and limits), c10/cuda/CUDACachingAllocator.cpp
(`round_size`, `get_allocation_size`); every limit below is compared with the library itself in the tests. Chapter 5.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

MIB = 2**20
MIN_BLOCK_BYTES = 512
"""All sizes are multiples of this (`kMinBlockSize`)."""
MAX_SMALL_BYTES = MIB
"""The largest request of the small pool (`kSmallSize`)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Segments, and expandable pages, of the small pool (`kSmallBuffer`)."""
MIN_LARGE_BYTES = 10 * MIB
"""From here on a request gets a segment of its own size (`kMinLargeAlloc`)."""
ROUND_LARGE_BYTES = 2 * MIB
"""What such a segment's size is rounded up to (`kRoundLarge`)."""
NUM_INTERVALS = 16
"""`roundup_power2_divisions` may differ by interval: up to 2 MiB, 2 to 4 MiB, ..., 32 GiB and more."""

HOST_KEYS = (
    "pinned_use_background_threads",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "pinned_use_cuda_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all",
    "release_lock_on_cudamalloc",
)
"""Keys that change nothing of where blocks lie on the device."""
KEYS = (
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "expandable_segments",
    "large_segment_size_mb",
    "per_process_memory_fraction",
    "backend",
    *HOST_KEYS,
)


class AllocatorSettingsError(ValueError):
    """A text of settings that PyTorch would refuse, or that the simulator cannot follow."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """How the allocator behaves; the defaults are PyTorch's."""

    max_split_bytes: int | None = None
    """Blocks from this size on are never split; None splits all."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """How much larger than a request a block that may not be split can be and still serve it."""
    roundup_divisions: tuple[int, ...] = (0,) * NUM_INTERVALS
    """Steps between a power of two and the next that sizes are rounded up to, by interval; 0 and 1 do not round."""
    garbage_collection_fraction: float = 0.0
    """Of the memory allowed: above it unused segments are given back before a new one is asked for; 0 never does."""
    expandable_segments: bool = False
    """Whether a pool grows one segment page by page, instead of asking for many."""
    large_segment_bytes: int = 20 * MIB
    """Segments for requests of 1 to 10 MiB, and expandable pages of the large pool."""
    memory_fraction: float | None = None
    """Of the device's memory that may be reserved (`set_per_process_memory_fraction`); None sets no such limit."""

    def __post_init__(self) -> None:
        _check_limits(self)

    def round_size(self, size_bytes: int) -> int:
        """Return the bytes of the block that a request of `size_bytes` takes up."""
        if size_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        interval = min(max(size_bytes.bit_length() - MIB.bit_length(), 0), NUM_INTERVALS - 1)
        divisions = self.roundup_divisions[interval]
        if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
            return _next_division(size_bytes, divisions)
        return round_up(size_bytes, MIN_BLOCK_BYTES)

    def segment_size(self, block_bytes: int) -> int:
        """Return the bytes of the segment that is asked for where no cached block serves a block of this size."""
        if block_bytes <= MAX_SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return round_up(block_bytes, ROUND_LARGE_BYTES)

    def page_size(self, is_small: bool) -> int:
        """Return the bytes that an expandable segment of a pool grows by."""
        return SMALL_SEGMENT_BYTES if is_small else self.large_segment_bytes


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def _next_division(size_bytes: int, divisions: int) -> int:
    floor = 1 << (size_bytes.bit_length() - 1)
    return round_up(size_bytes, floor // divisions)


def _check_limits(settings: AllocatorSettings) -> None:
    least = settings.large_segment_bytes
    if least <= MIN_LARGE_BYTES:
        raise AllocatorSettingsError(
            f"large_segment_bytes = {least}: must be more than {MIN_LARGE_BYTES} (10 MiB), since larger requests get "
            "segments of their own; leave it at 20 MiB or raise it"
        )
    for name in ("max_split_bytes", "max_non_split_rounding_bytes"):
        value = getattr(settings, name)
        if value is not None and value < least:
            raise AllocatorSettingsError(
                f"{name} = {value} ({value / MIB:g} MiB): must be at least large_segment_bytes, {least // MIB} MiB"
            )
    divisions = settings.roundup_divisions
    if len(divisions) != NUM_INTERVALS or any(count < 0 or count & (count - 1) for count in divisions):
        raise AllocatorSettingsError(
            f"roundup_divisions = {divisions}: must be {NUM_INTERVALS} numbers, each a power of two, or 0 to leave an "
            "interval alone"
        )
    if not 0 <= settings.garbage_collection_fraction < 1:
        raise AllocatorSettingsError(
            f"garbage_collection_fraction = {settings.garbage_collection_fraction}: must be between 0 and 1, 1 excluded"
        )
    fraction = settings.memory_fraction
    if fraction is not None and not 0 < fraction <= 1:
        raise AllocatorSettingsError(f"memory_fraction = {fraction}: must be above 0 and at most 1")
    if settings.garbage_collection_fraction and fraction is None:
        raise AllocatorSettingsError(
            f"garbage_collection_fraction = {settings.garbage_collection_fraction} does nothing in PyTorch while no "
            "memory fraction is set: it is a share of that limit; call torch.cuda.set_per_process_memory_fraction(...) "
            "or add per_process_memory_fraction, here memory_fraction"
        )


# --- Reading the text -----------------------------------------------------------------------------------------------


def parse_allocator_settings(text: str, memory_fraction: float | None = None) -> AllocatorSettings:
    """Return what a text of settings means, as torch 2.13 reads it.

    Args:
        text: `key:value` pairs with commas between; "" gives the defaults.
        memory_fraction: what the program sets by `set_per_process_memory_fraction`, where the text does not.

    Raises:
        AllocatorSettingsError: if a key is unknown, or a value is one that PyTorch refuses; `backend:cudaMallocAsync`
            too, which is another allocator than the one simulated.
    """
    values: dict[str, object] = {} if memory_fraction is None else {"memory_fraction": memory_fraction}
    for item in _split_items(text):
        key, colon, value = (part.strip() for part in item.partition(":"))
        if key not in KEYS:
            near = difflib.get_close_matches(re.split(r"[=\s]", key)[0], KEYS, n=1)
            hint = f"; did you mean {near[0]}:...?" if near else ""
            raise AllocatorSettingsError(f"{item!r}: {key!r} is no setting of the allocator{hint}")
        if not colon or not value:
            raise AllocatorSettingsError(f"{item!r}: a setting is key:value, with a colon")
        values.update(_read_item(key, value))
    if "large_segment_bytes" in values:  # PyTorch moves the other default along with it
        values.setdefault("max_non_split_rounding_bytes", values["large_segment_bytes"])
    return replace(AllocatorSettings(), **values)  # type: ignore[arg-type]


def _split_items(text: str) -> list[str]:
    """Cut at commas that stand in no brackets."""
    return [item.strip() for item in re.split(r",(?![^\[]*\])", text) if item.strip()]


def _read_item(key: str, value: str) -> dict[str, object]:
    if key in HOST_KEYS:
        return {}
    if key == "backend":
        if value != "native":
            raise AllocatorSettingsError(
                f"backend:{value} is another allocator: blocks, segments and every other setting here are of 'native'"
            )
        return {}
    if key == "expandable_segments":
        if value not in ("True", "False"):
            raise AllocatorSettingsError(f"expandable_segments:{value}: must be written True or False, with a capital")
        return {"expandable_segments": value == "True"}
    if key == "roundup_power2_divisions":
        return {"roundup_divisions": _read_divisions(value)}
    if key in ("garbage_collection_threshold", "per_process_memory_fraction"):
        fraction = _read_number(key, value, float)
        if key == "garbage_collection_threshold":
            if not 0 < fraction < 1:
                raise AllocatorSettingsError(f"{key}:{value}: must be above 0 and below 1")
            return {"garbage_collection_fraction": fraction}
        return {"memory_fraction": fraction}
    name = {
        "max_split_size_mb": "max_split_bytes",
        "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
        "large_segment_size_mb": "large_segment_bytes",
    }[key]
    return {name: int(_read_number(key, value, int)) * MIB}


def _read_number(key: str, value: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(value)
    except ValueError as error:
        noun = "a whole number of MiB" if kind is int else "a number"
        raise AllocatorSettingsError(f"{key}:{value}: must be {noun}") from error


def _read_divisions(value: str) -> tuple[int, ...]:
    """Read one number for all intervals, or `[64:8,256:4,>:1]`: by where an interval begins, in MiB."""
    if not value.startswith("["):
        count = int(_read_number("roundup_power2_divisions", value, int))
        if count < 1 or count & (count - 1):
            raise AllocatorSettingsError(f"roundup_power2_divisions:{value}: must be a power of two")
        return (count,) * NUM_INTERVALS
    found, last = [0] * NUM_INTERVALS, -1
    for part in value.strip("[] ").split(","):
        start, _, text = (piece.strip() for piece in part.partition(":"))
        count = int(_read_number("roundup_power2_divisions", text, int))
        if start == ">":  # all that come after the last one named
            found[last + 1 :] = [count] * (NUM_INTERVALS - last - 1)
            continue
        start_mib = int(_read_number("roundup_power2_divisions", start, int))
        if start_mib < 1 or start_mib & (start_mib - 1):
            raise AllocatorSettingsError(
                f"roundup_power2_divisions:{value}: an interval begins at a power of two in MiB, not at {start_mib}"
            )
        index = min(start_mib.bit_length() - 1, NUM_INTERVALS - 1)
        if last < 0:  # the first one counts for all below it too
            found[:index] = [count] * index
        found[index], last = count, index
    return tuple(found)
