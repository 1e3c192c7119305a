"""The drawing of the offload tree: every number of a decision is on it, and only the path is black."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text

from vlmcourse.planner import Decision, Machine, Plan, decide_offload, machine_of
from vlmcourse.planner.offload import STAGES_OF
from vlmcourse.planner.offload_cost import show_bytes
from vlmcourse.plots import plot_offload
from vlmcourse.plots.offload import TAKEN
from vlmcourse.presets import get_cluster, get_model

STATION = get_cluster("a100-40x4")
WITH_DISKS = machine_of(STATION, nvme_bytes=4 * 10**12, nvme_bytes_per_s=6e9)
CASES: dict[str, tuple[Plan, str, Machine]] = {
    "none": (Plan(dp_shard=4, zero_stage=3), "internvl2-2b", machine_of(STATION)),
    "optimizer": (Plan(dp_shard=4, zero_stage=3), "internvl2-26b", machine_of(STATION)),
    "optimizer+parameters": (Plan(dp_shard=4, zero_stage=3), "internvl2-76b", WITH_DISKS),
    "does not fit": (Plan(dp_replicate=4), "vlm-13b", machine_of(STATION)),
}


def decide(answer: str) -> Decision:
    plan, model, machine = CASES[answer]
    decision = decide_offload(plan, get_model(model), machine)
    assert decision.answer == answer
    return decision


def texts_of(figure: Figure) -> dict[str, Text]:
    return {text.get_text().replace("\n+ ", "+"): text for text in figure.axes[0].texts}


@pytest.mark.parametrize("answer", CASES)
def test_the_path_is_black_and_the_rest_is_grey(answer: str):
    decision = decide(answer)
    figure = plot_offload(decision)
    boxes = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    assert len(boxes) == 4 + 4 + 1  # questions, answers, and that nothing fits
    assert sum(box.get_linewidth() == 2 for box in boxes) == len(decision.path) + 1
    shown = texts_of(figure)
    answers = ("none", "optimizer", "optimizer+parameters", "layered", "does not fit")
    assert [name for name in answers if shown[name].get_color() == TAKEN] == [answer]


@pytest.mark.parametrize("answer", CASES)
def test_the_numbers_are_those_of_the_decision(answer: str):
    decision = decide(answer)
    shown = " ".join(texts_of(plot_offload(decision)))
    for level in decision.levels:
        for size in (level.device_bytes, level.node_bytes if level.memory else 0, level.nvme_bytes):
            assert not size or show_bytes(size) in shown
        assert (f"zero_stage={STAGES_OF.get(level.name)} " in shown) == (level.memory is None)
    assert " ".join(decision.reason.split()) in " ".join(shown.split())
    assert ("update" in shown) == (decision.cost.update_bytes > 0)


def test_all_text_is_inside_the_figure():
    figure = plot_offload(decide("optimizer+parameters"), title="A title")
    figure.draw_without_rendering()
    width, height = figure.bbox.width, figure.bbox.height
    for text in [*figure.axes[0].texts, *figure.legends[0].get_texts()]:
        box = text.get_window_extent()
        assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, text.get_text()
