"""Exercise 4.1 as it stands in chapter 1: right answers in any style keep their points, wrong ones lose theirs.

The cells are those of solutions/, with hidden tests and AUTOTEST lines as nbgrader instantiates them. Most answers are
graded by running those cells here; the reference, the blank release and two more go through nbgrader itself.
"""

from __future__ import annotations

import ast
import contextlib
import io
import shutil
import sqlite3
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pytest
from ex04_1_answers import REFERENCE_CELLS, RIGHT_ANSWERS, WRONG_ANSWERS, Wrong
from nbclient import NotebookClient

from vlmcourse.grading import checks, ex04_1, steps
from vlmcourse.grading.process import QUIET_KERNEL, run_nbgrader
from vlmcourse.grading.run import Marks, grade_submission, prepare_course

ROOT = Path(__file__).parents[1]
ASSIGNMENT = "ch01_parallelism"
SOURCE = ROOT / "solutions" / ASSIGNMENT / "ch01_parallelism.ipynb"
POINTS = {
    "ex04_1_a_test": 2,
    "ex04_1_b_test": 2,
    "ex04_1_b_cases": 2,
    "ex04_1_c_plain": 2,
    "ex04_1_c_sharded": 3,
    "ex04_1_c_remedy": 4,
    "ex04_1_c_ranks": 2,
    "ex04_1_c_precision": 1,
    "ex04_1_c_limits": 2,
}
BY_HAND = {"ex04_1_d": 5}

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:deprecated"),  # an answer warns on purpose
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The exercise's cells of the chapter alone, generated: they need nothing of the rest, and it takes a while."""
    course = tmp_path_factory.mktemp("course")
    for name in ("nbgrader_config.py", "autotests.yml"):
        shutil.copy(ROOT / name, course / name)
    (course / "solutions" / ASSIGNMENT).mkdir(parents=True)
    notebook = nbformat.read(SOURCE, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.id.startswith("ex04_1_")]
    nbformat.write(notebook, course / "solutions" / ASSIGNMENT / SOURCE.name)
    with prepare_course(course, ASSIGNMENT) as prepared:
        yield prepared


@pytest.fixture(scope="module")
def test_cells(prepared) -> dict[str, str]:
    """Source of every graded test cell, hidden tests included, as the gradebook keeps it."""
    with contextlib.closing(sqlite3.connect(prepared.folder / "gradebook.db")) as database:
        sources = dict(database.execute("select name, source from source_cell").fetchall())
    return {name: sources[name] for name in POINTS}


@dataclass
class Graded:
    points: dict[str, float] = field(default_factory=dict)
    feedback: dict[str, str] = field(default_factory=dict)


def grade_here(answers: dict[str, str], test_cells: dict[str, str]) -> Graded:
    """Run solution and test cells in this process and give points by the rules of `steps.RequireProof`."""
    source = nbformat.read(SOURCE, as_version=4)
    setup = next(cell.source for cell in source.cells if cell.id == "ex04_1_setup")
    namespace: dict[str, object] = {}
    exec(setup, namespace)
    for answer in (REFERENCE_CELLS | answers).values():
        with contextlib.suppress(NameError):  # an answer may be a half-finished cell
            exec(textwrap.dedent(answer), namespace)
    graded = Graded()
    for name, tests in test_cells.items():
        cell = nbformat.v4.new_code_cell(tests, execution_count=1)
        cell.metadata["nbgrader"] = {"points": POINTS[name]}
        graded.points[name], graded.feedback[name] = _run_cell(cell, namespace)
    return graded


def without_hidden_cases(tests: str) -> str:
    """A test cell as the learner runs it: without the line that names the hidden cases."""
    seeds = [line for line in tests.splitlines() if line.startswith("seed, num_cases = ")]
    return tests.replace(seeds[1], "") if seeds else tests


def _run_cell(cell: nbformat.NotebookNode, namespace: dict[str, object]) -> tuple[float, str]:
    """Run one test cell; return its points and what it said."""
    body = ast.parse(cell.source)
    printed, value = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            *statements, last = body.body
            exec(compile(ast.Module(body=statements, type_ignores=[]), "test", "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(body=last.value), "test", "eval"), namespace)
            else:
                exec(compile(ast.Module(body=[last], type_ignores=[]), "test", "exec"), namespace)
    except Exception as error:
        return 0.0, f"{printed.getvalue()}{type(error).__name__}: {error}"
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed.getvalue())]
    if value is not None:
        cell.outputs.append(nbformat.v4.new_output("execute_result", data={"text/plain": repr(value)}))
    problem = steps.find_unproven(cell)
    earned = float(cell.metadata["nbgrader"]["points"]) if value is None else value
    return (0.0 if problem else float(earned)), printed.getvalue() + problem  # type: ignore[arg-type]


def submission(release: Path, answers: dict[str, str]) -> nbformat.NotebookNode:
    notebook = nbformat.read(release, as_version=4)
    for cell in notebook.cells:
        if cell.id in answers:
            cell.source = textwrap.dedent(answers[cell.id]).strip()
    return notebook


# --- Release and points ---------------------------------------------------------------------------------------------


def test_release_holds_no_outputs_no_solutions_and_no_hidden_tests():
    release = nbformat.read(ROOT / "chapters" / ASSIGNMENT / "ch01_parallelism.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in release.cells)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in release.cells)
    for secret in ("SOLUTION", "HIDDEN", "Rubric", "404127", "from_cheap_to_dear", "# AUTOTEST"):
        assert secret not in text
    assert text.count("raise NotImplementedError()") == 3
    assert "YOUR ANSWER HERE" in text


def test_points_are_those_that_the_exercise_states():
    cells = nbformat.read(SOURCE, as_version=4).cells
    graded = {cell.id: cell.metadata["nbgrader"] for cell in cells if cell.metadata.get("nbgrader", {}).get("grade")}
    points = {name: data["points"] for name, data in graded.items() if name.startswith("ex04_1_")}
    assert points == POINTS | BY_HAND
    assert sum(points.values()) == 25
    task = next(cell.source for cell in cells if cell.id == "ex04_1_task")
    assert "**25 points" in task
    for part, total in {"a": 2, "b": 4, "c": 14, "d": 5}.items():
        assert sum(value for name, value in points.items() if name.startswith(f"ex04_1_{part}")) == total
        assert any(line.startswith(f"| {part} |") and f"| {total} |" in line for line in task.splitlines())


def test_every_group_of_scenarios_is_graded_on_hidden_cases(test_cells):
    from vlmcourse.grading.scenarios import GROUPS

    for group in GROUPS:
        source = test_cells[f"ex04_1_c_{group}"]
        assert f'"{group}", points={POINTS[f"ex04_1_c_{group}"]}' in source
        visible, hidden = [line for line in source.splitlines() if line.startswith("seed, num_cases = ")]
        assert visible == "seed, num_cases = 1, 4"
        assert hidden != visible and hidden.endswith(", 10")


# --- Through nbgrader -----------------------------------------------------------------------------------------------


def by_id(marks: Marks) -> dict[str, float | None]:
    return {cell.grade_id: cell.points for cell in marks.cells if cell.grade_id.startswith("ex04_1")}


def test_blank_release_scores_zero(prepared):
    marks = grade_submission(prepared.release, prepared)
    assert not marks.failure
    assert by_id(marks) == dict.fromkeys(POINTS | BY_HAND, 0)
    assert marks.waiting_points == 0


def test_run_all_on_the_blank_release_goes_on_to_its_end(prepared):
    notebook = nbformat.read(prepared.release, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", extra_arguments=list(QUIET_KERNEL)).execute()
    for cell in notebook.cells:
        if cell.id in POINTS:
            *printed, points = cell.outputs
            assert "".join(output.text for output in printed).strip().endswith("not solved yet")
            assert points["data"]["text/plain"] == "0.0"


def test_plain_nbgrader_commands_grade_two_submissions_and_write_feedback(prepared, tmp_path):
    shutil.copytree(prepared.folder, tmp_path, dirs_exist_ok=True)
    one_moment = WRONG_ANSWERS["counts one Adam moment"]
    for name, answers in {"right": RIGHT_ANSWERS["search by price"], "wrong": one_moment.answers}.items():
        folder = tmp_path / "submitted" / name / ASSIGNMENT
        folder.mkdir(parents=True)
        nbformat.write(submission(prepared.release, REFERENCE_CELLS | answers), folder / "ch01_parallelism.ipynb")
    for step in ("autograde", "generate_feedback"):
        done = run_nbgrader([step, ASSIGNMENT], tmp_path, time_limit_s=400)
        assert done.returncode == 0, done.log
    with contextlib.closing(sqlite3.connect(tmp_path / "gradebook.db")) as database:
        query = """select assignment.student_id, sum(grade.auto_score) from grade
                   join submitted_notebook on grade.notebook_id = submitted_notebook.id
                   join submitted_assignment as assignment on submitted_notebook.assignment_id = assignment.id
                   group by assignment.student_id"""
        totals = dict(database.execute(query).fetchall())
    assert totals["right"] == sum(POINTS.values())
    assert totals["wrong"] < sum(POINTS.values()) - 3
    page = (tmp_path / "feedback" / "wrong" / ASSIGNMENT / "ch01_parallelism.html").read_text(encoding="utf-8")
    assert "you counted one Adam moment" in page


# --- Answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RIGHT_ANSWERS)
def test_right_answer_written_differently_loses_nothing(name, test_cells):
    graded = grade_here(RIGHT_ANSWERS[name], test_cells)
    lost = {cell: graded.feedback[cell] for cell, points in graded.points.items() if points != POINTS[cell]}
    assert lost == {}


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_wrong_answer_loses_the_points_it_should(name, test_cells):
    wrong: Wrong = WRONG_ANSWERS[name]
    graded = grade_here(wrong.answers, test_cells)
    for cell, full in POINTS.items():
        short = cell.removeprefix("ex04_1_")
        if short in wrong.none:
            assert graded.points[cell] == 0, (cell, graded.feedback[cell])
        elif short in wrong.less:
            assert 0 <= graded.points[cell] < full, (cell, graded.feedback[cell])
        else:
            assert graded.points[cell] == full, (cell, graded.feedback[cell])


@pytest.mark.parametrize("name", [name for name, wrong in WRONG_ANSWERS.items() if wrong.named])
def test_feedback_names_the_misconception(name, test_cells):
    wrong: Wrong = WRONG_ANSWERS[name]
    feedback = grade_here(wrong.answers, test_cells).feedback
    for short, words in wrong.named.items():
        assert words in feedback[f"ex04_1_{short}"]


@pytest.mark.parametrize("name", [name for name, wrong in WRONG_ANSWERS.items() if wrong.alone])
def test_feedback_names_no_other_misconception_on_visible_and_hidden_cases(name, test_cells):
    wrong: Wrong = WRONG_ANSWERS[name]
    for cells in (test_cells, {cell: without_hidden_cases(source) for cell, source in test_cells.items()}):
        lines = "\n".join(grade_here(wrong.answers, cells).feedback.values()).splitlines()
        for line in lines:
            if line.startswith("It looks as if"):
                assert any(words in line for words in wrong.named.values()), line


def test_right_answers_are_never_accused(test_cells):
    for answers in RIGHT_ANSWERS.values():
        assert "It looks as if" not in "".join(grade_here(answers, test_cells).feedback.values())


def test_visible_cases_do_not_give_the_hidden_ones_away(test_cells, capsys):
    visible = {
        (scenario.model, scenario.cluster)
        for group in ("plain", "sharded", "remedy", "ranks", "precision", "limits")
        for case in ex04_1.make_scenarios(group, 1, 4)
        for scenario in case
    }
    source = REFERENCE_CELLS["ex04_1_c"]
    namespace: dict = {"visible": visible}
    exec("from vlmcourse.planner import *\n" + textwrap.dedent(source), namespace)
    exec(
        "right = choose_strategy\n"
        "def choose_strategy(model, cluster):\n"
        "    return right(model, cluster) if (model, cluster) in visible else None",
        namespace,
    )
    for group in ("plain", "sharded", "ranks", "precision"):
        assert ex04_1.check_strategy(namespace["choose_strategy"], group, points=1, seed=1, num_cases=4) == 1
        assert ex04_1.check_strategy(namespace["choose_strategy"], group, points=1, seed=77, num_cases=10) == 0


def test_endless_answer_ends_and_earns_nothing(monkeypatch, capsys):
    monkeypatch.setitem(checks.call.__kwdefaults__, "limit_s", 0.2)

    def endless(*_):
        while True:
            pass

    started = time.monotonic()
    assert ex04_1.check_strategy(endless, "plain", points=2, seed=1) == 0
    assert ex04_1.check_state_bytes(endless, points=2, seed=1) == 0
    assert ex04_1.check_adam_bytes(endless, points=2) == 0
    assert time.monotonic() - started < 20
    assert "longer than 0.2 s" in capsys.readouterr().out
