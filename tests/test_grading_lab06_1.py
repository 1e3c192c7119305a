"""Lab 6.1: parts have points of their own; right answers in any style lose nothing, wrong ones are named."""

from __future__ import annotations

import re
from typing import Any

import pytest
from lab06_1_answers import RIGHT, WRONG, change
from lab_cells import hidden_seeds, read_cells, reference, run_blank, stated_points

from vlmcourse.grading import lab06_1
from vlmcourse.grading.utilisation_cases import FLAGS, StepCase, make_steps, right_utilisation

EXERCISE, CELL, POINTS = "lab06_1", "lab06_1_utilisation_test", 4


def read_cases() -> dict[str, tuple[int, int]]:
    """Return seed and number of cases as the visible and the hidden tests have them."""
    found = re.findall(r"^seed, num_cases = (\d+), (\d+)$", read_cells("solutions", EXERCISE)[CELL].source, re.M)
    visible, hidden = ((int(seed), int(count)) for seed, count in found)
    return {"visible": visible, "hidden": hidden}


CASES = read_cases()


@pytest.mark.parametrize("function", [*RIGHT, "reference"], ids=lambda one: getattr(one, "__name__", one))
def test_a_right_answer_in_any_style_gets_all_points(function: Any, capsys: Any) -> None:
    function = reference(EXERCISE, "lab06_1_utilisation")["utilisation"] if function == "reference" else function
    for seed, num_cases in CASES.values():
        assert lab06_1.check_utilisation(function, POINTS, seed, num_cases) == POINTS
        said = capsys.readouterr()
        assert said.out == f"utilisation: {', '.join(f'{part} {num_cases} of {num_cases}' for part in FLAGS)}\n"
        assert said.err == ""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_loses_points_and_is_told_its_mistake(name: str, capsys: Any) -> None:
    function, words, most = WRONG[name]
    for seed, num_cases in CASES.values():
        points = lab06_1.check_utilisation(function, POINTS, seed, num_cases)
        said = capsys.readouterr()
        assert points <= most and words in said.out and said.err == "", (points, said.out)
        others = [text for other, (_, text, _) in WRONG.items() if other != name and text in said.out]
        assert not others or name.startswith("two mistakes"), others


def test_a_mistake_in_one_part_costs_that_part_only(capsys: Any) -> None:
    seed, num_cases = CASES["hidden"]
    for name, kept in {"6 N": (1, 1 / 2), "MFU with recomputation": (2, 0.75), "no peak is 0": (2, 1.5)}.items():
        points = lab06_1.check_utilisation(WRONG[name][0], POINTS, seed, num_cases)
        assert points >= sum(kept), (name, points)
    assert "trained 4 of 4, frozen 4 of 4, recomputed 4 of 4, no peak 0 of 4" in capsys.readouterr().out
    assert sum(lab06_1.SHARES.values()) == POINTS and lab06_1.SHARES.keys() == FLAGS.keys()


def test_numbers_that_follow_no_rule_prove_no_mistake(capsys: Any) -> None:
    right = change()

    def mostly(towers: Any, *others: Any) -> Any:
        mfu, hfu = right(towers, *others)
        return (mfu, hfu) if mfu is None or len(towers) == 2 else (1.3 * mfu, 0.8 * hfu)

    assert lab06_1.check_utilisation(mostly, POINTS, *CASES["hidden"]) < POINTS
    assert "looks as if" not in capsys.readouterr().out


def test_right_values_are_those_worked_out_by_hand() -> None:
    def of(*towers: Any, step_s: float, num_devices: int, peak: float | None) -> Any:
        case = StepCase(towers=towers, step_s=step_s, num_devices=num_devices, peak_flop_per_s=peak)
        return right_utilisation(case)

    # 4 + 18, and 6 again, of 0.5 x 4 x 50 = 100
    two = of((4e12, False, False), (6e12, True, True), step_s=0.5, num_devices=4, peak=50e12)
    assert two == pytest.approx((0.22, 0.28))
    assert "`(0.22, 0.28)`" in read_cells("solutions", EXERCISE)["lab06_1_rules"].source
    # 3 frozen at the front, 1 x 3 trained, 9 x 2 frozen behind it and 9 again: 24 and 33 of 2 x 0.8 x 80 = 128
    three = ((3e12, False, True), (1e12, True, False), (9e12, False, True))
    assert of(*three, step_s=0.8, num_devices=2, peak=80e12) == pytest.approx((24 / 128, 33 / 128))
    assert of(*three, step_s=0.8, num_devices=2, peak=None) == (None, None)


def test_cases_hold_what_the_lab_asks_and_differ_by_seed() -> None:
    for seed in range(10):
        for part in FLAGS:
            cases = make_steps(part, seed, 4)
            assert str(cases) == str(make_steps(part, seed, 4)) and str(cases) != str(make_steps(part, seed + 1, 4))
            numbers = [number for case in cases for number in right_utilisation(case) if number is not None]
            assert all(0.05 < number < 1 for number in numbers) and bool(numbers) == (part != "no peak")


def test_errors_blank_answers_and_other_signatures_earn_nothing_and_say_why(capsys: Any) -> None:
    def blank(*_: Any) -> Any:
        raise NotImplementedError

    def asks(towers: Any, step_s: float, num_devices: int, peak: float | None) -> Any:
        case = StepCase(towers=tuple(towers), step_s=step_s, num_devices=num_devices, peak_flop_per_s=peak)
        return right_utilisation(case)

    def eats(towers: Any, *others: Any) -> Any:
        found = change()(towers, *others)
        towers.clear()
        return found

    said = {}
    for function in (blank, None, lambda towers: (0.5, 0.5), asks, lambda *_: (0.4, 0.5), lambda *_: "no"):
        assert lab06_1.check_utilisation(function, POINTS, 1, 2) == 0
        said[function] = capsys.readouterr()
    words = ("utilisation is not solved yet", "not a function", "must take (towers", "holds the answer")
    assert all(text in found.out and not found.err for text, found in zip(words, said.values(), strict=False))
    assert lab06_1.check_utilisation(eats, POINTS, 1, 2) == POINTS


# --- The notebook ---------------------------------------------------------------------------------------------------


def test_the_notebook_asks_what_is_tested_here() -> None:
    assert stated_points(EXERCISE) == {CELL: POINTS}
    words = " ".join(read_cells("solutions", EXERCISE)["lab06_1_rules"].source.split())
    for part, share in lab06_1.SHARES.items():
        assert f"{share:g} point" in words.split(f"**{part}**")[1].split(",")[0].split(";")[0], part
    released = "\n".join(cell.source for cell in read_cells("chapters", EXERCISE).values())
    (line,) = hidden_seeds(EXERCISE)
    assert re.findall(r"\d+", line)[0] not in released and "HIDDEN" not in released and "is_reached" not in released


@pytest.mark.notebook
def test_the_blank_release_prints_that_nothing_is_solved_and_gives_no_points() -> None:
    assert run_blank(EXERCISE) == {CELL: ("utilisation is not solved yet", "0.0")}
