"""Lab 5.1, graded: a ZeRO-1 AdamW on real ranks, against one process, in bytes kept and in bytes sent.

Enters: a learner's class `Zero1AdamW(params, lr, betas, eps, weight_decay)` with `step()` and `zero_grad()`. Leaves:
points (always a number from 0 to the cell's maximum) and printed feedback that names the mistake. The cases of the
hidden tests come from the same generator under another seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmcourse.grading.checks import award, explain_signature
from vlmcourse.grading.lab01_1 import is_blank
from vlmcourse.grading.pair_ranks import COLLECTIVE_LIMIT_S, AnswerReports, run_answers, show_kinds, show_rank_prints
from vlmcourse.grading.zero_cases import make_zero_cases
from vlmcourse.grading.zero_feedback import (
    ABORTED,
    explain_cases,
    has_equal_weights,
    has_right_weights,
    keeps_its_share,
    sends_enough,
)

ARGUMENTS = ("params", "lr", "betas", "eps", "weight_decay")
METHODS = ("step", "zero_grad")
WORKER = "vlmcourse.grading.zero_worker"
MAX_SHOWN = 3
"""Mistakes that the feedback names."""
SHARE_OF_WEIGHTS, SHARE_OF_STATE, SHARE_OF_EQUALITY, SHARE_OF_TRAFFIC = 4, 4, 1, 1
"""How the points are shared out. State counts where the weights are right, the last two where state is right too: so
plain DDP, which splits nothing, stays under half."""


def check_optimizer(
    optimizer_class: Any,
    points: float,
    seed: int,
    num_cases: int = 3,
    world_sizes: Sequence[int] = (2,),
    collective_limit_s: float = COLLECTIVE_LIMIT_S,
) -> float:
    """Grade `Zero1AdamW` on real ranks against `torch.optim.AdamW` in one process.

    Args:
        optimizer_class: the learner's class.
        points: the cell's maximum.
        seed: of the cases.
        num_cases: how many for each number of ranks.
        world_sizes: numbers of ranks.
        collective_limit_s: seconds that a collective may wait for the other ranks.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    problem = _find_problem(optimizer_class)
    if problem:
        print(problem)
        return 0.0
    cases = [case for size in world_sizes for case in make_zero_cases(seed, size, num_cases)]
    try:
        (reports,) = run_answers([optimizer_class], cases, worker=WORKER, collective_limit_s=collective_limit_s)
    except (ValueError, RuntimeError) as error:
        print(error)
        return 0.0
    show_rank_prints(reports)
    return grade_optimizer(reports, points, len(cases))


def _find_problem(optimizer_class: Any) -> str:
    """Say why no rank need be started for an answer, or ""."""
    if not isinstance(optimizer_class, type):
        return f"Zero1AdamW must be a class, not {type(optimizer_class).__name__}"
    if any(is_blank(getattr(optimizer_class, name, None)) for name in ("__init__", *METHODS)):
        return "Zero1AdamW is not solved yet"
    missing = [name for name in METHODS if not callable(getattr(optimizer_class, name, None))]
    if missing:
        return f"Zero1AdamW lacks {' and '.join(f'{name}()' for name in missing)}"
    return explain_signature(optimizer_class, *ARGUMENTS)


def grade_optimizer(reports: AnswerReports, points: float, num_cases: int) -> float:
    """Print what was wrong in an answer's cases and return its points."""
    shown = explain_cases(reports.cases)
    show_kinds(shown, MAX_SHOWN)
    if len(reports.cases) < num_cases:
        if reports.failure and all(case.is_done for case in reports.cases):
            print(ABORTED if "SIGABRT" in reports.failure else f"The ranks did not come to an end: {reports.failure}")
        print(f"{num_cases - len(reports.cases)} more cases were not run")
    right = [case for case in reports.cases if has_right_weights(case)]
    split = [case for case in right if keeps_its_share(case)]
    num_equal, num_sent = sum(map(has_equal_weights, split)), sum(map(sends_enough, split))
    _show_counts(num_cases, len(right), len(split), {"equal on all ranks": num_equal, "bytes sent": num_sent})
    earned = SHARE_OF_WEIGHTS * len(right) + SHARE_OF_STATE * len(split)
    earned += SHARE_OF_EQUALITY * num_equal + SHARE_OF_TRAFFIC * num_sent
    total = SHARE_OF_WEIGHTS + SHARE_OF_STATE + SHARE_OF_EQUALITY + SHARE_OF_TRAFFIC
    return award(points, earned / total, num_cases)


def _show_counts(num_cases: int, num_right: int, num_split: int, others: Mapping[str, int]) -> None:
    """Print in how many cases each property was right, of those in which it was looked at."""
    said = [f"weights right in {num_right} of {num_cases} cases"]
    said += [f"state right in {num_split} of {num_right} cases"] if num_right else []
    said += [f"{name} right in {count} of {num_split} cases" for name, count in others.items() if num_split]
    if not num_split:
        left_out = ", ".join((*(() if num_right else ("state",)), *others))
        said.append(f"{left_out}: not counted where the {'state is' if num_right else 'weights are'} not right")
    print("; ".join(said))
