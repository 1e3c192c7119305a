"""What measured scaling can and cannot tell: whether steps grow with the ranks, and where one more stops paying.

Enters: `RankTimes` in several turns, and fits. Leaves: a `Comparison` of laws, and the last number of ranks that pays
with an interval: what was measured decides where it can, and a law that fits badly decides nothing. Chapter 6.

Source: the F test of nested models against the error that repeats show (Draper and Smith, "Applied regression
analysis", chapter 2); Efron 1979 for drawing again.
"""

from __future__ import annotations

import itertools
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
    """Whether step times need terms that grow with the ranks to be described; not why they grow."""

    tells_apart: bool
    p_value: float
    """How often chance alone would favour growth as much; nan where that cannot be said."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def compare_laws(kind: str, times: Sequence[RankTimes]) -> Comparison:
    """Tell whether step times by themselves need terms that grow with the ranks: an F test against the turns' spread.

    What slows a whole turn down is taken out first. Communication that was measured by itself is left out here: it is a
    proof of its own. Growth may be communication, or cores and memory that ranks share: step times do not tell which.

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
    gap = f"for {beyond} ranks a law without such growth says {said[0]}, and one with it {said[1]}"
    growth = "grow with the ranks" + (" beyond Amdahl's law" if kind == "strong" else "")
    if num_turns < 2:
        sentence = f"one turn shows no spread, so nothing tells whether step times {growth}: {gap}"
        return Comparison(tells_apart=False, p_value=math.nan, sentence=sentence)
    more, spare = richer.num_terms - simple.num_terms, (num_sizes - 1) * (num_turns - 1)
    gain = max(0.0, _log_error(bare, simple) - _log_error(bare, richer))
    noise = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    p_value = _chance(gain * num_turns / more, float((noise**2).sum()) / spare, more, spare)
    tells = p_value < TELLS_APART
    if tells:
        sentence = (
            f"step times {growth} (p = {p_value:.3f}); by communication, or by cores and memory that ranks share, they "
            f"do not say; {gap}"
        )
    else:
        sentence = (
            f"{num_sizes} numbers of ranks in {num_turns} turns cannot tell whether step times {growth} "
            f"(p = {p_value:.2f}), and {gap}: do not extrapolate from either"
        )
    return Comparison(tells_apart=tells, p_value=p_value, sentence=sentence)


@dataclass(frozen=True, kw_only=True)
class LastPaying:
    """The number of ranks at which one more no longer pays: as measured where that decides it, else by a good fit."""

    num_ranks: int | None
    """None: by the fit, all up to `MAX_RANKS` pay."""
    low: int | None
    high: int | None
    """None: no end was found, by the fit up to `MAX_RANKS`, or without one among what was measured."""
    min_marginal: float
    is_extrapolated: bool
    """Beyond what was measured."""
    num_turns: int
    is_fitted: bool = True
    """False where the fit is poor: then `num_ranks` is the largest measured number that still paid."""

    def __str__(self) -> str:
        if not self.is_fitted and self.high is None:
            return (
                f"{self.num_ranks} ranks and more: all measured ones pay; the law fits too poorly to say how many more"
            )
        none = f"over {MAX_RANKS}"
        value, low, high = (none if n is None else str(n) for n in (self.num_ranks, self.low, self.high))
        noun = "rank" if self.num_ranks == 1 else "ranks"
        notes = ["beyond what was measured"] if self.is_extrapolated else []
        notes += [] if self.is_fitted else ["as measured; the law fits too poorly to say more"]
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

    What the measured speed-ups add from one number of ranks to the next comes first; a good fit says where between two
    of them, or beyond all of them, the end is. A poor fit says nothing: the end is then between measured numbers.

    Args:
        times: that the fit was made from.
        fit: by `fit_amdahl` or `fit_communication`.
        min_marginal: see `find_last_paying`.
        num_resamples: draws.
        seed: of the draws.
    """
    again = fit_communication if fit.law == COMMUNICATION else fit_amdahl
    rng, num_turns = np.random.default_rng(seed), len(times[0].step_s)
    lows, highs = [], []
    for _ in range(num_resamples):
        turns = rng.integers(num_turns, size=num_turns)
        drawn = [_take_turns(one, turns) for one in times]
        low, high = _find_end(drawn, again(fit.kind, drawn), min_marginal, is_fitted=fit.is_good)
        lows.append(low)
        highs.append(high)
    edges = (
        sorted(lows)[int(0.025 * num_resamples)],
        sorted(highs)[min(num_resamples - 1, int(0.975 * num_resamples))],
    )
    end, _ = _find_end(times, fit, min_marginal, is_fitted=fit.is_good)
    value, low, high = (None if math.isinf(edge) else int(edge) for edge in (end, *edges))
    return LastPaying(
        num_ranks=value,
        low=low,
        high=high,
        min_marginal=min_marginal,
        is_extrapolated=value is None or value > max(one.num_ranks for one in times),
        num_turns=num_turns,
        is_fitted=fit.is_good,
    )


def _find_end(
    times: Sequence[RankTimes], fit: ScalingFit, min_marginal: float, *, is_fitted: bool
) -> tuple[float, float]:
    """Return the least and the most that the last paying number of ranks may be; inf where no end is known.

    A speed-up that bends down has its largest marginal at the beginning of each gap between measured numbers, and its
    smallest at the end: a gap that pays on the whole pays at its beginning, one that does not fails at its end.
    """
    # Without a time of 1 rank, the fit's sets the scale.
    alone_s = next((one.mean_s for one in times if one.num_ranks == 1), fit.predict_s(1))
    scaled = {one.num_ranks: one.num_ranks if fit.kind == "weak" else 1 for one in times}
    speedups = {1: 1.0} | {one.num_ranks: scaled[one.num_ranks] * alone_s / one.mean_s for one in times}
    sizes = sorted(speedups)
    paid, least, most = 1, 1, math.inf
    for fewer, more in itertools.pairwise(sizes):
        if (speedups[more] - speedups[fewer]) / (more - fewer) < min_marginal:
            most = more - 1
            break
        paid, least = more, fewer + 1
    if not is_fitted:
        return paid, most
    predicted = find_last_paying(fit.predict_speedup, min_marginal)
    end = max(least, min(most, math.inf if predicted is None else predicted))
    return end, end


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
