"""The simulated caching allocator against rules worked out by hand, and against itself over random traces."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
import torch

from vlmcourse.planner.allocator import CachingAllocator
from vlmcourse.planner.allocator_settings import (
    MIB,
    AllocatorSettings,
    AllocatorSettingsError,
    parse_allocator_settings,
)
from vlmcourse.planner.memory_map import FREE, MemoryMap
from vlmcourse.planner.out_of_memory import SimulatedOutOfMemoryError, format_size

KIB = 1024
EXPANDABLE = AllocatorSettings(expandable_segments=True)
NO_SPLIT = AllocatorSettings(max_split_bytes=32 * MIB)


def allocator_of(settings: AllocatorSettings | None = None, device_mib: int | None = None) -> CachingAllocator:
    return CachingAllocator(settings, None if device_mib is None else device_mib * MIB)


def sizes(found: MemoryMap) -> list[list[tuple[float, str]]]:
    """Sizes in MiB and states of the blocks of each segment."""
    return [[(block.size_bytes / MIB, block.state[0]) for block in segment.blocks] for segment in found.segments]


# --- Sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_blocks_are_multiples_of_512_bytes(asked: int, block: int) -> None:
    assert AllocatorSettings().round_size(asked) == block


@pytest.mark.parametrize(
    ("asked_mib", "segment_mib"), [(0.5, 2), (1, 2), (1.5, 20), (9.5, 20), (10, 10), (10.5, 12), (33, 34)]
)
def test_segments_are_2_or_20_mib_or_the_request_in_steps_of_2(asked_mib: float, segment_mib: int) -> None:
    allocator = allocator_of()
    allocator.malloc(0, int(asked_mib * MIB))
    assert allocator.reserved_bytes == segment_mib * MIB


def test_powers_of_two_are_cut_into_divisions() -> None:
    settings = parse_allocator_settings("roundup_power2_divisions:4")
    assert [settings.round_size(n) for n in (1200, 2048, 2049, 1200 * KIB, 1536 * KIB, 1537 * KIB)] == [
        1536,  # 1200 is not above 4 x 512: multiples of 512 as ever
        2048,
        2560,  # from 2048 in steps of 512
        1280 * KIB,
        1536 * KIB,
        1792 * KIB,
    ]


# --- Finding, splitting and merging -----------------------------------------------------------------------------------


def test_small_requests_share_a_segment_and_large_ones_never_use_the_small_pool() -> None:
    allocator = allocator_of()
    for key in range(3):
        allocator.malloc(key, MIB // 2)
    assert sizes(allocator.memory_map()) == [[(0.5, "a"), (0.5, "a"), (0.5, "a"), (0.5, "f")]]
    allocator.malloc(3, 2 * MIB)
    assert [segment.is_small for segment in allocator.memory_map().segments] == [True, False]


def test_a_rest_of_1_mib_is_not_split_off_in_the_large_pool_and_counts_as_allocated() -> None:
    for asked_mib, allocated_mib in ((19, 20), (18.5, 18.5)):
        allocator = allocator_of()
        allocator.malloc(0, 20 * MIB)
        allocator.free(0)
        allocator.malloc(1, int(asked_mib * MIB))
        assert allocator.allocated_bytes == allocated_mib * MIB
    assert allocator_of(EXPANDABLE).malloc(0, 19 * MIB).size_bytes == 19 * MIB  # type: ignore[union-attr]


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = allocator_of()
    for key, size_mib in enumerate((40, 12, 24)):
        allocator.malloc(key, size_mib * MIB)
    for key in range(3):
        allocator.free(key)
    allocator.malloc(3, 20 * MIB)
    assert sizes(allocator.memory_map()) == [[(40, "f")], [(12, "f")], [(20, "a"), (4, "f")]]


def test_freed_neighbours_become_one_block_and_blocks_of_two_segments_do_not() -> None:
    allocator = allocator_of()
    for key in range(5):
        allocator.malloc(key, 5 * MIB)
    for key in (0, 2, 1, 4):
        allocator.free(key)
    assert sizes(allocator.memory_map()) == [[(15, "f"), (5, "a")], [(20, "f")]]
    allocator.free(3)
    assert sizes(allocator.memory_map()) == [[(20, "f")], [(20, "f")]]


def test_a_block_serves_its_own_stream_only() -> None:
    allocator = allocator_of()
    allocator.malloc(0, 12 * MIB, stream=1)
    allocator.free(0)
    allocator.malloc(1, 12 * MIB, stream=2)
    assert allocator.reserved_bytes == 24 * MIB
    allocator.malloc(2, 12 * MIB, stream=1)
    assert allocator.reserved_bytes == 24 * MIB


def test_blocks_from_max_split_size_on_are_neither_split_nor_given_to_small_requests() -> None:
    allocator = allocator_of(NO_SPLIT)
    allocator.malloc(0, 64 * MIB)
    allocator.free(0)
    allocator.malloc(1, 20 * MIB)  # below the limit: the 64 MiB are kept whole
    assert sizes(allocator.memory_map()) == [[(64, "f")], [(20, "a")]]
    allocator.malloc(2, 44 * MIB)  # 64 is not below 44 + 20: too much to waste
    assert sizes(allocator.memory_map()) == [[(64, "f")], [(20, "a")], [(44, "a")]]
    allocator.malloc(3, 46 * MIB)
    assert sizes(allocator.memory_map()) == [[(64, "a")], [(20, "a")], [(44, "a")]]
    exact = allocator_of(NO_SPLIT)
    exact.malloc(0, 32 * MIB)
    exact.free(0)
    exact.malloc(1, 20 * MIB)  # a block of just the limit is kept whole too
    assert sizes(exact.memory_map()) == [[(32, "f")], [(20, "a")]]
    # Without the limit the first request splits the block.
    plain = allocator_of()
    plain.malloc(0, 64 * MIB)
    plain.free(0)
    plain.malloc(1, 20 * MIB)
    assert sizes(plain.memory_map()) == [[(20, "a"), (44, "f")]]


# --- A device that is full --------------------------------------------------------------------------------------------


def test_unused_segments_are_given_back_before_a_request_fails() -> None:
    allocator = allocator_of(device_mib=100)
    for key, size_mib in enumerate((30, 30)):
        allocator.malloc(key, size_mib * MIB)
    allocator.free(0)
    allocator.malloc(2, 60 * MIB)
    assert sizes(allocator.memory_map()) == [[(30, "a")], [(60, "a")]]
    assert allocator.num_retries == 1
    assert [action for action, _, _ in allocator.actions] == ["segment_alloc"] * 2 + ["segment_free", "segment_alloc"]


def test_only_as_many_oversize_blocks_as_needed_are_given_back() -> None:
    allocator = allocator_of(NO_SPLIT, 200)
    for key, size_mib in enumerate((40, 50, 60)):
        allocator.malloc(key, size_mib * MIB)
    for key in range(3):
        allocator.free(key)
    allocator.malloc(3, 100 * MIB)  # the 60 and the 50 go, the 40 stays
    assert sizes(allocator.memory_map()) == [[(40, "f")], [(100, "a")]]
    assert allocator.num_retries == 0
    allocator.free(3)
    allocator.malloc(4, 130 * MIB)  # largest first again: 100 is not 130, and so 40 goes too
    assert sizes(allocator.memory_map()) == [[(130, "a")]]


def test_out_of_memory_tells_the_numbers_that_pytorch_prints() -> None:
    allocator = allocator_of(device_mib=100)
    for key in range(4):
        allocator.malloc(key, 10 * MIB)
        allocator.malloc(10 + key, 10 * MIB)
    allocator.malloc(20, 15 * MIB)
    allocator.free(20)
    allocator.malloc(21, 4 * MIB)
    with pytest.raises(SimulatedOutOfMemoryError) as raised:
        allocator.malloc(30, 13 * MIB)
    error = raised.value
    assert (error.requested_bytes, error.segment_bytes) == (13 * MIB, 14 * MIB)
    assert (error.allocated_bytes, error.reserved_bytes) == (84 * MIB, 96 * MIB)
    assert (error.device_free_bytes, error.unallocated_bytes) == (4 * MIB, 12 * MIB)
    for words in (
        "Tried to allocate 14.00 MiB. GPU 0 has a total capacity of 100.00 MiB of which 4.00 MiB is free.",
        "84.00 MiB is allocated by PyTorch, and 12.00 MiB is reserved by PyTorch but unallocated.",
    ):
        assert words in str(error)


def test_sizes_are_written_as_pytorch_writes_them() -> None:
    assert [format_size(n) for n in (1024, 1025, MIB, MIB + 1, 1536 * MIB)] == [
        "1024 bytes",
        "1.00 KiB",
        "1024.00 KiB",
        "1.00 MiB",
        "1.50 GiB",
    ]


def test_a_memory_fraction_refuses_what_the_device_would_still_have() -> None:
    allocator = allocator_of(AllocatorSettings(memory_fraction=0.5), 100)
    allocator.malloc(0, 40 * MIB)
    with pytest.raises(SimulatedOutOfMemoryError, match=r"50.00 MiB allowed; "):
        allocator.malloc(1, 12 * MIB)
    allocator.malloc(2, 10 * MIB)  # just what is allowed
    assert allocator.reserved_bytes == 50 * MIB


def test_garbage_collection_gives_back_a_single_unused_segment_which_is_as_old_as_the_average() -> None:
    allocator = allocator_of(AllocatorSettings(memory_fraction=1.0, garbage_collection_fraction=0.25), 200)
    allocator.malloc(0, 60 * MIB)
    allocator.free(0)
    allocator.malloc(1, 70 * MIB)
    assert sizes(allocator.memory_map()) == [[(70, "a")]]


def test_garbage_collection_gives_back_unused_segments_that_are_older_than_the_average_first() -> None:
    settings = AllocatorSettings(memory_fraction=1.0, garbage_collection_fraction=0.6)  # of 200 MiB: from 120 on
    allocator = allocator_of(settings, 200)
    for key, size_mib in enumerate((30, 60, 16)):
        allocator.malloc(key, size_mib * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.malloc(3, 14 * MIB)  # a fourth search, which the 16 MiB serve
    allocator.free(3)
    allocator.free(1)
    allocator.malloc(4, 70 * MIB)  # 106 are reserved: nothing is collected, 176 after it
    assert not [action for action, _, _ in allocator.actions if action == "segment_free"]
    allocator.malloc(5, 80 * MIB)
    # Ages in searches: 30 MiB 3, 16 and 60 MiB 2; on average 2.3. The oldest does not make up for the 56 MiB over the
    # limit, and so there is a second round.
    freed = [size // MIB for action, _, size in allocator.actions if action == "segment_free"]
    assert freed == [30, 16, 60]
    assert sizes(allocator.memory_map()) == [[(70, "a")], [(80, "a")]]


def test_garbage_collection_without_a_memory_fraction_is_refused_since_pytorch_would_ignore_it() -> None:
    with pytest.raises(AllocatorSettingsError, match="does nothing in PyTorch while no memory fraction"):
        parse_allocator_settings("garbage_collection_threshold:0.8")
    assert parse_allocator_settings("garbage_collection_threshold:0.8", 1.0).garbage_collection_fraction == 0.8


# --- Expandable segments ----------------------------------------------------------------------------------------------


def test_an_expandable_segment_grows_at_its_end_where_cudamalloc_needs_another_segment() -> None:
    grown = []
    for settings in (None, EXPANDABLE):
        allocator = allocator_of(settings)
        for key, size_mib in enumerate((40, 10)):
            allocator.malloc(key, size_mib * MIB)
        allocator.free(0)
        allocator.free(1)
        allocator.malloc(2, 64 * MIB)
        grown.append((sizes(allocator.memory_map()), allocator.reserved_bytes // MIB))
    assert grown[0] == ([[(40, "f")], [(10, "f")], [(64, "a")]], 114)
    assert grown[1] == ([[(64, "a"), (16, "f")]], 80)  # pages of 20 MiB: 60 were there, one more is mapped


def test_expandable_segments_give_back_whole_pages_in_the_middle_and_fill_them_first() -> None:
    allocator = allocator_of(EXPANDABLE, 120)
    for key, size_mib in enumerate((30, 50, 30)):
        allocator.malloc(key, size_mib * MIB)
    allocator.free(1)
    allocator.empty_cache()  # 30 to 80 MiB were free: pages 40 to 80 go; 110 to 120 is no whole page
    assert allocator.reserved_bytes == 80 * MIB
    assert sizes(allocator.memory_map()) == [[(30, "a"), (10, "f")], [(30, "a"), (10, "f")]]
    allocator.malloc(3, 45 * MIB)  # 10 free and 35 to map, in the gap: no new range
    assert sizes(allocator.memory_map()) == [[(30, "a"), (45, "a"), (5, "f"), (30, "a"), (10, "f")]]
    assert [action for action, _, _ in allocator.actions] == ["segment_map"] * 3 + ["segment_unmap", "segment_map"]


def test_a_free_block_that_can_grow_is_kept_for_larger_requests() -> None:
    allocator = allocator_of(EXPANDABLE)
    allocator.malloc(0, 30 * MIB)
    allocator.malloc(1, 35 * MIB)
    allocator.free(0)  # 30 MiB between neighbours, and 15 at the end, behind which more can be mapped
    allocator.malloc(2, 12 * MIB)
    assert sizes(allocator.memory_map()) == [[(12, "a"), (18, "f"), (35, "a"), (15, "f")]]


def test_each_stream_has_an_expandable_segment_of_its_own() -> None:
    allocator = allocator_of(EXPANDABLE, 400)
    for stream in (0, 1):
        allocator.malloc(stream, 20 * MIB, stream=stream)
    assert [segment.stream for segment in allocator.memory_map().segments] == [0, 1]


def test_pages_become_one_block_with_what_lies_beside_them_mapped_or_not() -> None:
    def holed(first: int, second: int) -> CachingAllocator:
        allocator = allocator_of(EXPANDABLE, 400)
        for key in range(5):
            allocator.malloc(key, 20 * MIB)
        allocator.free(first)
        allocator.empty_cache()
        allocator.free(second)  # beside the gap of 20 MiB
        return allocator

    filled = holed(1, 2)
    filled.malloc(9, 30 * MIB)
    assert sizes(filled.memory_map()) == [[(20, "a"), (30, "a"), (10, "f"), (20, "a"), (20, "a")]]
    for wider in (holed(1, 2), holed(2, 1)):
        wider.empty_cache()
        wider.malloc(9, 40 * MIB)  # two gaps side by side are one, and mapped at once
        assert [size // MIB for action, _, size in wider.actions if action == "segment_map"] == [20] * 5 + [40]


def test_small_expandable_pages_have_2_mib_and_a_range_without_memory_is_forgotten() -> None:
    allocator = allocator_of(EXPANDABLE, 100)
    allocator.malloc(0, MIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.free(0)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0 and allocator.memory_map().segments == ()


# --- Any trace --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "max_split_size_mb:32", "expandable_segments:True", "roundup_power2_divisions:4"])
@pytest.mark.parametrize("device_mib", [None, 160])
def test_blocks_tile_segments_and_bytes_are_conserved_over_random_traces(text: str, device_mib: int | None) -> None:
    draw = random.Random(f"{text} {device_mib}")
    allocator = allocator_of(parse_allocator_settings(text), device_mib)
    live: dict[int, int] = {}
    num_refused = 0
    for key in range(600):
        if live and draw.random() < 0.48:
            gone = draw.choice(list(live))
            allocator.free(gone)
            del live[gone]
        elif draw.random() < 0.02:
            allocator.empty_cache()
        else:
            size = draw.choice((draw.randint(1, 4 * KIB), draw.randint(1, 2 * MIB), draw.randint(1, 40 * MIB)))
            try:
                allocator.malloc(key, size, stream=draw.choice((0, 0, 0, 7)))
                live[key] = size
            except SimulatedOutOfMemoryError:
                num_refused += 1
        if key % 10 == 0:
            found = allocator.memory_map()
            assert found.problems() == []
            assert found.reserved_bytes == allocator.reserved_bytes
            assert found.allocated_bytes == allocator.allocated_bytes == found.reserved_bytes - found.free_bytes
            assert found.allocated_bytes - found.rounding_bytes == sum(live.values())
            assert device_mib is None or found.reserved_bytes <= device_mib * MIB
    assert (num_refused > 0) == (device_mib is not None)
    for key in live:
        allocator.free(key)
    assert all(block.state == FREE for block in allocator.memory_map().blocks())
    allocator.empty_cache()
    assert allocator.reserved_bytes == allocator.allocated_bytes == 0
    taken = sum(size for action, _, size in allocator.actions if action in ("segment_alloc", "segment_map"))
    given = sum(size for action, _, size in allocator.actions if action in ("segment_free", "segment_unmap"))
    assert taken == given


# --- The text of settings, against the library ------------------------------------------------------------------------

TEXTS = (
    "",
    "max_split_size_mb:64",
    "max_split_size_mb:19",
    "max_split_size_mb:abc",
    "max_split_size_mb",
    "max_split_size_mb:64, expandable_segments:True",
    "max_split_size_mb:64;expandable_segments:True",
    "large_segment_size_mb:40,max_split_size_mb:30",
    "large_segment_size_mb:40,max_split_size_mb:64",
    "large_segment_size_mb:10",
    "max_non_split_rounding_mb:10",
    "expandable_segments:true",
    "garbage_collection_threshold:1.0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[64:8,256:3]",
    "roundup_power2_divisions:[100:8]",
)


def set_in_torch(text: str) -> bool:
    """Give torch a text of settings; return whether it took it. Only this process' CPU build hears of it."""
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (ValueError, RuntimeError):
        return False
    return True


@pytest.fixture
def restored():
    yield
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20,expandable_segments:False")
    torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_refused_where_torch_refuses_them(text: str, restored: None) -> None:
    set_in_torch("large_segment_size_mb:20")
    try:
        parse_allocator_settings(text)
        is_taken = True
    except AllocatorSettingsError:
        is_taken = False
    assert is_taken == set_in_torch(text)


@pytest.mark.parametrize("value", ["4", "[64:8,128:2,256:4,512:2,1024:4,>:1]", "[64:8,256:4]", "[1:2,32768:16]"])
def test_divisions_of_every_interval_are_those_of_the_library(value: str, restored: None) -> None:
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
    library = ctypes.CDLL(str(path)) if path.exists() else None
    if library is None or not hasattr(library, name):
        pytest.skip(f"{path.name} of this torch does not show the function: it is read on Linux")
    ask = getattr(library, name)
    ask.argtypes, ask.restype = [ctypes.c_size_t], ctypes.c_size_t
    assert set_in_torch(f"roundup_power2_divisions:{value}")
    found = parse_allocator_settings(f"roundup_power2_divisions:{value}").roundup_divisions
    assert list(found) == [ask(MIB << i) for i in range(16)]


def test_a_key_that_does_not_exist_gets_the_name_that_was_meant() -> None:
    with pytest.raises(AllocatorSettingsError, match=r"did you mean max_split_size_mb:"):
        parse_allocator_settings("max_split_size:64")
    with pytest.raises(AllocatorSettingsError, match="another allocator"):
        parse_allocator_settings("backend:cudaMallocAsync")
