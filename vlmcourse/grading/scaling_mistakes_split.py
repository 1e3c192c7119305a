"""Exercise 4.6's misconceptions about the split of a loss, and about what fixes gain.

Enters: numbers that a learner's functions gave. Leaves: sentences to stand behind "It looks as if". Those about
speed-ups and serial fractions are in `scaling_mistakes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from vlmcourse.grading.assumptions import Aspects, Choice, find_assumptions
from vlmcourse.grading.scaling_cases import FixCase, Phases, SplitCase
from vlmcourse.grading.scaling_mistakes import PERCENT, Answers

# --- The split ------------------------------------------------------------------------------------------------------


def _own(rank: Phases) -> float:
    return sum(rank.values()) - rank["communication_s"]


def _longest(case: SplitCase) -> float:
    return max(map(_own, case.by_rank))


def _total(case: SplitCase) -> float:
    return sum(sum(rank.values()) for rank in case.by_rank)


def _sum_of(case: SplitCase, *names: str) -> float:
    return sum(rank[name] for rank in case.by_rank for name in names)


SHARED_ASPECTS: Aspects = {
    "over": [
        ("", _total),
        (
            "you divided by the length of a step: N ranks pay for it N times, so divide by their time together, N T(N)",
            lambda case: _total(case) / len(case.by_rank),
        ),
        (
            "you divided by the time on one rank: the loss is a share of what the N ranks spent, N T(N)",
            lambda case: sum(case.alone.values()),
        ),
        ("you returned seconds of ranks: return shares of their time together", lambda case: 1.0),
        (
            "you returned seconds of a step: return shares of the time of all ranks together",
            lambda case: float(len(case.by_rank)),
        ),
        (
            "you returned shares of the loss: return shares of the time of all ranks, which add up to 1 - efficiency",
            lambda case: _total(case) - sum(case.alone.values()),
        ),
    ],
    "unit": PERCENT,
}
WAITS = (
    "you counted all waits as communication: the fast ranks' waits for the slowest one are imbalance, and would count "
    "twice; only what even the slowest rank waited is communication"
)
WEAK = (
    "you took weak scaling for strong: the N ranks share the work of the one, so compare their sum with its time, not "
    "with N times it"
)
MEAN_RANK = (
    "you took the mean rank for the slowest: all wait for the slowest, so it decides how long a step is, and the mean "
    "one only how long it could be"
)


def _excess(names: tuple[str, ...], noun: str) -> list[Choice]:
    return [
        ("", lambda case: _sum_of(case, *names) - sum(case.alone[name] for name in names)),
        (
            f"you counted all of {noun}: one rank needs it for the same work too, so only what N ranks need beyond "
            "that is lost",
            lambda case: _sum_of(case, *names),
        ),
        (
            WEAK,
            lambda case: _sum_of(case, *names) - len(case.by_rank) * sum(case.alone[name] for name in names),
        ),
        (
            f"you looked at the slowest rank for {noun}, N times: what it needs more than others is imbalance already",
            lambda case: (
                len(case.by_rank) * max(sum(rank[name] for name in names) for rank in case.by_rank)
                - sum(case.alone[name] for name in names)
            ),
        ),
    ]


SPLIT_ASPECTS: dict[str, list[Choice]] = {
    "communication": [
        ("", lambda case: _total(case) - len(case.by_rank) * _longest(case)),
        (WAITS, lambda case: _sum_of(case, "communication_s")),
        (
            "you counted the longest wait as communication: it is the fastest rank's, most of it for the slowest one",
            lambda case: len(case.by_rank) * max(rank["communication_s"] for rank in case.by_rank),
        ),
        (
            "you counted the slowest rank's wait once: all N ranks spend it",
            lambda case: min(rank["communication_s"] for rank in case.by_rank),
        ),
    ],
    "imbalance": [
        ("", lambda case: len(case.by_rank) * _longest(case) - sum(map(_own, case.by_rank))),
        (MEAN_RANK, lambda case: 0.0),
        (
            "you compared the slowest rank with the fastest: the others lie between, so add up what each one waits",
            lambda case: len(case.by_rank) * (_longest(case) - min(map(_own, case.by_rank))),
        ),
        (
            "you compared the slowest rank with the median one: the total work is the same whoever does it, so add up "
            "what each one waits",
            lambda case: len(case.by_rank) * (_longest(case) - median(map(_own, case.by_rank))),
        ),
        (
            "you looked at forward and backward only: a rank that waits for its data is late too",
            lambda case: _compute_gap(case),
        ),
        (
            "you counted how far the slowest rank is behind the mean once: all N ranks spend it",
            lambda case: _longest(case) - sum(map(_own, case.by_rank)) / len(case.by_rank),
        ),
    ],
    "input": _excess(("data_wait_s",), "the waits for data"),
    "serial": _excess(("optimizer_s",), "the optimizer's time"),
    "computing": _excess(("forward_s", "backward_s"), "forward and backward"),
}


NOTHING = 1e-6
"""Up to which a part is none."""
OF_NOTHING = {"imbalance": MEAN_RANK, "serial": WEAK}
"""What a part that comes out as nothing looks like: each rank repeats the optimizer's time, no loss in weak scaling."""


def _compute_gap(case: SplitCase) -> float:
    computing = [rank["forward_s"] + rank["backward_s"] for rank in case.by_rank]
    return len(computing) * max(computing) - sum(computing)


def _split_formula(
    case: SplitCase, *, lost_s: Callable[[SplitCase], float], over: Callable[[SplitCase], float], unit: float
) -> float:
    return lost_s(case) / over(case) * unit


def explain_split(part: str, answers: Answers) -> list[str]:
    """Name the wrong assumptions behind one part of the splits, each of a `SplitCase`."""
    if answers and all(abs(number) < NOTHING for _, number in answers):
        return [OF_NOTHING.get(part, f"you left {part} out")]
    return find_assumptions(answers, _split_formula, {"lost_s": SPLIT_ASPECTS[part]} | dict(SHARED_ASPECTS))


# --- Gains ----------------------------------------------------------------------------------------------------------


def _removed(case: FixCase, name: str) -> float:
    return sum(case.split[part] * share for part, share in case.fixes[name].items())


def _relative_to_loss(case: FixCase, name: str) -> float:
    return _removed(case, name) / sum(case.split.values())


GAIN_ASPECTS: Aspects = {
    "gain_of": [
        ("", lambda case, name: case.gain(name) - 1),
        (
            "you took the share of time that a fix saves for its gain: 20 % less time is 1 / (1 - 0.2) = 1.25 x as "
            "fast",
            _removed,
        ),
        (
            "you took what a fix takes off a part for that of the whole step: multiply it by the part's share first",
            lambda case, name: 1 / (1 - sum(case.fixes[name].values())) - 1,
        ),
        (
            "you counted on what is lost alone: a step also has the time that brings samples",
            lambda case, name: 1 / (1 - _relative_to_loss(case, name)) - 1,
        ),
        (
            "you took a part away whole: a fix takes off its share of it only",
            lambda case, name: 1 / (1 - sum(case.split[part] for part in case.fixes[name])) - 1,
        ),
        (
            "you overlooked what a fix adds to another part: a share below 0 costs time",
            lambda case, name: 1 / (1 - sum(case.split[p] * max(0.0, s) for p, s in case.fixes[name].items())) - 1,
        ),
        (
            "you overlooked that a fix can change several parts: add up what it does to each",
            lambda case, name: 1 / (1 - max(case.split[p] * s for p, s in case.fixes[name].items())) - 1,
        ),
        ("you returned the time that is left: the gain is its inverse", lambda case, name: -_removed(case, name)),
    ],
    "form": [
        ("", lambda gain: gain),
        (
            "you returned what is gained: return the new speed over the old, 1.25 for a quarter more",
            lambda gain: gain - 1,
        ),
        (
            "you returned percent: return the new speed over the old, 1.25 for a quarter more",
            lambda gain: 100 * gain - 1,
        ),
        ("you returned percent of the old speed: return the ratio", lambda gain: 99 + 100 * gain),
    ],
}


def _gain_formula(asked: tuple[FixCase, str], *, gain_of: Callable[..., float], form: Callable[..., float]) -> float:
    return form(gain_of(*asked))


def explain_gains(answers: Answers) -> list[str]:
    """Name the wrong assumptions behind gains, each of (a `FixCase`, a fix), less 1."""
    return find_assumptions(answers, _gain_formula, GAIN_ASPECTS)


TOGETHER_ASPECTS: Aspects = {
    "gain_of": [
        ("", lambda case: case.together - 1),
        (
            "you added the gains up: gains are ratios of speeds, and do not add; add up the time that is saved, then "
            "divide",
            lambda case: sum(case.gain(name) - 1 for name in case.fixes),
        ),
        (
            "you multiplied the gains: the parts are shares of one step, so add up the time that is saved, then divide",
            lambda case: math.prod(case.gain(name) for name in case.fixes) - 1,
        ),
        (
            "you added up what two fixes take off one part: the second has only what the first left, so multiply what "
            "they leave",
            lambda case: 1 / (1 - sum(_removed(case, name) for name in case.fixes)) - 1,
        ),
        (
            "you took the best fix for all of them: the others gain too",
            lambda case: max(case.gain(name) for name in case.fixes) - 1,
        ),
        (
            "you took the share of time that is saved for the gain: 20 % less time is 1.25 x the speed",
            lambda case: 1 - 1 / case.together,
        ),
        ("you took all losses away: fixes leave some of each", lambda case: 1 / (1 - sum(case.split.values())) - 1),
    ],
    "form": GAIN_ASPECTS["form"],
}


def _together_formula(case: FixCase, *, gain_of: Callable[..., float], form: Callable[..., float]) -> float:
    return form(gain_of(case))


def explain_together(answers: Answers) -> list[str]:
    """Name the wrong assumptions behind gains of all fixes together, each of a `FixCase`, less 1."""
    return find_assumptions(answers, _together_formula, TOGETHER_ASPECTS)


def explain_order(case: FixCase, names: Sequence[str], gains: Mapping[str, float]) -> str:
    """Say what a wrong order of fixes looks like."""
    best = sorted(case.fixes, key=case.gain, reverse=True)
    if list(names) == best[::-1]:
        return "the best fix comes first: yours is the other way round"
    if list(names) == list(case.fixes):
        return "you left the fixes in the order in which they came: sort them by their gain, the best first"
    if list(names) == sorted(names, key=lambda name: -gains[name]):
        return "the order is that of your gains, which are not right"
    return "sort the fixes by their gain, the best first"
