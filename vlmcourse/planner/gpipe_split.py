"""The split with the shortest step of gpipe, whose ranks run all forwards first and then all backwards.

Enters: seconds of every layer, forward and backward. Leaves: the cuts. A step of M micro-batches takes all layers once,
and M - 1 times more the slowest forward and the slowest backward, on whichever stages they are. So the split with the
least sum of these two is the best for any M. What other schedules take depends on the order of their actions:
`parallel/best_split.py` plays that. Imports no torch. Chapter 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from vlmcourse.planner.stages import best_cuts


def gpipe_cuts(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_stages: int,
    may_be_stage: Callable[[int, int], bool] = lambda start, end: True,
) -> list[int]:
    """Return the layers at which later stages begin for the least slowest forward and slowest backward together.

    Dynamic programming over (layers so far, stages so far), with every pair of the two slowest that no other beats.

    Args:
        forward_s: of every layer, at least 0.
        backward_s: likewise.
        num_stages: into how many stages; some split must be allowed.
        may_be_stage: see `best_cuts`.
    """
    costs_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    some = [0, *best_cuts(costs_s, num_stages, float("inf"), None, may_be_stage)[1], len(costs_s)]
    forward, backward = ([0.0, *accumulate(of_layers)] for of_layers in (forward_s, backward_s))
    stages = list(zip(some, some[1:], strict=False))
    limit = sum(max(total[end] - total[start] for start, end in stages) for total in (forward, backward)) * (1 + 1e-12)
    fronts: dict[int, list[tuple[float, float, list[int]]]] = {0: [(0.0, 0.0, [])]}
    for _ in range(num_stages):
        after: dict[int, list[tuple[float, float, list[int]]]] = {}
        for start, front in fronts.items():
            for end in range(start + 1, len(costs_s) + 1):
                f, b = forward[end] - forward[start], backward[end] - backward[start]
                if f + b > limit:
                    break
                if may_be_stage(start, end):
                    after.setdefault(end, []).extend(
                        (max(f, slowest_f), max(b, slowest_b), [*cuts, end])
                        for slowest_f, slowest_b, cuts in front
                        if max(f, slowest_f) + max(b, slowest_b) <= limit
                    )
        fronts = {end: _unbeaten(found) for end, found in after.items()}
    return min(fronts[len(costs_s)], key=lambda found: found[0] + found[1])[2][:-1]


def _unbeaten(found: list[tuple[float, float, list[int]]]) -> list[tuple[float, float, list[int]]]:
    """Return those pairs of which no other is as small in both numbers."""
    kept: list[tuple[float, float, list[int]]] = []
    for candidate in sorted(found, key=lambda pair: pair[:2]):
        if not kept or candidate[1] < kept[-1][1]:
            kept.append(candidate)
    return kept
