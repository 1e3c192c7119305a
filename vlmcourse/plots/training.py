"""Figures of training runs: loss and exact match over steps, and two runs that ought to be the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from vlmcourse.plots.style import COLOURS, new_figure


def plot_training(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw loss and exact match over the optimizer steps of one run.

    Args:
        history: rows as in `TrainResult.history` or `log.jsonl`: `step`, `loss/total`, and `eval/exact_match` (0 to 1)
            where the model was evaluated.

    Returns:
        A figure: loss on the left axis (logarithmic), exact match in percent on the right one.

    Raises:
        ValueError: if there is no row.
    """
    if not history:
        raise ValueError("the history has no row: train for at least one step")
    figure, loss_axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
    loss_axis.plot(
        [row["step"] for row in history], [row["loss/total"] for row in history], color=COLOURS["loss"], lw=1.2
    )
    loss_axis.set(xlabel="optimizer step", ylabel="loss per supervised token (nats)", yscale="log")
    for formatter_of in (loss_axis.yaxis.set_major_formatter, loss_axis.yaxis.set_minor_formatter):
        formatter_of(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))  # `4`, not a power of ten
    evaluated = [(row["step"], 100 * row["eval/exact_match"]) for row in history if "eval/exact_match" in row]
    title = f"Loss {history[0]['loss/total']:.2f} to {history[-1]['loss/total']:.2f}"
    if evaluated:
        steps, percent = zip(*evaluated, strict=True)
        match_axis = loss_axis.twinx()
        match_axis.plot(steps, percent, "o--", color=COLOURS["exact_match"])
        match_axis.set(ylabel="held-out exact match (%)", ylim=(-2, 102))
        match_axis.yaxis.label.set_color(COLOURS["exact_match"])
        title += f", exact match {percent[-1]:.1f} % of held-out questions"
    loss_axis.set_title(title, fontsize=10)
    plt.close(figure)
    return figure


def plot_losses(curves: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the losses of runs that should be the same, and how far each is from the first.

    Args:
        curves: loss of every optimizer step by the name of the run; the first is the reference. Equally many steps.

    Returns:
        A figure: the curves above, the absolute differences to the first below (logarithmic; steps without
        any difference have no point).

    Raises:
        ValueError: if there are fewer than two curves, no steps, or different numbers of steps.
    """
    lengths = {name: len(losses) for name, losses in curves.items()}
    if len(curves) < 2 or 0 in lengths.values() or len(set(lengths.values())) > 1:
        raise ValueError(f"runs of {lengths} steps cannot be compared: give two or more of the same length")
    (reference_name, reference), *others = curves.items()
    steps = range(1, len(reference) + 1)
    figure, (above, below) = new_figure(4.2, 2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(steps, reference, color=COLOURS["idle"], lw=6, label=reference_name)
    colours = (COLOURS["loss"], COLOURS["communication"], COLOURS["weights"])
    for (name, losses), colour, style in zip(others, colours, ("-", "--", ":"), strict=False):
        differences = [abs(a - b) or math.nan for a, b in zip(losses, reference, strict=True)]
        above.plot(steps, losses, color=colour, ls=style, lw=1.4, label=name)
        below.plot(steps, differences, "o", color=colour, ms=4)
    above.set(title=f"{' and '.join(curves)}: one curve", ylabel="loss per supervised\ntoken (nats)")
    above.legend(frameon=False)
    below.set(xlabel="optimizer step", ylabel=f"difference to\n{reference_name} (nats)", yscale="log")
    below.set_ylim(*_decades([d for line in below.lines for d in line.get_ydata() if not math.isnan(d)]))
    below.grid(axis="y", alpha=0.3)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the powers of ten around positive values, with room between; any decade where there are none."""
    low, high = (min(values), max(values)) if values else (1e-7, 1e-7)
    return 10.0 ** math.floor(math.log10(low) - 0.3), 10.0 ** math.ceil(math.log10(high) + 0.3)
