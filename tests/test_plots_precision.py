"""Figures of chapter 3 say what their data say, with titles, named axes and legible text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from vlmcourse import plots
from vlmcourse.monitor.exponents import Exponents
from vlmcourse.monitor.op_dtypes import OpCall
from vlmcourse.planner.formats import FORMATS
from vlmcourse.plots.precision import CURVE_COLOURS, FORMAT_COLOURS

TOWERS = {"vision": Exponents({-26: 1, -20: 3, -12: 6}), "language": Exponents({-14: 5, -8: 5})}
CALLS = [
    OpCall("loss", "", "mul", ("fp32",), "fp32", 4),
    OpCall("forward", "vision.blocks.0", "mm", ("bf16",), "bf16", 9),
    OpCall("forward", "language.lm_head", "mm", ("bf16",), "bf16", 9),
    OpCall("loss", "", "nll_loss", ("fp32",), "fp32", 1),
    OpCall("loss", "", "sum", ("fp64",), "fp64", 1),
    OpCall("backward", "vision.blocks.0", "mm", ("bf16",), "bf16", 9),
    OpCall("update", "", "_fused_adamw_", ("fp32",), "fp32", 9),
]
FIGURES: dict[str, Callable[[], Figure]] = {
    "formats": lambda: plots.plot_formats(list(FORMATS.values())),
    "exponents": lambda: plots.plot_exponents(TOWERS, [FORMATS["fp16"], FORMATS["bf16"]]),
    "scale": lambda: plots.plot_scale([2.0**16, 2.0**16, 2.0**15], [False, True, False]),
    "losses": lambda: plots.plot_precision_losses({"fp32": [3.0, 2.0], "bf16": [3.1, 2.2], "fp16": [3.0, 2.1]}),
    "step": lambda: plots.plot_step_formats(CALLS),
    "roundings": lambda: plots.plot_roundings({"fp32": [1.0, 1.1], "nearest": [1.0, 1.0]}),
}


def numbers(data: Any) -> list[float]:
    return np.asarray(data, dtype=float).tolist()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_a_title_named_axes_and_legible_text(name: str) -> None:
    figure = FIGURES[name]()
    assert not plt.get_fignums()
    figure.canvas.draw()
    assert any(axes.get_title() for axes in figure.axes)
    assert figure.axes[-1].get_xlabel()
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
    assert min(float(text.get_fontsize()) for text in texts) >= 8


def test_bars_of_exponents_are_shares_of_their_tower() -> None:
    vision, language, _ = FIGURES["exponents"]().axes
    heights = [bar.get_height() for bar in vision.patches], [bar.get_height() for bar in language.patches]  # type: ignore[attr-defined]
    assert heights == ([10, 30, 60], [50, 50])
    assert [numbers(line.get_xdata())[0] for line in vision.lines] == [-25]  # half of 2^-24; bf16 loses none of these


@pytest.mark.parametrize("name", ["fp16", "e5m2", "e4m3fn"])
def test_the_bars_left_of_a_dashed_line_are_what_the_format_loses(name: str) -> None:
    form, found = FORMATS[name], Exponents({e: 2 for e in range(-30, 0)})
    histogram, bands = plots.plot_exponents({"vision": found}, [form]).axes
    (line,) = (numbers(line.get_xdata())[0] for line in histogram.lines)
    bars = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_height()) for bar in histogram.patches]  # type: ignore[attr-defined]
    assert [left for left, *_ in bars] == list(found.counts)
    assert not any(left < line < right for left, right, _ in bars)
    lost = sum(height for _, right, height in bars if right <= line)
    assert lost == pytest.approx(100 * found.fates(form)["zero"])
    low = math.log2(form.smallest_subnormal)
    assert (bands.patches[0].get_x(), line) == (low, low - 1)  # type: ignore[attr-defined]
    assert bands.patches[1].get_x() + bands.patches[1].get_width() == pytest.approx(math.log2(form.max))  # type: ignore[attr-defined]


def test_labels_of_formats_do_not_cover_each_other_or_the_title() -> None:
    formats = [FORMATS[name] for name in ("fp16", "e5m2", "e4m3fn")]
    figure = plots.plot_exponents({"vision": Exponents({-30: 1, -12: 6, -5: 2})}, formats)
    figure.canvas.draw()
    axes = figure.axes[0]
    assert [text.get_text()[2:] for text in axes.texts] == ["0 in fp16", "0 in e5m2", "0 in e4m3fn"]
    boxes = [text.get_window_extent() for text in (*axes.texts, axes.title)]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_bars_of_formats_reach_from_the_smallest_to_the_largest_number() -> None:
    axes = FIGURES["formats"]().axes[0]
    bars = axes.patches[: 2 * len(FORMATS)]
    for spec, subnormal, normal in zip(FORMATS.values(), bars[::2], bars[1::2], strict=True):
        assert subnormal.get_x() == math.log2(spec.smallest_subnormal)  # type: ignore[attr-defined]
        assert normal.get_x() == math.log2(spec.smallest_normal)  # type: ignore[attr-defined]
        assert normal.get_x() + normal.get_width() == pytest.approx(math.log2(spec.max))  # type: ignore[attr-defined]


def test_crosses_stand_on_the_steps_that_overflowed() -> None:
    _, crosses = FIGURES["scale"]().axes[0].lines
    assert (numbers(crosses.get_xdata()), numbers(crosses.get_ydata())) == ([2], [16])


def test_every_operation_is_a_mark_in_its_row_and_counts_are_left_out() -> None:
    axes = FIGURES["step"]().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["vision", "logits", "inputs and loss", "update"]
    marks = {to_hex(marks.get_color()[0]): len(marks.get_segments()) for marks in axes.collections}  # type: ignore[attr-defined]
    assert marks == {FORMAT_COLOURS["fp32"].lower(): 3, FORMAT_COLOURS["bf16"].lower(): 3}
    assert [text.get_text() for text in axes.texts] == ["forward", "backward", "update"]


def test_differences_are_to_the_first_curve() -> None:
    above, below = FIGURES["losses"]().axes
    assert len(above.lines) == 3
    assert numbers(below.lines[0].get_ydata()) == pytest.approx([0.1, 0.2])
    assert len(set(CURVE_COLOURS)) == len(CURVE_COLOURS)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.plot_formats([]),
        lambda: plots.plot_exponents({"vision": Exponents({})}, [FORMATS["fp16"]]),
        lambda: plots.plot_scale([1.0], []),
        lambda: plots.plot_precision_losses({"fp32": [1.0]}),
        lambda: plots.plot_precision_losses({"fp32": [1.0], "bf16": [1.0, 2.0]}),
        lambda: plots.plot_step_formats([]),
        lambda: plots.plot_roundings({}),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Callable[[], Figure]) -> None:
    with pytest.raises(ValueError, match="give|draw|run a step"):
        draw()
