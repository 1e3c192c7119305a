"""Which layers stand on which stage: splits, the exact search among them, and what a schedule refuses."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from vlmcourse.planner.schedules import (
    SCHEDULES,
    check_schedule,
    find_schedule_problems,
    ideal_bubble_fraction,
    stages_of_rank,
)
from vlmcourse.planner.stages import StageSplit, split_by_cost, split_evenly, vision_apart
from vlmcourse.presets import MODELS, VLMShape


def shape_of(num_vision: int, num_language: int) -> VLMShape:
    tiny = MODELS["tiny"]
    return dataclasses.replace(
        tiny,
        vision=dataclasses.replace(tiny.vision, num_layers=num_vision),
        language=dataclasses.replace(tiny.language, num_layers=num_language),
    )


def blocks_of(split: StageSplit) -> list[tuple[list[int], list[int]]]:
    return [(list(split.vision_blocks(s)), list(split.language_blocks(s))) for s in range(split.num_stages)]


def test_an_even_split_gives_every_stage_as_many_blocks_or_one_fewer() -> None:
    for num_vision, num_language, num_stages in itertools.product(range(1, 6), range(1, 6), range(1, 8)):
        if num_stages > num_vision + num_language:
            continue
        split = split_evenly(shape_of(num_vision, num_language), num_stages)
        counts = [len(v) + len(lang) for v, lang in blocks_of(split)]
        assert sum(counts) == num_vision + num_language and max(counts) - min(counts) <= 1
        assert split.fusion_stage == next(s for s, (_, lang) in enumerate(blocks_of(split)) if 0 in lang)


def test_layers_are_where_the_split_says() -> None:
    split = split_evenly(shape_of(3, 5), 4)
    assert blocks_of(split) == [([0, 1], []), ([2], [0]), ([], [1, 2]), ([], [3, 4])]
    assert split.fusion_stage == 1
    assert str(split).splitlines() == [
        "stage 0: patches, vision 0-1",
        "stage 1: vision 2, projector and embedding, language 0",
        "stage 2: language 1-2",
        "stage 3: language 3-4, norm and output",
    ]


def test_vision_apart_shares_no_stage_with_language() -> None:
    split = vision_apart(shape_of(4, 6), 4, 2)
    assert blocks_of(split) == [([0, 1], []), ([2, 3], []), ([], [0, 1, 2]), ([], [3, 4, 5])]
    assert split.fusion_stage == 2
    with pytest.raises(ValueError, match="4 of 4 stages for vision leave 0"):
        vision_apart(shape_of(4, 6), 4, 4)
    with pytest.raises(ValueError, match="each stage needs at least one block"):
        vision_apart(shape_of(1, 6), 4, 2)


def test_a_split_by_cost_is_the_best_of_all_splits() -> None:
    draw = random.Random(0)
    for _ in range(200):
        num_vision, num_language = draw.randint(1, 3), draw.randint(1, 4)
        num_layers = num_vision + num_language + 3
        num_stages = draw.randint(1, min(4, num_layers))
        costs = [draw.choice([0.0, 0.1, 1.0, draw.random(), 3 * draw.random()]) for _ in range(num_layers)]
        split = split_by_cost(shape_of(num_vision, num_language), costs, num_stages)

        def value(cuts: tuple[int, ...], costs: list[float] = costs) -> tuple[float, float]:
            edges = [0, *cuts, len(costs)]
            stages = [sum(costs[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
            return max(stages), sum(stage**2 for stage in stages)

        chosen = tuple(split.layers(stage).start for stage in range(1, num_stages))
        best = min(value(cuts) for cuts in itertools.combinations(range(1, num_layers), num_stages - 1))
        assert value(chosen) == pytest.approx(best)


@pytest.mark.parametrize("layers", [(4, 5), (0, 10), (4, 5, 1, 1), ()])
def test_a_split_that_is_not_all_of_the_model_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="each stage needs a layer, and together they must be the 10 layers"):
        StageSplit(num_vision_layers=3, num_language_layers=4, layers_per_stage=layers)


def test_more_stages_than_there_is_to_share_out_are_refused() -> None:
    with pytest.raises(ValueError, match="5 blocks cannot be split into 6 stages"):
        split_evenly(shape_of(2, 3), 6)
    with pytest.raises(ValueError, match="7 costs"):
        split_by_cost(shape_of(2, 3), [1.0] * 7, 2)
    with pytest.raises(ValueError, match="none below 0"):
        split_by_cost(shape_of(2, 3), [1.0] * 7 + [-1.0], 2)


def test_every_stage_is_on_one_rank_and_v_shaped_schedules_turn_on_the_last() -> None:
    for schedule, chosen in SCHEDULES.items():
        for pp in (2, 3, 4):
            owned = [stages_of_rank(schedule, pp, rank) for rank in range(pp)]
            assert sorted(itertools.chain(*owned)) == list(range(pp * chosen.stages_per_rank))
    assert [stages_of_rank("zbv", 2, rank) for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert [stages_of_rank("interleaved", 2, rank) for rank in (0, 1)] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("schedule", "options", "words"),
    [
        ("gpipes", {}, "'gpipes' is unknown: choose one of gpipe, 1f1b"),
        ("gpipe", {"pp": 1}, "at least 2 ranks"),
        (
            "1f1b",
            {"num_microbatches": 3},
            "3 micro-batches with pp=4, and 1f1b needs at least 4: raise train.accum",
        ),
        ("dualpipev", {"num_microbatches": 7}, "dualpipev needs at least 8"),
        ("interleaved", {"num_microbatches": 9}, "multiple of 4"),
        ("gpipe", {"num_microbatches": 0}, "needs at least 1"),
        ("zbv", {"data_strategy": "fsdp"}, "choose strategy = 'zero2', which keeps them"),
        ("dualpipev", {"data_strategy": "ddp"}, "wrong gradients in silence: .* choose strategy = 'zero2'"),
        ("1f1b", {"data_strategy": "zero"}, "choose single, ddp or fsdp"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused(schedule: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        defaults: dict[str, Any] = {"pp": 4, "num_microbatches": 8}
        check_schedule(schedule, **(defaults | options))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_that_can_run_is_accepted(schedule: str) -> None:
    for data_strategy in ("single", "ddp", "fsdp"):
        splits = SCHEDULES[schedule].splits_backward
        if data_strategy != "ddp" or not splits:
            assert not find_schedule_problems(
                schedule, pp=4, num_microbatches=8, data_strategy=data_strategy, reshard_after_forward=not splits
            )


def test_the_bubble_shrinks_with_micro_batches_and_with_stages_of_a_rank() -> None:
    assert ideal_bubble_fraction("gpipe", 4, 4) == pytest.approx(3 / 7)
    assert ideal_bubble_fraction("1f1b", 4, 12) == pytest.approx(3 / 15)
    assert ideal_bubble_fraction("interleaved", 4, 12) == pytest.approx(3 / 27)
    assert ideal_bubble_fraction("zbv", 4, 12) == 0
