"""What an optimizer step costs one rank: bytes stored, bytes kept for backward, bytes sent, seconds.

Enters: functions that make a step, by the name of the strategy, and what they train. Leaves: a `StepCost` each, to set
strategies side by side. Chapter 1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from vlmcourse.monitor.activations import ActivationMeter
from vlmcourse.monitor.ledger import Ledger, measure_ledger
from vlmcourse.parallel.counting import CollectiveCounter


class Trains(Protocol):
    """Whatever makes optimizer steps, such as a `Trainer`."""

    model: nn.Module
    optimizer: Optimizer

    def train_step(self) -> object:
        """Make one optimizer step, on all ranks together."""
        ...


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
    seconds: tuple[float, ...] = ()
    """Of each timed step, in the order of the turns."""


def measure_step_costs(trainers: Mapping[str, Trains], num_warmup: int = 2, num_timed: int = 5) -> dict[str, StepCost]:
    """Run steps of several trainers in turns and measure them on this rank; all ranks must call this alike.

    In turns, so that a machine with other things to do slows all of them down and not one.

    Args:
        trainers: by name; they must not share parameters.
        num_warmup: steps of each before anything is measured: strategies arrange their buffers in the first.
        num_timed: steps of each that are timed and not watched; watching costs time.

    Returns:
        What one step of each costs this rank.
    """
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(num_warmup + num_timed):
        for name, trainer in trainers.items():
            _finish_work()  # of the one before
            started_s = time.perf_counter()
            trainer.train_step()
            _finish_work()
            if turn >= num_warmup:
                seconds[name].append(time.perf_counter() - started_s)
    costs = {}
    for name, trainer in trainers.items():
        with CollectiveCounter() as counter:
            trainer.train_step()
        with ActivationMeter() as meter:
            trainer.train_step()
        state = measure_ledger(trainer.model, trainer.optimizer)
        times = seconds[name]
        costs[name] = StepCost(state, meter.peak_bytes, counter.sent_bytes, min(times), tuple(times))
    return costs


def _finish_work() -> None:
    """Wait until a GPU has done what it was asked: its kernels run on after the calls that start them return."""
    if torch.cuda.is_initialized():  # weights tell nothing: they may lie in main memory between steps
        torch.cuda.synchronize()
