"""Amdahl's law fitted by one measure of error or another: what exercise 4.6 tells apart.

Enters: numbers of ranks and measured steps. Leaves: seconds that are serial and seconds that are shared, s + p / N. The
law is linear in both, so that errors in seconds and in percent of a step have a formula; others are reached from there
by Gauss and Newton's steps. The right answer is `planner.scaling_fit`'s, and not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NUM_ITERATIONS = 12
"""Each gives several digits more: the start is near."""


def fit_weighted(ranks: Sequence[int], step_s: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return serial and shared seconds that minimise the sum of squares of weight x error in seconds."""
    weight = np.asarray(weights, dtype=np.float64)
    return _solve(_rows(ranks) * weight[:, None], np.asarray(step_s) * weight)


def fit_relative(ranks: Sequence[int], step_s: Sequence[float]) -> tuple[float, float]:
    """Return serial and shared seconds that minimise errors in percent of the measured step."""
    return fit_weighted(ranks, step_s, [1 / step for step in step_s])


def fit_errors(
    ranks: Sequence[int],
    step_s: Sequence[float],
    error: Callable[[Array, Array], Array],
    slope: Callable[[Array, Array], Array],
) -> tuple[float, float]:
    """Return serial and shared seconds that minimise another error.

    Args:
        ranks: of each measurement.
        step_s: measured.
        error: of the law's steps and the measured ones, in this order.
        slope: its derivative by the law's step.
    """
    rows, measured, found = _rows(ranks), np.asarray(step_s), np.array(fit_relative(ranks, step_s))
    for _ in range(NUM_ITERATIONS):
        law_s = rows @ found
        found = found + np.array(_solve(rows * slope(law_s, measured)[:, None], -error(law_s, measured)))
    return float(found[0]), float(found[1])


def fit_speeds(ranks: Sequence[int], step_s: Sequence[float]) -> tuple[float, float]:
    """Return serial and shared seconds that minimise errors in speed-ups, the inverse of step times."""
    return fit_errors(ranks, step_s, lambda law, seen: 1 / law - 1 / seen, lambda law, seen: -1 / law**2)


def fit_logarithms(ranks: Sequence[int], step_s: Sequence[float]) -> tuple[float, float]:
    """Return serial and shared seconds that minimise errors in logarithms: relative ones, too small to differ."""
    return fit_errors(ranks, step_s, lambda law, seen: np.log(law / seen), lambda law, seen: 1 / law)


def fit_relative_to_law(ranks: Sequence[int], step_s: Sequence[float]) -> tuple[float, float]:
    """Return serial and shared seconds that minimise errors in percent of the law's step."""
    return fit_errors(ranks, step_s, lambda law, seen: seen / law - 1, lambda law, seen: -seen / law**2)


def share(found: tuple[float, float]) -> float:
    """Return the serial fraction of the time on one rank."""
    return found[0] / sum(found)


def _rows(ranks: Sequence[int]) -> Array:
    return np.array([[1.0, 1 / n] for n in ranks])


def _solve(rows: Array, right: Array) -> tuple[float, float]:
    """Return the least squares of two unknowns, by the normal equations."""
    (aa, ab), (_, bb) = rows.T @ rows
    a, b = rows.T @ right
    determinant = aa * bb - ab * ab
    return float((a * bb - b * ab) / determinant), float((b * aa - a * ab) / determinant)
