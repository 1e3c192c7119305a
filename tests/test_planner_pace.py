"""The split with the best pace, against all splits, and how long the search takes to find it among very many."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from test_planner_stages import shape_of

from vlmcourse.planner import pace
from vlmcourse.planner.pace import PRECISION, pace_s, split_by_pace
from vlmcourse.planner.schedules import SCHEDULES
from vlmcourse.planner.stages import split_at, split_by_cost, stage_rule


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_split_has_a_better_pace(schedule: str) -> None:
    draw = random.Random(schedule)

    def cost() -> float:
        return draw.choice([0.0, 0.1, 1.0, draw.random(), 3 * draw.random()])

    for _ in range(50):
        num_vision, num_language, pp = draw.randint(1, 3), draw.randint(1, 4), draw.randint(2, 3)
        num_layers, num_stages = num_vision + num_language + 3, pp * SCHEDULES[schedule].stages_per_rank
        if num_stages > num_layers:
            continue
        forward, backward = ([cost() for _ in range(num_layers)] for _ in range(2))
        first = [cost() for _ in range(num_layers)] if SCHEDULES[schedule].stages_per_rank == 2 else None
        rules = {
            "block_each": draw.random() < 0.3 and num_stages <= num_vision + num_language,
            "output_apart": draw.random() < 0.3,
        }
        shape = shape_of(num_vision, num_language)
        may_be_stage = stage_rule(shape, num_stages, **rules)
        allowed = [
            cuts
            for cuts in combinations(range(1, num_layers), num_stages - 1)
            if all(may_be_stage(start, end) for start, end in pairwise((0, *cuts, num_layers)))
        ]
        best = min(pace_s(schedule, split_at(shape, cuts), forward, backward, first) for cuts in allowed)
        found = split_by_pace(shape, forward, backward, schedule, pp, first_backward_s=first, **rules)
        assert tuple(found.layers(stage).start for stage in range(1, num_stages)) in allowed
        assert best <= pace_s(schedule, found, forward, backward, first) <= best * (1 + PRECISION)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_layers_of_a_large_model_are_shared_out_among_16_stages(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    draw, shape = random.Random(2), shape_of(45, 48)
    forward = [(1.0 if layer < 46 else 2.3) * (1 + 0.2 * draw.random()) for layer in range(96)]
    backward = [2.1 * seconds for seconds in forward]
    pp = 16 // SCHEDULES[schedule].stages_per_rank
    whole = sum(forward) + sum(backward)
    found = split_by_pace(shape, forward, backward, schedule, pp)
    by_stage = split_by_cost(shape, [f + b for f, b in zip(forward, backward, strict=True)], 16)
    pace_found, pace_by_stage = (pace_s(schedule, split, forward, backward) for split in (found, by_stage))
    assert whole / pp <= pace_found <= pace_by_stage
    # The search did not end for want of memory of dead ends.
    monkeypatch.setattr(pace, "MAX_STATES", 10**9)
    assert split_by_pace(shape, forward, backward, schedule, pp) == found


def test_another_backward_on_the_first_stage_is_refused_where_it_would_not_be_searched_with() -> None:
    for schedule in ("gpipe", "1f1b"):
        with pytest.raises(ValueError, match=f"{schedule} was given first_backward_s"):
            split_by_pace(shape_of(3, 4), [1.0] * 10, [2.0] * 10, schedule, 2, first_backward_s=[1.0] * 10)
