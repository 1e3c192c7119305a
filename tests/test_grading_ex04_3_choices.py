"""Exercise 4.3, part c: right choices of any style lose nothing, wrong ones are named by the rule that they break."""

from __future__ import annotations

import pytest
from ex04_3_choices import (
    CHOICE_GUESSES,
    CHOICE_RIGHT,
    CHOICE_WRONG,
    all_in_one,
    less_than_max_lost,
    no_headroom,
    search,
)
from ex04_3_grading import SEEDS, grade_choice, reasons

from vlmcourse.grading import choice_feedback, ex04_3
from vlmcourse.grading.choice_cases import Choice, make_choices
from vlmcourse.grading.choice_feedback import CHOICE_MISTAKES
from vlmcourse.monitor.exponents import Exponents
from vlmcourse.planner.formats import FORMATS

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize("function", CHOICE_RIGHT)
def test_right_choices_in_any_style_get_full_points(function, tests: str, capsys) -> None:
    assert grade_choice(function, tests) == 6
    assert "looks as if" not in capsys.readouterr().out


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize(("function", "words"), CHOICE_WRONG, ids=[case[0].__name__ for case in CHOICE_WRONG])
def test_wrong_choices_get_their_own_mistake_named_and_no_other(function, words, tests: str, capsys) -> None:
    assert grade_choice(function, tests) < 5
    said = reasons(capsys.readouterr().out)
    own, *_ = allowed = words.split("|")
    assert all(any(part in line for part in allowed) for line in said), said
    assert any(own in line for line in said), said


def test_less_for_at_most_is_named_where_it_matters(capsys) -> None:
    assert 5 < grade_choice(less_than_max_lost) < 6
    said = reasons(capsys.readouterr().out)
    assert said and all("exactly that much is allowed too" in line for line in said), said


CASE = Choice(
    towers={"vision": {-30: 5, -20: 95}, "language": {-10: 100}},
    formats=[("bf16", 8, 7), ("fp16", 5, 10)],
    max_lost=0.0,
    headroom=2,
)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (("fp16", -8), "power is 0 or larger"),
        (("fp16", 24), "e + power + headroom = -10 + 24 + 2 = 16 of language is above the bias, 15"),
        (("fp16", 4), "vision loses the fraction 0.05 of its gradients, more than max_lost"),
        (("fp16", 6), "it works, but so does a smaller power"),
        (("bf16", 0), "it works, but so does fp16, which has more mantissa bits"),
        (("fp8", 0), "no format of the case has that name"),
        (None, "fp16 works with some power"),
        (("fp16", 5), ""),
    ],
)
def test_a_wrong_choice_is_told_the_first_rule_that_it_breaks(answer, words: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ex04_3, "make_choices", lambda *_: ((CASE, CASE),))
    ex04_3.check_choices(lambda towers, formats, max_lost, headroom: answer, "easy", 3, 1, 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "headroom 2: not" in line]
    assert len(lines) == (3 if words else 0)
    assert all(line.endswith(f"headroom 2: not {answer}: {words}") for line in lines), lines


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize("function", CHOICE_GUESSES)
def test_an_answer_that_looks_at_no_gradient_earns_nothing(function, tests: str) -> None:
    assert grade_choice(function, tests) == 0


@pytest.mark.parametrize("tests", SEEDS)
@pytest.mark.parametrize("function", [no_headroom, all_in_one])
def test_headroom_and_each_tower_are_worth_half_of_the_points(function, tests: str) -> None:
    for level in ex04_3.LEVELS:
        assert ex04_3.check_choices(function, level, 3, *SEEDS[tests]) <= 1.5


def test_a_mistake_is_not_named_where_two_give_the_same_answers(monkeypatch, capsys) -> None:
    monkeypatch.setattr(choice_feedback, "CHOICE_MISTAKES", (*CHOICE_MISTAKES, ("another", {"headroom": False})))
    grade_choice(no_headroom)
    assert not reasons(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2"])
def test_what_is_lost_follows_part_b_and_the_microscope(name: str) -> None:
    form = FORMATS[name]
    for exponent in range(form.min_exponent - form.mantissa_bits - 4, form.min_exponent):
        case = Choice(
            towers={"only": {exponent: 1}},
            formats=[(name, form.exponent_bits, form.mantissa_bits)],
            max_lost=0.0,
            headroom=0,
        )
        kept = Exponents({exponent: 1}).fates(form)["zero"] == 0
        assert kept == (form.fate(1.2 * 2.0**exponent) != "zero") == (case.answer() == (name, 0))


def test_changing_the_arguments_changes_nothing() -> None:
    def greedy(towers, formats, max_lost, headroom):
        answer = search(towers, formats, max_lost, headroom)
        towers.clear()
        formats.clear()
        return answer

    assert grade_choice(greedy) == 6


@pytest.mark.parametrize("tests", SEEDS)
def test_wide_formats_need_a_scale_at_times_and_bf16_is_not_always_enough(tests: str) -> None:
    wide = [case for pair in make_choices("wide", *SEEDS[tests]) for case in pair if case.kind() == "wide"]
    answers = [answer for case in wide if (answer := case.answer()) is not None]
    assert len(answers) == len(wide) and len({name for name, _ in answers}) > 1
    assert {bool(power) for _, power in answers} == {True, False}
    for pair in make_choices("wide", *SEEDS[tests])[::3]:
        assert any(case.kind() == "wide" and (case.answer() or ("", 0))[1] for case in pair)
    nothing = [case for pair in make_choices("impossible", *SEEDS[tests]) for case in pair if case.answer() is None]
    assert {any(name == "bf16" for name, *_ in case.formats) for case in nothing} == {True, False}
