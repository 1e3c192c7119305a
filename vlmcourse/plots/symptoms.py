"""A figure of a run's symptoms: GPU use, memory, and where the time of every step goes, over the steps.

Enters: a trace as plain lists and dicts, such as exercise 4.5 hands out. Leaves: a figure. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from vlmcourse.colours import PHASE_COLOURS
from vlmcourse.plots.steps import BETWEEN
from vlmcourse.plots.style import COLOURS, new_figure
from vlmcourse.spans import PHASE_LABELS

PARTS = {f"{phase}_s": (colour, PHASE_LABELS[phase]) for phase, colour in PHASE_COLOURS.items()} | {
    "between_s": (COLOURS["idle"], BETWEEN)
}
"""By key: colour and label."""


def plot_trace(trace: Mapping[str, Any], rank: int = 0) -> Figure:
    """Draw a trace: GPU use of all ranks, loaders' CPUs and memory of one, and its steps by part.

    Args:
        trace: `memory_limit_gb`, and `ranks`: of each rank a dict of lists by step, with `gpu_percent`,
            `loader_cpu_percent`, `memory_gb` (10^9 bytes) and seconds under the keys of `PARTS`.
        rank: whose steps and memory are drawn.

    Returns:
        A figure of three panels over the same steps.

    Raises:
        ValueError: if there is no such rank.
    """
    ranks = trace["ranks"]
    if not 0 <= rank < len(ranks):
        raise ValueError(f"rank = {rank}: the trace has ranks 0 to {len(ranks) - 1}; choose one of these")
    figure, (use, memory, time) = new_figure(5.2, 3, sharex=True, height_ratios=(2, 1, 3))
    one = ranks[rank]
    steps = range(len(one["gpu_percent"]))
    for number, each in enumerate(ranks):
        colour = COLOURS["loss"] if number == rank else COLOURS["idle"]
        use.plot(steps, each["gpu_percent"], color=colour, lw=1.4 if number == rank else 1, zorder=2 + (number == rank))
    use.plot(steps, one["loader_cpu_percent"], color=COLOURS["weights"], lw=1.2, ls="--")
    lines = f"GPU of rank {rank} in black, of {len(ranks) - 1} others in grey; dashed: CPUs that load for it"
    use.set(ylabel="use (%)", ylim=(0, 105), title=lines)
    memory.plot(steps, one["memory_gb"], color=COLOURS["weights"], lw=1.4)
    memory.axhline(trace["memory_limit_gb"], color=COLOURS["loss"], lw=1, ls=":")
    memory.set(ylabel="memory\n(GB)", ylim=(0, 1.1 * trace["memory_limit_gb"]))
    bottom = [0.0] * len(steps)
    for key, (colour, label) in PARTS.items():
        time.bar(steps, one[key], bottom=bottom, width=1.0, color=colour, label=label)
        bottom = [a + b for a, b in zip(bottom, one[key], strict=True)]
    time.set(xlabel="step", ylabel=f"seconds of rank {rank}")
    time.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    return figure
