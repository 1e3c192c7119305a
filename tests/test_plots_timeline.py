"""`plots/timeline.py`: measured and predicted spans by the same drawing, under and over each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vlmcourse import plots
from vlmcourse.plots.style import COLOURS, WIDTH_INCHES
from vlmcourse.plots.timeline import STYLES
from vlmcourse.spans import BACKWARD, COMMUNICATION, COMPUTE, DATA, DATA_WAIT, FORWARD, OPTIMIZER, Span

MEASURED = [
    Span(0, COMPUTE, FORWARD, 0.010, 0.030),
    Span(0, COMPUTE, BACKWARD, 0.030, 0.070),
    Span(0, COMMUNICATION, "all_reduce", 0.050, 0.090),
    Span(1, DATA, DATA_WAIT, 0.0, 0.020),
    Span(1, OPTIMIZER, OPTIMIZER, 0.090, 0.100),
]
PREDICTED = [Span(0, COMPUTE, FORWARD, 0.010, 0.025), Span(1, COMPUTE, BACKWARD, 0.025, 0.050)]


def bars(axes: Any) -> list[tuple[float, float, float]]:
    """Row, start and width of each bar."""
    found = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in found]


def labels(axes: Any) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_rank_and_lane_has_a_row_and_every_span_a_bar_of_its_length() -> None:
    figure = plots.plot_timeline({"measured": MEASURED})
    [axes] = figure.axes
    assert labels(axes) == ["rank 0  compute", "communication", "rank 1  data", "optimizer"]
    expected = [(0, 10, 20), (0, 30, 40), (1, 50, 40), (2, 0, 20), (3, 90, 10)]
    assert [pytest.approx(bar) for bar in expected] == bars(axes)
    assert legend(figure) == ["forward", "backward", "communication", "waits for data", "optimizer"]
    assert axes.get_xlabel() == "time since the step began (ms)" and axes.get_title(loc="left") == "measured"


def test_two_timelines_stand_one_above_the_other_on_one_axis_with_the_same_rows() -> None:
    above, below = plots.plot_timeline({"measured": MEASURED, "predicted": PREDICTED}).axes
    assert above.get_xlim() == below.get_xlim() and labels(above) == labels(below)
    assert [row for row, _, _ in bars(below)] == [0, 2]


def test_a_prediction_is_laid_over_a_measurement_as_outlines() -> None:
    figure = plots.plot_timeline({"measured": MEASURED, "predicted": PREDICTED}, overlay=True)
    [axes] = figure.axes
    filled = [to_rgba(patch.get_facecolor())[3] > 0 for patch in axes.patches if isinstance(patch, Rectangle)]
    assert filled == [True] * len(MEASURED) + [False] * len(PREDICTED)
    assert legend(figure)[-1] == "outlines: predicted"
    figure.draw_without_rendering()
    assert min(float(text.get_fontsize()) for text in [*axes.get_yticklabels(), *figure.legends[0].get_texts()]) >= 8
    assert figure.get_figwidth() == WIDTH_INCHES


def test_the_looks_of_spans_differ_in_grey_or_hatch_and_keep_the_colours_of_quantities() -> None:
    assert STYLES[COMMUNICATION].colour == COLOURS["communication"] and STYLES[OPTIMIZER].colour == COLOURS["optimizer"]
    greys: dict[str, list[float]] = {}
    for style in STYLES.values():
        greys.setdefault(style.hatch, []).append(np.dot(to_rgb(style.colour), (0.2126, 0.7152, 0.0722)))
    for alike in greys.values():
        assert np.diff(sorted(alike)).min(initial=1.0) > 0.08


@pytest.mark.parametrize(
    ("timelines", "said"),
    [
        ({}, "no timeline"),
        ({"measured": []}, "measured has no span"),
        ({"measured": MEASURED}, "overlay with 1 timelines"),
    ],
)
def test_what_cannot_be_drawn_is_refused(timelines: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plots.plot_timeline(timelines, overlay=True)
