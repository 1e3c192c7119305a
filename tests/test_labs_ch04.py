"""Chapter 4's glue and text: things timed in turns, forward's share measured, numbers that a prediction needs given."""

from __future__ import annotations

import re

import nbformat
import pytest
from lab_cells import ROOT

from vlmcourse.labs import ch04, chain
from vlmcourse.models.vlm import build_model
from vlmcourse.planner.layer_activations import count_language_layer_bytes
from vlmcourse.presets import get_model
from vlmcourse.train.activations import covered_blocks
from vlmcourse.values import ConfigError


def read_cell(name: str) -> str:
    """Return a cell's text by its id."""
    path = ROOT / "solutions" / "ch04_checkpointing" / "ch04_checkpointing.ipynb"
    return next(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.id == name)


def test_things_compared_take_turns_and_what_prepares_them_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(chain, "seconds_of", lambda run: run() or float(len(order)))
    runs = {
        name: (lambda name=name: order.append(f"set {name}"), lambda name=name: order.append(name)) for name in "ab"
    }
    assert chain.seconds_in_turns(runs, 2) == {"a": [2, 6], "b": [4, 8]}
    assert order == ["set a", "a", "set b", "b"] * 2
    assert chain.Repeats.of([3, 2, 5], unit_s=2) == chain.Repeats(1, 2.5)


def test_chain_tells_forward_s_share_and_the_spread_of_its_repeats() -> None:
    plain, results = ch04.measure_chain((2, 4), 8, num_rows=32, width=32, num_runs=1)
    assert 0 < plain.forward_share < 1 and plain.time.least == 1
    assert all(r.time.least <= r.time.greatest for r in results)
    # The chain's own input is the caller's; the product before a ReLU is alive for a moment: one for one.
    assert [r.peak for r in results] == [8 / 2 + 2, 8 / 4 + 4]


def test_policies_tell_forward_s_share_and_the_spread_of_their_repeats() -> None:
    model, batch = ch04.load_deep(num_samples=1, num_layers=2)
    share, results = ch04.measure_policies(model, batch, ("none", "full"), num_runs=2)
    assert 0 < share < 1 and results["none"].time.least == 1
    assert results["full"].peak_bytes < results["none"].peak_bytes and results["full"].gradient_error == 0
    rows = ch04.as_rows(results)
    assert [row[0] for row in rows] == ["none", "full"] and all(
        float(str(row[2])) <= float(str(row[3])) for row in rows
    )
    assert len(rows[0]) == 5


def test_prediction_of_a_layer_can_be_worked_out_from_the_text() -> None:
    """The rule of section 3, with the numbers that it gives, is the formula for `tiny` on a CPU."""
    text, tiny = " ".join((read_cell("s3") + read_cell("s3_predict_text")).split()), get_model("tiny").language
    numbers = re.search(r"D = (\d+), F = (\d+), (\d+) heads of queries, (\d+) of keys and of values", text)
    assert numbers, "the text gives widths and heads"
    width, hidden, heads, kv_heads = map(int, numbers.groups())
    shape = (tiny.hidden_size, tiny.mlp_size, tiny.num_heads, tiny.num_kv_heads)
    assert (width, hidden, heads, kv_heads) == shape
    assert "on a CPU" in text, "there an RMSNorm keeps one tensor more"
    norms = 2 * (3 * width + 1)
    attention = 2 * width + 2 * kv_heads * (width // heads) + heads
    expected = 4 * 80 * (norms + attention + 4 * hidden)
    assert sum(count_language_layer_bytes(tiny, 2, 40, 4).values()) == expected


def test_a_policy_that_covers_nothing_or_is_none_is_refused_by_the_chapters_own_call() -> None:
    model = build_model(get_model("tiny"), seed=0)
    depth = len(model.vision.blocks)
    with pytest.raises(ConfigError, match=f"activations.vision = 'every:9': the tower has {depth} blocks; choose a k"):
        ch04.set_policies(model, "every:9", "none")
    with pytest.raises(ConfigError, match="activations.language = 'fulll': did you mean 'full'"):
        ch04.set_policies(model, "none", "fulll")
    ch04.set_policies(model, f"every:{depth}", "full")
    assert covered_blocks(model.vision) == [depth - 1]
