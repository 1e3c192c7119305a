"""The names of what a run logs, and one row of it.

Enters: a step's report, and what else was measured, by name. Leaves: a flat mapping whose names are those of every log
file and logger, the same on every rank but for `time/seconds`, which is by a rank's own clock. A value that was not or
cannot be measured is absent, never 0: the norm of a step that a loss scaler skipped, the exact match of a step that was
not evaluated, MFU on a machine whose peak nobody knows.

All that is "per second", MFU and HFU are over one clock: the seconds since the last row that were in steps, of the rank
with the most of them (a step is over when the slowest rank's is). What comes between steps is left out: callbacks,
saves, evaluations, log rows. `performance/wall_tokens_per_second` has it all in it: the same tokens over all the time
since the last row. A diagnosis counts so too, of the steps that it looks at. Chapter 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vlmcourse.config import TOWERS
from vlmcourse.monitor.metrics import TokenCount

if TYPE_CHECKING:
    from vlmcourse.train.report import StepReport

TOWER_NAMES = {"vision": "vision_encoder", "projector": "projector", "language": "llm"}
"""The package's towers -> what they are called in names of gradients and updates."""
RATE_NAMES = {"vision": "vision", "projector": "projector", "language": "llm"}
"""The package's towers -> what they are called in names of learning rates."""
PARTS = ("data_wait", "forward", "backward", "communication", "optimizer", "other")
"""Of a step, in names of performance."""
LOSS = "loss/"
"""What the name of every loss begins with."""
OWNERS = ("weights", "gradients", "optimizer", "buffers")
"""Of the bytes of a rank's training state, in names of memory: those of `monitor.ledger.Ledger`."""
COLUMNS = (
    *("step", "time/seconds", "loss/total", "loss/vision", "loss/language", "eval/exact_match", "gradients/norm"),
    *(f"gradients/{TOWER_NAMES[tower]}_norm" for tower in TOWERS),
    *(f"updates/{TOWER_NAMES[tower]}_ratio" for tower in TOWERS),
    *(f"lr/{RATE_NAMES[tower]}" for tower in TOWERS),
    *("performance/tokens_per_second", "performance/wall_tokens_per_second"),
    *(f"performance/{kind}_tokens_per_second" for kind in ("text", "image", "padding", "supervised")),
    *("performance/samples_per_second", "performance/mfu", "performance/hfu", "performance/step_seconds"),
    *(f"performance/{part}_seconds" for part in PARTS),
    *("performance/slowest_rank", "performance/rank_spread", "performance/gpu_util", "performance/memory_used_gb"),
    *("memory/peak_allocated_gib", "memory/peak_reserved_gib", "memory/peak_rss_gib"),
    *(f"memory/{owner}_gib" for owner in OWNERS),
)
"""Every name that a row may have, in the order of a table, but for `loss/<kind>` of a dataset's own kinds of answers
(`Message.kind`), which stand after the other losses."""


def build_row(
    step: StepReport,
    seconds: float,
    exact_match: float | None = None,
    measured: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """Return one row.

    Args:
        step: the step it describes.
        seconds: wall time since the run (or its resumed part) began.
        exact_match: 0 to 1, or None where this step was not evaluated.
        measured: further values by their names in `COLUMNS`, or as `loss/<kind>`; None where there is none.
    """
    row: dict[str, Any] = {
        "step": step.step,
        "time/seconds": seconds,
        "loss/total": step.loss,
        "eval/exact_match": exact_match,
        "gradients/norm": step.grad_norm,
        **{f"lr/{RATE_NAMES[tower]}": rate_of for tower, rate_of in step.learning_rates.items()},
        **(measured or {}),
    }
    known = {name: value for name, value in row.items() if value is not None and math.isfinite(value)}
    kinds = sorted(name for name in known.keys() - set(COLUMNS) if name.startswith(LOSS))
    after = COLUMNS.index("loss/language") + 1
    return {name: known[name] for name in (*COLUMNS[:after], *kinds, *COLUMNS[after:]) if name in known}


def name_token_rates(tokens: TokenCount, seconds: float, wall_s: float) -> dict[str, float | None]:
    """Return tokens per second by their names in a row; nothing where no time has passed.

    Args:
        tokens: of all ranks since the last row.
        seconds: in steps since then, of the rank with the most.
        wall_s: all time since then.
    """
    if seconds <= 0:
        return {}
    rate = tokens.per_second(seconds)
    return {
        "performance/tokens_per_second": rate.total,
        "performance/wall_tokens_per_second": tokens.per_second(wall_s).total,
        "performance/text_tokens_per_second": rate.text,
        "performance/image_tokens_per_second": rate.visual,
        "performance/supervised_tokens_per_second": rate.supervised,
    }
