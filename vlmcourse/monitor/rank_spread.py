"""Which rank is the slowest, and by how much: one rule for a run's rows, its live view and its traces.

Enters: by rank, the time that it needed for itself, waits for others left out. Leaves: the rank with the most, and that
time over the median of the *others*. A median that had the slowest rank in it would hide it: of two ranks it is their
mean, so that no rank could ever be found twice as slow. No torch. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median


def find_slowest(own: Mapping[int, float]) -> tuple[int, float | None]:
    """Return the slowest rank and how many times the median of the others it takes.

    Args:
        own: by rank, its own work, all in one unit; of one rank or more.

    Returns:
        The rank, the lowest of those that take equally long, and a factor of 1 or more: None with one rank, or where
        the others' median is 0.
    """
    slowest = max(own, key=lambda rank: own[rank])
    others = [value for rank, value in own.items() if rank != slowest]
    middle = median(others) if others else 0.0
    return slowest, own[slowest] / middle if middle > 0 else None


def describe_slowest(num_ranks: int) -> str:
    """Say what the factor is of, in words that follow "times"."""
    return "the other rank's" if num_ranks == 2 else "the median of the others'"
