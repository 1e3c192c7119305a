"""Traces of real steps: every byte that the ledger sees comes and goes in them, with its owner, and can be replayed."""

from __future__ import annotations

from collections import Counter

import pytest
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vlmcourse import plots
from vlmcourse.labs.fragmentation import (
    batches_as_they_come,
    batches_of_few_shapes,
    fragmentation_shape,
    mixed_resolutions,
    record_steps,
    tiles_of,
)
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.ledger import measure_ledger
from vlmcourse.planner.alloc_trace import ALLOC, FREED, GIVE, MARK, AllocTrace
from vlmcourse.planner.allocator_settings import AllocatorSettings
from vlmcourse.planner.fragmentation import Remedy, compare_remedies, replay
from vlmcourse.planner.memory_map import ALLOCATED, FREE, BlockView, MemoryMap, SegmentView

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def trace() -> AllocTrace:
    """Of three steps on two samples each, of different numbers of tiles."""
    return record_steps(batches_as_they_come(mixed_resolutions(6, seed=3), 2), NUM_LAYERS)


@pytest.fixture(scope="module")
def rows(trace: AllocTrace) -> tuple[Remedy, ...]:
    return compare_remedies(trace.scaled(256))


def live_by_owner(trace: AllocTrace, end: int) -> Counter[str]:
    sizes, owners = {}, {}
    for event in trace.events[:end]:
        if event.kind == ALLOC:
            sizes[event.key], owners[event.key] = event.size_bytes, event.label
        elif event.kind == GIVE:
            owners[event.key] = event.label
        elif event.kind == FREED:
            del sizes[event.key], owners[event.key]
    found: Counter[str] = Counter()
    for key, size in sizes.items():
        found[owners[key]] += size
    return found


def test_every_allocation_is_freed_once_and_weights_come_first(trace: AllocTrace) -> None:
    keys = [event.key for event in trace.events if event.kind == ALLOC]
    freed = [event.key for event in trace.events if event.kind == FREED]
    assert len(keys) == len(set(keys)) and len(freed) == len(set(freed)) and set(freed) <= set(keys)
    assert all(event.size_bytes > 0 for event in trace.events if event.kind == ALLOC)
    before = {event.label for event in trace.events[: trace.marks[0][0]] if event.kind == ALLOC}
    assert before == {"weights"}
    assert [name.split(":")[0] for _, name in trace.marks] == ["step 0", "step 1", "step 2"]
    assert {event.phase for event in trace.events if event.kind == ALLOC} == {"", "forward", "backward", "update"}


def test_between_steps_only_weights_and_optimizer_state_live(trace: AllocTrace) -> None:
    weights = measure_ledger(build_model(fragmentation_shape(NUM_LAYERS), seed=0)).weights_bytes
    for end in (trace.marks[2][0], len(trace.events)):
        found = live_by_owner(trace, end)
        assert found["weights"] >= weights  # buffers too
        assert found["optimizer"] == pytest.approx(2 * weights, rel=0.01)
        rest = {owner: size for owner, size in found.items() if owner not in ("weights", "optimizer")}
        assert sum(rest.values()) < 100, rest  # a batch that is kept alive would be some thousands


def test_gradients_and_activations_are_called_so(trace: AllocTrace) -> None:
    start, end = trace.marks[1][0], trace.marks[2][0]
    update = next(i for i in range(start, end) if trace.events[i].phase == "update" or i == end - 1)
    fullest = max(range(start, update), key=lambda i: live_by_owner(trace, i)["activations"] if i % 20 == 0 else 0)
    assert live_by_owner(trace, fullest)["activations"] > 10**5
    given = Counter(e.label for e in trace.events[start:end] if e.kind == GIVE)
    weights = live_by_owner(trace, end)["weights"]
    assert given["gradients"] > 50
    sizes = {e.key: e.size_bytes for e in trace.events if e.kind == ALLOC}
    gradients = {e.key for e in trace.events[start:end] if e.kind == GIVE and e.label == "gradients"}
    assert sum(sizes[key] for key in gradients) == pytest.approx(weights, rel=0.01)


def test_samples_have_the_tiles_that_their_batches_hold_and_each_is_in_one_batch() -> None:
    samples = mixed_resolutions(12, seed=1)
    assert len({tiles_of(sample) for sample in samples}) > 2
    few = batches_of_few_shapes(samples, 2)
    assert sorted(i for batch in few for i in batch.sample_ids) == sorted(sample.sample_id for sample in samples)
    assert all(len(set(batch.tiles_per_sample)) == 1 for batch in few)
    by_id = {sample.sample_id: tiles_of(sample) for sample in samples}
    for batch in [*few, *batches_as_they_come(samples, 4)]:
        assert tuple(by_id[i] for i in batch.sample_ids) == batch.tiles_per_sample


def test_a_real_trace_runs_and_remedies_change_what_is_reserved(trace: AllocTrace, rows: tuple[Remedy, ...]) -> None:
    scaled = trace.scaled(256)
    run = replay(scaled)
    assert run.end_map.problems() == [] and run.refusal is None
    assert run.peak_allocated_bytes >= scaled.peak_requested_bytes()
    named = {row.name: row for row in rows}
    assert named["expandable_segments:True"].peak_reserved_bytes < named["nothing"].peak_reserved_bytes
    assert named["empty_cache() before every step"].num_device_calls > 2 * named["nothing"].num_device_calls
    assert run.end_map.by_owner().keys() >= {"weights", "optimizer"}


def test_figures_of_a_real_trace_say_what_they_show(trace: AllocTrace, rows: tuple[Remedy, ...]) -> None:
    scaled = trace.scaled(256)
    short = replay(scaled, device_bytes=rows[0].smallest_device_bytes - 32 * 2**20)
    grown = replay(scaled, AllocatorSettings(expandable_segments=True))
    assert short.refusal is not None
    figures: list[Figure] = [
        plots.plot_memory_map(short.refusal, "map"),
        plots.plot_memory_over_time({"short": short, "expandable": grown}, "time"),
        plots.plot_refusal(short.refusal, "refusal"),
        plots.plot_remedies(rows, "remedies"),
    ]
    for figure in figures:
        figure.draw_without_rendering()
        for axes in figure.axes[-1:]:
            assert "MiB" in axes.get_xlabel() or "GiB" in axes.get_xlabel() or "events" in axes.get_xlabel()
        for legend in figure.legends:
            assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    sizes = [text for text in figures[0].axes[0].texts if text.get_text().isdecimal()]
    free = "free (size in MiB)" if sizes else "free"
    assert set(names) >= {"weights", "optimizer", "activations", free, "not reserved"}
    boxes = [c for c in figures[0].axes[0].collections if isinstance(c, PatchCollection)]
    drawn = sum(path.get_extents().width for box in boxes for path in box.get_paths())
    assert drawn == pytest.approx(short.refusal.map.reserved_bytes / 2**20)
    outside = [
        p.get_width() for p in figures[0].axes[0].patches if isinstance(p, Rectangle) and p.get_linestyle() == ":"
    ]
    assert sum(outside) * 2**20 == pytest.approx(short.refusal.device_free_bytes) and outside
    assert any("out of memory at a request of" in axes.get_title("left") for axes in figures[1].axes)


def test_a_map_says_what_the_refusal_says_and_explains_the_rest(trace: AllocTrace, rows: tuple[Remedy, ...]) -> None:
    """What is free in the other pool serves no request of this one, and is no part of the same number."""
    refusal = replay(trace.scaled(256), device_bytes=rows[0].smallest_device_bytes - 2 * 2**20).refusal
    assert refusal is not None and refusal.map.free_bytes > refusal.free_bytes
    said = plots.plot_memory_map(refusal, "map").axes[0].get_title()
    for size in (refusal.free_bytes, refusal.device_free_bytes):
        assert f"{size / 2**20:,.2f} MiB" in said and f"{size / 2**20:,.2f} MiB" in refusal.explain()
    assert f"in the other pool's holes: {(refusal.map.free_bytes - refusal.free_bytes) / 2**20:,.2f} MiB" in said


@pytest.mark.parametrize("hole_mib", [1, 5])
def test_the_legend_of_a_map_promises_sizes_only_where_one_is_written(hole_mib: int) -> None:
    blocks = (BlockView(0, 64 * 2**20, ALLOCATED), BlockView(64 * 2**20, hole_mib * 2**20, FREE))
    segment = SegmentView(0, (64 + hole_mib) * 2**20, False, False, 0, blocks)
    figure = plots.plot_memory_map(MemoryMap((segment,)), "map", num_rows=1)
    assert [text.get_text() for text in figure.axes[0].texts] == (["5"] if hole_mib == 5 else [])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["in use", "free (size in MiB)" if hole_mib == 5 else "free"]


def test_nothing_to_draw_is_an_error() -> None:
    empty = replay(AllocTrace(()))
    with pytest.raises(ValueError, match="0 segments"):
        plots.plot_memory_map(empty.end_map, "map")
    with pytest.raises(ValueError, match="no event"):
        plots.plot_memory_over_time({"empty": empty}, "time")
    with pytest.raises(ValueError, match="no remedy"):
        plots.plot_remedies((), "remedies")
    assert not [event for event in empty.trace.events if event.kind == MARK]
