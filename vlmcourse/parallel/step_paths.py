"""The ways through a step that its length comes from, and what can be said of all splits by means of them.

Enters: measured times with the order of a step. Leaves: the longest path through the step with any times, as a count of
how often it meets each kind of action on each stage; the split that is best for such counts; and the mixture of counts
whose best split is slowest. A step is as long as its longest path, hence no shorter than any path, nor than any mixture
of paths. What a mixture takes is a sum over the stages, so the split that is best for it is found at once, stage by
stage; and no split has a shorter step than that. Chapter 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vlmcourse.parallel.played_step import Player, backward_costs
from vlmcourse.planner.timeline import needed_by

KINDS = "FBIW"
Array = np.ndarray
STRESS = (2.0, 100.0)
"""How many times as slow a rank is made to find the paths on which it matters."""
CLOSE = 1e-4
"""The share to which a mixture is made as good as can be; a worse one is only a lower bound."""


class Mixture(NamedTuple):
    """What a search for a mixture of paths has found."""

    seconds: float
    """What it takes with the split that is best for it; infinite if no split is allowed."""
    counts: Array
    paths: list[Array]
    """Met on the way."""
    splits: list[tuple[int, ...]]
    """Met on the way, as edges."""


class StepPaths:
    """The paths through a step whose layers can be cut otherwise.

    Counts are float64 [kinds, stages]: how often a path, or on average a mixture of paths, meets each action.
    """

    def __init__(self, player: Player, may_be_stage: Callable[[int, int], bool]) -> None:
        times = player.times
        self.num_stages, self.num_layers = player.last_stage + 1, len(times.forward_s)
        layers = range(self.num_layers + 1)
        costs = [{"F": times.forward_s} | backward_costs(times, stage) for stage in (0, 1)]
        total = np.array([[[0.0, *np.cumsum(of[kind])] for kind in KINDS] for of in costs])
        # Seconds of a kind of action on a stage of the layers from a first to before an end; [1] on any but stage 0.
        self._seconds = total[:, :, None, :] - total[:, :, :, None]
        may_be = np.array([[end > start and may_be_stage(start, end) for end in layers] for start in layers])
        self.allowed = np.repeat(may_be[None], self.num_stages, 0)
        """Which layers may stand on a stage, from a first to before an end, bool [stages, layers + 1, layers + 1]."""
        self._stages_of_ranks = sorted({tuple(sorted({a.stage for a in of_rank})) for of_rank in times.order})
        self._steps = _number_needs(player)

    def stage_s(self, edges: Sequence[int]) -> Array:
        """Return the seconds of each kind of action on each stage cut at these edges, float64 [kinds, stages]."""
        starts, ends = np.array(edges[:-1]), np.array(edges[1:])
        later = (np.arange(self.num_stages) > 0).astype(int)
        return self._seconds[later, :, starts, ends].T

    def longest(self, cost_s: Array) -> tuple[float, Array]:
        """Return the seconds of a step whose actions take these, and the counts of its longest path."""
        cost, ended, chosen = cost_s.tolist(), [0.0], [0]
        for before, needed, kind, stage in self._steps:
            behind = before if ended[before] >= ended[needed] else needed
            chosen.append(behind)
            ended.append(ended[behind] + cost[kind][stage])
        at = max(range(len(ended)), key=ended.__getitem__)
        seconds, counts = ended[at], np.zeros(cost_s.shape)
        while at:
            counts[self._steps[at - 1][2:]] += 1
            at = chosen[at]
        return seconds, counts

    def stress(self, cost_s: Array, is_late: Callable[[], bool]) -> list[Array]:
        """Return the longest paths where one stage or one rank is much slower than it is, for each of them.

        Args:
            cost_s: seconds of each kind of action on each stage.
            is_late: asked after each path; the paths found so far are returned once it says so.
        """
        slowed = [(stage,) for stage in range(self.num_stages)]
        slowed += [stages for stages in self._stages_of_ranks if len(stages) > 1]
        found = []
        for stages in slowed:
            for by in STRESS:
                slower = cost_s.copy()
                slower[:, list(stages)] *= by
                found.append(self.longest(slower)[1])
                if is_late():
                    return found
        return found

    def weigh(self, counts: Array, allowed: Array) -> Array:
        """Return what layers from a first to before an end add if they stand on a stage; infinite if they must not."""
        weighed = np.tensordot(counts.T, self._seconds[1], 1)
        weighed[0] = np.tensordot(counts[:, 0], self._seconds[0], 1)
        return np.where(allowed, weighed, np.inf)

    def mix(self, allowed: Array, starts: Sequence[Array], enough_s: float, rounds: Iterable[int]) -> Mixture:
        """Find the mixture of paths whose best split is slowest.

        A game of two: one mixes splits, one mixes paths, a linear program says how from the moves known so far, and to
        either mixture the other side adds its best answer, until no answer is better than what is known.

        Args:
            allowed: which layers may stand on each stage.
            starts: paths to begin with.
            enough_s: seconds from which on no slower one is looked for.
            rounds: how many answers to ask for; may end early, the best mixture so far is returned then.
        """
        lowest_s, edges = best_split_for(self.weigh(starts[0], allowed))
        best, paths, met = starts[0], list(starts), [edges]
        splits = [self.stage_s(edges)]
        for _ in rounds:
            if lowest_s >= enough_s:
                break
            value_s, of_paths, of_splits = _solve_game(np.array(splits), np.array(paths))
            mixture = np.tensordot(of_paths, np.array(paths), 1)
            found_s, edges = best_split_for(self.weigh(mixture, allowed))
            met.append(edges)
            if found_s > lowest_s:
                lowest_s, best = found_s, mixture
            path_s, path = self.longest(np.tensordot(of_splits, np.array(splits), 1))
            splits_end, paths_end = found_s >= value_s * (1 - CLOSE), path_s <= value_s * (1 + CLOSE)
            if splits_end and paths_end:
                break
            splits += [] if splits_end else [self.stage_s(edges)]
            paths += [] if paths_end else [path]
        return Mixture(lowest_s, best, paths[len(starts) :], met if lowest_s < np.inf else [])


def _number_needs(player: Player) -> list[tuple[int, int, int, int]]:
    """Return for each action, counted from 1, the two it waits for (0 for none), its kind and its stage."""
    steps: list[tuple[int, int, int, int]] = []
    last_of_rank: dict[int, int] = {}
    ended: dict[tuple[str, int, int], int] = {}
    for number, action in enumerate(player.actions, start=1):
        needed = needed_by(action.kind, action.microbatch, action.stage, player.last_stage)
        waits_for = ended[needed] if needed is not None else 0
        steps.append((last_of_rank.get(action.rank, 0), waits_for, KINDS.index(action.kind), action.stage))
        last_of_rank[action.rank] = number
        ended["B" if action.kind == "I" else action.kind, action.microbatch, action.stage] = number
    return steps


def best_split_for(weighed: Array) -> tuple[float, tuple[int, ...]]:
    """Return the least sum of one entry a stage, each beginning where the one before ends, and those edges."""
    num_stages, size, _ = weighed.shape
    value, behind = np.where(np.arange(size) == 0, 0.0, np.inf), []
    for of_stage in weighed:
        sums = value[:, None] + of_stage
        behind.append(sums.argmin(0))
        value = sums.min(0)
    edges = [size - 1]
    for of_stage in reversed(behind):
        edges.append(int(of_stage[edges[-1]]))
    return float(value[-1]), tuple(edges[::-1])


def through_each(weighed: Array) -> Array:
    """Return the least such sum with each entry in it, [stages, layers + 1, layers + 1]."""
    num_stages, size, _ = weighed.shape
    before = [np.where(np.arange(size) == 0, 0.0, np.inf)]
    after = [np.where(np.arange(size) == size - 1, 0.0, np.inf)]
    for stage in range(num_stages - 1):
        before.append((before[-1][:, None] + weighed[stage]).min(0))
        after.append((weighed[num_stages - 1 - stage] + after[-1]).min(1))
    return np.array(before)[:, :, None] + weighed + np.array(after[::-1])[:, None, :]


def _solve_game(splits: Array, paths: Array) -> tuple[float, Array, Array]:
    """Return the value of the game of splits against paths, the mixture of paths, and that of splits."""
    from scipy.optimize import linprog  # half a second, which every rank would wait for at its start

    seconds = splits.reshape(len(splits), -1) @ paths.reshape(len(paths), -1).T
    scale = seconds.max() or 1.0
    num_splits, num_paths = seconds.shape
    solved = linprog(
        np.append(np.zeros(num_paths), -1.0),
        A_ub=np.hstack([-seconds / scale, np.ones((num_splits, 1))]),
        b_ub=np.zeros(num_splits),
        A_eq=np.append(np.ones(num_paths), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * num_paths + [(None, None)],
    )
    # Rounding may leave these a little off; any shares do, if they are at least 0 and together 1.
    of_paths, of_splits = (np.clip(shares, 0, None) for shares in (solved.x[:-1], -solved.ineqlin.marginals))
    return -solved.fun * scale, of_paths / of_paths.sum(), of_splits / (of_splits.sum() or 1.0)
