"""One colour a quantity in the whole course, as text: figures, pictures in widgets and a terminal take it from here.

The colours of quantities are Okabe and Ito's palette, which colour-blind readers can tell apart. Imports nothing, so
that a notebook's kernel draws without matplotlib.
"""

from __future__ import annotations

COLOURS = {
    "weights": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#CC79A7",
    "activations": "#009E73",
    "communication": "#D55E00",
    "idle": "#BBBBBB",
    "loss": "#000000",
    "exact_match": "#56B4E9",
    "visual_tokens": "#F0E442",
}
"""One colour a quantity."""

PHASE_COLOURS = {
    "data_wait": "#1F2D3D",
    "forward": "#BBA6E6",
    "backward": "#5A3D8A",
    "communication": COLOURS["communication"],
    "optimizer": COLOURS["optimizer"],
    "other": "#E4DCEF",
}
"""Of the parts of a step, in their order. Passes through the model are no quantity, so none of `COLOURS` is theirs."""
