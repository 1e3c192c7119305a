"""What the feedback of a check says about a learner's code: its line that failed, what it printed, and why it waits."""

from __future__ import annotations

from typing import Any

from lab04_1_answers import RIGHT_RUNS
from torch import Tensor

from vlmcourse.grading import lab04_1

# --- Chains ---------------------------------------------------------------------------------------------------------


def test_a_chain_that_uses_its_lists_up_gets_full_marks(capsys: Any) -> None:
    def use_up(layers: list[Any], x: Tensor, segments: list[tuple[int, int]]) -> Tensor:
        output = RIGHT_RUNS[0](list(layers), x, list(segments))
        while layers:
            layers.pop(0)
        segments.clear()
        return output

    assert lab04_1.check_run(use_up, 6, seed=3) == 6, capsys.readouterr().out
