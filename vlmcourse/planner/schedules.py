"""The schedules of a pipeline: which rank runs which stage, what each asks for, how long its ranks wait.

Enters: a schedule's name, the ranks of a pipeline, and the micro-batches of a step. Leaves: the stages of each rank, a
list of what is wrong with a wish, and the bubble that is left at best. Imports no torch. `parallel/pipeline.py` runs
them. Chapter 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.planner.stages import StageSplit


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order in which a rank runs forwards and backwards of micro-batches."""

    stages_per_rank: int
    v_shaped: bool = False
    """Whether the ranks' second stages stand in reverse order, so that the last rank's two are neighbours."""
    splits_backward: bool = False
    """Whether gradients of weights are computed later than those of activations, to fill the bubble."""
    source: str = ""


SCHEDULES = {
    "gpipe": Schedule(stages_per_rank=1, source="Huang et al. 2019 (arXiv:1811.06965)"),
    "1f1b": Schedule(stages_per_rank=1, source="Narayanan et al. 2019 (PipeDream), 2021 (arXiv:2104.04473)"),
    "interleaved": Schedule(stages_per_rank=2, source="Narayanan et al. 2021 (arXiv:2104.04473), section 2.2"),
    "zbv": Schedule(
        stages_per_rank=2, v_shaped=True, splits_backward=True, source="Qi et al. 2023 (arXiv:2401.10241), section 6"
    ),
    "dualpipev": Schedule(
        stages_per_rank=2, v_shaped=True, splits_backward=True, source="DeepSeek-AI 2024 (arXiv:2412.19437)"
    ),
}
"""The schedules that a pipeline can run, by the name that the configuration uses."""


def stages_of_rank(schedule: str, pp: int, pp_rank: int) -> tuple[int, ...]:
    """Return the stages that a rank of a pipeline runs, first to last.

    Args:
        schedule: one of `SCHEDULES`.
        pp: ranks of the pipeline.
        pp_rank: 0 .. pp - 1.
    """
    chosen = SCHEDULES[schedule]
    if chosen.v_shaped:
        return pp_rank, 2 * pp - 1 - pp_rank
    return tuple(pp_rank + pp * i for i in range(chosen.stages_per_rank))


def find_schedule_problems(
    schedule: str,
    *,
    pp: int,
    num_microbatches: int,
    data_strategy: str = "single",
    reshard_after_forward: bool = True,
) -> list[str]:
    """Return what is wrong with a pipeline, each with what to change; nothing if it can run.

    Args:
        schedule: how forwards and backwards are ordered.
        pp: ranks of the pipeline.
        num_microbatches: micro-batches of one optimizer step, which is `accumulation_steps`.
        data_strategy: what happens to each stage over the data-parallel ranks: single (nothing), ddp or fsdp.
        reshard_after_forward: with fsdp, whether gathered weights are freed after forward (ZeRO-3) or kept (ZeRO-2).
    """
    if schedule not in SCHEDULES:
        return [f"schedule {schedule!r} is unknown: choose one of {', '.join(SCHEDULES)}"]
    found = [] if pp >= 2 else [f"pp={pp}: a pipeline needs at least 2 ranks"]
    # As torch.distributed.pipelining states them; below these its schedules raise, or have no order to run.
    least = {"1f1b": pp, "dualpipev": 2 * pp}.get(schedule, 1)
    if num_microbatches < least:
        found.append(
            f"a step of {_count(num_microbatches)} with pp={pp}, and {schedule} needs at least {least}: raise "
            "train.accumulation_steps or choose gpipe"
        )
    rounds = max(1, num_microbatches // max(pp, 1))
    if schedule == "interleaved" and num_microbatches % rounds:
        found.append(
            f"a step of {_count(num_microbatches)} with pp={pp}, which interleaved runs in {rounds} equal rounds of at "
            f"least {pp}: set train.accumulation_steps to a multiple of {pp}"
        )
    return found + _find_data_problems(schedule, data_strategy, reshard_after_forward)


def _count(num_microbatches: int) -> str:
    return f"{num_microbatches} micro-batch" + ("" if num_microbatches == 1 else "es")


def _find_data_problems(schedule: str, data_strategy: str, reshard_after_forward: bool) -> list[str]:
    if data_strategy not in ("single", "ddp", "fsdp"):
        return [f"data strategy {data_strategy!r} is unknown: choose single, ddp or fsdp"]
    if not SCHEDULES[schedule].splits_backward:
        return []
    if data_strategy == "ddp":
        return [
            f"{schedule} over ddp trains on wrong gradients in silence: DDP exchanges them before the postponed ones "
            "of the weights are there; choose strategy = 'zero2', or 1f1b or interleaved"
        ]
    if data_strategy == "fsdp" and reshard_after_forward:
        return [
            f"{schedule} over fsdp leaves gradients out in silence: weights are gone when their postponed gradients "
            "are computed; choose strategy = 'zero2', which keeps them until then, or 1f1b or interleaved"
        ]
    return []


def check_schedule(
    schedule: str,
    *,
    pp: int,
    num_microbatches: int,
    data_strategy: str = "single",
    reshard_after_forward: bool = True,
) -> None:
    """Refuse a pipeline that cannot run, or would train on wrong gradients; see `find_schedule_problems`.

    Raises:
        ValueError: naming everything that is wrong.
    """
    found = find_schedule_problems(
        schedule,
        pp=pp,
        num_microbatches=num_microbatches,
        data_strategy=data_strategy,
        reshard_after_forward=reshard_after_forward,
    )
    if found:
        raise ValueError("This pipeline cannot run: " + "; ".join(found))


def find_tied_problem(schedule: str, split: StageSplit, *, tied_embeddings: bool) -> str | None:
    """Return why a schedule cannot run a split of a model with tied embeddings, with what to change; None if it can.

    Args:
        schedule: one of `SCHEDULES`.
        split: which layers stand on which stage.
        tied_embeddings: whether embedding and output share one matrix.
    """
    if not tied_embeddings or not SCHEDULES[schedule].splits_backward or split.fusion_stage < split.num_stages - 1:
        return None
    # The second use is reached from the first, so the graph is gone when its postponed gradient is asked for.
    return (
        f"{schedule} with tied embeddings and all language layers on the last stage: PyTorch cannot postpone the "
        "gradient of a matrix that one stage uses at both ends; put the projector on an earlier stage than the output, "
        "or choose 1f1b or interleaved"
    )


def ideal_bubble_fraction(schedule: str, pp: int, num_microbatches: int) -> float:
    """Return the share of a rank's time that it waits, with equal stages and messages that take no time.

    The time is that of the rank with the longest way from its first action to its last. Forward, gradients of
    activations and gradients of weights of a stage take equally long.

    Args:
        schedule: one of `SCHEDULES`.
        pp: ranks of the pipeline.
        num_microbatches: micro-batches of one optimizer step.

    Raises:
        ValueError: if the schedule has no order for this number of micro-batches.
    Source: Narayanan et al. 2021, section 2.2 (gpipe, 1f1b, interleaved from pp micro-batches on); Qi et al. 2023,
        section 6 (zbv from 2 pp - 1 micro-batches on: nothing). For fewer, and for dualpipev, counted in the orders
        that torch runs, for dualpipev without overlap of forward and backward.
    """
    if schedule in ("interleaved", "dualpipev"):  # of the others the numbers hold for any number
        check_schedule(schedule, pp=pp, num_microbatches=num_microbatches)
    idle, work = {
        "gpipe": (pp - 1, num_microbatches),
        "1f1b": (pp - 1, num_microbatches),
        "interleaved": (pp - 1 + max(0, pp - num_microbatches), 2 * num_microbatches),
        "zbv": (max(0, 2 * pp - 1 - num_microbatches), 3 * num_microbatches),
        "dualpipev": (pp - 1, 6 * num_microbatches),
    }[schedule]
    return idle / (idle + work)
