"""Figures of step logs: steps one after the other, what each rank does in one, shares of the time, gains of fixes.

Enters: folders of runs, as `monitor.diagnosis.read_run` reads them, and what a diagnosis says. Leaves: a figure of one
message each. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vlmcourse.colours import PHASE_COLOURS
from vlmcourse.monitor.diagnosis import CAUSES, Diagnosis, RunFacts, read_run
from vlmcourse.plots.style import COLOURS, HATCHES, new_figure
from vlmcourse.spans import PHASE_LABELS

BETWEEN = "between steps"
LOOKS: dict[str, tuple[str, str]] = {
    **{phase: (colour, HATCHES.get(phase, "")) for phase, colour in PHASE_COLOURS.items()},
    "checkpoint": (COLOURS["weights"], "//"),
    "evaluation": (COLOURS["exact_match"], "xx"),
    "log": (COLOURS["visual_tokens"], ""),
    BETWEEN: (COLOURS["idle"], ""),
}
"""Colour and hatch of each part of the time from one step to the next, in their order."""
NAMES = {**PHASE_LABELS, "log": "log row"}
MIN_SHARE = 0.01
"""Parts that are smaller everywhere are drawn but not explained."""


class Gain(Protocol):
    """One fix, such as `labs.bad_runs.FixGain`: what it was said to save, and what it saved, as parts of the time."""

    @property
    def fault(self) -> str:
        """What it mends."""
        ...

    @property
    def predicted(self) -> float:
        """0 to 1."""
        ...

    @property
    def uncertainty(self) -> float:
        """How far off that may be."""
        ...

    @property
    def measured(self) -> Sequence[float]:
        """In each turn; below 0 if it cost time."""
        ...


def find_parts(facts: RunFacts, step: int, rank: int) -> dict[str, float]:
    """Return the parts of the time from one step to the next, in seconds, by the names of `LOOKS`.

    Args:
        facts: of a run.
        step: one of `facts.steps`.
        rank: one of `facts.ranks`.
    """
    record = facts.steps[step][rank]
    parts = {phase: getattr(record, f"{phase}_s") or 0.0 for phase in PHASE_COLOURS}
    for event in facts.events[rank]:
        if event.step == step:
            parts[event.event] = parts.get(event.event, 0.0) + event.seconds
    return parts | {BETWEEN: max(0.0, facts.cycles_s[step][rank] - sum(parts.values()))}


def plot_steps(runs: Mapping[str, str | Path], *, ranks: Sequence[int] | None = None, title: str) -> Figure:
    """Draw each step's parts up to the next step, a panel for each run and rank, with median and mean as lines.

    Args:
        runs: name -> folder.
        ranks: which of them; all if left out.
        title: the figure's message.

    Returns:
        A figure in milliseconds over the number of the step, all panels to one scale; warm-up is left out.
    """
    read = {name: read_run(folder) for name, folder in runs.items()}
    rows = [(name, facts, rank) for name, facts in read.items() for rank in (ranks or facts.ranks)]
    figure, panels = new_figure(1.0 + 1.35 * len(rows), len(rows), 1, squeeze=False, sharey=True)
    for axes, (name, facts, rank) in zip(panels[:, 0], rows, strict=True):
        by_step = {step: find_parts(facts, step, rank) for step in facts.steps}
        for step, parts in by_step.items():
            _stack(axes, step, parts, 1e3)
        totals_ms = [1e3 * sum(parts.values()) for parts in by_step.values()]
        axes.axhline(mean(totals_ms), color=COLOURS["loss"], lw=1.2, ls="--", label="mean")
        axes.axhline(median(totals_ms), color=COLOURS["loss"], lw=1.2, ls=":", label="median")
        label = f"{name}, rank {rank}" if len(runs) > 1 else f"rank {rank}"
        axes.set_title(label, fontsize=10, loc="left")
        axes.set(ylabel="ms", xticks=list(by_step))
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("step")
    figure.suptitle(title)
    handles = _legend([find_parts(facts, step, rank) for _, facts, rank in rows for step in facts.steps])
    lines = panels[0, 0].get_legend_handles_labels()[0]
    figure.legend(handles=[*handles, *lines], loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def plot_rank_times(runs: Mapping[str, str | Path], *, title: str) -> Figure:
    """Draw the mean step of every rank of several runs, its own work on the left and its waits for others on the right.

    Args:
        runs: name -> folder.
        title: the figure's message.

    Returns:
        A figure of stacked bars in milliseconds, two or more a run.
    """
    read = {name: read_run(folder) for name, folder in runs.items()}
    rows = [(name, facts, rank) for name, facts in read.items() for rank in facts.ranks]
    figure, axes = new_figure(1.3 + 0.34 * len(rows))
    means = []
    for row, (_, facts, rank) in enumerate(rows):
        parts = [find_parts(facts, step, rank) for step in facts.steps]
        mean_s = {part: mean(each.get(part, 0.0) for each in parts) for part in LOOKS}
        waits_s = mean_s.pop("communication")
        means.append(mean_s | {"communication": waits_s})
        _stack(axes, row, means[-1], 1e3, horizontal=True)
    _name_rows(axes, [f"{name}  rank {rank}" if rank == 0 else f"rank {rank}" for name, _, rank in rows])
    for row, (_, _, rank) in enumerate(rows):
        if row and rank == 0:
            axes.axhline(row - 0.5, color=COLOURS["idle"], lw=0.8)
    axes.set(xlabel="mean time from step to step (ms)", title=title)
    figure.legend(handles=_legend(means), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def plot_diagnoses(found: Mapping[str, Diagnosis], *, title: str) -> Figure:
    """Draw where the time of several runs went, one bar a run, with the first finding beside it.

    Args:
        found: name of the run -> its diagnosis.
        title: the figure's message.

    Returns:
        A figure of stacked bars in percent, the mean of the ranks.
    """
    figure, axes = new_figure(1.6 + 0.27 * len(found))
    for row, one in enumerate(found.values()):
        _stack(axes, row, one.shares, 100, horizontal=True)
        axes.text(101, row, one.cause if one.cause in CAUSES else "healthy", va="center", fontsize=9)
    _name_rows(axes, list(found))
    axes.set(xlim=(0, 100), xlabel="time, mean of the ranks (%)")
    figure.suptitle(title)
    handles = _legend([one.shares for one in found.values()])
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def plot_gains(gains: Sequence[Gain], *, title: str) -> Figure:
    """Draw which part of the time each fix was said to save, and what it saved in each turn.

    Args:
        gains: one a fix.
        title: the figure's message.
    """
    figure, axes = new_figure(1.5 + 0.45 * len(gains))
    for row, gain in enumerate(gains):
        axes.barh(row, 100 * gain.predicted, height=0.6, color=COLOURS["idle"], label="predicted" if not row else None)
        ends = [max(-1.0, gain.predicted - gain.uncertainty), min(1.0, gain.predicted + gain.uncertainty)]
        style = {"color": COLOURS["loss"], "lw": 1.2, "marker": "|", "ms": 12}
        axes.plot([100 * end for end in ends], [row, row], **style, label=None if row else "how far off that may be")
        values = [100 * value for value in gain.measured]
        label = "measured, a point a turn" if not row else None
        axes.plot(values, [row] * len(values), "D", color=COLOURS["loss"], mfc="white", ms=7, label=label)
    _name_rows(axes, [gain.fault for gain in gains])
    axes.axvline(0, color=COLOURS["loss"], lw=0.8)
    axes.set(xlabel="time that a token takes, saved by the fix (%)")
    figure.suptitle(title)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _stack(axes: Axes, place: float, parts: Mapping[str, float], scale: float, *, horizontal: bool = False) -> None:
    """Draw one stacked bar; parts in the order in which they are given, communication last where it lies so."""
    start = 0.0
    for name, value in parts.items():
        colour, hatch = LOOKS[name]
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
        if horizontal:
            axes.barh(place, scale * value, left=start, height=0.72, **look)
        else:
            axes.bar(place, scale * value, bottom=start, width=0.8, **look)
        start += scale * value


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(stacks: Iterable[Mapping[str, float]]) -> list[Patch]:
    """Explain the parts that are worth it in one of the stacks or more."""
    shown = {
        name for stack in stacks for name, value in stack.items() if value > MIN_SHARE * max(1e-9, sum(stack.values()))
    }
    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=NAMES.get(name, name))
        for name, (colour, hatch) in LOOKS.items()
        if name in shown
    ]
