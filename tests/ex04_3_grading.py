"""How the tests of exercise 4.3 ask its checks: with seeds and numbers of cases like those of the notebook."""

from __future__ import annotations

from vlmcourse.grading import ex04_3

SEEDS = {"visible": (1, 6), "hidden": (530417, 12)}
"""Seed and number of cases, by kind of test."""


def grade_choice(function, tests: str = "hidden") -> float:
    seed, number = SEEDS[tests]
    return sum(ex04_3.check_choices(function, level, 3, seed, number) for level in ex04_3.LEVELS)


def reasons(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("It looks as if")]
