"""What the feedback of a check says about a learner's code: its line that failed, what it printed, and why it waits."""

from __future__ import annotations

import linecache
import sys
from typing import Any

import pytest
from lab04_1_answers import RIGHT_RUNS
from torch import Tensor

from vlmcourse.grading import checks, traces
from vlmcourse.grading.chain_runs import make_runs, record_run
from vlmcourse.grading.chain_verdicts import judge_run
from vlmcourse.grading.checks import Outcome, call

# --- Chains ---------------------------------------------------------------------------------------------------------


def test_a_chain_that_uses_its_lists_up_is_right() -> None:
    def use_up(layers: list[Any], x: Tensor, segments: list[tuple[int, int]]) -> Tensor:
        output = RIGHT_RUNS[0](list(layers), x, list(segments))
        while layers:
            layers.pop(0)
        segments.clear()
        return output

    case = make_runs(seed=3)[1]
    assert judge_run(call(record_run, use_up, case, limit_s=60), case) == {}


# --- What a learner's code printed ----------------------------------------------------------------------------------


def test_what_a_function_printed_in_the_first_wrong_case_is_shown(capsys: Any) -> None:
    def prints(number: int) -> int:
        print(f"MY DEBUG {number}\nSuccess!")
        print("on stderr", file=sys.stderr)
        return 2 * number

    def judge(number: int, outcome: Outcome) -> tuple[Any, float, str]:
        return outcome.value, float(number < 2), f"{number}: is wrong"

    checks.ask_each("prints", range(4), lambda number: call(prints, number), judge)
    said = capsys.readouterr()
    assert said.out == "2: is wrong\n3: is wrong\nyour code printed:\n  | MY DEBUG 2\n  | Success!\n" and not said.err
    checks.ask_each("prints", range(2), lambda number: call(prints, number), judge)
    assert capsys.readouterr().out == "your code printed:\n  | MY DEBUG 0\n  | Success!\n"


def test_what_is_printed_without_end_or_after_closing_stdout_is_cut(capsys: Any) -> None:
    def floods() -> None:
        for number in range(1000):
            print(number, "x" * 300)

    def closes() -> int:
        print("before")
        sys.stdout.close()
        return 3

    outcome = call(floods)
    assert len(outcome.printed) <= traces.MAX_KEPT
    traces.show_printed([(outcome.printed, True)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and max(map(len, lines)) < 120 and lines[-1].endswith("lines more")
    outcome = call(closes)
    assert (outcome.value, outcome.printed) == (3, "before\n")


def test_an_autotest_cell_shows_what_was_printed_in_its_first_wrong_line(capsys: Any) -> None:
    def double(number: int) -> int:
        print(f"MY DEBUG {number}\nSuccess!")
        return 1 // (2 - number)

    checks.begin()
    checks.require(lambda: checks.canonical(lambda: double(1)), "1", "double(1) is not right")
    checks.require(lambda: checks.canonical(lambda: double(3)), "4", "double(3) is not right")
    with pytest.raises(ZeroDivisionError):
        checks.require(lambda: checks.canonical(lambda: double(2)), "4", "double(2) is not right")
    assert checks.finish() == 0.0
    wrong, raised = capsys.readouterr().out.split("expected 4, got -1\n")[1].split("your code printed:\n")[1:]
    assert wrong == "  | MY DEBUG 3\n  | Success!\n" and raised == "  | MY DEBUG 2\n  | Success!\n"
    checks.begin()
    checks.require(lambda: checks.canonical(lambda: double(1)), "1", "double(1) is not right")
    assert checks.finish() is None
    assert capsys.readouterr().out == "your code printed:\n  | MY DEBUG 1\n  | Success!\nSuccess!\n"


# --- Where a learner's code failed ----------------------------------------------------------------------------------


def define(source: str, file: str = "/tmp/ipykernel_7/12.py") -> dict[str, Any]:
    """Run a cell's source as a notebook does: under the name of a file that exists in `linecache` alone."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {}
    exec(compile(source, file, "exec"), namespace)
    return namespace


CELL = """
import json
from vlmcourse.planner import Plan

def total(x):
    return sum(x[k] for k in range(3))

def plans():
    return Plan(tp=0)

def reads(text):
    return json.loads(text)

def endless():
    while True:
        pass
"""


@pytest.mark.parametrize(
    ("name", "arguments", "ending"),
    [
        ("total", ([1, 2],), " (line 6: return sum(x[k] for k in range(3)))"),
        ("plans", (), " (in plans, line 9: return Plan(tp=0))"),
        ("reads", ("{",), " (in reads, line 12: return json.loads(text))"),
        ("endless", (), "line 16: pass)"),
        ("reads", (), "missing 1 required positional argument: 'text'"),
    ],
)
def test_an_error_names_the_innermost_line_of_the_learners_code(
    name: str, arguments: tuple[Any, ...], ending: str
) -> None:
    outcome = call(define(CELL)[name], *arguments, limit_s=0.1)
    assert outcome.error.endswith(ending) or (name == "endless" and "line 15: while True:)" in outcome.error)


def test_a_line_whose_text_is_not_known_has_its_number_and_a_long_one_is_cut() -> None:
    namespace: dict[str, Any] = {}
    exec("def fails():\n    return 1 / 0", namespace)
    assert call(namespace["fails"]).error == "ZeroDivisionError: division by zero (in fails, line 2)"
    long = call(define(f"def fails():\n    return 1 / 0 + {'1 + ' * 200}0")["fails"]).error
    assert len(long) < 220 and long.endswith(" ...)")
