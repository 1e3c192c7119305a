"""Lab 1.2: placements against the exact optimum; right ones of any style lose nothing, wrong ones are named."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import time

import pytest
from lab01_2_answers import RIGHT, WRONG, recursion_with_memory, try_everything
from lab_cells import hidden_seeds, read_cells, reference, run_blank, stated_points

from vlmcourse.grading import lab01_2
from vlmcourse.grading.placement_objectives import SLOWEST, is_best, least, misleads, value
from vlmcourse.grading.placement_strategies import STRATEGIES
from vlmcourse.grading.placements import (
    BORDERS,
    GROUPS,
    SMALL,
    TRAPS,
    Placement,
    best_counts,
    credit,
    make_placements,
    slowest,
    stage_costs,
)

EXERCISE = "lab01_2"
POINTS = {"lab01_2_small": 4, "lab01_2_vlm": 4, "lab01_2_deep": 2}
pytestmark = pytest.mark.timeout(300)


def read_cases() -> dict[str, dict[str, tuple[int, int]]]:
    """Return seed and number of cases of each group, as the notebook's visible and hidden tests have them."""
    cells = read_cells("solutions", EXERCISE)
    pairs = [re.findall(r"seed, num_cases = (\d+), (\d+)", cells[name].source) for name in POINTS]
    return {
        tests: {group: (int(pair[at][0]), int(pair[at][1])) for group, pair in zip(GROUPS, pairs, strict=True)}
        for at, tests in enumerate(("visible", "hidden"))
    }


CASES = read_cases()


def grade(function, limit_s: float = 5.0, tests: str = "hidden") -> float:
    """Grade a function on all groups."""
    return sum(
        lab01_2.check_placement(function, group, POINTS[f"lab01_2_{group}"], seed, num_cases, limit_s=limit_s)
        for group, (seed, num_cases) in CASES[tests].items()
    )


def remember(function):
    """Let a function compute each case once: the groups ask for the same ones to find out why it is wrong."""
    found: dict = {}

    @functools.wraps(function)
    def remembering(costs, num_stages):
        key = (*costs, num_stages)
        if key not in found:
            found[key] = function(costs, num_stages)
        return found[key]

    return remembering if len(inspect.signature(function).parameters) > 1 else function


@pytest.mark.parametrize(
    "function", [*RIGHT, "reference"], ids=lambda function: getattr(function, "__name__", function)
)
def test_right_answer_in_any_style_gets_full_marks(function, capsys):
    function = reference(EXERCISE, "lab01_2_place")["place_layers"] if function == "reference" else function
    assert grade(function) == 10
    assert capsys.readouterr().out == "small: 11 of 11 cases\nvlm: 10 of 10 cases\ndeep: 6 of 6 cases\n"
    assert grade(function, tests="visible") == 10
    assert capsys.readouterr().out == "small: 5 of 5 cases\nvlm: 4 of 4 cases\ndeep: 2 of 2 cases\n"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answer_loses_points_and_is_named(name, capsys):
    function, words, (fewest, most) = WRONG[name]
    function = remember(function)
    for tests in ("visible", "hidden"):
        assert fewest <= grade(function, limit_s=1.0, tests=tests) <= most, tests
        said = capsys.readouterr()
        assert words in said.out and said.err == ""
        accused = [line for line in said.out.splitlines() if line.startswith("It looks as if")]
        assert all(words in line for line in accused), tests


def test_every_strategy_of_the_table_is_told_from_the_others():
    words = [words for _, words, _ in WRONG.values()]
    untested = [s.what for s in STRATEGIES if not any(text.split(". With")[0] in s.what for text in words)]
    assert untested == ["you leave the cost of the first layer out", "you leave the cost of the first stage out"]


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


def test_what_is_best_by_another_objective_is_not_the_best():
    """Every placement that is best by an objective in `TRAPS`, found by trying all, has a slower slowest stage."""
    cases = [case for tests in CASES.values() for case in make_placements("small", *tests["small"])]
    telling = [case for case in cases if misleads(TRAPS[0], case.costs, case.num_stages)]
    assert len(telling) >= 8
    for case in telling:
        placed = [stage_costs(case.costs, counts) for counts in all_placements(case)]
        for objective in TRAPS:
            values = [value(objective, stages) for stages in placed]
            chosen = [stages for stages, got in zip(placed, values, strict=True) if got <= min(values) + 1e-9]
            assert min(map(max, chosen)) > case.best() * (1 + 1e-9)
            assert least(objective, case.costs, case.num_stages) == pytest.approx(min(values), abs=1e-9)
            assert all(is_best(objective, case.costs, stages) for stages in chosen)


def all_placements(case):
    for cuts in itertools.combinations(range(1, len(case.costs)), case.num_stages - 1):
        yield [end - start for start, end in itertools.pairwise([0, *cuts, len(case.costs)])]


def test_every_case_but_the_borders_tells_the_objectives_apart():
    for tests, group in itertools.product(CASES, GROUPS):
        for number, case in enumerate(make_placements(group, *CASES[tests][group])):
            if group != "small" or SMALL[number] not in BORDERS:
                assert all(misleads(objective, case.costs, case.num_stages) for objective in TRAPS)
            assert not misleads(SLOWEST, case.costs, case.num_stages)


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
    for case in make_placements("deep", *CASES["hidden"]["deep"]):
        assert len(case.costs) >= 48 and 8 <= case.num_stages <= 12
    for group in GROUPS:
        for case in make_placements(group, 3, 6):
            assert 1 <= case.num_stages <= len(case.costs) and min(case.costs) > 0


def test_in_most_cases_equal_counts_are_not_the_best():
    for group in ("vlm", "deep"):
        cases = make_placements(group, seed=9, num_cases=8)
        each = [[len(case.costs) // case.num_stages] * case.num_stages for case in cases]
        for case, counts in zip(cases, each, strict=True):
            counts[0] += len(case.costs) - sum(counts)
        assert sum(credit(case, counts) < 1 for case, counts in zip(cases, each, strict=True)) >= 7


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
