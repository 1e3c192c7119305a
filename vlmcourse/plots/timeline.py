"""Timelines: what every rank does when, measured by a profiler or predicted by a planner, as bars on one time axis.

Enters: `spans.Span`s, wherever they come from. Leaves: a figure; `draw_bars` draws the bars of other figures too.
Chapter 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vlmcourse.colours import PHASE_COLOURS
from vlmcourse.plots.style import COLOURS, HATCHES, new_figure
from vlmcourse.spans import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    DATA,
    DATA_WAIT,
    FORWARD,
    LANES,
    OPTIMIZER,
    OTHER,
    PHASE_LABELS,
    Span,
)


@dataclass(frozen=True, kw_only=True)
class BarStyle:
    """How the bars of one kind look."""

    colour: str
    hatch: str = ""
    alpha: float = 1.0
    ink: str = "black"
    """Of the text on it."""
    outlined: bool = False
    """Whether only its outline is drawn, over what is there."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of a figure."""

    row: float
    start: float
    width: float
    style: BarStyle
    text: str = ""
    """Shown where it has room."""


PASSES = {
    FORWARD: BarStyle(colour=PHASE_COLOURS[FORWARD]),
    BACKWARD: BarStyle(colour=PHASE_COLOURS[BACKWARD], ink="white"),
}
"""Passes through the model."""
STYLES = {
    **PASSES,
    COMPUTE: BarStyle(colour=PHASE_COLOURS["other"], hatch="//"),
    COMMUNICATION: BarStyle(colour=COLOURS["communication"]),
    DATA: BarStyle(colour=PHASE_COLOURS[DATA_WAIT], ink="white"),
    OPTIMIZER: BarStyle(colour=COLOURS["optimizer"], hatch=HATCHES["optimizer"]),
}
"""Of a span, by its name or else its lane."""
LANE_LABELS = {COMPUTE: "other computing", COMMUNICATION: COMMUNICATION, DATA: PHASE_LABELS[DATA_WAIT]}
"""Where a rank has a row for each lane: what travels there may be hidden behind computing, so it is no wait."""
PHASE_ROW_LABELS = {COMPUTE: PHASE_LABELS[OTHER], DATA: PHASE_LABELS[DATA_WAIT]}
"""Where a rank has one row, of phases that follow each other."""
OUTLINE = BarStyle(colour=COLOURS["loss"], outlined=True)
NARROW, TIGHT = 0.008, 0.016
"""Parts of a figure's width: narrower bars have no white edge, which would hide them, and no text."""


def draw_bars(axes: Axes, bars: Iterable[Bar], full_width: float, *, height: float = 0.8) -> None:
    """Draw bars, each with its text where there is room.

    Args:
        axes: where to draw; rows are its y axis.
        bars: in the order in which they lie over each other, where they do; starts and widths in units of the x axis.
        full_width: what the whole width of the axes stands for.
        height: of a bar, in rows.
    """
    for bar in bars:
        style = bar.style
        if style.outlined:
            look = {"facecolor": "none", "edgecolor": style.colour, "lw": 1.1}
        else:
            edge = 0.8 if bar.width > NARROW * full_width else 0
            look = {"color": style.colour, "hatch": style.hatch, "edgecolor": "white", "lw": edge, "alpha": style.alpha}
        axes.barh(bar.row, bar.width, left=bar.start, height=height, **look)
        if bar.text and bar.width > TIGHT * full_width:
            middle = bar.start + bar.width / 2
            axes.text(middle, bar.row, bar.text, ha="center", va="center", fontsize=8, color=style.ink)


def plot_timeline(
    timelines: Mapping[str, Sequence[Span]], *, overlay: bool = False, title: str = "One step of every rank"
) -> Figure:
    """Draw what every rank does when, one panel a timeline, or two timelines over each other.

    Args:
        timelines: by name, such as "measured" and "predicted", the spans of a step on any number of ranks.
        overlay: draw the first of two as bars and the second as outlines over them.
        title: of the figure.

    Returns:
        A figure in milliseconds, all panels to one scale: a row for each rank and lane that there is.

    Raises:
        ValueError: if there is no timeline, one without spans, or with `overlay` another number than two.
    """
    if not timelines or not all(timelines.values()):
        empty = [name for name, spans in timelines.items() if not spans]
        raise ValueError(f"nothing to draw ({', '.join(empty) or 'no timeline'} has no span): give spans of a step")
    if overlay and len(timelines) != 2:
        raise ValueError(f"overlay with {len(timelines)} timelines ({', '.join(timelines)}): it takes two")
    everything = [span for spans in timelines.values() for span in spans]
    longest_ms = 1e3 * max(span.end_s for span in everything)
    rows = _rows_of(everything)
    num_panels = 1 if overlay else len(timelines)
    height = 1.2 + num_panels * (0.3 + 0.2 * len(rows))
    figure, panels = new_figure(height, num_panels, 1, squeeze=False, sharex=True)
    for i, (name, spans) in enumerate(timelines.items()):
        axes = panels[0 if overlay else i, 0]
        outlined = overlay and i == 1
        draw_bars(axes, _bars_of(spans, rows, outlined=outlined), longest_ms)
        if not outlined:
            _label_rows(axes, rows)
            axes.set_title("" if overlay else name, fontsize=10, loc="left")
    panels[-1, 0].set(xlim=(0, 1.02 * longest_ms), xlabel="time since the step began (ms)")
    handles = _legend_of(everything)
    if overlay:
        filled, outlines = timelines
        handles.append(Patch(facecolor="none", edgecolor=OUTLINE.colour, label=f"outlines: {outlines}"))
        title = f"{title}: {outlines} over {filled}"
    figure.suptitle(title)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=9)
    return figure


def _rows_of(spans: Iterable[Span]) -> list[tuple[int, str]]:
    """Return rank and lane of each row, from the top."""
    known = {lane: place for place, lane in enumerate(LANES)}
    found = {(span.rank, span.lane) for span in spans}
    return sorted(found, key=lambda row: (row[0], known.get(row[1], len(known)), row[1]))


def _bars_of(spans: Iterable[Span], rows: Sequence[tuple[int, str]], *, outlined: bool) -> list[Bar]:
    """Return the bars of a timeline; outlines have no text."""
    place = {row: i for i, row in enumerate(rows)}
    return [
        Bar(
            row=place[span.rank, span.lane],
            start=1e3 * span.start_s,
            width=1e3 * (span.end_s - span.start_s),
            style=OUTLINE if outlined else _style_of(span),
        )
        for span in spans
    ]


def _style_of(span: Span) -> BarStyle:
    return STYLES.get(span.name) or STYLES.get(span.lane) or STYLES[COMPUTE]


def _legend_of(spans: Iterable[Span]) -> list[Patch]:
    """Explain each look that there is, in the order of `STYLES`."""
    spans = list(spans)
    used = {_style_of(span) for span in spans}
    labels = PHASE_LABELS | (LANE_LABELS if any(span.lane for span in spans) else PHASE_ROW_LABELS)
    return [
        Patch(facecolor=style.colour, hatch=style.hatch, edgecolor="white", label=labels[name])
        for name, style in STYLES.items()
        if style in used
    ]


def _label_rows(axes: Axes, rows: Sequence[tuple[int, str]]) -> None:
    """Name the rows, and part the ranks by lines."""
    is_first = [i == 0 or rows[i - 1][0] != rank for i, (rank, _) in enumerate(rows)]
    labels = [f"rank {rank}  {lane}" if first else lane for first, (rank, lane) in zip(is_first, rows, strict=True)]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for i in range(1, len(rows)):
        if is_first[i]:
            axes.axhline(i - 0.5, color=COLOURS["idle"], lw=0.8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
