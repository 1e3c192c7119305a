"""Figures of chapter 4: hatches are seen, and neither legends nor names lie under lines."""

from __future__ import annotations

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from vlmcourse import plots
from vlmcourse.monitor.ledger import Sample

MB = 10**6


def sample_of(phase: str, **sizes: int) -> Sample:
    return Sample(0.0, phase, {(owner, ""): size * MB for owner, size in sizes.items()})


def segments_figure() -> Figure:
    times, marks = ((1.3, 1.5), (1.35, 1.8)), {"plain_peak": 4, "forward_share": 0.4, "best_length": 2}
    return plots.plot_segment_lengths((1, 2), (5, 4), {1: 5.0, 2: 4.0}, times, **marks)


def policies_figure() -> Figure:
    cases = {"none": (9 * MB, 1.0, 1.1), "full": (2 * MB, 1.32, 1.6)}
    return plots.plot_memory_and_time(cases, "Policies", forward_share=0.41)


def test_hatches_of_owners_are_drawn() -> None:
    """In the pixels: an area whose hatch has its own color looks as if it had none."""
    samples = [sample_of("forward", optimizer=8), sample_of("backward", optimizer=8, gradients=8, recomputed=8)]
    figure = plots.plot_step_ledgers({"full": [*samples, samples[-1]]}, "One step")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    axes, whites = figure.axes[0], []
    for middle in (4, 12, 20):  # MB, in the third operation
        x, y = axes.transData.transform((1.5, middle)).round().astype(int)
        around = pixels[len(pixels) - y - 15 : len(pixels) - y + 15, x - 15 : x + 15, :3]
        whites.append(int((around > 250).all(axis=-1).sum()))
    assert whites[0] > 5 and whites[1] == 0 and whites[2] > 5


def test_legends_lie_outside_of_the_panels() -> None:
    for figure in (segments_figure(), policies_figure()):
        figure.draw_without_rendering()
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
        assert legends
        for axes in figure.axes:
            assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for legend in legends)


def test_labels_of_a_panel_keep_away_from_its_neighbor() -> None:
    figure = segments_figure()
    figure.draw_without_rendering()
    left, right = figure.axes
    gap = right.yaxis.get_label().get_window_extent().x0 - left.get_window_extent().x1
    assert gap > 0.1 * figure.dpi


def test_names_of_policies_cover_the_lines_that_cross_them() -> None:
    axes = policies_figure().axes[0]
    names = {text.get_text(): text for text in axes.texts}
    assert names.keys() == {"none", "full"}
    for text in names.values():
        box = text.get_bbox_patch()
        assert box is not None and to_hex(box.get_facecolor()) == "#ffffff"
        assert text.get_zorder() > max(line.get_zorder() for line in axes.lines)
