"""What a timeline is made of: spans of time of a rank, and the names of the phases of a training step.

The same record holds what a profiler measured and what a planner predicts, so that one drawing shows either, or both
over each other. Imports no torch. Chapter 6.
"""

from __future__ import annotations

from typing import NamedTuple

DATA_WAIT, FORWARD, BACKWARD = "data_wait", "forward", "backward"
COMMUNICATION, OPTIMIZER = "communication", "optimizer"
PHASES = (DATA_WAIT, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)
"""What a training step does, in the order in which it first does it: load micro-batches, run them forward and
backward, wait for other ranks outside of these two, update the weights."""
OTHER = "other"
PHASE_LABELS = {
    DATA_WAIT: "waits for data",
    FORWARD: "forward",
    BACKWARD: "backward",
    COMMUNICATION: "waits for ranks",
    OPTIMIZER: "optimizer",
    OTHER: "other",
}
"""What a phase, and what is left of a step, is called wherever a person reads it: figures, dashboard and terminal."""

COMPUTE, DATA = "compute", "data"
LANES = (COMPUTE, COMMUNICATION, DATA, OPTIMIZER)
"""What a rank does at one time, a row each: a collective may be on its way while the rank computes."""


class Span(NamedTuple):
    """One thing that a rank did, or will do."""

    rank: int
    lane: str
    """The row of the rank in which it stands, such as one of `LANES`; "" where a rank has one row."""
    name: str
    """What it was, such as one of `PHASES`."""
    start_s: float
    """Seconds on a time axis that all ranks share."""
    end_s: float
