"""What a step of a pipeline takes with its layers cut otherwise, played on paper in the order that ran.

Enters: measured times of the layers, with the order in which the ranks ran their forwards and backwards. Leaves: the
seconds of a step for many splits at once; for one, they are those of `timeline.replay_actions`. Where a layer stands
may change what it takes: see `backward_costs`. Chapter 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

import torch
from torch import Tensor

from vlmcourse.parallel.layer_times import LayerTimes
from vlmcourse.parallel.timeline import makespan_s, replay_actions
from vlmcourse.planner.stages import StageSplit
from vlmcourse.planner.timeline import needed_by

CHUNK = 8192
"""Splits played at a time."""

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
        self.last_stage = max(action.stage for action in actions)
        equal = {(action.kind, action.stage): 1.0 for action in actions}
        played = replay_actions(times.order, equal)
        self.actions = sorted((action for of_rank in played for action in of_rank), key=lambda action: action.start_s)

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
        for stages in (range(1), range(1, self.last_stage + 1)):
            layers_s = {"F": self.times.forward_s} | backward_costs(self.times, stages.start)
            for kind, seconds in layers_s.items():
                cost_s |= {
                    (kind, stage): of_stage for stage, of_stage in enumerate(of_stages(seconds)) if stage in stages
                }
        clock = [torch.zeros(len(cuts), dtype=torch.float64) for _ in self.times.order]
        ended: dict[tuple[str, int, int], Tensor] = {}
        for action in self.actions:
            needed = needed_by(action.kind, action.microbatch, action.stage, self.last_stage)
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
