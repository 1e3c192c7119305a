"""Exercise 4.3: right answers of any style lose nothing, wrong ones are named by their mistake."""

from __future__ import annotations

import re

import pytest
from ex04_3_answers import (
    CHOICE_RIGHT,
    CHOICE_WRONG,
    FACTS_RIGHT,
    FACTS_WRONG,
    SURVIVORS_RIGHT,
    SURVIVORS_WRONG,
    search,
)
from lab_cells import hidden_seeds, read_cells, reference, run_blank, stated_points

from vlmcourse.grading import ex04_3
from vlmcourse.grading.format_cases import GROUPS, make_choices, make_formats, make_gradients

EXERCISE = "ex04_3"
POINTS = {
    "ex04_3_a_facts": 5,
    "ex04_3_b_plain": 2,
    "ex04_3_b_edges": 3,
    "ex04_3_c_easy": 3,
    "ex04_3_c_hard": 3,
}
pytestmark = pytest.mark.timeout(120)
SEEDS = {"visible": (1, 6), "hidden": (530417, 12)}


def grade_facts(function, tests: str = "hidden") -> float:
    return ex04_3.check_facts(function, 5, *SEEDS[tests])


def grade_survivors(function, tests: str = "hidden") -> float:
    seed, number = SEEDS[tests]
    plain = ex04_3.check_survivors(function, 2, seed, number)
    return plain + ex04_3.check_survivors(function, 3, seed + 1, number, edges=True)


def grade_choice(function, tests: str = "hidden") -> float:
    seed, number = SEEDS[tests]
    return sum(ex04_3.check_choice(function, group, 1.5, seed, number) for group in GROUPS)


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize("function", FACTS_RIGHT)
def test_right_facts_in_any_style_get_full_points(function, tests: str, capsys) -> None:
    assert grade_facts(function, tests) == 5
    assert capsys.readouterr().out.startswith("5 of 5 facts right")


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize("function", SURVIVORS_RIGHT)
def test_right_survivors_in_any_style_get_full_points(function, tests: str, capsys) -> None:
    assert grade_survivors(function, tests) == 5
    assert not re.search("looks as if|does not become", capsys.readouterr().out)


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize("function", CHOICE_RIGHT)
def test_right_choices_in_any_style_get_full_points(function, tests: str, capsys) -> None:
    assert grade_choice(function, tests) == 6
    assert "looks as if" not in capsys.readouterr().out


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize(("name", "function", "fact", "words"), FACTS_WRONG, ids=[case[0] for case in FACTS_WRONG])
def test_a_wrong_fact_costs_its_points_and_is_explained(name, function, fact, words, tests: str, capsys) -> None:
    assert grade_facts(function, tests) == 4
    said = capsys.readouterr().out
    assert f"{fact} of " in said and words in said
    assert "the highest stored exponent is kept" in said or name != "top exponent used" or "NaN" in said


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize(("name", "function", "words"), SURVIVORS_WRONG, ids=[case[0] for case in SURVIVORS_WRONG])
def test_wrong_survivors_are_explained(name, function, words, tests: str, capsys) -> None:
    assert grade_survivors(function, tests) < 4
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize(("function", "words"), CHOICE_WRONG, ids=[case[0].__name__ for case in CHOICE_WRONG])
def test_wrong_choices_are_explained(function, words, tests: str, capsys) -> None:
    assert grade_choice(function, tests) < 6
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("check", "broken", "words"),
    [
        (grade_facts, lambda e, m, i: None, "return a dict with the keys"),
        (grade_facts, lambda e, m, i: {"max": "large"}, "is not 'large'"),
        (grade_facts, lambda e: {}, "must take (exponent_bits, mantissa_bits, has_infinity)"),
        (grade_facts, lambda e, m, i: 1 / 0, "ZeroDivisionError"),
        (grade_survivors, lambda values, e, m: "zero", "return a list"),
        (grade_survivors, lambda values, e, m: values[99], "IndexError"),
        (grade_choice, lambda towers, formats, max_lost, headroom: "fp16", "return (name, power) or None"),
        (grade_choice, lambda towers, formats, max_lost, headroom: ("fp16", 1.5), "return (name, power) or None"),
        (grade_choice, lambda towers: None, "must take (towers, formats, max_lost, headroom)"),
    ],
)
def test_what_is_no_answer_gets_no_points_and_a_sentence(check, broken, words: str, capsys) -> None:
    assert check(broken) == 0
    assert words in capsys.readouterr().out


def test_changing_the_arguments_changes_nothing() -> None:
    def greedy(towers, formats, max_lost, headroom):
        answer = search(towers, formats, max_lost, headroom)
        towers.clear()
        formats.clear()
        return answer

    assert grade_choice(greedy) == 6


def test_cases_are_what_their_groups_say_and_differ_by_seed() -> None:
    for group in GROUPS:
        answers = [case.answer() for case in make_choices(group, 7, 8)]
        expected = {"wide": "bf16", "impossible": None}.get(group, "fp16")
        assert {None if a is None else a[0] for a in answers} == {expected}
        assert {bool(a and a[1]) for a in answers} <= {group == "scaled", group == "wide", False}
        assert make_choices(group, 7, 8) == make_choices(group, 7, 8) != make_choices(group, 8, 8)
    assert {fate for case in make_gradients(3, 4, True) for fate in case.fates} == set(ex04_3.FATES)
    assert any(not form.has_infinity for form in make_formats(3, 8)[4:])
    with pytest.raises(ValueError, match="choose one of"):
        make_choices("easy", 1, 1)


def test_the_notebook_asks_what_is_tested_here() -> None:
    assert stated_points(EXERCISE) == POINTS | {"ex04_3_d": 5}
    cells = read_cells("solutions", EXERCISE)
    visible = [re.findall(r"seed, num_cases = (\d+), (\d+)", cells[name].source) for name in POINTS]
    assert all(pairs[0] == ("1", "6") and int(pairs[1][0]) > 10**5 and int(pairs[1][1]) == 12 for pairs in visible)
    released = read_cells("chapters", EXERCISE)
    for line in hidden_seeds(EXERCISE):
        assert all(line not in cell.source for cell in released.values())


def test_the_reference_answers_are_right() -> None:
    space = reference(EXERCISE, "ex04_3_a", "ex04_3_b", "ex04_3_c")
    assert grade_facts(space["format_facts"]) == 5
    assert grade_survivors(space["survivors"]) == 5
    assert grade_choice(space["choose_format"]) == 6


@pytest.mark.notebook
def test_the_blank_release_prints_one_line_a_cell_and_gives_no_points() -> None:
    for name, (printed, result) in run_blank(EXERCISE).items():
        assert "is not solved yet" in printed and len(printed.splitlines()) <= 2, name
        assert float(result) == 0
