"""All numbers that a diagnosis decides by, each with its reason, in one place.

Nothing is a law of nature here: a threshold says from where on something is worth a person's time. Chapter 6.
"""

from __future__ import annotations

WARMUP_STEPS = 2
"""The first steps allocate memory and start threads; in the second DDP arranges its buckets anew."""
MIN_STEPS = 5
"""Fewer say nothing of what is usual and what an exception."""
PAUSE_FACTOR = 30.0
"""A single time between two steps that is so many usual steps long, and holds no event, is a run that was resumed or a
machine that slept, and is left out."""

MIN_SHARE = 0.10
"""Of the time. Removing less gains less than 11 %, about what two equal runs on a shared machine differ by."""
MIN_SHARES = {
    "communication": 0.20,
    "slow_rank": 0.15,
}
"""Where it is another one than `MIN_SHARE`. Communication: a part cannot be hidden, the last bucket of gradients and
the sums of the loss, and where ranks share cores it holds waits for a core too. Slow rank: two processes on one machine
differ by a tenth for minutes, depending on what else runs there."""

HIDDEN_SHARE = MIN_SHARE / 2
"""Of the time: causes hide each other if one gains so much more after the others are cured than it does alone. A cause
that is just a finding counts then, where another hides half of it."""

SAME_RANK_FRACTION = 0.75
"""Of the steps in which a rank has the most work, from which on it is said to be always the same."""

SPIKE_FACTOR, SPIKE_SHARE = 4.0, 0.25
"""A step's wait is a spike if it is so many times the median wait, and so large a part of the median step."""
PERIODIC_TOLERANCE = 0.34
"""Spikes come regularly if no distance between two differs by more than this part from the median distance."""

DECODE_FRACTION, STORAGE_FRACTION = 0.5, 0.25
"""Loading uses the CPU as computing does, or not: CPU seconds a second of loading, over those a second of computing.
Above the first it decodes, below the second it waits for storage. The ratio does not depend on what else runs there."""

OPERATORS_PER_BLOCK = 200
"""Operations that forward and backward start per transformer block, embedding, head and loss shared out: counted by a
dispatch mode in the tiny model (a test does); those of other sizes have the same blocks."""
CPU_OPERATOR_S = 7e-6
"""CPU seconds that starting an operation takes, autograd's part included: the time of the tiny model at one sample,
less what grows with samples, over its operations, measured on the course's reference machine. Others differ by a factor
of about two."""
MAX_SLOWDOWN = 8.0
"""Of a process that does not have a core for itself: clock seconds over CPU seconds, at most."""
LOW_GPU_PERCENT = 60.0
"""A GPU in use for less of the time, though nothing else is waited for, waits for the host to start kernels."""

FREE_MEMORY_FRACTION = 0.85
"""Of the memory that kept activations may fill together with all else: above, the allocator has no room to move."""

NEAR_LIMIT_FRACTION = 0.92
"""Reserved memory above this part of the device is near its limit."""
RESERVED_DROP_FRACTION = 0.02
"""Reserved memory that falls by this part of the device from one step to the next was given back: the allocator could
not find room, freed its cache and started over."""
MANY_FAULTS = 100
"""Pages a step that had to be read from disk: at 0.1 ms each, 10 ms."""

THROTTLED_FRACTION = 0.2
"""Looks at the GPU that found it throttled, from which on a row counts as throttled."""
PCIE_BYTES_PER_S = 25e9
"""What PCIe 4.0 x 16 achieves of its 32 GB/s (PCI-SIG, 16 GT/s a lane); it decides only what share copies may have."""

MODEL_ERRORS = {
    "pipeline_bubble": 1.0,
    "small_kernels": 0.5,
    "recomputation": 0.5,
    "imbalance": 0.5,
    "communication": 0.5,
    "data_loading": 0.2,
    "slow_rank": 0.2,
}
"""How far off the time that a fix of a cause removes may be, as a part of it, besides what steps differ by anyway; that
of the others is measured. By what was found when the fixes were applied: bench/fix_gains.md."""
SHARED_CORE_SLOWDOWN, SHARED_CORE_NOISE = 1.5, 0.11
"""A process that waits so much longer for its core than it computes shares it; two equal runs then differ by this part
at least, however even the steps of one of them are."""
PROFILE_TOLERANCE = MIN_SHARE
"""A profile and the step log disagree if their shares of the time differ by more than what is worth a person's time."""


def min_share(cause: str) -> float:
    """Return the share of the time from which on a cause is a finding."""
    return MIN_SHARES.get(cause, MIN_SHARE)
