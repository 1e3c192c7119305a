"""Exercise 4.3: right answers of any style lose nothing, wrong ones are named by their mistake."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from ex04_3_facts import FACTS_RIGHT, FACTS_WRONG, WRONG_BIASES
from ex04_3_grading import SEEDS, grade_choice, reasons
from ex04_3_survivors import SURVIVORS_BIASED, SURVIVORS_BY_REGION, SURVIVORS_RIGHT, SURVIVORS_WRONG, by_limits
from lab_cells import hidden_seeds, read_cells, reference, run_blank, stated_points

from vlmcourse.grading import ex04_3
from vlmcourse.grading.choice_cases import GROUPS, make_choices
from vlmcourse.grading.format_cases import make_formats, make_gradients

EXERCISE = "ex04_3"
POINTS = {
    "ex04_3_a_facts": 5,
    "ex04_3_b_plain": 2,
    "ex04_3_b_edges": 3,
    "ex04_3_c_easy": 3,
    "ex04_3_c_hard": 3,
}
pytestmark = pytest.mark.timeout(120)


def grade_facts(function, tests: str = "hidden") -> float:
    return ex04_3.check_facts(function, 5, *SEEDS[tests])


def grade_survivors(function, tests: str = "hidden") -> float:
    seed, number = SEEDS[tests]
    plain = ex04_3.check_survivors(function, 2, seed, number)
    return plain + ex04_3.check_survivors(function, 3, seed + 1, number, edges=True)


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize("function", FACTS_RIGHT)
def test_right_facts_in_any_style_get_full_points(function, tests: str, capsys) -> None:
    assert grade_facts(function, tests) == 5
    assert capsys.readouterr().out.startswith("5 of 5 facts right")


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize("function", SURVIVORS_RIGHT)
def test_right_survivors_in_any_style_get_full_points(function, tests: str, capsys) -> None:
    assert grade_survivors(function, tests) == 5
    assert not re.search("looks as if|becomes", capsys.readouterr().out)


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize(("name", "function", "fact", "words"), FACTS_WRONG, ids=[case[0] for case in FACTS_WRONG])
def test_a_wrong_fact_costs_its_points_and_is_explained(name, function, fact, words, tests: str, capsys) -> None:
    assert grade_facts(function, tests) == 4
    said = capsys.readouterr().out
    assert f"{fact} of " in said and words in said
    assert "the highest stored exponent is kept" in said or name != "top exponent used" or "NaN" in said


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize(("function", "words"), WRONG_BIASES)
def test_a_wrong_bias_is_named_once_and_nothing_else_is_blamed(function, words: str, tests: str, capsys) -> None:
    assert grade_facts(function, tests) == 2
    first, *others = capsys.readouterr().out.splitlines()
    assert "the bias is 2^(e-1) - 1, " + words in first
    assert len(others) == 4 and all(re.fullmatch(r"\w+ of [^:]* is not \S+", line) for line in others[:3]), others


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize(("name", "function", "words"), SURVIVORS_WRONG, ids=[case[0] for case in SURVIVORS_WRONG])
def test_wrong_survivors_are_explained(name, function, words, tests: str, capsys) -> None:
    assert grade_survivors(function, tests) < 4
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize(("function", "all_words"), SURVIVORS_BY_REGION)
def test_wrong_survivors_are_explained_in_each_part_of_the_range(function, all_words, tests: str, capsys) -> None:
    ex04_3.check_survivors(function, 3, *SEEDS[tests], edges=True)
    said = reasons(capsys.readouterr().out)
    assert len(said) == len(all_words)
    assert all(words in line for words, line in zip(all_words, said, strict=True)), said


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize(("function", "words"), SURVIVORS_BIASED)
def test_a_wrong_bias_fails_in_every_format_and_is_the_only_reason(function, words: str, tests: str, capsys) -> None:
    for edges in (False, True):
        assert ex04_3.check_survivors(function, 3, *SEEDS[tests], edges=edges) == 0
        (said,) = reasons(capsys.readouterr().out)
        assert words in said


def test_plain_numbers_lie_in_both_octaves_at_each_border() -> None:
    for case in make_gradients(7, 12, edges=False):
        sizes = [abs(value) for value in case.values]
        for border in (
            case.form.smallest_subnormal / 2,
            case.form.smallest_normal,
            2.0 ** (case.form.max_exponent + 1),
        ):
            assert any(border / 2 < x < border for x in sizes) and any(border < x < 4 * border for x in sizes)


@pytest.mark.parametrize(
    "style",
    [
        lambda fates: np.array(fates),
        lambda fates: map(str, fates),
        lambda fates: (fate for fate in fates),
        lambda fates: dict(enumerate(fates)).values(),
        lambda fates: [np.where(True, fate, "") for fate in fates],
        lambda fates: np.array([[fate] for fate in fates]),
    ],
)
def test_any_iterable_of_fates_is_a_list_of_them(style, capsys) -> None:
    assert ex04_3.check_survivors(lambda v, e, m: style(by_limits(v, e, m)), 2, 1, 3) == 2
    assert ex04_3.check_survivors(lambda v, e, m: style([*by_limits(v, e, m), "zero"]), 2, 1, 1) == 0
    assert "numbers, not more of them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda fates: "".join(fates), "not a str"),
        (lambda fates: set(fates), "not a set"),
        (lambda fates: dict.fromkeys(fates), "not a dict"),
        (lambda fates: itertools.repeat("zero"), "not more of them"),
        (lambda fates: (1 / 0 for _ in fates), "ZeroDivisionError"),
        (lambda fates: np.array([fates]), "not a ndarray"),
        (lambda fates: [[fate] for fate in fates], "becomes"),
    ],
)
def test_what_is_no_list_of_fates_is_named(answer, words: str, capsys) -> None:
    assert ex04_3.check_survivors(lambda v, e, m: answer(by_limits(v, e, m)), 2, 1, 1) == 0
    assert words in capsys.readouterr().out


def test_the_right_fate_of_the_first_wrong_number_is_printed(capsys) -> None:
    ex04_3.check_survivors(lambda values, e, m: ["zero"] * len(values), 3, 1, 1, edges=True)
    first = next(pair for pair in zip(*_values_and_fates(1), strict=True) if pair[1] != "zero")
    assert f"{first[0]:.6g} becomes {first[1]!r}, not 'zero'" in capsys.readouterr().out


def _values_and_fates(seed: int) -> tuple[tuple[float, ...], list[str]]:
    case = make_gradients(seed, 1, True)[0]
    return case.values, case.fates


@pytest.mark.parametrize(
    "check",
    [
        lambda function: ex04_3.check_survivors(function, 2, 1, 6),
        lambda function: ex04_3.check_choices(function, "easy", 3, 1, 6),
    ],
)
def test_no_call_follows_one_that_took_too_long_and_none_of_the_rest_counts(check, capsys) -> None:
    calls = []

    def slow(*args):
        calls.append(args)
        raise TimeoutError("took longer than 5 s")

    assert check(slow) == 0 and len(calls) == 1
    assert re.search(r"\b0 of 6 (formats|pairs)", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("check", "broken", "words"),
    [
        (grade_facts, lambda e, m, i: None, "return a dict with the keys"),
        (grade_facts, lambda e, m, i: {"max": "large"}, "'large' is text"),
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


def test_cases_are_what_their_groups_say_and_differ_by_seed() -> None:
    for group in GROUPS:
        pairs = make_choices(group, 7, 4)
        for number, (one, other) in enumerate(pairs):
            assert group in (one.kind(), other.kind()) and one.answer() != other.answer()
            assert one.formats == other.formats and one.max_lost == other.max_lost
            changed = {name for name in one.towers if one.towers[name] != other.towers[name]}
            assert (changed, abs(one.headroom - other.headroom)) == (({"projector"}, 0) if number % 2 else (set(), 1))
        assert pairs == make_choices.__wrapped__(group, 7, 4) != make_choices(group, 9, 4)
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


def test_the_answer_of_part_d_keeps_to_its_own_limit_and_the_task_says_what_headroom_is() -> None:
    cells = read_cells("solutions", EXERCISE)
    stated = re.search(r"In (\d+) to (\d+) words", cells["ex04_3_d_task"].source)
    assert stated is not None
    least, most = map(int, stated.groups())
    answer = cells["ex04_3_d"].source.split("**Rubric")[0].removeprefix("**An answer.**")
    assert least <= len(answer.split()) <= most
    assert "`headroom` is the room left free" in cells["ex04_3_c_task"].source


@pytest.mark.notebook
def test_the_blank_release_prints_one_line_a_cell_and_gives_no_points() -> None:
    for name, (printed, result) in run_blank(EXERCISE).items():
        assert "is not solved yet" in printed and len(printed.splitlines()) <= 2, name
        assert float(result) == 0
