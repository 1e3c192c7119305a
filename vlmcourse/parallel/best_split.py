"""The split of a pipeline's layers with the shortest step, found by playing the pipeline's own order on paper.

Enters: measured times of the layers, with the order in which the ranks ran their forwards and backwards. Leaves: a
split and the seconds of its step. Which split is best depends on the order: a rank waits for its busiest neighbor, but
also while the first micro-batches fill the pipeline and the last ones leave it. So a split is judged by what
`timeline.replay_actions` would make of it, here for many splits at once. Where a layer stands may change what it
takes: see `backward_costs`. Chapter 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import combinations, pairwise
from operator import add, sub

import torch
from torch import Tensor

from vlmcourse.parallel.layer_times import LayerTimes
from vlmcourse.parallel.timeline import makespan_s, needed_by, replay_actions
from vlmcourse.planner.pace import PRECISION, pace_s, split_by_pace
from vlmcourse.planner.schedules import SCHEDULES
from vlmcourse.planner.stages import StageSplit, split_at, split_by_cost, stage_rule
from vlmcourse.presets import VLMShape

MAX_PLAYED = 50_000_000
"""Splits x actions of a step up to which every split is played: about a second."""
BEAM = 8
"""Splits whose neighbors a search looks at together."""
CHUNK = 8192
"""Splits played at a time."""


@dataclass(frozen=True)
class BestSplit:
    """What a search has found."""

    split: StageSplit
    step_s: float
    """Seconds of a step with it, without messages and optimizer."""
    least_s: float
    """No split has a shorter step than this; equal to `step_s` where all were tried."""


def find_best_split(
    shape: VLMShape,
    times: LayerTimes,
    schedule: str,
    present: StageSplit,
    *,
    block_each: bool = False,
    output_apart: bool = False,
) -> BestSplit:
    """Find the split with the shortest step.

    Exact where splits x actions are at most `MAX_PLAYED`: every split is played, of 100 layers on 2 to 4 stages for
    instance. Gpipe's is exact for any size, by dynamic programming. Otherwise the search goes from the split with the
    best pace, that with the fastest slowest stage and the present one to better neighbors as long as there are any: no
    proof, but a bound in the result that says how far from the best it can be at most.

    Args:
        shape: the model's shape.
        times: of its layers, with an order.
        schedule: one of `SCHEDULES`, the one that the order is of.
        present: the present split, which wins where no other is better.
        block_each: see `split_by_cost`.
        output_apart: see `split_by_cost`.

    Raises:
        ValueError: if the times have no order, or there are fewer layers (or blocks) than stages.
    """
    if not times.order:
        raise ValueError("these times have no order of actions: take them from AdaptivePipelineScheduler.measure")
    num_layers, num_stages = present.num_layers, present.num_stages
    may_be_stage = stage_rule(shape, num_stages, block_each=block_each, output_apart=output_apart)
    player = Player(times)
    backward_s = backward_costs(times, 1)["B"]
    first_backward_s = backward_costs(times, 0)["B"] if _splits_backward(times) else None
    by_pace = split_by_pace(
        shape,
        times.forward_s,
        backward_s,
        schedule,
        num_stages // SCHEDULES[schedule].stages_per_rank,
        first_backward_s=first_backward_s,
        block_each=block_each,
        output_apart=output_apart,
    )
    least_pace_s = pace_s(schedule, by_pace, times.forward_s, backward_s, first_backward_s) / (1 + PRECISION)
    by_stage = split_by_cost(
        shape, list(map(add, times.forward_s, backward_s)), num_stages, block_each=block_each, output_apart=output_apart
    )
    starts = [_cuts_of(split) for split in (present, by_pace, by_stage)]
    tries_all = math.comb(num_layers - 1, num_stages - 1) * player.num_actions <= MAX_PLAYED
    if tries_all:
        candidates = combinations(range(1, num_layers), num_stages - 1)
        cuts, step_s = player.best_of([*starts[1:], *_allowed(candidates, num_layers, may_be_stage)])
    else:
        cuts, step_s = _search(player, starts, num_layers, may_be_stage)
    present_s = player.play(starts[:1]).item()
    if present_s <= step_s * (1 + 1e-9):
        cuts, step_s = starts[0], present_s
    is_exact = tries_all or schedule == "gpipe"
    least_s = step_s if is_exact else min(step_s, times.num_microbatches * least_pace_s)
    return BestSplit(split_at(shape, cuts), step_s, least_s)


Cuts = tuple[int, ...]
"""The layers at which all stages but the first begin."""


class Player:
    """Plays the order of a step with the layers cut otherwise, many ways at once."""

    def __init__(self, times: LayerTimes) -> None:
        """Bring the actions into an order in which each comes after what it needs.

        Raises:
            ValueError: if an action waits for one that never comes.
        """
        self.times = times
        actions = [action for of_rank in times.order for action in of_rank]
        self.num_actions = len(actions)
        self._last_stage = max(action.stage for action in actions)
        equal = {(action.kind, action.stage): 1.0 for action in actions}
        played = replay_actions(times.order, equal)
        self._actions = sorted((action for of_rank in played for action in of_rank), key=lambda action: action.start_s)

    def play(self, candidates: Sequence[Cuts]) -> Tensor:
        """Return the seconds of a step for each way to cut the layers, float64 [ways], on CPU."""
        cuts = torch.tensor(candidates).reshape(len(candidates), -1)
        return torch.cat([self._play(some) for some in cuts.split(CHUNK)])

    def best_of(self, candidates: Sequence[Cuts]) -> tuple[Cuts, float]:
        """Return the first of the best ways, and its seconds."""
        seconds = self.play(candidates)
        best = int(seconds.argmin())
        return candidates[best], seconds[best].item()

    def _play(self, cuts: Tensor) -> Tensor:
        num_layers = len(self.times.forward_s)
        edges = torch.nn.functional.pad(torch.nn.functional.pad(cuts, (1, 0)), (0, 1), value=num_layers)

        def of_stages(layers_s: Sequence[float]) -> Tensor:
            """Return the sum over each stage's layers, [stages, ways]."""
            total_s = torch.nn.functional.pad(torch.tensor(layers_s, dtype=torch.float64).cumsum(0), (1, 0))
            return total_s[edges].diff().T

        cost_s: dict[tuple[str, int], Tensor] = {}
        for stages in (range(1), range(1, self._last_stage + 1)):
            layers_s = {"F": self.times.forward_s} | backward_costs(self.times, stages.start)
            for kind, seconds in layers_s.items():
                cost_s |= {
                    (kind, stage): of_stage for stage, of_stage in enumerate(of_stages(seconds)) if stage in stages
                }
        clock = [torch.zeros(len(cuts), dtype=torch.float64) for _ in self.times.order]
        ended: dict[tuple[str, int, int], Tensor] = {}
        for action in self._actions:
            needed = needed_by(action, self._last_stage)
            start = clock[action.rank] if needed is None else torch.maximum(clock[action.rank], ended[needed])
            clock[action.rank] = start + cost_s[action.kind, action.stage]
            kind = "B" if action.kind == "I" else action.kind
            ended[kind, action.microbatch, action.stage] = clock[action.rank]
        return torch.stack(clock).amax(0)


def backward_costs(times: LayerTimes, stage: int) -> dict[str, tuple[float, ...]]:
    """Return what each kind of backward takes of every layer if that layer stands on a stage.

    A backward that is split does the gradients of activations first ("I"), those of weights later ("W"). They take as
    many operations; a frozen layer has only the first. On stage 0, which passes no gradient on, PyTorch postpones all
    of it. Layers before the first trained one need no backward there; on any other stage the split makes them pass
    gradients on, which takes as many operations as their forward, so this is known wherever they were measured.
    """
    trained = times.trained or (True,) * len(times.backward_s)
    whole = list(times.backward_s)
    if _splits_backward(times):
        first_trained = trained.index(True) if any(trained) else len(trained)
        whole[:first_trained] = times.forward_s[:first_trained] if stage else [0.0] * first_trained
    if stage == 0:
        return {"B": tuple(whole), "I": (0.0,) * len(whole), "W": tuple(whole)}
    weights = [seconds / 2 if is_trained else 0.0 for seconds, is_trained in zip(whole, trained, strict=True)]
    return {"B": tuple(whole), "I": tuple(map(sub, whole, weights)), "W": tuple(weights)}


def _splits_backward(times: LayerTimes) -> bool:
    return any(action.kind in "IW" for of_rank in times.order for action in of_rank)


def action_costs(times: LayerTimes, split: StageSplit) -> dict[tuple[str, int], float]:
    """Return the seconds of an action by kind and stage with a split, for `replay_actions`."""
    return {
        (kind, stage): sum(seconds[layer] for layer in split.layers(stage))
        for stage in range(split.num_stages)
        for kind, seconds in ({"F": times.forward_s} | backward_costs(times, stage)).items()
    }


def step_s(times: LayerTimes, split: StageSplit) -> float:
    """Return the seconds of a step with a split, by playing the order of the times."""
    return makespan_s(replay_actions(times.order, action_costs(times, split)))


def _cuts_of(split: StageSplit) -> Cuts:
    return tuple(split.layers(stage).start for stage in range(1, split.num_stages))


def _allowed(candidates: Iterable[Cuts], num_layers: int, may_be_stage: Callable[[int, int], bool]) -> list[Cuts]:
    """Return those ways to cut of which each part may be a stage."""
    allowed = {(start, end): may_be_stage(start, end) for end in range(1, num_layers + 1) for start in range(end)}
    return [cuts for cuts in candidates if all(map(allowed.__getitem__, pairwise((0, *cuts, num_layers))))]


def _search(
    player: Player, starts: Sequence[Cuts], num_layers: int, may_be_stage: Callable[[int, int], bool]
) -> tuple[Cuts, float]:
    """Look at the neighbors of the best ways known, until those of the `BEAM` best ones are all known."""
    known = dict(zip(starts, player.play(starts).tolist(), strict=True))
    seen_around: set[Cuts] = set()
    while front := [cuts for cuts in nsmallest(BEAM, known, key=known.__getitem__) if cuts not in seen_around]:
        seen_around.update(front)
        near = sorted({cuts for center in front for cuts in _neighbors(center, num_layers)} - known.keys())
        near = _allowed(near, num_layers, may_be_stage)
        if near:
            known.update(zip(near, player.play(near).tolist(), strict=True))
    best = min(known, key=known.__getitem__)
    return best, known[best]


def _neighbors(cuts: Cuts, num_layers: int) -> list[Cuts]:
    """Return the ways to cut in which one cut is up to 4 layers elsewhere, or two up to 2, or all behind one by 1."""
    moved: set[Cuts] = set()
    for first in range(len(cuts)):
        moved |= {(*cuts[:first], cuts[first] + by, *cuts[first + 1 :]) for by in range(-4, 5)}
        moved |= {(*cuts[:first], *(cut + by for cut in cuts[first:])) for by in (-1, 1)}
        for second in range(first + 1, len(cuts)):
            for by, other in ((a, b) for a in (-2, -1, 1, 2) for b in (-2, -1, 1, 2)):
                two = list(cuts)
                two[first] += by
                two[second] += other
                moved.add(tuple(two))
    edges = ((0, *way, num_layers) for way in sorted(moved))
    return [way[1:-1] for way in edges if all(a < b for a, b in pairwise(way))]
