"""Lab 1.1: answers run on real ranks, several in one start; right ones of any style lose nothing."""

from __future__ import annotations

import os
import threading
import time
from typing import Any
from unittest import mock

import cloudpickle
import lab01_1_answers
import pytest
from lab01_1_answers import RIGHT_PAIRS, RIGHT_SHARDS, WRONG_PAIRS, WRONG_SHARDS, endless
from lab_cells import hidden_seeds, read_cells, reference, run_blank, stated_points
from ranks import run_ranks_forked

from vlmcourse.grading import lab01_1, pair_ranks
from vlmcourse.grading.pair_cases import PARTS, make_pair_cases, make_truth, run_mlp
from vlmcourse.grading.pair_ranks import run_answers

EXERCISE = "lab01_1"
POINTS = {"lab01_1_a_test": 3, "lab01_1_b_test": 9}
CASES = [case for world_size in (2, 4) for case in make_pair_cases(6, world_size, 3)]
"""With an x of [1, 7], which two ranks can share out neither by rows nor by numbers."""

pytestmark = pytest.mark.timeout(600)  # on an idle machine the ranks of all answers take half a minute


@pytest.fixture(scope="module")
def reports():
    """What every answer came to, by its name; all are run in one start of two ranks and one of four."""
    cloudpickle.register_pickle_by_value(lab01_1_answers)
    answers: dict[str, Any] = {function.__name__: function for function in RIGHT_PAIRS}
    answers["reference"] = reference(EXERCISE, "lab01_1_setup", "lab01_1_b")["tp_mlp"]
    answers |= {name: function for name, (function, _, _) in WRONG_PAIRS.items()}
    try:
        with mock.patch.object(pair_ranks, "run_ranks", run_ranks_forked):
            found = run_answers(list(answers.values()), CASES, collective_limit_s=5, run_limit_s=240)
    finally:
        cloudpickle.unregister_pickle_by_value(lab01_1_answers)
    return dict(zip(answers, found, strict=True))


# --- The pair -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", *(function.__name__ for function in RIGHT_PAIRS)])
def test_right_answer_in_any_style_gets_full_marks_on_two_and_four_ranks(name, reports, capsys):
    assert lab01_1.grade_reports(reports[name], 9, len(CASES)) == 9
    count = len(CASES)
    assert capsys.readouterr().out == (
        f"output right in {count} of {count} cases; x.grad right in {count} of {count} cases; "
        f"gradients of the parts right in {count} of {count} cases\n"
    )


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_wrong_answer_gets_its_points_and_its_own_feedback(name, reports, capsys):
    _, points, words = WRONG_PAIRS[name]
    assert lab01_1.grade_reports(reports[name], 9, len(CASES)) == points
    said = capsys.readouterr()
    assert words in said.out and said.err == ""


def test_feedback_names_one_mistake_where_there_is_one(reports, capsys):
    for name in ("bias on every rank", "no all-reduce forward", "no all-reduce backward", "gathers the weights"):
        lab01_1.grade_reports(reports[name], 9, len(CASES))
        mistake, counts = capsys.readouterr().out.splitlines()
        assert (
            mistake.startswith("x [")
            and mistake.endswith(f"(and {len(CASES) - 1} more like it)")
            and counts.startswith("output")
        )


def test_answer_that_does_not_end_on_two_ranks_is_not_started_on_four(reports):
    for name in ("skips the collective", "leaves the collective out", "fails on one rank"):
        assert [case.case.world_size for case in reports[name].cases] == [2]


def test_hang_and_error_are_told_apart_from_what_follows_from_them(reports):
    assert reports["skips the collective"].cases[0].statuses()[0] == "hung"
    assert reports["fails on one rank"].cases[0].statuses() == {0: "hung", 1: "error"}


def test_processes_that_end_or_never_end_do_not_end_the_grader(capsys):
    def leaves(x, w_in, b_in, w_out, b_out):
        os._exit(3)

    cloudpickle.register_pickle_by_value(lab01_1_answers)
    started_s = time.monotonic()
    try:
        cases = make_pair_cases(1, 2, 3)
        never, left = run_answers([endless, leaves], cases, collective_limit_s=6, run_limit_s=90)
    finally:
        cloudpickle.unregister_pickle_by_value(lab01_1_answers)
    assert time.monotonic() - started_s < 120
    assert lab01_1.grade_reports(never, 9, len(cases)) == lab01_1.grade_reports(left, 9, len(cases)) == 0
    said = capsys.readouterr().out
    assert "ranks 0, 1 computed without end" in said
    assert "The ranks did not come to an end: rank" in said and "exited with code 3" in said


def test_what_needs_no_ranks_starts_none(monkeypatch, capsys):
    monkeypatch.setattr("vlmcourse.grading.lab01_1.run_answers", None)
    blank: dict = {}
    exec(read_cells("chapters", EXERCISE)["lab01_1_b"].source, blank)
    assert lab01_1.check_pair(blank["tp_mlp"], points=9, seed=1) == 0
    assert lab01_1.check_pair(lambda x, weights: x, points=9, seed=1) == 0
    assert capsys.readouterr().out == (
        "tp_mlp is not solved yet\nyour function must take (x, w_in, b_in, w_out, b_out), and takes (x, weights)\n"
    )


def test_function_that_cannot_travel_is_explained(capsys):
    lock = threading.Lock()
    assert lab01_1.check_pair(lambda x, w_in, b_in, w_out, b_out: lock, points=9, seed=1) == 0
    assert "cannot be sent to the ranks" in capsys.readouterr().out


def test_cases_are_such_that_sending_weights_or_channels_is_seen():
    for case in (case for seed in range(4) for world_size in (2, 4) for case in make_pair_cases(seed, world_size, 4)):
        assert case.hidden % case.world_size == 0
        part = case.hidden // case.world_size
        assert part * case.width > case.most_numbers and case.num_inputs // case.width * part > case.most_numbers
        assert case.most_numbers >= case.world_size * case.num_inputs
        truth = make_truth(case, rank=1)
        names = [name for name, tensor in truth.outputs.items() if truth.outputs["right"].equal(tensor)]
        assert names == ["right"]


def test_parts_of_the_expected_values_add_up_to_those_of_one_process():
    case = CASES[-1]
    truths = [make_truth(case, rank) for rank in range(case.world_size)]
    y = sum(truth.outputs["own_part_no_bias"] for truth in truths) + truths[0].parts["b_out"]
    x_grad = sum(truth.input_grads["own_part"] for truth in truths)
    assert (y - truths[0].outputs["right"]).abs().max() < 1e-5
    assert (x_grad - truths[0].input_grads["right"]).abs().max() < 1e-5
    for truth in truths:
        _, _, grads = run_mlp(truth.x, truth.grad_y, truth.parts)
        assert all((grads[name] - truth.part_grads[name]).abs().max() < 1e-5 for name in PARTS)


# --- The parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", RIGHT_SHARDS, ids=lambda function: function.__name__)
def test_right_parts_get_full_marks_and_no_word(function, capsys):
    assert lab01_1.check_shards(function, points=3, seed=5, num_cases=10) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("function", "points", "words"), WRONG_SHARDS)
def test_wrong_parts_lose_what_they_should_and_are_named(function, points, words, capsys):
    assert lab01_1.check_shards(function, points=3, seed=1, num_cases=6) == points
    said = capsys.readouterr().out
    assert words in said
    assert "every N-th" in words or "every N-th" not in said


# --- In the notebook ------------------------------------------------------------------------------------------------


def test_points_are_those_that_the_exercise_states():
    assert stated_points(EXERCISE) == POINTS
    text = read_cells("solutions", EXERCISE)["lab01_1_b_task"].source
    shares = (lab01_1.SHARE_OF_OUTPUT, lab01_1.SHARE_OF_INPUT_GRAD, lab01_1.SHARE_OF_PART_GRADS)
    assert sum(shares) == POINTS["lab01_1_b_test"]
    assert [int(line.split("|")[-2]) for line in text.splitlines() if line[-3:-2].isdigit()] == [*shares]
    assert f"ends that after {lab01_1.COLLECTIVE_LIMIT_S:g} seconds" in text


def test_release_tells_neither_solution_nor_hidden_cases():
    released = "\n".join(cell.source for cell in read_cells("chapters", EXERCISE).values())
    assert "torch.autograd.Function)" not in released and "HIDDEN" not in released
    seeds = hidden_seeds(EXERCISE)
    assert len(seeds) == len(POINTS) and not any(line in released for line in seeds)
    assert read_cells("chapters", EXERCISE).keys() == read_cells("solutions", EXERCISE).keys()


@pytest.mark.notebook
def test_run_all_on_the_blank_release_goes_on_to_its_end():
    assert run_blank(EXERCISE) == {
        "lab01_1_a_test": ("shard_mlp is not solved yet", "0.0"),
        "lab01_1_b_test": ("tp_mlp is not solved yet", "0.0"),
    }


def test_reference_parts_get_full_marks(capsys):
    namespace = reference(EXERCISE, "lab01_1_setup", "lab01_1_a")
    assert lab01_1.check_shards(namespace["shard_mlp"], points=3, seed=246810, num_cases=10) == 3
