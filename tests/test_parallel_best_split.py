"""The split with the shortest step, against every split played one by one in the order that torch runs."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
from pipeline_orders import torch_order
from test_planner_stages import shape_of

from vlmcourse.parallel import best_split, split_search, step_paths
from vlmcourse.parallel.best_split import BestSplit, find_best_split
from vlmcourse.parallel.layer_times import LayerTimes
from vlmcourse.parallel.played_step import Player, backward_costs, step_s
from vlmcourse.parallel.step_paths import StepPaths
from vlmcourse.parallel.timeline import Action, bubble_fraction, makespan_s, replay_actions
from vlmcourse.planner.schedules import SCHEDULES, find_schedule_problems, ideal_bubble_fraction
from vlmcourse.planner.stages import StageSplit, split_evenly, stage_rule

ROUNDING = 1e-9
"""Of sums in another order; there is no other difference."""


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
    """Return the seconds of a step: forward costs as measured, a split backward in halves but on the first stage.

    A frozen layer has no gradients of weights. Where backward is split, gradients pass through the layers before the
    first trained one as slowly as a forward does, wherever they were measured; the first stage does not need them.
    """
    splits = any(action.kind == "I" for action in times.order[0])
    trained = times.trained or (True,) * split.num_layers
    costs: dict[tuple[str, int], float] = {}
    for stage in range(split.num_stages):
        now = later = 0.0
        for layer in split.layers(stage):
            backward_s = times.backward_s[layer]
            if splits and not any(trained[: layer + 1]):
                now += times.forward_s[layer] if stage else 0.0
            elif stage == 0:
                later += backward_s
            elif trained[layer]:
                now, later = now + backward_s / 2, later + backward_s / 2
            else:
                now += backward_s
        forward = sum(times.forward_s[layer] for layer in split.layers(stage))
        costs |= {("F", stage): forward, ("B", stage): now + later, ("I", stage): now, ("W", stage): later}
    return makespan_s(replay_actions(times.order, costs))


def draw_times(
    draw: random.Random, num_vision: int, num_language: int, order: tuple[object, ...], present: StageSplit
) -> LayerTimes:
    """Return times of two towers of unlike layers with a heavy end, measured under a split.

    In a third of them the vision tower is frozen, in another one the blocks of both towers.
    """
    heavy, frozen = 3 * draw.random(), draw.randrange(3)
    forward = [0.3] + [1 + draw.random()] * num_vision + [0.5] + [heavy + 0.2] * num_language + [4 * draw.random()]
    forward = [seconds * (0.9 + 0.2 * draw.random()) for seconds in forward]
    num_frozen = num_vision + 1 if frozen else 0
    trained = [n >= num_frozen and (frozen < 2 or n == num_frozen) for n in range(len(forward))]
    backward = [(1.5 + draw.random() if trained[n] else 1.0) * f for n, f in enumerate(forward)]
    splits = any(action.kind == "I" for action in order[0])  # type: ignore[attr-defined]
    for layer in range(num_frozen):
        backward[layer] = (0.5 + draw.random()) * forward[layer] if splits and layer not in present.layers(0) else 0.0
    return LayerTimes(tuple(forward), tuple(backward), 1, order, tuple(trained))  # type: ignore[arg-type]


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
    for _ in range(6):
        times = draw_times(draw, num_vision, num_language, order, present)
        found = find_best_split(shape_of(num_vision, num_language), times, schedule, present)
        best_s = min(judged_s(times, split) for split in splits_of(present))
        assert judged_s(times, found.split) == pytest.approx(best_s, rel=ROUNDING)
        assert found.step_s == pytest.approx(best_s, rel=ROUNDING) == found.least_s
        assert step_s(times, found.split) == pytest.approx(best_s, rel=ROUNDING)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_search_that_leaves_splits_out_misses_none_that_is_better(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    draw = random.Random(schedule)
    two = SCHEDULES[schedule].stages_per_rank == 2
    for number in range(10):
        num_vision, num_language = draw.randint(2, 5), draw.randint(3, 6)
        pp, num_microbatches = (draw.choice((2, 3)), 6) if two else (draw.choice((2, 4, 5)), draw.choice((5, 8)))
        shape = shape_of(num_vision, num_language)
        num_stages = pp * (1 + two)
        if num_stages > num_vision + num_language:
            continue
        present = split_evenly(shape, num_stages)
        times = draw_times(draw, num_vision, num_language, torch_order(schedule, pp, num_microbatches), present)
        rules = {"block_each": number % 3 == 1, "output_apart": number % 3 == 2}
        exact = find_best_split(shape, times, schedule, present, **rules)
        with monkeypatch.context() as patch:
            patch.setattr(best_split, "MAX_PLAYED", 0)
            searched = find_best_split(shape, times, schedule, present, **rules)
            assert searched.is_exact and searched.step_s == pytest.approx(exact.step_s, rel=ROUNDING)
            assert judged_s(times, searched.split) == pytest.approx(searched.step_s, rel=ROUNDING)
            # With room for few unfinished splits it may miss the best, and says by how much at most.
            patch.setattr(split_search, "WIDTHS", (1,))
            patch.setattr(split_search, "ROUNDS", 4)
            hasty = find_best_split(shape, times, schedule, present, **rules)
        check_bounds(hasty, exact)


def check_bounds(hasty: BestSplit, exact: BestSplit) -> None:
    """Raise AssertionError if a search that gave up says more than it can know."""
    assert hasty.least_s <= exact.step_s * (1 + ROUNDING) and exact.step_s <= hasty.step_s * (1 + ROUNDING)
    assert hasty.is_exact == (hasty.least_s == hasty.step_s)


class WorkClock:
    """A clock that goes on by a second with every path, mixture, sum over stages or playing of splits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        patch.setattr(split_search.time, "monotonic", lambda: self.now_s)
        for owner, name in (
            (StepPaths, "longest"),
            (StepPaths, "weigh"),
            (step_paths, "_solve_game"),
            (split_search, "_least_sums"),
            (Player, "play"),
        ):
            patch.setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.now_s += 1
            return work(*args, **kwargs)

        return run


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_a_search_ends_when_its_time_is_up_and_says_how_far_from_the_best_it_may_be(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    draw, shape = random.Random(schedule), shape_of(4, 5)
    present = split_evenly(shape, 4)
    times = draw_times(draw, 4, 5, torch_order(schedule, 4 if schedule == "1f1b" else 2, 6), present)
    exact = find_best_split(shape, times, schedule, present)
    monkeypatch.setattr(best_split, "MAX_PLAYED", 0)
    monkeypatch.setattr(split_search, "ROUNDS", 1)  # so that the first bound does not end it
    tried, was_late = [], []
    for limit in range(2, 90, 7):
        with monkeypatch.context() as patch:
            clock = WorkClock(patch)
            hasty = find_best_split(shape, times, schedule, present, max_search_s=limit)
        assert clock.now_s < limit + 6, "it goes on although its time is up"
        check_bounds(hasty, exact)
        tried.append(hasty.num_tried)
        was_late.append(clock.now_s > limit)
    assert was_late[0] and tried[0] < tried[-1], "it has looked at as much as without a limit"


def test_a_search_among_very_many_splits_ends_in_time_before_the_first_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    pp, schedule, shape = 16, "interleaved", shape_of(45, 48)
    times = measured_times(45, 48, torch_order(schedule, pp, 2 * pp), frozen=False)
    present, least_s = split_evenly(shape, 2 * pp), []
    # Among the first paths, while they rule out layers, and in the first mixture.
    for limit in (3, 150, 215):
        with monkeypatch.context() as patch:
            clock = WorkClock(patch)
            hasty = find_best_split(shape, times, schedule, present, max_search_s=limit)
        assert limit < clock.now_s < limit + 6, "it goes on although its time is up"
        assert hasty.num_tried == 0 and not hasty.is_exact
        least_s.append(hasty.least_s)
    assert 0 < least_s[0] <= least_s[1] < least_s[2] < hasty.step_s


LARGE = [("1f1b", 16, 32), ("interleaved", 4, 8), ("zbv", 4, 16), ("dualpipev", 4, 16), ("gpipe", 16, 64)]


@pytest.mark.parametrize(("schedule", "pp", "num_microbatches"), LARGE)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_best_of_very_many_splits_is_proven_to_be_the_best_by_looking_at_few(
    schedule: str, pp: int, num_microbatches: int, frozen: bool
) -> None:
    num_vision, num_language = (45, 48) if pp == 16 else (24, 24)
    times = measured_times(num_vision, num_language, torch_order(schedule, pp, num_microbatches), frozen)
    shape = shape_of(num_vision, num_language)
    present = split_evenly(shape, pp * SCHEDULES[schedule].stages_per_rank)
    found = find_best_split(shape, times, schedule, present)
    assert found.is_exact and found.step_s == found.least_s < step_s(times, present)
    assert found.step_s == pytest.approx(judged_s(times, found.split), rel=ROUNDING)
    num_splits = math.comb(present.num_layers - 1, present.num_stages - 1)
    print(
        f"{schedule}, {present.num_layers} layers, {present.num_stages} stages: {found.num_tried} of {num_splits:.1e}"
    )
    assert found.num_tried < 50_000 < 1e-3 * num_splits


def measured_times(
    num_vision: int, num_language: int, order: tuple[tuple[Action, ...], ...], frozen: bool
) -> LayerTimes:
    """Return times of two towers of like blocks, each a few percent off as measured ones are."""
    draw = random.Random(0)
    forward = [0.3] + [1.0] * num_vision + [0.4] + [1.7] * num_language + [2.5]
    forward = [seconds * draw.uniform(0.95, 1.05) for seconds in forward]
    trained = [not frozen or layer > num_vision for layer in range(len(forward))]
    backward = [
        2 * seconds * draw.uniform(0.95, 1.05) * is_trained
        for seconds, is_trained in zip(forward, trained, strict=True)
    ]
    return LayerTimes(tuple(forward), tuple(backward), 1, order, tuple(trained))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_no_mixture_of_paths_is_longer_than_a_step(schedule: str) -> None:
    draw, pp = random.Random(schedule), 3
    num_stages = pp * SCHEDULES[schedule].stages_per_rank
    shape, order = shape_of(4, 5), torch_order(schedule, pp, 6)
    present = split_evenly(shape, num_stages)
    times = draw_times(draw, 4, 5, order, present)
    paths = StepPaths(Player(times), stage_rule(shape, num_stages))
    splits = draw.sample(list(splits_of(present)), 20)
    edges = [(*(split.layers(stage).start for stage in range(num_stages)), 12) for split in splits]
    lengths = [step_s(times, split) for split in splits]
    longest = [paths.longest(paths.stage_s(cut)) for cut in edges]
    assert [seconds for seconds, _ in longest] == pytest.approx(lengths, rel=ROUNDING)
    for (_, counts), seconds in zip(longest, lengths, strict=True):  # the path of a step is that long
        assert (counts * paths.stage_s(edges[lengths.index(seconds)])).sum() == pytest.approx(seconds, rel=ROUNDING)
    for _ in range(20):
        mixture = sum(share * counts for share, (_, counts) in zip(_shares(draw, 20), longest, strict=True))
        for cut, seconds in zip(edges, lengths, strict=True):
            assert (mixture * paths.stage_s(cut)).sum() <= seconds * (1 + ROUNDING)
    found_s, mixture, _, _ = paths.mix(paths.allowed, [counts for _, counts in longest[:3]], float("inf"), range(40))
    best_s = min(step_s(times, split) for split in splits_of(present))
    assert 0.8 * best_s <= found_s <= best_s * (1 + ROUNDING)
    assert found_s <= min((mixture * paths.stage_s(cut)).sum() for cut in edges) * (1 + ROUNDING)


def _shares(draw: random.Random, num: int) -> list[float]:
    weights = [draw.random() ** 4 for _ in range(num)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_layers_before_the_first_trained_one_cost_what_they_would_where_they_go(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    shape, order = shape_of(12, 8), torch_order(schedule, 2, 4)
    forward = (0.2, *[1.0] * 12, 0.2, *[1.0] * 8, 0.5)
    trained = tuple(layer > 12 for layer in range(23))

    def measured(split: StageSplit) -> LayerTimes:
        """Return what a run with this split would measure: no backward on the first stage, a forward's on others."""
        frozen = [0.0 if layer in split.layers(0) else forward[layer] for layer in range(13)]
        return LayerTimes(forward, (*frozen, *(2 * f for f in forward[13:])), 1, order, trained)

    starts = [StageSplit(num_vision_layers=12, num_language_layers=8, layers_per_stage=(6, 5, 6, 6))]
    starts += [split_evenly(shape, 4), dataclasses.replace(starts[0], layers_per_stage=(16, 3, 2, 2))]
    best_s = min(judged_s(measured(starts[0]), split) for split in splits_of(starts[0]))
    for present in starts:
        found = find_best_split(shape, measured(present), schedule, present)
        assert found.step_s == pytest.approx(best_s, rel=ROUNDING)
        # What was promised is what the next measurement finds, and the split stays.
        again = find_best_split(shape, measured(found.split), schedule, found.split)
        assert again.split == found.split
        assert step_s(measured(found.split), found.split) == pytest.approx(found.step_s, rel=ROUNDING)
    # So it is where not every split is played.
    monkeypatch.setattr(best_split, "MAX_PLAYED", 0)
    found = find_best_split(shape, measured(starts[0]), schedule, starts[0])
    assert found.is_exact and found.step_s == pytest.approx(best_s, rel=ROUNDING)


def test_a_split_backward_of_frozen_layers_has_no_gradients_of_weights() -> None:
    trained = (False, False, True, False)
    times = LayerTimes((1.0, 2.0, 3.0, 4.0), (0.1, 7.0, 6.0, 5.0), 1, torch_order("zbv", 2, 4), trained)
    elsewhere = {"B": (1.0, 2.0, 6.0, 5.0), "I": (1.0, 2.0, 3.0, 5.0), "W": (0.0, 0.0, 3.0, 0.0)}
    assert [backward_costs(times, stage) for stage in (1, 3)] == [elsewhere] * 2
    on_first = (0.0, 0.0, 6.0, 5.0)
    assert backward_costs(times, 0) == {"B": on_first, "I": (0.0,) * 4, "W": on_first}
    whole = dataclasses.replace(times, order=torch_order("1f1b", 2, 4))  # nothing is split: as measured
    assert backward_costs(whole, 0)["B"] == backward_costs(whole, 1)["B"] == times.backward_s


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
