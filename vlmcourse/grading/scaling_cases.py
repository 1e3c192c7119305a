"""Cases of exercise 4.6: clusters that scale less than perfectly, with the right answers.

Enters: a seed. Leaves: cases, and what each must give, by the planner's functions. The first speed-up, split and
fixes are the team's of the exercise, 5.2 x on 8 GPUs. No part of a loss is near 0, and each series of steps is one in
which it matters how the law is fitted, so that mistakes can be told apart.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from vlmcourse.grading import scaling_fits
from vlmcourse.planner.efficiency_loss import LOSSES, StepParts, split_loss
from vlmcourse.planner.scaling import RankTimes
from vlmcourse.planner.scaling_fit import fit_amdahl

PHASES = ("data_wait_s", "forward_s", "backward_s", "communication_s", "optimizer_s")
"""What a learner is given of a step; they add up to it."""
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
NOISE = 0.04
"""Relative error of a measured step, one standard deviation."""
MIN_APART, MAX_APART = 0.06, 0.02
"""Relative: a fit that minimises the wrong errors is at least so far from the right fraction in every case, one that
minimises relative errors in another way at most so far. What counts as right lies between: `FRACTION_TOLERANCE`."""
MIN_SHARE_APART = 0.003
"""Absolute: imbalance that is measured wrongly is at least so far from the right share."""
Phases = dict[str, float]
Fixes = dict[str, dict[str, float]]
"""By name: the share that a fix takes off each part of the loss; below 0 where it adds to it."""


@dataclass(frozen=True, kw_only=True)
class SpeedCase:
    """One rank and N; a learner's function is asked for both kinds of scaling."""

    num_ranks: int
    alone_s: float
    step_s: float

    def right(self, kind: str) -> tuple[float, float]:
        """Return speed-up and efficiency."""
        speedup = self.alone_s / self.step_s * (self.num_ranks if kind == "weak" else 1)
        return speedup, speedup / self.num_ranks

    def __str__(self) -> str:
        return f"{self.alone_s:.3f} s on 1 rank, {self.step_s:.3f} s on {self.num_ranks}"


@dataclass(frozen=True, kw_only=True)
class SerialCase:
    """Measured steps of strong scaling, each off by some percent; one rank is not always among them."""

    ranks: tuple[int, ...]
    step_s: tuple[float, ...]

    @property
    def fraction(self) -> float:
        """The serial fraction of the time on one rank, by least squares of relative errors."""
        times = [RankTimes(num_ranks=n, step_s=(s,)) for n, s in zip(self.ranks, self.step_s, strict=True)]
        return fit_amdahl("strong", times).serial_fraction

    def __str__(self) -> str:
        return f"measured on {', '.join(map(str, self.ranks))} ranks"


@dataclass(frozen=True, kw_only=True)
class SplitCase:
    """A step on one rank, and on each of N that share its work."""

    alone: Phases
    by_rank: tuple[Phases, ...]

    @property
    def shares(self) -> dict[str, float]:
        """The right split."""
        return split_loss("strong", [_parts(self.alone)], [[_parts(rank) for rank in self.by_rank]]).shares

    def __str__(self) -> str:
        step_s = sum(sum(rank.values()) for rank in self.by_rank) / len(self.by_rank)
        return f"{sum(self.alone.values()):.2f} s on 1 rank, {step_s:.3f} s on {len(self.by_rank)}"


@dataclass(frozen=True, kw_only=True)
class FixCase:
    """A split, and fixes with what each takes off its parts."""

    split: Mapping[str, float]
    fixes: Fixes = field(default_factory=dict)

    def gain(self, name: str) -> float:
        """Return the speed with this fix over that without."""
        return 1 / (1 - sum(self.split[part] * share for part, share in self.fixes[name].items()))

    @property
    def together(self) -> float:
        """The speed with all fixes over that with none: each takes its share of what the others leave of a part."""
        left = {part: math.prod(1 - fix.get(part, 0.0) for fix in self.fixes.values()) for part in self.split}
        return 1 / (1 - sum(share * (1 - left[part]) for part, share in self.split.items()))

    def __str__(self) -> str:
        return f"{len(self.fixes)} fixes of a loss of {100 * sum(self.split.values()):.0f} %"


def _parts(phases: Mapping[str, float]) -> StepParts:
    return StepParts(
        data_wait_s=phases["data_wait_s"],
        computing_s=phases["forward_s"] + phases["backward_s"],
        communication_s=phases["communication_s"],
        serial_s=phases["optimizer_s"],
    )


# --- The team's cluster ---------------------------------------------------------------------------------------------

TEAM_SPEED = SpeedCase(num_ranks=8, alone_s=4.16, step_s=0.8)
TEAM_FORWARD_S = (0.170, 0.172, 0.168, 0.171, 0.174, 0.202, 0.169, 0.172)
"""Rank 5 has the samples with the most tiles."""
TEAM_BACKWARD_S = (0.343, 0.342, 0.340, 0.343, 0.345, 0.403, 0.342, 0.344)


def make_team() -> SplitCase:
    """Return the step of 5.2 x on 8 GPUs."""
    alone: Phases = dict(zip(PHASES, (0.08, 1.36, 2.68, 0.0, 0.04), strict=True))
    own = [(0.02, forward, back, 0.04) for forward, back in zip(TEAM_FORWARD_S, TEAM_BACKWARD_S, strict=True)]
    return SplitCase(alone=alone, by_rank=tuple(_with_waits(TEAM_SPEED.step_s, *rank) for rank in own))


TEAM_FIXES: Fixes = {
    "overlap the all-reduce with backward": {"communication": 0.6},
    "send gradients in 16 bits": {"communication": 0.45},
    "deal out samples by their tiles": {"imbalance": 0.8},
    "more loader workers": {"input": 0.9},
    "shard the optimizer (ZeRO-1)": {"serial": 0.875, "communication": -0.05},
}


def _with_waits(step_s: float, data_s: float, forward_s: float, backward_s: float, optimizer_s: float) -> Phases:
    waits_s = step_s - data_s - forward_s - backward_s - optimizer_s
    return dict(zip(PHASES, (data_s, forward_s, backward_s, waits_s, optimizer_s), strict=True))


# --- Cases ----------------------------------------------------------------------------------------------------------


def make_speed_cases(seed: int, num_cases: int) -> list[SpeedCase]:
    """Return the team's, and others with efficiencies from 0.3 to 0.95."""
    rng = random.Random(f"speed:{seed}")
    cases = [TEAM_SPEED]
    while len(cases) < num_cases:
        num_ranks, alone_s = rng.choice((2, 3, 4, 6, 12, 16, 24, 64)), rng.uniform(0.5, 9)
        step_s = alone_s / (num_ranks * rng.uniform(0.3, 0.95))
        cases.append(SpeedCase(num_ranks=num_ranks, alone_s=alone_s, step_s=step_s))
    return cases


def make_serial_cases(seed: int, num_cases: int) -> list[SerialCase]:
    """Draw runs with a serial part of 3 to 20 %; every other case has no run on one rank.

    Kept are those in which errors in seconds, in N times a step and in speed-ups each lead elsewhere.
    """
    rng = random.Random(f"serial:{seed}")
    cases: list[SerialCase] = []
    while len(cases) < num_cases:
        has_one = len(cases) % 2 == 0
        sizes = tuple(sorted(rng.sample(SIZES, k=6)))
        ranks = (1, *sizes[1:]) if has_one else sizes
        alone_s, fraction = rng.uniform(0.8, 20), rng.uniform(0.03, 0.2)
        steps = [alone_s * (fraction + (1 - fraction) / n) * math.exp(rng.gauss(0, NOISE)) for n in ranks]
        case = SerialCase(ranks=ranks, step_s=tuple(steps))
        if _tells_fits_apart(case):
            cases.append(case)
    return cases


def _tells_fits_apart(case: SerialCase) -> bool:
    measured, right = (case.ranks, case.step_s), scaling_fits.share(scaling_fits.fit_relative(case.ranks, case.step_s))
    if right < 0.02:
        return False

    def distance(found: tuple[float, float]) -> float:
        return abs(scaling_fits.share(found) / right - 1)

    return (
        all(
            distance(scaling_fits.fit_weighted(*measured, by)) > MIN_APART for by in ([1] * len(case.ranks), case.ranks)
        )
        and distance(scaling_fits.fit_speeds(*measured)) > MIN_APART
        and distance(scaling_fits.fit_logarithms(*measured)) < MAX_APART
        and distance(scaling_fits.fit_relative_to_law(*measured)) < MAX_APART
    )


def make_split_cases(seed: int, num_cases: int) -> list[SplitCase]:
    """Return the team's, and others of 3 to 16 ranks; in each, another rank is the slowest, for another reason.

    In all but the team's, ranks differ in their loading too, and the median rank is not the mean one: of 2 ranks it is.
    """
    rng = random.Random(f"split:{seed}")
    cases = [make_team()]
    while len(cases) < num_cases:
        case = _draw_split(rng)
        if min(case.shares.values()) > 0.008 and _tells_imbalance_apart(case):
            cases.append(case)
    return cases


def _tells_imbalance_apart(case: SplitCase) -> bool:
    """Tell whether forward and backward alone, or the median rank for the mean one, give another imbalance."""
    computing_s = [rank["forward_s"] + rank["backward_s"] for rank in case.by_rank]
    own_s = [sum(rank.values()) - rank["communication_s"] for rank in case.by_rank]
    total_s = sum(sum(rank.values()) for rank in case.by_rank)
    wrong_s = (sum(max(computing_s) - s for s in computing_s), len(own_s) * (max(own_s) - median(own_s)))
    return all(abs(s / total_s - case.shares["imbalance"]) > MIN_SHARE_APART for s in wrong_s)


def _draw_split(rng: random.Random) -> SplitCase:
    num_ranks, alone_s = rng.choice((3, 4, 6, 8, 16)), rng.uniform(1, 12)
    weights = (rng.uniform(0.02, 0.08), rng.uniform(0.25, 0.35), rng.uniform(0.5, 0.65), 0.0, rng.uniform(0.01, 0.03))
    alone = {name: alone_s * weight / sum(weights) for name, weight in zip(PHASES, weights, strict=True)}
    slower, slowest, input_excess = rng.uniform(1.03, 1.2), rng.randrange(num_ranks), rng.uniform(1.6, 4)
    late, is_input = rng.uniform(1.15, 1.5), rng.random() < 0.4
    own: list[tuple[float, ...]] = []
    for rank in range(num_ranks):
        jitter = rng.uniform(0.97, 1.03) * slower / num_ranks
        extra = late if rank == slowest else 1.0
        computing = jitter * (1 if is_input else extra)
        data_s = alone["data_wait_s"] * input_excess / num_ranks * rng.uniform(0.6, 1.4)
        data_s += (extra - 1) * alone_s / num_ranks if is_input else 0.0
        own.append((data_s, alone["forward_s"] * computing, alone["backward_s"] * computing, alone["optimizer_s"]))
    step_s = max(map(sum, own)) * rng.uniform(1.05, 1.4)
    return SplitCase(alone=alone, by_rank=tuple(_with_waits(step_s, *rank) for rank in own))


def make_fix_cases(seed: int, num_cases: int) -> list[FixCase]:
    """Return the team's, and others; in each, two fixes are about one part, and one costs on another."""
    rng = random.Random(f"fixes:{seed}")
    cases = [FixCase(split=make_team().shares, fixes=TEAM_FIXES)]
    names = list(TEAM_FIXES)
    while len(cases) < num_cases:
        weights = [rng.uniform(0.5, 4) for _ in LOSSES]
        lost = rng.uniform(0.25, 0.65)
        split = {name: lost * weight / sum(weights) for name, weight in zip(LOSSES, weights, strict=True)}
        parts = [LOSSES[0], LOSSES[0], *rng.sample(LOSSES[1:], k=3)]
        fixes = {name: {part: rng.uniform(0.3, 0.9)} for name, part in zip(names, parts, strict=True)}
        fixes[names[-1]] |= {LOSSES[0]: -rng.uniform(0.05, 0.2)}
        order = list(fixes)
        rng.shuffle(order)
        case = FixCase(split=split, fixes={name: fixes[name] for name in order})
        gains = sorted(case.gain(name) for name in fixes)
        steps = [b - a for a, b in zip(gains, gains[1:], strict=False)]
        if min(*steps, gains[0] - 1) > 0.012 and case.together < 2.2:
            cases.append(case)
    return cases
