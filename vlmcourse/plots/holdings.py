"""Pictures of who holds what: for each strategy and rank the part of every layer's state, of activations, of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vlmcourse.parallel.holdings import RankHoldings, abbreviate, number_samples
from vlmcourse.plots.style import COLOURS, HATCHES, OWNERS, new_figure

ROWS = (*OWNERS, "activations")
DATA_WIDTH = 2.6
"""Of the picture of the data, in widths of a layer."""
Box = tuple[float, float, float, float]
"""Left, top, width and height of what is held, each from 0 to 1 of a layer."""


def plot_holdings(strategies: Mapping[str, Sequence[RankHoldings]]) -> Figure:
    """Draw what every rank reported, a card a rank, two cards in a row.

    A box is a layer; its filled part is what the rank holds. Data parallelism cuts a layer into upper and lower parts,
    tensor parallelism into left and right ones, a pipeline deals out whole layers. At the right the data: samples from
    top to bottom, positions from left to right.

    Args:
        strategies: by name, what each of its ranks reported; samples of one tile each.

    Returns:
        A figure as high as it needs to be; each card's title has the rank's share of the weights.
    """
    cards = [(name, ranks, holder) for name, ranks in strategies.items() for holder in ranks]
    num_rows = -(-len(cards) // 2)
    figure, panels = new_figure(0.7 + 1.32 * num_rows, num_rows, 2, squeeze=False, sharex=True, sharey=True)
    for axes, (name, ranks, holder) in zip(panels.flat, cards, strict=False):
        _draw_card(axes, ranks, holder)
        share = f"{100 * holder.weights_fraction:.1f} % of the weights"
        axes.set_title(f"{name}, rank {holder.rank}: {share}", fontsize=10, loc="left")
    for axes in panels.flat[len(cards) :]:
        axes.set_axis_off()
    for axes in panels[-1]:
        axes.set_xlabel("layer; at the right samples (down) and positions (across)", fontsize=8)
    handles = [
        Patch(facecolor=COLOURS[owner], hatch=HATCHES.get(owner), edgecolor="white", label=owner) for owner in ROWS
    ]
    handles.append(Patch(facecolor=COLOURS["loss"], alpha=0.7, label="samples x positions"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle("Who holds what, as the ranks report it")
    return figure


def _draw_card(axes: Axes, ranks: Sequence[RankHoldings], holder: RankHoldings) -> None:
    layers = list(holder.layers)
    for row, owner in enumerate(ROWS):
        for column, layer in enumerate(layers):
            if owner == "activations" and layer not in _all_inputs(ranks):
                continue
            axes.add_patch(
                Rectangle((column + 0.06, row + 0.08), 0.88, 0.84, facecolor="none", edgecolor="#999999", lw=0.6)
            )
            left, top, width, height = find_box(ranks, holder, owner, layer)
            style = {"facecolor": COLOURS[owner], "hatch": HATCHES.get(owner, ""), "edgecolor": "white", "lw": 0}
            corner = (column + 0.06 + 0.88 * left, row + 0.08 + 0.84 * top)
            axes.add_patch(Rectangle(corner, 0.88 * width, 0.84 * height, **style))
    _draw_data(axes, ranks, holder, left=len(layers) + 0.5)
    axes.set(xlim=(0, len(layers) + 0.6 + DATA_WIDTH), ylim=(len(ROWS), 0))  # past the frame of the data
    axes.set_xticks(
        [column + 0.5 for column in range(len(layers))], [abbreviate(layer) for layer in layers], fontsize=8
    )
    axes.set_yticks([row + 0.5 for row in range(len(ROWS))], ROWS, fontsize=8)
    axes.tick_params(length=0, pad=1, labelbottom=True)
    axes.spines[:].set_visible(False)


def _draw_data(axes: Axes, ranks: Sequence[RankHoldings], holder: RankHoldings, left: float) -> None:
    """Draw which samples and positions a rank works on, in a frame that stands for the whole step."""
    numbers = number_samples(ranks)
    height = (len(ROWS) - 0.16) / len(numbers)
    axes.add_patch(Rectangle((left, 0.08), DATA_WIDTH, len(ROWS) - 0.16, facecolor="none", edgecolor="#999999", lw=0.6))
    for sample_id in holder.sample_ids:
        for start, end in holder.positions:
            corner = (left + DATA_WIDTH * start / holder.seq_len, 0.08 + numbers[sample_id] * height)
            size = (DATA_WIDTH * (end - start) / holder.seq_len, 0.8 * height)
            axes.add_patch(Rectangle(corner, *size, facecolor=COLOURS["loss"], alpha=0.7, lw=0))


def find_box(ranks: Sequence[RankHoldings], holder: RankHoldings, owner: str, layer: str) -> Box:
    """Return which part of a layer's box a rank fills.

    Args:
        ranks: all ranks of the run.
        holder: one of them.
        owner: weights, gradients, optimizer or activations.
        layer: its name.
    """
    if owner == "activations":
        width, height = _input_share(ranks, holder, layer)
        axis = "cp" if holder.coordinates["cp"] or any(rank.coordinates["cp"] for rank in ranks) else "tp"
        left = holder.coordinates[axis] * width if width < 1 else 0.0
    else:
        width = holder.layers[layer].tensor
        held = getattr(holder.layers[layer], owner)
        if held > width:  # more than this tensor-parallel position's part
            width = min(held, 1.0)
        height = held / width if width else 0.0
        left = min(holder.coordinates["tp"] * width, 1 - width) if width else 0.0
    before = [_height(rank, ranks, owner, layer) for rank in _peers(ranks, holder)]
    place = _peers(ranks, holder).index(holder)
    top = sum(before[:place]) if sum(before) <= 1.02 else 0.0
    return left, min(top, 1 - height), width, height


def _height(rank: RankHoldings, ranks: Sequence[RankHoldings], owner: str, layer: str) -> float:
    if owner == "activations":
        return _input_share(ranks, rank, layer)[1]
    share = rank.layers[layer]
    return getattr(share, owner) / share.tensor if share.tensor else 0.0


def _peers(ranks: Sequence[RankHoldings], holder: RankHoldings) -> list[RankHoldings]:
    """Return the ranks with the same layers and the same part of each matrix."""
    return [rank for rank in ranks if all(rank.coordinates[axis] == holder.coordinates[axis] for axis in ("pp", "tp"))]


def _all_inputs(ranks: Sequence[RankHoldings]) -> set[str]:
    return {layer for rank in ranks for layer in rank.inputs}


def _input_share(ranks: Sequence[RankHoldings], holder: RankHoldings, layer: str) -> tuple[float, float]:
    """Return the shares of positions and of samples that entered a layer on a rank."""
    num_samples, num_positions = holder.inputs.get(layer, (0, 0))
    whole = holder.seq_len if layer.startswith("language") else num_positions
    return (num_positions / whole if whole else 0.0), min(1.0, num_samples / len(number_samples(ranks)))
