"""What a placement of layers may be made good at, besides the time of its slowest stage, which is what counts.

Enters: costs of layers and a number of stages. Leaves: the best value of an objective over all placements, or over
those whose slowest stage is the fastest. Cases are drawn so that the two differ, and answers are recognized by theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

EXACT = 1e-9

SLOWEST, SQUARES, DEVIATION, DEVIATIONS, FASTEST = "slowest", "squares", "deviation", "deviations", "fastest"
SPREAD = "spread"

_VALUES: dict[str, tuple[Callable[[Any, float], Any], Callable[[Any, Any], Any]]] = {
    SLOWEST: (lambda stage, mean: stage, np.maximum),
    SQUARES: (lambda stage, mean: (stage / mean) ** 2, np.add),
    DEVIATION: (lambda stage, mean: abs(stage - mean), np.maximum),
    DEVIATIONS: (lambda stage, mean: abs(stage - mean), np.add),
    FASTEST: (lambda stage, mean: -stage, np.maximum),
}
"""What one stage of a cost adds to an objective, given the mean of all stages, and how stages are put together."""


def value(objective: str, stages: Sequence[float]) -> float:
    """Return the value of an objective, to be made small, for stages of these costs."""
    if objective == SPREAD:
        return max(stages) - min(stages)
    of_stage, join = _VALUES[objective]
    return float(join.reduce(of_stage(np.asarray(stages), math.fsum(stages) / len(stages))))


def least(objective: str, costs: Sequence[float], num_stages: int, low: float = 0.0, high: float = math.inf) -> float:
    """Return the least value of an objective over placements whose stages cost from `low` to `high`; inf if none do."""
    if objective == SPREAD:
        return _least_spread(tuple(costs), num_stages)
    return _least(objective, tuple(costs), num_stages, low, high)


@lru_cache(4096)  # feedback asks for the same cases again and again
def _least(objective: str, costs: tuple[float, ...], num_stages: int, low: float, high: float) -> float:
    stages, is_stage = _all_stages(costs)
    of_stage, join = _VALUES[objective]
    allowed = is_stage & (stages >= low * (1 - EXACT)) & (stages <= high * (1 + EXACT))
    values = np.where(allowed, of_stage(stages, stages[0, -1] / num_stages), np.inf)
    best = values[0]
    for _ in range(num_stages - 1):
        best = join(best[:, None], values).min(axis=0)
    return float(best[-1])


def misleads(objective: str, costs: Sequence[float], num_stages: int) -> bool:
    """Tell whether every placement that is best by an objective has a slowest stage slower than need be."""
    best = least(SLOWEST, costs, num_stages)
    if objective == SPREAD:
        # Among the placements with the fastest slowest stage, the least spread has the slowest fastest one.
        spread = best + least(FASTEST, costs, num_stages, high=best)
        return least(SPREAD, costs, num_stages) < spread - EXACT * best
    overall, among_best = (least(objective, costs, num_stages, high=high) for high in (math.inf, best))
    return overall < among_best - EXACT * max(abs(among_best), best)


def is_best(objective: str, costs: Sequence[float], stages: Sequence[float]) -> bool:
    """Tell whether stages of these costs have the least value of an objective."""
    got, wanted = value(objective, stages), least(objective, costs, len(stages))
    return got <= wanted + EXACT * max(abs(wanted), 1.0)


@lru_cache(64)
def _all_stages(costs: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the cost of the layers from a first (row) to before an end (column), and where that is a stage."""
    total = np.concatenate([[0.0], np.cumsum(costs)])
    stages = total[None, :] - total[:, None]
    return stages, np.triu(np.ones_like(stages, dtype=bool), 1)


@lru_cache(1024)
def _least_spread(costs: tuple[float, ...], num_stages: int) -> float:
    """Return the least difference of slowest and fastest stage, by trying what the fastest may cost."""
    stages, is_stage = _all_stages(costs)
    slowest, mean = least(SLOWEST, costs, num_stages), stages[0, -1] / num_stages
    found = slowest + least(FASTEST, costs, num_stages, high=slowest)
    for low in np.unique(stages[is_stage])[::-1]:
        if low > mean * (1 + EXACT):
            continue
        if slowest - low >= found:
            break  # the slowest stage is at least as slow, so a faster fastest one only adds to the difference
        found = min(found, least(SLOWEST, costs, num_stages, low=float(low)) - float(low))
    return found
