"""Figures of chapter 7's second half: a run tuned a change at a time, and what lies where in a packed weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vlmcourse.plots.activations import LEDGER_STYLES, VISIBLE_FRACTION
from vlmcourse.plots.style import COLOURS, MB, new_figure

PARTS = {
    "query": (COLOURS["activations"], ""),
    "key": (COLOURS["weights"], "//"),
    "value": (COLOURS["gradients"], ".."),
}
"""Colour and hatch of the heads of a packed weight."""


class Variant(Protocol):
    """One run, such as `labs.tuning.Tuned`."""

    @property
    def change(self) -> str:
        """What was changed, in a few words."""
        ...

    @property
    def tokens_per_s(self) -> float:
        """Its speed."""
        ...

    @property
    def owners(self) -> Mapping[str, int]:
        """Bytes by owner at its fullest moment, owners of a `StepLedger`."""
        ...

    @property
    def peak_bytes(self) -> int:
        """All of them together."""
        ...


def plot_tuning(rows: Sequence[Variant], num_taken: int, title: str) -> Figure:
    """Draw the peak and the speed of a run after each change.

    Args:
        rows: the first is the one before any change; from `num_taken` on they are other ends, drawn paler.
        num_taken: rows of the way that was taken.
        title: the message.

    Returns:
        A figure of two panels with a row a change: bytes of the fullest rank by owner in MB, and tokens a second.

    Raises:
        ValueError: if there is no row, or `num_taken` is not a number of them.
    """
    if not 1 <= num_taken <= len(rows):
        raise ValueError(f"num_taken = {num_taken} of {len(rows)} rows: give 1 to the number of rows")
    figure, (memory, speed) = new_figure(1.6 + 0.42 * len(rows), 1, 2, sharey=True, width_ratios=(3, 2))
    largest = max(row.peak_bytes for row in rows)
    owners = [o for o in LEDGER_STYLES if max(row.owners.get(o, 0) for row in rows) > VISIBLE_FRACTION * largest]
    places = [place + (0.45 if place >= num_taken else 0.0) for place in range(len(rows))]
    for number, (place, row) in enumerate(zip(places, rows, strict=True)):
        look: dict[str, Any] = {"height": 0.68, "edgecolor": "white", "linewidth": 0.6}
        look["alpha"] = 1.0 if number < num_taken else 0.55
        start = 0.0
        for owner in owners:
            size = row.owners.get(owner, 0) / MB
            colour, hatch = LEDGER_STYLES[owner]
            memory.barh(place, size, left=start, color=colour, hatch=hatch, **look)
            start += size
        share = f" {row.peak_bytes / MB:.0f} ({row.peak_bytes / rows[0].peak_bytes:.0%})"
        memory.text(row.peak_bytes / MB, place, share, va="center", fontsize=9)
        speed.barh(place, row.tokens_per_s, color=COLOURS["exact_match"], **look)
        times = f" {row.tokens_per_s:.0f} ({row.tokens_per_s / rows[0].tokens_per_s:.1f} x)"
        speed.text(row.tokens_per_s, place, times, va="center", fontsize=9)
    memory.set_yticks(places, [row.change for row in rows])
    memory.set(ylim=(places[-1] + 0.55, -0.55), xlabel="peak of the fullest rank (MB)", title="memory")
    speed.set(xlabel="tokens/s, all ranks", title="speed")
    for axes in (memory, speed):
        axes.margins(x=0.35)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(facecolor=LEDGER_STYLES[o][0], hatch=LEDGER_STYLES[o][1], edgecolor="white") for o in owners]
    figure.legend(handles, owners, loc="outside lower center", ncols=len(owners), frameon=False, fontsize=9)
    figure.suptitle(title)
    return figure


def plot_packed_heads(num_heads: int, num_kv_heads: int, head_size: int, title: str) -> Figure:
    """Draw whose rows lie where in a weight that holds query, key and value together, in the two orders in use.

    Args:
        num_heads: query heads, a multiple of `num_kv_heads`.
        num_kv_heads: key heads, and as many value heads.
        head_size: rows of one head.
        title: the message.

    Returns:
        A figure of two bars, the rows from left to right: by group of heads (InternLM2), and stacked (InternViT).

    Raises:
        ValueError: if the heads do not come in equal groups.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads = {num_kv_heads} must divide num_heads = {num_heads}")
    group = [*["query"] * (num_heads // num_kv_heads), "key", "value"]
    orders = {
        "by group\n(InternLM2's wqkv)": group * num_kv_heads,
        "stacked\n(InternViT's qkv)": [part for part in PARTS for _ in range(group.count(part) * num_kv_heads)],
    }
    figure, axes = new_figure(2.5)
    for row, heads in enumerate(orders.values()):
        seen = dict.fromkeys(PARTS, 0)
        for number, part in enumerate(heads):
            colour, hatch = PARTS[part]
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 1.2}
            axes.barh(row, head_size, left=number * head_size, height=0.62, **look)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85}
            place = ((number + 0.5) * head_size, row)
            axes.text(*place, f"{part[0]}{seen[part]}", ha="center", va="center", fontsize=9, bbox=box)
            seen[part] += 1
    axes.set_yticks(range(len(orders)), list(orders))
    axes.set(ylim=(1.5, -0.5), xlim=(0, len(group) * num_kv_heads * head_size), xlabel="row of the weight on disk")
    axes.set_xticks(range(0, len(group) * num_kv_heads * head_size + 1, head_size))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(facecolor=colour, hatch=hatch, edgecolor="white") for colour, hatch in PARTS.values()]
    figure.legend(handles, [f"{part} head" for part in PARTS], loc="outside lower center", ncols=3, frameon=False)
    axes.set_title(title)
    return figure
