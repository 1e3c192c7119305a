"""Figures of training state: bytes by owner, by rank and by number of ranks. GB is 10^9 bytes, MB 10^6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, NullLocator

from vlmcourse.monitor.ledger import Ledger
from vlmcourse.monitor.state_table import StateTable
from vlmcourse.planner import StateBytes
from vlmcourse.plots.style import COLOURS, GB, MB, OWNERS, add_owner_legend, new_figure, stack_bars

LABEL_ROOM = 1.3
"""Of a label's width: what its part of a bar must offer, so that neighbours do not touch."""


def plot_state(states: Mapping[str, StateBytes], device_bytes: Mapping[str, int], title: str) -> Figure:
    """Draw training state by owner, one bar a case, against the memory of devices.

    Args:
        states: bytes by the name of the case, drawn from top to bottom.
        device_bytes: memory by the name of the device; drawn as lines.
        title: the message.

    Returns:
        A figure of horizontal bars in GB.
    """
    figure, axes = new_figure(1.5 + 0.5 * len(states))
    labels: list[tuple[Text, float]] = []
    for name, size in device_bytes.items():
        axes.axvline(size / GB, color="black", ls="--", lw=1, zorder=0)
        axes.text(size / GB, -0.62, name, ha="center", va="bottom", fontsize=9)
    for row, state in enumerate(states.values()):
        sizes = {owner: getattr(state, owner) / GB for owner in OWNERS}
        end = stack_bars(axes, row, sizes, horizontal=True, height=0.6)
        start = 0.0
        for owner, size in sizes.items():
            ink = "white" if owner == "weights" else "black"
            label = axes.text(start + size / 2, row, f"{size:.0f}", ha="center", va="center", color=ink, weight="bold")
            labels.append((label, size))
            start += size
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(1.01 * end, row, f"{end:.0f} GB", va="center", weight="bold", bbox=box)
    longest = max(state.total for state in states.values()) / GB
    axes.set(
        yticks=range(len(states)),
        yticklabels=list(states),
        ylim=(len(states) - 0.5, -0.65),
        xlim=(0, 1.12 * max(longest, *(size / GB for size in device_bytes.values()))),
        xlabel="training state (GB)",
    )
    axes.set_title(title, pad=16)
    axes.spines[["top", "right"]].set_visible(False)
    add_owner_legend(axes, OWNERS, loc="upper right")
    _drop_labels_that_do_not_fit(figure, labels)
    return figure


def _drop_labels_that_do_not_fit(figure: Figure, labels: Sequence[tuple[Text, float]]) -> None:
    """Remove each label that is wider than its part of a horizontal bar, with a little room at both sides.

    Args:
        figure: complete, so that its layout is known.
        labels: each with the length of its part, in the unit of the axis.
    """
    figure.draw_without_rendering()
    for label, length in labels:
        axes = label.axes
        assert axes is not None
        ends = axes.transData.transform([(0, 0), (length, 0)])
        if LABEL_ROOM * label.get_window_extent().width > ends[1][0] - ends[0][0]:
            label.remove()


def plot_ledgers(measured: Mapping[str, Sequence[Ledger]], estimated: Mapping[str, StateBytes]) -> Figure:
    """Draw the state that every rank stores under each strategy, estimated next to measured.

    Args:
        measured: one ledger a rank, by strategy.
        estimated: bytes of the fullest rank, by strategy.

    Returns:
        A figure with a pair of bars for each rank, in MB: hatched for the estimate, plain for the measurement.
    """
    groups = [
        [(f"{strategy}\nrank {rank}", estimated[strategy], ledger) for rank, ledger in enumerate(ledgers)]
        for strategy, ledgers in measured.items()
    ]
    title = "What each rank stores: estimated (hatched) and measured (plain)"
    return _plot_pairs(groups, "training state on this rank (MB)", title)


def plot_states(table: StateTable, num_ranks: int) -> Figure:
    """Draw the state of the fullest rank under each stage of ZeRO, the formula next to what was measured.

    Args:
        table: of a run on `num_ranks` ranks, with others or without.
        num_ranks: of the run to draw.

    Returns:
        A figure with a pair of bars a strategy, in MB: hatched for the formula, plain for the measurement. Buffers,
        which are no training state, are left out.

    Raises:
        ValueError: if the table has no run on so many ranks.
    """
    rows = [row for row in table.fullest() if row.num_ranks == num_ranks]
    if not rows:
        known = sorted({row.num_ranks for row in table.rows})
        raise ValueError(f"num_ranks = {num_ranks}: the table has runs on {known} ranks; choose one of them")
    group = [(row.strategy.replace("deepspeed-", "deepspeed\n"), row.formula, row.measured) for row in rows]
    label = f"state of the fullest of {num_ranks} ranks (MB)"
    figure = _plot_pairs([group], label, "The formula (hatched) and what is there before the update (plain)")
    figure.axes[0].set_xlabel("strategy")
    return figure


def _plot_pairs(groups: Sequence[Sequence[tuple[str, StateBytes, Ledger]]], ylabel: str, title: str) -> Figure:
    """Draw a pair of bars, estimated and measured, for each label; there is a gap between two groups."""
    figure, axes = new_figure(3.6)
    places: list[float] = []
    labels: list[str] = []
    place, highest = 0.0, 0.0
    for group in groups:
        for label, estimate, ledger in group:
            plan = {owner: getattr(estimate, owner) / MB for owner in OWNERS}
            real = {owner: getattr(ledger, f"{owner}_bytes") / MB for owner in OWNERS}
            stack_bars(axes, place - 0.21, plan, horizontal=False, width=0.38, hatch="///", alpha=0.55)
            top = stack_bars(axes, place + 0.21, real, horizontal=False, width=0.38)
            for shift, height in ((-0.21, sum(plan.values())), (0.21, top)):
                axes.text(place + shift, height, f"{height:.2f}", ha="center", va="bottom", fontsize=9)
            places.append(place)
            labels.append(label)
            place, highest = place + 1, max(highest, top, sum(plan.values()))
        place += 0.4
    axes.set(xticks=places, xticklabels=labels, ylabel=ylabel, title=title, ylim=(0, 1.15 * highest))
    axes.spines[["top", "right"]].set_visible(False)
    add_owner_legend(axes, OWNERS, loc="upper right")
    return figure


def plot_memory_over_ranks(
    models: Mapping[str, Mapping[str, Sequence[float]]], num_ranks: Sequence[int], device_bytes: Mapping[str, int]
) -> Figure:
    """Draw the state of one rank over the number of ranks, one panel a model and one line a strategy.

    Args:
        models: by the name of the model and of the strategy, bytes of one rank for each of `num_ranks`.
        num_ranks: the horizontal axis (logarithmic, base 2).
        device_bytes: memory by the name of the device; drawn as lines.

    Returns:
        A figure in GB, logarithmic.
    """
    figure, panels = new_figure(4.1, 1, len(models), sharey=True, squeeze=False)
    styles = (("o", "-"), ("s", "--"), ("^", "-."), ("D", "-"))
    colours = (COLOURS["idle"], COLOURS["optimizer"], COLOURS["gradients"], COLOURS["weights"])
    for axes, (model, strategies) in zip(panels[0], models.items(), strict=True):
        for (strategy, sizes), colour, (marker, line) in zip(strategies.items(), colours, styles, strict=False):
            axes.plot(num_ranks, [size / GB for size in sizes], marker=marker, ls=line, color=colour, label=strategy)
        for name, size in device_bytes.items():
            axes.axhline(size / GB, color="black", ls=":", lw=1.2)
            axes.text(num_ranks[-1], size / GB, f"{name}", ha="right", va="bottom", fontsize=8)
        axes.set(title=model, xlabel="data-parallel ranks")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=10)
        axes.set_xticks(list(num_ranks), [str(number) for number in num_ranks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(alpha=0.25)
    figure.suptitle("What a strategy does not split, more ranks do not make smaller")
    panels[0][0].set_ylabel("training state of one rank (GB)")
    panels[0][0].legend(frameon=False, loc="lower left")
    return figure
