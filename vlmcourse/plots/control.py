"""The figure of a steered run: step time and memory, what went wrong when, and what the controller did about it.

Enters: a `control.episodes.Result`. Leaves: a figure of three rows over one time axis. The events are the simulation's
own, which a controller never sees; they are drawn afterwards. Chapter 7.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from vlmcourse.control.episodes import Result
from vlmcourse.control.simulation import RunLog
from vlmcourse.plots.style import COLOURS, new_figure

GIB = 2**30
EVENT_COLOURS = {
    "images": COLOURS["visual_tokens"],
    "memory": COLOURS["activations"],
    "slow_rank": COLOURS["idle"],
    "link": COLOURS["communication"],
}
"""Of the bars of events; an eviction is a moment and is drawn as a cross."""
LANES = {
    "save": "save",
    "micro_batch": "micro-batch",
    "recompute": "recompute",
    "balance": "balance",
    "compress": "compress",
    "move_layers": "move layers",
    "shard": "shard",
    "replace": "replace",
    "save_every": "save every",
}
"""Names of actions as they stand at the axis, in their order."""


def plot_run(result: Result) -> Figure:
    """Draw one run of a controller, beside doing nothing.

    Args:
        result: of `grading.ex04_7.play_run`, or of `control.episodes.run_episode`.

    Returns:
        A figure: seconds of each step; memory of the fullest rank, with steps that ran out marked; events and actions.
    """
    figure, (steps, memory, below) = new_figure(6.4, 3, 1, sharex=True, height_ratios=(3, 3, 4))
    _draw_rows(steps, memory, result.baseline, COLOURS["idle"], "doing nothing")
    _draw_rows(steps, memory, result.log, COLOURS["weights"], "controller")
    typical_s = sorted(row.step_s for log in (result.log, result.baseline) for row in log.rows)
    steps.set_ylim(0, 1.15 * typical_s[int(0.985 * (len(typical_s) - 1))])
    device_gib = result.episode.simulation().device_bytes / GIB
    memory.axhline(device_gib, color=COLOURS["loss"], lw=1, ls="--", label="device")
    memory.set_ylim(0, 1.45 * device_gib)
    steps.set(ylabel="step (s)")
    memory.set(ylabel="peak (GiB)")
    _draw_lanes(below, result)
    below.set(xlabel="wall time (s)", xlim=(0, result.episode.world.horizon_s))
    for axes in (steps, memory, below):
        axes.spines[["top", "right"]].set_visible(False)
    speeds = [log.samples_per_s for log in (result.log, result.baseline, result.oracle)]
    steps.set_title(
        f"{result.episode}\n{speeds[0]:.1f} useful samples/s, doing nothing {speeds[1]:.1f}, oracle {speeds[2]:.1f}",
        fontsize=10,
    )
    handles, labels = memory.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _draw_rows(steps: Any, memory: Any, log: RunLog, colour: str, label: str) -> None:
    """Draw the steps of one run as points, and those that stopped it."""
    done = [row for row in log.rows if not row.stopped]
    steps.plot([row.now_s for row in done], [row.step_s for row in done], ".", ms=3, color=colour)
    memory.plot(
        [row.now_s for row in done], [row.peak_bytes / GIB for row in done], ".", ms=3, color=colour, label=label
    )
    full = [row for row in log.rows if row.stopped == "out of memory"]
    if full:
        heights = [row.peak_bytes / GIB for row in full]
        memory.plot(
            [row.now_s for row in full], heights, "x", ms=7, mew=2, color=colour, label=f"{label}: out of memory"
        )


def _draw_lanes(axes: Any, result: Result) -> None:
    """Draw one line for each event, and one for each kind of action."""
    labels: list[str] = []
    for event in result.episode.world.events:
        row = len(labels)
        labels.append(str(event))
        if event.kind == "eviction":
            axes.plot([event.start_s], [row], "X", ms=9, color=COLOURS["loss"])
            continue
        length = min(event.end_s, result.episode.world.horizon_s) - event.start_s
        axes.barh(row, length, left=event.start_s, height=0.5, color=EVENT_COLOURS[event.kind])
    axes.axhline(len(labels) - 0.5, color=COLOURS["loss"], lw=0.6)
    asked = [(at_s, name.split()[0]) for at_s, name in result.log.asked]
    for name, shown in LANES.items():
        moments = [at_s for at_s, other in asked if other == name]
        if moments:
            axes.plot(moments, [len(labels)] * len(moments), "|", ms=10, mew=2, color=COLOURS["weights"])
            labels.append(shown)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
