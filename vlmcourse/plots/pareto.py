"""What memory buys: the plans of which none needs less memory and is as fast.

Enters: a front of `planner.pareto`, a device's memory. Leaves: a figure. Chapter 7.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vlmcourse.colours import COLOURS
from vlmcourse.planner.choice_cost import Cost
from vlmcourse.planner.pareto import best_within
from vlmcourse.plots.style import GB, new_figure

MARGIN = 0.15
HEIGHT_INCHES = 5.0


def plot_pareto(front: Sequence[Cost], memory_bytes: float, *, title: str = "") -> Figure:
    """Draw speed over memory, the best plan of every size of device, and what the device at hand can hold.

    Args:
        front: by memory, as `find_front` returns it.
        memory_bytes: of the device at hand.
        title: to put over it; "" for none.

    Raises:
        ValueError: if there is no plan.
    """
    if not front:
        raise ValueError("the front is empty: no plan breaks no rule, so there is nothing to draw")
    figure, axes = new_figure(HEIGHT_INCHES)
    memory = [cost.peak_bytes / GB for cost in front]
    speed = [cost.tokens_per_s / 1e3 for cost in front]
    limit = memory_bytes / GB
    left, right = min([*memory, limit]), max([*memory, limit])
    span = (right - left) or left
    right = max(right + MARGIN * span, limit + MARGIN * span)
    axes.axvspan(limit, right, color=COLOURS["idle"], alpha=0.25, linewidth=0)
    axes.axvline(limit, color=COLOURS["idle"], linewidth=1.5)
    axes.step([*memory, right], [*speed, speed[-1]], where="post", color=COLOURS["loss"], linewidth=1.5)
    fits = [value <= limit for value in memory]
    for shown, face in ((True, COLOURS["loss"]), (False, "white")):
        points = [(m, s) for m, s, ok in zip(memory, speed, fits, strict=True) if ok is shown]
        if points:
            label = "fits the device" if shown else "needs more than the device has"
            axes.scatter(*zip(*points, strict=True), s=36, zorder=3, label=label, color=face, edgecolor=COLOURS["loss"])
    axes.annotate(
        f"{limit:.0f} GB a device ",
        (limit, 0.02),
        xycoords=("data", "axes fraction"),
        rotation=90,
        ha="right",
        fontsize=9,
    )
    _name_plans(axes, front, memory_bytes)
    axes.set_xlim(left - MARGIN * span / 2, right)
    axes.set_ylim(0, 1.25 * max(speed))
    axes.set_xlabel("predicted peak memory of the fullest rank (GB)")
    axes.set_ylabel("predicted thousand tokens/s, all ranks")
    figure.legend(frameon=False, loc="outside lower left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    return figure


def short_name(cost: Cost) -> str:
    """Return a plan in a few words for a legend: degrees and recomputation."""
    choice = cost.choice
    axes = (("pp", choice.pp), ("dp", choice.dp_degree), ("cp", choice.cp), ("tp", choice.tp))
    degrees = " ".join(f"{name}{size}" for name, size in axes if size > 1) or "one rank"
    zero = f" ZeRO-{choice.zero_stage}" if choice.zero_stage else ""
    policies = {"vision": choice.recompute_vision, "language": choice.recompute_language}
    kept = ", ".join(f"{tower} {policy}" for tower, policy in policies.items() if policy != "none")
    return f"{degrees}{zero}, {f'recompute {kept}' if kept else 'no recomputation'}"


def _name_plans(axes: Axes, front: Sequence[Cost], memory_bytes: float) -> None:
    """Give the leanest plan, the best that fits and the fastest a letter; what they are stands in the legend."""
    best = best_within(front, memory_bytes)
    words = {0: "leanest", len(front) - 1: "fastest of all"}
    if best is not None:
        words[front.index(best)] = "best that fits"
    for letter, place in zip("ABC", sorted(words), strict=False):
        at = front[place].peak_bytes / GB, front[place].tokens_per_s / 1e3
        axes.annotate(letter, at, xytext=(-4, 7), textcoords="offset points", ha="right", fontweight="bold")
        label = f"{words[place]}: {short_name(front[place])}"
        axes.plot([], [], linestyle="", marker=f"${letter}$", markersize=9, color="black", label=label)
