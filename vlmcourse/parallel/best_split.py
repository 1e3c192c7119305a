"""The split of a pipeline's layers with the shortest step, found by playing the pipeline's own order on paper.

Enters: measured times of the layers, with the order in which the ranks ran their forwards and backwards. Leaves: a
split, the seconds of its step, and whether there is proof that no split has a shorter one. Which split is best depends
on the order: a rank waits for its busiest neighbor, but also while the first micro-batches fill the pipeline and the
last ones leave it. So a split is judged by what `timeline.replay_actions` would make of it, see `played_step.py`.
Chapter 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations, pairwise

from vlmcourse.parallel.layer_times import LayerTimes
from vlmcourse.parallel.played_step import Cuts, Player, backward_costs
from vlmcourse.parallel.split_search import ROUNDING, SplitSearch
from vlmcourse.planner.gpipe_split import gpipe_cuts
from vlmcourse.planner.schedules import SCHEDULES
from vlmcourse.planner.stages import StageSplit, split_at, split_by_cost, stage_rule
from vlmcourse.presets import VLMShape

MAX_PLAYED = 50_000_000
"""Splits x actions of a step up to which every split is played: a few seconds at most."""


@dataclass(frozen=True)
class BestSplit:
    """What a search has found."""

    split: StageSplit
    step_s: float
    """Seconds of a step with it, without messages and optimizer."""
    least_s: float
    """No split has a shorter step than this; equal to `step_s` where that is proven to be the best."""
    num_tried: int
    """Splits, finished or not, that were looked at to find it."""

    @property
    def is_exact(self) -> bool:
        """Whether it is proven that no split has a shorter step, by more than rounding."""
        return self.least_s >= self.step_s


def find_best_split(
    shape: VLMShape,
    times: LayerTimes,
    schedule: str,
    present: StageSplit,
    *,
    block_each: bool = False,
    output_apart: bool = False,
    max_search_s: float = math.inf,
) -> BestSplit:
    """Find the split with the shortest step.

    Gpipe's is found by dynamic programming. For the other schedules every split is played where splits x actions are at
    most `MAX_PLAYED`; where they are more, `SplitSearch` leaves those out of which it can show that they are no better.
    It gives up where it would have to look at too many, or for too long; the result then says how far from the best it
    can be at most.

    Args:
        shape: the model's shape.
        times: of its layers, with an order.
        schedule: one of `SCHEDULES`, the one that the order is of.
        present: the present split, which wins where no other is better.
        block_each: see `split_by_cost`.
        output_apart: see `split_by_cost`.
        max_search_s: seconds that `SplitSearch` may take, and a little more; the others take a few at most.

    Raises:
        ValueError: if the times have no order, or there are fewer layers (or blocks) than stages.
    """
    if not times.order:
        raise ValueError("these times have no order of actions: take them from AdaptivePipelineScheduler.measure")
    num_layers, num_stages = present.num_layers, present.num_stages
    may_be_stage = stage_rule(shape, num_stages, block_each=block_each, output_apart=output_apart)
    costs_s = [f + b for f, b in zip(times.forward_s, backward_costs(times, 1)["B"], strict=True)]
    by_cost = split_by_cost(shape, costs_s, num_stages, block_each=block_each, output_apart=output_apart)
    player = Player(times)
    present_s = player.play([_cuts_of(present)]).item()
    num_splits = math.comb(num_layers - 1, num_stages - 1)
    if schedule == "gpipe":
        found = gpipe_cuts(times.forward_s, times.backward_s, num_stages, may_be_stage)
        cuts, step_s = player.best_of([tuple(found)])
        least_s, num_tried = step_s, 1
    elif num_splits * player.num_actions <= MAX_PLAYED:
        candidates = _allowed(combinations(range(1, num_layers), num_stages - 1), num_layers, may_be_stage)
        cuts, step_s = player.best_of(candidates)
        least_s, num_tried = step_s, len(candidates)
    else:
        order = _order_of_cuts(schedule, num_stages)
        search = SplitSearch(player, may_be_stage, order, _cuts_of(by_cost), max_search_s)
        cuts, step_s, least_s, num_tried = search.run()
    if present_s <= step_s * (1 + ROUNDING):
        least_s = present_s if least_s >= step_s else min(least_s, present_s)
        cuts, step_s = _cuts_of(present), present_s
    return BestSplit(split_at(shape, cuts), step_s, least_s, num_tried)


def _order_of_cuts(schedule: str, num_stages: int) -> list[int]:
    """Return the stages but the first in an order in which both stages of a rank soon stand fixed."""
    half = num_stages // 2
    if SCHEDULES[schedule].v_shaped:
        return [stage for rank in range(1, half) for stage in (rank, num_stages - rank)] + [half]
    if SCHEDULES[schedule].stages_per_rank == 2:
        return [half] + [stage for rank in range(1, half) for stage in (rank, half + rank)]
    return list(range(1, num_stages))


def _cuts_of(split: StageSplit) -> Cuts:
    return tuple(split.layers(stage).start for stage in range(1, split.num_stages))


def _allowed(candidates: Iterable[Cuts], num_layers: int, may_be_stage: Callable[[int, int], bool]) -> list[Cuts]:
    """Return those ways to cut of which each part may be a stage."""
    allowed = {(start, end): may_be_stage(start, end) for end in range(1, num_layers + 1) for start in range(end)}
    return [cuts for cuts in candidates if all(map(allowed.__getitem__, pairwise((0, *cuts, num_layers))))]
