"""Figures of how long ranks take to exchange data: time over size, and what hides behind computation."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from vlmcourse.parallel.links import LinkFit
from vlmcourse.parallel.overlap import StepTrace
from vlmcourse.plots.style import COLOURS, new_figure

LINES = ("communication", "weights", "activations", "loss")
"""Colours of up to four collectives, in their order; markers tell them apart too."""
MARKERS = ("o", "s", "^", "D")


def plot_links(fits: Mapping[str, LinkFit]) -> Figure:
    """Draw measured times of collectives over the size of the tensor, and the lines that were fitted to them.

    Args:
        fits: up to four kinds of collective by name, of one group.

    Returns:
        A figure with both axes logarithmic: points measured, lines latency + bytes / bandwidth.
    """
    figure, axes = new_figure(3.9)
    for (kind, fit), colour, marker in zip(fits.items(), LINES, MARKERS, strict=False):
        sizes = [sample.payload_bytes for sample in fit.samples]
        axes.plot(sizes, [1e3 * s.seconds for s in fit.samples], marker, color=COLOURS[colour], ms=6, label=kind)
        axes.plot(sizes, [1e3 * fit.predict_s(size) for size in sizes], color=COLOURS[colour], lw=1.2)
    num_ranks = next(iter(fits.values())).num_ranks
    axes.set_xscale("log", base=2)
    axes.set(
        yscale="log",
        xlabel="size of the tensor (bytes)",
        ylabel="time (ms)",
        title=f"Small messages cost latency, large ones bandwidth ({num_ranks} ranks)",
    )
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=len(fits), frameon=False, title="points: measured, lines: fitted")
    return figure


def plot_overlap(traces: Mapping[str, StepTrace]) -> Figure:
    """Draw when one rank computed and when collectives were on their way, a panel a step.

    Args:
        traces: by name, one step of one rank each.

    Returns:
        A figure in milliseconds, all panels to one scale; collectives that were on their way together share the row.
    """
    figure, panels = new_figure(1.0 + 0.95 * len(traces), len(traces), 1, squeeze=False, sharex=True)
    for axes, (name, trace) in zip(panels[:, 0], traces.items(), strict=True):
        sent = [(part.start_s, part.end_s) for part in trace.communication]
        for row, (spans, colour) in enumerate(((trace.compute, "activations"), (sent, "communication"))):
            bars = [(1e3 * start, 1e3 * (end - start)) for start, end in spans]
            axes.broken_barh(bars, (row - 0.38, 0.76), color=COLOURS[colour], alpha=0.8, lw=0)
        axes.set_title(
            f"{name}: {1e3 * trace.communication_s:.1f} ms of communication, "
            f"{100 * trace.overlapped_fraction:.0f} % of it behind computation",
            fontsize=10,
            loc="left",
        )
        axes.set_yticks((0, 1), ("compute", "communicate"))
        axes.set(ylim=(1.6, -0.6))
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1, 0].set(xlim=(0, 1.02e3 * max(trace.seconds for trace in traces.values())))
    panels[-1, 0].set_xlabel("time since the step began (ms)")
    figure.suptitle("One step of rank 0: what hides behind what")
    return figure
