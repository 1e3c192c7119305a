"""How many micro-batches a stage of a pipeline holds at once, and how many bytes a rank: counted in its order.

Enters: a schedule, ranks, micro-batches; bytes of a micro-batch's activations on each stage. Leaves: the most of each
stage, and of each rank. Times do not matter, the order alone decides. Imports no torch. Chapter 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from vlmcourse.planner.pipeline_order import Step, list_steps
from vlmcourse.planner.schedules import SCHEDULES


@lru_cache(maxsize=512)
def count_held(schedule: str, pp: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the most micro-batches that each stage holds activations of at once.

    From the start of a forward to the end of the backward, its part for weights included; it depends on the order
    alone. Arguments and errors as of `pipeline_order.list_steps`.
    """
    orders = list_steps(schedule, pp, num_microbatches)
    peaks = [0] * (pp * SCHEDULES[schedule].stages_per_rank)
    for of_rank in orders:
        for stage, held in _walk_held(of_rank):
            peaks[stage] = max(peaks[stage], held[stage])
    return tuple(peaks)


def peak_held_bytes(schedule: str, pp: int, num_microbatches: int, stage_bytes: Sequence[float]) -> tuple[float, ...]:
    """Return the most bytes of activations that each rank holds at once, its stages together.

    Two stages of a rank need not hold most at the same time, so this can be less than the sum of their peaks.

    Args:
        schedule: one of `schedules.SCHEDULES`.
        pp: ranks of the pipeline.
        num_microbatches: of the step.
        stage_bytes: of one micro-batch on each stage.
    """
    return tuple(
        max(sum(stage_bytes[stage] * count for stage, count in held.items()) for _, held in _walk_held(of_rank))
        for of_rank in list_steps(schedule, pp, num_microbatches)
    )


def _walk_held(steps: Sequence[Step]) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield the stage of each step, and how many micro-batches each stage of the rank holds while it runs."""
    postponed = {(step.microbatch, step.stage) for step in steps if step.kind == "W"}
    held: dict[int, int] = {step.stage: 0 for step in steps}
    for step in steps:
        held[step.stage] += step.kind == "F"
        yield step.stage, held
        held[step.stage] -= step.kind == "W" or (step.kind != "F" and (step.microbatch, step.stage) not in postponed)
