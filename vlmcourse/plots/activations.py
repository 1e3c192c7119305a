"""Figures of activations: bytes alive over a step, what a layer keeps, and what recomputation saves and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vlmcourse.monitor.ledger import Sample
from vlmcourse.plots.style import COLOURS, GB, KB, MB, new_figure

LEDGER_STYLES: dict[str, tuple[str, str]] = {
    "weights": (COLOURS["weights"], ""),
    "gathered": (COLOURS["weights"], "xx"),
    "optimizer": (COLOURS["optimizer"], ".."),
    "gradients": (COLOURS["gradients"], ""),
    "activations": (COLOURS["activations"], ""),
    "recomputed": ("#8FD9BF", "///"),
    "temporary": (COLOURS["idle"], ""),
    "other": ("#666666", ""),
}
"""Colour and hatch of each owner of a `StepLedger`, from the bottom of the stack to its top."""
PHASES = ("forward", "backward", "update")
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
"""The box of a text that lines may cross."""
MAX_POINTS = 1500
VISIBLE_FRACTION = 0.004
"""Of the highest moment: an owner that never has as much would be thinner than a line."""


def plot_step_ledgers(steps: Mapping[str, Sequence[Sample]], title: str) -> Figure:
    """Draw the bytes alive over the course of steps, stacked by owner, one panel a step.

    Args:
        steps: samples of a `StepLedger` by the name of the panel. The horizontal axis counts operations, not seconds: a
            ledger slows each operation down.
        title: the message.

    Returns:
        A figure in MB of the owners that are large enough to be seen, panels side by side with one vertical axis.

    Raises:
        ValueError: if there is no step or one without samples.
    """
    if not steps or not all(steps.values()):
        raise ValueError("there is no sample to draw: run a step inside `with StepLedger(model, optimizer)`")
    figure, panels = new_figure(3.8, 1, len(steps), sharey=True, squeeze=False)
    highest = max(sample.total_bytes for samples in steps.values() for sample in samples) / MB
    sizes = [sample.by_owner() for samples in steps.values() for sample in samples]
    owners = [o for o in LEDGER_STYLES if max(size.get(o, 0) for size in sizes) > VISIBLE_FRACTION * highest * MB]
    for axes, (name, samples) in zip(panels[0], steps.items(), strict=True):
        _draw_ledger(axes, samples, owners)
        peak = max(samples, key=lambda sample: sample.total_bytes)
        axes.plot([samples.index(peak)], [peak.total_bytes / MB], "v", color="black", ms=6)
        axes.set_title(f"{name}: at most {peak.total_bytes / MB:.1f} MB", fontsize=10)
        axes.set(xlabel="operations since the start", ylim=(0, 1.15 * highest))
    panels[0][0].set_ylabel("bytes alive (MB)")
    handles = [
        Patch(facecolor=LEDGER_STYLES[owner][0], hatch=LEDGER_STYLES[owner][1], edgecolor="white") for owner in owners
    ]
    figure.legend(handles, owners, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title)
    return figure


def _draw_ledger(axes: Axes, samples: Sequence[Sample], owners: Sequence[str]) -> None:
    """Stack one step's bytes, and mark where its phases begin."""
    every = max(1, len(samples) // MAX_POINTS)
    places = list(range(0, len(samples), every))
    of_place = [samples[i].by_owner() for i in places]
    bottom = [0.0] * len(places)
    for owner in owners:
        colour, hatch = LEDGER_STYLES[owner]
        top = [low + sizes.get(owner, 0) / MB for low, sizes in zip(bottom, of_place, strict=True)]
        # `color` would set the hatch's color too.
        axes.fill_between(
            places, bottom, top, facecolor=colour, hatch=hatch, edgecolor="white", lw=0.0, step="post", zorder=2
        )
        bottom = top
    axes.set_xlim(0, len(samples) - 1)
    phases = [sample.phase for sample in samples]
    starts = [phases.index(phase) for phase in PHASES if phase in phases]
    for start, end in zip(starts, [*starts[1:], len(samples)], strict=True):
        axes.axvline(start, color="black", lw=0.8, ls=":")
        place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
        rotation = 0 if end - start > 0.2 * len(samples) else 90
        axes.text((start + end) / 2, 0.985, phases[start], fontsize=8, rotation=rotation, **place)
    axes.spines[["top", "right"]].set_visible(False)


def plot_kept_tensors(layers: Mapping[str, Mapping[str, int]], measured_bytes: Mapping[str, int]) -> Figure:
    """Draw what layers keep, tensor by tensor, next to the bytes measured.

    Args:
        layers: bytes by the name of the tensor, by the name of the layer; from `planner.layer_activations`.
        measured_bytes: of each layer.

    Returns:
        A figure of horizontal bars in kB (10^3 bytes), one panel a layer, one above the other: equal bytes have
        equal lengths.
    """
    rows = [len(terms) for terms in layers.values()]
    longest = max(size for terms in layers.values() for size in terms.values()) / KB
    options = {"sharex": True, "squeeze": False, "gridspec_kw": {"height_ratios": rows}}
    figure, panels = new_figure(0.6 + 0.6 * len(rows) + 0.19 * sum(rows), len(layers), 1, **options)
    for axes, (name, terms) in zip(panels[:, 0], layers.items(), strict=True):
        sizes = [size / KB for size in terms.values()]
        bars = axes.barh(range(len(terms)), sizes, color=COLOURS["activations"], edgecolor="white")
        axes.bar_label(bars, labels=[f"{size:.1f}" for size in sizes], fontsize=8, padding=2)
        axes.set_yticks(range(len(terms)), list(terms), fontsize=8)
        axes.set(ylim=(len(terms) - 0.5, -0.5), xlim=(0, 1.12 * longest))
        total = sum(terms.values())
        axes.set_title(f"{name}: formula {total:,}, measured {measured_bytes[name]:,} bytes", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("kept for backward (kB)")
    return figure


def plot_segment_lengths(
    lengths: Sequence[int],
    peaks: Sequence[float],
    theory: Mapping[int, float],
    times: Sequence[tuple[float, float]],
    *,
    plain_peak: float,
    forward_share: float,
    best_length: float,
) -> Figure:
    """Draw peak memory and time against the length of segments.

    Args:
        lengths: layers in a segment.
        peaks: the most activations alive at once, measured, in units of one layer's; for each length.
        theory: the same by the formula, by length.
        times: of a step, the least and the greatest of its repeats, as multiples of the plain step's least; for each
            length.
        plain_peak: activations alive without recomputation.
        forward_share: measured, of a step without recomputation; one more forward takes as much.
        best_length: where theory puts the minimum.

    Returns:
        A figure of two panels: memory (logarithmic horizontal axis), and time.
    """
    figure, (left, right) = new_figure(4.2, 1, 2)
    left.plot(list(theory), list(theory.values()), color="black", lw=1.2, label="theory: L/k + k")
    left.plot(lengths, peaks, "o", color=COLOURS["activations"], ms=7, label="measured")
    left.axhline(plain_peak, color=COLOURS["idle"], ls="--", label=f"nothing recomputed: {plain_peak:.0f}")
    left.axvline(best_length, color=COLOURS["communication"], ls=":", label=f"sqrt(L) = {best_length:.3g}")
    left.set(
        xlabel="layers in a segment, k", ylabel="activations alive at most (layers)", title="Memory", ylim=(0, None)
    )
    least, greatest = zip(*times, strict=True)
    right.vlines(lengths, least, greatest, color=COLOURS["loss"], lw=1)
    right.plot(lengths, least, "s", color=COLOURS["loss"], label="least of the repeats, line: to the slowest")
    for value, label, style in _forward_marks(forward_share):
        right.axhline(value, color=COLOURS["communication"], lw=1, ls=style, label=label)
    right.axhline(1, color=COLOURS["idle"], ls="--", label="nothing recomputed")
    right.set(xlabel="layers in a segment, k", ylabel="time of a step (times the plain one)", title="Time")
    right.set_ylim(0, max(1.7, 1.05 * max(greatest)))
    figure.set_layout_engine("constrained", w_pad=0.12)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17))
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(lengths), [str(length) for length in lengths])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _forward_marks(forward_share: float) -> list[tuple[float, str, str]]:
    """Return where one more forward puts the time of a step, by two rules: value, label, line style."""
    return [
        (4 / 3, "one forward more, by products: 4/3", "--"),
        (1 + forward_share, f"one forward more, as measured: {1 + forward_share:.2f}", "-."),
    ]


def plot_memory_and_time(
    cases: Mapping[str, tuple[float, float, float]], title: str, *, forward_share: float
) -> Figure:
    """Draw what policies keep against how long a step takes.

    Args:
        cases: bytes kept, and the least and the greatest time of a step among the repeats, as multiples of the plain
            one's least; by the name of the policy.
        title: the message.
        forward_share: measured, of the plain step's time; one more forward takes as much.

    Returns:
        A figure with a named point a policy and the spread of its repeats, bytes in MB.
    """
    figure, axes = new_figure(4.0)
    for (name, (size, least, greatest)), marker in zip(cases.items(), "osD^vP*Xph", strict=False):
        axes.hlines(size / MB, least, greatest, color="black", lw=1)
        axes.plot([least], [size / MB], marker, color=COLOURS["activations"], ms=9, mec="black")
        axes.annotate(name, (least, size / MB), xytext=(9, 4), textcoords="offset points", fontsize=9, bbox=ON_WHITE)
    largest = max(size for size, _, _ in cases.values()) / MB
    for value, label, style in _forward_marks(forward_share):
        axes.axvline(value, color=COLOURS["communication"], lw=1, ls=style, label=label)
    axes.set(
        xlabel="time of a step (times that with nothing recomputed; line: to the slowest of the repeats)",
        ylabel="activations at most (MB)",
        ylim=(0, 1.2 * largest),
        xlim=(0.9, max(1.6, 1.1 * max(greatest for _, _, greatest in cases.values()))),
        title=title,
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_towers(cases: Mapping[str, Mapping[str, float]], title: str, unit_bytes: int = GB) -> Figure:
    """Draw the activations of the towers, one stacked bar a case.

    Args:
        cases: bytes by tower (vision, language), by the name of the case, drawn from top to bottom.
        title: the message.
        unit_bytes: of the axis, GB or MB.

    Returns:
        A figure of horizontal bars.
    """
    figure, axes = new_figure(1.4 + 0.34 * len(cases))
    styles = {"vision": (COLOURS["exact_match"], "///"), "language": (COLOURS["activations"], "")}
    for row, sizes in enumerate(cases.values()):
        start = 0.0
        for tower, size in sizes.items():
            colour, hatch = styles[tower]
            label = tower if row == 0 else None
            axes.barh([row], [size / unit_bytes], left=start, color=colour, hatch=hatch, edgecolor="white", label=label)
            start += size / unit_bytes
        axes.text(start, row, f" {start:.1f}", va="center", fontsize=9)
    longest = max(sum(sizes.values()) for sizes in cases.values()) / unit_bytes
    axes.set(ylim=(len(cases) - 0.4, -0.6), xlim=(0, 1.12 * longest), title=title)
    axes.set_yticks(range(len(cases)), list(cases), fontsize=9)
    axes.set_xlabel(f"kept for backward ({'GB' if unit_bytes == GB else 'MB'})")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_chain_plans(
    input_bytes: Sequence[float], inside_bytes: Sequence[float], plans: Mapping[str, Any], limit_bytes: float
) -> Figure:
    """Draw which layers of a chain each plan runs again, and how full memory is as backward goes.

    Args:
        input_bytes: of each layer's input.
        inside_bytes: what each layer keeps besides.
        plans: by name, pairs of segments [(start, end), ...] and the list of (layer where a unit begins, bytes alive
            while its backward runs), last unit first.
        limit_bytes: the bound.

    Returns:
        A figure, one row a plan: layers as boxes (hatched: run again) above the bytes alive.
    """
    figure, axes_of = new_figure(1.3 + 1.25 * len(plans), len(plans), 1, sharex=True, squeeze=False)
    sizes = [a + b for a, b in zip(input_bytes, inside_bytes, strict=True)]
    for axes, (name, (segments, alive)) in zip(axes_of[:, 0], plans.items(), strict=True):
        again = {i for start, end in segments for i in range(start, end)}
        for i, size in enumerate(sizes):
            style = {"facecolor": COLOURS["activations"], "edgecolor": "white", "hatch": "///" if i in again else ""}
            axes.bar([i], [size], width=0.9, alpha=0.45 if i in again else 0.9, **style)
        starts, levels = zip(*alive, strict=True)
        axes.plot(starts, levels, "o-", color="black", ms=4, lw=1)
        axes.axhline(limit_bytes, color=COLOURS["communication"], ls="--", lw=1)
        axes.set_title(f"{name}: at most {max(levels):g} of {limit_bytes:g}", fontsize=9, loc="left")
        axes.set(ylabel="bytes", ylim=(0, 1.15 * max(limit_bytes, *levels)))
        axes.spines[["top", "right"]].set_visible(False)
    axes_of[-1, 0].set(xlabel="layer (backward runs from right to left)", xlim=(-0.6, len(sizes) - 0.4))
    axes_of[-1, 0].set_xticks(range(len(sizes)))
    figure.suptitle("Hatched layers run again; the line is what is alive when backward gets there", fontsize=10)
    return figure
