"""Exercise 4.4: bytes by owner over many models; right answers in any style lose nothing, wrong ones are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from ex04_4_answers import PARTS, RIGHT, WRONG, plain
from lab_cells import hidden_seeds, read_cells, reference, run_blank, stated_points

from vlmcourse.grading import ex04_4, memory_cases
from vlmcourse.grading.memory_cases import STAGES, STATE_OWNERS, TEAM, Strategy, report_gib, state_bytes
from vlmcourse.grading.memory_mistakes import WRONG_BYTES, explain_stages, explain_state, split_choices
from vlmcourse.planner.recipes import PRECISIONS

CHECKS: dict[str, Callable[..., float]] = {
    "weights": ex04_4.check_weights,
    "gradients": ex04_4.check_gradients,
    "optimizer": ex04_4.check_optimizer,
    "activations": ex04_4.check_activations,
    "report": ex04_4.check_report,
}
POINTS = {"weights": 2, "gradients": 2, "optimizer": 3, "activations": 3, "report": 5}
CASES = {1: {"report": 3} | dict.fromkeys(PARTS[:4], 4), 531977: {"report": 8} | dict.fromkeys(PARTS[:4], 12)}
"""By seed: number of cases of each part, as the visible and the hidden tests have them."""
MOST = {
    "three copies in fp32": 0.85,
    "master weights in fp32 too": 0.85,
    "no refusals": 0.95,
    "total without activations": 0.85,
    "total in GB": 0.85,
    "no total": 0.85,
    "gradients split in stage 1": 0.9,
}
"""Share of a part's points that an answer with a slip in a corner may keep; others keep less."""


def grade(part: str, answer: dict[str, Any], seed: int) -> float:
    return CHECKS[part](answer[part], POINTS[part], seed, CASES[seed][part])


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_a_right_answer_in_any_style_gets_all_points_and_no_word(make: Any, capsys: Any) -> None:
    for seed in CASES:
        assert {part: grade(part, make(), seed) for part in PARTS} == POINTS
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_loses_points_where_it_is_wrong_and_is_told_its_mistake(name: str, capsys: Any) -> None:
    answer, words = WRONG[name]
    for seed in CASES:
        for part, said in words.items():
            points = grade(part, answer, seed)
            out, err = capsys.readouterr()
            most = MOST.get(name, 0.85 if part == "report" else 0.8)  # an owner's slip leaves the total's points
            assert points <= most * POINTS[part], out
            assert said in out and not err, out


def test_any_other_part_of_a_wrong_answer_is_right_or_its_mistake_is_named(capsys: Any) -> None:
    for name, (answer, words) in WRONG.items():
        for part in set(PARTS) - set(words) - {"report"}:
            points, out = grade(part, answer, 531977), capsys.readouterr().out
            assert points == POINTS[part] or "looks as if" in out, (name, part, out)


def test_each_owner_of_a_report_has_its_own_points(capsys: Any) -> None:
    halves = {owner: plain()["report"] for owner in (*memory_cases.OWNERS, "total")}
    for owner, report in halves.items():

        def spoilt(*arguments: Any, owner: str = owner, report: Any = report) -> dict[str, float]:
            return (found := report(*arguments)) | {owner: found[owner] * 1.5}

        assert ex04_4.check_report(spoilt, 5, 1, 4) == 4.2  # four cases of five, and the refusal
        assert f"not right are {owner}" in capsys.readouterr().out


def test_a_total_is_right_that_adds_up_wrong_owners(capsys: Any) -> None:
    for name in ("one Adam moment", "no pixel shuffle"):
        points, said = ex04_4.check_report(WRONG[name][0]["report"], 5, 1, 4), capsys.readouterr().out
        assert points == pytest.approx(5 * (4 * 4 / 5 + 1) / 5) and "total" not in said, said
    zeros = dict.fromkeys((*memory_cases.OWNERS, "total"), 0.0)
    assert ex04_4.check_report(lambda *_: zeros, 5, 1, 4) == 0


@pytest.mark.parametrize("given", ["nothing", "a text"])
def test_an_owner_that_a_report_lacks_takes_its_own_points_alone_and_the_others_are_told(
    given: str, capsys: Any
) -> None:
    def short(*arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = plain()["report"](*arguments)
        del found["total"]
        return found | {"gradients": found["gradients"] * 2} | ({"total": "1 GiB"} if given == "a text" else {})

    assert ex04_4.check_report(short, 5, 1, 4) == pytest.approx(5 * (4 * 3 / 5 + 1) / 5)
    said = capsys.readouterr().out
    assert ("total is '1 GiB' and must be a number of GiB" if given == "a text" else "the report has no total;") in said
    assert "; not right are gradients" in said and "gradients: it looks as if you counted gradients twice" in said


def test_the_teams_numbers_are_those_worked_out_by_hand() -> None:
    ddp, zero_2, zero_3 = (report_gib(TEAM, strategy) for strategy in TEAM.strategies)
    assert sum(ddp[owner] for owner in STATE_OWNERS) * 2**30 == pytest.approx(26e9 * 16)
    assert sum(zero_2[owner] for owner in STATE_OWNERS) * 2**30 == pytest.approx(26e9 * (2 + 14 / 8))
    assert sum(zero_3[owner] for owner in STATE_OWNERS) * 2**30 == pytest.approx(26e9 * 16 / 8)
    kept = 34 * 2 * (2048 * 6144 * 48 + 4 * 1024 * 3200 * 45)
    assert zero_3["activations"] * 2**30 == zero_2["activations"] * 2**30 == pytest.approx(kept)
    assert ddp["activations"] == pytest.approx(2 * kept / 2**30)


def test_three_quarters_of_the_answers_prove_no_mistake(capsys: Any) -> None:
    def mostly_one_moment(num_params: int, num_ranks: int, stage: int, precision: str) -> float:
        size = 8 if precision == "fp32" else 8 + (precision == "bf16_mixed") * 3.1
        return size * num_params / (num_ranks if stage else 1)

    assert ex04_4.check_optimizer(mostly_one_moment, 3, 531977, 12) < 1
    assert "looks as if" not in capsys.readouterr().out


def test_known_mistakes_differ_from_what_is_right_and_from_each_other() -> None:
    for owner in STATE_OWNERS:
        first, *others = split_choices(owner)
        assert first[0] == "" and all(sentence for sentence, _ in others)
        assert len({sentence for sentence, _ in others}) == len(others) == 15
        numbers = [tuple(count(recipe) for recipe in PRECISIONS.values()) for _, count in WRONG_BYTES[owner]]
        assert len(set(numbers)) == len(numbers), owner
    for seed in CASES:
        cases = memory_cases.make_state_cases(seed, 4)
        assert {case.precision for case in cases} == set(memory_cases.PRECISION_NAMES)
        right = [
            (
                (case, stage),
                float(state_bytes("optimizer", case.num_params, case.num_ranks, Strategy(stage, case.precision))),
            )
            for case in cases
            for stage in STAGES
        ]
        assert explain_state("optimizer", right) == []
    assert explain_stages("weights", {3}) == ""


def test_a_blank_answer_or_another_signature_earns_nothing_and_says_why(capsys: Any) -> None:
    def weight_bytes(num_params: int, num_ranks: int, stage: int, precision: str) -> float:
        raise NotImplementedError

    assert ex04_4.check_weights(weight_bytes, 2, 1) == 0
    assert ex04_4.check_report(lambda vision, language: {}, 5, 1) == 0
    assert ex04_4.check_activations(None, 3, 1) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first == "weight_bytes is not solved yet"
    assert second.startswith("your function must take (vision, language, batch")
    assert "not a function but NoneType" in rest[0]


# --- The notebook ---------------------------------------------------------------------------------------------------

EXERCISE = "ex04_4"


def test_the_notebook_asks_what_is_tested_here() -> None:
    assert stated_points(EXERCISE) == {f"ex04_4_{part}_test": points for part, points in POINTS.items()} | {
        "ex04_4_words": 3
    }
    released = "\n".join(cell.source for cell in read_cells("chapters", EXERCISE).values())
    seeds = [re.findall(r"\d+", line)[0] for line in hidden_seeds(EXERCISE)]
    assert len(seeds) == 5 and not any(seed in released for seed in seeds)
    assert "HIDDEN" not in released and "**An answer.**" not in released and "per_position" not in released
    assert read_cells("chapters", EXERCISE).keys() == read_cells("solutions", EXERCISE).keys()


def test_the_reference_answers_of_the_notebook_earn_all_points() -> None:
    space = reference(EXERCISE, *(f"ex04_4_{part}" for part in PARTS))
    functions = {part: space["memory_report" if part == "report" else f"{_function(part)}_bytes"] for part in PARTS}
    for seed in CASES:
        assert {part: grade(part, functions, seed) for part in PARTS} == POINTS


def _function(part: str) -> str:
    return {"weights": "weight", "gradients": "gradient", "activations": "activation"}.get(part, part)


def test_the_answer_in_words_keeps_to_its_own_limit() -> None:
    cells = read_cells("solutions", EXERCISE)
    stated = re.search(r"In (\d+) to (\d+) words", cells["ex04_4_words_task"].source)
    assert stated is not None
    answer = cells["ex04_4_words"].source.split("**Rubric")[0].removeprefix("**An answer.**")
    assert int(stated[1]) <= len(answer.split()) <= int(stated[2])


@pytest.mark.notebook
def test_the_blank_release_prints_that_nothing_is_solved_and_gives_no_points() -> None:
    found = run_blank(EXERCISE)
    assert len(found) == 5
    for name, (printed, result) in found.items():
        assert "is not solved yet" in printed and float(result) == 0, name
