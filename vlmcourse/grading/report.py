"""Marks as a table, and the feedback of one submission as text.

Enters: `Marks`. Leaves: plain text, and plain data for programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from vlmcourse.grading.run import CellMarks, Marks


def format_table(all_marks: Sequence[Marks]) -> str:
    """Return one row a submission and one column a graded cell.

    A cell that a person grades shows "-"; a submission that could not be graded is marked and explained below.
    """
    if not all_marks:
        return "no submissions"
    blocks = []
    for assignment in dict.fromkeys(marks.assignment for marks in all_marks):
        blocks.append(_format_assignment(assignment, [marks for marks in all_marks if marks.assignment == assignment]))
    return "\n\n".join(blocks)


def _format_assignment(assignment: str, rows: Sequence[Marks]) -> str:
    """Return the table of one assignment."""
    names = list(dict.fromkeys(cell.grade_id for marks in rows for cell in marks.cells))
    prefix = _common_prefix(names)
    header = ["submission", *(name.removeprefix(prefix) for name in names), "by tests", "by hand"]
    limits = {cell.grade_id: cell.max_points for marks in rows for cell in marks.cells}
    table = [header, ["of", *(f"{limits[name]:g}" for name in names), "", ""]]
    for marks in rows:
        points = {cell.grade_id: cell for cell in marks.cells}
        row = [marks.submission + (" (!)" if marks.failure else "")]
        row += [_format_points(points.get(name)) for name in names]
        table.append([*row, f"{marks.points:g} of {marks.max_auto_points:g}", format_by_hand(marks)])
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = [assignment + (f" (cells {prefix}...)" if prefix else "")]
    for row in table:
        cells = [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines += [f"(!) {marks.submission}: {marks.failure}" for marks in rows if marks.failure]
    return "\n".join(lines)


def format_by_hand(marks: Marks) -> str:
    """Return what a person has to grade in a submission: "5 to give", "5 unanswered", both, or "none"."""
    counts = {"to give": marks.waiting_points, "unanswered": marks.unanswered_points}
    return ", ".join(f"{points:g} {what}" for what, points in counts.items() if points) or "none"


def _format_points(cell: CellMarks | None) -> str:
    return "-" if cell is None or cell.points is None else f"{cell.points:g}"


def _common_prefix(names: Sequence[str]) -> str:
    """Return what all names begin with, up to an underscore; "" for a single name."""
    if len(names) < 2:
        return ""
    shared = 0
    while all(len(name) > shared and name[shared] == names[0][shared] for name in names):
        shared += 1
    return names[0][: names[0][:shared].rfind("_") + 1]


def format_points(marks: Marks) -> str:
    """Return what a submission earned by tests, and what a person grades, in one line."""
    text = f"{marks.points:g} of {marks.max_auto_points:g} points by tests"
    if marks.waiting_points:
        text += f", and {marks.waiting_points:g} wait for a person"
    if marks.unanswered_points:
        text += f", and written answers worth {marks.unanswered_points:g} were left blank"
    return text


def format_feedback(marks: Marks) -> str:
    """Return the feedback of one submission: points of each exercise, then what each test cell said."""
    lines = [f"{marks.submission} ({marks.assignment}): {format_points(marks)}"]
    if marks.failure:
        lines.append(f"This submission could not be graded: {marks.failure}")
    for exercise in dict.fromkeys(exercise_of(cell.grade_id) for cell in marks.cells):
        cells = [cell for cell in marks.cells if exercise_of(cell.grade_id) == exercise]
        earned = sum(cell.points or 0.0 for cell in cells)
        lines += ["", f"{exercise}: {earned:g} of {sum(cell.max_points for cell in cells):g}"]
        for cell in cells:
            lines.append(f"  {cell.grade_id}: {_format_points(cell)} of {cell.max_points:g}")
            lines += [f"      {line}" for line in cell.feedback.splitlines()]
    return "\n".join(lines)


def exercise_of(grade_id: str) -> str:
    """Return the exercise that a graded cell belongs to: the first two parts of its id (`ex04_1`)."""
    return "_".join(grade_id.split("_")[:2])


def as_data(marks: Marks) -> dict[str, object]:
    """Return marks as plain data for JSON."""
    return {
        "submission": marks.submission,
        "assignment": marks.assignment,
        "points": marks.points,
        "max_auto_points": marks.max_auto_points,
        "waiting_points": marks.waiting_points,
        "unanswered_points": marks.unanswered_points,
        "failure": marks.failure,
        "seconds": round(marks.seconds, 1),
        "cells": [
            {
                "grade_id": cell.grade_id,
                "points": cell.points,
                "max_points": cell.max_points,
                "by_hand": cell.by_hand,
                "feedback": cell.feedback,
            }
            for cell in marks.cells
        ],
    }
