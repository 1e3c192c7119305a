"""The memory calculator: its numbers are the planner's, its bar is in proportion, and a notebook gets no error."""

from __future__ import annotations

import random
import re
import xml.dom.minidom
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import v4

from vlmcourse.labs.memory_bar import WIDTH, draw_bar
from vlmcourse.labs.memory_calculator import SEQ_LENS, Calculation, MemoryCalculator, calculate
from vlmcourse.planner import Plan, Workload, estimate_rank_memory, get_device
from vlmcourse.planner.offload import decide_offload
from vlmcourse.planner.offload_cost import show_bytes
from vlmcourse.presets import get_cluster, get_model

NEEDS = re.compile(r"a rank needs +([\d.,]+ [GM]B)")


def values_of(control: Any) -> list[Any]:
    if isinstance(control, widgets.IntSlider):
        return list(range(control.min, control.max + 1))
    return [option[1] if isinstance(option, tuple) else option for option in control.options]


def plan_of(choices: dict[str, Any]) -> Plan:
    """Build the plan of some choices, without the code that is tested."""
    stage, ranks = choices["zero_stage"], choices["ranks"]
    return Plan(
        dp_replicate=ranks if stage == 0 else 1,
        dp_shard=ranks if stage > 0 else 1,
        zero_stage=stage,
        precision=choices["precision"],
        micro_batch_size=choices["micro_batch_size"],
        recompute_vision=choices["recompute"],
        recompute_language=choices["recompute"],
    )


def read_bar(html: str) -> tuple[list[float], float]:
    """Return the widths of the parts of a bar and the distance from its beginning to the limit, in pixels."""
    drawing = xml.dom.minidom.parseString(html).getElementsByTagName("svg")[0]
    parts = [rect for rect in drawing.getElementsByTagName("rect") if rect.getElementsByTagName("title")]
    (line,) = drawing.getElementsByTagName("line")
    begin = float(parts[0].getAttribute("x"))
    return [float(rect.getAttribute("width")) for rect in parts], float(line.getAttribute("x1")) - begin


def test_every_move_shows_the_planners_numbers_or_says_why_it_cannot_be_run():
    calculator, rng, seen = MemoryCalculator(), random.Random(7), {"bar": 0, "problems": 0, "over": 0, "off": 0}
    for _ in range(400):
        control = calculator.controls[rng.choice(list(calculator.controls))]
        control.value = rng.choice(values_of(control))
        choices = {name: control.value for name, control in calculator.controls.items()}
        result, html = calculator.result, calculator.shown.value
        assert result == calculate(**choices)
        if result.memory is None:
            seen["problems"] += 1
            assert result.problems and all(escape(problem) in html for problem in result.problems)
            assert "<svg" not in html
            continue
        seen["bar"] += 1
        seen["over"] += not result.fits
        workload = Workload(seq_len=choices["seq_len"], tiles_per_sample=choices["tiles_per_sample"])
        expected = estimate_rank_memory(plan_of(choices), get_model(choices["model"]), workload)
        if choices["offload"] == "none":
            assert result.memory == expected
        else:
            seen["off"] += 1
            assert result.memory.activations == expected.activations and result.memory.optimizer == 0
            assert show_bytes(result.memory.host_total) in html
        owners = {owner: size for owner, size in result.memory.by_owner().items() if size}
        assert all(f"{owner} {show_bytes(size)}" in html for owner, size in owners.items())
        limit = get_device(choices["device"]).memory_bytes
        assert f"{show_bytes(result.memory.device_total)} of {show_bytes(limit)}" in html
        widths, place = read_bar(html)
        pixels_a_byte = max(sum(widths), place) / max(result.memory.device_total, limit)
        assert place == pytest.approx(limit * pixels_a_byte, abs=0.4)
        assert widths == pytest.approx([size * pixels_a_byte for size in owners.values()], abs=0.4)
        assert WIDTH - 80 < max(sum(widths), place) < WIDTH
    assert min(seen.values()) > 20, seen


def test_the_devices_line_goes_through_no_name():
    for share, num_names in {0.1: 2, 0.18: 1, 0.5: 2, 0.72: 1, 0.9: 2}.items():
        html = draw_bar({"weights": 4 * 10**9, "gradients": 6 * 10**9}, "a device", int(share * 10**10))
        drawing = xml.dom.minidom.parseString(html).getElementsByTagName("svg")[0]
        (line,) = drawing.getElementsByTagName("line")
        names = [text for text in drawing.getElementsByTagName("text") if text.hasAttribute("pointer-events")]
        assert len(names) == num_names, share
        places = [float(name.getAttribute("x")) for name in names]
        assert all(abs(place - float(line.getAttribute("x1"))) > 30 for place in places), share


def test_the_function_prints_what_the_widget_shows():
    calculator = MemoryCalculator(model="internvl2-26b", ranks=16, zero_stage=2)
    printed = str(calculate(model="internvl2-26b", ranks=16, zero_stage=2))
    (needed,) = NEEDS.findall(printed)
    assert f">{needed} of 80.0 GB" in calculator.shown.value
    memory = calculator.result.memory
    assert memory is not None and all(show_bytes(size) in printed for size in memory.by_owner().values() if size)
    assert str(calculator.result) == printed


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"zero_stage": 3, "ranks": 1}, "ZeRO-3 splits over 1 rank, which is nothing: raise ranks"),
        ({"device": "v100-32"}, "precision='bf16_mixed' computes in bf16, which v100-32 does not"),
        ({"tiles_per_sample": 12}, "12 tiles are 3072 image tokens"),
        ({"tiles_per_sample": 8, "seq_len": 2048}, "8 tiles are 2048 image tokens"),
        ({"model": "internvl2-76b", "seq_len": 16384}, "were trained for 8192 tokens"),
        ({"zero_stage": 2, "offload": "layered"}, "offload = 'layered' with zero_stage=2: "),
        ({"offload": "disk"}, "offload = 'disk': choose one of none, "),
        ({"zero_stage": 0, "offload": "optimizer"}, "no strategy moves optimizer state that is whole on every rank"),
        ({"ranks": 0}, "ranks = 0"),
        ({"micro_batch_size": 0}, "micro_batch_size = 0"),
        ({"recompute": "every"}, "recompute = 'every'"),
        ({"model": "internvl-8b"}, "did you mean 'internvl2-8b'?"),
        ({"device": "h1000"}, "did you mean 'h100'?"),
        ({"seq_len": 0}, "seq_len = 0"),
    ],
)
def test_what_cannot_be_run_says_why_and_raises_nothing(choices: dict[str, Any], said: str):
    result = calculate(**choices)
    assert result.memory is None and not result.fits and any(said in problem for problem in result.problems)
    assert said in str(result) and "cannot be run" in str(result)


def test_main_memory_is_looked_at_too_as_the_tree_of_offloading_does():
    cluster = get_cluster("a100-40x4")
    plan = Plan(dp_shard=4, zero_stage=3, precision="bf16_mixed", recompute_vision="full", recompute_language="full")
    for model, fits in (("internvl2-76b", False), ("internvl2-8b", True)):
        result = calculate(model=model, ranks=4, offload="layered", device="a100-40")
        level = next(
            level for level in decide_offload(plan, get_model(model), cluster).levels if level.name == "layered"
        )
        assert result.memory is not None and result.memory.device_total <= result.limit_bytes
        assert result.fits == level.fits == fits
        node = f"{show_bytes(level.node_bytes)} of a node's 512.0 GB{'' if fits else ', which is too much'}"
        assert node in str(result) and node in result._repr_html_().replace("&#x27;", "'")
        assert f"it {'fits' if fits else 'does not fit'};" in str(result)
        assert ("fits, but main memory does not" in result._repr_html_()) != fits
    unknown = calculate(model="internvl2-1b", ranks=16, offload="layered", device="l4-24")
    assert unknown.fits and "on a node with 8 ranks: see that yours has as much" in str(unknown)


def test_what_no_strategy_offloads_is_said_beside_the_bytes():
    result = calculate(offload="optimizer")
    assert result.fits and "'deepspeed-zero3' would with precision='fp32', no recomputation" in str(result)
    assert "No strategy here offloads this plan" in result._repr_html_()
    assert "No strategy" not in str(calculate(offload="optimizer+parameters", precision="fp32"))


def test_all_that_is_wrong_is_said_at_once():
    assert len(calculate(zero_stage=1, ranks=1, device="v100-32", tiles_per_sample=12).problems) == 3


def test_one_rank_may_stream_its_weights_under_zero_3():
    result = calculate(ranks=1, offload="layered")
    assert result.memory is not None and "in main memory" in str(result)


def test_the_bar_comes_back_after_a_wrong_choice():
    calculator = MemoryCalculator()
    before = calculator.shown.value
    calculator.controls["ranks"].value = 1
    assert "This cannot be run" in calculator.shown.value
    calculator.controls["ranks"].value = 8
    assert calculator.shown.value == before


def test_first_values_are_checked():
    with pytest.raises(ValueError, match="there is no choice 'stage'"):
        MemoryCalculator(stage=3)
    with pytest.raises(ValueError, match="ranks = 3: must be one of 1, 2, 4"):
        MemoryCalculator(ranks=3)
    with pytest.raises(ValueError, match="micro_batch_size = 0: must be a whole number from 1 to 32"):
        MemoryCalculator(micro_batch_size=0)
    assert set(values_of(MemoryCalculator().controls["seq_len"])) == set(SEQ_LENS)


def test_text_from_outside_cannot_become_html():
    assert "<b>x" not in draw_bar({"weights": 1}, "<b>x", 2, note="<b>x")
    problem = Calculation(title="", memory=None, problems=("<script>",))
    assert "<script>" not in problem._repr_html_()


@pytest.mark.notebook
@pytest.mark.slow
def test_a_real_kernel_shows_it_and_follows_its_controls(tmp_path: Path):
    cells = [
        "from vlmcourse.labs.memory_calculator import MemoryCalculator\ncalculator = MemoryCalculator()\ncalculator",
        "calculator.controls['ranks'].value = 64\ncalculator.controls['device'].value = 'v100-32'",
    ]
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown, moved = notebook.cells
    (output,) = shown.outputs
    assert "application/vnd.jupyter.widget-view+json" in output.data and not moved.outputs
    states: nbformat.NotebookNode = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"].state
    (html,) = [state.state["value"] for state in states.values() if state.model_name == "HTMLModel"]
    assert "v100-32 does not" in html
