from __future__ import annotations

import pytest
from pipeline_orders import torch_order

from vlmcourse.planner.pipeline_held import count_held, peak_held_bytes
from vlmcourse.planner.pipeline_order import Step, list_steps
from vlmcourse.planner.schedules import SCHEDULES, find_schedule_problems, ideal_bubble_fraction
from vlmcourse.planner.timeline import StageTimes, Timeline, prepare_order, simulate_timeline
from vlmcourse.plots.timeline import plot_timeline

EQUAL = StageTimes(1.0, 1.0, 1.0)


def cases(schedule: str, pp: int) -> list[int]:
    """Return the numbers of micro-batches up to 4 pp that a schedule has an order for."""
    return [m for m in range(1, 4 * pp + 1) if not find_schedule_problems(schedule, pp=pp, num_microbatches=m)]


def simulate(schedule: str, pp: int, num_microbatches: int) -> Timeline:
    stages = [EQUAL] * (pp * SCHEDULES[schedule].stages_per_rank)
    return simulate_timeline(schedule, pp, num_microbatches, stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 5])
def test_every_rank_runs_what_torch_would_run(schedule: str, pp: int) -> None:
    for num_microbatches in cases(schedule, pp):
        torchs = [[tuple(action[1:4]) for action in of_rank] for of_rank in torch_order(schedule, pp, num_microbatches)]
        ours = [[tuple(step) for step in of_rank] for of_rank in list_steps(schedule, pp, num_microbatches)]
        assert ours == torchs, num_microbatches


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_equal_stages_and_free_messages_give_the_ideal_bubble(schedule: str, pp: int) -> None:
    for num_microbatches in cases(schedule, pp):
        timeline = simulate(schedule, pp, num_microbatches)
        ideal = ideal_bubble_fraction(schedule, pp, num_microbatches)
        assert timeline.bubble_fraction() == pytest.approx(ideal, abs=1e-12), num_microbatches


def test_two_unequal_stages_by_hand() -> None:
    # 1F1B, two micro-batches, a message takes half a second. Rank 0: F0 0-1, F1 1-2. Rank 1, whose forward takes 2 and
    # whose backward takes 4: F0 1.5-3.5, B0 3.5-7.5, F1 7.5-9.5, B1 9.5-13.5. Rank 0: B0 8-10, B1 14-16.
    timeline = simulate_timeline("1f1b", 2, 2, [StageTimes(1, 1, 1), StageTimes(2, 3, 1)], 0.5)
    assert [tuple(step[1:]) for step in timeline.ranks[0]] == [
        ("F", 0, 0, 0.0, 1.0),
        ("F", 1, 0, 1.0, 2.0),
        ("B", 0, 0, 8.0, 10.0),
        ("B", 1, 0, 14.0, 16.0),
    ]
    assert [(step.start_s, step.end_s) for step in timeline.ranks[1]] == [
        (1.5, 3.5),
        (3.5, 7.5),
        (7.5, 9.5),
        (9.5, 13.5),
    ]
    assert timeline.step_s == 16 and timeline.busy_s == (6, 12) and timeline.idle_s(0) == 10 and timeline.idle_s(1) == 4
    assert timeline.finish_s == (16, 13.5)
    assert timeline.bubble_fraction() == timeline.bubble_fraction(0) == pytest.approx(10 / 16)
    assert timeline.bubble_fraction(1) == 0
    assert timeline.messages == ((1.0, 1.5), (2.0, 2.5), (7.5, 8.0), (13.5, 14.0))


def test_messages_of_one_link_follow_each_other() -> None:
    # Forwards end at 1, 2 and 3; each message takes 5 seconds, so they arrive at 6, 11 and 16.
    timeline = simulate_timeline("gpipe", 2, 3, [StageTimes(1, 1), StageTimes(1, 1)], 5.0, 0.0)
    assert [step.start_s for step in timeline.ranks[1][:3]] == [6, 11, 16]


def test_gradients_may_take_another_time_than_activations() -> None:
    both = simulate_timeline("gpipe", 2, 1, [EQUAL, EQUAL], 3.0)
    forward = simulate_timeline("gpipe", 2, 1, [EQUAL, EQUAL], [3.0], [0.0])
    assert both.step_s == 12 and forward.step_s == 9


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_the_turn_of_a_v_sends_no_message(schedule: str) -> None:
    free = [0.0] * 7
    free[3] = 100.0  # between stages 3 and 4, both on rank 3
    stages = [EQUAL] * 8
    assert simulate_timeline(schedule, 4, 8, stages, free).step_s == simulate_timeline(schedule, 4, 8, stages).step_s


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_rank_does_two_things_at_once_and_none_before_its_input(schedule: str) -> None:
    stages = [StageTimes(1 + s % 3, 2 + s % 2, 0.5 * s) for s in range(4 * SCHEDULES[schedule].stages_per_rank)]
    timeline = simulate_timeline(schedule, 4, 8, stages, 0.25)
    ends = {}
    for of_rank in timeline.ranks:
        assert all(before.end_s <= after.start_s for before, after in zip(of_rank, of_rank[1:], strict=False))
        ends |= {("B" if a.kind == "I" else a.kind, a.microbatch, a.stage): a for a in of_rank}
    for of_rank in timeline.ranks:
        for action in of_rank:
            assert action.end_s - action.start_s == pytest.approx(stages[action.stage].of_kind(action.kind))
            neighbour = {"F": action.stage - 1, "B": action.stage + 1, "I": action.stage + 1}.get(action.kind)
            if neighbour is not None and 0 <= neighbour < len(stages):
                before = ends["F" if action.kind == "F" else "B", action.microbatch, neighbour]
                late_s = 0.25 if before.rank != action.rank else 0.0
                assert action.start_s >= before.end_s + late_s - 1e-12


def test_more_micro_batches_leave_a_smaller_bubble_and_a_slow_stage_sets_the_pace() -> None:
    bubbles = [simulate("1f1b", 4, m).bubble_fraction() for m in (4, 8, 16, 32)]
    assert bubbles == sorted(bubbles, reverse=True)
    slow = [StageTimes(1, 1, 1), StageTimes(3, 3, 3), StageTimes(1, 1, 1)]
    long, longer = (simulate_timeline("1f1b", 3, m, slow).step_s for m in (10, 11))
    assert longer - long == 9


def test_micro_batches_held_are_those_of_the_paper() -> None:
    assert count_held("1f1b", 4, 8) == (4, 3, 2, 1)
    assert count_held("1f1b", 4, 2) == (2, 2, 2, 1)
    assert count_held("gpipe", 3, 5) == (5, 5, 5)
    # Narayanan et al. 2021, section 2.2: interleaving holds more, (1 + (p - 1) / (p v)) times 1F1B's; 4 + 3 / 2 micro-
    # batches of the rank's layers, so 11 of its half stages.
    assert peak_held_bytes("interleaved", 4, 8, [1.0] * 8)[0] == 11
    # Qi et al. 2023, section 6: in a V every rank holds at most as much, 2 p half stages.
    assert peak_held_bytes("zbv", 4, 12, [1.0] * 8) == (8, 8, 8, 8)
    assert peak_held_bytes("1f1b", 2, 4, [10.0, 7.0]) == (20, 7)


def test_an_order_that_can_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="1 ranks wait for actions that are not in this step"):
        prepare_order([[Step("B", 0, 0), Step("F", 0, 0)]])
    with pytest.raises(ValueError, match="parts for weights|wait for actions"):
        prepare_order([[Step("F", 0, 0), Step("W", 0, 0), Step("I", 0, 0)]])


def test_wrong_numbers_are_refused_with_what_to_change() -> None:
    with pytest.raises(ValueError, match="interleaved on pp=2 ranks has 4"):
        simulate_timeline("interleaved", 2, 4, [EQUAL, EQUAL])
    with pytest.raises(ValueError, match="3 messages: 2 stages have 1 boundaries"):
        simulate_timeline("1f1b", 2, 4, [EQUAL, EQUAL], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="at least 4"):
        list_steps("dualpipev", 2, 3)
    with pytest.raises(ValueError, match="multiple of"):
        list_steps("interleaved", 2, 5)
    with pytest.raises(ValueError, match="choose one of gpipe"):
        list_steps("2f2b", 2, 5)
    with pytest.raises(ValueError, match="must be 1 or more"):
        list_steps("1f1b", 2, 0)


def test_a_timeline_can_be_drawn() -> None:
    spans = simulate("zbv", 2, 4).spans()
    assert {span.rank for span in spans} == {0, 1} and {span.name for span in spans} == {"forward", "backward"}
    plot_timeline({"predicted": spans})
