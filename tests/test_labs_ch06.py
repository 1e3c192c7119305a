"""Chapter 6: the predicted timeline, figures of a run's own numbers, FLOPs by torch's counter, and predictions."""

from __future__ import annotations

import math
import re
from typing import Any

import nbformat
import numpy as np
import pytest
from lab_cells import ROOT

from vlmcourse import plots
from vlmcourse.labs.ch06 import count_by_torch, mixed_samples, wide_shape
from vlmcourse.monitor.step_log import RankLog, StepRecord
from vlmcourse.planner.flops import StepFlops, Work, count_step_flops
from vlmcourse.planner.network import Link
from vlmcourse.planner.step_timeline import MIB, estimate_ddp_timeline
from vlmcourse.plots.monitoring import median_phases
from vlmcourse.spans import BACKWARD, COMMUNICATION, FORWARD, Span

FLOPS = StepFlops(forward=10e9, input_gradients=10e9, weight_gradients=10e9, recomputed=10e9)
NO_LATENCY = Link(latency_s=0.0, bytes_per_s=MIB)


def of_rank(spans: list[Span], rank: int, name: str) -> list[tuple[float, float]]:
    return [(round(s.start_s, 9), round(s.end_s, 9)) for s in spans if s.rank == rank and name in (s.name, s.lane)]


def test_a_predicted_step_recomputes_in_backward_and_sends_a_small_bucket_first() -> None:
    spans = estimate_ddp_timeline(FLOPS, 10e9, NO_LATENCY, 4 * MIB, num_ranks=2)
    for rank in range(2):
        assert of_rank(spans, rank, FORWARD) == [(0, 1)] and of_rank(spans, rank, BACKWARD) == [(1, 4)]
        # 2 ranks: an all-reduce of S bytes sends S. A quarter of the gradients is ready after a quarter of backward.
        assert of_rank(spans, rank, COMMUNICATION) == [(1.75, 2.75), (4, 7)]


def test_a_bucket_waits_for_the_one_before_it_and_one_rank_sends_nothing() -> None:
    slow = Link(latency_s=1.0, bytes_per_s=math.inf)  # two messages a bucket: 2 s each
    spans = estimate_ddp_timeline(FLOPS, 100e9, slow, 40 * MIB, num_ranks=2)
    first, *later = of_rank(spans, 0, COMMUNICATION)
    assert first == (0.1075, 2.1075)  # forward 0.1 s, backward 0.3 s, of which a fortieth
    assert later == [(2.1075, 4.1075), (4.1075, 6.1075)]
    alone = estimate_ddp_timeline(FLOPS, 10e9, slow, 40 * MIB, num_ranks=1)
    assert [span.name for span in alone] == [FORWARD, BACKWARD]


@pytest.mark.parametrize(("speed", "size", "ranks"), [(0.0, 1, 2), (math.inf, 1, 2), (1.0, 0, 2), (1.0, 1, 0)])
def test_numbers_out_of_range_are_refused(speed: float, size: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="need numbers above 0"):
        estimate_ddp_timeline(FLOPS, speed, NO_LATENCY, size, ranks)


def record(step: int, **values: Any) -> StepRecord:
    return StepRecord(step=step, start_s=0.0, step_s=9.0, **values)


def test_phases_are_medians_without_the_first_step_and_an_unknown_one_is_left_out() -> None:
    known = {"data_wait_s": 0.0, "forward_s": 1.0, "backward_s": 2.0, "optimizer_s": 0.5, "other_s": 0.0}
    late = [record(step, **known | {"forward_s": float(step)}) for step in (2, 3, 9)]
    log = RankLog([record(1, **known | {"forward_s": 99.0}), *late], [])
    found = median_phases(log)
    assert found["forward"] == 3.0 and found["backward"] == 2.0 and "communication" not in found
    [axes] = plots.plot_phases({1: log, 0: log}).axes
    widths = [1e3 * seconds for seconds in found.values()]
    bars: Any = axes.patches
    assert [bar.get_width() for bar in bars] == pytest.approx(widths * 2)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    with pytest.raises(ValueError, match="no step from 10 on"):
        median_phases(log, first_step=10)


def test_a_tower_without_values_has_no_line_and_no_rows_are_refused() -> None:
    rows = [{"step": s, "gradients/llm_norm": 1.0, "updates/llm_ratio": 0.1, "lr/llm": 1e-3 * s} for s in (5, 10)]
    figure = plots.plot_training_by_tower(rows)
    assert [len(axes.lines) for axes in figure.axes] == [1, 1, 1]
    assert np.asarray(figure.axes[2].lines[0].get_ydata()) == pytest.approx([5e-3, 1e-2])
    with pytest.raises(ValueError, match="has no row"):
        plots.plot_training_by_tower([])


def test_token_rates_are_stacked_in_thousands() -> None:
    [axes] = plots.plot_token_rates({"a": {"text": 2000.0, "image": 500.0, "padding": 100.0}}).axes
    bars: Any = axes.patches
    assert [bar.get_x() for bar in bars] == pytest.approx([0, 2, 2.5])
    assert [bar.get_width() for bar in bars] == pytest.approx([2, 0.5, 0.1])


def test_torch_counts_what_the_formula_does_for_the_wide_model_unless_attention_is_fused() -> None:
    shape, lengths, trained = wide_shape(), [24, 24], ("projector", "language")
    expected = count_step_flops(shape, Work.of_sequences(lengths, 2), trained, {"language": "full"}).hardware
    assert count_by_torch(shape, lengths, trained, {"language": "full"}) == expected
    assert count_by_torch(shape, lengths, trained, {"language": "full"}, sees_attention=False) < expected


def test_one_sample_of_three_has_no_picture_and_lengths_differ() -> None:
    samples = mixed_samples(18)
    assert [len(sample.images) for sample in samples[:6]] == [1, 1, 0, 1, 1, 0]
    assert len({len(sample.messages) for sample in samples if not sample.images}) == 3
    for sample in samples:
        if not sample.images:
            for question, answer in zip(sample.messages[::2], sample.messages[1::2], strict=True):
                assert sum(map(int, question.text.rstrip("?").split(" + "))) == int(answer.text)


def test_every_section_asks_for_a_prediction_before_it_shows_a_result() -> None:
    for name, sections in {
        "ch06_monitoring": range(8),
        "ch06b_diagnosis": (8, 9, 10, 12, 13),
        "ch07b_tuned": range(7, 12),
    }.items():
        cells = nbformat.read(ROOT / f"solutions/{name}/{name}.ipynb", as_version=4).cells
        for section in sections:
            mine = [cell for cell in cells if re.match(rf"s{section}(_|$)", cell.id)]
            asked = next((i for i, cell in enumerate(mine) if "\ncheck_prediction(" in cell.source), None)
            assert asked is not None, f"section {section}"
            assert any("**Predict" in cell.source for cell in mine[:asked]), f"section {section}"
            predicted = mine[asked].source.split(" = ")[0]
            assert any(f"guess({predicted}" in cell.source for cell in mine[asked + 1 :]), f"section {section}"
