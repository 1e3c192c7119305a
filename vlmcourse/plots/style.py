"""What all figures share: one colour a quantity, sizes that stay legible at a notebook's width, units.

The optimizer is dotted too, since its colour and that of gradients are nearly the same grey.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vlmcourse.colours import COLOURS

HATCHES = {"optimizer": ".."}
OWNERS = ("weights", "gradients", "optimizer")
"""Training state by owner, in the order in which it is stacked."""
RANK_OWNERS = {
    "weights": (COLOURS["weights"], ""),
    "gradients": (COLOURS["gradients"], ""),
    "optimizer": (COLOURS["optimizer"], ".."),
    "gathered": (COLOURS["weights"], "xx"),
    "activations": (COLOURS["activations"], ""),
    "allowance": (COLOURS["idle"], ""),
}
"""Colour and hatch of everything that a rank holds, by the owners of `planner.RankMemory`."""

WIDTH_INCHES = 7.5
GB = 10**9
KB = 10**3
MB = 10**6


def new_figure(height_inches: float, num_rows: int = 1, num_columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Return a figure of the course's width and its axes, already closed for pyplot.

    Args:
        height_inches: the width is that of a notebook.
        num_rows: rows of axes.
        num_columns: columns of axes.
        options: passed on to `matplotlib.pyplot.subplots`.
    """
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=(WIDTH_INCHES, height_inches), layout="constrained", **options
    )
    plt.close(figure)
    return figure, axes


def stack_bars(axes: Axes, position: float, sizes: Mapping[str, float], *, horizontal: bool, **options: Any) -> float:
    """Draw one bar stacked by owner and return its length.

    Args:
        axes: where to draw.
        position: of the bar on the axis across.
        sizes: length of each part by owner, a key of `COLOURS`; drawn in this order.
        horizontal: whether the bar grows to the right rather than up.
        options: passed on to the bars, such as `hatch` or a width.
    """
    start = 0.0
    for owner, size in sizes.items():
        draw = axes.barh if horizontal else axes.bar
        offset = {"left": start} if horizontal else {"bottom": start}
        hatch = HATCHES.get(owner, "") + options.get("hatch", "")
        style = options | {"color": COLOURS[owner], "edgecolor": "white", "linewidth": 0.8, "hatch": hatch}
        draw([position], [size], **offset, **style)
        start += size
    return start


def add_owner_legend(axes: Axes, owners: Mapping[str, str] | tuple[str, ...], **options: Any) -> None:
    """Explain the colours of owners once, whatever the number of bars."""
    names = owners if isinstance(owners, Mapping) else {owner: owner for owner in owners}
    handles = [Patch(facecolor=COLOURS[owner], edgecolor="white", hatch=HATCHES.get(owner)) for owner in names]
    axes.legend(handles, list(names.values()), frameon=False, **options)
