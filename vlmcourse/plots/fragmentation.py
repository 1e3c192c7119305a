"""Figures of fragmentation: the memory map, bytes over time, the request that did not fit, and remedies side by side.

Sizes are drawn in MiB or GiB, as PyTorch's messages write them: GiB is 2^30 bytes. Maps come from the simulator and
from a real allocator's snapshot alike; a figure of simulated bytes says so in its title. Chapter 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vlmcourse.planner.fragmentation import Refusal, Remedy, Replay
from vlmcourse.planner.memory_map import FREE, WAITING, BlockView, MemoryMap
from vlmcourse.plots.activations import LEDGER_STYLES
from vlmcourse.plots.style import COLOURS, new_figure

MIB, GIB = 2**20, 2**30
IN_USE = ("#5B7083", "")
"""Colour and hatch of a block whose owner nobody knows, as in most snapshots."""
HOLE = ("white", "//////")
HOLE_EDGE = COLOURS["communication"]
OUTSIDE = "white"
"""Of what is not reserved; no owner's colour."""
ROW_HEIGHT = 0.74
MAX_HOLES = 14
NAMED_FRACTION = 0.033
"""Of a row's width, from which on a hole's size is written into it."""


def plot_memory_map(shown: MemoryMap | Refusal, title: str, num_rows: int = 12) -> Figure:
    """Draw segments one after the other, their blocks in the colours of their owners, and holes hatched.

    Args:
        shown: segments and blocks; or the moment of a refusal, whose figure is of the whole device: what is not
            reserved follows on the last segment, and the request is below the map, to scale.
        title: the message; say there whether the map is simulated.
        num_rows: rows that memory is wrapped into; a segment that does not end in its row goes on in the next.

    Returns:
        A figure; the horizontal axis is MiB within a row, heavy lines are borders of segments.

    Raises:
        ValueError: if there is no segment.
    """
    refusal, found = (shown, shown.map) if isinstance(shown, Refusal) else (None, shown)
    if not found.segments:
        raise ValueError("the map has 0 segments: draw it at a moment at which something is reserved")
    outside_bytes = refusal.device_free_bytes if refusal else 0
    row_mib = max(1.0, (found.reserved_bytes + outside_bytes) / MIB / num_rows)
    figure, axes = new_figure(1.9 + 0.33 * (num_rows + 1.4 * (refusal is not None)))
    has_sizes = _draw_blocks(axes, found, row_mib)
    _draw_borders(axes, found, row_mib)
    _draw_outside(axes, found.reserved_bytes / MIB, outside_bytes / MIB, row_mib)
    ticks = list(range(num_rows))
    labels = [f"{row * row_mib / 1024:.2f}" for row in ticks]
    lowest = num_rows - 0.4
    if refusal:
        _draw_request(axes, refusal.requested_bytes / MIB, num_rows + 0.4)
        lowest += 1.4
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set(xlim=(0, row_mib), ylim=(lowest, -0.6), xlabel="within a row (MiB)")
    axes.set_ylabel("where the row begins (GiB)")
    axes.spines[["top", "right"]].set_visible(False)
    _add_map_legend(figure, found, has_sizes=has_sizes, has_outside=outside_bytes > 0)
    axes.set_title(_describe_map(found, refusal), fontsize=8.5)
    figure.suptitle(title, fontsize=12)
    return figure


def _describe_map(found: MemoryMap, refusal: Refusal | None) -> str:
    """Say what is reserved and what is free, with the numbers of `Refusal.explain` where there is one."""
    reserved = f"reserved {found.reserved_bytes / GIB:.2f} GiB in {len(found.segments)} segments, allocated "
    reserved += f"{found.allocated_bytes / GIB:.2f}"
    if refusal is None:
        holes = found.holes()
        free = f"{sum(holes) / MIB:,.2f} MiB in {len(holes)} holes"
        return f"{reserved}; free {free}, the largest {found.largest_free_bytes / MIB:,.2f} MiB"
    other_bytes = found.free_bytes - refusal.free_bytes
    return (
        f"{reserved}; outside {refusal.device_free_bytes / MIB:,.2f} MiB, a new segment would take "
        f"{refusal.segment_bytes / MIB:,.2f}\nfree for this request: {refusal.free_bytes / MIB:,.2f} MiB in holes, the "
        f"largest {refusal.largest_free_bytes / MIB:,.2f}; in the other pool's holes: {other_bytes / MIB:,.2f} MiB"
    )


def _style(block: BlockView) -> tuple[str, str]:
    if block.state == FREE:
        return HOLE
    if block.state == WAITING:
        return COLOURS["visual_tokens"], "xx"
    return LEDGER_STYLES.get(block.owner, IN_USE)


def _pieces(start: float, end: float, row: float) -> list[tuple[int, float, float]]:
    """Cut a stretch at the ends of rows: row, start in it, width."""
    found = []
    while end - start > 1e-9:
        index = int((start + 1e-9) // row)
        stop = min(end, (index + 1) * row)
        found.append((index, max(0.0, start - index * row), stop - start))
        start = stop
    return found


def _draw_blocks(axes: Axes, found: MemoryMap, row_mib: float) -> bool:
    """Draw all blocks, those of one style at once: there are thousands; tell whether a hole's size was written."""
    boxes: dict[tuple[str, str], list[Rectangle]] = {}
    offset, has_sizes = 0.0, False
    for block in found.blocks():
        pieces = _pieces(offset, offset + block.size_bytes / MIB, row_mib)
        offset += block.size_bytes / MIB
        for row, x, width in pieces:
            boxes.setdefault(_style(block), []).append(Rectangle((x, row - ROW_HEIGHT / 2), width, ROW_HEIGHT))
        row, x, width = max(pieces, key=lambda piece: piece[2])
        if block.state == FREE and width > NAMED_FRACTION * row_mib:  # the whole hole's size, where it is widest
            text, label = f"{block.size_bytes / MIB:,.0f}", {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            axes.text(x + width / 2, row, text, ha="center", va="center", fontsize=6.5, bbox=label, zorder=4)
            has_sizes = True
    for (colour, hatch), of_style in boxes.items():
        edge = HOLE_EDGE if colour == HOLE[0] else "white"
        axes.add_collection(
            PatchCollection(of_style, facecolor=colour, edgecolor=edge, hatch=hatch, lw=0.3), autolim=False
        )
    return has_sizes


def _draw_borders(axes: Axes, found: MemoryMap, row_mib: float) -> None:
    """Draw the borders of segments, open where one goes on in another row."""
    sides, ends = [], []
    offset = 0.0
    for segment in found.segments:
        pieces = _pieces(offset, offset + segment.size_bytes / MIB, row_mib)
        offset += segment.size_bytes / MIB
        for row, x, width in pieces:
            sides += [[(x, y), (x + width, y)] for y in (row - ROW_HEIGHT / 2, row + ROW_HEIGHT / 2)]
        for row, x in ((pieces[0][0], pieces[0][1]), (pieces[-1][0], pieces[-1][1] + pieces[-1][2])):
            ends.append([(x, row - ROW_HEIGHT / 2), (x, row + ROW_HEIGHT / 2)])
    axes.add_collection(LineCollection(sides, colors="black", linewidths=0.7, zorder=3), autolim=False)
    axes.add_collection(LineCollection(ends, colors="black", linewidths=1.3, zorder=3), autolim=False)


def _draw_outside(axes: Axes, start_mib: float, size_mib: float, row_mib: float) -> None:
    """Draw what the allocator has not got from the device."""
    for row, x, width in _pieces(start_mib, start_mib + size_mib, row_mib):
        place = (x, row - ROW_HEIGHT / 2)
        axes.add_patch(Rectangle(place, width, ROW_HEIGHT, facecolor=OUTSIDE, edgecolor="black", lw=0.7, ls=":"))


def _draw_request(axes: Axes, size_mib: float, row: float) -> None:
    box = Rectangle((0, row - ROW_HEIGHT / 2), size_mib, ROW_HEIGHT, facecolor="none", edgecolor="black", lw=1.8)
    box.set_linestyle("--")
    axes.add_patch(box)
    text = f"the request: {size_mib:,.0f} MiB"
    axes.annotate(text, (size_mib, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)


def _add_map_legend(figure: Figure, found: MemoryMap, *, has_sizes: bool, has_outside: bool) -> None:
    present = found.by_owner()
    names = [owner for owner in LEDGER_STYLES if owner in present]
    handles = [Patch(facecolor=LEDGER_STYLES[o][0], hatch=LEDGER_STYLES[o][1], edgecolor="white") for o in names]
    if set(present) - set(names):
        handles.append(Patch(facecolor=IN_USE[0], edgecolor="white"))
        names.append("in use")
    if any(block.state == WAITING for block in found.blocks()):
        handles.append(Patch(facecolor=COLOURS["visual_tokens"], hatch="xx", edgecolor="white"))
        names.append("waiting for a stream")
    handles.append(Patch(facecolor=HOLE[0], hatch=HOLE[1], edgecolor=HOLE_EDGE))
    names.append("free (size in MiB)" if has_sizes else "free")
    if has_outside:
        handles.append(Patch(facecolor=OUTSIDE, edgecolor="black", ls=":"))
        names.append("not reserved")
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def plot_memory_over_time(runs: Mapping[str, Replay], title: str) -> Figure:
    """Draw allocated and reserved bytes over the events of replays, one panel a replay, one vertical axis.

    Args:
        runs: replays by the name of the panel; a cross marks the request that was refused, if one was.
        title: the message.

    Returns:
        A figure in GiB, panels one above the other; dotted lines are where steps begin.

    Raises:
        ValueError: if there is no replay, or one of no event.
    """
    if not runs or not all(run.reserved_bytes for run in runs.values()):
        raise ValueError("there is no event to draw: replay a trace of at least 1 event")
    figure, panels = new_figure(1.3 + 1.55 * len(runs), len(runs), 1, sharey=True, squeeze=False)
    highest = max(run.peak_reserved_bytes for run in runs.values()) / GIB
    for axes, (name, run) in zip(panels[:, 0], runs.items(), strict=True):
        places = range(len(run.reserved_bytes))
        reserved, allocated = ([size / GIB for size in sizes] for sizes in (run.reserved_bytes, run.allocated_bytes))
        axes.fill_between(places, allocated, reserved, facecolor=HOLE[0], hatch="////", edgecolor=HOLE_EDGE, lw=0)
        axes.fill_between(places, allocated, color=IN_USE[0], lw=0)
        axes.plot(places, reserved, color="black", lw=1.4)
        for i, _ in run.trace.marks:
            if i < len(places):
                axes.axvline(i, color="black", lw=0.6, ls=":")
        if run.device_bytes is not None:
            axes.axhline(run.device_bytes / GIB, color=HOLE_EDGE, ls="--", lw=1.2)
        if run.refusal is not None:
            axes.plot([run.refusal.event], [reserved[-1]], "X", color=HOLE_EDGE, ms=10, mec="black", zorder=4)
        axes.set_title(_describe(name, run), fontsize=9, loc="left")
        axes.set(xlim=(0, len(run.trace.events) - 1), ylim=(0, 1.1 * highest), ylabel="GiB")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("events: allocations, frees (dotted: a step begins)")
    handles = [Patch(facecolor=IN_USE[0]), Patch(facecolor=HOLE[0], hatch="////", edgecolor=HOLE_EDGE)]
    figure.legend(handles, ["allocated", "reserved, and free"], loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title, fontsize=12)
    return figure


def _describe(name: str, run: Replay) -> str:
    peaks = f"reserved at most {run.peak_reserved_bytes / GIB:.2f} GiB, allocated {run.peak_allocated_bytes / GIB:.2f}"
    if run.refusal is None:
        return f"{name}: {peaks}"
    return f"{name}: out of memory at a request of {run.refusal.requested_bytes / MIB:,.0f} MiB"


def plot_refusal(refusal: Refusal, title: str) -> Figure:
    """Draw a request that did not fit, what was free in sum, and every piece of it.

    Args:
        refusal: the moment, of a `Replay`.
        title: the message.

    Returns:
        A figure of horizontal bars in MiB: the request, all that was free, then the pieces, largest first.
    """
    is_small = refusal.requested_bytes <= MIB
    holes = refusal.map.holes(is_small)
    rows = [("the request", refusal.requested_bytes, "black", "")]
    rows.append(("free, in sum", refusal.total_free_bytes, "white", HOLE[1]))
    rows.append(("not reserved", refusal.device_free_bytes, OUTSIDE, ""))
    shown = holes[:MAX_HOLES]
    rows += [(f"hole {i + 1}", size, "white", HOLE[1]) for i, size in enumerate(shown)]
    if len(holes) > len(shown):
        rows.append((f"{len(holes) - len(shown)} smaller holes", sum(holes[len(shown) :]), "white", HOLE[1]))
    figure, axes = new_figure(1.2 + 0.26 * len(rows))
    longest = max(size for _, size, _, _ in rows) / MIB
    for row, (_, size, colour, hatch) in enumerate(rows):
        edge = HOLE_EDGE if hatch else "black"
        axes.barh([row], [size / MIB], height=0.7, facecolor=colour, hatch=hatch, edgecolor=edge, lw=0.8)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axes.text(size / MIB + 0.01 * longest, row, f"{size / MIB:,.1f}", va="center", fontsize=8, bbox=box, zorder=3)
    axes.axvline(refusal.requested_bytes / MIB, color="black", ls="--", lw=1)
    axes.axhline(2.5, color="black", lw=0.6)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=9)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.12 * longest), xlabel="MiB", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_remedies(rows: Sequence[Remedy], title: str) -> Figure:
    """Draw what each remedy reserves at most, and the smallest device it runs on.

    Args:
        rows: of `compare_remedies`, drawn from top to bottom.
        title: the message.

    Returns:
        A figure of horizontal bars in GiB: allocated and, hatched, what is reserved beyond it; a diamond is the
        smallest device.

    Raises:
        ValueError: if there is no row.
    """
    if not rows:
        raise ValueError("there is no remedy to draw: give at least 1 row of compare_remedies")
    figure, axes = new_figure(1.6 + 0.42 * len(rows))
    longest = max(row.peak_reserved_bytes for row in rows) / GIB
    for i, row in enumerate(rows):
        allocated, reserved = row.peak_allocated_bytes / GIB, row.peak_reserved_bytes / GIB
        axes.barh([i], [allocated], color=IN_USE[0], height=0.62)
        rest = {"facecolor": HOLE[0], "hatch": "////", "edgecolor": HOLE_EDGE, "height": 0.62, "lw": 0.8}
        axes.barh([i], [reserved - allocated], left=allocated, **rest)
        axes.plot([row.smallest_device_bytes / GIB], [i], "D", color="black", ms=6, mec="white")
        text = f"{reserved:.2f} ({100 * row.unused_fraction:.0f} % unused), {row.num_device_calls:,} calls"
        end = max(reserved, row.smallest_device_bytes / GIB)
        axes.text(end + 0.025 * longest, i, text, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.6 * longest), xlabel="GiB")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [
        Patch(facecolor=IN_USE[0]),
        Patch(facecolor=HOLE[0], hatch="////", edgecolor=HOLE_EDGE),
        axes.plot([], [], "D", color="black", ms=6, mec="white")[0],
    ]
    names = ["allocated at most", "reserved at most, beyond it", "smallest device"]
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    return figure
