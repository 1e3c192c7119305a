"""Figures of a plan that nobody has run yet: what its towers weigh, its memory over a step, what its seconds go into.

Enters: counts by tower, dry runs, the planner's peaks and costs. Leaves: figures. Chapter 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vlmcourse.planner.choice_cost import Cost, split_seconds
from vlmcourse.planner.rank_peak import Peak
from vlmcourse.plots.activations import LEDGER_STYLES
from vlmcourse.plots.style import COLOURS, GB, new_figure

if TYPE_CHECKING:
    from vlmcourse.dryrun import DryRun
    from vlmcourse.dryrun.ledger import Moment

TOWER_STYLES = {
    "vision": (COLOURS["exact_match"], "///"),
    "projector": (COLOURS["idle"], ""),
    "language": (COLOURS["activations"], ""),
}
MEMORY_STYLES = {
    **{owner: style for owner, style in LEDGER_STYLES.items() if owner != "other"},
    "loss": (COLOURS["loss"], ""),
}
"""Owners of a dry run and of the planner's peaks, from the bottom of the stack to its top."""
SAME_OWNER = {"logits": "loss", "buffers": "temporary", "communication": "temporary", "other": "temporary"}
"""Other names of the same."""
SECONDS_STYLES = {
    "computing": ("#56B4E9", ""),
    "recomputation": ("#56B4E9", "///"),
    "communication": (COLOURS["communication"], ""),
    "bubble": (COLOURS["idle"], ".."),
    "imbalance": (COLOURS["idle"], "xx"),
    "optimizer": (COLOURS["optimizer"], ".."),
    "overhead": ("#666666", ""),
}
SMALLEST_LABEL = 0.03
"""Of a bar, below which a part has no text."""


@dataclass(frozen=True, kw_only=True)
class PlayedPlan:
    """A plan's dry run with the planner's answer."""

    found: DryRun
    predicted: Peak
    """Of the same rank, counted for the same machine."""


def plot_tower_shares(amounts: Mapping[str, Mapping[str, float]], *, title: str = "") -> Figure:
    """Draw which share of each quantity a tower has, one bar a quantity.

    Args:
        amounts: by quantity, its unit in the name, the amount of each tower.
        title: the message.

    Raises:
        ValueError: if there is nothing to draw.
    """
    if not amounts:
        raise ValueError("there is no quantity to draw: give amounts by tower, such as labs.ch07.count_towers returns")
    figure, axes = new_figure(1.3 + 0.42 * len(amounts))
    for row, sizes in enumerate(amounts.values()):
        start, total = 0.0, sum(sizes.values())
        for tower, size in sizes.items():
            colour, hatch = TOWER_STYLES[tower]
            share = 100 * size / total
            axes.barh([row], [share], left=start, color=colour, hatch=hatch, edgecolor="white")
            if share > 100 * SMALLEST_LABEL:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                axes.text(start + share / 2, row, f"{size:.3g}", ha="center", va="center", fontsize=9, bbox=box)
            start += share
    axes.set_yticks(range(len(amounts)), list(amounts), fontsize=9)
    axes.set(ylim=(len(amounts) - 0.4, -0.6), xlim=(0, 100), xlabel="share of the whole (%)")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for name, (c, h) in TOWER_STYLES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    return figure


def plot_played_memory(plans: Mapping[str, PlayedPlan], memory_bytes: int, *, title: str = "") -> Figure:
    """Draw bytes alive over one played step by owner, and to the right of each the planner's fullest moment.

    Args:
        plans: by name; one panel each, one under the other. The horizontal axis counts layers passed, not seconds.
        memory_bytes: of the device, drawn as a line.
        title: the message.

    Raises:
        ValueError: if there is no plan.
    """
    if not plans:
        raise ValueError("there is no plan to draw: give a PlayedPlan by name")
    ratios = {"width_ratios": (12, 1)}
    figure, panels = new_figure(0.9 + 2.2 * len(plans), len(plans), 2, squeeze=False, sharey=True, gridspec_kw=ratios)
    highest = max([memory_bytes, *(max(p.found.peak.total_bytes, p.predicted.total_bytes) for p in plans.values())])
    for (course, bar), (name, plan) in zip(panels, plans.items(), strict=True):
        moments = plan.found.course()
        _stack_course(course, moments)
        _name_stretches(course, moments, 1.16 * highest / GB)
        peak = max(moments, key=lambda moment: moment.total_bytes)
        course.plot([moments.index(peak) + 0.5], [peak.total_bytes / GB], "v", color="black", ms=6)
        course.set_title(f"{name}: at most {peak.total_bytes / GB:.1f} GB played", fontsize=10, loc="left")
        _stack_peak(bar, plan.predicted)
        for axes in (course, bar):
            axes.axhline(memory_bytes / GB, color="black", ls="--", lw=1)
            axes.spines[["top", "right"]].set_visible(False)
        counted = sum(by_style(plan.predicted.owners).values())  # without the allowance, which is never alive
        bar.set_title(f"planner\n{counted / GB:.1f}", fontsize=9)
        course.set(ylabel="GB of one rank", ylim=(0, 1.22 * highest / GB))
    panels[-1][0].set_xlabel("layers passed in one step (forward and backward of two micro-batches, clipping, update)")
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for name, (c, h) in MEMORY_STYLES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def by_style(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return bytes by the owners that figures have, in their order; the allowance, which is never alive, left out."""
    found = dict.fromkeys(MEMORY_STYLES, 0.0)
    for owner, size in sizes.items():
        if owner != "fixed":
            found[SAME_OWNER.get(owner, owner)] += size
    return found


def _stack_course(axes: Axes, moments: Sequence[Moment]) -> None:
    rows = [by_style(moment.live_bytes) for moment in moments]
    lower = [0.0] * len(rows)
    edges = [*range(len(rows) + 1)]
    for owner, (colour, hatch) in MEMORY_STYLES.items():
        upper = [low + row[owner] / GB for low, row in zip(lower, rows, strict=True)]
        low, high = [*lower, lower[-1]], [*upper, upper[-1]]
        # `color` would set the hatch's color too.
        axes.fill_between(edges, low, high, step="post", facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0)
        lower = upper
    axes.set_xlim(0, len(rows))
    axes.set_xticks([])


def _name_stretches(axes: Axes, moments: Sequence[Moment], height: float) -> None:
    """Part the passes of a step by lines, and name those that have room."""
    start = 0
    for (phase, micro_batch), stretch in groupby(moments, key=lambda moment: (moment.phase, moment.micro_batch)):
        length = len(list(stretch))
        if length > SMALLEST_LABEL * len(moments):
            axes.axvline(start, color=COLOURS["idle"], lw=0.8)
            axes.text(start + length / 2, height, f"{phase} {micro_batch + 1}", ha="center", va="center", fontsize=8)
        start += length


def _stack_peak(axes: Axes, peak: Peak) -> None:
    start = 0.0
    for owner, size in by_style(peak.owners).items():
        colour, hatch = MEMORY_STYLES[owner]
        axes.bar([0], [size / GB], bottom=start, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        start += size / GB
    axes.set_xticks([])


def plot_step_seconds(costs: Mapping[str, Cost], *, title: str = "") -> Figure:
    """Draw what the seconds of a step go into, one bar a plan.

    Args:
        costs: by the name of the plan, from top to bottom.
        title: the message.

    Raises:
        ValueError: if there is no plan.
    """
    if not costs:
        raise ValueError("there is no plan to draw: give costs by name")
    figure, axes = new_figure(1.3 + 0.42 * len(costs))
    longest = max(cost.seconds for cost in costs.values())
    used: set[str] = set()
    for row, cost in enumerate(costs.values()):
        start = 0.0
        for part, seconds in split_seconds(cost).items():
            if seconds < 1e-3 * longest:
                continue
            used.add(part)
            colour, hatch = SECONDS_STYLES[part]
            axes.barh([row], [seconds], left=start, color=colour, hatch=hatch, edgecolor="white")
            start += seconds
        axes.text(start, row, f" {start:.1f} s, MFU {100 * cost.mfu:.0f} %", va="center", fontsize=9)
    axes.set_yticks(range(len(costs)), list(costs), fontsize=9)
    axes.set(ylim=(len(costs) - 0.4, -0.6), xlim=(0, 1.28 * longest), xlabel="predicted seconds of one optimizer step")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [
        Patch(facecolor=c, hatch=h, edgecolor="white", label=name)
        for name, (c, h) in SECONDS_STYLES.items()
        if name in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    return figure
