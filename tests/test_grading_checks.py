"""Equal values share one canonical text, unequal ones do not, and a learner's code cannot upset a check."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import math
import os
import random
import re
import sys
import time
import warnings
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
import yaml
from nbgrader.utils import determine_grade

from vlmcourse.grading import checks, steps
from vlmcourse.grading.checks import as_number, award, call, canonical, describe, is_close
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


# --- AUTOTEST cells -------------------------------------------------------------------------------------------------


def run_autotest_cell(tests: list[tuple[str, str]], names: dict[str, object]) -> tuple[float | None, str]:
    """Run a cell as nbgrader makes it of AUTOTEST lines; return its result and what it printed.

    Args:
        tests: expressions and the values expected of them; a value of "#..." is hashed.
        names: what the learner defined.
    """
    settings = yaml.safe_load((Path(__file__).parents[1] / "autotests.yml").read_text())["python3"]
    (template,) = settings["templates"]["default"]
    lines = [settings["setup"]]
    for expression, value in tests:
        test = template["test"].replace("{{snippet}}", expression)
        if value.startswith("#"):
            test = settings["hash"].replace("{{snippet}}", test).replace("{{salt}}", "salt")
            value = sha256(f"{value[1:]}salt".encode()).hexdigest()
        message = template["fail"].replace("{{snippet}}", expression)
        line = settings["check"].replace("{{snippet}}", test)
        lines.append(line.replace("{{value}}", value).replace("{{message}}", message))
    *body, last = ast.parse("\n".join([*lines, settings["success"]])).body
    assert isinstance(last, ast.Expr)  # so that a notebook shows its value
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body=body, type_ignores=[]), "cell", "exec"), names)
        result = eval(compile(ast.Expression(body=last.value), "cell", "eval"), names)
    return result, printed.getvalue()


def blank(*_):
    raise NotImplementedError()


def points_of(result: float | None, printed: str) -> float:
    """The points that nbgrader and our proof of points give for a cell worth 2."""
    cell = nbformat.v4.new_code_cell("tests", execution_count=1)
    cell.metadata["nbgrader"] = {"grade": True, "solution": False, "grade_id": "any", "points": 2}
    if printed:
        cell.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=printed))
    if result is not None:
        cell.outputs.append(nbformat.v4.new_output("execute_result", data={"text/plain": repr(result)}))
    score, _ = determine_grade(steps.RequireProof().preprocess_cell(cell, {}, 0)[0])
    assert score is not None
    return score


def test_right_answer_passes_an_autotest_cell():
    outcome = run_autotest_cell([("double(2)", "4"), ("double(3)", "#6")], {"double": lambda x: 2 * x})
    assert outcome == (None, "Success!\n")
    assert points_of(*outcome) == 2


def test_unsolved_part_is_named_once_stops_nothing_and_earns_nothing():
    outcome = run_autotest_cell([("blank(2)", "4"), ("blank(3)", "#6")], {"blank": blank})
    assert outcome == (0.0, "blank is not solved yet\n")
    assert points_of(*outcome) == 0


def test_part_that_is_unsolved_in_one_case_only_earns_nothing():
    def double(x):
        return 4 if x == 2 else blank()

    outcome = run_autotest_cell([("double(2)", "4"), ("double(3)", "#6"), ("double(2)", "4")], {"double": double})
    assert outcome == (0.0, "blank is not solved yet\n")  # the function that is blank, not the one that calls it
    assert points_of(*outcome) == 0


def test_unsolved_function_without_a_name_is_told_by_its_test():
    expression = "(_ for _ in ()).throw(NotImplementedError)"
    assert run_autotest_cell([(expression, "4")], {}) == (0.0, f"{expression} is not solved yet\n")


def test_wrong_answers_are_printed_one_line_each_and_earn_nothing():
    outcome = run_autotest_cell([("double(2)", "4"), ("double(3)", "#6"), ("double(0)", "0")], {"double": lambda x: x})
    assert outcome == (0.0, "double(2) is not right: expected 4, got 2\ndouble(3) is not right\n")
    assert points_of(*outcome) == 0


@pytest.mark.parametrize("error", [ValueError("no"), NotImplementedError("stage 3 is missing"), SystemExit(0)])
def test_error_in_a_learners_function_is_raised(error):
    def fail():
        raise error

    with pytest.raises(type(error)):
        run_autotest_cell([("fail()", "4")], {"fail": fail})


def test_a_cell_starts_afresh_after_one_that_failed_or_was_interrupted():
    with pytest.raises(ZeroDivisionError):
        run_autotest_cell([("blank()", "1"), ("1 / 0", "1")], {"blank": blank})
    assert run_autotest_cell([("1", "1")], {}) == (None, "Success!\n")


def test_learner_cannot_print_success():
    def forge():
        print("Success!")
        return "Success!\nSuccess!"

    result, printed = run_autotest_cell([("forge()", "4")], {"forge": forge})
    assert result == 0.0 and "Success!" not in printed.splitlines()
    assert points_of(result, printed) == 0


def test_cell_whose_tests_are_all_hidden_ends_well_in_the_release():
    success = yaml.safe_load((Path(__file__).parents[1] / "autotests.yml").read_text())["python3"]["success"]
    exec(success, {})


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


def test_an_input_is_refused_by_a_value_error_of_any_class_and_by_no_other_error():
    class StageError(ValueError):
        pass

    def fail(error):
        raise error

    assert all(call(fail, error).refused for error in (ValueError("no"), StageError("no")))
    others = (TypeError("ValueError"), NotImplementedError(), NotImplementedError("no"), SystemExit("no"))
    assert not any(call(fail, error).refused for error in others) and not call(int).refused


def test_call_knows_the_blank_function_of_a_release():
    assert call(blank).unsolved


@pytest.mark.parametrize(
    "function", [lambda a, b: 1, lambda *_: 1, lambda a, b, c=0: 1, {}.get, 7, None, dict, contextlib.suppress]
)
def test_signature_that_takes_the_arguments_or_cannot_be_read_is_not_criticised(function):
    assert checks.explain_signature(function, "one", "two") == ""


@pytest.mark.parametrize("function", [lambda: 1, lambda a: 1, lambda a, b, c: 1, lambda a, b, *, c: 1])
def test_signature_that_does_not_take_the_arguments_is_told(function):
    assert checks.explain_signature(function, "one", "two").startswith(
        "your function must take (one, two), and takes ("
    )


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


@pytest.mark.parametrize(
    "value",
    [True, "3", None, [3], float("nan"), float("inf"), Decimal("sNaN"), 3 + 0j, {}, torch.zeros(2)],
)
def test_what_is_no_finite_number_is_not_close_to_anything(value):
    assert as_number(value) is None
    assert not is_close(value, 3)


def test_numbers_of_any_kind_are_compared():
    assert all(
        is_close(value, 3) for value in (3, 3.0, np.float32(3), torch.tensor(3.0), Fraction(3), Decimal(3), 3.0001)
    )
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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([0.0, -math.inf, 1.0], [-math.inf, 0.0, 1.0]),
        ([0.0, -math.inf, 1.0], [0.0, -math.inf, 5.0]),
        ([0.0, -math.inf], [0.0, math.inf]),
        ([math.nan, 1.0], [1.0, math.nan]),
        ([1 + 2j, 3], [1 - 2j, 3]),
    ],
)
def test_arrays_with_other_infinities_or_imaginary_parts_differ(one: list[complex], other: list[complex]) -> None:
    assert checks.describe(np.array(one)) == checks.describe(np.array(one))
    assert checks.describe(np.array(one)) != checks.describe(np.array(other))


def ask_twice(number: int) -> checks.Outcome:
    return call(lambda n: 2 * n if n < 7 else [][n], number)


def judge_twice(number: int, outcome: checks.Outcome) -> tuple[object, float, str]:
    return outcome.value, float(number < 3), f"{number}: {outcome.error or 'is wrong'}"


def test_each_case_is_asked_and_the_first_wrong_ones_are_shown(capsys):
    asked = checks.ask_each("twice", range(9), ask_twice, judge_twice)
    assert asked is not None and (asked.earned, asked.num_wrong, asked.stopped) == (3.0, 6, False)
    assert asked.answers == [(n, 2 * n) for n in range(7)]  # 7 and 8 failed, and have no answer
    assert capsys.readouterr().out.splitlines() == ["3: is wrong", "4: is wrong", "5: is wrong", "... and 3 more"]
    assert checks.ask_each("blank", range(9), lambda n: call(blank, n), judge_twice) is None
    assert capsys.readouterr().out == "blank is not solved yet\n"


def test_no_case_is_asked_after_one_that_took_too_long(capsys):
    late = checks.Outcome(error="TimeoutError: too long", timed_out=True)
    asked = checks.ask_each("slow", range(9), lambda n: late if n == 4 else ask_twice(n), judge_twice)
    assert asked is not None and asked.stopped and (asked.earned, asked.num_wrong) == (3.0, 2)
    assert [case for case, _ in asked.answers] == [0, 1, 2, 3]
    assert capsys.readouterr().out.splitlines() == ["3: is wrong", "4: TimeoutError: too long"]
