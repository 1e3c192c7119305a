"""How many micro-batches a stage of a pipeline holds at once, and how many bytes a rank: counted in its order.

Enters: a schedule, ranks, micro-batches; bytes of a micro-batch's activations on each stage. Leaves: the most of each
stage, and of each rank. Times do not matter, the order alone decides. Imports no torch. Chapter 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from vlmcourse.planner.pipeline_order import Step, list_steps
from vlmcourse.planner.schedules import SCHEDULES, stages_of_rank

STEADY_ROUNDS = 4


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


@lru_cache(maxsize=16384)
def list_fullest(schedule: str, pp: int, num_microbatches: int, pp_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the moments of a rank that no other exceeds: micro-batches that its stages hold, first stage first.

    Which of them needs most bytes depends on what each stage keeps. One rank is no pipeline, with one stage.

    Args:
        schedule: one of `schedules.SCHEDULES`.
        pp: ranks of the pipeline.
        num_microbatches: of the step; from `STEADY_ROUNDS` x pp on, a multiple of pp holds no more.
        pp_rank: 0 .. pp - 1.

    Raises:
        ValueError: as `pipeline_order.list_steps`.
    """
    if pp == 1:
        return ((1,),)
    if schedule == "gpipe":
        return ((num_microbatches,),)
    if schedule == "1f1b":
        return ((min(num_microbatches, pp - pp_rank),),)
    if num_microbatches > STEADY_ROUNDS * pp and num_microbatches % pp == 0:
        num_microbatches = STEADY_ROUNDS * pp
    stages = stages_of_rank(schedule, pp, pp_rank)
    steps = list_steps(schedule, pp, num_microbatches)[pp_rank]
    moments = {tuple(held[stage] for stage in stages) for _, held in _walk_held(steps)}
    return tuple(sorted(moment for moment in moments if not any(_exceeds(other, moment) for other in moments)))


def _exceeds(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a moment holds at least as much on every stage as another one does."""
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def _walk_held(steps: Sequence[Step]) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield the stage of each step, and how many micro-batches each stage of the rank holds while it runs."""
    postponed = {(step.microbatch, step.stage) for step in steps if step.kind == "W"}
    held: dict[int, int] = {step.stage: 0 for step in steps}
    for step in steps:
        held[step.stage] += step.kind == "F"
        yield step.stage, held
        held[step.stage] -= step.kind == "W" or (step.kind != "F" and (step.microbatch, step.stage) not in postponed)
