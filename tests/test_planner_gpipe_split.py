"""The split with the shortest step of gpipe, against all splits."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

from test_planner_stages import shape_of

from vlmcourse.planner.gpipe_split import gpipe_cuts
from vlmcourse.planner.stages import stage_rule


def test_no_split_has_a_faster_slowest_forward_and_slowest_backward() -> None:
    draw = random.Random(0)

    def cost() -> float:
        return draw.choice([0.0, 0.1, 1.0, draw.random(), 3 * draw.random()])

    for _ in range(100):
        num_vision, num_language, num_stages = draw.randint(1, 3), draw.randint(1, 4), draw.randint(2, 4)
        num_layers = num_vision + num_language + 3
        forward, backward = ([cost() for _ in range(num_layers)] for _ in range(2))
        rules = {
            "block_each": draw.random() < 0.3 and num_stages <= num_vision + num_language,
            "output_apart": draw.random() < 0.3,
        }
        may_be_stage = stage_rule(shape_of(num_vision, num_language), num_stages, **rules)

        def slowest(cuts: tuple[int, ...], costs: list[float]) -> float:
            return max(sum(costs[start:end]) for start, end in pairwise((0, *cuts, len(costs))))

        allowed = [
            cuts
            for cuts in combinations(range(1, num_layers), num_stages - 1)
            if all(may_be_stage(start, end) for start, end in pairwise((0, *cuts, num_layers)))
        ]
        sums = {cuts: slowest(cuts, forward) + slowest(cuts, backward) for cuts in allowed}
        found = tuple(gpipe_cuts(forward, backward, num_stages, may_be_stage))
        assert found in allowed and sums[found] <= min(sums.values()) * (1 + 1e-9)
