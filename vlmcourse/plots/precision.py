"""Figures of number formats: what they hold, where a real step uses which, what gradients need, how training fares.

Enters: formats, recorded operations, counted exponents, scales and losses. Leaves: matplotlib figures. Chapter 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from vlmcourse.monitor.exponents import Exponents
from vlmcourse.monitor.op_dtypes import OpCall
from vlmcourse.planner.formats import FloatFormat
from vlmcourse.plots.style import COLOURS, new_figure

FORMAT_COLOURS = {
    "fp32": "#000000",
    "bf16": "#56B4E9",
    "fp16": "#D55E00",
    "e4m3": "#009E73",
    "e5m2": "#CC79A7",
}
"""One color a format, as in Okabe and Ito's palette; each has a place or a line style of its own too."""
LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
CURVE_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")


def plot_formats(formats: Sequence[FloatFormat]) -> Figure:
    """Draw the range of each format over powers of two, its subnormal numbers hatched, its digits written beside it.

    Raises:
        ValueError: if there is no format.
    """
    if not formats:
        raise ValueError("there is no format to draw: give at least one")
    figure, axes = new_figure(0.42 * len(formats) + 1.4)
    for row, spec in enumerate(formats):
        low, normal = math.log2(spec.smallest_subnormal), math.log2(spec.smallest_normal)
        high = math.log2(spec.max)
        axes.barh(row, normal - low, left=low, color="white", edgecolor=COLOURS["weights"], hatch="////", height=0.6)
        axes.barh(row, high - normal, left=normal, color=COLOURS["weights"], edgecolor="white", height=0.6)
        text = f"{spec.significant_bits} significant bits = {spec.decimal_digits:.1f} digits"
        axes.text(0 if low < -60 else 20, row, text, color="white" if low < -60 else "black", va="center", fontsize=8)
    axes.set_yticks(range(len(formats)), [spec.name for spec in formats])
    axes.invert_yaxis()
    axes.set(xlabel="size of a number, as a power of two", title="Exponent bits buy range, mantissa bits buy digits")
    handles = [
        Patch(facecolor=COLOURS["weights"], label="normal numbers: all digits"),
        Patch(facecolor="white", edgecolor=COLOURS["weights"], hatch="////", label="subnormal: fewer and fewer"),
    ]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2)
    return figure


def plot_exponents(
    towers: Mapping[str, Exponents], formats: Sequence[FloatFormat], title: str = "Gradients of one step by size"
) -> Figure:
    """Draw for each tower how many gradients have which exponent, over the bands in which formats keep them.

    The bar of exponent e reaches from e to e + 1 as its gradients do, so the bars left of a format's dashed line are
    those that it loses.

    Args:
        towers: counts by the name of a tower.
        formats: each becomes a band below the histograms: solid where its normal numbers are, hatched where subnormal.
        title: of the figure.

    Raises:
        ValueError: if no tower has a gradient that is not zero.
    """
    filled = {name: found for name, found in towers.items() if found.num_nonzero}
    if not filled:
        raise ValueError("no tower has a gradient that is not zero: draw after a backward pass")
    rows = len(filled) + 1
    figure, axes = new_figure(1.25 * len(filled) + 0.45 * len(formats) + 0.9, rows, 1, sharex=True,
                              height_ratios=[1.0] * len(filled) + [0.35 * len(formats)])  # fmt: skip
    for axis, (name, found) in zip(axes, filled.items(), strict=False):
        percent = [100 * number / found.num_nonzero for number in found.counts.values()]
        axis.bar(list(found.counts), percent, width=1.0, align="edge", color=COLOURS["gradients"], edgecolor="black",
                 linewidth=0.4)  # fmt: skip
        axis.set_ylabel(f"{name}\n(% of nonzero)", fontsize=8)
        axis.grid(axis="y", alpha=0.3)
    bands = axes[-1]
    for row, spec in enumerate(formats):
        low, normal = math.log2(spec.smallest_subnormal), math.log2(spec.smallest_normal)
        bands.barh(row, normal - low, left=low, color="white", edgecolor=COLOURS["weights"], hatch="////", height=0.6)
        bands.barh(row, math.log2(spec.max) - normal, left=normal, color=COLOURS["weights"], height=0.6)
        limit = low - 1  # half of the smallest number: what is above it is rounded up and stays
        if limit > min(e for found in filled.values() for e in found.counts) - 4:
            for axis in axes[:-1]:
                axis.axvline(limit, color=COLOURS["communication"], lw=0.9, ls="--")
            # In two rows by turns: the limits of neighbors are closer than their names are long.
            lift = 3 + 11 * (len(axes[0].texts) % 2)
            axes[0].annotate(f"\u2190 0 in {spec.name}", (limit, 1), (0, lift), ha="right", va="bottom", fontsize=8,
                             xycoords=axes[0].get_xaxis_transform(), textcoords="offset points")  # fmt: skip
    bands.set_yticks(range(len(formats)), [spec.name for spec in formats])
    bands.invert_yaxis()
    bands.set_xlabel("size of a number, as a power of two (a bar goes from e to e + 1)")
    every = [e for found in filled.values() for e in found.counts]
    bands.set_xlim(min(every) - 4, max(20, max(every) + 4))
    axes[0].set_title(title, pad=28)
    return figure


def plot_scale(scales: Sequence[float], skipped: Sequence[bool]) -> Figure:
    """Draw the life of a loss scale: its value at each step, and the steps that overflowed.

    Args:
        scales: what the loss of each step was multiplied by.
        skipped: whether that step was skipped.

    Raises:
        ValueError: if there is no step, or the lengths differ.
    """
    if not scales or len(scales) != len(skipped):
        raise ValueError(f"{len(scales)} scales and {len(skipped)} steps: give one scale for each of one or more steps")
    figure, axes = new_figure(2.8)
    steps = range(1, len(scales) + 1)
    axes.step(steps, [math.log2(s) for s in scales], where="mid", color=COLOURS["loss"], lw=1.4, label="scale")
    lost = [step for step, was in zip(steps, skipped, strict=True) if was]
    axes.plot(lost, [math.log2(scales[step - 1]) for step in lost], "x", color=COLOURS["communication"], ms=8, mew=2,
              label="overflow: step skipped, scale halved")  # fmt: skip
    axes.set(
        xlabel="optimizer step", ylabel="log2 of the loss scale", title=f"{len(lost)} of {len(scales)} steps skipped"
    )
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return figure


def plot_precision_losses(curves: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the loss of every precision, and how far each is from the first.

    Args:
        curves: loss of every optimizer step by the name of the precision; the first is the reference.

    Raises:
        ValueError: if there are fewer than two curves, or different numbers of steps.
    """
    lengths = {len(losses) for losses in curves.values()}
    if len(curves) < 2 or len(lengths) > 1 or 0 in lengths:
        raise ValueError(f"{len(curves)} runs of {sorted(lengths)} steps: give two or more of the same length")
    reference_name, reference = next(iter(curves.items()))
    steps = range(1, len(reference) + 1)
    figure, (above, below) = new_figure(4.6, 2, 1, sharex=True, height_ratios=(3, 2))
    for (name, losses), color, style in zip(curves.items(), CURVE_COLOURS, LINE_STYLES, strict=False):
        wide = 3.5 if name == reference_name else 1.3
        shade = COLOURS["idle"] if name == reference_name else color
        above.plot(steps, losses, color=shade, ls="-" if name == reference_name else style, lw=wide, label=name)
        if name != reference_name:
            differences = [abs(a - b) or math.nan for a, b in zip(losses, reference, strict=True)]
            below.plot(steps, differences, color=color, ls=style, lw=1.2, label=name)
    above.set(ylabel="loss per supervised\ntoken (nats)", title="The same samples and first weights in every precision")
    above.legend(frameon=False, fontsize=8, ncols=3)
    below.set(xlabel="optimizer step", ylabel=f"difference to\n{reference_name} (nats)", yscale="log")
    below.grid(axis="y", alpha=0.3)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def plot_step_formats(calls: Sequence[OpCall], title: str = "Where one training step uses which format") -> Figure:
    """Draw every operation of one step as a mark: when it ran, which part of the model it belongs to, what it wrote.

    Args:
        calls: what an `OpRecorder` saw, in order.
        title: of the figure.

    Raises:
        ValueError: if there is no call.
    """
    if not calls:
        raise ValueError("no operation was recorded: run a step inside `with OpRecorder()`")
    calls = [call for call in calls if call.output != "fp64"]  # counts of tokens, and sums over ranks
    parts = [_part_of(call) for call in calls]
    rows = {part: row for row, part in enumerate(sorted(dict.fromkeys(parts), key=_ROWS.index))}
    figure, axes = new_figure(0.42 * len(rows) + 1.3)
    found = [name for name in FORMAT_COLOURS if any(call.output == name for call in calls)]
    height = 0.8 / len(found)
    for lane, name in enumerate(found):
        marks = [
            (n, rows[part]) for n, (call, part) in enumerate(zip(calls, parts, strict=True)) if call.output == name
        ]
        x, y = np.array(marks).T
        offset = (lane - (len(found) - 1) / 2) * height
        axes.vlines(x, y + offset - height / 2.2, y + offset + height / 2.2, color=FORMAT_COLOURS[name], lw=1.1)
    _mark_phases(axes, calls)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlabel="operation of the step, in the order in which they ran", xlim=(-5, len(calls) + 5))
    axes.set_title(title, pad=20)
    axes.invert_yaxis()
    handles = [Line2D([], [], color=FORMAT_COLOURS[name], lw=3, label=f"writes {name}") for name in found]
    axes.legend(
        handles=handles, frameon=False, fontsize=8, ncols=len(found), loc="upper left", bbox_to_anchor=(0, -0.2)
    )
    return figure


_ROWS = ["vision", "projector", "language", "logits", "inputs and loss", "update"]


def _part_of(call: OpCall) -> str:
    """Return the row that an operation is drawn in."""
    if call.phase == "update":
        return "update"
    tower = call.module.partition(".")[0]
    if "lm_head" in call.module:
        return "logits"
    return tower if tower in _ROWS else "inputs and loss"


def _mark_phases(axes: Axes, calls: Sequence[OpCall]) -> None:
    """Write above the marks where forward, backward and update begin; what comes after all backwards is the update."""
    last = max((number for number, call in enumerate(calls) if call.phase == "backward"), default=-1)
    before = ""
    for number, call in enumerate(calls):
        phase = "backward" if call.phase == "backward" else "forward" if number < last else "update"
        if phase != before:
            axes.axvline(number - 0.5, color=COLOURS["idle"], lw=1)
            axes.text(number, 1.02, phase, fontsize=9, va="bottom", transform=axes.get_xaxis_transform())
            before = phase


def plot_roundings(curves: Mapping[str, Sequence[float]], ylabel: str = "value of the weight") -> Figure:
    """Draw one number over many small updates, under several ways to store it.

    Args:
        curves: its value after each update by the way; the first is what it should be.
        ylabel: of the vertical axis.

    Raises:
        ValueError: if there is no curve.
    """
    if not curves:
        raise ValueError("there is no curve to draw")
    figure, axes = new_figure(2.9)
    for number, (name, values) in enumerate(curves.items()):
        shade, wide = (COLOURS["idle"], 4.0) if number == 0 else (CURVE_COLOURS[number % 6], 1.3)
        axes.plot(values, color=shade, ls="-" if number == 0 else LINE_STYLES[number % 6], lw=wide, label=name)
    axes.set(xlabel="update", ylabel=ylabel, title="Updates smaller than half a step of the format")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return figure
