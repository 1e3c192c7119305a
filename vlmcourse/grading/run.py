"""Grade submissions with nbgrader, each in a folder, a gradebook and a process of its own.

Enters: a course folder (solutions/, nbgrader_config.py, autotests.yml) and submitted notebooks. Leaves: `Marks`. A
result that is missing counts as a failure, never as a pass; a submission that cannot be run at all earns nothing and
says why. What a submission does to files outside its folder is not prevented: grade strangers' work in a container.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

from vlmcourse.grading.cell_feedback import feedback_text, find_answer_errors
from vlmcourse.grading.process import ProcessResult, last_lines, run_nbgrader

logger = logging.getLogger(__name__)

LEARNER = "learner"
"""The student's name in the gradebook of one isolated run."""
CONFIG_FILES = ("nbgrader_config.py", "autotests.yml")


@dataclass(frozen=True, kw_only=True)
class CellMarks:
    """What one graded cell earned."""

    grade_id: str
    points: float | None
    """None where a person has to grade the cell."""
    max_points: float
    by_hand: bool = False
    """A person grades the cell; one that was left as released has its zero points already."""
    feedback: str = ""
    """What the cell printed, and its error."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """What one submission earned."""

    submission: str
    assignment: str
    cells: tuple[CellMarks, ...]
    failure: str = ""
    """Why the submission could not be graded; empty if it was."""
    seconds: float = 0.0

    @property
    def points(self) -> float:
        """Points of the cells graded so far."""
        return round(sum(cell.points or 0.0 for cell in self.cells), 2)

    @property
    def max_auto_points(self) -> float:
        """Points that the tests could give."""
        return sum(cell.max_points for cell in self.cells if cell.points is not None and not cell.by_hand)

    @property
    def waiting_points(self) -> float:
        """Points that a person has yet to give."""
        return sum(cell.max_points for cell in self.cells if cell.points is None)

    @property
    def unanswered_points(self) -> float:
        """Points of the cells for a person that were left as released."""
        return sum(cell.max_points for cell in self.cells if cell.points is not None and cell.by_hand)


@dataclass(frozen=True, kw_only=True)
class PreparedCourse:
    """One assignment, released: what every isolated run starts from."""

    folder: Path
    """Holds the configuration, gradebook.db and chapters/, but no solutions."""
    assignment: str
    notebook: str
    """The notebook's name without .ipynb."""

    @property
    def release(self) -> Path:
        """The notebook as learners get it."""
        return self.folder / "chapters" / self.assignment / f"{self.notebook}.ipynb"


@contextlib.contextmanager
def prepare_course(course: Path, assignment: str, time_limit_s: float = 900.0) -> Iterator[PreparedCourse]:
    """Generate an assignment in a temporary folder; its tests are then ready for any number of submissions.

    Args:
        course: folder with solutions/, nbgrader_config.py and autotests.yml.
        assignment: a folder in solutions/.
        time_limit_s: seconds for generation, which runs the notebook's cells but its labs.

    Raises:
        ValueError: if the course has no such assignment.
        RuntimeError: if nbgrader cannot generate it.
    """
    source = course / "solutions" / assignment
    notebooks = sorted(source.glob("*.ipynb"))
    if len(notebooks) != 1:
        known = ", ".join(list_assignments(course)) or "none: is this the course's folder?"
        raise ValueError(
            f"{source} holds {len(notebooks)} notebooks where one is needed; assignments in {course}: {known}"
        )
    with tempfile.TemporaryDirectory(prefix="vlmcourse-course-") as name:
        folder = Path(name)
        _copy_config(course, folder)
        shutil.copytree(source, folder / "solutions" / assignment, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
        done = run_nbgrader(["generate_assignment", assignment], folder, time_limit_s)
        if done.returncode != 0:
            raise RuntimeError(f"nbgrader could not generate {assignment!r}:\n{last_lines(done.log, 30)}")
        shutil.rmtree(folder / "solutions")
        yield PreparedCourse(folder=folder, assignment=assignment, notebook=notebooks[0].stem)


def list_assignments(course: Path) -> list[str]:
    """Return the names of the folders in solutions/ that hold a notebook."""
    return sorted({path.parent.name for path in (course / "solutions").glob("*/*.ipynb")})


def find_assignment(notebook: Path, course: Path) -> str:
    """Return the assignment that a submission answers, by the ids of its graded cells, else by its file's name.

    Raises:
        ValueError: if none matches, or the file is no notebook.
    """
    ids = _grade_ids(notebook)
    best, best_count = "", 0
    for assignment in list_assignments(course):
        for source in (course / "solutions" / assignment).glob("*.ipynb"):
            count = len(ids & _grade_ids(source))
            if count > best_count or (not best and source.stem == notebook.stem):
                best, best_count = assignment, count
    if not best:
        problem = _check_readable(notebook)
        if problem:
            raise ValueError(f"{notebook}: {problem}")
        known = ", ".join(list_assignments(course)) or "none"
        raise ValueError(f"{notebook} matches no assignment of {course} ({known}): name one with --assignment")
    return best


def grade_submission(
    notebook: Path,
    prepared: PreparedCourse,
    *,
    name: str | None = None,
    time_limit_s: float = 900.0,
    attempts: int = 3,
) -> Marks:
    """Grade one notebook in a temporary folder.

    A kernel that dies is tried again, as it may be the machine's fault; the last attempt keeps what the cells before
    the death earned. A run over the time limit is stopped with everything that it started, and earns nothing.

    Args:
        notebook: the submission.
        prepared: the assignment.
        name: what the submission is called in the marks; by default its path.
        time_limit_s: seconds for one attempt.
        attempts: how often to try, at least once.
    """
    started = time.monotonic()
    name = name or str(notebook)
    failure, cells = _check_readable(notebook), ()
    for attempt in range(1, attempts + 1):
        if failure:
            break
        with tempfile.TemporaryDirectory(prefix="vlmcourse-grade-") as folder:
            done = _autograde(notebook, prepared, Path(folder), time_limit_s, last=attempt == attempts)
            if done.timed_out:
                failure = f"stopped after the time limit of {time_limit_s:g} s"
            elif done.returncode == 0:
                cells = _read_marks(Path(folder), prepared)
                break
            elif attempt == attempts:
                failure = f"nbgrader failed {attempts} times; its last words:\n{last_lines(done.log, 12)}"
            else:
                logger.warning("%s: attempt %d of %d failed, trying again", name, attempt, attempts)
    if failure:
        cells = _no_marks(prepared)
    return Marks(
        submission=name,
        assignment=prepared.assignment,
        cells=cells,
        failure=failure,
        seconds=time.monotonic() - started,
    )


def _autograde(
    notebook: Path, prepared: PreparedCourse, folder: Path, time_limit_s: float, *, last: bool
) -> ProcessResult:
    """Lay out a course folder that holds this submission alone, and let nbgrader run it."""
    _copy_config(prepared.folder, folder)
    shutil.copy(prepared.folder / "gradebook.db", folder / "gradebook.db")
    # Files that the release comes with stand where nbgrader looks for an instructor's; solutions are nowhere.
    shutil.copytree(
        prepared.release.parent, folder / "solutions" / prepared.assignment, ignore=shutil.ignore_patterns("*.ipynb")
    )
    submitted = folder / "submitted" / LEARNER / prepared.assignment
    submitted.mkdir(parents=True)
    write_submission(notebook, prepared.release, submitted / f"{prepared.notebook}.ipynb")
    arguments = ["autograde", prepared.assignment, f"--student={LEARNER}"]
    if last:
        arguments.append("--ExecuteGraded.go_on_after_kernel_death=True")
    return run_nbgrader(arguments, folder, time_limit_s)


def write_submission(notebook: Path, release: Path, target: Path) -> None:
    """Copy a submission, with the labs that are as they were released marked so, that they need not be run.

    The release's own marks may be missing: the instructor's notebook has none, and some tools drop metadata.
    """
    from vlmcourse.grading.steps import lab_digest

    submitted, released = (nbformat.read(path, as_version=4) for path in (notebook, release))
    untouched = {cell.metadata.get("vlmcourse", {}).get("lab") for cell in released.cells}
    for cell in submitted.cells:
        if lab_digest(cell) in untouched:
            cell.metadata["vlmcourse"] = {"lab": lab_digest(cell)}
    nbformat.write(submitted, target)


def _check_readable(notebook: Path) -> str:
    """Return why a file is no notebook that can be run, or ""."""
    try:
        nbformat.validate(nbformat.read(notebook, as_version=4))
    except (OSError, ValueError, AttributeError, KeyError, TypeError, nbformat.ValidationError) as error:
        return f"this is not a notebook that can be read: {type(error).__name__}: {str(error)[:200]}"
    return ""


def _copy_config(source: Path, target: Path) -> None:
    for name in CONFIG_FILES:
        shutil.copy(source / name, target / name)


def _grade_ids(notebook: Path) -> set[str]:
    """Return the ids of the nbgrader cells of a notebook; none if it cannot be read."""
    if _check_readable(notebook):
        return set()
    cells = nbformat.read(notebook, as_version=4).cells
    return {cell.metadata["nbgrader"]["grade_id"] for cell in cells if "grade_id" in cell.metadata.get("nbgrader", {})}


def _read_marks(folder: Path, prepared: PreparedCourse) -> tuple[CellMarks, ...]:
    """Read the points from the gradebook and the feedback from the autograded notebook, in the release's order."""
    from nbgrader.api import Gradebook

    graded = folder / "autograded" / LEARNER / prepared.assignment / f"{prepared.notebook}.ipynb"
    cells = nbformat.read(graded, as_version=4).cells
    outputs = {cell.metadata.get("nbgrader", {}).get("grade_id"): cell for cell in cells}
    with Gradebook(f"sqlite:///{folder / 'gradebook.db'}") as gradebook:
        submission = gradebook.find_submission_notebook(prepared.notebook, prepared.assignment, LEARNER)
        scores = {grade.name: grade.auto_score for grade in submission.grades}
    marks, errors = [], find_answer_errors(nbformat.read(prepared.release, as_version=4).cells, cells)
    for cell in _no_marks(prepared):
        points, feedback = scores.get(cell.grade_id), ""
        if cell.grade_id in outputs and outputs[cell.grade_id].cell_type == "code":
            feedback = feedback_text(outputs[cell.grade_id])
        if points is None and cell.points is not None:
            points, feedback = 0.0, f"{feedback}\nno result was recorded for this cell".strip()
        if points is not None and points < cell.max_points and cell.grade_id in errors:
            feedback = f"{errors[cell.grade_id]}\n{feedback}".strip()
        marks.append(dataclasses.replace(cell, points=points, feedback=feedback))
    return tuple(marks)


def _no_marks(prepared: PreparedCourse) -> tuple[CellMarks, ...]:
    """Return every graded cell of the release with zero points, or None where a person grades."""
    marks = []
    for cell in nbformat.read(prepared.release, as_version=4).cells:
        data = cell.metadata.get("nbgrader", {})
        if data.get("grade"):
            by_hand = data["solution"]
            marks.append(
                CellMarks(
                    grade_id=data["grade_id"],
                    points=None if by_hand else 0.0,
                    max_points=float(data["points"]),
                    by_hand=by_hand,
                )
            )
    return tuple(marks)
