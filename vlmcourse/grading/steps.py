"""nbgrader's steps with ours where its own leave a hole; `nbgrader_config.py` puts them in place.

Enters: notebooks on their way through nbgrader. What ours add:

- a lab cell (tag "lab": it starts ranks, and no exercise needs what it defines) is not run while tests are generated
  or a submission is graded, unless the learner changed it;
- metadata of a submission counts for nothing: flags, points and tags are set back to those of the release;
- deleted test cells and setup cells come back, whatever stands around them;
- points need proof: a test cell that did not run, or that shows neither a number in range nor AUTOTEST's "Success!",
  earns none (nbgrader gives full marks for silence, text and negative numbers);
- text on stderr, such as a library's warning, does not cost the cell's points.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any
from unittest import mock

from jupyter_client.manager import start_new_kernel
from nbclient.exceptions import DeadKernelError
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_output
from nbgrader import utils
from nbgrader.api import MissingEntry
from nbgrader.converters.autograde import Autograde
from nbgrader.converters.generate_assignment import GenerateAssignment
from nbgrader.preprocessors import Execute, InstantiateTests, NbGraderPreprocessor, OverwriteCells, instantiatetests
from traitlets import Bool

from vlmcourse.grading.process import QUIET_KERNEL

LAB_TAG = "lab"
SUCCESS = "Success!"
"""What an AUTOTEST cell prints at its end (`success` in autotests.yml)."""

Resources = Any
"""nbconvert's `ResourcesDict`."""


def for_release() -> list[type]:
    """Return the steps of `nbgrader generate_assignment` with ours in place."""
    steps = _replace(GenerateAssignment, "preprocessors", {InstantiateTests: InstantiateGradedTests})
    return [MarkLabs, *steps]


def for_sanitizing() -> list[type]:
    """Return the steps that `nbgrader autograde` takes before it runs a submission."""
    return _replace(Autograde, "sanitize_preprocessors", {OverwriteCells: RestoreCells})


def for_grading() -> list[type]:
    """Return the steps with which `nbgrader autograde` runs a submission and reads its points."""
    steps = _replace(Autograde, "autograde_preprocessors", {Execute: ExecuteGraded})
    after = steps.index(ExecuteGraded) + 1
    return [*steps[:after], RequireProof, *steps[after:]]


def _replace(converter: type, trait: str, ours: dict[type, type]) -> list[type]:
    """Return a converter's default steps with some replaced by ours."""
    return [ours.get(step, step) for step in converter.class_traits()[trait].default()]  # type: ignore[attr-defined]


def is_lab(cell: NotebookNode) -> bool:
    """Tell whether a cell is a lab: tagged so, and no part of an exercise."""
    return LAB_TAG in cell.metadata.get("tags", []) and "nbgrader" not in cell.metadata


def lab_digest(cell: NotebookNode) -> str:
    """Return what tells a lab cell that a learner changed from one that was released."""
    return hashlib.sha256(cell.source.encode()).hexdigest()[:16]


class MarkLabs(NbGraderPreprocessor):
    """Write into each lab cell of a release what its source was."""

    def preprocess_cell(self, cell: NotebookNode, resources: Resources, index: int) -> tuple[NotebookNode, Resources]:
        """Mark one cell."""
        if is_lab(cell):
            cell.metadata["vlmcourse"] = {"lab": lab_digest(cell)}
        return cell, resources


class InstantiateGradedTests(InstantiateTests):
    """Turn AUTOTEST lines into tests without running the labs, in a kernel whose log shows errors only."""

    def preprocess(self, nb: NotebookNode, resources: Resources) -> Any:
        """Work on a notebook."""
        # nbgrader leaves no other way to pass arguments to this kernel.
        quiet = functools.partial(start_new_kernel, extra_arguments=list(QUIET_KERNEL))
        with mock.patch.object(instantiatetests, "start_new_kernel", quiet):
            return super().preprocess(nb, resources)

    def preprocess_cell(self, cell: NotebookNode, resources: Resources, index: int) -> tuple[NotebookNode, Resources]:
        """Work on one cell."""
        if is_lab(cell):
            return cell, resources
        return super().preprocess_cell(cell, resources, index)


class RestoreCells(OverwriteCells):
    """Set a submission's metadata back to the release's, and put deleted cells back in their place."""

    def preprocess_cell(self, cell: NotebookNode, resources: Resources, index: int) -> tuple[NotebookNode, Resources]:
        """Set one cell's flags, points and tags back before nbgrader compares its text."""
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        if name is not None:
            try:
                source = self.gradebook.find_source_cell(name, self.notebook_id, self.assignment_id)
            except MissingEntry:
                cell.metadata.pop("nbgrader")
                return cell, resources
            cell.metadata.pop("tags", None)
            cell.metadata["nbgrader"] = self._released(source)
        return super().preprocess_cell(cell, resources, index)

    def _released(self, source: Any) -> dict[str, Any]:
        """Return the nbgrader metadata that a cell was released with."""
        notebook = self.gradebook.find_notebook(self.notebook_id, self.assignment_id)
        points = {cell.name: cell.max_score for cell in (*notebook.grade_cells, *notebook.task_cells)}
        graded = source.name in {cell.name for cell in notebook.grade_cells}
        metadata = {
            "grade": graded,
            "grade_id": source.name,
            "locked": bool(source.locked),
            "schema_version": 3,
            "solution": source.name in {cell.name for cell in notebook.solution_cells},
            "task": source.name in {cell.name for cell in notebook.task_cells},
            "checksum": source.checksum,
            "cell_type": source.cell_type,
        }
        if source.name in points:
            metadata["points"] = points[source.name]
        return metadata

    def add_missing_grade_cells(self, nb: NotebookNode, resources: Resources) -> tuple[NotebookNode, Resources]:
        """Put back every deleted cell but solutions, each after the cell of the release that it stood behind."""
        notebook = self.gradebook.find_notebook(self.notebook_id, self.assignment_id)
        released = list(notebook.source_cells)
        is_task = {cell.name for cell in notebook.task_cells}
        place = {cell.metadata.get("nbgrader", {}).get("grade_id"): index for index, cell in enumerate(nb.cells)}
        after = -1
        for source in released:
            metadata = self._released(source)
            if source.name in place:
                after = place[source.name]
            elif (metadata["grade"] or not metadata["solution"]) and source.name not in is_task:
                self.log.warning("Cell %s is missing from the submission and was put back", source.name)
                after += 1
                nb.cells.insert(after, self._new_cell(source, metadata))
                place = {name: index + (index >= after) for name, index in place.items()}
                place[source.name] = after
        return nb, resources

    def _new_cell(self, source: Any, metadata: dict[str, Any]) -> NotebookNode:
        """Build the cell that stands in for a deleted one."""
        cell = NotebookNode(cell_type=source.cell_type, source=source.source, id=f"restored-{source.name}"[:64])
        cell.metadata = NotebookNode(nbgrader=NotebookNode(metadata))
        if source.cell_type == "code":
            cell.execution_count, cell.outputs = None, []
        return cell


class ExecuteGraded(Execute):
    """Run a submission, without the labs that the learner left as they were."""

    go_on_after_kernel_death = Bool(
        False, help="Keep the results of the cells before a kernel died, in place of failing as a whole"
    ).tag(config=True)

    kernel_died = False

    def preprocess(self, nb: NotebookNode, resources: Resources | None = None, km: Any = None) -> Any:
        """Run all cells."""
        self.kernel_died = False
        return super().preprocess(nb, resources, km)

    def preprocess_cell(self, cell: NotebookNode, resources: Resources, index: int) -> Any:
        """Run one cell."""
        untouched = cell.metadata.get("vlmcourse", {}).get("lab") == lab_digest(cell)
        if self.kernel_died or (is_lab(cell) and untouched):
            return cell, resources
        try:
            return super().preprocess_cell(cell, resources, index)
        except DeadKernelError:
            if not self.go_on_after_kernel_death:
                raise
            self.kernel_died = True
            add_error(cell, "KernelDied", "the kernel died while this cell ran; no later cell was run")
            return cell, resources


class RequireProof(NbGraderPreprocessor):
    """Take the points of a test cell whose outputs do not prove that its tests ran to their end."""

    def preprocess_cell(self, cell: NotebookNode, resources: Resources, index: int) -> tuple[NotebookNode, Resources]:
        """Check one cell."""
        if cell.cell_type == "code" and utils.is_grade(cell) and not utils.is_solution(cell):
            for output in cell.outputs:
                if output.output_type == "stream" and output.name == "stderr":
                    output.name = "stdout"
            # nbgrader stops at the first output that says something: an error must not stand behind a number.
            cell.outputs.sort(key=lambda output: output.output_type != "error")
            problem = find_unproven(cell)
            if problem:
                self.log.warning("Cell %s earns nothing: %s", cell.metadata.nbgrader["grade_id"], problem)
                add_error(cell, "NoProof", problem)
        return cell, resources


def find_unproven(cell: NotebookNode) -> str:
    """Return why a test cell's outputs prove nothing, or "" if they do (or show an error, which earns nothing)."""
    if any(output.output_type == "error" for output in cell.outputs):
        return ""
    if cell.execution_count is None:
        return "this cell was not run"
    results = [
        output["data"].get("text/plain", "") for output in cell.outputs if output.output_type == "execute_result"
    ]
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    if not results:
        return "" if SUCCESS in printed.splitlines() else "this cell gave no number of points"
    try:
        points = float(results[0])
    except ValueError:
        return f"this cell gave no number of points but {results[0]:.80}"
    most = float(cell.metadata.nbgrader["points"])
    if len(results) > 1 or not math.isfinite(points) or not 0 <= points <= most:
        return f"this cell must give one number from 0 to {most:g}, not {', '.join(results):.80}"
    return ""


def add_error(cell: NotebookNode, name: str, message: str) -> None:
    """Add an error to a code cell's outputs, in front, which nbgrader reads as no points."""
    cell.outputs.insert(0, new_output("error", ename=name, evalue=message, traceback=[f"{name}: {message}"]))
