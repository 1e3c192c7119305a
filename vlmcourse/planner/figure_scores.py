"""How far predictions are from published figures: errors, rank correlation, regret. Standard library only.

Enters: pairs of predicted and measured numbers, with the group that each plan was chosen from. Leaves: numbers in per
cent, or None where a figure has nothing to say. Chapter 7.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence

MIN_RANKED = 3
"""Plans that a choice must have for a rank correlation to say anything."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, by straight lines between the sorted values.

    Raises:
        ValueError: if there are no values, or percent is not in 0 .. 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"{len(values)} values, percent = {percent}: need at least one value, and 0 to 100")
    ordered = sorted(values)
    position = percent / 100 * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def error_summary(pairs: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Return the median and the 90th percentile of |predicted / measured - 1|, in per cent.

    Args:
        pairs: predicted and measured, measured above 0.

    Returns:
        Two numbers, or None twice where there are no pairs.
    """
    errors = [100 * abs(predicted / measured - 1) for predicted, measured in pairs]
    return (statistics.median(errors), percentile(errors, 90)) if errors else (None, None)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value from 0; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks, first = [0.0] * len(values), 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for index in order[first : last + 1]:
            ranks[index] = (first + last) / 2
        first = last + 1
    return ranks


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation, or None where one side has no two different values."""
    predicted, measured = (_ranks(side) for side in zip(*pairs, strict=True)) if pairs else ([], [])
    if len(set(predicted)) < 2 or len(set(measured)) < 2:
        return None
    return statistics.correlation(predicted, measured)


def _choices(triples: Sequence[tuple[Hashable, float, float]]) -> list[list[tuple[float, float]]]:
    """Return the pairs of each choice, in the order of the first."""
    found: dict[Hashable, list[tuple[float, float]]] = {}
    for choice, predicted, measured in triples:
        found.setdefault(choice, []).append((predicted, measured))
    return list(found.values())


def mean_spearman(triples: Sequence[tuple[Hashable, float, float]]) -> float | None:
    """Return the mean of the rank correlations of choices, each weighed by its plans.

    Args:
        triples: what the plan was chosen for (a model and a number of GPUs), predicted and measured.
    """
    known = [(spearman(pairs), len(pairs)) for pairs in _choices(triples) if len(pairs) >= MIN_RANKED]
    weighed = [(value, count) for value, count in known if value is not None]
    return sum(value * count for value, count in weighed) / sum(count for _, count in weighed) if weighed else None


def mean_regret_pct(triples: Sequence[tuple[Hashable, float, float]]) -> float | None:
    """Return how much slower the plan predicted to be best is than the best measured: the mean over choices, per cent.

    Args:
        triples: as for `mean_spearman`; more is better. Of plans predicted equal the worst is taken.
    """
    regrets = [
        100 * (1 - max(pairs, key=lambda pair: (pair[0], -pair[1]))[1] / max(measured for _, measured in pairs))
        for pairs in _choices(triples)
        if len(pairs) > 1
    ]
    return statistics.mean(regrets) if regrets else None
