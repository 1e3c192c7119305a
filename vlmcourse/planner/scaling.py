"""Speed-up and efficiency on several numbers of ranks, with intervals, and the laws of Amdahl and Gustafson.

Enters: seconds of a step by number of ranks, measured in turns. Leaves: speed-ups and efficiencies with a 95 %
interval, what the laws predict, and the number of ranks from which one more no longer pays. Chapter 6.

Strong scaling: all ranks together do the work that one did, speed-up = T(1) / T(N). Weak scaling: each rank does as
much as one did, speed-up = N T(1) / T(N), in samples a second. Efficiency is the speed-up over N in both.

Each turn measures every number of ranks once, so that a machine which is busy for a while slows a whole turn down. The
ratio within a turn hardly feels it, so intervals come from the ratios: Student's t over the turns, of their logarithms.

Source: Amdahl 1967, "Validity of the single processor approach"; Gustafson 1988, "Reevaluating Amdahl's law"; Karp and
Flatt 1990, "Measuring parallel processor performance".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("strong", "weak")
CONFIDENCE = 0.95
MIN_MARGINAL_SPEEDUP = 0.5
"""One rank more pays as long as it adds this much to the speed-up: half of what it would add in a perfect run. Below,
more than half of what it costs is lost."""
MAX_RANKS = 4096
"""Up to which the end of what pays is looked for."""


class Interval(NamedTuple):
    """A number and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """A step on one number of ranks, measured in several turns."""

    num_ranks: int
    step_s: tuple[float, ...]
    """Of each turn."""
    communication_s: tuple[float, ...] | None = None
    """What even the slowest rank waited in a step, by turn; None where it was not measured."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or not self.step_s or min(self.step_s) <= 0:
            raise ValueError(
                f"num_ranks = {self.num_ranks}, step_s = {self.step_s}: need 1 rank or more, and a time above 0 a turn"
            )
        if self.communication_s is not None and len(self.communication_s) != len(self.step_s):
            raise ValueError(
                f"{self.num_ranks} ranks: {len(self.communication_s)} communication_s for {len(self.step_s)} step_s: "
                "give one a turn"
            )

    @property
    def mean_s(self) -> float:
        """Geometric mean over the turns: a turn that a busy machine doubled counts no more than one that it halved."""
        return math.exp(sum(map(math.log, self.step_s)) / len(self.step_s))


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """How much faster than one rank."""

    num_ranks: int
    speedup: Interval
    efficiency: Interval


def check_times(kind: str, times: Sequence[RankTimes], *, at_least: int = 2) -> None:
    """Refuse times that nothing can be said of.

    Args:
        kind: one of `KINDS`.
        times: of several numbers of ranks, measured in the same turns.
        at_least: different numbers of ranks needed.

    Raises:
        ValueError: if the kind is unknown, a number of ranks comes twice, there are too few, or turns differ.
    """
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}: must be 'strong' (the same work) or 'weak' (as much work on each rank)")
    sizes = [one.num_ranks for one in times]
    if len(set(sizes)) != len(sizes) or len(sizes) < at_least:
        raise ValueError(f"times of {sizes} ranks: need {at_least} or more different numbers of ranks, each once")
    turns = {one.num_ranks: len(one.step_s) for one in times}
    if len(set(turns.values())) > 1:
        raise ValueError(f"turns by number of ranks are {turns}: measure every number of ranks once in each turn")


def measure_speedups(kind: str, times: Sequence[RankTimes]) -> list[Speedup]:
    """Compare each number of ranks with one rank.

    Args:
        kind: one of `KINDS`.
        times: of 1 rank and others, in 2 turns or more.

    Returns:
        In the order of the ranks. With 2 turns the interval is honest and very wide: measure 3 or more.

    Raises:
        ValueError: as `check_times` does, and without times of 1 rank or with a single turn.
    """
    check_times(kind, times)
    alone = next((one for one in times if one.num_ranks == 1), None)
    if alone is None:
        raise ValueError(
            f"no times of 1 rank among {[one.num_ranks for one in times]}: speed-up is over one rank; where the model "
            "does not fit on one, fit_amdahl estimates its time from the others"
        )
    if len(alone.step_s) < 2:
        raise ValueError("1 turn: one ratio has no interval; measure 2 turns or more")
    found = []
    for one in sorted(times, key=lambda each: each.num_ranks):
        scale = one.num_ranks if kind == "weak" else 1
        ratios = [scale * base_s / step_s for base_s, step_s in zip(alone.step_s, one.step_s, strict=True)]
        speedup = mean_interval(ratios)
        efficiency = Interval(*(number / one.num_ranks for number in speedup))
        found.append(Speedup(num_ranks=one.num_ranks, speedup=speedup, efficiency=efficiency))
    return found


def mean_interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of positive ratios and its interval, by Student's t over their logarithms."""
    from scipy.special import stdtrit  # a third of a second, for which nobody else should wait

    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    variance = sum((log - mean) ** 2 for log in logs) / (len(logs) - 1)
    half = float(stdtrit(len(logs) - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(variance / len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


# --- Laws -----------------------------------------------------------------------------------------------------------


def amdahl_speedup(serial_fraction: float, num_ranks: float) -> float:
    """Return the speed-up of N ranks if a part of one rank's time is not shared and all the rest is, perfectly.

    Args:
        serial_fraction: of the time on one rank, 0 to 1.
        num_ranks: 1 or more.

    Raises:
        ValueError: if a number is out of range.
    """
    _check_law(serial_fraction, num_ranks)
    return 1 / (serial_fraction + (1 - serial_fraction) / num_ranks)


def gustafson_speedup(serial_fraction: float, num_ranks: float) -> float:
    """Return the scaled speed-up of N ranks if the part that is shared has grown with N.

    Args:
        serial_fraction: of the time on N ranks, 0 to 1.
        num_ranks: 1 or more.

    Raises:
        ValueError: if a number is out of range.
    """
    _check_law(serial_fraction, num_ranks)
    return num_ranks - serial_fraction * (num_ranks - 1)


def find_serial_fraction(speedup: float, num_ranks: int) -> float:
    """Return the serial fraction with which Amdahl's law gives this speed-up: Karp and Flatt's metric.

    From one number of ranks it always finds one, so it proves nothing. A true serial part gives the same fraction for
    every number of ranks; one that grows with them is communication or imbalance.

    Args:
        speedup: over one rank, above 0.
        num_ranks: 2 or more.

    Raises:
        ValueError: if a number is out of range.
    """
    if num_ranks < 2 or speedup <= 0:
        raise ValueError(f"speedup = {speedup} on {num_ranks} ranks: need a number above 0, and 2 ranks or more")
    return (num_ranks / speedup - 1) / (num_ranks - 1)


def find_last_paying(
    speedup_of: Callable[[int], float],
    min_marginal: float = MIN_MARGINAL_SPEEDUP,
    max_ranks: int = MAX_RANKS,
) -> int | None:
    """Return the number of ranks at which adding one adds less than `min_marginal` to the speed-up.

    Args:
        speedup_of: predicted speed-up of a number of ranks.
        min_marginal: that one rank more has to add; 1 is what it adds in a perfect run.
        max_ranks: where to stop looking.

    Returns:
        The last number of ranks that pays; None if all up to `max_ranks` do.
    """
    before = speedup_of(1)
    for num_ranks in range(1, max_ranks):
        after = speedup_of(num_ranks + 1)
        if after - before < min_marginal:
            return num_ranks
        before = after
    return None


def _check_law(serial_fraction: float, num_ranks: float) -> None:
    if not 0 <= serial_fraction <= 1 or num_ranks < 1:
        raise ValueError(
            f"serial_fraction = {serial_fraction}, num_ranks = {num_ranks}: need a fraction from 0 to 1 (7.7 % is "
            "0.077), and 1 rank or more"
        )
