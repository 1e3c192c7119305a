"""`vlmcourse grade`: grade one notebook or a folder of them, and print a table.

Enters: command-line arguments. Leaves: a table or JSON on stdout, what is being done on stderr, feedback files if asked
for, and an exit code: 0 if every submission was graded, 1 if one could not be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from vlmcourse.grading.report import as_data, format_feedback, format_points, format_table
from vlmcourse.grading.run import Marks, PreparedCourse, find_assignment, grade_submission, prepare_course
from vlmcourse.progress import heartbeat, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument("path", type=Path, help="a submitted notebook, or a folder of them (searched through)")
    parser.add_argument("--course", type=Path, default=Path(), help="folder that holds solutions/ (default: this one)")
    parser.add_argument("--assignment", help="a folder in solutions/ (default: told by the notebook's exercises)")
    parser.add_argument("--time-limit-s", type=float, default=900.0, help="seconds for one submission (default: 900)")
    parser.add_argument("--feedback", type=Path, metavar="FOLDER", help="write one feedback text a submission here")
    parser.add_argument("--json", action="store_true", help="print the marks as JSON")


def run(args: argparse.Namespace) -> int:
    """Grade and report.

    Raises:
        ValueError: if there is nothing to grade or no course to grade it by.
    """
    course = args.course.resolve()
    notebooks = find_notebooks(args.path)
    if args.time_limit_s <= 0:
        raise ValueError(f"--time-limit-s = {args.time_limit_s:g}: must be greater than 0")
    if not (course / "nbgrader_config.py").is_file() or not (course / "solutions").is_dir():
        raise ValueError(
            f"{course} is not a course: it needs nbgrader_config.py and solutions/; name the folder with --course"
        )
    names = {notebook: args.assignment or find_assignment(notebook, course) for notebook in notebooks}
    all_marks: list[Marks] = []
    with contextlib.ExitStack() as stack:
        prepared: dict[str, PreparedCourse] = {}
        for number, (notebook, assignment) in enumerate(names.items(), start=1):
            if assignment not in prepared:
                say(f"Making the tests of {assignment} from solutions/ ...")
                with heartbeat(lambda: "making the tests"):
                    prepared[assignment] = stack.enter_context(prepare_course(course, assignment))
            label = str(notebook.relative_to(args.path)) if args.path.is_dir() else notebook.name
            say(f"Grading {label} ({number} of {len(names)}) ...")
            with heartbeat(lambda: "grading"):
                marks = grade_submission(notebook, prepared[assignment], name=label, time_limit_s=args.time_limit_s)
            outcome = "could not be graded" if marks.failure else format_points(marks)
            say(f"{label}: {outcome}, in {marks.seconds:.0f} s")
            all_marks.append(marks)
    if args.feedback:
        write_feedback(all_marks, args.feedback)
    if args.json:
        print(json.dumps([as_data(marks) for marks in all_marks]))
    else:
        print(format_table(all_marks))
        if len(all_marks) == 1:
            print(f"\n{format_feedback(all_marks[0])}")
    return 1 if any(marks.failure for marks in all_marks) else 0


def find_notebooks(path: Path) -> list[Path]:
    """Return the notebooks to grade.

    Raises:
        ValueError: if there is none.
    """
    if path.is_file() and path.suffix != ".ipynb":
        raise ValueError(f"{path} is not a notebook: give a .ipynb file or a folder that holds some")
    if path.is_dir():
        found = sorted(file for file in path.rglob("*.ipynb") if ".ipynb_checkpoints" not in file.parts)
    else:
        found = [path] if path.is_file() else []
    if not found:
        raise ValueError(f"There is no notebook at {path}: give a .ipynb file or a folder that holds some")
    return found


def write_feedback(all_marks: list[Marks], folder: Path) -> None:
    """Write one text file a submission."""
    folder.mkdir(parents=True, exist_ok=True)
    for marks in all_marks:
        name = marks.submission.replace("/", "__").removesuffix(".ipynb")
        (folder / f"{name}.txt").write_text(format_feedback(marks) + "\n", encoding="utf-8")
