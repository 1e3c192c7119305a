"""Exercise 4.3, graded: what a number format holds, what survives in it, and which one to train in.

Enters: a learner's functions. Leaves: points (always a number from 0 to the cell's maximum) and printed feedback that
names the misconception. The hidden tests ask the same generators under another seed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum
from types import NoneType
from typing import Any

from vlmcourse.grading.checks import Outcome, award, call, explain_signature, show_first
from vlmcourse.grading.choice_cases import GROUPS, Choice, make_choices
from vlmcourse.grading.choice_feedback import broken_rule, explain_choices
from vlmcourse.grading.fact_feedback import BIASED, FACT_MISTAKES, explain, explain_bias
from vlmcourse.grading.format_cases import FACTS, Gradients, facts_of, make_formats, make_gradients
from vlmcourse.grading.format_feedback import explain_fates
from vlmcourse.grading.traces import show_printed
from vlmcourse.planner.formats import FloatFormat

TOLERANCE = 1e-5
"""Relative: what was computed in float32 is right, what was rounded to one decimal is not."""
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
    printed: list[tuple[str, object]] = []
    for form in make_formats(seed, num_cases):
        outcome = call(function, form.exponent_bits, form.mantissa_bits, form.has_infinity)
        problem = outcome.error
        if not problem and not isinstance(outcome.value, Mapping):
            problem = f"return a dict with the keys {', '.join(FACTS)}, not {type(outcome.value).__name__}"
        if problem:
            unsolved = "format_facts is not solved yet"
            print(unsolved if outcome.unsolved else f"{_describe(form)}: {problem}")
            show_printed([(outcome.printed, True)])
            return 0.0
        printed.append((outcome.printed, any(not _close(outcome.value.get(n), facts_of(form)[n]) for n in FACTS)))
        answers.append((form, outcome.value))
    show_printed(printed)
    _name_missing_keys(answers)
    bias = explain_bias(answers, _close)
    if bias:
        print(bias)
    num_right = sum(_judge_fact(name, answers, explained=bool(bias) and name in BIASED) for name in FACTS)
    print(f"{num_right} of {len(FACTS)} facts right for all of {len(answers)} formats")
    return award(points, num_right, len(FACTS))


def _judge_fact(name: str, answers: Sequence[tuple[FloatFormat, Mapping[str, Any]]], explained: bool) -> bool:
    """Tell whether one fact is right for every format; say what is wrong, and why if that is not explained yet."""
    wrong = [(form, given.get(name)) for form, given in answers if not _close(given.get(name), facts_of(form)[name])]
    if not wrong:
        return True
    form, got = wrong[0]
    if any(name not in given for _, given in answers):
        return False  # said once, of all such keys
    if _number(got) is None:
        print(f"{name} of {_describe(form)}: {_name_non_number(got)}")
        return False
    why = "" if explained else explain(wrong, FACT_MISTAKES[name], _close)
    print(f"{name} of {_describe(form)} is not {_number(got):.6g}" + (f": {why}" if why else ""))
    return False


def _name_missing_keys(answers: Sequence[tuple[FloatFormat, Mapping[str, Any]]]) -> None:
    """Print which keys the first answer without some lacks, and which it has instead."""
    for form, given in answers:
        missing = [name for name in FACTS if name not in given]
        if missing:
            others = ", ".join(f"{key!r:.40}" for key in given if key not in FACTS)
            has = f"; it has {others} instead" if others else ""
            print(f"{_describe(form)}: your dict has no key {', '.join(map(repr, missing))}{has}")
            return


def _name_non_number(got: Any) -> str:
    """Say what stands where a number must."""
    kind = "text" if isinstance(got, str) else f"of type {type(got).__name__}"
    return "None: return a number" if got is None else f"{got!r:.40} is {kind}: return a number"


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
    answers: list[tuple[Gradients, list[Any]]] = []
    lines: list[str] = []
    printed: list[tuple[str, object]] = []
    num_right = 0
    cases = make_gradients(seed, num_cases, edges)
    for case in cases:
        form = case.form
        outcome = call(_listing(function), list(case.values), form.exponent_bits, form.mantissa_bits)
        if outcome.unsolved:
            print("survivors is not solved yet")
            show_printed([(outcome.printed, True)])
            return 0.0
        problem = outcome.error or _no_list(outcome.value, len(case.values))
        if problem:
            problem = f"{_describe(form)}: {problem}"
        else:
            answers.append((case, list(outcome.value)))
            problem = _first_wrong_fate(case, answers[-1][1])
        lines += [problem] if problem else []
        printed.append((outcome.printed, problem))
        num_right += not problem
        if outcome.timed_out:
            break
    _show(lines, explain_fates(answers), printed)
    print(f"{num_right} of {len(cases)} formats right")
    return award(points, num_right, len(cases))


def _first_wrong_fate(case: Gradients, given: Sequence[Any]) -> str:
    """Say what the first number with a wrong answer becomes, and what was answered; "" if all are right."""
    for value, fate, got in zip(case.values, case.fates, given, strict=True):
        if got != fate:
            return f"{_describe(case.form)}: {value:.6g} becomes {fate!r}, not {got!r:.20}"
    return ""


def _listing(function: Any) -> Any:
    """Return a function whose result, where it has an order and is no text, is a list of at most one item too many."""

    def listing(values: list[float], exponent_bits: int, mantissa_bits: int) -> Any:
        most = len(values) + 1
        found = function(values, exponent_bits, mantissa_bits)
        if not isinstance(found, Iterable) or isinstance(found, (str, bytes, Mapping, Set)):
            return found
        items = [_plain_item(item) for item in itertools.islice(found, most)]
        if not isinstance(found, Sequence) and not any(isinstance(item, str) for item in items):
            return found  # such as a tensor of numbers
        return [item if isinstance(item, (str, int, float, NoneType)) else f"{item!r:.20}" for item in items]

    return listing


def _plain_item(item: Any) -> Any:
    """Return what an array or an enumeration's member of one text stands for; else the item itself."""
    if isinstance(item, Enum):
        return item.value
    if getattr(item, "shape", None) in ((), (1,)):
        return item.item()
    return item


def _no_list(value: Any, length: int) -> str:
    """Say what came in place of a list of so many items; "" if it did."""
    wanted = f"return a list with one of {', '.join(FATES)} for each of the {length} numbers, not "
    if not isinstance(value, list):
        return wanted + ("None" if value is None else f"a {type(value).__name__}")
    return "" if len(value) == length else f"{wanted}{len(value) if len(value) < length else 'more'} of them"


def check_choices(function: Any, level: str, points: float, seed: int, num_cases: int = 6) -> float:
    """Grade `choose_format(towers, formats, max_lost, headroom)` on the two groups of a level.

    Args:
        function: the learner's.
        level: "easy" or "hard"; each of its groups is worth half of the points.
        points: the cell's maximum.
        seed: of the cases.
        num_cases: pairs of cases in each group; a pair counts if both answers are right.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    sentence = explain_signature(function, "towers", "formats", "max_lost", "headroom")
    if sentence:
        print(sentence)
        return 0.0
    asked = _ask_choices(function, level, seed, num_cases)
    if any(outcome.unsolved for *_, outcome in asked):
        print("choose_format is not solved yet")
        show_printed([(asked[-1][-1].printed, True)])
        return 0.0
    num_right_of_pair: Counter[tuple[str, int]] = Counter()
    lines = []
    for group, number, case, outcome in asked:
        problem = _choice_problem(case, outcome)
        lines += [f"{case}: {problem}"] if problem else []
        num_right_of_pair[group, number] += not problem
    explanation = explain_choices([(c, a) for *_, c, o in asked if not isinstance(a := _read_choice(o), str)])
    printed = [(outcome.printed, _choice_problem(case, outcome)) for *_, case, outcome in asked]
    _show(lines, [explanation] if explanation else [], printed)
    num_right = 0
    for group in LEVELS[level]:
        in_group = sum(right == 2 for (name, _), right in num_right_of_pair.items() if name == group)
        print(f"{group}: both answers right in {in_group} of {num_cases} pairs")
        num_right += in_group
    return award(points, num_right, num_cases * len(LEVELS[level]))


def _ask_choices(function: Any, level: str, seed: int, num_cases: int) -> list[tuple[str, int, Choice, Outcome]]:
    """Return group, number of the pair, case and outcome of each call; none follows one that took too long."""
    asked = []
    for group in LEVELS[level]:
        for number, pair in enumerate(make_choices(group, seed, num_cases)):
            for case in pair:
                asked.append((group, number, case, call(function, *case.arguments)))
                if asked[-1][-1].timed_out or asked[-1][-1].unsolved:
                    return asked
    return asked


def _choice_problem(case: Choice, outcome: Outcome) -> str:
    """Say what is wrong with the answer to one case; "" if nothing is."""
    answer = _read_choice(outcome)
    if isinstance(answer, str):
        return answer
    if answer == case.answer():
        return ""
    reason = broken_rule(case, answer)
    return f"not {answer}" + (f": {reason}" if reason else "")


def _read_choice(outcome: Outcome) -> tuple[str, int] | None | str:
    """Return an answer as (name, power) or None; a sentence if it is neither."""
    value = outcome.value
    if outcome.error or value is None:
        return outcome.error or None
    wanted = f"return (name, power) or None, not {value!r:.40}"
    if not isinstance(value, (tuple, list)):
        return f"{wanted}, a {type(value).__name__}"
    if len(value) != 2:
        return f"{wanted}: two values, not {len(value)}"
    name, power = value[0], _number(value[1])
    if not isinstance(name, str):
        return f"{wanted}: name must be text, the name of a format"
    if power is None or not power.is_integer():
        return f"{wanted}: power must be " + ("whole" if power is not None else "a whole number")
    return name, int(power)


def _show(lines: Sequence[str], sentences: Sequence[str], printed: Iterable[tuple[str, object]]) -> None:
    """Print some of the wrong cases, what the learner's code printed, and the mistakes behind them."""
    show_first(lines)
    show_printed(printed)
    for sentence in sentences:
        print(f"It looks as if this is why: {sentence}.")
