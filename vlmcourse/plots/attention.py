"""Figures of context parallelism: who computes which part of causal attention, and what that sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from vlmcourse.parallel.chunks import count_visible_pairs, take_part_positions
from vlmcourse.plots.style import COLOURS, MB, new_figure

RANK_COLOURS = ("#FFFFFF", COLOURS["weights"], COLOURS["gradients"], COLOURS["activations"], COLOURS["optimizer"])


def plot_causal_work(seq_len: int, cp: int, orders: Sequence[str]) -> Figure:
    """Draw which rank computes which pairs of query and key under a causal mask.

    Args:
        seq_len: positions of the sequence.
        cp: ranks that share it, at most 4.
        orders: of the chunks, a panel each.

    Returns:
        A figure of squares of queries and keys, coloured by rank, with each rank's share of the pairs at the right.
    """
    figure, panels = new_figure(3.5, 1, len(orders), squeeze=False)
    for axes, order in zip(panels[0], orders, strict=True):
        pairs = count_visible_pairs(seq_len, cp, order)
        owner = np.zeros((seq_len, seq_len), dtype=int)
        for rank in range(cp):
            rows = take_part_positions(seq_len, rank, cp, order)
            owner[rows] = np.tri(seq_len, dtype=int)[rows] * (rank + 1)
            share = 100 * pairs[rank] / sum(pairs)
            style = {"color": RANK_COLOURS[rank + 1], "weight": "bold", "ha": "right", "va": "top", "fontsize": 10}
            axes.text(0.98, 0.97 - 0.09 * rank, f"rank {rank}: {share:.1f} %", transform=axes.transAxes, **style)
        axes.imshow(owner, cmap=ListedColormap(RANK_COLOURS[: cp + 1]), vmin=0, vmax=cp, interpolation="nearest")
        axes.set(title=order, xlabel="key (position)", ylabel="query (position)")
    figure.suptitle("Pairs of query and key that each rank computes under a causal mask")
    return figure


def plot_context_traffic(
    sent_bytes: Mapping[str, Sequence[float | None]], degrees: Sequence[int], title: str
) -> Figure:
    """Draw what one rank sends for one layer over the number of ranks that share a sequence.

    Args:
        sent_bytes: by method, bytes for each of `degrees`; None where the method cannot run.
        degrees: the horizontal axis (logarithmic, base 2).
        title: the message.

    Returns:
        A figure in MB.
    """
    figure, axes = new_figure(3.3)
    styles = (("o", "-", "weights"), ("s", "--", "gradients"), ("D", "-.", "communication"))
    for (method, sizes), (marker, line, colour) in zip(sent_bytes.items(), styles, strict=False):
        drawn = [np.nan if size is None else size / MB for size in sizes]
        axes.plot(degrees, drawn, marker=marker, ls=line, color=COLOURS[colour], label=method)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(degrees), [str(degree) for degree in degrees])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(
        xlabel="ranks that share a sequence (cp)", ylabel="sent by one rank, forward\nand backward (MB)", title=title
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure
