"""A course of one small notebook, for tests of grading that should not wait for a chapter."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parents[1]
ASSIGNMENT = "small"


def graded(name: str, source: str, points: float) -> nbformat.NotebookNode:
    return _cell(name, source, grade=True, points=points)


def solution(name: str, source: str) -> nbformat.NotebookNode:
    return _cell(name, f"### BEGIN SOLUTION\n{source}\n### END SOLUTION", solution=True)


def _cell(
    name: str, source: str, *, grade: bool = False, solution: bool = False, points: float | None = None
) -> nbformat.NotebookNode:
    cell = new_code_cell(source, id=name)
    cell.metadata["nbgrader"] = {
        "grade": grade,
        "grade_id": name,
        "locked": not solution,
        "schema_version": 3,
        "solution": solution,
        "task": False,
    }
    if points is not None:
        cell.metadata["nbgrader"]["points"] = points
    return cell


def lab(name: str, source: str) -> nbformat.NotebookNode:
    cell = new_code_cell(source, id=name)
    cell.metadata["tags"] = ["lab"]
    return cell


def essay(name: str, points: float) -> nbformat.NotebookNode:
    cell = new_markdown_cell("The reference answer.", id=name)
    cell.metadata["nbgrader"] = {
        "grade": True,
        "grade_id": name,
        "locked": False,
        "schema_version": 3,
        "solution": True,
        "task": False,
        "points": points,
    }
    return cell


def source_notebook() -> nbformat.NotebookNode:
    cells = [
        new_markdown_cell("# A small chapter", id="title"),
        _cell("small_setup", "import random"),
        lab("ranks", "raise RuntimeError('a lab was run')"),
        solution("small_draw", "def draw():\n    return [random.random(), 1 / 3]"),
        graded("small_draw_test", "# AUTOTEST draw()\n# HASHED AUTOTEST {'drawn': draw()}", 2),
        solution("small_double", "def double(x):\n    return 2 * x"),
        graded(
            "small_double_test",
            "right = [double(2) == 4]\n### BEGIN HIDDEN TESTS\nright += [double(7) == 14, double(-1) == -2]\n"
            "### END HIDDEN TESTS\nround(3 * sum(right) / len(right), 2)",
            3,
        ),
        solution("small_award", "def award():\n    return 1"),
        graded("small_award_test", "award()", 1),
        essay("small_essay", 4),
    ]
    notebook = new_notebook(cells=cells)
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def write_course(folder: Path) -> Path:
    """Write the course and files beside the notebook, some of them the instructor's."""
    assignment = folder / "solutions" / ASSIGNMENT
    assignment.mkdir(parents=True)
    for name in ("nbgrader_config.py", "autotests.yml"):
        shutil.copy(ROOT / name, folder / name)
    nbformat.write(source_notebook(), assignment / "small.ipynb")
    for name in ("data.csv", "solution_notes.md", "rubric.txt", "my_template.txt", "helper.py", "gradebook.db"):
        (assignment / name).write_text(name, encoding="utf-8")
    return folder


def find(notebook: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    return next(cell for cell in notebook.cells if cell.id == name)


def answer(release: Path, answers: dict[str, str]) -> nbformat.NotebookNode:
    """Return the released notebook with solution cells filled in."""
    notebook = nbformat.read(release, as_version=4)
    for name, source in answers.items():
        find(notebook, name).source = source
    return notebook


RIGHT = {
    "small_draw": "def draw():\n    return (random.random(), 1 / 3)",
    "small_double": "import sys\n\ndef double(x):\n    print('a warning', file=sys.stderr)\n    return x + x",
    "small_award": "award = lambda: 1.0",
    "small_essay": "My own words.",
}
"""Right answers in another style than the reference's; one writes to stderr."""
