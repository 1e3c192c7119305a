"""Lab 1.2: placements against the exact optimum; right ones of any style lose nothing, wrong ones are named."""

from __future__ import annotations

import itertools
import time

import pytest
from lab01_2_answers import RIGHT, WRONG, recursion_with_memory, try_everything
from lab_cells import hidden_seeds, read_cells, reference, run_blank, stated_points

from vlmcourse.grading import lab01_2
from vlmcourse.grading.placements import GROUPS, Placement, best_counts, credit, make_placements, slowest

EXERCISE = "lab01_2"
POINTS = {"lab01_2_small": 4, "lab01_2_vlm": 4, "lab01_2_deep": 2}
CASES = {"small": (71, 10), "vlm": (72, 10), "deep": (73, 6)}

pytestmark = pytest.mark.timeout(300)


def grade(function, limit_s: float = 5.0) -> float:
    """Grade a function on all groups."""
    return sum(
        lab01_2.check_placement(function, group, POINTS[f"lab01_2_{group}"], seed, num_cases, limit_s=limit_s)
        for group, (seed, num_cases) in CASES.items()
    )


@pytest.mark.parametrize(
    "function", [*RIGHT, "reference"], ids=lambda function: getattr(function, "__name__", function)
)
def test_right_answer_in_any_style_gets_full_marks(function, capsys):
    function = reference(EXERCISE, "lab01_2_place")["place_layers"] if function == "reference" else function
    assert grade(function) == 10
    assert capsys.readouterr().out == "small: 11 of 11 cases\nvlm: 10 of 10 cases\ndeep: 6 of 6 cases\n"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answer_loses_points_and_is_named(name, capsys):
    function, words, (least, most) = WRONG[name]
    assert least <= grade(function, limit_s=1.0) <= most
    said = capsys.readouterr()
    assert words in said.out and said.err == ""
    accused = [line for line in said.out.splitlines() if line.startswith("It looks as if")]
    assert all(words in line for line in accused)


def test_endless_answer_costs_one_time_limit_a_cell(capsys):
    def endless(costs, num_stages):
        while True:
            pass

    started_s = time.monotonic()
    assert grade(endless, limit_s=0.3) == 0
    assert time.monotonic() - started_s < 20
    assert "stopped after too long" in capsys.readouterr().out


def test_answer_gets_a_copy_of_the_costs(capsys):
    def pops(costs, num_stages):
        counts = recursion_with_memory(tuple(costs), num_stages)
        costs.clear()
        return counts

    assert grade(pops) == 10


@pytest.mark.parametrize("group", ["small", "vlm"])
def test_optimum_is_that_of_trying_everything(group):
    for case in make_placements(group, seed=5, num_cases=10):
        counts = try_everything(case.costs, case.num_stages)
        assert case.best() == pytest.approx(slowest(case.costs, counts), rel=1e-12)


def test_credit_is_one_for_the_best_and_falls_to_nothing_at_a_fifth_more():
    case = Placement(costs=(10.0, 9.0, 1.0, 2.0), num_stages=2)  # best: 10 and 12
    assert credit(case, best_counts(case.costs, 2)) == credit(case, [1, 3]) == 1
    hardly = Placement(costs=(1000.0, 1.0, 1000.0, 0.5), num_stages=2)
    assert credit(hardly, [2, 2]) == 1 and credit(hardly, [1, 3]) == pytest.approx(0.5, abs=0.002)
    assert credit(case, [2, 2]) == 0  # 19 against 12
    assert credit(Placement(costs=(6.0, 1.0, 4.0), num_stages=2), [2, 1]) == pytest.approx(0.5 * (1 - (1 / 6) / 0.2))


def test_cases_hold_what_the_exercise_promises():
    for seed in (1, 71, 819203):
        small = make_placements("small", seed, 10)
        assert max(len(case.costs) for case in small) <= 9
        assert any(case.num_stages == 1 for case in small)
        assert any(case.num_stages == len(case.costs) for case in small)
        assert any(max(case.costs) == case.best() and case.num_stages >= 4 for case in small)  # stages of no use
    for case in make_placements("deep", 902817, 12):
        assert len(case.costs) >= 48 and 8 <= case.num_stages <= 12
    for group in GROUPS:
        for case in make_placements(group, 3, 20):
            assert 1 <= case.num_stages <= len(case.costs) and min(case.costs) > 0


def test_in_most_cases_equal_counts_are_not_the_best():
    for group in ("vlm", "deep"):
        cases = make_placements(group, seed=9, num_cases=20)
        each = [[len(case.costs) // case.num_stages] * case.num_stages for case in cases]
        for case, counts in zip(cases, each, strict=True):
            counts[0] += len(case.costs) - sum(counts)
        assert sum(credit(case, counts) < 1 for case, counts in zip(cases, each, strict=True)) >= 18


def test_visible_cases_do_not_give_the_hidden_ones_away(capsys):
    visible = {case for group in GROUPS for case in make_placements(group, 1, 4)}
    hidden = itertools.chain.from_iterable(
        make_placements(group, seed, num) for group, seed, num in zip(GROUPS, HIDDEN_SEEDS, (10, 10, 6), strict=True)
    )
    assert not {case for case in hidden if len(set(case.costs)) > 1} & visible


HIDDEN_SEEDS = [int(line.split("=")[1].split(",")[0]) for line in hidden_seeds(EXERCISE)]


def test_points_are_those_that_the_exercise_states():
    assert stated_points(EXERCISE) == POINTS
    assert [f"lab01_2_{group}" for group in GROUPS] == list(POINTS)


def test_release_tells_neither_solution_nor_hidden_cases():
    released = "\n".join(cell.source for cell in read_cells("chapters", EXERCISE).values())
    assert "before[" not in released and "HIDDEN" not in released
    assert len(HIDDEN_SEEDS) == 3 and not any(str(seed) in released for seed in HIDDEN_SEEDS)
    assert read_cells("chapters", EXERCISE).keys() == read_cells("solutions", EXERCISE).keys()


def test_example_of_the_task_is_right():
    assert best_counts([3, 3, 2, 2, 2, 6], 3) == [2, 3, 1]
    assert slowest([3, 3, 2, 2, 2, 6], [2, 2, 2]) == 8
    assert slowest([3, 3, 2, 2, 2, 6], [2, 3, 1]) == 6


@pytest.mark.notebook
def test_run_all_on_the_blank_release_goes_on_to_its_end():
    assert run_blank(EXERCISE) == dict.fromkeys(POINTS, ("place_layers is not solved yet", "0.0"))
