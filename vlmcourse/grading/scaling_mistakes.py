"""Exercise 4.6's misconceptions about speed-up, efficiency and Amdahl's serial fraction.

Enters: numbers that a learner's functions gave. Leaves: sentences to stand behind "It looks as if". Each is a wrong
assumption in a formula that has to give all of a learner's numbers; see `assumptions.py`. Those about the split and
the fixes are in `scaling_mistakes_split.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vlmcourse.grading.assumptions import Aspects, Choice, find_assumptions
from vlmcourse.grading.scaling_cases import SerialCase, SpeedCase
from vlmcourse.grading.scaling_fits import fit_relative, fit_speeds, fit_weighted, share

Answers = list[tuple[Any, float]]
PERCENT: list[Choice] = [("", 1), ("you returned percent: return a fraction, 0.65 for 65 %", 100)]

# --- Speed-up and efficiency ----------------------------------------------------------------------------------------

SPEED_ASPECTS: Aspects = {
    "speedup_of": [
        ("", lambda case, kind: case.right(kind)[0]),
        (
            "for weak scaling you used the formula of strong scaling: there each rank does as much as the one did, so "
            "N ranks make N times the samples in a step, and the speed-up is N T(1) / T(N)",
            lambda case, kind: case.right("strong")[0],
        ),
        (
            "for strong scaling you used the formula of weak scaling: there N ranks share the work of the one, and the "
            "speed-up is T(1) / T(N)",
            lambda case, kind: case.right("weak")[0],
        ),
        (
            "you divided the time of N ranks by that of one: a speed-up above 1 is faster",
            lambda case, kind: 1 / case.right(kind)[0],
        ),
        (
            "you swapped the two kinds of scaling",
            lambda case, kind: case.right("weak" if kind == "strong" else "strong")[0],
        ),
    ],
    "unit": PERCENT,
}
EFFICIENCY_ASPECTS: Aspects = SPEED_ASPECTS | {
    "share": [
        ("", lambda speedup, n: speedup / n),
        ("you took the speed-up for the efficiency: divide it by the number of ranks", lambda speedup, n: speedup),
        ("you divided by N - 1: all N ranks cost something", lambda speedup, n: speedup / (n - 1)),
        ("you returned what is lost: the efficiency is 1 minus it", lambda speedup, n: 1 - speedup / n),
        ("you multiplied the speed-up by the number of ranks", lambda speedup, n: speedup * n),
    ],
}


def _speed_formula(asked: tuple[SpeedCase, str], *, speedup_of: Callable[..., float], unit: float) -> float:
    return speedup_of(*asked) * unit


def _efficiency_formula(
    asked: tuple[SpeedCase, str], *, speedup_of: Callable[..., float], share: Callable[..., float], unit: float
) -> float:
    return share(speedup_of(*asked), asked[0].num_ranks) * unit


def explain_speeds(speedups: Answers, efficiencies: Answers) -> list[str]:
    """Name the wrong assumptions behind speed-ups and efficiencies; each case comes with its kind of scaling."""
    found = find_assumptions(speedups, _speed_formula, SPEED_ASPECTS)
    found += find_assumptions(efficiencies, _efficiency_formula, EFFICIENCY_ASPECTS)
    return list(dict.fromkeys(found))


# --- Amdahl's fraction ----------------------------------------------------------------------------------------------

ONE_POINT = (
    "you took Amdahl's fraction from the largest number of ranks alone: one point always gives one, and with it all of "
    "that point's error and none of the others' evidence; fit all points"
)


def _ends(case: SerialCase, first: int, last: int) -> float:
    """Solve s + p / N for two of the points."""
    n, m, t, u = case.ranks[first], case.ranks[last], case.step_s[first], case.step_s[last]
    parallel = (t - u) / (1 / n - 1 / m)
    serial = t - parallel / n
    return serial / (serial + parallel)


def _karp_flatt(case: SerialCase, point: int) -> float:
    """Return Karp and Flatt's metric with the first time as that of one rank."""
    n = case.ranks[point]
    return (n * case.step_s[point] / case.step_s[0] - 1) / (n - 1)


def _relative(case: SerialCase) -> tuple[float, float]:
    return fit_relative(case.ranks, case.step_s)


def _through_first(case: SerialCase) -> float:
    """Fit t / t_first = f + (1 - f) / N, as if the first were one rank."""
    x = np.array([1 - 1 / n for n in case.ranks])
    y = np.array(case.step_s) / case.step_s[0] - np.array([1 / n for n in case.ranks])
    return float((x * y).sum() / (x * x).sum())


SERIAL_ASPECTS: Aspects = {
    "fraction_of": [
        ("", lambda case: case.fraction),
        (ONE_POINT, lambda case: _karp_flatt(case, -1)),
        (
            "you solved Amdahl's law for the first and the last point: two points always fit, and the others are "
            "evidence; fit all of them",
            lambda case: _ends(case, 0, -1),
        ),
        (
            "you averaged a fraction of each point: small numbers of ranks are given the same weight, though their "
            "times hardly depend on it, and the first time carries its error into all of them; fit all points at once",
            lambda case: float(np.mean([_karp_flatt(case, i) for i in range(1, len(case.ranks))])),
        ),
        (
            "you minimised errors in seconds: the longest step decides nearly all; each time is off by some percent of "
            "itself, so minimise relative errors",
            lambda case: share(fit_weighted(case.ranks, case.step_s, [1.0] * len(case.ranks))),
        ),
        (
            "you drew a line through N times the step over N, and minimised its errors: they grow with N, so the "
            "largest numbers of ranks decide nearly all; minimise errors relative to each time",
            lambda case: share(fit_weighted(case.ranks, case.step_s, case.ranks)),
        ),
        (
            "you minimised errors in speed-ups: they are the largest where most ranks are, which then decide nearly "
            "all; each time is off by some percent of itself, so minimise relative errors",
            lambda case: share(fit_speeds(case.ranks, case.step_s)),
        ),
        (
            "you took the first time for that of one rank: where one was not measured, its time is s + p of the fit",
            _through_first,
        ),
        (
            "you divided the serial time by the first time measured: the fraction is of the time on one rank, s + p",
            lambda case: _relative(case)[0] / case.step_s[0],
        ),
        (
            "you divided the serial time by the shared one: the fraction is of their sum, the time on one rank",
            lambda case: _relative(case)[0] / _relative(case)[1],
        ),
        (
            "you returned the serial seconds: asked is their share of the time on one rank",
            lambda case: _relative(case)[0],
        ),
        (
            "you returned the fraction that is shared: asked is the serial one, 1 minus it",
            lambda case: 1 - case.fraction,
        ),
        (
            "you took what is lost on the most ranks for the serial fraction: one of 7.7 % costs 8 ranks 35 %",
            lambda case: 1 - case.step_s[0] / case.step_s[-1] * case.ranks[0] / case.ranks[-1],
        ),
    ],
    "unit": PERCENT,
}


def _serial_formula(case: SerialCase, *, fraction_of: Callable[[SerialCase], float], unit: float) -> float:
    return fraction_of(case) * unit


def explain_fractions(answers: Answers) -> list[str]:
    """Name the wrong assumptions behind serial fractions, each of a `SerialCase`."""
    return find_assumptions(answers, _serial_formula, SERIAL_ASPECTS)
