"""Figures of how a run scales: speed-up over the ranks with the fitted laws, and where the efficiency goes.

Enters: a `monitor.scaling.ScalingReport`. Leaves: a figure of one message each. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from vlmcourse.monitor.scaling import ScalingReport
from vlmcourse.planner.efficiency_loss import LOSSES
from vlmcourse.planner.scaling import gustafson_speedup
from vlmcourse.plots.style import COLOURS, new_figure

LOSS_STYLES = {
    "communication": (COLOURS["communication"], ""),
    "imbalance": (COLOURS["idle"], "//"),
    "input": (COLOURS["exact_match"], ""),
    "serial": (COLOURS["optimizer"], ".."),
    "computing": (COLOURS["activations"], "xx"),
}
"""Colour and hatch of each part of the loss."""
BEYOND = 4
"""Fits are drawn up to so many times the most ranks that were measured."""


def plot_speedups(report: ScalingReport) -> Figure:
    """Draw measured speed-ups with their intervals, the fitted laws, and where one rank more stops paying.

    Args:
        report: of one kind of scaling.

    Returns:
        A figure, speed-up over number of ranks, both logarithmic; fits are dashed where nothing was measured.
    """
    figure, axes = new_figure(4.2)
    sizes = [one.num_ranks for one in report.speedups]
    measured = np.linspace(1, max(sizes), 60)
    beyond = np.linspace(max(sizes), BEYOND * max(sizes), 60)
    axes.plot([1, beyond[-1]], [1, beyond[-1]], color=COLOURS["idle"], lw=1.5, label="perfect")
    for name, predict, colour in _laws(report):
        for ranks, style, label in ((measured, "-", name), (beyond, "--", None)):
            axes.plot(ranks, [predict(n) for n in ranks], style, color=colour, lw=1.6, label=label)
    found, ink = [one.speedup for one in report.speedups], COLOURS["loss"]
    values = [one.value for one in found]
    errors = [[one.value - one.low for one in found], [one.high - one.value for one in found]]
    axes.errorbar(sizes, values, yerr=errors, fmt="o", color=ink, ms=6, capsize=4, label="measured, 95 %")
    crowded = [(size, value) for size, value in zip(sizes, values, strict=True) if size in report.crowded]
    if crowded:
        label = f"more ranks than the {report.num_cores} cores"
        axes.plot(*zip(*crowded, strict=True), "o", ms=13, mfc="none", mec=ink, label=label)
    last, is_known = report.last_paying.num_ranks, report.last_paying.is_fitted or report.last_paying.high is not None
    if last is not None and is_known and last <= beyond[-1]:
        axes.axvline(
            last, color=COLOURS["loss"], lw=1, ls=":", label=f"one more adds under {report.last_paying.min_marginal:g}"
        )
    ticks = [2**power for power in range(int(np.log2(beyond[-1])) + 1)]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_ylim(max(0.1, 0.8 * min(1.0, *(one.low for one in found))), 1.1 * beyond[-1])
    heights = [tick for tick in (0.25, 0.5, *ticks) if tick >= axes.get_ylim()[0]]
    axes.set_yticks(heights, [f"{height:g}" for height in heights])
    axes.yaxis.set_minor_locator(NullLocator())
    work = "the same samples a step" if report.kind == "strong" else "as many samples on each rank"
    axes.set(xlabel="ranks", ylabel="speed-up over one rank", title=f"{report.kind.capitalize()} scaling: {work}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    title = "dashed: beyond what was measured"
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, title=title)
    return figure


def _laws(report: ScalingReport) -> Iterator[tuple[str, Callable[[float], float], str]]:
    """Yield name, predicted speed-up and colour of the fits."""
    if report.gustafson is None:
        yield "Amdahl", report.amdahl.predict_speedup, COLOURS["weights"]
    else:
        fraction = report.gustafson.serial_fraction
        yield "Gustafson", lambda n: gustafson_speedup(fraction, n), COLOURS["weights"]
    if report.communication is not None:
        yield "with communication", report.communication.predict_speedup, COLOURS["communication"]


def plot_losses_of_efficiency(report: ScalingReport) -> Figure:
    """Draw what the ranks' time went to, one bar a number of ranks: what brought samples, and each part of the loss.

    Args:
        report: of one kind of scaling.

    Returns:
        A figure of stacked bars in percent of the time of all ranks. A part below 0 hangs to the left of 0.
    """
    figure, axes = new_figure(1.9 + 0.5 * len(report.losses))
    for row, loss in enumerate(report.losses):
        axes.barh(row, 100 * loss.efficiency, height=0.62, color=COLOURS["loss"], alpha=0.75)
        axes.text(50 * loss.efficiency, row, f"{100 * loss.efficiency:.0f}", va="center", ha="center", color="white")
        end, start = 100 * loss.efficiency, 0.0
        for name in LOSSES:
            share = 100 * loss.shares[name]
            colour, hatch = LOSS_STYLES[name]
            left = end if share >= 0 else start
            axes.barh(row, share, left=left, height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0.8)
            if share > 6:
                box = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8}
                axes.text(left + share / 2, row, f"{share:.0f}", va="center", ha="center", fontsize=9, bbox=box)
            end, start = (end + share, start) if share >= 0 else (end, start + share)
    names = [f"{one.num_ranks} ranks{' *' if one.num_ranks in report.crowded else ''}" for one in report.losses]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.axvline(0, color=COLOURS["loss"], lw=0.8)
    note = f"\n* more ranks than the {report.num_cores} cores" if report.crowded else ""
    axes.set(
        xlabel=f"time of all ranks (%){note}", title=f"{report.kind.capitalize()} scaling: where the efficiency goes"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [axes.barh(0, 0, color=COLOURS["loss"], alpha=0.75)]
    handles += [axes.barh(0, 0, color=colour, hatch=hatch, edgecolor="white") for colour, hatch in LOSS_STYLES.values()]
    figure.legend(handles, ["efficiency", *LOSSES], loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure
