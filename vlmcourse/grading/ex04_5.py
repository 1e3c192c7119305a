"""Exercise 4.5, graded: say from a trace of all ranks why a run is slow, with evidence and a fix.

Enters: a learner's functions of plain lists and dicts. Leaves: points (always a number from 0 to the cell's maximum)
and printed feedback that names the misconception. The traces of the hidden tests come from the same generator under
another seed.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from vlmcourse.grading.blanks import Blank, BlankUsedError, call_past_blanks, describe_need
from vlmcourse.grading.checks import Outcome, as_number, ask_each, award, explain_signature, show_first
from vlmcourse.grading.trace_answers import FIELDS, RIGHT_FIXES, Answer, read_answer
from vlmcourse.grading.trace_cases import PeriodCase, Trace, TraceCase, make_case, make_cases, make_period_cases
from vlmcourse.grading.trace_cases import make_first as first_trace
from vlmcourse.grading.trace_faults import CAUSES
from vlmcourse.grading.trace_feedback import explain_causes, explain_evidence, explain_fixes, is_period

DIAGNOSIS = ("clocks", "device", "facts", "findings", "host", "order", "waiting")
ANSWERED_BY = (
    *(f"vlmcourse.monitor.diagnosis{part}" for part in ("", *(f".{name}" for name in DIAGNOSIS))),
    *(f"vlmcourse.grading.trace_{part}" for part in ("answers", "cases", "faults", "feedback", "sources")),
    "vlmcourse.grading.ex04_5",
)
"""Modules that hold the answers."""
VISIBLE_SEED, NUM_CASES = 1, 24
"""Of the checks that a learner sees."""
EVIDENCE_WORTH = {"quantity": 0.5, "rank": 0.25, "period": 0.25}
"""Of one trace's worth; rank and period count only with the right quantity."""

__all__ = [
    "check_cause",
    "check_evidence",
    "check_fix",
    "check_period",
    "first_trace",
    "graded_trace",
    "practice_trace",
]


def practice_trace(cause: str, seed: int) -> Trace:
    """Return a trace of a known cause, to try something on.

    Args:
        cause: one of `trace_faults.CAUSES`.
        seed: another one gives another run.

    Raises:
        ValueError: if there is no such cause.
    """
    if cause not in CAUSES:
        raise ValueError(f"cause = {cause!r}: must be one of {', '.join(CAUSES)}")
    return make_case(random.Random(f"practice:{cause}:{seed}"), cause).trace


def graded_trace(number: int, seed: int = VISIBLE_SEED, num_cases: int = NUM_CASES) -> Trace:
    """Return a trace that the visible checks ask about, by the number that their feedback shows.

    Args:
        number: from 0 to below `num_cases`.
        seed: of the check.
        num_cases: of the check.

    Raises:
        ValueError: if there is no such trace.
    """
    if not hasattr(number, "__index__") or not 0 <= number < num_cases:
        raise ValueError(f"number = {number!r}: the check asks about traces 0 to {num_cases - 1}; choose one of these")
    return copy.deepcopy(_make_cases(seed, num_cases)[number].trace)


@lru_cache(maxsize=2)
def _make_cases(seed: int, num_cases: int) -> tuple[TraceCase, ...]:
    """Make the traces of three checks once; whoever gets one gets a copy."""
    return tuple(make_cases(seed, num_cases))


def _takes(function: Any, *names: str) -> bool:
    """Tell whether a function can be called with these arguments by position; say so if not."""
    if wrong := explain_signature(function, *names):
        print(wrong)
    return not wrong


def _ask(function: Any, argument: Any) -> Outcome:
    if not callable(function):
        return Outcome(error=f"this is not a function but {type(function).__name__}")
    return call_past_blanks(function, argument, module=ANSWERED_BY)


# --- The period -----------------------------------------------------------------------------------------------------


def check_period(function: Any, points: float, seed: int, num_cases: int = 12) -> float:
    """Grade `find_period(seconds)`: the steps from spike to spike, up to one; None where there are no regular spikes.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    if not _takes(function, "seconds"):
        return 0.0

    def judge(case: PeriodCase, outcome: Outcome) -> tuple[Any, float, str]:
        if outcome.error:
            return None, 0.0, f"{case}: {outcome.error}"
        got = as_number(outcome.value)
        if got is None and outcome.value is not None:
            return None, 0.0, f"{case}: return a number of steps or None, not {outcome.value!r:.60}"
        if is_period(case.period, got):
            return (got,), 1.0, ""
        return (got,), 0.0, f"{case}: {'None' if got is None else f'{got:.4g}'} is not right"

    cases = make_period_cases(seed, num_cases)
    asked = ask_each("find_period", cases, lambda case: _ask(function, list(case.seconds)), judge)
    if asked is None:
        return 0.0
    _explain_periods([(case, got) for case, (got,) in asked.answers])
    return award(points, asked.earned, num_cases)


def _explain_periods(answers: Sequence[tuple[PeriodCase, float | None]]) -> None:
    """Print what wrong periods look like."""
    wrong = [(case, got) for case, got in answers if not is_period(case.period, got)]
    found: list[str] = []
    if sum(case.period is None for case, _ in wrong) > 1:
        found.append("a steady wait, noise or a single spike was taken for a period")
    if sum(case.period is not None and got is None for case, got in wrong) > 1:
        found.append("regular spikes were overlooked: compare each step with the median, which spikes do not move")
    pairs = [(case, got) for case, got in wrong if case.period is not None and got is not None]
    counts = [abs(got - len(case.seconds) / (case.period or 1)) <= 1 for case, got in pairs]
    if len(counts) > 1 and all(counts):
        found.append("the number of spikes was returned: asked are the steps from one to the next")
    show_first([f"It looks as if {sentence}." for sentence in found])


# --- The diagnosis --------------------------------------------------------------------------------------------------


def _check(
    function: Any,
    points: float,
    part: str,
    cases: Sequence[TraceCase],
    judge: Callable[[TraceCase, Answer], tuple[float, str]],
    explain: Callable[[Sequence[tuple[TraceCase, Answer]]], list[str]],
) -> float:
    """Ask for a diagnosis of each trace, and grade a part of it."""
    if not _takes(function, "trace"):
        return 0.0
    needs = Counter[tuple[str, str]]()

    def judge_outcome(case: TraceCase, outcome: Outcome) -> tuple[Answer | None, float, str]:
        if outcome.raised is BlankUsedError or isinstance(outcome.value, Blank):
            helper = outcome.blank or outcome.value.helper
            needs.update((helper, name) for name in FIELDS)
            return None, 0.0, ""
        if outcome.error:
            return None, 0.0, f"{case}: {outcome.error}"
        answer, wrong = read_answer(outcome.value)
        if answer is None:
            return None, 0.0, f"{case}: {wrong}"
        needs.update({(helper, name if name in FIELDS else "evidence") for name, helper in answer.blanks.items()})
        if part in answer.problems:
            return None, 0.0, "" if part in answer.blanks else f"{case}: {answer.problems[part]}"
        worth, line = judge(case, answer)
        return answer, worth, f"{case}: {line}"

    asked = ask_each("diagnose", cases, lambda case: _ask(function, case.trace), judge_outcome)
    if asked is None:
        return 0.0
    for helper in dict.fromkeys(helper for helper, _ in needs):
        parts = ", ".join(f"{name} in {needs[helper, name]}" for name in FIELDS if needs[helper, name])
        print(f"{helper} is not solved yet; it is needed for {parts} of {len(cases)} traces")
    show_first([f"It looks as if {sentence}." for sentence in explain(asked.answers)])
    return award(points, asked.earned, len(cases))


def _shown(name: str | None) -> str:
    return "None" if name is None else f"'{name}'"


def check_cause(function: Any, points: float, seed: int, num_cases: int = NUM_CASES) -> float:
    """Grade the cause that `diagnose(trace)` returns; each trace counts alike.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """

    def judge(case: TraceCase, answer: Answer) -> tuple[float, str]:
        return float(answer.cause == case.cause), f"'{answer.cause}' is not the cause"

    return _check(function, points, "cause", _make_cases(seed, num_cases), judge, explain_causes)


def check_evidence(function: Any, points: float, seed: int, num_cases: int = NUM_CASES) -> float:
    """Grade the evidence that `diagnose(trace)` returns: half for the quantity, with it a quarter for rank and period.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """

    def judge(case: TraceCase, answer: Answer) -> tuple[float, str]:
        is_quantity = answer.quantity in case.quantities if case.quantities else answer.quantity is None
        if not is_quantity:
            return 0.0, f"{_shown(answer.quantity)} is not the quantity"
        right = {
            "quantity": True,
            "rank": answer.rank == case.rank,
            "period": is_period(case.period, answer.period),
        }
        given = {"rank": answer.rank, "period": answer.period}
        wrong = [
            describe_need(answer.blanks[name]) if name in answer.blanks else f"{given[name]} is not the {name}"
            for name, is_right in right.items()
            if not is_right
        ]
        return sum(EVIDENCE_WORTH[name] for name, is_right in right.items() if is_right), "; ".join(wrong)

    return _check(function, points, "evidence", _make_cases(seed, num_cases), judge, explain_evidence)


def check_fix(function: Any, points: float, seed: int, num_cases: int = NUM_CASES) -> float:
    """Grade the fix that `diagnose(trace)` returns; one that treats a symptom is worth nothing, and is named.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """

    def judge(case: TraceCase, answer: Answer) -> tuple[float, str]:
        return float(answer.fix in RIGHT_FIXES[case.cause]), f"'{answer.fix}' does not remove the cause"

    return _check(function, points, "fix", _make_cases(seed, num_cases), judge, explain_fixes)
