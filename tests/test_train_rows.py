"""Rows of a run: names, and what is absent."""

from __future__ import annotations

import math

from vlmcourse.monitor.metrics import TokenCount
from vlmcourse.train.report import StepReport
from vlmcourse.train.rows import COLUMNS, build_row


def test_a_row_has_only_known_names_in_the_order_of_the_columns_and_only_values_that_are_there() -> None:
    step = StepReport(7, 2.5, math.inf, {"vision": 1e-3, "language": 2e-3}, TokenCount(), 0.5, skipped=True)
    measured = {"performance/mfu": 0.25, "performance/hfu": None, "memory/peak_rss_gib": math.nan, "loss/vision": 2.0}
    row = build_row(step, TokenCount(text=10, visual=20, supervised=5), 3.0, measured=measured)
    assert row == {
        "step": 7,
        "time/seconds": 3.0,
        "loss/total": 2.5,
        "loss/vision": 2.0,
        "lr/vision": 1e-3,
        "lr/llm": 2e-3,
        "performance/tokens_per_second": 30,
        "performance/text_tokens_per_second": 10,
        "performance/image_tokens_per_second": 20,
        "performance/supervised_tokens_per_second": 5,
        "performance/mfu": 0.25,
    }
    assert list(row) == [name for name in COLUMNS if name in row] and len(set(COLUMNS)) == len(COLUMNS)
    assert build_row(step, TokenCount(), 3.0, exact_match=0.0)["eval/exact_match"] == 0
