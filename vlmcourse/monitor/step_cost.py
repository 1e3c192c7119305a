"""What an optimizer step costs one rank: bytes stored, bytes kept for backward, bytes sent, seconds.

Enters: a function that makes a step, and what it trains. Leaves: a `StepCost`, to set strategies side by side. Chapter 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from vlmcourse.monitor.activations import ActivationMeter
from vlmcourse.monitor.ledger import Ledger, measure_ledger
from vlmcourse.parallel.counting import CollectiveCounter


@dataclass(frozen=True)
class StepCost:
    """One rank's costs of one optimizer step."""

    state: Ledger
    """Between steps."""
    activations_bytes: int
    """Kept for backward, at the fullest moment."""
    sent_bytes: float
    """If every collective runs as a ring in its group."""
    step_s: float
    """Of the fastest of the timed steps."""


def measure_step_cost(
    step: Callable[[], object], model: nn.Module, optimizer: Optimizer, num_warmup: int = 2, num_timed: int = 5
) -> StepCost:
    """Run steps and measure them on this rank; all ranks must call it.

    Args:
        step: makes one optimizer step, on all ranks together.
        model: under any strategy.
        optimizer: of its parameters.
        num_warmup: steps before anything is measured: strategies arrange their buffers in the first.
        num_timed: steps that are timed and not watched; watching costs time.
    """
    for _ in range(num_warmup):
        step()
    seconds = []
    for _ in range(num_timed):
        started_s = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started_s)
    with CollectiveCounter() as counter:
        step()
    with ActivationMeter() as meter:
        step()
    state = measure_ledger(model, getattr(optimizer, "optim", optimizer))  # zero1: this rank's own part
    return StepCost(state, meter.peak_bytes, counter.sent_bytes, min(seconds))
