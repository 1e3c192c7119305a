"""Exercise 4.1, graded: bytes of Adam, bytes of a rank, and the choice of a plan.

Enters: a learner's functions. Leaves: points (always a number from 0 to the cell's maximum) and printed feedback that
names the misconception. The cases of the hidden tests come from the same generators under another seed.
"""

from __future__ import annotations

import random
from typing import Any

from vlmcourse.grading.checks import Outcome, as_number, award, call, explain_signature, is_close
from vlmcourse.grading.judgement import ask, explain
from vlmcourse.grading.scenarios import Scenario, make_scenarios
from vlmcourse.grading.state_bytes import ONE_MOMENT, ONE_MOMENT_IN_FP32, RIGHT_STATE, explain_state
from vlmcourse.grading.traces import show_printed

MAX_SHOWN = 3
"""Wrong cases that the feedback shows in full."""

ADAM_BYTES = {"fp32": (4, 4, 8), "bf16_mixed": (2, 2, 12)}
ONE_MOMENT_AGAIN = "12 bytes a parameter again: 4 are missing, a second Adam moment or the fp32 master weights"
NO_MASTER_COPY = "you left out the fp32 copy of the weight: 4 of the optimizer's bytes besides the two moments"


# --- Warm-up 1: bytes of one parameter ------------------------------------------------------------------------------


def check_adam_bytes(function: Any, points: float) -> float:
    """Grade `adam_bytes_per_param(precision) -> (weights, gradients, optimizer)`, half the points a recipe.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    wrong_signature = explain_signature(function, "precision")
    if wrong_signature:
        print(wrong_signature)
        return 0.0
    num_right, said = 0, False
    for precision, expected in ADAM_BYTES.items():
        outcome = call(function, precision)
        show_printed([(outcome.printed, True)])
        if outcome.error:
            print(f"{precision}: {outcome.error}")
            continue
        try:
            got = tuple(as_number(item) for item in outcome.value)
        except TypeError:
            got = ()
        if got == expected:
            num_right += 1
            continue
        sentence = _explain_adam(precision, got, outcome.value)
        if sentence == ONE_MOMENT and num_right:  # fp32 was right, with both moments
            sentence = NO_MASTER_COPY
        is_known = sentence in (ONE_MOMENT, ONE_MOMENT_IN_FP32)
        print(f"{precision}: {ONE_MOMENT_AGAIN if is_known and said else sentence}")
        said = said or is_known
    return award(points, num_right, len(ADAM_BYTES))


def _explain_adam(precision: str, got: tuple[float | None, ...], answer: Any) -> str:
    """Say what is wrong with a triple of byte counts."""
    if len(got) != 3 or None in got:
        return f"return three numbers (weights, gradients, optimizer), not {answer!r:.80}"
    if precision == "fp32" and got == (4, 4, 4):
        return ONE_MOMENT_IN_FP32
    if precision == "bf16_mixed" and got == (2, 2, 8):
        return ONE_MOMENT
    total, right = sum(size for size in got if size is not None), sum(ADAM_BYTES[precision])
    if total == right:
        return f"the sum {total:g} is right, but not how it is shared between weights, gradients and optimizer"
    names = zip(("weights", "gradients", "optimizer"), got, ADAM_BYTES[precision], strict=True)
    wrong = ", ".join(name for name, size, expected in names if size != expected)
    amount = "many" if total > right else "few"
    return f"{answer!r:.80} adds up to {total:g} bytes a parameter, too {amount}: look at {wrong}"


# --- Warm-up 2: bytes of one rank -----------------------------------------------------------------------------------


def check_state_bytes(function: Any, points: float, seed: int, num_cases: int = 12) -> float:
    """Grade `state_bytes_per_rank(num_params, num_ranks, zero_stage)` on generated cases and one bad input.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    wrong_signature = explain_signature(function, "num_params", "num_ranks", "zero_stage")
    if wrong_signature:
        print(wrong_signature)
        return 0.0
    rng = random.Random(f"state:{seed}")
    cases = [
        (rng.randrange(5, 800) * 10**8, rng.choice((1, 2, 4, 8, 16, 64, 256)), stage % 4) for stage in range(num_cases)
    ]
    outcomes: list[tuple[tuple[int, int, int], Outcome]] = []
    for case in cases:
        outcomes.append((case, call(function, *case)))
        if outcomes[-1][1].timed_out:
            break  # the other cases would take as long; they count as wrong
    if all(outcome.unsolved for _, outcome in outcomes):
        print("state_bytes_per_rank is not solved yet")
        return 0.0
    wrong = [pair for pair in outcomes if not is_close(pair[1].value, RIGHT_STATE(*pair[0]))]
    for (num_params, num_ranks, stage), outcome in wrong[:MAX_SHOWN]:
        got = outcome.error or f"{outcome.value!r:.60} is not right"
        if not outcome.error and as_number(outcome.value) is None:
            got = f"return one number, not {outcome.value!r:.60}"
        print(f"{num_params:.2e} parameters on {num_ranks} ranks in stage {stage}: {got}")
    show_printed((o.printed, not is_close(o.value, RIGHT_STATE(*case))) for case, o in outcomes)
    numbers = [(case, as_number(outcome.value)) for case, outcome in outcomes]
    answers = [(case, number) for case, number in numbers if number is not None]
    num_right = len(outcomes) - len(wrong)
    for sentence in explain_state(answers):
        print(f"It looks as if {sentence}.")
    refused = call(function, 10**9, 8, 4).refused
    if not refused:
        print("zero_stage=4: there is no such stage; raise a ValueError")
    return award(points, num_right + refused, num_cases + 1) if num_right else 0.0


# --- The choice of a plan -------------------------------------------------------------------------------------------


def check_strategy(function: Any, group: str, points: float, seed: int, num_cases: int = 10) -> float:
    """Grade `choose_strategy(model, cluster) -> Plan | None` on one group of scenarios.

    Args:
        function: the learner's function.
        group: a name in `scenarios.GROUPS`.
        points: the cell's maximum; each case is worth the same share.
        seed: of the cases.
        num_cases: how many.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    cases = make_scenarios(group, seed, num_cases)
    judged = ask(function, (scenario for case in cases for scenario in case))
    if all(judgement.unsolved for judgement in judged):
        print("choose_strategy is not solved yet")
        return 0.0
    right = {judgement.scenario for judgement in judged if judgement.right}
    num_right = sum(right.issuperset(case) for case in cases)
    wrong = [judgement for judgement in judged if not judgement.right]
    by_reason: dict[str, list[Scenario]] = {}
    for judgement in wrong:
        by_reason.setdefault(judgement.why, []).append(judgement.scenario)
    for why, scenarios in list(by_reason.items())[:MAX_SHOWN]:
        alike = f" (and {len(scenarios) - 1} more like it)" if len(scenarios) > 1 else ""
        print(f"{scenarios[0]}: {why}{alike}")
    unseen = sum(len(scenarios) for scenarios in list(by_reason.values())[MAX_SHOWN:])
    if unseen:
        print(f"... and {unseen} more")
    show_printed((judgement.printed, not judgement.right) for judgement in judged)
    sentence = explain(function, judged) if wrong else ""
    if sentence:
        print(f"It looks as if {sentence}.")
    print(f"{group}: {num_right} of {num_cases} cases right")
    return award(points, num_right, num_cases)
