"""Figures of accumulation: runs that drift apart, what is sent and held when, cuts of one batch, weights of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vlmcourse.plots.style import COLOURS, MB, new_figure

LINES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
"""Styles of lines and points that differ in grey too."""


def plot_drift(
    steps: Sequence[int],
    losses: Mapping[str, Sequence[float]],
    distances: Mapping[str, Sequence[float]],
    num_steps: int,
) -> Figure:
    """Draw runs that ought to be one, while they train or at the end.

    Args:
        steps: optimizer steps done at each measurement.
        losses: by run, the first is the reference; one number a measurement, in nats.
        distances: by run, how far its weights are from the reference's, relative.
        num_steps: of the whole run, so that the axis stays as it is while the lines grow.

    Raises:
        ValueError: if nothing was measured yet.
    """
    if not steps:
        raise ValueError("nothing was measured yet: call this after the first measurement")
    figure, (above, below) = new_figure(4.6, 2, 1, sharex=True, height_ratios=(3, 2))
    (reference_name, reference), *others = losses.items()
    above.plot(steps, reference, color=COLOURS["idle"], lw=6, label=reference_name)
    colours = (COLOURS["weights"], COLOURS["communication"])
    for (name, of_run), colour, (line, marker) in zip(others, colours, LINES[1:], strict=False):
        above.plot(steps, of_run, color=colour, ls=line, marker=marker, ms=4, lw=1.4, label=name)
        below.plot(steps, distances[name], color=colour, ls=line, marker=marker, ms=4, lw=1.4)
    gap = max(abs(of_run[-1] - reference[-1]) for _, of_run in others)
    above.set(title=f"After {steps[-1]} steps the losses are up to {gap:.3f} nats apart", yscale="log")
    above.set_ylabel("loss of other samples\n(nats a supervised token)")
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_formatter("{x:g}")
    above.legend(frameon=False, fontsize=9)
    below.set(xlabel="optimizer step", ylabel="distance of weights to\nthe big batch's (relative)", yscale="log")
    below.set_xlim(0, num_steps + 0.5)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.grid(axis="y", alpha=0.3)
    return figure


def plot_sync(sent: Mapping[str, Sequence[float]], held: Mapping[str, Sequence[float]]) -> Figure:
    """Draw what one rank sends with each micro-batch of a step, and the bytes of gradients that it then holds.

    Args:
        sent: bytes by strategy, one number a micro-batch.
        held: bytes by strategy, after each micro-batch.
    """
    figure, panels = new_figure(1.1 + 0.95 * len(sent), len(sent), 2, sharex=True, sharey="col", squeeze=False)
    for row, (name, of_strategy) in zip(panels, sent.items(), strict=True):
        places = range(1, len(of_strategy) + 1)
        row[0].bar(places, [size / MB for size in of_strategy], color=COLOURS["communication"], width=0.6)
        row[1].bar(places, [size / MB for size in held[name]], color=COLOURS["gradients"], width=0.6, hatch="//")
        row[0].set_ylabel(name.replace(", ", ",\n"), rotation=0, ha="right", va="center", fontsize=9)
        for axes in row:
            axes.set_xticks(places)
            axes.grid(axis="y", alpha=0.3)
    panels[0][0].set_title("gradients sent with each (MB)", fontsize=10)
    panels[0][1].set_title("gradients held after each (MB)", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("micro-batch of the step")
    figure.suptitle("Silence until the last micro-batch saves traffic; where weights are in shards, it costs memory")
    return figure


def plot_cuts(names: Sequence[str], activation_bytes: Sequence[float], seconds: Sequence[float]) -> Figure:
    """Draw memory and time of the same samples in micro-batches of several sizes.

    Args:
        names: of the cuts, such as "4 x 8".
        activation_bytes: the most that was kept for backward.
        seconds: of all forward and backward passes.
    """
    figure, (left, right) = new_figure(2.9, 1, 2)
    places = range(len(names))
    for axes, values, colour, label in (
        (left, [size / MB for size in activation_bytes], COLOURS["activations"], "activations kept at once (MB)"),
        (right, [1e3 * time_s for time_s in seconds], COLOURS["weights"], "forward and backward (ms)"),
    ):
        bars = axes.bar(places, values, color=colour, width=0.65)
        axes.bar_label(bars, fmt="{:.0f}", fontsize=9)
        axes.set_xticks(places, names, fontsize=9)
        axes.set(xlabel="samples x micro-batches", ylabel=label, ylim=(0, 1.15 * max(values)))
    memory, time_ratio = activation_bytes[0] / activation_bytes[-1], seconds[-1] / seconds[0]
    figure.suptitle(f"{names[-1]} keeps 1/{memory:.0f} of what {names[0]} keeps, in {time_ratio:.2f} x the time")
    return figure


def plot_sample_weights(num_tokens: Sequence[int]) -> Figure:
    """Draw what share of a step's weight its samples get under three weightings; the shares of a line add up to 1.

    Args:
        num_tokens: supervised tokens of every sample of the step, in any order; samples of one length share a point.
    """
    figure, axes = new_figure(3.1)
    ways = {"tokens: n": 1.0, "sqrt: square root of n": 0.5, "a mean of each sample: 1": 0.0}
    colours = (COLOURS["weights"], COLOURS["communication"], COLOURS["activations"])
    for (name, power), colour, (line, marker) in zip(ways.items(), colours, LINES, strict=False):
        total = sum(n**power for n in num_tokens)
        lengths = sorted(set(num_tokens))
        shares = [100 * n**power / total for n in lengths]
        axes.plot(lengths, shares, color=colour, ls=line, marker=marker, ms=5, lw=1.5, label=name)
    axes.set(xlabel="supervised tokens n of the sample", ylabel="share of the step's weight (%)", ylim=(0, None))
    axes.set_title(f"What one of {len(num_tokens)} samples of a step weighs")
    axes.legend(frameon=False)
    return figure


def plot_norm_errors(errors: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw how far the gradients of a cut batch are from one batch's, by normalization.

    Args:
        errors: relative, by normalization and by cut.
    """
    figure, axes = new_figure(3.2)
    cuts = list(next(iter(errors.values())))
    colours = (COLOURS["weights"], COLOURS["communication"], COLOURS["loss"])
    for i, (name, colour, (_, marker)) in enumerate(zip(cuts, colours, LINES, strict=False)):
        values = [max(of_norm[name], 1e-9) for of_norm in errors.values()]
        rows = [row + 0.2 * (i - 1) for row in range(len(errors))]
        axes.plot(values, rows, ls="", marker=marker, ms=8, color=colour, label=name)
    axes.set_yticks(range(len(errors)), list(errors))
    axes.axvline(1e-4, color=COLOURS["idle"], ls="--", lw=1)
    axes.text(1.2e-4, len(errors) - 0.45, "rounding is left of this line", fontsize=8, va="center")
    axes.set(xscale="log", xlabel="distance of the gradient to one batch's (relative)", ylim=(len(errors) - 0.3, -0.5))
    axes.set_title("What a cut batch's gradient is off by")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    low = min(value for of_norm in errors.values() for value in of_norm.values())
    axes.set_xlim(10 ** math.floor(math.log10(max(low, 1e-9)) - 0.3), 10)
    return figure
