"""The orders in which torch runs its schedules, for any number of ranks, without starting any."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from vlmcourse.parallel.pipeline import CLASSES
from vlmcourse.parallel.timeline import Action
from vlmcourse.planner.schedules import SCHEDULES, stages_of_rank

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


@cache
def torch_order(schedule: str, pp: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank runs, in order, with times of 0."""
    if schedule == "1f1b":  # torch's own list, which its step does not use, begins the last rank with micro-batch 1
        return tuple(tuple(one_f_one_b(rank, pp, num_microbatches)) for rank in range(pp))
    num_stages = pp * SCHEDULES[schedule].stages_per_rank
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=num_stages,
            is_first=stage == 0,
            is_last=stage == num_stages - 1,
            group_size=pp,
            group_rank=0,
            group=None,
            device=None,
            submod=None,
            has_backward=True,
        )
        for stage in stages_of_rank(schedule, pp, 0)
    ]
    runner = CLASSES[schedule](stages if len(stages) > 1 else stages[0], num_microbatches, loss_fn=lambda *_: None)
    return tuple(
        tuple(
            Action(rank, KINDS[a.computation_type.name], a.microbatch_index, a.stage_index, 0.0, 0.0)
            for action in runner.pipeline_order[rank]
            if action is not None
            for a in action.sub_actions or [action]
            if a.computation_type.name in KINDS
        )
        for rank in range(pp)
    )


def one_f_one_b(rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """Return what a rank runs: as many forwards as there are stages from its own on, then a backward and a forward."""
    warm = min(pp - rank, num_microbatches)
    order = [("F", m) for m in range(warm)]
    for m in range(num_microbatches):
        order += [("B", m)] + ([("F", m + warm)] if m + warm < num_microbatches else [])
    return [Action(rank, kind, m, rank, 0.0, 0.0) for kind, m in order]
