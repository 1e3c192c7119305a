"""Figures that set strategies side by side: what one optimizer step of the same model costs under each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vlmcourse.monitor.step_cost import StepCost
from vlmcourse.plots.style import COLOURS, HATCHES, MB, OWNERS, new_figure, stack_bars


def fullest(ranks: Sequence[StepCost]) -> StepCost:
    """Return the costs of the rank that stores most, activations included."""
    return max(ranks, key=lambda cost: cost.state.total_bytes + cost.activations_bytes)


def plot_strategies(costs: Mapping[str, Sequence[StepCost]], references: Sequence[str]) -> Figure:
    """Draw memory, bytes sent and time of a step, one row a strategy.

    Args:
        costs: of each rank, by strategy.
        references: the strategies whose time counts as 1, one for each number of ranks.

    Returns:
        A figure of three panels: memory of the fullest rank by owner in MB, the most that a rank sends in MB, and the
        seconds of a step over those of the reference on as many ranks.
    """
    figure, (memory, sent, time) = new_figure(1.3 + 0.37 * len(costs), 1, 3, sharey=True, width_ratios=(5, 3, 3))
    base_s = {len(costs[name]): max(cost.step_s for cost in costs[name]) for name in references}
    for row, ranks in enumerate(costs.values()):
        full = fullest(ranks)
        sizes = {owner: getattr(full.state, f"{owner}_bytes") / MB for owner in OWNERS}
        end = stack_bars(memory, row, sizes | {"activations": full.activations_bytes / MB}, horizontal=True, height=0.7)
        memory.text(end, row, f" {end:.1f}", va="center", fontsize=9)
        sent_mb = max(cost.sent_bytes for cost in ranks) / MB
        sent.barh(row, sent_mb, height=0.7, color=COLOURS["communication"])
        sent.text(sent_mb, row, f" {sent_mb:.2f}", va="center", fontsize=9)
        ratio = max(cost.step_s for cost in ranks) / base_s[len(ranks)]
        time.barh(row, ratio, height=0.7, color=COLOURS["loss"], alpha=0.65)
        time.text(ratio, row, f" {ratio:.1f}", va="center", fontsize=9)
    memory.set_yticks(range(len(costs)), list(costs))
    memory.set(ylim=(len(costs) - 0.4, -0.6), xlabel="fullest rank (MB)", title="memory")
    sent.set(xlabel="sent by a rank (MB)", title="a step's traffic")
    time.set(xlabel=f"a step (times {references[0]})", title="time")
    for axes in (memory, sent, time):
        axes.margins(x=0.22)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
    owners = (*OWNERS, "activations")
    handles = [Patch(facecolor=COLOURS[o], hatch=HATCHES.get(o), edgecolor="white", label=o) for o in owners]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle("The same model, the same samples: what a step costs")
    return figure
