"""Equal values share one canonical text, unequal ones do not, and a learner's code cannot upset a check."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import re
import sys
import time
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from vlmcourse.grading import checks
from vlmcourse.grading.checks import as_number, award, call, canonical, describe, is_close, require
from vlmcourse.planner import Plan


@dataclasses.dataclass
class Point:
    x: float
    y: float


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (7, 7.0),
        (7, np.float32(7)),
        (7, torch.tensor(7)),
        (31406250000, 31406250000.000004),
        (0.1 + 0.2, 0.3),
        (1 / 3, Fraction(1, 3)),
        (2.5, torch.tensor(2.5)),
        (1.9999998, 2),
        (0.123455, 0.1234550000000001),  # a tie in the fifth digit, with and without a rounding error
        ((1, 2.0), [1.0, 2]),
        (range(3), [0, 1, 2]),
        ({"a": 1, "b": 2.0}, {"b": 2, "a": 1.0}),
        ({1, 2}, {2, 1}),
        (-0.0, 0),
        (Plan(dp_shard=4, zero_stage=3), Plan(zero_stage=3, dp_shard=4)),
        (torch.full((2, 3), 1 / 3), np.full((2, 3), 1 / 3)),
        (torch.full((2, 3), 1 / 3, requires_grad=True), torch.full((2, 3), 1 / 3, dtype=torch.float64)),
        (torch.arange(4), np.arange(4)),
        (iter([1, 2]), [1, 2]),
    ],
)
def test_equal_values_have_one_text(one, other):
    assert describe(one) == describe(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (7, 8),
        (1234567, 1234568),
        (0.12345, 0.12346),
        (1, True),
        (1, "1"),
        (0, None),
        (float("nan"), 0.0),
        (float("inf"), float("-inf")),
        ([1, 2], [2, 1]),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"a": 2}),
        (Point(1, 2), Point(2, 1)),
        (Plan(), Plan(tp=2)),
        ("a b", "a  b"),
        (b"a", "a"),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.01])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        (torch.ones(3), -torch.ones(3)),
        (torch.ones(3), torch.full((3,), float("nan"))),
    ],
)
def test_unequal_values_have_two_texts(one, other):
    assert describe(one) != describe(other)


def test_one_wrong_element_of_a_large_tensor_shows_and_float_noise_does_not():
    torch.manual_seed(0)
    tensor = torch.randn(40, 50)
    changed = tensor.clone()
    changed[3, 7] += 1.0
    noisy = tensor * (1 + 1e-7 * torch.randn(40, 50))
    assert describe(tensor) == describe(noisy) != describe(changed)


def test_text_survives_the_quotes_of_a_test_cell():
    awkward = 'a"b\'c\\d\ne""" {{x}} ü'
    text = describe({awkward: [awkward]})
    assert not re.search(r"[\"'\\\n]", text)
    assert text.isascii()


def test_random_expressions_are_evaluated_from_the_same_seed():
    expressions = (random.random, lambda: np.random.rand(2), lambda: torch.rand(2))
    for draw in expressions:
        first = canonical(draw)
        draw()
        assert canonical(draw) == first
        assert canonical(draw, seed=1) != first


@pytest.mark.filterwarnings("ignore:careful")
def test_what_an_expression_prints_is_dropped(capsys):
    def noisy():
        print("out")
        print("err", file=sys.stderr)
        warnings.warn("careful", stacklevel=1)
        return 1

    assert canonical(noisy) == "1"
    assert capsys.readouterr() == ("", "")


def test_require_shows_both_values_but_none_of_a_hash():
    require("a", "a", "same")
    with pytest.raises(AssertionError, match="f is not right: expected 4, got 5"):
        require("5", "4", "f is not right")
    with pytest.raises(AssertionError) as error:
        require("0" * 64, "f" * 64, "f is not right")
    assert str(error.value) == "f is not right"


def test_autotests_file_uses_the_canonical_text_for_every_type():
    settings = yaml.safe_load((Path(__file__).parents[1] / "autotests.yml").read_text())["python3"]
    assert settings["templates"]["default"][0]["test"] == "checks.canonical(lambda: {{snippet}})"
    assert "checks.require" in settings["check"] and "sha256" in settings["hash"]


# --- Calls ----------------------------------------------------------------------------------------------------------


def test_call_returns_what_a_function_returns():
    assert call(lambda a, b: a + b, 1, 2).value == 3


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda x: x, "TypeError"),
        (7, "this is not a function but int"),
        (None, "this is not a function but NoneType"),
        ("text", "this is not a function but str"),
    ],
)
def test_call_turns_every_error_into_one_line(function, words):
    outcome = call(function)
    assert words in outcome.error and "\n" not in outcome.error
    assert outcome.value is None and not outcome.unsolved


def test_call_knows_the_blank_function_of_a_release():
    def blank():
        raise NotImplementedError()

    assert call(blank).unsolved


def test_call_stops_an_endless_loop_even_if_it_catches_errors():
    def endless():
        while True:
            try:
                while True:
                    pass
            except ValueError:
                pass

    def stubborn():
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                time.sleep(30)
        return 1

    started = time.monotonic()
    outcome = call(endless, limit_s=0.2)
    assert outcome.timed_out and "longer than 0.2 s" in outcome.error
    assert call(stubborn, limit_s=0.2).value == 1
    assert time.monotonic() - started < 10


def test_a_learners_output_reaches_nobody(capfd):
    def loud():
        print("noise")
        print("noise", file=sys.stderr)
        return 1

    assert call(loud).value == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("value", [True, "3", None, [3], float("nan"), float("inf"), 3 + 0j, {}, torch.zeros(2)])
def test_what_is_no_finite_number_is_not_close_to_anything(value):
    assert as_number(value) is None
    assert not is_close(value, 3)


def test_numbers_of_any_kind_are_compared():
    assert all(is_close(value, 3) for value in (3, 3.0, np.float32(3), torch.tensor(3.0), Fraction(3), 3.0001))
    assert not is_close(3.01, 3)
    assert not is_close(10**400, 3)


def test_awarded_points_stay_between_zero_and_the_maximum():
    assert award(3, 2, 4) == 1.5
    assert award(3, 5, 4) == 3
    assert award(3, -1, 4) == 0
    assert all(isinstance(award(2, n, 7), float) and math.isfinite(award(2, n, 7)) for n in range(8))


def test_checks_import_no_heavy_library():
    code = "import sys, vlmcourse.grading.ex04_1; print('torch' in sys.modules or 'numpy' in sys.modules)"
    assert os.popen(f'"{sys.executable}" -c "{code}"').read().strip() == "False"


def test_seeding_skips_libraries_that_are_not_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(sys.modules, "numpy")
    assert checks.canonical(lambda: random.randrange(10**6)).isdigit()
