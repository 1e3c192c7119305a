"""What was found about the split of a pipeline's layers, what was done about it, and both in words.

Enters: the present split, the best one found and their seconds by the measured times. Leaves: a `Proposal`, which says
whether it is proven to be the best, and a `Decision`, for `adaptive.py`, a log and a notebook. Chapter 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmcourse.parallel.layer_times import LayerTimes
from vlmcourse.parallel.moving import Moved
from vlmcourse.planner.stages import StageSplit


@dataclass(frozen=True)
class Proposal:
    """A split, and what it promises by the measured times."""

    present: StageSplit
    split: StageSplit
    times: LayerTimes
    before_s: float
    """Seconds of a step with the present split: the order that ran, with the measured times, messages left out."""
    after_s: float
    """The same of the proposed split."""
    least_s: float
    """No split has a shorter step; this is `after_s` where the search was exact, see `find_best_split`."""

    @property
    def is_exact(self) -> bool:
        """Whether it is proven that no split has a shorter step by these times."""
        return self.least_s >= self.after_s

    @property
    def gain_fraction(self) -> float:
        """By which share of its time a step becomes shorter."""
        return 1 - self.after_s / self.before_s if self.before_s else 0.0

    def __str__(self) -> str:
        proof = "proven: no split has a shorter step"
        if not self.is_exact:
            gap = math.ceil(1000 * (1 - self.least_s / self.after_s)) / 10  # rounded up: no split saves more
            proof = f"no proof that it is the best: another split may save up to {gap:g} % of that, no more"
        return (
            f"a step {1e3 * self.before_s:.3g} ms -> {1e3 * self.after_s:.3g} ms by the measured times, "
            f"a gain of {100 * self.gain_fraction:.1f} %; {proof}"
        )


@dataclass(frozen=True)
class Decision:
    """What was done with a proposal."""

    step: int
    """Optimizer steps that the scheduler had seen."""
    proposal: Proposal
    moved: Moved | None
    """This rank's part in the move; None if all layers stayed."""
    reason: str
    """The same on every rank."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}"
