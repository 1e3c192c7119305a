"""Exercise 4.6, graded: 5.2 x on 8 GPUs. Speed-up and efficiency, Amdahl's fraction, the split of the loss, the fixes.

Enters: a learner's functions of plain numbers. Leaves: points (always a number from 0 to the cell's maximum) and
printed feedback that names the misconception. The cases of the hidden tests come from the same generators under another
seed. Right values are the planner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlmcourse.grading.assumptions import is_near
from vlmcourse.grading.checks import Asked, Outcome, as_number, ask_each, award, explain_signature, show_first
from vlmcourse.grading.plain import call_plainly
from vlmcourse.grading.scaling_answers import Pair, read_gains, read_pair
from vlmcourse.grading.scaling_cases import (
    FixCase,
    SerialCase,
    SpeedCase,
    SplitCase,
    make_fix_cases,
    make_serial_cases,
    make_speed_cases,
    make_split_cases,
)
from vlmcourse.grading.scaling_mistakes import explain_fractions, explain_speeds
from vlmcourse.grading.scaling_mistakes_split import explain_gains, explain_order, explain_split, explain_together
from vlmcourse.planner.efficiency_loss import LOSSES
from vlmcourse.planner.scaling import KINDS

ANSWERED_BY = tuple(f"vlmcourse.planner.{name}" for name in ("scaling", "scaling_fit", "efficiency_loss"))
"""Modules that hold the answers."""
FRACTION_TOLERANCE = 0.04
"""Relative; between `scaling_cases.MAX_APART` and `MIN_APART`, so that it takes no luck to be right or wrong."""
SHARE_TOLERANCE = 0.001
"""Absolute, of a part of the split: a tenth of a percent of the ranks' time."""
GAIN_TOLERANCE = 0.02
"""Relative, of what a fix adds to the speed."""
NO_KIND = "both"


def _takes(function: Any, *names: str) -> bool:
    """Tell whether a function can be called with these arguments by position; say so if not."""
    wrong = explain_signature(function, *names)
    if wrong:
        print(wrong)
    return not wrong


def _ask(function: Any, *calls: tuple[Any, ...]) -> Outcome:
    """Call a learner's function with each of these arguments, in one go."""
    if not callable(function):
        return Outcome(error=f"this is not a function but {type(function).__name__}")
    return call_plainly(lambda: [function(*arguments) for arguments in calls], module=ANSWERED_BY)


def _show_ideas(ideas: Sequence[str], where: str = "") -> None:
    """Print what the answers look like."""
    for number, sentence in enumerate(ideas):
        print(f"{where}{'And' if number else 'It looks as if'} {sentence}.")


# --- Speed-up and efficiency ----------------------------------------------------------------------------------------


def check_speedup(function: Any, points: float, seed: int, num_cases: int = 8) -> float:
    """Grade `speedup_and_efficiency(num_ranks, alone_s, step_s, scaling)`.

    A case counts if both numbers are right in strong and in weak scaling; a kind that is none must be refused.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    if not _takes(function, "num_ranks", "alone_s", "step_s", "scaling"):
        return 0.0

    def ask(case: SpeedCase) -> Outcome:
        return _ask(function, *((case.num_ranks, case.alone_s, case.step_s, kind) for kind in KINDS))

    asked = ask_each("speedup_and_efficiency", make_speed_cases(seed, num_cases), ask, _judge_speeds)
    if asked is None:
        return 0.0
    if asked.num_wrong:
        both = [((case, kind), pair) for case, pairs in asked.answers for kind, pair in zip(KINDS, pairs, strict=True)]
        _show_ideas(explain_speeds([(c, pair[0]) for c, pair in both], [(c, pair[1]) for c, pair in both]))
    refused = not asked.stopped and _refuses_kind(function)
    return award(points, asked.earned + refused, num_cases + 1) if asked.earned else 0.0


def _judge_speeds(case: SpeedCase, outcome: Outcome) -> tuple[list[Pair] | None, float, str]:
    if outcome.error:
        return None, 0.0, f"{case}: {outcome.error}"
    found: list[Pair] = []
    for answer in outcome.value:
        pair = read_pair(answer)
        if pair is None:
            return None, 0.0, f"{case}: return two numbers, speed-up and efficiency, not {answer!r:.60}"
        found.append(pair)
    for kind, pair in zip(KINDS, found, strict=True):
        for name, got, right in zip(("speed-up", "efficiency"), pair, case.right(kind), strict=True):
            if not is_near(got, right):
                return found, 0.0, f"{case}, {kind} scaling: the {name} {got:.4g} is not right"
    return found, 1.0, ""


def _refuses_kind(function: Any) -> bool:
    outcome = _ask(function, (4, 1.0, 0.5, NO_KIND))
    if outcome.error.startswith("ValueError"):
        return True
    got = outcome.error or f"{outcome.value[0]!r:.60} was returned"
    print(f"scaling = {NO_KIND!r}: it is 'strong' or 'weak': raise a ValueError ({got})")
    return False


# --- One number for each case ---------------------------------------------------------------------------------------


def _ask_numbers(
    name: str,
    cases: Sequence[Any],
    ask: Callable[[Any], Outcome],
    is_right: Callable[[Any, float], bool],
    noun: str,
) -> Asked | None:
    """Ask for one number in each case."""

    def judge(case: Any, outcome: Outcome) -> tuple[float | None, float, str]:
        if outcome.error:
            return None, 0.0, f"{case}: {outcome.error}"
        number = as_number(outcome.value[0])
        if number is None:
            return None, 0.0, f"{case}: return one number, not {outcome.value[0]!r:.60}"
        return number, float(is_right(case, number)), f"{case}: the {noun} {number:.4g} is not right"

    return ask_each(name, cases, ask, judge)


def check_serial(function: Any, points: float, seed: int, num_cases: int = 8) -> float:
    """Grade `fit_serial_fraction(ranks, step_s)`: Amdahl's fraction by least squares of relative errors.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    if not _takes(function, "ranks", "step_s"):
        return 0.0

    def ask(case: SerialCase) -> Outcome:
        return _ask(function, (list(case.ranks), list(case.step_s)))

    def is_right(case: SerialCase, got: float) -> bool:
        return is_near(got, case.fraction, FRACTION_TOLERANCE)

    asked = _ask_numbers("fit_serial_fraction", make_serial_cases(seed, num_cases), ask, is_right, "serial fraction")
    if asked is None:
        return 0.0
    _show_ideas(explain_fractions(asked.answers) if asked.num_wrong else ())
    return award(points, asked.earned, num_cases)


def check_together(function: Any, points: float, seed: int, num_cases: int = 8) -> float:
    """Grade `gain_together(split, fixes)`: the new speed over the old with all fixes.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    if not _takes(function, "split", "fixes"):
        return 0.0

    def is_right(case: FixCase, got: float) -> bool:
        return is_near(got - 1, case.together - 1, GAIN_TOLERANCE)

    cases = make_fix_cases(seed, num_cases)
    asked = _ask_numbers("gain_together", cases, lambda case: _ask(function, _copy(case)), is_right, "gain")
    if asked is None:
        return 0.0
    answers = [(case, gain - 1) for case, gain in asked.answers]
    _show_ideas(explain_together(answers) if asked.num_wrong else ())
    return award(points, asked.earned, num_cases)


def _copy(case: FixCase) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return what a learner's function is called with, which it may change."""
    return dict(case.split), {name: dict(fix) for name, fix in case.fixes.items()}


# --- The split ------------------------------------------------------------------------------------------------------


def check_split(function: Any, points: float, seed: int, num_cases: int = 6) -> float:
    """Grade `split_loss(alone, by_rank)`; in a case each part has a fifth of its worth. The first is the team's.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    if not _takes(function, "alone", "by_rank"):
        return 0.0

    def ask(case: SplitCase) -> Outcome:
        return _ask(function, (dict(case.alone), [dict(rank) for rank in case.by_rank]))

    asked = ask_each("split_loss", make_split_cases(seed, num_cases), ask, _judge_split)
    if asked is None:
        return 0.0
    if asked.num_wrong:
        _explain_splits(asked.answers)
    return award(points, asked.earned, num_cases)


def _judge_split(case: SplitCase, outcome: Outcome) -> tuple[dict[str, float] | None, float, str]:
    if outcome.error:
        return None, 0.0, f"{case}: {outcome.error}"
    answer = outcome.value[0]
    if not isinstance(answer, Mapping) or any(part not in answer for part in LOSSES):
        return None, 0.0, f"{case}: return a dict with the keys {', '.join(LOSSES)}, not {answer!r:.80}"
    found = {part: as_number(answer[part]) for part in LOSSES}
    numbers = {part: number for part, number in found.items() if number is not None}
    if len(numbers) < len(LOSSES):
        none = next(part for part in LOSSES if part not in numbers)
        return None, 0.0, f"{case}: {none} must be a number, not {answer[none]!r:.60}"
    wrong = [part for part in LOSSES if abs(numbers[part] - case.shares[part]) > SHARE_TOLERANCE]
    shown = ", ".join(f"{part} {numbers[part]:.4g}" for part in wrong)
    return numbers, 1 - len(wrong) / len(LOSSES), f"{case}: not right are {shown}"


def _explain_splits(answers: Sequence[tuple[SplitCase, dict[str, float]]]) -> None:
    """Print the mistakes behind all splits, each once, and whether the parts add up to what is lost."""
    said: dict[str, list[str]] = {}
    for part in LOSSES:
        for sentence in explain_split(part, [(case, numbers[part]) for case, numbers in answers]):
            said.setdefault(sentence, []).append(part)
    for sentence, parts in said.items():
        where = "" if len(parts) == len(LOSSES) else f"{' and '.join(parts)}: "
        print(f"{where}it looks as if {sentence}.")
    off = [
        f"{case}: your parts add up to {sum(numbers.values()):.3f}, 1 - efficiency is {sum(case.shares.values()):.3f}"
        for case, numbers in answers
        if abs(sum(numbers.values()) - sum(case.shares.values())) > SHARE_TOLERANCE
    ]
    show_first(off[:1])


# --- The fixes ------------------------------------------------------------------------------------------------------


def check_fixes(function: Any, points: float, seed: int, num_cases: int = 8) -> float:
    """Grade `rank_fixes(split, fixes)`: half of a case's worth is for the gains, half for the order.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    if not _takes(function, "split", "fixes"):
        return 0.0
    cases = make_fix_cases(seed, num_cases)
    asked = ask_each("rank_fixes", cases, lambda case: _ask(function, _copy(case)), _judge_fixes)
    if asked is None:
        return 0.0
    if asked.num_wrong:
        gains = [((case, name), gains[name] - 1) for case, gains in asked.answers for name in case.fixes]
        _show_ideas(explain_gains(gains))
        orders = [
            explain_order(case, list(gains), gains) for case, gains in asked.answers if not _in_order(case, gains)
        ]
        show_first(orders[:1])
    return award(points, asked.earned, num_cases)


def _judge_fixes(case: FixCase, outcome: Outcome) -> tuple[dict[str, float] | None, float, str]:
    if outcome.error:
        return None, 0.0, f"{case}: {outcome.error}"
    gains = read_gains(outcome.value[0])
    if gains is None or gains.keys() != case.fixes.keys():
        asked_for = "return a list of pairs, each fix's name and its gain, with every fix once"
        return None, 0.0, f"{case}: {asked_for}, not {outcome.value[0]!r:.80}"
    wrong = [name for name in gains if not is_near(gains[name] - 1, case.gain(name) - 1, GAIN_TOLERANCE)]
    in_order = _in_order(case, gains)
    shown = [f"{name!r} {gains[name]:.4g}" for name in wrong[:2]] + ([] if in_order else ["the order"])
    return gains, 0.5 * (not wrong) + 0.5 * in_order, f"{case}: not right are {', '.join(shown)}"


def _in_order(case: FixCase, gains: Mapping[str, float]) -> bool:
    return list(gains) == sorted(case.fixes, key=case.gain, reverse=True)
