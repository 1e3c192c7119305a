"""Grading in isolation: what a submission can do to itself, it cannot turn into points."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import grading_course
import nbformat
import psutil
import pytest
from grading_course import ASSIGNMENT, RIGHT, answer, find
from nbformat.v4 import new_code_cell, new_output
from nbgrader.api import Gradebook

from vlmcourse.commands import grade as command
from vlmcourse.grading import run, steps
from vlmcourse.grading.cell_feedback import feedback_text
from vlmcourse.grading.process import ProcessResult, stop_tree
from vlmcourse.grading.report import as_data, format_feedback, format_table
from vlmcourse.grading.run import CellMarks, Marks, find_assignment, grade_submission, prepare_course

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return grading_course.write_course(tmp_path_factory.mktemp("course with ümlaut"))


@pytest.fixture(scope="module")
def prepared(course):
    with prepare_course(course, ASSIGNMENT) as prepared:
        yield prepared


def grade(notebook: nbformat.NotebookNode, prepared, folder: Path, **options) -> Marks:
    path = folder / "any name.ipynb"
    nbformat.write(notebook, path)
    return grade_submission(path, prepared, name="anna", **options)


def points(marks: Marks) -> dict[str, float | None]:
    return {cell.grade_id: cell.points for cell in marks.cells}


def feedback(marks: Marks) -> dict[str, str]:
    return {cell.grade_id: cell.feedback for cell in marks.cells}


# --- The release ----------------------------------------------------------------------------------------------------


def test_release_holds_no_solution_no_hidden_test_and_no_instructors_file(prepared):
    text = prepared.release.read_text(encoding="utf-8")
    for secret in ("2 * x", "HIDDEN", "double(7)", "reference answer", "AUTOTEST draw"):
        assert secret not in text
    assert sorted(path.name for path in prepared.release.parent.iterdir()) == ["data.csv", "small.ipynb"]
    assert not (prepared.folder / "solutions").exists()


def test_generation_runs_no_lab_and_marks_it(prepared):
    cell = find(nbformat.read(prepared.release, as_version=4), "ranks")
    assert cell.metadata["vlmcourse"]["lab"] == steps.lab_digest(cell)


def test_hashed_tests_show_no_value(prepared):
    source = find(nbformat.read(prepared.release, as_version=4), "small_draw_test").source
    assert "[0.4" in source or "[0." in source  # the plain test shows what it expects
    assert "drawn" in source and "text:drawn" not in source


def test_course_without_the_assignment_is_refused(course):
    with pytest.raises(ValueError, match="assignments in .*: small"), prepare_course(course, "smal"):
        pass


def test_failed_generation_is_an_error_with_nbgraders_last_words(course, monkeypatch):
    log = "\n".join(["[X | INFO] fine", *(f"line {i}" for i in range(40)), "RuntimeError: no end solution statement"])
    monkeypatch.setattr(run, "run_nbgrader", lambda *_: ProcessResult(returncode=1, log=log))
    words = "(?s)could not generate 'small'.*line 39.*no end solution statement$"
    with pytest.raises(RuntimeError, match=words), prepare_course(course, ASSIGNMENT):
        pass


# --- Submissions ----------------------------------------------------------------------------------------------------


def test_right_answers_in_another_style_get_full_marks_and_the_command_says_so(
    course, prepared, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(command, "prepare_course", lambda *_: contextlib.nullcontext(prepared))
    submitted = tmp_path / "submitted"
    (submitted / "anna").mkdir(parents=True)
    nbformat.write(answer(prepared.release, RIGHT), submitted / "anna" / "small.ipynb")
    (submitted / "bo.ipynb").write_text("no JSON", encoding="utf-8")
    options = ["--course", str(course), "--assignment", ASSIGNMENT, "--feedback", str(tmp_path / "feedback")]
    assert command.run(arguments(str(submitted), "--json", *options)) == 1  # bo's could not be graded
    shown = capsys.readouterr()
    anna, bo = json.loads(shown.out)
    assert "Grading anna/small.ipynb (1 of 2) ..." in shown.err and "Grading bo.ipynb (2 of 2) ..." in shown.err
    assert "anna/small.ipynb: 6 of 6 points by tests, and 4 wait for a person, in " in shown.err
    assert "bo.ipynb: could not be graded, in " in shown.err
    assert {cell["grade_id"]: cell["points"] for cell in anna["cells"]} == {
        "small_draw_test": 2,
        "small_double_test": 3,
        "small_award_test": 1,
        "small_essay": None,
    }
    assert (anna["points"], anna["max_auto_points"], anna["waiting_points"], anna["failure"]) == (6, 6, 4, "")
    assert bo["points"] == 0 and "not a notebook" in bo["failure"]
    assert "6 of 6 points" in (tmp_path / "feedback" / "anna__small.txt").read_text(encoding="utf-8")
    assert "could not be graded" in (tmp_path / "feedback" / "bo.txt").read_text(encoding="utf-8")


def test_blank_submission_is_told_what_is_not_solved_and_earns_nothing(prepared, tmp_path):
    names = {"small_draw": "draw()", "small_double": "double(x)", "small_award": "award()"}
    blank = {cell: f"def {name}:\n    raise NotImplementedError()" for cell, name in names.items()}
    marks = grade(answer(prepared.release, blank), prepared, tmp_path)
    assert not marks.failure and set(points(marks).values()) == {0}
    said = feedback(marks)
    assert said["small_draw_test"] == "draw is not solved yet"  # AUTOTEST lines
    assert said["small_double_test"] == said["small_award_test"] == "not solved yet"  # an error without a message
    assert (marks.max_auto_points, marks.waiting_points, marks.unanswered_points) == (6, 0, 4)
    text = format_feedback(marks)
    assert "0 of 6 points by tests, and written answers worth 4 were left blank" in text
    assert format_table([marks]).splitlines()[-1].endswith("0 of 6  4 unanswered")


def test_tampered_submission_gets_what_its_answers_earn_and_no_more(prepared, tmp_path):
    answers = RIGHT | {
        "small_double": "def double(x):\n    return 4 if x == 2 else 0",  # right in the visible case only
        "small_award": "import math\naward = lambda: -1",
    }
    notebook = answer(prepared.release, answers)
    test = find(notebook, "small_double_test")
    test.metadata["tags"] = ["skip-execution", "lab"]
    test.metadata["vlmcourse"] = {"lab": steps.lab_digest(test)}
    test.metadata["nbgrader"].update(points=300, locked=False, grade=False)
    test.source = "3"
    find(notebook, "small_award_test").metadata["nbgrader"]["solution"] = True
    notebook.cells = [
        cell for cell in notebook.cells if cell.id not in ("small_setup", "small_draw_test", "small_essay")
    ]
    notebook.cells.insert(0, new_code_cell("print('one of mine')"))
    marks = grade(notebook, prepared, tmp_path)
    assert points(marks) == {
        "small_draw_test": 2,  # deleted, put back, and run after the setup cell that was deleted too
        "small_double_test": 1,
        "small_award_test": 0,
        "small_essay": 0,
    }
    assert "must give one number from 0 to 1" in feedback(marks)["small_award_test"]


def test_killed_kernel_keeps_earlier_points_and_gives_none_after(prepared, tmp_path):
    answers = RIGHT | {"small_double": "import os\nos._exit(3)"}
    marks = grade(answer(prepared.release, answers), prepared, tmp_path, attempts=1)
    assert points(marks) == {
        "small_draw_test": 2,
        "small_double_test": 0,
        "small_award_test": 0,
        "small_essay": None,
    }
    assert "cell small_double ended in an error: KernelDied" in feedback(marks)["small_double_test"]
    assert "this cell was not run" in feedback(marks)["small_double_test"]
    assert "this cell was not run" in feedback(marks)["small_award_test"]


def test_changed_lab_cell_is_run_and_deleted_solution_earns_nothing(prepared, tmp_path):
    notebook = answer(prepared.release, {"small_award": "def award():\n    return len(helper())"})
    find(notebook, "ranks").source = "def helper():\n    return [1]"  # a learner's own helper in a lab's place
    notebook.cells = [cell for cell in notebook.cells if cell.id != "small_double"]
    find(notebook, "small_draw").source = "def draw():\n    return (1]"
    marks = grade(notebook, prepared, tmp_path)
    assert points(marks) == {"small_draw_test": 0, "small_double_test": 0, "small_award_test": 1, "small_essay": 0}
    said = feedback(marks)
    first, second = said["small_draw_test"].splitlines()
    assert first.startswith("the answer's cell small_draw ended in an error: SyntaxError: closing parenthesis")
    assert first.endswith("(line 2)") and second == "NameError: name 'draw' is not defined"
    assert "ended in an error" not in said["small_double_test"] + said["small_award_test"]


def test_failed_run_is_tried_again_and_only_the_last_goes_on_after_a_death(prepared, tmp_path, monkeypatch):
    tries = []

    def fail(notebook, prepared, folder, time_limit_s, *, last):
        tries.append(last)
        return ProcessResult(returncode=1, log="[X | INFO] hello\nKernel died")

    monkeypatch.setattr(run, "_autograde", fail)
    marks = grade(answer(prepared.release, RIGHT), prepared, tmp_path, attempts=3)
    assert tries == [False, False, True]
    assert marks.failure == "nbgrader failed 3 times; its last words:\nKernel died"
    assert points(marks) == {"small_draw_test": 0, "small_double_test": 0, "small_award_test": 0, "small_essay": None}


@pytest.mark.filterwarnings("ignore:Object of type")
def test_result_missing_from_the_gradebook_counts_as_zero(prepared, tmp_path, monkeypatch):
    def grade_nothing(notebook, prepared, folder, time_limit_s, *, last):
        graded = folder / "autograded" / run.LEARNER / prepared.assignment
        graded.mkdir(parents=True)
        shutil.copy(prepared.release, graded)
        shutil.copy(prepared.folder / "gradebook.db", folder)
        with Gradebook(f"sqlite:///{folder / 'gradebook.db'}") as gradebook:
            gradebook.add_student(run.LEARNER)
            gradebook.add_submission(prepared.assignment, run.LEARNER)
        return ProcessResult(returncode=0, log="")

    monkeypatch.setattr(run, "_autograde", grade_nothing)
    marks = grade(answer(prepared.release, RIGHT), prepared, tmp_path)
    assert points(marks) == {"small_draw_test": 0, "small_double_test": 0, "small_award_test": 0, "small_essay": None}
    assert "no result was recorded" in feedback(marks)["small_draw_test"]


def test_lab_that_is_as_released_is_marked_even_where_metadata_were_lost(prepared, tmp_path):
    notebook = grading_course.source_notebook()  # the instructor's own has no marks
    find(notebook, "small_draw").metadata["vlmcourse"] = {"lab": "forged"}
    nbformat.write(notebook, tmp_path / "submitted.ipynb")
    run.write_submission(tmp_path / "submitted.ipynb", prepared.release, tmp_path / "copy.ipynb")
    copy = nbformat.read(tmp_path / "copy.ipynb", as_version=4)
    marked = {cell.id for cell in copy.cells if cell.metadata.get("vlmcourse", {}).get("lab") == steps.lab_digest(cell)}
    assert marked == {"ranks"}


def test_time_limit_stops_the_run_and_gives_no_points(prepared, tmp_path):
    started = time.monotonic()
    marks = grade(answer(prepared.release, RIGHT), prepared, tmp_path, time_limit_s=0.5)
    assert "time limit of 0.5 s" in marks.failure
    assert marks.points == 0 and time.monotonic() - started < 60


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"nbformat": 4, "cells": 3}'])
def test_file_that_is_no_notebook_is_named_and_earns_nothing(text, prepared, tmp_path):
    path = tmp_path / "broken.ipynb"
    path.write_text(text, encoding="utf-8")
    marks = grade_submission(path, prepared)
    assert "not a notebook that can be read" in marks.failure
    assert marks.points == 0 and len(marks.cells) == 4


def test_stopping_a_process_stops_children_in_sessions_of_their_own(tmp_path):
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
    child += "start_new_session=True); open('pid', 'w').write(str(p.pid)); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", child], cwd=tmp_path, start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        grandchild = psutil.Process(int((tmp_path / "pid").read_text()))
        stop_tree(process)
        assert process.returncode is not None
        assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
    finally:
        stop_tree(process)


def test_submission_is_matched_to_its_assignment_by_its_exercises(course, prepared, tmp_path):
    path = tmp_path / "renamed.ipynb"
    nbformat.write(answer(prepared.release, RIGHT), path)
    assert find_assignment(path, course) == ASSIGNMENT
    nbformat.write(nbformat.v4.new_notebook(), path)
    with pytest.raises(ValueError, match="matches no assignment"):
        find_assignment(path, course)
    path.write_text("no JSON", encoding="utf-8")
    with pytest.raises(ValueError, match=r"renamed.ipynb: this is not a notebook that can be read"):
        find_assignment(path, course)


# --- Proof of points ------------------------------------------------------------------------------------------------


def test_cell(*outputs, ran: bool = True) -> nbformat.NotebookNode:
    cell = grading_course.graded("small_any", "tests()", 2)
    cell.execution_count = 1 if ran else None
    cell.outputs = list(outputs)
    return cell


test_cell.__test__ = False  # type: ignore[attr-defined]


def result(text: str):
    return new_output("execute_result", data={"text/plain": text})


def printed(text: str, name: str = "stdout"):
    return new_output("stream", name=name, text=text)


@pytest.mark.parametrize("text", ["0", "1.5", "2", "2.0"])
def test_number_in_range_is_proof(text):
    assert steps.find_unproven(test_cell(result(text))) == ""


def test_success_line_is_proof():
    assert steps.find_unproven(test_cell(printed("noise\nSuccess!\n"))) == ""


@pytest.mark.parametrize(
    "cell",
    [
        test_cell(),
        test_cell(printed("no Success! here\n")),
        test_cell(result("-1")),
        test_cell(result("2.5")),
        test_cell(result("nan")),
        test_cell(result("inf")),
        test_cell(result("'2'")),
        test_cell(result("None")),
        test_cell(result("np.float64(2.0)")),
        test_cell(result("2"), result("2")),
        test_cell(result("2"), ran=False),
        test_cell(printed("Success!\n"), ran=False),
    ],
)
def test_anything_else_earns_nothing(cell):
    from nbgrader.utils import determine_grade

    assert steps.find_unproven(cell)
    graded, _ = steps.RequireProof().preprocess_cell(cell, {}, 0)
    assert determine_grade(graded)[0] == 0


def test_stderr_does_not_cost_the_points_but_an_error_does():
    from nbgrader.utils import determine_grade

    warned, _ = steps.RequireProof().preprocess_cell(test_cell(printed("careful", "stderr"), result("2")), {}, 0)
    assert determine_grade(warned)[0] == 2
    failed = test_cell(result("2"), new_output("error", ename="ValueError", evalue="", traceback=[]))
    assert determine_grade(steps.RequireProof().preprocess_cell(failed, {}, 0)[0])[0] == 0


# --- The command and the report -------------------------------------------------------------------------------------


def marks_of(name: str, *earned: float | None, failure: str = "") -> Marks:
    cells = tuple(
        CellMarks(grade_id=f"ex04_{index // 2}_part{index}", points=value, max_points=2, feedback=f"said {index}")
        for index, value in enumerate(earned)
    )
    return Marks(submission=name, assignment="ch", cells=cells, failure=failure)


def test_table_shows_points_limits_hand_grading_and_failures():
    text = format_table([marks_of("anna", 2, 1.5, None), marks_of("bo", 0, 0, None, failure="stopped")])
    header, limits, anna, bo, failure = text.splitlines()[1:]
    assert header.split() == ["submission", "0_part0", "0_part1", "1_part2", "by", "tests", "by", "hand"]
    assert limits.split() == ["of", "2", "2", "2"]
    assert anna.split() == ["anna", "2", "1.5", "-", "3.5", "of", "4", "2", "to", "give"]
    assert bo.split()[:2] == ["bo", "(!)"] and failure == "(!) bo: stopped"


def test_feedback_groups_cells_by_exercise_and_repeats_what_they_said():
    text = format_feedback(marks_of("anna", 2, 1.5, None))
    assert "anna (ch): 3.5 of 4 points by tests, and 2 wait for a person" in text
    assert "ex04_0: 3.5 of 4" in text and "ex04_1: 0 of 2" in text
    assert "      said 1" in text


def test_marks_as_data_are_json():
    data = json.loads(json.dumps(as_data(marks_of("anna", 2, None))))
    assert data["points"] == 2 and data["waiting_points"] == 2 and data["cells"][1]["points"] is None


def arguments(*argv: str):
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(argv)


def test_grade_command_prints_table_and_feedback_of_a_single_notebook(course, prepared, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "prepare_course", lambda *_: contextlib.nullcontext(prepared))
    monkeypatch.setattr(command, "grade_submission", lambda *_, name, **__: marks_of(name, 2, 1.5, None))
    nbformat.write(answer(prepared.release, RIGHT), tmp_path / "small.ipynb")
    assert command.run(arguments(str(tmp_path / "small.ipynb"), "--course", str(course))) == 0
    text = capsys.readouterr().out
    assert "3.5 of 4" in text and "ex04_0: 3.5 of 4" in text and "said 1" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["missing.ipynb"], "There is no notebook at missing.ipynb"),
        ([__file__], "test_grading_run.py is not a notebook: give a .ipynb file or a folder"),
        (["any.ipynb", "--course", os.sep], "is not a course"),
        (["any.ipynb", "--time-limit-s", "0"], "must be greater than 0"),
    ],
)
def test_grade_command_says_what_to_correct(argv, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("any.ipynb").touch()
    with pytest.raises(ValueError, match=words):
        command.run(arguments(*argv))


@pytest.mark.parametrize(
    ("name", "message", "text"),
    [
        ("NotImplementedError", "", "not solved yet"),
        ("NotImplementedError", "stage 3", "NotImplementedError: stage 3"),
        ("AssertionError", "", "AssertionError"),
        ("AssertionError", "4 is not 5", "AssertionError: 4 is not 5"),
    ],
)
def test_feedback_shows_an_error_in_one_line(name, message, text):
    error = new_output("error", ename=name, evalue=message, traceback=[])
    assert feedback_text(test_cell(error)) == text
