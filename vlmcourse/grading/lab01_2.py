"""Lab 1.2, graded: layers placed on the stages of a pipeline so that the slowest stage is as fast as possible.

Enters: a learner's function. Leaves: points (always a number from 0 to the cell's maximum) and printed feedback that
names the misconception. The cases of the hidden tests come from the same generators under another seed.
"""

from __future__ import annotations

import math
from typing import Any

from vlmcourse.grading.checks import Outcome, ask_each, award, call, explain_signature
from vlmcourse.grading.placement_feedback import explain_placements, read_placement
from vlmcourse.grading.placements import Placement, credit, make_placements, slowest

CALL_LIMIT_S = 5.0
PROBES = {"small": 20, "vlm": 20, "deep": 5}
PROBE_SEED = 43
"""Cases that a function with wrong answers is asked besides, only to find out why."""


def check_placement(
    function: Any, group: str, points: float, seed: int, num_cases: int = 10, limit_s: float = CALL_LIMIT_S
) -> float:
    """Grade `place_layers(costs, num_stages)` on one group of cases against the exact optimum.

    Args:
        function: the learner's function.
        group: a name in `placements.GROUPS`; "small" also asks for a number of stages that cannot be.
        points: the cell's maximum; each case is worth the same share.
        seed: of the cases.
        num_cases: how many.
        limit_s: seconds for one case.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    wrong_signature = explain_signature(function, "costs", "num_stages")
    if wrong_signature:
        print(wrong_signature)
        return 0.0
    cases = make_placements(group, seed, num_cases)
    asked = ask_each("place_layers", cases, lambda case: _ask(function, case, limit_s), _judge)
    if asked is None:
        return 0.0
    if asked.num_wrong and not asked.stopped:
        sentence = explain_placements([*asked.answers, *_probe(function, limit_s)])
        if sentence:
            print(f"It looks as if {sentence}.")
    num_refusals = 1 if group == "small" else 0
    refused = num_refusals and not asked.stopped and _refuses(function)
    total = num_cases + num_refusals
    print(f"{group}: {asked.earned + refused:.4g} of {total} cases")
    return award(points, asked.earned + refused, total) if asked.earned else 0.0


def _ask(function: Any, case: Placement, limit_s: float) -> Outcome:
    return call(function, list(case.costs), case.num_stages, limit_s=limit_s)


def _judge(case: Placement, outcome: Outcome) -> tuple[list[int] | None, float, str]:
    counts, problem = _read(outcome, case)
    if problem:
        return None, 0.0, f"{case}: {problem}"
    worth = credit(case, counts)
    return counts, worth, f"{case}: {_explain_slow(case, counts)}" if worth < 1 else ""


def _read(outcome: Outcome, case: Placement) -> tuple[list[int], str]:
    """Return an answer's layers of each stage, or what is wrong with it."""
    if outcome.timed_out:
        ways = math.comb(len(case.costs) - 1, case.num_stages - 1)
        steps = case.num_stages * len(case.costs) ** 2
        return [], (
            f"stopped after too long. There are {ways:,} placements; to try all of them is no way, and {steps:,} steps "
            "are enough: what is best for the first layers on fewer stages is computed once and kept"
        )
    if outcome.error:
        return [], outcome.error
    try:
        return read_placement(outcome.value, case)
    except (TypeError, ValueError, OverflowError):  # an answer whose numbers are none, such as NaN
        return [], f"return a list with the number of layers of each stage, not {outcome.value!r:.80}"


def _explain_slow(case: Placement, counts: list[int]) -> str:
    """Say how far a placement is from the best."""
    got, best = slowest(case.costs, counts), case.best()
    return f"{counts} has a slowest stage of {got:.4g}, and {best:.4g} is possible ({got / best - 1:.0%} slower)"


def _probe(function: Any, limit_s: float) -> list[tuple[Placement, list[int]]]:
    """Ask about more cases, up to the first that takes too long."""
    found = []
    for group, num_cases in PROBES.items():
        for case in make_placements(group, PROBE_SEED, num_cases):
            outcome = _ask(function, case, limit_s)
            if outcome.timed_out:
                return found
            counts, problem = _read(outcome, case)
            if not problem:
                found.append((case, counts))
    return found


def _refuses(function: Any) -> bool:
    """Tell whether more stages than layers, and none, are refused."""
    for costs, num_stages in (([3.0, 1.0, 2.0], 4), ([3.0, 1.0, 2.0], 0)):
        outcome = call(function, list(costs), num_stages)
        if not outcome.refused:
            got = outcome.error or f"{outcome.value!r:.60} was returned"
            print(f"{len(costs)} layers on {num_stages} stages: raise a ValueError, each stage needs a layer ({got})")
            return False
    return True
