"""The split with the shortest step, against every split played one by one in the order that torch runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from pipeline_orders import torch_order
from test_planner_stages import shape_of

from vlmcourse.parallel import best_split
from vlmcourse.parallel.best_split import find_best_split, step_s
from vlmcourse.parallel.layer_times import LayerTimes
from vlmcourse.parallel.timeline import bubble_fraction, makespan_s, replay_actions
from vlmcourse.planner.pace import pace_s
from vlmcourse.planner.schedules import SCHEDULES, find_schedule_problems, ideal_bubble_fraction
from vlmcourse.planner.stages import StageSplit, split_evenly

ROUNDING = 1e-9
"""Of sums in another order; where the search tries every split there is no other difference."""
GREEDY = 0.02
"""By which share a search from neighbor to neighbor may miss the best, of which there is no proof."""


def splits_of(split: StageSplit) -> Iterator[StageSplit]:
    """Yield every split of the same layers into as many stages."""
    for cuts in combinations(range(1, split.num_layers), split.num_stages - 1):
        layers = tuple(b - a for a, b in pairwise((0, *cuts, split.num_layers)))
        yield StageSplit(
            num_vision_layers=split.num_vision_layers,
            num_language_layers=split.num_language_layers,
            layers_per_stage=layers,
        )


def judged_s(times: LayerTimes, split: StageSplit) -> float:
    """Return the seconds of a step: forward costs as measured, a split backward in halves but on the first stage."""
    costs: dict[tuple[str, int], float] = {}
    for stage in range(split.num_stages):
        forward = sum(times.forward_s[layer] for layer in split.layers(stage))
        backward = sum(times.backward_s[layer] for layer in split.layers(stage))
        now = backward / 2 if stage else 0.0
        costs |= {("F", stage): forward, ("B", stage): backward, ("I", stage): now, ("W", stage): backward - now}
    return makespan_s(replay_actions(times.order, costs))


def draw_times(draw: random.Random, num_vision: int, num_language: int, order: tuple[object, ...]) -> LayerTimes:
    """Return times of two towers of unlike layers with a heavy end, the vision tower frozen in every third."""
    heavy, frozen = 3 * draw.random(), draw.random() < 1 / 3
    forward = [0.3] + [1 + draw.random()] * num_vision + [0.5] + [heavy + 0.2] * num_language + [4 * draw.random()]
    forward = [seconds * (0.9 + 0.2 * draw.random()) for seconds in forward]
    backward = [0.0 if frozen and n <= num_vision else (1.5 + draw.random()) * f for n, f in enumerate(forward)]
    return LayerTimes(tuple(forward), tuple(backward), 1, order)  # type: ignore[arg-type]


CASES = [
    (schedule, pp, num_microbatches)
    for schedule in SCHEDULES
    for pp, num_microbatches in ((2, 4), (2, 8), (3, 6))
    if not find_schedule_problems(schedule, pp=pp, num_microbatches=num_microbatches)
]


@pytest.mark.parametrize(("schedule", "pp", "num_microbatches"), CASES)
def test_no_split_has_a_shorter_step_in_the_order_that_torch_runs(
    schedule: str, pp: int, num_microbatches: int
) -> None:
    draw = random.Random(f"{schedule} {pp} {num_microbatches}")
    num_vision, num_language = 3, 4
    present = split_evenly(shape_of(num_vision, num_language), pp * SCHEDULES[schedule].stages_per_rank)
    order = torch_order(schedule, pp, num_microbatches)
    for _ in range(4):
        times = draw_times(draw, num_vision, num_language, order)
        found = find_best_split(shape_of(num_vision, num_language), times, schedule, present)
        best_s = min(judged_s(times, split) for split in splits_of(present))
        assert judged_s(times, found.split) == pytest.approx(best_s, rel=ROUNDING)
        assert found.step_s == pytest.approx(best_s, rel=ROUNDING) == found.least_s
        assert step_s(times, found.split) == pytest.approx(best_s, rel=ROUNDING)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_where_there_are_too_many_splits_to_try_the_search_comes_close_and_says_how_close(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    draw = random.Random(schedule)
    shape, pp = shape_of(5, 6), 2 if SCHEDULES[schedule].stages_per_rank == 2 else 4
    present = split_evenly(shape, 4)
    for _ in range(4):
        times = draw_times(draw, 5, 6, torch_order(schedule, pp, 8))
        exact = find_best_split(shape, times, schedule, present)
        with monkeypatch.context() as patch:
            patch.setattr(best_split, "MAX_PLAYED", 0)
            searched = find_best_split(shape, times, schedule, present)
        assert searched.least_s <= exact.step_s * (1 + ROUNDING)
        assert exact.step_s * (1 - ROUNDING) <= searched.step_s <= exact.step_s * (1 + GREEDY)
        assert judged_s(times, searched.split) == pytest.approx(searched.step_s, rel=ROUNDING)
        if schedule == "gpipe":  # exact without trying
            assert searched.step_s == pytest.approx(exact.step_s, rel=ROUNDING) == searched.least_s


def test_the_pace_is_that_of_the_busiest_rank_and_the_bound_of_every_step() -> None:
    split = split_evenly(shape_of(3, 4), 4)
    costs = [float(n) for n in range(10)]  # stages of 0-1, 2-4, 5-6 and 7-9: 1, 9, 11, 24... by their layers
    sums = [sum(costs[n] for n in split.layers(stage)) for stage in range(4)]
    none = [0.0] * 10
    assert pace_s("1f1b", split, costs, costs) == 2 * max(sums)
    assert pace_s("interleaved", split, costs, none) == max(sums[0] + sums[2], sums[1] + sums[3])
    assert pace_s("zbv", split, costs, none) == max(sums[0] + sums[3], sums[1] + sums[2])
    assert pace_s("gpipe", split, costs, costs[::-1]) == max(sums) + max(
        sum(costs[::-1][n] for n in split.layers(stage)) for stage in range(4)
    )
    for schedule in ("interleaved", "zbv", "dualpipev"):
        times = LayerTimes(tuple(costs), tuple(costs), 1, torch_order(schedule, 2, 4))
        assert step_s(times, split) >= 4 * pace_s(schedule, split, costs, costs)


def test_the_present_split_wins_where_no_other_is_better_and_times_need_an_order() -> None:
    shape = shape_of(3, 4)
    times = LayerTimes((0.0,) * 9 + (1.0,), (0.0,) * 10, 1, torch_order("1f1b", 2, 4))
    for layers in ((3, 7), (9, 1)):  # wherever the cut is, the output alone costs
        present = StageSplit(num_vision_layers=3, num_language_layers=4, layers_per_stage=layers)
        assert find_best_split(shape, times, "1f1b", present).split == present
    with pytest.raises(ValueError, match="no order of actions"):
        find_best_split(shape, LayerTimes((1.0,) * 10, (1.0,) * 10, 1), "1f1b", present)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_the_ideal_bubble_is_that_of_torchs_order_for_every_number_of_micro_batches(schedule: str, pp: int) -> None:
    for num_microbatches in range(1, 3 * pp):
        if find_schedule_problems(schedule, pp=pp, num_microbatches=num_microbatches):
            continue
        order = torch_order(schedule, pp, num_microbatches)
        stages = range(pp * SCHEDULES[schedule].stages_per_rank)
        played = replay_actions(order, {(kind, s): 1.0 + (kind == "B") for kind in "FBIW" for s in stages})
        longest_s = max(actions[-1].end_s - actions[0].start_s for actions in played)
        work_s = 3 * sum(action.kind == "F" for action in played[0])
        ideal = ideal_bubble_fraction(schedule, pp, num_microbatches)
        assert ideal == pytest.approx(1 - work_s / longest_s, abs=1e-9), num_microbatches
        assert schedule != "gpipe" or ideal == pytest.approx(bubble_fraction(played))
