"""What the cells of a graded notebook say to its learner.

Enters: cells that were run. Leaves: plain text: what a test cell printed, its error, and that of the answer above it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import nbformat

from vlmcourse.grading.traces import without_progress

NOT_SOLVED = "not solved yet"
_CELL_FILE = re.compile(r"\((?:[^()]*/)?\d+\.py, line (\d+)\)")
"""Where IPython finds a syntax error: a file name of its own for the cell, and a line."""


def feedback_text(cell: nbformat.NotebookNode) -> str:
    """Return what a graded code cell printed and the message of its error."""
    parts = [without_progress(output.text).strip() for output in cell.outputs if output.output_type == "stream"]
    parts += _errors_of(cell)
    return "\n".join(part for part in parts if part and part != "Success!")


def find_answer_errors(
    released: Sequence[nbformat.NotebookNode], submitted: Sequence[nbformat.NotebookNode]
) -> dict[str, str]:
    """Return for each test cell how the answer above it ended in an error, where it did: its tests then miss a name.

    Args:
        released: cells of the release, which say what answer a test cell is for.
        submitted: cells of the submission, which were run.

    Returns:
        By the test cell's grade_id, one line; an answer that was left blank is none.
    """
    texts = {
        cell.metadata["nbgrader"]["grade_id"]: [text for text in _errors_of(cell) if text != NOT_SOLVED]
        for cell in submitted
        if cell.cell_type == "code" and "grade_id" in cell.metadata.get("nbgrader", {})
    }
    found: dict[str, str] = {}
    answer = ""
    for cell in released:
        data = cell.metadata.get("nbgrader", {})
        if data.get("solution"):
            answer = data["grade_id"]
        elif data.get("grade") and texts.get(answer):
            found[data["grade_id"]] = f"the answer's cell {answer} ended in an error: {texts[answer][0]}"
    return found


def _errors_of(cell: nbformat.NotebookNode) -> list[str]:
    return [_error_text(output.ename, output.evalue) for output in cell.outputs if output.output_type == "error"]


def _error_text(name: str, message: str) -> str:
    """Return one line for an error; the blank cells of a release raise NotImplementedError without a message."""
    if not message.strip():
        return NOT_SOLVED if name == "NotImplementedError" else name
    return f"{name}: " + _CELL_FILE.sub(r"(line \1)", message)
