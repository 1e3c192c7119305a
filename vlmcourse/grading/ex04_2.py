"""Exercise 4.2, graded: samples of a step, the accumulation that reaches a target, and a step on two real ranks.

Enters: a learner's functions. Leaves: points (always a number from 0 to the cell's maximum) and printed feedback that
names the misconception. The cases of the hidden tests come from the same generators under another seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vlmcourse.batch import effective_batch_size, nearest_accumulation
from vlmcourse.grading.batch_cases import V100, BatchCase, make_batch_cases
from vlmcourse.grading.batch_feedback import explain_batches, explain_choices
from vlmcourse.grading.checks import Asked, Outcome, as_number, ask_each, award, call, explain_signature
from vlmcourse.grading.lab01_1 import is_blank
from vlmcourse.grading.pair_ranks import (
    COLLECTIVE_LIMIT_S,
    AnswerReports,
    run_answers,
    show_kinds,
    show_rank_prints,
    show_unfinished,
)
from vlmcourse.grading.plain import call_plainly
from vlmcourse.grading.step_cases import make_step_cases
from vlmcourse.grading.step_feedback import (
    MAX_SHOWN,
    explain_step_case,
    find_common_mistake,
    is_accumulated,
    is_right,
    num_exchanges,
)

CLUSTER_ARGUMENTS = ("num_gpus", "tp", "pp", "cp")
WORKER = "vlmcourse.grading.step_worker"
REFUSED = ((8, 3, 1, 1), (12, 2, 4, 1), (12, 2, 1, 4))
"""GPUs, tp, pp and cp that cannot be: who forgets a degree, or looks at each by itself, accepts one of them."""
SHARE_OF_GRADIENT, SHARE_OF_EXCHANGE, SHARE_OF_LOSS = 3, 2, 1
"""How the points of `accumulation_step` are shared out."""


# --- a. Samples of a step -------------------------------------------------------------------------------------------


def check_batch_size(function: Any, points: float, seed: int, num_cases: int = 12) -> float:
    """Grade `batch_size(micro_batch, accumulation, num_gpus, tp, pp, cp)` and clusters that cannot be.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    wrong_signature = explain_signature(function, "micro_batch", "accumulation", *CLUSTER_ARGUMENTS)
    if wrong_signature:
        print(wrong_signature)
        return 0.0
    asked = ask_each(
        "batch_size",
        make_batch_cases(seed, num_cases),
        lambda case: _ask(function, case.micro_batch, case.accumulation, *case.cluster),
        _judge_batch,
    )
    if asked is None:
        return 0.0
    _show_mistake(asked, explain_batches)
    refused = [_refuses(function, *degrees) for degrees in REFUSED]
    return award(points, asked.earned + 2 * sum(refused) / len(refused), num_cases + 2) if asked.earned else 0.0


def _ask(function: Any, *args: int) -> Outcome:
    return call_plainly(function, *args, module="vlmcourse.batch")


def _judge_batch(case: BatchCase, outcome: Outcome) -> tuple[float | None, float, str]:
    got = as_number(outcome.value)
    if got == effective_batch_size(case.micro_batch, case.accumulation, case.dp_degree):
        return got, 1.0, ""
    said = f"return a number, not {outcome.value!r:.60}" if got is None else f"{got:g} samples is not right"
    return got, 0.0, f"{case.describe()}, accumulation {case.accumulation}: {outcome.error or said}"


def _refuses(function: Any, num_gpus: int, *degrees: int) -> bool:
    """Tell whether a cluster that its degrees do not divide is refused."""
    outcome = _ask(function, 2, 8, num_gpus, *degrees)
    if not outcome.refused:
        above_1 = [f"{name}={n}" for name, n in zip(CLUSTER_ARGUMENTS[1:], degrees, strict=True) if n > 1]
        what = f"{' and '.join(above_1)} on {num_gpus} GPUs"
        got = outcome.error or f"{outcome.value!r:.60} was returned"
        print(f"{what}: raise a ValueError, the product of the degrees does not divide the GPUs ({got})")
        return False
    return True


def _show_mistake(asked: Asked, explain: Callable[[Any], Sequence[str]]) -> None:
    """Print the mistake behind the wrong cases."""
    for sentence in explain(asked.answers) if asked.num_wrong else ():
        print(f"It looks as if {sentence}.")


def check_v100(function: Any, points: float) -> float:
    """Grade `v100() -> (samples of a step, accumulation for 256 samples)`, half the points each.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    outcome = call(function)
    if outcome.error:
        print("v100 is not solved yet" if outcome.unsolved else outcome.error)
        return 0.0
    try:
        got = [as_number(item) for item in outcome.value]
    except TypeError:
        got = []
    if len(got) != 2 or None in got:
        print(f"return two numbers (samples of a step, accumulation for 256), not {outcome.value!r:.80}")
        return 0.0
    samples = effective_batch_size(V100.micro_batch, V100.accumulation, V100.dp_degree)
    (choice,) = nearest_accumulation(V100.target, V100.micro_batch, V100.dp_degree)
    if got == [choice.accumulation_steps, samples]:
        print("the two are turned round: first the samples of a step, then the accumulation")
        return 0.0
    if got[0] != samples:
        ideas = {16.0: "that is one rank's, or one micro-batch's, part of a step", 256.0: "that is the target"}
        print(f"samples of a step: {got[0]:g} is not right; {ideas.get(got[0] or 0, 'multiply the three numbers')}")
    if got[1] != choice.accumulation_steps:
        ideas = {2.0: "say how many micro-batches, not by what factor", 128.0: "all 8 GPUs have samples of their own"}
        advice = ideas.get(got[1] or 0, "divide by what one round takes")
        print(f"accumulation for 256: {got[1]:g} is not right; {advice}")
    return award(points, (got[0] == samples) + (got[1] == choice.accumulation_steps), 2)


# --- b. How to reach a target ---------------------------------------------------------------------------------------


def check_accumulation(function: Any, points: float, seed: int, num_cases: int = 14) -> float:
    """Grade `accumulation_for(target, micro_batch, num_gpus, tp, pp, cp)`: a list of pairs (accumulation, error).

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    wrong_signature = explain_signature(function, "target", "micro_batch", *CLUSTER_ARGUMENTS)
    if wrong_signature:
        print(wrong_signature)
        return 0.0
    asked = ask_each(
        "accumulation_for",
        make_batch_cases(seed, num_cases),
        lambda case: _ask(function, case.target, case.micro_batch, *case.cluster),
        _judge_pairs,
    )
    if asked is None:
        return 0.0
    _show_mistake(asked, explain_choices)
    return award(points, asked.earned, num_cases) if asked.earned else 0.0


def _judge_pairs(case: BatchCase, outcome: Outcome) -> tuple[list[tuple[float, float]] | None, float, str]:
    pairs = None if outcome.error else read_pairs(outcome.value)
    if pairs is not None and sorted(pairs) == expected_pairs(case):
        return pairs, 1.0, ""
    said = outcome.error or (
        f"{pairs} is not right" if pairs is not None else f"return a list of pairs, not {outcome.value!r:.60}"
    )
    return pairs, 0.0, f"target {case.target}, {case.describe()}: {said}"


def expected_pairs(case: BatchCase) -> list[tuple[float, float]]:
    """Return the right answer to a case, sorted."""
    choices = nearest_accumulation(case.target, case.micro_batch, case.dp_degree)
    return sorted((float(choice.accumulation_steps), float(choice.error)) for choice in choices)


def read_pairs(answer: Any) -> list[tuple[float, float]] | None:
    """Return an answer's pairs of numbers; None if it has none. A single pair alone counts as a list of it."""
    try:
        items = list(answer.items()) if isinstance(answer, dict) else list(answer)
        if len(items) == 2 and all(as_number(item) is not None for item in items):
            items = [items]
        pairs = [tuple(as_number(number) for number in item) for item in items]
    except TypeError:
        return None
    found = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2 and pair[0] is not None and pair[1] is not None]
    return found if len(found) == len(pairs) else None


# --- c. A step on real ranks ----------------------------------------------------------------------------------------


def check_step(
    function: Any, points: float, seed: int, num_cases: int = 5, collective_limit_s: float = COLLECTIVE_LIMIT_S
) -> float:
    """Grade `accumulation_step(model, optimizer, micro_batches, max_norm)` on two ranks against one big batch.

    Args:
        function: the learner's.
        points: the cell's maximum.
        seed: of the cases.
        num_cases: how many.
        collective_limit_s: seconds that a collective may wait for the other rank.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    wrong_signature = explain_signature(function, "model", "optimizer", "micro_batches", "max_norm")
    if wrong_signature:
        print(wrong_signature)
        return 0.0
    if is_blank(function):
        print("accumulation_step is not solved yet")
        return 0.0
    cases = make_step_cases(seed, num_cases)
    try:
        (reports,) = run_answers([function], cases, worker=WORKER, collective_limit_s=collective_limit_s)
    except (ValueError, RuntimeError) as error:
        print(error)
        return 0.0
    show_rank_prints(reports)
    return grade_steps(reports, points, num_cases)


def grade_steps(reports: AnswerReports, points: float, num_cases: int) -> float:
    """Print what was wrong in an answer's cases and return its points; a case that is not accumulated earns none."""
    earned, num_accumulated, counts = 0.0, 0, {"gradient": 0, "exchange": 0, "loss": 0}
    shown: dict[str, list[str]] = {}
    common, common_loss = find_common_mistake(reports.cases), find_common_mistake(reports.cases, "loss")
    for case in reports.cases:
        for key, sentence in explain_step_case(case, common, common_loss).items():
            shown.setdefault(key, []).append(f"{case.case}: {sentence}")
        has_gradient = is_right(case, "gradient")
        exchanged_once = has_gradient and all(0.9 < number < 1.5 for number in num_exchanges(case))
        has_loss = is_right(case, "loss")
        shares = SHARE_OF_GRADIENT * has_gradient + SHARE_OF_EXCHANGE * exchanged_once
        shares += SHARE_OF_LOSS * (has_gradient and has_loss)
        earned += shares * is_accumulated(case)
        num_accumulated += is_accumulated(case)
        for name, value in (("gradient", has_gradient), ("exchange", exchanged_once), ("loss", has_loss)):
            counts[name] += value
    show_kinds(shown, MAX_SHOWN)
    show_unfinished(reports, num_cases)
    if num_accumulated < len(reports.cases):
        print(f"only cases that accumulate earn points: {num_accumulated} of {num_cases}")
    print("; ".join(f"{name} right in {count} of {num_cases} cases" for name, count in counts.items()))
    return award(points, earned / (SHARE_OF_GRADIENT + SHARE_OF_EXCHANGE + SHARE_OF_LOSS), num_cases)
