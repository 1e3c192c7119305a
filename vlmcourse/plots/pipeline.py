"""Figures of pipelines: what every rank did when, from the actions that really ran, and what moving layers changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from vlmcourse.parallel.layer_times import LayerTimes
from vlmcourse.parallel.timeline import Action, bubble_fraction, makespan_s
from vlmcourse.planner.stages import StageSplit
from vlmcourse.plots.style import COLOURS, new_figure
from vlmcourse.plots.timeline import PASSES, Bar, BarStyle, draw_bars
from vlmcourse.spans import BACKWARD, FORWARD

KINDS = {
    "F": ("forward", PASSES[FORWARD]),
    "B": ("backward", PASSES[BACKWARD]),
    "I": ("backward, activations' part", BarStyle(colour="#9C6B3F", hatch="///")),
    "W": ("backward, weights' part", BarStyle(colour="#E9D3AE", hatch="...")),
}
"""Name and look of an action."""

STAGE_COLOURS = ("#A9C5C0", "#3D5A80", "#E3C9A8", "#7A4F4F")
"""Of stages, in their order: light and dark take turns."""


def plot_schedules(
    schedules: Mapping[str, Sequence[Sequence[Action]]],
    marked: Mapping[str, Collection[int]] | None = None,
    mark: str = "text only",
) -> Figure:
    """Draw the actions of every rank over time, a panel a step.

    Args:
        schedules: by name, the actions of each rank in one step.
        marked: by name, micro-batches to point out by a triangle under each of their actions.
        mark: what the triangle means.

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
        _draw_schedule(axes, ranks, longest_ms, (marked or {}).get(name, ()))
        axes.set_title(
            f"{name}: the ranks wait {100 * bubble_fraction(ranks):.0f} % of the time", fontsize=10, loc="left"
        )
        axes.set_yticks(range(len(ranks)), [f"rank {row}" for row in range(len(ranks))])
        axes.set(ylim=(len(ranks) - 0.4, -0.5), xlim=(0, 1.02 * longest_ms))
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle("What every rank did in one step")
    panels[-1, 0].set_xlabel("time since the first action of the step (ms)")
    kinds = {action.kind for ranks in schedules.values() for actions in ranks for action in actions}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=style.colour, hatch=style.hatch, edgecolor="white", label=name)
        for kind, (name, style) in KINDS.items()
        if kind in kinds
    ]
    handles.append(Patch(facecolor=COLOURS["idle"], alpha=0.45, label="waiting"))
    if marked:
        handles.append(Line2D([], [], marker="^", color="black", ls="", ms=4, label=mark))
    columns = len(handles) if len(handles) < 5 else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _draw_schedule(axes: Axes, ranks: Sequence[Sequence[Action]], longest_ms: float, marked: Collection[int]) -> None:
    """Draw the actions of one step, a row a rank; `longest_ms` is what the whole width stands for."""
    start_s = min(action.start_s for actions in ranks for action in actions)
    middle = (max(action.stage for actions in ranks for action in actions) + 1) / 2
    several = len({action.stage for action in ranks[0]}) > 1
    axes.barh(range(len(ranks)), 1e3 * makespan_s(ranks), height=0.8, color=COLOURS["idle"], alpha=0.45)
    bars: list[Bar] = []
    for row, actions in enumerate(ranks):
        for action in actions:
            left, width = 1e3 * (action.start_s - start_s), 1e3 * (action.end_s - action.start_s)
            is_pale = several and action.stage < middle
            style = replace(KINDS[action.kind][1], alpha=0.55 if is_pale else 1.0)
            bars.append(Bar(row=row, start=left, width=width, style=style, text=str(action.microbatch)))
            if action.microbatch in marked:
                axes.plot(left + width / 2, row + 0.47, marker="^", color="black", ms=3.5, clip_on=False)
    draw_bars(axes, bars, longest_ms)


def plot_adaptation(
    times: LayerTimes, splits: Mapping[str, StageSplit], step_s: Mapping[tuple[int, ...], float], num_microbatches: int
) -> Figure:
    """Draw what the layers cost, where some splits cut them, and how long a step takes under every split.

    Args:
        times: measured, of each layer.
        splits: the ones to point out, by name, all into two stages.
        step_s: seconds of a step by layers per stage, for every split that was measured.
        num_microbatches: of a step.

    Returns:
        A figure of two panels: a row a split, with a bar for each layer, as wide as it takes, in its stage's colour;
        and over the layers of stage 0 the measured step time, the splits of the left panel named, above what the
        layers' times alone come to (micro-batches x slowest stage + the other stage).
    """
    figure, (layers, steps) = new_figure(3.6, 1, 2, width_ratios=(5, 4))
    for row, split in enumerate(splits.values()):
        left = 0.0
        for stage in range(split.num_stages):
            for layer in split.layers(stage):
                width = 1e3 * times.total_s[layer]
                layers.barh(row, width, left=left, height=0.6, color=STAGE_COLOURS[stage], edgecolor="white")
                left += width
        slowest_ms = 1e3 * max(times.of_stages(split))
        layers.text(0, row - 0.34, f"slowest stage: {slowest_ms:.1f} ms", va="bottom", fontsize=9)
    layers.set_yticks(range(len(splits)), list(splits))
    layers.set(ylim=(len(splits) - 0.5, -0.9), xlabel="forward and backward of a micro-batch (ms)")
    layers.set_title("layers, colored by their stage", fontsize=10)
    handles = [Patch(facecolor=STAGE_COLOURS[stage], label=f"stage {stage}") for stage in range(2)]
    layers.legend(handles=handles, loc="upper right", ncols=2, frameon=False, fontsize=9, borderaxespad=0)
    _draw_steps(steps, times, splits, step_s, num_microbatches)
    layers.tick_params(axis="y", length=0)
    layers.spines[["top", "right", "left"]].set_visible(False)
    steps.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A pipeline that measured itself")
    return figure


def _draw_steps(
    axes: Axes,
    times: LayerTimes,
    splits: Mapping[str, StageSplit],
    step_s: Mapping[tuple[int, ...], float],
    num_microbatches: int,
) -> None:
    """Draw the step time of every split, measured and from the layers' times, over the layers of stage 0."""
    ordered = sorted(step_s)
    first = [layers[0] for layers in ordered]
    measured_ms = [1e3 * step_s[layers] for layers in ordered]
    computed_ms = []
    for layers in ordered:
        split = replace(next(iter(splits.values())), layers_per_stage=layers)
        fast, slow = sorted(times.of_stages(split))
        computed_ms.append(1e3 * (num_microbatches * slow + fast))
    axes.plot(first, measured_ms, "o-", color=COLOURS["loss"], label="measured")
    axes.plot(first, computed_ms, "--", color=COLOURS["loss"], alpha=0.6, label="from the layers' times")
    for name, split in splits.items():
        if split.layers_per_stage in step_s:
            at = split.layers_per_stage[0], 1e3 * step_s[split.layers_per_stage]
            axes.plot(*at, "o", ms=11, mfc="none", mec=COLOURS["loss"])
            axes.annotate(name, at, xytext=(0, 10), textcoords="offset points", ha="center", fontsize=9)
    axes.set(xlabel="layers on stage 0", ylabel="a step (ms)", ylim=(0, 1.5 * max(measured_ms + computed_ms)))
    axes.set_xticks(first)
    axes.set_title("every split", fontsize=10)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
