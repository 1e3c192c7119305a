"""What measured scaling can and cannot tell: whether it needs communication, and where one rank more stops paying.

Enters: `RankTimes` in several turns, and fits. Leaves: a `Comparison` of laws, and the last number of ranks that pays
with an interval. Chapter 6.

Source: the F test of nested models against the error that repeats show (Draper and Smith, "Applied regression
analysis", chapter 2); Efron 1979 for drawing again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmcourse.planner.scaling import MAX_RANKS, MIN_MARGINAL_SPEEDUP, RankTimes, find_last_paying
from vlmcourse.planner.scaling_fit import COMMUNICATION, ScalingFit, fit_amdahl, fit_communication

TELLS_APART = 0.05
"""Two laws can be told apart if chance alone would favour the richer one as much less often than this."""
FEW_TURNS = 5
"""With fewer turns, drawing from them shows less spread than there is."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Whether step times need communication to be described."""

    tells_apart: bool
    p_value: float
    """How often chance alone would favour communication as much; nan where that cannot be said."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def compare_laws(kind: str, times: Sequence[RankTimes]) -> Comparison:
    """Tell whether step times by themselves need terms of communication: an F test against the spread between turns.

    What slows a whole turn down is taken out first. Communication that was measured by itself is left out here: it is a
    proof of its own.

    Args:
        kind: strong or weak.
        times: of 3 or more numbers of ranks.

    Raises:
        ValueError: as `check_times` does.
    """
    bare = [RankTimes(num_ranks=one.num_ranks, step_s=one.step_s) for one in times]
    simple, richer = fit_amdahl(kind, bare), fit_communication(kind, bare)
    logs = np.log(np.array([one.step_s for one in bare]))
    num_sizes, num_turns = logs.shape
    beyond = 8 * max(one.num_ranks for one in bare)
    said = [f"{fit.predict_speedup(beyond):.1f} x" for fit in (simple, richer)]
    gap = f"for {beyond} ranks they say {said[0]} and {said[1]}"
    if num_turns < 2:
        sentence = f"one turn shows no spread, so nothing tells the two laws apart: {gap}"
        return Comparison(tells_apart=False, p_value=math.nan, sentence=sentence)
    more, spare = richer.num_terms - simple.num_terms, (num_sizes - 1) * (num_turns - 1)
    gain = max(0.0, _log_error(bare, simple) - _log_error(bare, richer))
    noise = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    p_value = _chance(gain * num_turns / more, float((noise**2).sum()) / spare, more, spare)
    tells = p_value < TELLS_APART
    if tells:
        sentence = f"with communication, {num_sizes} numbers of ranks are described better (p = {p_value:.3f}); {gap}"
    else:
        sentence = (
            f"{num_sizes} numbers of ranks in {num_turns} turns cannot tell a law without communication from one with "
            f"it (p = {p_value:.2f}), and {gap}: do not extrapolate from either"
        )
    return Comparison(tells_apart=tells, p_value=p_value, sentence=sentence)


@dataclass(frozen=True, kw_only=True)
class LastPaying:
    """The number of ranks at which one more no longer pays, by a fit; None stands for none up to `MAX_RANKS`."""

    num_ranks: int | None
    low: int | None
    high: int | None
    min_marginal: float
    is_extrapolated: bool
    """Beyond what was measured."""
    num_turns: int

    def __str__(self) -> str:
        value, low, high = (f"over {MAX_RANKS}" if n is None else str(n) for n in (self.num_ranks, self.low, self.high))
        noun = "rank" if self.num_ranks == 1 else "ranks"
        notes = ["beyond what was measured"] if self.is_extrapolated else []
        notes += [f"from {self.num_turns} turns, too few for its width"] if self.num_turns < FEW_TURNS else []
        said = f" ({'; '.join(notes)})" if notes else ""
        return (
            f"{value} {noun} ({low} to {high}), where one more adds under {self.min_marginal:g} to the speed-up{said}"
        )


def estimate_last_paying(
    times: Sequence[RankTimes],
    fit: ScalingFit,
    *,
    min_marginal: float = MIN_MARGINAL_SPEEDUP,
    num_resamples: int = 200,
    seed: int = 0,
) -> LastPaying:
    """Find where one rank more no longer pays, and an interval: turns are drawn again, and each draw is fitted.

    Args:
        times: that the fit was made from.
        fit: by `fit_amdahl` or `fit_communication`.
        min_marginal: see `find_last_paying`.
        num_resamples: draws.
        seed: of the draws.
    """
    again = fit_communication if fit.law == COMMUNICATION else fit_amdahl
    rng, num_turns = np.random.default_rng(seed), len(times[0].step_s)
    found = []
    for _ in range(num_resamples):
        turns = rng.integers(num_turns, size=num_turns)
        drawn = [_take_turns(one, turns) for one in times]
        last = find_last_paying(again(fit.kind, drawn).predict_speedup, min_marginal)
        found.append(math.inf if last is None else last)
    found.sort()
    edges = (found[int(0.025 * num_resamples)], found[min(num_resamples - 1, int(0.975 * num_resamples))])
    low, high = (None if math.isinf(edge) else int(edge) for edge in edges)
    value = find_last_paying(fit.predict_speedup, min_marginal)
    return LastPaying(
        num_ranks=value,
        low=low,
        high=high,
        min_marginal=min_marginal,
        is_extrapolated=value is None or value > max(one.num_ranks for one in times),
        num_turns=num_turns,
    )


def _log_error(times: Sequence[RankTimes], fit: ScalingFit) -> float:
    return sum(math.log(fit.predict_s(one.num_ranks) / one.mean_s) ** 2 for one in times)


def _chance(explained: float, noise: float, more: int, spare: int) -> float:
    """Return how often F is as large by chance; without any noise, 0 or 1."""
    from scipy.special import fdtrc

    if noise <= 0:
        return 0.0 if explained > 0 else 1.0
    return float(fdtrc(more, spare, explained / noise))


def _take_turns(times: RankTimes, turns: np.ndarray) -> RankTimes:
    def pick(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(values[turn] for turn in turns)

    waits = times.communication_s
    return RankTimes(
        num_ranks=times.num_ranks, step_s=pick(times.step_s), communication_s=None if waits is None else pick(waits)
    )
