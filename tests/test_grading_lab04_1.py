"""Lab 4.1: plans against the exact optimum, runs against the library; wrong ones are named, right ones lose nothing."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re

import nbformat
import pytest
import torch
from lab04_1_answers import RIGHT_PLANS, RIGHT_RUNS, WRONG_PLANS, WRONG_RUNS, all_of_it, recursion_with_memory, walk
from lab_cells import ROOT, hidden_seeds, read_cells, reference, run_blank, stated_points
from torch import nn

from vlmcourse.grading import lab04_1
from vlmcourse.grading.chain_cases import GROUPS, WITHOUT_INNER_INPUTS, make_chains
from vlmcourse.grading.chain_mistakes import LIVE
from vlmcourse.grading.chain_runs import INPUT_BYTES, make_runs, record_run, run_reference
from vlmcourse.grading.chain_verdicts import SPARE_BYTES
from vlmcourse.grading.chains import (
    ChainCase,
    Counting,
    best_segments,
    bytes_alive,
    cost,
    credit,
    is_best_by,
    kept_bytes,
    least_cost,
    lowest_limit,
    peak_bytes,
)
from vlmcourse.labs import ch04
from vlmcourse.monitor.activations import ActivationMeter

EXERCISE = "lab04_1"
POINTS = {"lab04_1_small": 3, "lab04_1_large": 3, "lab04_1_run_test": 6}
pytestmark = pytest.mark.timeout(300)


def read_cases() -> dict[str, dict[str, tuple[int, ...]]]:
    """Return seed and number of cases of each graded cell, as its visible and hidden tests have them."""
    cells = read_cells("solutions", EXERCISE)
    found: dict[str, dict[str, tuple[int, ...]]] = {"visible": {}, "hidden": {}}
    for name in POINTS:
        pairs = re.findall(r"^seed(?:, num_cases)? = ([\d, ]+)$", cells[name].source, re.M)
        for tests, pair in zip(found, pairs, strict=True):
            found[tests][name] = tuple(map(int, pair.split(",")))
    return found


CASES = read_cases()


def grade_plan(function, tests: str = "hidden", limit_s: float = 5.0) -> float:
    """Grade a function on both groups."""
    return sum(
        lab04_1.check_plan(
            function, group, POINTS[f"lab04_1_{group}"], *CASES[tests][f"lab04_1_{group}"], limit_s=limit_s
        )
        for group in GROUPS
    )


def grade_run(function, tests: str = "hidden") -> float:
    return lab04_1.check_run(function, POINTS["lab04_1_run_test"], *CASES[tests]["lab04_1_run_test"])


@functools.cache
def remember(function):
    """Let a function compute each case once: several tests ask for the same."""
    found: dict = {}

    @functools.wraps(function)
    def remembering(inputs, inside, costs, limit):
        key = (*inputs, *inside, *costs, limit)
        if key not in found:
            found[key] = function(inputs, inside, costs, limit)
        return found[key]

    return remembering if len(inspect.signature(function).parameters) == 4 else function


@pytest.mark.parametrize(
    "function", [*RIGHT_PLANS, "reference"], ids=lambda function: getattr(function, "__name__", function)
)
def test_right_plan_in_any_style_gets_full_marks(function, capsys):
    function = reference(EXERCISE, "lab04_1_plan")["choose_segments"] if function == "reference" else function
    assert grade_plan(function) == 6
    assert capsys.readouterr().out == "small: 11 of 11 cases\nlarge: 4 of 4 cases\n"
    assert grade_plan(function, "visible") == 6
    assert capsys.readouterr().out == "small: 6 of 6 cases\nlarge: 2 of 2 cases\n"


@pytest.mark.parametrize("name", WRONG_PLANS)
def test_wrong_plan_loses_points_and_is_named(name, capsys):
    function, words, (fewest, most) = WRONG_PLANS[name]
    assert fewest <= grade_plan(remember(function), limit_s=1.0) <= most
    said = capsys.readouterr()
    assert words in said.out and said.err == ""


@pytest.mark.parametrize(
    "function", [*RIGHT_RUNS, "reference"], ids=lambda function: getattr(function, "__name__", function)
)
def test_right_run_in_any_style_gets_full_marks(function, capsys):
    if function == "reference":
        namespace = reference(EXERCISE, "lab04_1_plan")
        exec("from torch import nn\n" + read_cells("solutions", EXERCISE)["lab04_1_run"].source, namespace)
        function = namespace["run_chain"]
    for tests in ("visible", "hidden"):
        assert grade_run(function, tests) == 6
        assert "wrong" not in capsys.readouterr().out


@pytest.mark.parametrize("name", WRONG_RUNS)
def test_wrong_run_loses_points_and_is_named(name, capsys):
    function, words, (fewest, most) = WRONG_RUNS[name]
    for tests in ("visible", "hidden"):
        assert fewest <= grade_run(function, tests) <= most
        said = capsys.readouterr()
        assert words in said.out and said.err == ""


@pytest.mark.parametrize(("name", "part"), [("library", "calls"), ("no result", "output")])
def test_a_part_that_was_not_judged_is_not_called_wrong(name, part, capsys):
    grade_run(WRONG_RUNS[name][0], "visible")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("run: ")]
    assert f"{part} wrong" in line and line.count("wrong") == 1 and line.count("not judged") >= 4


def test_section_1s_function_pasted_as_it_is_earns_what_the_task_says():
    chapter = nbformat.read(ROOT / "solutions/ch04_checkpointing/ch04_checkpointing.ipynb", as_version=4)
    namespace: dict = {"torch": torch}
    exec(next(cell.source for cell in chapter.cells if cell.id == "s1_by_hand"), namespace)

    def run_chain(layers, x, segments):
        for again, part in walk(layers, segments):
            run = nn.Sequential(*part)
            x = namespace["RunAgain"].apply(x, run, *run.parameters()) if again else run(x)
        return x

    assert grade_run(run_chain, "visible") == grade_run(run_chain) == 4
    assert "worth 4 of the 6 points" in read_cells("solutions", EXERCISE)["lab04_1_run_task"].source


def test_no_wrong_answer_is_told_nothing_and_enough_are_tried():
    assert len(WRONG_PLANS) >= 12 and len(WRONG_RUNS) >= 12
    assert len(RIGHT_PLANS) >= 4 and len(RIGHT_RUNS) >= 4


def test_optimum_is_that_of_trying_everything():
    for case in make_chains("small", seed=5, num_cases=10):
        plans = [plan for plan in all_plans(case.num_layers) if peak_bytes(case, plan) <= case.limit]
        best = best_segments(case)
        assert best is not None and cost(case, list(best)) == min(cost(case, plan) for plan in plans)
        assert lowest_limit(case) == min(peak_bytes(case, plan) for plan in all_plans(case.num_layers))


def all_plans(num_layers: int, start: int = 0):
    if start >= num_layers:
        yield []
        return
    for rest in all_plans(num_layers, start + 1):
        yield rest
    for end in range(start + 1, num_layers + 1):
        for rest in all_plans(num_layers, end):
            yield [(start, end), *rest]


def test_last_segment_never_gains_from_running_again():
    for case in make_chains("small", 11, 10):
        for plan in all_plans(case.num_layers):
            if plan and plan[-1][1] == case.num_layers:
                assert peak_bytes(case, plan[:-1]) == peak_bytes(case, plan)


def test_example_of_the_task_is_right():
    case = ChainCase(inputs=(2, 2, 2), inside=(6, 6, 2), costs=(1, 3, 5), limit=14)
    assert peak_bytes(case, []) == 20
    assert bytes_alive(case, [(0, 1)]) == [(2, 14), (1, 10), (0, 8)]
    assert best_segments(case) == ((0, 1),) and cost(case, [(0, 1)]) == 1


def test_memory_of_a_plan_is_that_of_a_real_chain():
    """Kept and highest bytes by the task's rule equal those that autograd and recomputation really hold."""
    torch.manual_seed(0)
    layers = [ch04.ReluLayer(16, torch.Generator().manual_seed(i)) for i in range(6)]
    size = 32 * 16 * 4
    case = ChainCase(inputs=(size,) * 6, inside=(0,) * 6, costs=(1,) * 6, limit=10**9)
    for segments in ([], [(0, 2)], [(0, 2), (2, 5)], [(1, 4)]):
        x = torch.randn(32, 16) * torch.ones((), requires_grad=True)
        with ActivationMeter() as meter:
            y = run_reference(layers, x, segments)
        # The rule leaves the last layer's output out; relu keeps it where the last layer stays.
        assert meter.live_bytes == kept_bytes(case, segments) + size
        y.sum().backward()


def test_credit_is_one_for_the_least_and_nothing_over_the_limit():
    case = ChainCase(inputs=(2, 2, 2), inside=(6, 6, 2), costs=(1, 3, 5), limit=14)
    assert credit(case, [(0, 1)]) == 1 and credit(case, []) == 0
    assert credit(case, [(1, 2)]) == 0  # 8 + 2 + 4 fits 14, at three times the cost
    assert peak_bytes(case, [(1, 2)]) == 16
    free = ChainCase(inputs=(2,), inside=(3,), costs=(1,), limit=9)
    assert credit(free, []) == 1 and credit(free, [(0, 1)]) == 0


def test_cases_hold_what_the_exercise_promises():
    for seed in (1, 71, 640217):
        small, large = make_chains("small", seed, 10), make_chains("large", seed, 4)
        assert max(case.num_layers for case in small) <= 8 and min(case.num_layers for case in large) >= 19
        assert any(best_segments(case) == () for case in small)  # room for everything
        assert any(case.limit == lowest_limit(case) for case in small if case.num_layers > 1)
        assert max(case.num_layers for case in large) <= 30
        for case in (*small, *large):
            assert best_segments(case) is not None
    with pytest.raises(ValueError, match="choose one of small, large"):
        make_chains("medium", 1, 1)


def test_runs_of_the_library_and_of_the_plain_chain_differ_in_bytes_only():
    for case in make_runs(seed=3):
        again = record_run(run_reference, case, allow_library=True)
        plain = record_run(lambda layers, x, _: nn.Sequential(*layers)(x), case, allow_library=True)
        assert again.output is not None and plain.output is not None
        assert torch.equal(again.output, plain.output) and again.draw == plain.draw
        for name, gradient in again.gradients.items():
            other = plain.gradients[name]
            assert gradient is not None and other is not None and torch.equal(gradient, other)
        assert (again.kept < plain.kept) == bool(case.segments)
        assert again.calls == [1 + (i in case.covered) for i in range(len(case.hidden))]


def test_what_an_answer_may_keep_besides_is_less_than_one_input():
    for seed in (1, 2, 905573):
        for case in make_runs(seed):
            assert SPARE_BYTES * len(case.segments) < INPUT_BYTES
            assert not case.segments or max(end - start for start, end in case.segments) >= 3


COUNTED_WRONG = (
    *("without the live segment", "single layers, no live unit", "largest alone", "largest and its input"),
    *("largest and first input", "without inner inputs", "less than the limit", "dearest layer"),
)


@pytest.mark.parametrize("name", COUNTED_WRONG)
def test_an_answer_that_counts_wrong_is_told_so_in_each_group(name, capsys):
    function, words, _ = WRONG_PLANS[name]
    for tests, group in itertools.product(CASES, GROUPS):
        points = lab04_1.check_plan(remember(function), group, 3, *CASES[tests][f"lab04_1_{group}"])
        said = capsys.readouterr().out
        # On the few visible cases two counts may give the same answers: then what they have in common is told.
        told = words in said or (tests == "visible" and LIVE in said)
        assert told and points < 2.5, (tests, group, points, said)


def test_no_mistake_is_named_from_a_few_plans_among_answers_that_are_none(capsys):
    for group in GROUPS:
        lab04_1.check_plan(remember(WRONG_PLANS["ends included"][0]), group, 3, *CASES["hidden"][f"lab04_1_{group}"])
        assert "looks as if" not in capsys.readouterr().out


def test_search_by_a_count_agrees_with_the_optimum():
    for case in make_chains("small", *CASES["hidden"]["lab04_1_small"]):
        best = list(best_segments(case) or ())
        assert least_cost(case, Counting()) == cost(case, best) and is_best_by(case, best, Counting())
        mine = all_of_it(case.inputs, case.inside, case.costs, case.limit)
        assert is_best_by(case, mine, Counting()) and cost(case, mine) == cost(case, best)
        assert not is_best_by(dataclasses.replace(case, limit=peak_bytes(case, best) - 1), best, Counting())
        assert not is_best_by(case, [(0, case.num_layers)], Counting())


def test_long_chains_have_exact_limits_and_tell_what_is_alive_of_a_segment():
    for tests in CASES.values():
        for case in make_chains("large", *tests["lab04_1_large"]):
            right = least_cost(case, Counting())
            assert least_cost(case, WITHOUT_INNER_INPUTS) < right
            if case.what == "a long chain":
                assert least_cost(case, Counting(spare=1)) > right


def test_errors_and_strange_values_cost_points_and_raise_nothing(capsys):
    def fails(inputs, inside, costs, limit):
        raise KeyError("mine")

    for function in (fails, None, 3, lambda *_: "text", lambda *_: [(0, 1, 2)], lambda *_: [(0.5, 1)], lambda x: x):
        assert grade_plan(function) <= 0.5
        assert grade_run(function if callable(function) else None) == 0
    said = capsys.readouterr()
    assert "KeyError" in said.out and "your function must take" in said.out and said.err == ""


def test_answer_gets_copies_of_the_numbers():
    def pops(inputs, inside, costs, limit):
        found = recursion_with_memory(inputs, inside, costs, limit)
        costs.clear()
        inputs.clear()
        return found

    assert grade_plan(pops) == 6


def test_points_are_those_that_the_exercise_states():
    assert stated_points(EXERCISE) == POINTS


def test_visible_cases_and_the_release_do_not_give_the_hidden_ones_away():
    released = "\n".join(cell.source for cell in read_cells("chapters", EXERCISE).values())
    seeds = [re.findall(r"\d+", line)[0] for line in hidden_seeds(EXERCISE)]
    assert len(seeds) == 3 and not any(seed in released for seed in seeds)
    assert "HIDDEN" not in released and "ways[" not in released and "fork_rng(devices=[]), torch" not in released
    assert read_cells("chapters", EXERCISE).keys() == read_cells("solutions", EXERCISE).keys()
    for group in GROUPS:
        visible, hidden = (make_chains(group, *CASES[tests][f"lab04_1_{group}"]) for tests in ("visible", "hidden"))
        shared = set(visible) & set(hidden)
        assert not [case for case in shared if case.num_layers > 1], list(itertools.islice(shared, 3))


@pytest.mark.notebook
def test_run_all_on_the_blank_release_goes_on_to_its_end():
    found = run_blank(EXERCISE)
    unsolved = {"lab04_1_small": "choose_segments", "lab04_1_large": "choose_segments", "lab04_1_run_test": "run_chain"}
    assert found == {name: (f"{function} is not solved yet", "0.0") for name, function in unsolved.items()}
