"""Figures of pipelines: what every rank did when, from the actions that really ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vlmcourse.parallel.timeline import Action, bubble_fraction, makespan_s
from vlmcourse.plots.style import COLOURS, new_figure

KINDS = {
    "F": ("forward", COLOURS["activations"]),
    "B": ("backward", COLOURS["gradients"]),
    "I": ("backward, activations' part", COLOURS["communication"]),
    "W": ("backward, weights' part", COLOURS["weights"]),
}


def plot_schedules(schedules: Mapping[str, Sequence[Sequence[Action]]]) -> Figure:
    """Draw the actions of every rank over time, a panel a step.

    Args:
        schedules: by name, the actions of each rank in one step.

    Returns:
        A figure in milliseconds, all panels to one scale: bars with the micro-batch's number, paler for the first half
        of a rank's stages where it has several; grey where a rank waits.
    """
    num_ranks = max(len(ranks) for ranks in schedules.values())
    figure, panels = new_figure(
        1.0 + (0.5 + 0.3 * num_ranks) * len(schedules), len(schedules), 1, squeeze=False, sharex=True
    )
    longest_ms = 1e3 * max(makespan_s(ranks) for ranks in schedules.values())
    for axes, (name, ranks) in zip(panels[:, 0], schedules.items(), strict=True):
        start_s = min(action.start_s for actions in ranks for action in actions)
        middle = (max(action.stage for actions in ranks for action in actions) + 1) / 2
        several = len({action.stage for action in ranks[0]}) > 1
        axes.barh(range(len(ranks)), 1e3 * makespan_s(ranks), height=0.84, color=COLOURS["idle"], alpha=0.45)
        for row, actions in enumerate(ranks):
            for action in actions:
                left, width = 1e3 * (action.start_s - start_s), 1e3 * (action.end_s - action.start_s)
                alpha = 0.55 if several and action.stage < middle else 0.95
                colour = KINDS[action.kind][1]
                axes.barh(row, width, left=left, height=0.84, color=colour, alpha=alpha, edgecolor="white", lw=0.8)
                if width > 0.016 * longest_ms:
                    axes.text(left + width / 2, row, str(action.microbatch), ha="center", va="center", fontsize=8)
        axes.set_title(
            f"{name}: the ranks wait {100 * bubble_fraction(ranks):.0f} % of the time", fontsize=10, loc="left"
        )
        axes.set_yticks(range(len(ranks)), [f"rank {row}" for row in range(len(ranks))])
        axes.set(ylim=(len(ranks) - 0.5, -0.5), xlim=(0, 1.02 * longest_ms))
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle("What every rank did in one step")
    panels[-1, 0].set_xlabel("time since the first action of the step (ms)")
    kinds = {action.kind for ranks in schedules.values() for actions in ranks for action in actions}
    handles = [Patch(facecolor=colour, label=name) for kind, (name, colour) in KINDS.items() if kind in kinds]
    handles.append(Patch(facecolor=COLOURS["idle"], alpha=0.45, label="waiting"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure
