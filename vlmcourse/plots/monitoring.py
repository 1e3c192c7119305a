"""Figures of what a run logs about itself: phases of a step by rank, tokens by kind, gradients and updates by tower.

Enters: step logs of `monitor.step_log`, rows of a run's history. Leaves: figures. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from vlmcourse.colours import PHASE_COLOURS
from vlmcourse.monitor.step_log import RankLog
from vlmcourse.plots.style import COLOURS, HATCHES, new_figure
from vlmcourse.spans import PHASE_LABELS

TOKEN_LOOKS = {
    "text": ("text", COLOURS["exact_match"], ""),
    "image": ("image", COLOURS["visual_tokens"], ".."),
    "padding": ("padding", COLOURS["idle"], "//"),
}
TOWER_LOOKS = {
    "vision_encoder": ("vision encoder", COLOURS["activations"], "-"),
    "projector": ("projector", COLOURS["communication"], "--"),
    "llm": ("language model", COLOURS["weights"], "-."),
}
RATE_KEYS = {"vision_encoder": "vision", "projector": "projector", "llm": "llm"}


def median_phases(log: RankLog, first_step: int = 2) -> dict[str, float]:
    """Return the median seconds of each phase over one rank's steps, from step `first_step` on.

    Raises:
        ValueError: if there is no such step.
    """
    steps = [record for record in log.steps if record.step >= first_step]
    if not steps:
        raise ValueError(f"no step from {first_step} on in this log: train longer, or lower first_step")
    known = {name: [getattr(record, f"{name}_s") for record in steps] for name in PHASE_COLOURS}
    return {name: median(values) for name, values in known.items() if None not in values}


def plot_phases(logs: Mapping[int, RankLog], first_step: int = 2, title: str = "A step of every rank") -> Figure:
    """Draw the phases of each rank's median step as a bar.

    Args:
        logs: by rank, as `read_step_log` returns them.
        first_step: the first that counts; the very first of a run allocates memory and is no usual step.
        title: of the figure.

    Returns:
        A figure in milliseconds, a row a rank. Medians of phases need not add up to the median of a step.

    Raises:
        ValueError: if a rank has no such step.
    """
    figure, axes = new_figure(1.5 + 0.45 * len(logs))
    longest_ms = 0.0
    for row, (_, log) in enumerate(sorted(logs.items())):
        begin_ms = 0.0
        for name, seconds in median_phases(log, first_step).items():
            look = {"color": PHASE_COLOURS[name], "hatch": HATCHES.get(name, "")}
            axes.barh(row, 1e3 * seconds, left=begin_ms, height=0.65, edgecolor="white", linewidth=0.6, **look)
            begin_ms += 1e3 * seconds
        longest_ms = max(longest_ms, begin_ms)
    axes.set_yticks(range(len(logs)), [f"rank {rank}" for rank in sorted(logs)])
    axes.set(
        ylim=(len(logs) - 0.45, -0.55), xlim=(0, 1.02 * longest_ms), xlabel="median over the steps (ms)", title=title
    )
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [
        Patch(facecolor=colour, hatch=HATCHES.get(name), edgecolor="white", label=PHASE_LABELS[name])
        for name, colour in PHASE_COLOURS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure


def plot_token_rates(
    rows: Mapping[str, Mapping[str, float]], title: str = "Positions a second, by what is in them"
) -> Figure:
    """Draw how many positions a second each run works on, by what is in them.

    Args:
        rows: by name of the run, rates by "text", "image" and "padding".
        title: of the figure.

    Returns:
        A figure: one bar a run, in thousands of positions a second.
    """
    figure, axes = new_figure(1.5 + 0.4 * len(rows))
    for place, rates in enumerate(rows.values()):
        begin = 0.0
        for kind, (_, colour, hatch) in TOKEN_LOOKS.items():
            width = rates.get(kind, 0.0) / 1e3
            axes.barh(
                place, width, left=begin, height=0.65, color=colour, hatch=hatch, edgecolor="white", linewidth=0.6
            )
            begin += width
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(ylim=(len(rows) - 0.45, -0.55), xlabel="thousand positions a second", title=title)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for name, c, h in TOKEN_LOOKS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def plot_training_by_tower(
    history: Sequence[Mapping[str, Any]], title: str = "Gradients, updates and rates by tower"
) -> Figure:
    """Draw gradient norm, update ratio and learning rate of each tower over the steps of a run.

    Args:
        history: rows as in `TrainResult.history`; a tower without a value has no line.
        title: of the figure.

    Returns:
        A figure of three panels on one axis of steps; the first two are logarithmic.

    Raises:
        ValueError: if there is no row.
    """
    if not history:
        raise ValueError("the history has no row: train for at least one step")
    figure, panels = new_figure(5.2, 3, 1, sharex=True)
    names = ("gradients/{}_norm", "updates/{}_ratio", "lr/{}")
    labels = ("gradient norm", "update / weights", "learning rate")
    for axes, name, label in zip(panels, names, labels, strict=True):
        for tower, (shown, colour, style) in TOWER_LOOKS.items():
            key = name.format(RATE_KEYS[tower] if name.startswith("lr") else tower)
            points = [(row["step"], row[key]) for row in history if key in row]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, ls=style, lw=1.6, label=shown)
        axes.set_ylabel(label)
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_yscale("log")
    panels[1].set_yscale("log")
    panels[0].set_title(title)
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, shown = panels[0].get_legend_handles_labels()
    figure.legend(handles, shown, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
