"""Exercise 4.1, graded: bytes of Adam, bytes of a rank, and the choice of a plan.

Enters: a learner's functions. Leaves: points (always a number from 0 to the cell's maximum) and printed feedback that
names the misconception. The cases of the hidden tests come from the same generators under another seed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vlmcourse.grading.checks import Outcome, as_number, award, call, is_close
from vlmcourse.grading.kinds import Need, kind_of
from vlmcourse.grading.misconceptions import (
    ONE_MOMENT,
    RIGHT_STATE,
    SAME_KIND,
    explain_choices,
    explain_plan,
    explain_state,
)
from vlmcourse.grading.scenarios import Scenario, make_scenarios
from vlmcourse.planner import Plan, check_plan

MAX_SHOWN = 3
"""Wrong cases that the feedback shows in full."""

ADAM_BYTES = {"fp32": (4, 4, 8), "bf16_mixed": (2, 2, 12)}

TOO_DEAR = {
    Need.PLAIN: "pays more than it must: DDP fits here. ZeRO-3, tensor and pipeline parallelism send more than DDP, "
    "offloading costs speed and 8-bit Adam precision",
    Need.SHARDED: "pays more than it must: splitting the state over the ranks is enough here, and offloading costs "
    "speed, 8-bit Adam precision",
}


HINTS = {
    "ranks": "you did not count the ranks of all nodes: the product of the degrees must be "
    "num_nodes x devices_per_node",
    "sharding": "you set dp_shard without a zero_stage, or a zero_stage without dp_shard: one says over how many "
    "ranks, the other what is split",
    "precision": "you computed in bf16 on a device that has none: V100 and T4 need fp16 (and loss scaling) or fp32",
    "vision_heads": "you split the vision tower like the language tower: 25 heads divide by neither 2 nor 4",
    "heads": "you split more ways than there are heads",
    "kv_heads": "you looked at the query heads only: tp has to divide the fewer key/value heads too",
    "tp_nodes": "you let a tensor-parallel group cross nodes",
    "host_memory": "you forgot that an offloaded optimizer needs room too, in the node's main memory",
}
"""The misconception behind a problem of `check_plan`, by its code; the first that applies is named."""

PROBES = ("plain", "sharded", "remedy", "limits")
PROBE_SEED = 4
"""Cases that a function with wrong answers is asked besides, only to find out why."""


# --- Warm-up 1: bytes of one parameter ------------------------------------------------------------------------------


def check_adam_bytes(function: Any, points: float) -> float:
    """Grade `adam_bytes_per_param(precision) -> (weights, gradients, optimizer)`, half the points a recipe.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    num_right = 0
    for precision, expected in ADAM_BYTES.items():
        outcome = call(function, precision)
        if outcome.error:
            print(f"{precision}: {outcome.error}")
            continue
        try:
            got = tuple(as_number(item) for item in outcome.value)
        except TypeError:
            got = ()
        if got == expected:
            num_right += 1
        else:
            print(f"{precision}: {_explain_adam(got, outcome.value, expected)}")
    return award(points, num_right, len(ADAM_BYTES))


def _explain_adam(got: tuple[float | None, ...], answer: Any, expected: tuple[int, int, int]) -> str:
    """Say what is wrong with a triple of byte counts."""
    if len(got) != 3 or None in got:
        return f"return three numbers (weights, gradients, optimizer), not {answer!r:.80}"
    total = sum(size for size in got if size is not None)
    if total == 12:
        return ONE_MOMENT
    if total == sum(expected):
        return f"the sum {total:g} is right, but not how it is shared between weights, gradients and optimizer"
    return f"{answer!r:.80} adds up to {total:g} bytes a parameter: count weights, gradients, and all that Adam keeps"


# --- Warm-up 2: bytes of one rank -----------------------------------------------------------------------------------


def check_state_bytes(function: Any, points: float, seed: int, num_cases: int = 12) -> float:
    """Grade `state_bytes_per_rank(num_params, num_ranks, zero_stage)` on generated cases and one bad input.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
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
        got = outcome.error or f"{outcome.value!r:.60}"
        print(f"{num_params:.2e} parameters on {num_ranks} ranks in stage {stage}: {got} is not right")
    numbers = [(case, as_number(outcome.value)) for case, outcome in outcomes]
    answers = [(case, number) for case, number in numbers if number is not None]
    num_right = len(outcomes) - len(wrong)
    sentence = explain_state(answers)
    if sentence:
        print(f"It looks as if {sentence}.")
    refused = call(function, 10**9, 8, 4).error.startswith("ValueError")
    if not refused:
        print("zero_stage=4: there is no such stage; raise a ValueError")
    return award(points, num_right + refused, num_cases + 1) if num_right else 0.0


# --- The choice of a plan -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one answer to one scenario is worth."""

    right: bool
    why: str = ""
    kind: Need | None = None
    """Kind of plan chosen; None if the answer was none that could be judged."""
    hint: str = ""
    """The misconception behind this one answer, where its problems tell."""
    stage_hint: str = ""
    """The misconception that its ZeRO stage suggests."""
    unsolved: bool = False
    timed_out: bool = False
    gave_up: bool = False
    """None was returned although there is a plan."""


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
    flat: list[tuple[Scenario, Judgement]] = []
    num_right = 0
    for case in cases:
        if any(judgement.timed_out for _, judgement in flat):
            break  # the other cases would take as long; they count as wrong
        judged = [(scenario, judge(function, scenario)) for scenario in case]
        num_right += all(judgement.right for _, judgement in judged)
        flat += judged
    if all(judgement.unsolved for _, judgement in flat):
        print("choose_strategy is not solved yet")
        return 0.0
    wrong = [pair for pair in flat if not pair[1].right]
    for scenario, judgement in wrong[:MAX_SHOWN]:
        print(f"{scenario}: {judgement.why}")
    if len(wrong) > MAX_SHOWN:
        print(f"... and {len(wrong) - MAX_SHOWN} more")
    sentence = _explain(function, flat) if wrong else ""
    if sentence:
        print(f"It looks as if {sentence}.")
    print(f"{group}: {num_right} of {num_cases} cases right")
    return award(points, num_right, num_cases)


def _explain(function: Any, judged: list[tuple[Scenario, Judgement]]) -> str:
    """Return the misconception that explains the wrong answers of one group, or "".

    What one plan shows by itself comes first (ranks left out, bf16 where there is none); then giving up on several
    nodes only; then the estimate that the choices follow, for which a mixture of all groups is asked; then what the
    wrong plans' ZeRO stages suggest; last that the choice never changes.
    """
    wrong = [judgement for _, judgement in judged if not judgement.right]
    hint = _most_common([judgement.hint for judgement in wrong])
    if hint or any(judgement.timed_out for judgement in wrong):
        return hint
    mixture = [scenario for group in PROBES for case in make_scenarios(group, PROBE_SEED, 6) for scenario in case]
    probed = judged + [(scenario, judge(function, scenario)) for scenario in mixture]
    given_up = {scenario.cluster.num_nodes > 1 for scenario, judgement in probed if judgement.gave_up}
    if given_up == {True}:
        return HINTS["ranks"]
    choices = [(scenario, judgement.kind) for scenario, judgement in probed if judgement.kind is not None]
    sentence = explain_choices(choices)
    of_stage = _most_common([judgement.stage_hint for judgement in wrong])
    return of_stage if of_stage and sentence in ("", SAME_KIND) else sentence


def _most_common(hints: list[str]) -> str:
    """Return the sentence that at least a third of the wrong answers give; "" if there is none."""
    counts = Counter(hint for hint in hints if hint).most_common(1)
    return counts[0][0] if counts and counts[0][1] >= len(hints) / 3 else ""


def judge(function: Any, scenario: Scenario) -> Judgement:
    """Ask a learner's function about one scenario and judge the answer.

    A plan is right if it trains everything with AdamW, passes `check_plan`, and is of no dearer kind than the scenario
    needs. `None` is right where no plan is possible.
    """
    outcome = call(function, scenario.model, scenario.cluster)
    if outcome.error:
        return Judgement(right=False, why=outcome.error, unsolved=outcome.unsolved, timed_out=outcome.timed_out)
    plan = outcome.value
    if plan is None:
        right = scenario.need == Need.IMPOSSIBLE
        why = "" if right else "you returned None (no plan is possible), but there is one"
        return Judgement(right=right, why=why, kind=Need.IMPOSSIBLE, gave_up=not right)
    if not isinstance(plan, Plan):
        return Judgement(right=False, why=f"return a Plan or None, not {type(plan).__name__}")
    kind = kind_of(plan)
    if plan.frozen:
        why = f"the plan freezes {', '.join(plan.frozen)}: the task is to train every tower"
        return Judgement(right=False, why=why, kind=kind, hint="you made it fit by training less than was asked")
    if plan.optimizer == "sgd_momentum":
        return Judgement(right=False, why="the task is to train with AdamW (8-bit if it must be)", kind=kind)
    verdict = check_plan(plan, scenario.model, scenario.cluster)
    if not verdict.ok:
        why = f"{plan} " + "; ".join(problem.message for problem in verdict.problems)
        hint = next((sentence for code, sentence in HINTS.items() if code in verdict.codes), "")
        return Judgement(right=False, why=why, kind=kind, hint=hint, stage_hint=explain_plan(plan, scenario))
    if kind > scenario.need:
        return Judgement(right=False, why=f"{plan} {TOO_DEAR[scenario.need]}", kind=kind)
    return Judgement(right=True, kind=kind)
