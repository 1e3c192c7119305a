"""What the feedback of a check says about a learner's code: its line that failed, what it printed, and why it waits."""

from __future__ import annotations

import json
import linecache
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
import torch
from lab04_1_answers import RIGHT_RUNS
from torch import Tensor

from vlmcourse.grading import (
    checks,
    ex04_3,
    lab04_1,
    pair_feedback,
    pair_ranks,
    pair_worker,
    step_feedback,
    traces,
)
from vlmcourse.grading.cell_feedback import feedback_text
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


def test_a_chain_without_end_is_stopped_once_with_a_word_of_its_own(capsys: Any) -> None:
    tried = []

    def endless(layers: list[Any], x: Tensor, segments: list[tuple[int, int]]) -> Tensor:
        tried.append(segments)
        print("MY DEBUG")
        while True:
            pass

    assert lab04_1.check_run(endless, 6, seed=3, limit_s=0.2) == 0
    said = capsys.readouterr().out
    assert len(tried) == 1 and said.count("took longer than 0.2 s") == 1 and "arithmetic" not in said
    assert "a few small layers" in said and "your code printed:\n  | MY DEBUG\n" in said


def test_a_chains_output_of_another_shape_is_told_both_once(monkeypatch: Any, capsys: Any) -> None:
    def first_row(layers: list[Any], x: Tensor, segments: list[tuple[int, int]]) -> Tensor:
        return x[:1]

    cases = make_runs(seed=3)
    monkeypatch.setattr(lab04_1, "make_runs", lambda seed: [cases[3], cases[3]])
    assert lab04_1.check_run(first_row, 6, seed=3) == 0
    said = capsys.readouterr().out
    assert said.count("returned shape [1, 32], the chain gives [256, 32]") == 1 and "tensor(" not in said


# --- Exercise 4.3 ---------------------------------------------------------------------------------------------------


def test_a_fact_that_is_missing_or_text_is_told_so(capsys: Any) -> None:
    def facts(exponent_bits: int, mantissa_bits: int, has_infinity: bool) -> dict[str, Any]:
        return {"max": "65504", "epsilon": None, "decimal_digits": [3]}

    assert ex04_3.check_facts(facts, 5, seed=1) == 0
    said = capsys.readouterr().out
    for words in ("'65504' is text: return a number", "None: return a number", "[3] is of type list: return a number"):
        assert said.count(words) == 1
    assert "your dict has no key 'smallest_normal', 'smallest_subnormal'\n" in said and said.count("small") == 2


def test_keys_of_other_names_are_told_once_with_those_that_are_missing(capsys: Any) -> None:
    def facts(exponent_bits: int, mantissa_bits: int, has_infinity: bool) -> dict[str, float]:
        return {"Max": 1.0, "epsilon": 2.0**-mantissa_bits}

    assert ex04_3.check_facts(facts, 5, seed=1) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert "your dict has no key 'max', 'smallest_normal'" in first and first.endswith("; it has 'Max' instead")
    assert last == "1 of 5 facts right for all of 8 formats"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda values: None, "numbers, not None"),
        (lambda values: torch.zeros(len(values)), "numbers, not a Tensor"),
        (lambda values: ["zero"] * (len(values) - 1), " numbers, not {short} of them"),
    ],
)
def test_fates_that_are_no_list_of_the_right_length_are_told_what_came(answer: Any, words: str, capsys: Any) -> None:
    lengths: list[int] = []

    def survivors(values: list[float], exponent_bits: int, mantissa_bits: int) -> Any:
        print("MY DEBUG")
        lengths.append(len(values))
        return answer(values)

    assert ex04_3.check_survivors(survivors, 3, seed=1, num_cases=1) == 0
    said = capsys.readouterr().out
    assert f"for each of the {lengths[0]} numbers" in said and words.format(short=lengths[0] - 1) in said
    assert "your code printed:\n  | MY DEBUG\n" in said


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (("e5m2", 2.5), "('e5m2', 2.5): power must be whole"),
        (("e5m2", "2"), "('e5m2', '2'): power must be a whole number"),
        (("e5m2", 2, 0), "('e5m2', 2, 0): two values, not 3"),
        ((2, "e5m2"), "(2, 'e5m2'): name must be text"),
        ("e5m2", "'e5m2', a str"),
    ],
)
def test_a_choice_of_another_form_is_told_which_part_is_wrong(answer: Any, words: str, capsys: Any) -> None:
    assert ex04_3.check_choices(lambda towers, formats, max_lost, headroom: answer, "easy", 3, 1, 1) == 0
    assert f"return (name, power) or None, not {words}" in capsys.readouterr().out


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


# --- On ranks -------------------------------------------------------------------------------------------------------


class TwoRanks(NamedTuple):
    """A case that no rank is started for."""

    world_size: int = 2


def run_without_ranks(function: Any, monkeypatch: pytest.MonkeyPatch) -> pair_ranks.AnswerReports:
    """Run an answer by `run_answers`, with reports written by two calls here in place of two ranks."""

    def write(argv: list[str], world_size: int, **_: Any) -> None:
        folder = Path(argv[-1])
        job = pickle.loads((folder / "job.pickle").read_bytes())
        function = pickle.loads(job["answers"][0])
        for rank in range(world_size):
            report = {"answer": 0, "case": 0, "status": "done", "error": "", "values": {"steps": []}}
            with checks.quiet() as printed:
                try:
                    function(rank)
                except Exception as error:
                    report |= pair_worker.describe_error(error)
            report["printed"] = printed.getvalue()
            (folder / f"rank{rank}.jsonl").write_text(json.dumps(report) + "\n")

    monkeypatch.setattr(pair_ranks, "run_ranks", write)
    (reports,) = pair_ranks.run_answers([function], [TwoRanks()])
    return reports


RANK_CELL = """
def total(rank):
    print(f"MY DEBUG {rank}")
    if rank:
        raise KeyError("only rank one")
    return 0

def endless(rank):
    raise TimeoutError

class Helper:
    def part(self, rank):
        return [][rank]

def uses(rank):
    def inner():
        return Helper().part(rank)
    return inner()
"""


def test_an_error_on_a_rank_names_its_line_and_what_was_printed_there(monkeypatch: Any, capsys: Any) -> None:
    cell = define(RANK_CELL)
    reports = run_without_ranks(cell["total"], monkeypatch)
    found = step_feedback.explain_step_case(reports.cases[0])["error"]
    line = '(in total, line 5: raise KeyError("only rank one"))'
    assert found == f"rank 1 failed with KeyError: 'only rank one' {line}"
    used = run_without_ranks(cell["uses"], monkeypatch).cases[0].by_rank[1]["error"]
    assert used == "IndexError: list index out of range (in part, line 13: return [][rank])"
    capsys.readouterr()
    pair_ranks.show_rank_prints(reports)
    assert capsys.readouterr().out == "your code, on rank 0, printed:\n  | MY DEBUG 0\n"
    endless = run_without_ranks(cell["endless"], monkeypatch)
    for explain in (step_feedback._explain_end, pair_feedback._explain_end):
        assert "computed without end (in endless, line 9: raise TimeoutError)" in explain(endless.cases[0])["endless"]


def test_what_a_check_waits_for_is_said_at_once_with_its_limits_and_is_no_feedback(
    monkeypatch: Any, capsys: Any
) -> None:
    run_without_ranks(define(RANK_CELL)["total"], monkeypatch)
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    assert line.startswith("starting 2 ranks, about ") and not said.err
    limits = (pair_ranks.COLLECTIVE_LIMIT_S, pair_ranks.LOOP_FACTOR * pair_ranks.COLLECTIVE_LIMIT_S)
    assert all(f"after {limit:g} s" in line for limit in (*limits, pair_ranks.RUN_LIMIT_S))
    notebook = Path(__file__).parents[1] / "solutions/ch02_accumulation/ch02_accumulation.ipynb"
    (task,) = [c.source for c in nbformat.read(notebook, as_version=4).cells if c.id == "ex04_2_c_task_2"]
    assert all(f"after {limit:g} seconds" in task for limit in limits) and f"after {pair_ranks.RUN_LIMIT_S:g}." in task
    cell = nbformat.v4.new_code_cell()
    cell.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=f"{said.out}loss right in 2 of 5 cases\n"))
    assert feedback_text(cell) == "loss right in 2 of 5 cases"
