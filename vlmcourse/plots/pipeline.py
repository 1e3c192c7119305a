"""Figures of pipelines: what every rank did when, from the actions that really ran, and what moving layers changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vlmcourse.parallel.layer_times import LayerTimes
from vlmcourse.parallel.timeline import Action, bubble_fraction, makespan_s
from vlmcourse.planner.stages import StageSplit
from vlmcourse.plots.style import COLOURS, new_figure

KINDS = {
    "F": ("forward", COLOURS["activations"]),
    "B": ("backward", COLOURS["gradients"]),
    "I": ("backward, activations' part", COLOURS["communication"]),
    "W": ("backward, weights' part", COLOURS["weights"]),
}

STAGES = ("weights", "gradients", "activations", "communication")
"""Colours of stages, in their order."""


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


def plot_adaptation(
    times: LayerTimes, splits: Mapping[str, StageSplit], step_s: Mapping[tuple[int, ...], float]
) -> Figure:
    """Draw what the layers cost, where some splits cut them, and how long a step takes under every split.

    Args:
        times: measured, of each layer.
        splits: the ones to point out, by name, all into the same number of stages.
        step_s: seconds of a step by layers per stage, for every split that was measured.

    Returns:
        A figure of two panels: a row a split, with a bar for each layer, as wide as it takes, in its stage's colour;
        and the step time of all splits, sorted, the splits of the left panel named.
    """
    figure, (layers, steps) = new_figure(3.6, 1, 2, width_ratios=(5, 4))
    for row, split in enumerate(splits.values()):
        left = 0.0
        for stage in range(split.num_stages):
            colour = COLOURS[STAGES[stage % len(STAGES)]]
            for layer in split.layers(stage):
                width = 1e3 * times.total_s[layer]
                layers.barh(row, width, left=left, height=0.6, color=colour, edgecolor="white", alpha=0.85)
                left += width
        slowest_ms = 1e3 * max(times.of_stages(split))
        layers.text(0, row - 0.34, f"slowest stage: {slowest_ms:.1f} ms", va="bottom", fontsize=9)
    layers.set_yticks(range(len(splits)), list(splits))
    layers.set(ylim=(len(splits) - 0.5, -0.9), xlabel="forward and backward of a micro-batch (ms)")
    layers.set_title("layers, colored by their stage", fontsize=10)
    named = {split.layers_per_stage: name for name, split in splits.items()}
    ordered = sorted(step_s.items(), key=lambda item: item[1])
    for row, (split_layers, seconds) in enumerate(ordered):
        is_named = split_layers in named
        steps.barh(row, 1e3 * seconds, height=0.75, color=COLOURS["loss" if is_named else "idle"], alpha=0.7)
        text = f" {named[split_layers]}" if is_named else ""
        steps.text(1e3 * seconds, row, text, va="center", fontsize=9)
    steps.set_yticks(range(len(ordered)), ["+".join(map(str, split_layers)) for split_layers, _ in ordered])
    steps.set(ylim=(len(ordered) - 0.4, -0.6), xlabel="a step (ms)", ylabel="layers a stage")
    steps.set_title("every split, measured", fontsize=10)
    steps.margins(x=0.3)
    for axes in (layers, steps):
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    num_stages = max(split.num_stages for split in splits.values())
    handles = [
        Patch(facecolor=COLOURS[STAGES[stage % len(STAGES)]], alpha=0.85, label=f"stage {stage}")
        for stage in range(num_stages)
    ]
    layers.legend(handles=handles, loc="upper right", ncols=num_stages, frameon=False, fontsize=9, borderaxespad=0)
    figure.suptitle("A pipeline that measured itself")
    return figure
