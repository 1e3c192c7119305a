"""Exercise 4.6: scaling of many clusters; right answers in any style lose nothing, wrong ones are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
from ex04_6_answers import PARTS, RIGHT, WRONG, plain
from lab_cells import hidden_seeds, read_cells, reference, run_blank, stated_points

from vlmcourse.grading import ex04_6
from vlmcourse.grading import scaling_fits as fits
from vlmcourse.grading.scaling_cases import (
    MAX_APART,
    MIN_APART,
    TEAM_FIXES,
    TEAM_SPEED,
    FixCase,
    make_fix_cases,
    make_serial_cases,
    make_split_cases,
    make_team,
)
from vlmcourse.planner.scaling import find_serial_fraction

CHECKS: dict[str, Callable[..., float]] = {
    "speedup": ex04_6.check_speedup,
    "serial": ex04_6.check_serial,
    "split": ex04_6.check_split,
    "fixes": ex04_6.check_fixes,
    "together": ex04_6.check_together,
}
POINTS = {"speedup": 2, "serial": 4, "split": 5, "fixes": 4, "together": 2}
CASES = {1: 4, 715204: 12}
"""By seed: number of cases of each part, as the visible and the hidden tests have them."""
MOST = {
    "any kind will do": 0.95,
    "all input": 0.85,
    "weak split of one part": 0.85,
    "forward and backward only": 0.86,
    "costs overlooked": 0.9,
}
"""Share of a part's points that an answer with a slip in a corner may keep; others keep less."""


def grade(part: str, answer: dict[str, Any], seed: int) -> float:
    return CHECKS[part](answer[part], POINTS[part], seed, CASES[seed])


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_a_right_answer_in_any_style_gets_all_points_and_no_word(make: Any, capsys: Any) -> None:
    for seed in CASES:
        assert {part: grade(part, make(), seed) for part in PARTS} == POINTS
    assert capsys.readouterr() == ("", "")


def test_a_right_answer_gets_all_points_from_many_seeds() -> None:
    for seed in range(20):
        for make in RIGHT:
            assert ex04_6.check_serial(make()["serial"], 4, seed, 8) == 4, (seed, make.__name__)
            assert ex04_6.check_together(make()["together"], 2, seed, 4) == 2, (seed, make.__name__)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_loses_points_where_it_is_wrong_and_is_told_its_mistake(name: str, capsys: Any) -> None:
    answer, words = WRONG[name]
    for seed in CASES:
        for part, said in words.items():
            points = grade(part, answer, seed)
            out, err = capsys.readouterr()
            assert points <= MOST.get(name, 0.8) * POINTS[part], (points, out)
            assert said in out and not err, out


def test_constant_answers_earn_under_a_third(capsys: Any) -> None:
    constants: dict[str, Any] = {
        "speedup": lambda *_: (5.2, 0.65),
        "serial": lambda *_: 0.1,
        "split": lambda *_: make_team().shares,
        "fixes": lambda *_: [(name, 1.05) for name in TEAM_FIXES],
        "together": lambda *_: 1.35,
    }
    for part in PARTS:
        points = grade(part, constants, 715204)
        assert points < POINTS[part] / 3, (part, capsys.readouterr().out)


def test_the_teams_numbers_are_those_worked_out_by_hand() -> None:
    assert TEAM_SPEED.right("strong") == pytest.approx((5.2, 0.65))
    assert round(find_serial_fraction(5.2, 8), 3) == 0.077
    team = make_team()
    assert sum(team.alone.values()) == pytest.approx(TEAM_SPEED.alone_s)
    assert all(sum(rank.values()) == pytest.approx(TEAM_SPEED.step_s) for rank in team.by_rank)
    # seconds of 8 ranks, 6.4 in all, 4.16 of them useful
    wanted = {"communication": 1.08, "imbalance": 0.64, "input": 0.08, "serial": 0.28, "computing": 0.16}
    assert {name: 6.4 * share for name, share in team.shares.items()} == pytest.approx(wanted)
    assert sum(team.shares.values()) == pytest.approx(0.35)
    case = FixCase(split=team.shares, fixes=TEAM_FIXES)
    saved = 0.6 * 1.08 / 6.4
    assert case.gain("overlap the all-reduce with backward") == pytest.approx(1 / (1 - saved))
    left = 0.4 * 0.55 * 1.05
    together_s = 6.4 - 1.08 * (1 - left) - 0.8 * 0.64 - 0.9 * 0.08 - 0.875 * 0.28
    assert case.together == pytest.approx(6.4 / together_s)


def test_cases_differ_by_seed_and_no_part_is_near_zero() -> None:
    for make in (make_serial_cases, make_split_cases, make_fix_cases):
        assert str(make(1, 6)) == str(make(1, 6)) and make(1, 6)[1:] != make(2, 6)[1:]
    for seed in range(10):
        assert all(min(case.shares.values()) > 0.008 for case in make_split_cases(seed, 8))
        assert all(0 < sum(case.shares.values()) < 1 for case in make_split_cases(seed, 8))
        assert all((1 in case.ranks) == (number % 2 == 0) for number, case in enumerate(make_serial_cases(seed, 6)))


def test_each_part_of_a_split_has_its_own_points(capsys: Any) -> None:
    for part in plain()["split"](make_team().alone, make_team().by_rank):

        def spoilt(alone: Any, by_rank: Any, part: str = part) -> dict[str, float]:
            return (found := plain()["split"](alone, by_rank)) | {part: found[part] * 1.5 + 0.01}

        assert ex04_6.check_split(spoilt, 5, 1, 4) == 4
        out = capsys.readouterr().out
        assert f"not right are {part}" in out and "your parts add up to" in out


def test_what_counts_as_right_for_a_fraction_lies_between_other_fits_of_the_right_errors_and_of_wrong_ones() -> None:
    """So that luck gives and takes no points; wrong are errors in seconds, in N times a step and in speed-ups."""
    assert MAX_APART < ex04_6.FRACTION_TOLERANCE < MIN_APART
    for case in (case for seed in range(5) for case in make_serial_cases(seed, 8)):

        def distance(found: tuple[float, float], right: float = case.fraction) -> float:
            return abs(found[0] / sum(found) / right - 1)

        seen = case.ranks, case.step_s
        assert distance(fits.fit_relative(*seen)) < 1e-6
        wrong = (fits.fit_weighted(*seen, [1] * 6), fits.fit_weighted(*seen, case.ranks), fits.fit_speeds(*seen))
        assert min(map(distance, wrong)) > MIN_APART
        assert max(map(distance, (fits.fit_logarithms(*seen), fits.fit_relative_to_law(*seen)))) < MAX_APART


def test_in_all_splits_but_the_teams_a_late_loader_is_imbalance_too() -> None:
    for case in make_split_cases(1, 12)[1:]:
        computing = [rank["forward_s"] + rank["backward_s"] for rank in case.by_rank]
        total = sum(sum(rank.values()) for rank in case.by_rank)
        gap = (len(computing) * max(computing) - sum(computing)) / total
        assert abs(gap - case.shares["imbalance"]) > ex04_6.SHARE_TOLERANCE, case


def test_some_wrong_answers_prove_no_mistake(capsys: Any) -> None:
    def mostly(ranks: list[int], step_s: list[float]) -> float:
        return plain()["serial"](ranks, step_s) * (1.3 if ranks[0] == 1 else 1.7)

    assert ex04_6.check_serial(mostly, 4, 715204, 12) == 0
    assert "looks as if" not in capsys.readouterr().out


def test_a_learner_may_change_what_it_is_given() -> None:
    def eats(split: dict[str, float], fixes: dict[str, dict[str, float]]) -> Any:
        found = plain()["fixes"](split, fixes)
        split.clear()
        fixes.clear()
        return found

    assert ex04_6.check_fixes(eats, 4, 1, 4) == 4


def test_a_blank_answer_or_another_signature_earns_nothing_and_says_why(capsys: Any) -> None:
    def blank(*_: Any) -> Any:
        raise NotImplementedError

    for check in CHECKS.values():
        assert check(blank, 2, 1) == 0
    assert ex04_6.check_serial(lambda ranks: 0.1, 4, 1) == 0
    assert ex04_6.check_split(None, 5, 1) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ("speedup_and_efficiency", "fit_serial_fraction", "split_loss", "rank_fixes", "gain_together")
    assert lines[:5] == [f"{name} is not solved yet" for name in names]
    assert lines[5].startswith("your function must take (ranks, step_s)") and "not a function but NoneType" in lines[6]


# --- The notebook ---------------------------------------------------------------------------------------------------

EXERCISE = "ex04_6"
FUNCTIONS = ("speedup_and_efficiency", "fit_serial_fraction", "split_loss", "rank_fixes", "gain_together")


def test_the_notebook_asks_what_is_tested_here() -> None:
    assert stated_points(EXERCISE) == {f"ex04_6_{part}_test": points for part, points in POINTS.items()} | {
        "ex04_6_words": 3
    }
    released = "\n".join(cell.source for cell in read_cells("chapters", EXERCISE).values())
    seeds = [re.findall(r"\d+", line)[0] for line in hidden_seeds(EXERCISE)]
    assert len(seeds) == 5 and not any(seed in released for seed in seeds)
    assert "HIDDEN" not in released and "**An answer.**" not in released and "longest =" not in released


def test_the_reference_answers_of_the_notebook_earn_all_points() -> None:
    space = reference(EXERCISE, "ex04_6_team", *(f"ex04_6_{part}" for part in PARTS))
    functions = {part: space[name] for part, name in zip(PARTS, FUNCTIONS, strict=True)}
    for seed in CASES:
        assert {part: grade(part, functions, seed) for part in PARTS} == POINTS
    team = make_team()
    assert space["team_alone"] == team.alone
    for shown, graded in zip(cast(list[dict[str, float]], space["team_by_rank"]), team.by_rank, strict=True):
        assert shown == pytest.approx(graded)


def test_the_answer_in_words_keeps_to_its_own_limit() -> None:
    cells = read_cells("solutions", EXERCISE)
    stated = re.search(r"In (\d+) to (\d+) words", cells["ex04_6_words_task"].source)
    assert stated is not None
    answer = cells["ex04_6_words"].source.split("**Rubric")[0].removeprefix("**An answer.**")
    assert int(stated[1]) <= len(answer.split()) <= int(stated[2])


@pytest.mark.notebook
def test_the_blank_release_prints_that_nothing_is_solved_and_gives_no_points() -> None:
    found = run_blank(EXERCISE)
    assert len(found) == 5
    for name, (printed, result) in found.items():
        assert "is not solved yet" in printed and float(result) == 0, name
