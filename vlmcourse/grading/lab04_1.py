"""Lab 4.1, graded: recomputation of a chain within a bound on memory, planned and carried out.

Enters: a learner's functions. Leaves: points (always a number from 0 to the cell's maximum) and printed feedback that
names the mistake. The cases of the hidden tests come from the same generators under another seed.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from vlmcourse.grading.chain_cases import make_chains
from vlmcourse.grading.chain_mistakes import explain_plans
from vlmcourse.grading.chain_runs import make_runs, record_run
from vlmcourse.grading.chain_verdicts import LIBRARY, NOT_AGAIN, SHARES, judge_run
from vlmcourse.grading.chains import (
    ChainCase,
    Segments,
    best_segments,
    bytes_alive,
    cost,
    credit,
    lowest_limit,
    peak_bytes,
)
from vlmcourse.grading.checks import Outcome, ask_each, award, call, explain_signature
from vlmcourse.grading.traces import show_printed

CALL_LIMIT_S = 5.0
TOO_LONG = "a chain of a few small layers is run in far less than a second; no other chain was tried"
"""What a run that was stopped is told."""

# --- a. Which layers to recompute -----------------------------------------------------------------------------------


def check_plan(
    function: Any, group: str, points: float, seed: int, num_cases: int, limit_s: float = CALL_LIMIT_S
) -> float:
    """Grade `choose_segments(inputs, inside, costs, limit)` on one group of cases against the exact optimum.

    Args:
        function: the learner's function.
        group: a name in `chain_cases.GROUPS`; "small" also asks for a limit that no plan keeps.
        points: the cell's maximum; each case is worth the same share.
        seed: of the cases.
        num_cases: how many.
        limit_s: seconds for one case.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    wrong_signature = explain_signature(function, "inputs", "inside", "costs", "limit")
    if wrong_signature:
        print(wrong_signature)
        return 0.0
    declined: list[ChainCase] = []
    no_plans: list[ChainCase] = []

    def judge(case: ChainCase, outcome: Outcome) -> tuple[Segments | None, float, str]:
        judged = _judge(case, outcome)
        if outcome.refused:
            declined.append(case)
        elif judged[0] is None and not outcome.error and not outcome.timed_out:
            no_plans.append(case)
        return judged

    cases = make_chains(group, seed, num_cases)
    asked = ask_each("choose_segments", cases, lambda case: _ask(function, case, limit_s), judge)
    if asked is None:
        return 0.0
    wrong = [(case, segments) for case, segments in asked.answers if credit(case, segments) < 1]
    # Where some answers are no plans, what the others have in common is an accident.
    sentence = "" if no_plans else explain_plans(asked.answers, wrong, declined)
    if sentence:
        print(f"It looks as if {sentence}.")
    num_refusals = 1 if group == "small" else 0
    refused = num_refusals and not asked.stopped and _refuses(function, limit_s)
    total = num_cases + num_refusals
    print(f"{group}: {asked.earned + refused:.4g} of {total} cases")
    return award(points, asked.earned + refused, total) if asked.earned else 0.0


def _ask(function: Any, case: ChainCase, limit_s: float) -> Outcome:
    return call(function, list(case.inputs), list(case.inside), list(case.costs), case.limit, limit_s=limit_s)


def _judge(case: ChainCase, outcome: Outcome) -> tuple[Segments | None, float, str]:
    segments, problem = _read(outcome, case)
    if problem:
        return None, 0.0, f"{case}: {problem}"
    worth = credit(case, segments)
    return segments, worth, f"{case}: {_explain_plan(case, segments)}" if worth < 1 else ""


def _read(outcome: Outcome, case: ChainCase) -> tuple[Segments, str]:
    """Return an answer's segments in order, or what is wrong with it."""
    if outcome.timed_out:
        return [], (
            "stopped after too long. To try all plans is no way: where a segment ends, all that matters of what comes "
            "before are the bytes kept and the cost so far, and few pairs of these are worth keeping"
        )
    if outcome.error:
        return [], outcome.error
    try:
        segments = sorted(_as_pair(item) for item in outcome.value)
    except (TypeError, ValueError):
        return [], f"return a list of pairs (start, end), not {outcome.value!r:.80}"
    position = 0
    for start, end in segments:
        if not 0 <= start < end <= case.num_layers:
            return [], (
                f"({start}, {end}) is no segment of {case.num_layers} layers: 0 <= start < end <= {case.num_layers}, "
                "and layer `end` is not part of it"
            )
        if start < position:
            return [], f"segments overlap at layer {start}: `end` is the first layer that is not part of a segment"
        position = end
    return segments, ""


def _as_pair(item: Any) -> tuple[int, int]:
    """Return a segment as a pair of whole numbers; a range or slice is one too."""
    if isinstance(item, (range, slice)):
        item = (item.start, item.stop)
    if not isinstance(item, Iterable):
        raise TypeError
    start, end = (value.item() if hasattr(value, "item") else value for value in item)
    if not all(isinstance(value, numbers.Integral) and not isinstance(value, bool) for value in (start, end)):
        raise TypeError
    return int(start), int(end)


def _explain_plan(case: ChainCase, segments: Segments) -> str:
    """Say how far a plan is from the best."""
    peak, best = peak_bytes(case, segments), best_segments(case)
    assert best is not None
    if peak > case.limit:
        layer = next(start for start, size in bytes_alive(case, segments) if size > case.limit)
        return (
            f"with {segments}, {peak} bytes are alive at once (backward at layer {layer}), {peak - case.limit} too many"
        )
    spent, least = cost(case, segments), cost(case, list(best))
    return f"{segments} fits and recomputes for {spent}, where {least} is enough"


def _refuses(function: Any, limit_s: float) -> bool:
    """Tell whether a limit that no plan keeps is refused."""
    case = make_chains("small", 0, 1)[0]
    impossible = lowest_limit(case) - 1
    outcome = call(function, list(case.inputs), list(case.inside), list(case.costs), impossible, limit_s=limit_s)
    if outcome.refused:
        return True
    got = outcome.error or f"{outcome.value!r:.60} was returned"
    sizes = f"inputs {list(case.inputs)}, inside {list(case.inside)}, limit {impossible}"
    print(f"{sizes}: no plan fits; raise a ValueError ({got})")
    return False


# --- b. Carried out -------------------------------------------------------------------------------------------------


def check_run(function: Any, points: float, seed: int, limit_s: float = 20.0) -> float:
    """Grade `run_chain(layers, x, segments)` on real chains against the library's checkpointing.

    Args:
        function: the learner's function.
        points: the cell's maximum.
        seed: of the chains.
        limit_s: seconds for one chain.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    wrong_signature = explain_signature(function, "layers", "x", "segments")
    if wrong_signature:
        print(wrong_signature)
        return 0.0
    verdicts = dict.fromkeys(SHARES, "right")
    said: list[str] = []
    printed: list[tuple[str, object]] = []
    ran_again = False
    for case in make_runs(seed):
        outcome = call(record_run, function, case, limit_s=limit_s, advice=TOO_LONG)
        if outcome.unsolved:
            print("run_chain is not solved yet")
            show_printed([(outcome.printed, True)])
            return 0.0
        problems = judge_run(outcome, case)
        printed.append((outcome.printed, problems))
        calls = problems.get("calls", "right")  # "" where they were not judged
        ran_again |= bool(case.segments and calls) and not any(text in calls for text in (NOT_AGAIN, LIBRARY))
        for part, problem in problems.items():
            if problem or verdicts[part] == "right":
                verdicts[part] = "wrong" if problem else "not judged"
            if problem and problem not in said:
                said.append(problem)
                print(f"{case}: {problem}")
        if outcome.timed_out:
            break  # the others would take as long
    show_printed(printed)
    print("run: " + ", ".join(f"{part} {verdict}" for part, verdict in verdicts.items()))
    if verdicts["output"] == "right" and not ran_again:
        print("no part counts: in no chain your own code ran all covered layers again")
    counts = verdicts["output"] == "right" and ran_again
    earned = sum(share for part, share in SHARES.items() if counts and verdicts[part] == "right")
    return award(points, earned, sum(SHARES.values()))
