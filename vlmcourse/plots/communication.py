"""Figures of what ranks exchange: collectives on a tensor that fits a page, and weights that FSDP gathers and frees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vlmcourse.plots.style import COLOURS, MB, new_figure

Numbers = Sequence[float | None]
"""What one rank holds of a tensor; None where it holds nothing."""


def plot_collectives(stages: Mapping[str, Sequence[Numbers]], complete: Sequence[float]) -> Figure:
    """Draw what every rank holds of one small tensor, stage by stage.

    Args:
        stages: by the name of the stage, for each rank its numbers.
        complete: the sum over all ranks; numbers equal to it are drawn as reduced.

    Returns:
        A figure with a column a stage and a row a rank: gradients' colour for a rank's own numbers, communication's for
        finished sums, grey for what is not there.
    """
    figure, panels = new_figure(2.3, 1, len(stages), squeeze=False)
    for axes, (stage, ranks) in zip(panels[0], stages.items(), strict=True):
        for rank, numbers in enumerate(ranks):
            for column, number in enumerate(numbers):
                is_sum = number is not None and number == complete[column]
                owner, alpha = ("communication", 0.75) if is_sum else ("gradients", 0.45)
                colour, alpha = (COLOURS[owner], alpha) if number is not None else (COLOURS["idle"], 0.25)
                corner = (column + 0.03, rank + 0.03)
                axes.add_patch(Rectangle(corner, 0.94, 0.94, facecolor=colour, alpha=alpha))
                text = "" if number is None else f"{number:g}"
                axes.text(column + 0.5, rank + 0.5, text, ha="center", va="center", fontsize=12)
        axes.set(xlim=(0, len(complete)), ylim=(len(ranks), 0), title=stage, aspect="equal", xlabel="element")
        axes.set_xticks([column + 0.5 for column in range(len(complete))], [str(i) for i in range(len(complete))])
        axes.set_yticks([rank + 0.5 for rank in range(len(ranks))], [f"rank {rank}" for rank in range(len(ranks))])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.suptitle("Reduce-scatter, then all-gather: together an all-reduce")
    return figure


def plot_gathered_weights(
    events: Sequence[tuple[str, int]], whole_bytes: int, shard_bytes: int, boundaries: Mapping[str, int]
) -> Figure:
    """Draw how many bytes of whole weights one rank holds as a training step goes on.

    Args:
        events: in order of time, a name and the bytes of gathered weights at that moment.
        whole_bytes: weights of the whole model, which DDP holds all the time.
        shard_bytes: weights of this rank's shard, which FSDP holds all the time.
        boundaries: phases of the step by name, each with the index of its first event.

    Returns:
        A figure in MB over events.
    """
    figure, axes = new_figure(3.9)
    held = [(shard_bytes + gathered) / MB for _, gathered in events]
    held.append(held[-1])  # the last moment lasts as long as the others
    places = range(len(held))
    blue = COLOURS["weights"]
    axes.fill_between(places, held, step="post", color=blue, alpha=0.35)
    axes.step(places, held, where="post", color=blue, lw=1.5, label="FSDP: shard and gathered weights")
    axes.axhline(shard_bytes / MB, color=blue, ls=":", lw=1.5, label="FSDP: shard")
    axes.axhline(whole_bytes / MB, color="black", ls="--", lw=1.5, label="DDP: all weights")
    for name, first in boundaries.items():
        axes.axvline(first, color=COLOURS["idle"], lw=1)
        axes.text(first, 1.22 * whole_bytes / MB, f" {name}".replace(", ", ",\n "), va="top", fontsize=9)
    axes.set(
        xlim=(0, len(held) - 1),
        ylim=(0, 1.25 * whole_bytes / MB),
        xticks=[],
        xlabel="time: one moment before and one after each unit",
        ylabel="weights on this rank (MB)",
        title="FSDP gathers one unit at a time",
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
