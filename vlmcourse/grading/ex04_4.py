"""Exercise 4.4, graded: what training keeps on one rank, by owner, and the report of a model of two towers.

Enters: a learner's functions of plain numbers. Leaves: points (always a number from 0 to the cell's maximum) and
printed feedback that names the misconception. The cases of the hidden tests come from the same generators under another
seed. Right values are the planner's; numbers count to 1 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlmcourse.grading.assumptions import is_near
from vlmcourse.grading.checks import Outcome, as_number, ask_each, award, explain_signature, show_first
from vlmcourse.grading.memory_cases import (
    OWNERS,
    STAGES,
    ActivationCase,
    ReportCase,
    StateCase,
    Strategy,
    activation_bytes,
    make_activation_cases,
    make_report_cases,
    make_state_cases,
    report_gib,
    state_bytes,
)
from vlmcourse.grading.memory_mistakes import explain_state
from vlmcourse.grading.memory_mistakes_kept import explain_activations, explain_report
from vlmcourse.grading.plain import call_plainly

ANSWERED_BY = tuple(
    f"vlmcourse.planner.{name}" for name in ("memory", "state_bytes", "activations", "layer_activations")
)
"""Modules that hold the answers."""
STATE_ARGUMENTS = ("num_params", "num_ranks", "stage", "precision")
ACTIVATION_ARGUMENTS = ("num_layers", "hidden", "num_heads", "seq_len", "micro_batch", "precision", "flash")
REPORT_ARGUMENTS = ("vision", "language", "batch", "seq_len", "image_tokens", "num_ranks", "stage", "precision")
REPORTED = (*OWNERS, "total")
"""What a report holds; each is worth the same share of the points."""
NO_STAGE, UNEVEN_BATCH = 4, 3
"""A stage that does not exist, and what is added to a batch so that the ranks do not divide it."""

Answers = list[tuple[Any, float]]
"""Pairs of a case with what was asked of it, and the number given."""


def _takes(function: Any, names: Sequence[str]) -> bool:
    """Tell whether a function can be called with these arguments by position; say so if not."""
    if wrong := explain_signature(function, *names):
        print(wrong)
    return not wrong


def _ask(function: Any, *calls: tuple[Any, ...]) -> Outcome:
    """Call a learner's function with each of these arguments, in one go."""
    if not callable(function):
        return Outcome(error=f"this is not a function but {type(function).__name__}")

    def ask_all() -> list[Any]:
        return [function(*arguments) for arguments in calls]

    return call_plainly(ask_all, module=ANSWERED_BY)


def _show_ideas(ideas: Sequence[str]) -> None:
    """Print what the answers look like."""
    for number, sentence in enumerate(ideas):
        print(f"{'And' if number else 'It looks as if'} {sentence}.")


def _refuses(function: Any, arguments: tuple[Any, ...], what: str) -> bool:
    """Tell whether an input that cannot be is refused."""
    outcome = _ask(function, arguments)
    if outcome.refused:
        return True
    got = outcome.error or f"{outcome.value[0]!r:.60} was returned"
    print(f"{what}: raise a ValueError ({got})")
    return False


def _judge_all(
    case: object, outcome: Outcome, asked: Sequence[tuple[str, float]]
) -> tuple[list[float] | None, float, str]:
    """Compare the numbers of one case with the right ones; the case counts if all are right.

    Args:
        case: what the line about it begins with.
        outcome: a list of answers, or an error.
        asked: for each answer what was asked for, and the right number.
    """
    if outcome.error:
        return None, 0.0, f"{case}: {outcome.error}"
    got = [as_number(value) for value in outcome.value]
    for number, answer, (name, right) in zip(got, outcome.value, asked, strict=True):
        if number is None:
            return None, 0.0, f"{case}, {name}: return one number of bytes, not {answer!r:.60}"
        if not is_near(number, right):
            numbers = [each for each in got if each is not None]
            return (
                numbers if len(numbers) == len(got) else None,
                0.0,
                f"{case}, {name}: {number:.5g} bytes is not right",
            )
    return [number for number in got if number is not None], 1.0, ""


# --- Weights, gradients, optimizer state ----------------------------------------------------------------------------


def check_weights(function: Any, points: float, seed: int, num_cases: int = 8) -> float:
    """Grade `weight_bytes(num_params, num_ranks, stage, precision)`; see `_check_state`."""
    return _check_state(function, "weights", "weight_bytes", points, seed, num_cases)


def check_gradients(function: Any, points: float, seed: int, num_cases: int = 8) -> float:
    """Grade `gradient_bytes(num_params, num_ranks, stage, precision)`; see `_check_state`."""
    return _check_state(function, "gradients", "gradient_bytes", points, seed, num_cases)


def check_optimizer(function: Any, points: float, seed: int, num_cases: int = 8) -> float:
    """Grade `optimizer_bytes(num_params, num_ranks, stage, precision)`; see `_check_state`."""
    return _check_state(function, "optimizer", "optimizer_bytes", points, seed, num_cases)


def _check_state(function: Any, owner: str, name: str, points: float, seed: int, num_cases: int) -> float:
    """Grade the bytes of one owner: a model counts if all four stages are right; a stage that is none, as much.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    if not _takes(function, STATE_ARGUMENTS):
        return 0.0

    def ask(case: StateCase) -> Outcome:
        return _ask(function, *((case.num_params, case.num_ranks, stage, case.precision) for stage in STAGES))

    def judge(case: StateCase, outcome: Outcome) -> tuple[list[float] | None, float, str]:
        asked = [
            (f"stage {stage}", state_bytes(owner, case.num_params, case.num_ranks, Strategy(stage, case.precision)))
            for stage in STAGES
        ]
        return _judge_all(case, outcome, asked)

    asked = ask_each(name, make_state_cases(seed, num_cases), ask, judge)
    if asked is None:
        return 0.0
    answers: Answers = [
        ((case, stage), number)
        for case, numbers in asked.answers
        for stage, number in zip(STAGES, numbers, strict=True)
    ]
    _show_ideas(explain_state(owner, answers) if asked.num_wrong else ())
    refused = not asked.stopped and _refuses(
        function, (10**9, 4, NO_STAGE, "fp32"), f"stage {NO_STAGE}: ZeRO has the stages 0 (DDP) to 3"
    )
    return award(points, asked.earned + refused, num_cases + 1) if asked.earned else 0.0


# --- Activations of one tower ---------------------------------------------------------------------------------------


def check_activations(function: Any, points: float, seed: int, num_cases: int = 8) -> float:
    """Grade `activation_bytes(num_layers, hidden, num_heads, seq_len, micro_batch, precision, flash)`.

    A tower counts if it is right with and without flash attention.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    if not _takes(function, ACTIVATION_ARGUMENTS):
        return 0.0

    def ask(case: ActivationCase) -> Outcome:
        shape = (*case.tower[1:], case.seq_len, case.micro_batch, case.precision)
        return _ask(function, *((*shape, flash) for flash in (True, False)))

    def judge(case: ActivationCase, outcome: Outcome) -> tuple[list[float] | None, float, str]:
        shape = (case.tower, case.seq_len, case.micro_batch, case.precision)
        asked = [(f"flash={flash}", activation_bytes(*shape, flash=flash)) for flash in (True, False)]
        return _judge_all(case, outcome, asked)

    asked = ask_each("activation_bytes", make_activation_cases(seed, num_cases), ask, judge)
    if asked is None:
        return 0.0
    answers: Answers = [
        ((case, flash), number)
        for case, numbers in asked.answers
        for flash, number in zip((True, False), numbers, strict=True)
    ]
    _show_ideas(explain_activations(answers) if asked.num_wrong else ())
    return award(points, asked.earned, num_cases)


# --- The report -----------------------------------------------------------------------------------------------------


def check_report(function: Any, points: float, seed: int, num_cases: int = 5) -> float:
    """Grade `memory_report(vision, language, batch, seq_len, image_tokens, num_ranks, stage, precision)`.

    Each owner, and the total, has its share of the points; in a case it counts if it is right for all strategies. A
    total that adds up the learner's own owners, one of them right, is right too. The first case is the exercise's own
    model. A batch that the ranks do not divide counts as a case.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    if not _takes(function, REPORT_ARGUMENTS):
        return 0.0

    def ask(case: ReportCase) -> Outcome:
        return _ask(function, *(case.arguments(strategy) for strategy in case.strategies))

    asked = ask_each("memory_report", make_report_cases(seed, num_cases), ask, _judge_report)
    if asked is None:
        return 0.0
    if asked.num_wrong:
        _explain_reports(asked.answers)
    case = make_report_cases(seed, 1)[0]
    uneven = (case.vision, case.language, case.batch + UNEVEN_BATCH, *case.arguments(case.strategies[0])[3:])
    refused = not asked.stopped and _refuses(
        function, uneven, f"batch {case.batch + UNEVEN_BATCH} on {case.num_ranks} ranks: they cannot share it evenly"
    )
    return award(points, asked.earned + refused, num_cases + 1) if asked.earned else 0.0


def _judge_report(case: ReportCase, outcome: Outcome) -> tuple[list[dict[str, float]] | None, float, str]:
    if outcome.error:
        return None, 0.0, f"{case}: {outcome.error}"
    for answer in outcome.value:
        if not isinstance(answer, Mapping):
            return None, 0.0, f"{case}: return a dict with the keys {', '.join(REPORTED)}, not {answer!r:.100}"
    found = [_read_report(answer) for answer in outcome.value]
    rights = [report_gib(case, strategy) for strategy in case.strategies]
    wrong = {
        owner: (strategy, report.get(owner))
        for strategy, report, right in reversed(list(zip(case.strategies, found, rights, strict=True)))
        for owner in REPORTED
        if not _is_right(owner, report, right)
    }
    lacking = [owner for owner in REPORTED if any(owner not in answer for answer in outcome.value)]
    said = [f"the report has no {' and no '.join(lacking)}"] if lacking else []
    said += [
        f"{owner} is {answer[owner]!r:.60} and must be a number of GiB"
        for owner, answer in {o: a for a in outcome.value for o in a if o in wrong and as_number(a[o]) is None}.items()
    ]
    shown = [
        f"{owner} {number:.5g} GiB ({strategy})"
        for owner, (strategy, number) in sorted(wrong.items(), key=lambda pair: REPORTED.index(pair[0]))
        if number is not None
    ]
    said += [f"not right are {', '.join(shown)}"] if shown else []
    return found, 1 - len(wrong) / len(REPORTED), f"{case}: {'; '.join(said)}"


def _is_right(owner: str, report: Mapping[str, float], right: Mapping[str, float]) -> bool:
    if owner not in report or is_near(report[owner], right[owner]) or owner != "total":
        return owner in report and is_near(report[owner], right[owner])
    is_sum = report.keys() >= set(OWNERS) and is_near(report[owner], sum(report[each] for each in OWNERS))
    return is_sum and any(_is_right(each, report, right) for each in OWNERS)


def _read_report(answer: Mapping[str, Any]) -> dict[str, float]:
    """Return by owner the numbers that a report has."""
    return {o: number for o in REPORTED if o in answer and (number := as_number(answer[o])) is not None}


def _explain_reports(answers: Sequence[tuple[ReportCase, list[dict[str, float]]]]) -> None:
    """Print the mistakes behind all reports, each once, with the owner it shows in where it is not all of them."""
    said: dict[str, list[str]] = {}
    everywhere = set(REPORTED).intersection(*(report for _, reports in answers for report in reports))
    for owner in (owner for owner in OWNERS if owner in everywhere):
        for sentence in explain_report(owner, _numbers_of(answers, lambda report, owner=owner: report[owner])):
            said.setdefault(sentence, []).append(owner)
    for sentence, owners in said.items():
        where = "" if len(owners) == len(OWNERS) else f"{' and '.join(owners)}: "
        print(f"{where}it looks as if {sentence}.")
    if not everywhere.issuperset(REPORTED):
        return
    totals = [(sum(report[o] for o in OWNERS), report["total"]) for _, reports in answers for report in reports]
    in_unit = explain_report("total", totals)
    for sentence in in_unit:
        print(f"total: it looks as if {sentence}.")
    off = [
        f"{case}, {strategy}: the total {report['total']:.5g} GiB is not the sum of your four owners"
        for case, reports in answers
        for strategy, report in zip(case.strategies, reports, strict=True)
        if not is_near(report["total"], sum(report[owner] for owner in OWNERS))
    ]
    show_first(off[: not in_unit])


def _numbers_of(
    answers: Sequence[tuple[ReportCase, list[dict[str, float]]]], read: Callable[[dict[str, float]], float]
) -> Answers:
    return [
        ((case, strategy), read(report))
        for case, reports in answers
        for strategy, report in zip(case.strategies, reports, strict=True)
    ]
