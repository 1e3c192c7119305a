"""Figures of chapter 2: they show the numbers that they are given."""

from __future__ import annotations

from typing import Any

import pytest

from vlmcourse import plots

ERRORS = {"BatchNorm": {"a": 0.3, "b": 0.5}, "GroupNorm": {"a": 2e-7, "b": 0.0}}


def test_runs_that_drift_are_drawn_as_far_as_they_have_come() -> None:
    losses = {"big": [2.0, 1.5], "right": [2.0, 1.5], "wrong": [2.1, 1.75]}
    figure: Any = plots.plot_drift([4, 8], losses, {"right": [1e-6, 2e-6], "wrong": [0.1, 0.2]}, 40)
    above, below = figure.axes
    assert "0.250 nats apart" in above.get_title() and below.get_xlim()[1] > 40
    assert [list(line.get_ydata()) for line in below.lines] == [[1e-6, 2e-6], [0.1, 0.2]]
    with pytest.raises(ValueError, match="nothing was measured"):
        plots.plot_drift([], {}, {}, 40)


def test_what_is_sent_and_held_has_a_row_a_strategy() -> None:
    figure: Any = plots.plot_sync({"DDP": [0, 2e6], "FSDP": [1e6, 1e6]}, {"DDP": [2e6, 2e6], "FSDP": [1e6, 1e6]})
    assert len(figure.axes) == 4
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0, 2]
    assert all(axes.get_xlabel() for axes in figure.axes[2:])


def test_cuts_weights_and_normalizations_have_titles_and_units() -> None:
    cuts = plots.plot_cuts(["32 x 1", "2 x 16"], [4e7, 4e6], [0.2, 0.3])
    assert "1/10" in cuts.get_suptitle() and "1.50 x" in cuts.get_suptitle()
    weights: Any = plots.plot_sample_weights([1, 4, 1, 16]).axes[0]
    assert [[round(share) for share in line.get_ydata()] for line in weights.lines] == [
        [5, 18, 73],  # of 1 + 4 + 1 + 16: the second sample of one token weighs too
        [12, 25, 50],
        [25, 25, 25],
    ]
    assert "weight" in weights.get_ylabel() and "4 samples" in weights.get_title()
    norms = plots.plot_norm_errors(ERRORS)
    assert [label.get_text() for label in norms.axes[0].get_yticklabels()] == ["BatchNorm", "GroupNorm"]
    for axes in (*cuts.axes, weights, norms.axes[0]):
        assert axes.get_xlabel()
