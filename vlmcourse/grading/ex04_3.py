"""Exercise 4.3, graded: what a number format holds, what survives in it, and which one to train in.

Enters: a learner's functions. Leaves: points (always a number from 0 to the cell's maximum) and printed feedback that
names the misconception. The hidden tests ask the same generators under another seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vlmcourse.grading.checks import award, call, explain_signature
from vlmcourse.grading.format_cases import (
    FACTS,
    GROUPS,
    Choice,
    Gradients,
    facts_of,
    make_choices,
    make_formats,
    make_gradients,
)
from vlmcourse.grading.format_feedback import CHOICE_MISTAKES, FACT_MISTAKES, FATE_MISTAKES, explain
from vlmcourse.planner.formats import FloatFormat

MAX_SHOWN = 3
TOLERANCE = 1e-9
LEVELS = {"easy": GROUPS[:2], "hard": GROUPS[2:]}
FATES = ("zero", "subnormal", "normal", "overflow")


def check_facts(function: Any, points: float, seed: int, num_cases: int = 8) -> float:
    """Grade `format_facts(exponent_bits, mantissa_bits, has_infinity)`; each of five facts is worth the same.

    Args:
        function: the learner's.
        points: the cell's maximum.
        seed: of the formats.
        num_cases: how many formats; a fact is right if it is for all of them.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    sentence = explain_signature(function, "exponent_bits", "mantissa_bits", "has_infinity")
    if sentence:
        print(sentence)
        return 0.0
    answers: list[tuple[FloatFormat, Mapping[str, Any]]] = []
    for form in make_formats(seed, num_cases):
        outcome = call(function, form.exponent_bits, form.mantissa_bits, form.has_infinity)
        problem = outcome.error
        if not problem and not isinstance(outcome.value, Mapping):
            problem = f"return a dict with the keys {', '.join(FACTS)}, not {type(outcome.value).__name__}"
        if problem:
            unsolved = "format_facts is not solved yet"
            print(unsolved if outcome.unsolved else f"{_describe(form)}: {problem}")
            return 0.0
        answers.append((form, outcome.value))
    num_right = sum(_judge_fact(name, answers) for name in FACTS)
    print(f"{num_right} of {len(FACTS)} facts right for all of {len(answers)} formats")
    return award(points, num_right, len(FACTS))


def _judge_fact(name: str, answers: Sequence[tuple[FloatFormat, Mapping[str, Any]]]) -> bool:
    """Tell whether one fact is right for every format; say what is wrong."""
    wrong = [(form, given.get(name)) for form, given in answers if not _close(given.get(name), facts_of(form)[name])]
    if not wrong:
        return True
    form, got = wrong[0]
    why = explain(wrong, FACT_MISTAKES[name], _close)
    shown = "missing" if got is None else f"{_number(got):.6g}" if _number(got) is not None else repr(got)[:40]
    print(f"{name} of {_describe(form)} is not {shown}" + (f": {why}" if why else ""))
    return False


def _describe(form: FloatFormat) -> str:
    without = "" if form.has_infinity else ", no infinities"
    return f"{form.exponent_bits} exponent and {form.mantissa_bits} mantissa bits{without}"


def _number(value: Any) -> float | None:
    """Return a number as a float, or None if it is none."""
    if value is None or isinstance(value, (bool, str)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _close(got: Any, expected: Any) -> bool:
    left, right = _number(got), _number(expected)
    if left is None or right is None:
        return False
    return math.isclose(left, right, rel_tol=TOLERANCE)


def check_survivors(function: Any, points: float, seed: int, num_cases: int = 6, edges: bool = False) -> float:
    """Grade `survivors(values, exponent_bits, mantissa_bits)`; every case is worth the same.

    Args:
        function: the learner's.
        points: the cell's maximum.
        seed: of the cases.
        num_cases: how many.
        edges: ask about numbers that only rounding decides about.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    sentence = explain_signature(function, "values", "exponent_bits", "mantissa_bits")
    if sentence:
        print(sentence)
        return 0.0
    wrong: list[tuple[Gradients, Any]] = []
    lines: list[str] = []
    cases = make_gradients(seed, num_cases, edges)
    for case in cases:
        form = case.form
        outcome = call(function, list(case.values), form.exponent_bits, form.mantissa_bits)
        if outcome.unsolved:
            print("survivors is not solved yet")
            return 0.0
        if outcome.error:
            lines.append(f"{_describe(form)}: {outcome.error}")
        elif not _is_list(outcome.value, len(case.values)):
            lines.append(f"{_describe(form)}: return a list with one of {', '.join(FATES)} for each of the numbers")
        elif list(outcome.value) != case.fates:
            wrong.append((case, list(outcome.value)))
            at = next(i for i, fate in enumerate(case.fates) if fate != wrong[-1][1][i])
            lines.append(f"{_describe(form)}: {case.values[at]:.6g} does not become {wrong[-1][1][at]!r:.20}")
        if outcome.timed_out:
            break
    _show(lines, explain(wrong, FATE_MISTAKES, lambda a, b: a == b))
    num_right = len(cases) - len(lines)
    print(f"{num_right} of {len(cases)} formats right")
    return award(points, num_right, len(cases))


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == length


def check_choices(function: Any, level: str, points: float, seed: int, num_cases: int = 6) -> float:
    """Grade `choose_format` on the two groups of a level, "easy" or "hard", each for half of the points."""
    return sum(check_choice(function, group, points / 2, seed, num_cases) for group in LEVELS[level])


def check_choice(function: Any, group: str, points: float, seed: int, num_cases: int = 6) -> float:
    """Grade `choose_format(towers, formats, max_lost, headroom)` on one group of cases.

    Args:
        function: the learner's.
        group: a name in `format_cases.GROUPS`.
        points: the cell's maximum; every case is worth the same.
        seed: of the cases.
        num_cases: how many.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    sentence = explain_signature(function, "towers", "formats", "max_lost", "headroom")
    if sentence:
        print(sentence)
        return 0.0
    wrong: list[tuple[Choice, Any]] = []
    lines: list[str] = []
    cases = make_choices(group, seed, num_cases)
    for case in cases:
        outcome = call(function, *case.arguments)
        if outcome.unsolved:
            print("choose_format is not solved yet")
            return 0.0
        answer = _read_choice(outcome.value)
        if outcome.error:
            lines.append(f"{case}: {outcome.error}")
        elif answer is False:
            lines.append(f"{case}: return (name, power) or None, not {outcome.value!r:.40}")
        elif answer != case.answer():
            wrong.append((case, answer))
            lines.append(f"{case}: not {answer}")
        if outcome.timed_out:
            break
    _show(lines, explain(wrong, CHOICE_MISTAKES, lambda a, b: a == b))
    num_right = len(cases) - len(lines)
    print(f"{group}: {num_right} of {len(cases)} cases")
    return award(points, num_right, len(cases))


def _read_choice(value: Any) -> tuple[str, int] | None | bool:
    """Return an answer as (name, power) or None; False if it is neither."""
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[0], str):
        return False
    power = _number(value[1])
    return (value[0], int(power)) if power is not None and power.is_integer() else False


def _show(lines: Sequence[str], sentence: str) -> None:
    """Print some of the wrong cases, and the mistake behind them."""
    for line in lines[:MAX_SHOWN]:
        print(line)
    if len(lines) > MAX_SHOWN:
        print(f"... and {len(lines) - MAX_SHOWN} more")
    if sentence:
        print(f"It looks as if this is why: {sentence}.")
