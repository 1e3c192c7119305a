"""What a pipeline really ran: every forward and backward of a step with its rank, micro-batch, stage and time.

Enters: actions as they happen. Leaves: a list of `Action` a rank, to draw, to compute the bubble from, and to run again
on paper with other times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from vlmcourse.planner.pipeline_order import Step
from vlmcourse.planner.timeline import KINDS, play_order, prepare_order


class Action(NamedTuple):
    """One forward or backward of one micro-batch on one stage."""

    rank: int
    """In the pipeline, 0 .. pp - 1."""
    kind: str
    """F forward, B backward; where backward is split, I is its part for activations and W that for weights."""
    microbatch: int
    stage: int
    start_s: float
    """Seconds since the ranks began the step, on one time axis for all of them."""
    end_s: float

    @staticmethod
    def now(device: torch.device) -> float:
        """Return seconds of a steady clock when all work given to `device` is done."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def start_together(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return this rank's reading of `Action.now` at the moment when the first rank of a group began.

    Steady clocks start anywhere, so the ranks compare wall clocks: exact on one machine, as good as the clocks of
    several agree.

    Communicates: a barrier and an all-reduce of 8 bytes over the group.
    """
    dist.barrier(group)
    wall_s, steady_s = time.time(), Action.now(device)
    first_s = torch.tensor(wall_s, dtype=torch.float64, device=device)
    dist.all_reduce(first_s, dist.ReduceOp.MIN, group=group)
    return steady_s - (wall_s - float(first_s))


OnAction = Callable[[str, int, int, Callable[[], Any]], Any]
"""Kind, micro-batch, stage and what to run; runs it and returns its result."""


class TimedStage(PipelineStage):
    """A stage of torch's pipelines that tells when it computes; waiting for messages is not part of an action."""

    def __init__(self, *args: Any, on_action: OnAction, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_action = on_action

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward."""
        run = super().forward_one_chunk
        return self._on_action("F", fwd_chunk_id, self.stage_index, lambda: run(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a whole backward, or its part for activations."""
        run = super().backward_one_chunk
        kind = "B" if full_backward else "I"
        self._on_action(
            kind, bwd_chunk_id, self.stage_index, lambda: run(bwd_chunk_id, loss, full_backward, last_backward)
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the part of a backward for weights."""
        run = super().backward_weight_one_chunk
        self._on_action("W", bwd_chunk_id, self.stage_index, lambda: run(bwd_chunk_id, last_backward))


def gather_actions(actions: Sequence[Action], group: dist.ProcessGroup) -> list[list[Action]]:
    """Return the actions of all ranks of a group, rank by rank.

    Communicates: one all-gather of objects over the group.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, list(actions), group=group)
    return everyone


def bubble_fraction(ranks: Sequence[Sequence[Action]]) -> float:
    """Return the share of the ranks' time from the first action of any to the last that they spent without action.

    Args:
        ranks: the actions of each rank in one step.
    """
    start = min(action.start_s for actions in ranks for action in actions)
    end = max(action.end_s for actions in ranks for action in actions)
    busy = sum(action.end_s - action.start_s for actions in ranks for action in actions)
    return 1 - busy / (len(ranks) * (end - start))


def makespan_s(ranks: Sequence[Sequence[Action]]) -> float:
    """Return the seconds from the first action of any rank to the end of the last."""
    actions = [action for of_rank in ranks for action in of_rank]
    return max(action.end_s for action in actions) - min(action.start_s for action in actions)


def mean_costs(ranks: Sequence[Sequence[Action]]) -> dict[tuple[str, int], float]:
    """Return the mean seconds of an action by kind and stage."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for action in (action for of_rank in ranks for action in of_rank):
        seconds.setdefault((action.kind, action.stage), []).append(action.end_s - action.start_s)
    return {which: fmean(of_action) for which, of_action in sorted(seconds.items())}


def replay_actions(ranks: Sequence[Sequence[Action]], cost_s: Mapping[tuple[str, int], float]) -> list[list[Action]]:
    """Run the order of a step again on paper: every action begins when its rank is free and its input is there.

    Messages take no time. A forward needs that of the stage before, a backward (whole, or its part for activations)
    that of the stage behind or, on the last stage, its own forward; the part for weights needs that for activations.

    Args:
        ranks: the actions of each rank in their order; their times are not read.
        cost_s: seconds of an action by kind and stage.

    Returns:
        The same actions with other times, from 0 on.

    Raises:
        ValueError: if an action waits for one that never comes.
    """
    order = prepare_order([[Step(*action[1:4]) for action in of_rank] for of_rank in ranks])
    costs_s = [cost_s.get((kind, stage), 0.0) for stage in range(order.num_stages) for kind in KINDS]
    return [
        [action._replace(start_s=timed.start_s, end_s=timed.end_s) for action, timed in zip(*both, strict=True)]
        for both in zip(ranks, play_order(order, costs_s).ranks, strict=True)
    ]
