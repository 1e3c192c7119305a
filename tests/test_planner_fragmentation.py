"""Traces and their replay: the request that does not fit, and remedies, on traces small enough to work out by hand."""

from __future__ import annotations

import pytest

from vlmcourse.planner.alloc_trace import ALLOC, FREED, GIVE, MARK, AllocEvent, AllocTrace
from vlmcourse.planner.allocator_settings import MIB, AllocatorSettings
from vlmcourse.planner.fragmentation import compare_remedies, replay, smallest_device

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def alloc(key: int, size_mib: float, owner: str = "activations", phase: str = "forward", stream: int = 0) -> AllocEvent:
    return AllocEvent(ALLOC, key, int(size_mib * MIB), owner, phase, stream)


def free(key: int) -> AllocEvent:
    return AllocEvent(FREED, key)


def checkered() -> AllocTrace:
    """Eight times 10 MiB, every second one freed, then 30 MiB: 40 MiB of holes, of 10 MiB each."""
    events = [alloc(key, 10) for key in range(8)] + [free(key) for key in range(0, 8, 2)] + [alloc(8, 30, "gradients")]
    return AllocTrace(tuple(events))


def growing() -> AllocTrace:
    """Two steps, the second a little larger, with something that stays between them."""
    events = [alloc(0, 12, "weights", ""), AllocEvent(MARK, label="small")]
    events += [alloc(1, 30), alloc(2, 20, "temporary", "update"), AllocEvent(GIVE, 2, label="optimizer"), free(1)]
    events += [AllocEvent(MARK, label="large"), alloc(3, 32), alloc(4, 14, phase="backward"), free(3), free(4)]
    return AllocTrace(tuple(events))


def test_a_request_that_holes_and_device_would_hold_in_sum_is_refused_and_explained() -> None:
    # Segments of 20 MiB hold two of 10 MiB each, and so no segment is unused: nothing can be given back.
    run = replay(AllocTrace(tuple(alloc(k, 9.75) for k in range(8)) + checkered().events[8:]), device_bytes=84 * MIB)
    found = run.refusal
    assert found is not None and found.event == 12 and found.owner == "gradients"
    assert (found.device_free_bytes, found.largest_free_bytes) == (4 * MIB, 9.75 * MIB)
    # Four holes of 9.75 MiB, and the four times 0.5 MiB at the ends of segments, which belong to their last blocks.
    assert found.free_bytes == 4 * 9.75 * MIB and found.is_fragmentation
    assert "43.00 MiB were free, 39.00 MiB of them in holes of its pool and 4.00 MiB outside" in found.explain()
    assert "enough in sum, and nowhere in one piece" in found.explain()
    assert len(run.reserved_bytes) == 13 and run.end_map.problems() == []


def test_holes_of_another_stream_or_of_the_small_pool_do_not_count() -> None:
    pairs = [alloc(2 * stream + i, 9.75, stream=stream) for stream in (0, 1) for i in (0, 1)]
    trace = AllocTrace((*pairs, alloc(4, 0.5), free(0), free(2), alloc(5, 30)))
    found = replay(trace, device_bytes=50 * MIB).refusal
    assert found is not None and found.device_free_bytes == 8 * MIB
    assert found.free_bytes == found.largest_free_bytes == 9.75 * MIB


def test_a_request_that_is_larger_than_all_that_is_free_is_no_fragmentation() -> None:
    found = replay(AllocTrace((alloc(0, 60), alloc(1, 50))), device_bytes=100 * MIB).refusal
    assert found is not None and not found.is_fragmentation and "no arrangement would have helped" in found.explain()


def test_the_smallest_device_is_found_to_2_mib() -> None:
    for settings in (None, EXPANDABLE):
        need = smallest_device(growing(), settings)
        assert replay(growing(), settings, need).refusal is None
        assert replay(growing(), settings, need - 2 * MIB).refusal is not None
    # 12 of weights, 20 that stay; 30 come and go, and 32 and 14 on top: cudaMalloc gives 30 back for them.
    assert smallest_device(growing()) == (12 + 20 + 32 + 14) * MIB
    assert replay(growing()).peak_reserved_bytes == (12 + 30 + 20 + 32) * MIB  # 14 fit into the 30


def test_the_largest_step_is_run_first_and_leaves_nothing_behind() -> None:
    warm = growing().with_largest_step_first()
    assert [name for _, name in warm.marks] == ["warm-up on large", "small", "large"]
    assert warm.events[0] == growing().events[0] and warm.events[6:] == growing().events[1:]
    sizes = [event.size_bytes // MIB for event in warm.events[2:4]]
    assert sizes == [32, 14] and {event.key for event in warm.events[2:6]} == {5, 6}
    assert replay(warm).allocated_bytes[5] == 12 * MIB
    assert replay(warm).peak_reserved_bytes == (12 + 32 + 14 + 20) * MIB  # 30 fit into the 32, 20 into nothing


def test_what_outlives_the_largest_step_or_is_made_by_its_update_is_not_run_twice() -> None:
    events = (
        AllocEvent(MARK, label="first"),
        alloc(0, 40, phase="forward"),
        alloc(1, 40, "gradients", "backward"),  # kept
        alloc(2, 20, "temporary", "update"),
        free(0),
    )
    warm = AllocTrace(events).with_largest_step_first()
    first = warm.events[: -len(events)]
    assert [event.kind for event in first] == [MARK, ALLOC, ALLOC, FREED, FREED]
    assert replay(warm).allocated_bytes[4] == 0
    with pytest.raises(ValueError, match="0 steps"):
        checkered().with_largest_step_first()


def test_scaled_traces_say_by_how_much() -> None:
    assert checkered().scaled(4).scaled(2).scale == 8
    assert checkered().scaled(4).peak_requested_bytes() == 4 * checkered().peak_requested_bytes() == 320 * MIB
    with pytest.raises(ValueError, match="factor = 0"):
        checkered().scaled(0)


def test_the_table_has_a_row_a_remedy_with_the_numbers_of_its_replay() -> None:
    rows = {row.name: row for row in compare_remedies(growing(), growing())}
    assert list(rows)[0] == "nothing" and len(rows) == 8
    plain = rows["nothing"]
    assert (plain.peak_allocated_bytes, plain.peak_reserved_bytes) == (78 * MIB, 94 * MIB)
    assert plain.num_device_calls == 4 and plain.unused_fraction == pytest.approx(16 / 94)
    assert rows["empty_cache() before every step"].num_device_calls == 6  # 30 are given back, and asked for as 14 more
    assert rows["largest batch first"].peak_reserved_bytes == 78 * MIB
    assert rows["expandable_segments:True"].settings == "expandable_segments:True"
    assert len(compare_remedies(growing())) == 6


def test_a_request_of_0_bytes_takes_nothing_and_can_be_freed_once() -> None:
    run = replay(AllocTrace((alloc(0, 0), alloc(1, 5), free(0), free(1))))
    assert run.allocated_bytes == (0, 5 * MIB, 5 * MIB, 0) and run.refusal is None
    with pytest.raises(ValueError, match="event 2 frees allocation 0"):
        replay(AllocTrace((alloc(0, 0), free(0), free(0))))


def test_a_trace_that_frees_what_is_not_in_use_is_broken() -> None:
    with pytest.raises(ValueError, match="event 1 frees allocation 7"):
        replay(AllocTrace((alloc(0, 1), free(7))))
