"""Figures of data: pictures with their conversations, and what the tokens of a batch are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vlmcourse.data.samples import IGNORE_LABEL, Batch, Sample
from vlmcourse.data.tokenizer import IMAGE_MARKER
from vlmcourse.plots.style import COLOURS, new_figure

TOKEN_KINDS = ("padding", "visual token", "text, not learned", "text, supervised")
TOKEN_COLOURS = ("#FFFFFF", COLOURS["visual_tokens"], COLOURS["idle"], COLOURS["loss"])


def plot_conversations(samples: Sequence[Sample]) -> Figure:
    """Draw the first picture of each sample with its conversation below.

    Args:
        samples: a few, each with a picture.

    Returns:
        A figure with one column a sample.
    """
    figure, panels = new_figure(4.3, 1, len(samples), squeeze=False)
    for number, (axes, sample) in enumerate(zip(panels[0], samples, strict=True), start=1):
        picture = np.asarray(sample.images[0])
        axes.imshow(picture, interpolation="nearest")
        height_px, width_px = picture.shape[:2]
        axes.set_title(f"picture {number}", fontsize=9)
        axes.set(xlabel=f"{width_px} px", ylabel=f"{height_px} px", xticks=[], yticks=[])
        turns = [
            ("Q: " if message.role == "user" else "A: ") + message.text.replace(IMAGE_MARKER, "").strip()
            for message in sample.messages
        ]
        axes.text(0, -0.16, "\n".join(turns), transform=axes.transAxes, va="top", fontsize=8.5, linespacing=1.4)
    figure.suptitle("Pictures and what is asked about them")
    return figure


def plot_tokens(batch: Batch, image_token_id: int) -> Figure:
    """Draw what each position of a batch is: image, text, supervised text or padding.

    Args:
        batch: on any device.
        image_token_id: the id that stands for a visual token.

    Returns:
        A figure with one row a sample. A position counts as supervised where the *next* token is learned from it.
    """
    ids, labels, mask = (
        tensor.cpu().numpy() for tensor in (batch.input_ids_BS, batch.labels_BS, batch.attention_mask_BS)
    )
    kinds = np.where(mask, 2, 0)
    kinds[ids == image_token_id] = 1
    kinds[labels != IGNORE_LABEL] = 3
    figure, axes = new_figure(1.6 + 0.26 * len(kinds))
    num_positions = kinds.shape[1]
    edges = np.arange(num_positions + 1), np.arange(len(kinds) + 1)
    axes.pcolormesh(*edges, kinds, cmap=ListedColormap(TOKEN_COLOURS), vmin=0, vmax=3, edgecolors="white", lw=0.4)
    counts = (labels != IGNORE_LABEL).sum(axis=1)
    axes.set_yticks(np.arange(len(kinds)) + 0.5, [f"sample {row}" for row in range(len(kinds))])
    for row, count in enumerate(counts):
        axes.text(num_positions + 1, row + 0.5, f"{count}", va="center", fontsize=9)
    axes.text(num_positions + 1, -0.3, "supervised", va="bottom", fontsize=9)
    axes.set(ylim=(len(kinds), 0), xlabel="position in the sequence (tokens)", title="What the tokens of a batch are")
    handles = [
        Patch(facecolor=colour, edgecolor="grey", label=kind)
        for kind, colour in zip(TOKEN_KINDS, TOKEN_COLOURS, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure
