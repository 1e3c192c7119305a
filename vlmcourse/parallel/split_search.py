"""The search for the split with the shortest step among more splits than can be played, with a proof or a bound.

Enters: the player of a step and a split to beat. Leaves: the best split, and seconds that no split is below. The cuts
are fixed one after another, rank by rank. What is fixed so far goes on only while every mixture of paths through the
step (see `step_paths.py`) leaves room for a shorter step than the best one known: branch and bound. Where too much
goes on, only the most promising part does, and what was dropped is remembered by its bound; then the search begins
again with a shorter step to beat and more room, until nothing is dropped that could be better, or its time is up: other
ranks wait for it. Chapter 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import NamedTuple, TypeVar

import numpy as np

from vlmcourse.parallel.played_step import Cuts, Player
from vlmcourse.parallel.step_paths import Array, Mixture, StepPaths, through_each

WIDTHS = (300, 3_000, 30_000)
"""How many unfinished splits go on after a cut, try after try. With these, the best of 59 unlike layers on 8 ranks was
proven for 1f1b in 0.2 s of one processor, for zbv and interleaved in 10 s. Interleaved with the vision tower frozen
took 33 s and left 0.2 % open; 96 such layers 77 s, and 7 %.
"""
ROUNDS = 40
"""Answers asked for to mix paths for all splits; a quarter of it for some."""
MIXTURES = 3
"""Mixtures made for the unfinished splits after a cut, if there are more than `FEW`."""
FEW = 300
KEPT = 40
"""Mixtures that the next try begins with: those that ended most."""
ROUNDING = 1e-9
"""The share by which a step must be shorter to count as shorter."""
T = TypeVar("T")


class Found(NamedTuple):
    """What a search has found."""

    cuts: Cuts
    step_s: float
    least_s: float
    """No split has a shorter step; `step_s` where that is proven to be the best, but for `ROUNDING`."""
    num_tried: int
    """Unfinished and finished splits looked at."""


class _Bound:
    """What a mixture of paths says of splits of which some edges are fixed."""

    def __init__(self, counts: Array, weighed: Array, turn: dict[int, int]) -> None:
        self.counts, self.arcs = counts, weighed
        self.num_ended = 0
        """How many unfinished splits it has ended."""
        self._turn = turn
        self._gaps: dict[tuple[int, int], Array] = {}

    def gap(self, first: int, end: int) -> Array:
        """Return the least that stages `first` to before `end` add, by their first layer and the end of their last."""
        if end == first + 1:
            return self.arcs[first]
        if (first, end) not in self._gaps:
            # From the side whose edge is fixed first: what is left then is a gap that is asked for as well.
            if self._turn[first + 1] <= self._turn[end - 1]:
                sums = _least_sums(self.arcs[first], self.gap(first + 1, end))
            else:
                sums = _least_sums(self.gap(first, end - 1), self.arcs[end - 1])
            self._gaps[first, end] = sums
        return self._gaps[first, end]


def _least_sums(left: Array, right: Array) -> Array:
    """Return for each row of `left` and column of `right` the least sum of an entry of both: a product in (min, +)."""
    rows, between = np.isfinite(left).any(1), np.isfinite(left).any(0) & np.isfinite(right).any(1)
    columns, sums = np.isfinite(right).any(0), np.full(left.shape, np.inf)
    if between.any():
        some = left[np.ix_(rows, between)][:, :, None] + right[np.ix_(between, columns)][None]
        sums[np.ix_(rows, columns)] = some.min(1)
    return sums


Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class _Part:
    """Splits of which the same edges are fixed."""

    edges: Array
    """Int [splits, stages + 1]; -1 where not fixed yet."""
    spent: Array
    """What the stages between fixed edges add to each mixture, float64 [splits, mixtures]."""
    least_s: Array
    """No step of any split with these edges is shorter, float64 [splits]."""

    def take(self, which: Array) -> _Part:
        return _Part(self.edges[which], self.spent[which], self.least_s[which])


class SplitSearch:
    """Looks for the best split of a step's layers."""

    def __init__(
        self,
        player: Player,
        may_be_stage: Callable[[int, int], bool],
        order: Sequence[int],
        start: Cuts,
        max_s: float = np.inf,
    ) -> None:
        """Begin with a split.

        Args:
            player: plays the step.
            may_be_stage: see `stage_rule`.
            order: of the stages but the first, in which their first layers are fixed.
            start: a split to beat.
            max_s: seconds from now after which the search ends with what it has, after one more path or mixture.
        """
        self._until_s = time.monotonic() + max_s
        self.player, self.paths, self.order = player, StepPaths(player, may_be_stage), order
        self.num_stages, self.num_layers = self.paths.num_stages, self.paths.num_layers
        self.allowed = self.paths.allowed
        self.turn = {edge: number for number, edge in enumerate(order)}
        self.best, self.best_s = start, player.play([start]).item()
        self.mixtures: list[Array] = []
        self.met: list[Array] = []
        """Paths that were met, to begin other mixtures with."""
        self.num_tried, self.dropped_s = 0, np.inf

    @property
    def to_beat_s(self) -> float:
        """Seconds of a step that is worth finding."""
        return self.best_s * (1 - ROUNDING)

    def run(self) -> Found:
        """Search until nothing is dropped that could be better, all widths are tried, or the time is up."""
        least_s = 0.0
        for width in WIDTHS:
            if self._is_late and least_s:
                break
            least_s = max(least_s, self._rule_out())
            self.dropped_s = np.inf
            if least_s < self.to_beat_s:
                self._try(width)
            least_s = max(least_s, min(self.dropped_s, self.best_s))
            if least_s >= self.to_beat_s:
                return Found(self.best, self.best_s, self.best_s, self.num_tried)
        return Found(self.best, self.best_s, least_s, self.num_tried)

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self._until_s

    def _in_time(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items until the time is up: whatever uses mixtures is right with some of them too."""
        return takewhile(lambda _: not self._is_late, items)

    def _rule_out(self) -> float:
        """Forbid what no better split has on a stage; return seconds that no split is below."""
        least_s = 0.0
        stressed = self.paths.stress(self.paths.stage_s((0, *self.best, self.num_layers)), lambda: self._is_late)
        self.mixtures += stressed
        for _ in range(2):
            for counts in self._in_time(self.mixtures):
                weighed = self.paths.weigh(counts, self.allowed)
                self.allowed = self.allowed & (through_each(weighed) < self.to_beat_s)
            mixture = self._mix(self.allowed, stressed, ROUNDS)
            self.mixtures.append(mixture.counts)
            least_s = max(least_s, min(mixture.seconds, self.best_s))
            if self._is_late:
                break
        return least_s

    def _mix(self, allowed: Array, starts: list[Array], num_rounds: int) -> Mixture:
        """Mix paths; keep those met, and the best of the splits met."""
        mixture = self.paths.mix(allowed, starts, self.to_beat_s, self._in_time(range(num_rounds)))
        self.met += mixture.paths
        if mixture.splits:
            self._play([edges[1:-1] for edges in mixture.splits])
        return mixture

    def _play(self, candidates: list[Cuts]) -> None:
        cuts, step_s = self.player.best_of(candidates)
        if step_s < self.to_beat_s:
            self.best, self.best_s = cuts, step_s

    def _try(self, width: int) -> None:
        """Fix the cuts one after another, and play what is left at the end."""
        bounds = [
            _Bound(counts, self.paths.weigh(counts, self.allowed), self.turn) for counts in self._in_time(self.mixtures)
        ]
        edges = np.full((1, self.num_stages + 1), -1)
        edges[0, 0], edges[0, -1] = 0, self.num_layers
        part = _Part(edges, np.zeros((1, len(bounds))), np.zeros(1))
        for number, edge in enumerate(self.order):
            if self._is_late:
                self.dropped_s = min(self.dropped_s, part.least_s.min())
                return
            part = self._fix(part, edge, bounds)
            self.num_tried += len(part.edges)
            for _ in range(MIXTURES if number < len(self.order) - 1 else 0):
                if len(part.edges) > FEW and not self._is_late:
                    part = self._narrow(part, bounds)
            if not len(part.edges):
                break
            part = self._keep(part, width)
        if self._is_late:
            part = self._keep(part, FEW)
        if len(part.edges):
            self._play([tuple(cuts) for cuts in part.edges[:, 1:-1].tolist()])
        useful = sorted((bound for bound in bounds if bound.num_ended), key=lambda bound: -bound.num_ended)
        self.mixtures = [bound.counts for bound in useful[:KEPT]]

    def _keep(self, part: _Part, width: int) -> _Part:
        """Return the most promising splits, and remember the bound of the others."""
        if len(part.edges) <= width:
            return part
        order = part.least_s.argsort(kind="stable")
        self.dropped_s = min(self.dropped_s, part.least_s[order[width]])
        return part.take(np.sort(order[:width]))

    def _fix(self, part: _Part, edge: int, bounds: list[_Bound]) -> _Part:
        """Return all ways to fix one more edge that may lead to a better split."""
        known = np.flatnonzero(part.edges[0] >= 0).tolist()
        before, behind = max(e for e in known if e < edge), min(e for e in known if e > edge)
        may_be = np.broadcast_to(self.allowed[edge].any(1), (len(part.edges), self.num_layers + 1))
        if before == edge - 1:
            may_be = may_be & self.allowed[before][part.edges[:, before]]
        if behind == edge + 1:
            may_be = may_be & self.allowed[edge][:, part.edges[:, behind]].T
        parent, layer = may_be.nonzero()
        edges = part.edges[parent]
        edges[:, edge] = layer
        spans = [(a, b) for a, b in ((before, edge), (edge, behind)) if b == a + 1]
        gaps = [(a, b) for a, b in pairwise(sorted([*known, edge])) if b > a + 1]
        new = _Part(edges, part.spent, part.least_s[parent])
        return self._end(new, parent, list(enumerate(bounds)), spans, gaps)

    def _end(self, part: _Part, parent: Array, bounds: list[tuple[int, _Bound]], spans: Pairs, gaps: Pairs) -> _Part:
        """End what a bound speaks against, and keep the rest.

        Args:
            part: with `spent` as it was before.
            parent: which line of that belongs to each of the splits.
            bounds: with their columns in it.
            spans: fixed edges with one stage between that is new to these bounds.
            gaps: fixed edges with several stages between.
        """
        left = np.arange(len(part.edges))
        for column, bound in self._in_time(sorted(bounds, key=lambda numbered: -numbered[1].num_ended)):
            sums_s = part.spent[parent[left], column]
            for a, b in [*spans, *gaps]:
                sums_s = sums_s + bound.gap(a, b)[part.edges[left, a], part.edges[left, b]]
            part.least_s[left] = np.maximum(part.least_s[left], sums_s)
            stays = sums_s < self.to_beat_s
            bound.num_ended += len(left) - int(stays.sum())
            left = left[stays]
        edges, spent = part.edges[left], part.spent[parent[left]]
        for column, bound in bounds:
            for a, b in spans:
                spent[:, column] += bound.gap(a, b)[edges[:, a], edges[:, b]]
        return _Part(edges, spent, part.least_s[left])

    def _narrow(self, part: _Part, bounds: list[_Bound]) -> _Part:
        """Mix paths for the most promising of unfinished splits, and end all that the mixture speaks against."""
        chosen, layers, allowed = part.edges[part.least_s.argmin()], np.arange(self.num_layers + 1), self.allowed.copy()
        known = np.flatnonzero(chosen >= 0).tolist()
        for edge in known[1:-1]:
            allowed[edge, layers != chosen[edge]] = False
            allowed[edge - 1][:, layers != chosen[edge]] = False
        mixture = self._mix(allowed, [bounds[-1].counts, *self.met[-KEPT:]], ROUNDS // 4).counts
        bounds.append(_Bound(mixture, self.paths.weigh(mixture, self.allowed), self.turn))
        part = replace(part, spent=np.pad(part.spent, ((0, 0), (0, 1))))
        spans, gaps = ([(a, b) for a, b in pairwise(known) if (b > a + 1) == wide] for wide in (False, True))
        return self._end(part, np.arange(len(part.edges)), [(len(bounds) - 1, bounds[-1])], spans, gaps)
