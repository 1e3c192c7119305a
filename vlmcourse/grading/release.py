"""Make chapters/ from solutions/, and tell whether it still is what solutions/ make.

Enters: a course folder. Leaves: `chapters/ASSIGNMENT/`, written by `python -m vlmcourse.grading.release`, which uses
nbgrader in a temporary folder and so leaves no gradebook behind. Files other than notebooks are compared byte by byte.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import nbformat

from vlmcourse.grading.run import PreparedCourse, list_assignments, prepare_course

IGNORED = {".ipynb_checkpoints", "runs"}
"""Folders that appear in a released chapter when its notebook is opened and run."""


def write_release(course: Path, assignment: str) -> Path:
    """Generate an assignment and put it into chapters/, in place of what was there.

    Returns:
        The folder written.
    """
    target = course / "chapters" / assignment
    with prepare_course(course, assignment) as prepared:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(prepared.release.parent, target)
    return target


def find_differences(prepared: PreparedCourse, course: Path) -> list[str]:
    """Compare a released assignment with what was generated just now.

    Args:
        prepared: the assignment, generated.
        course: the folder whose chapters/ are looked at.

    Returns:
        One line a difference; none if both are the same.
    """
    fresh, kept = prepared.release.parent, course / "chapters" / prepared.assignment
    names = {str(path.relative_to(root)) for root in (fresh, kept) for path in root.rglob("*") if path.is_file()}
    found = []
    for name in sorted(name for name in names if not IGNORED.intersection(Path(name).parts)):
        if not (fresh / name).exists() or not (kept / name).exists():
            where = "chapters/" if (kept / name).exists() else "the generated release"
            found.append(f"{name} is in {where} only")
        elif name.endswith(".ipynb"):
            found += _compare_notebooks(name, fresh / name, kept / name)
        elif (fresh / name).read_bytes() != (kept / name).read_bytes():
            found.append(f"{name} differs")
    return found


def _compare_notebooks(name: str, fresh: Path, kept: Path) -> list[str]:
    """Compare two notebooks cell by cell."""
    new, old = (nbformat.read(path, as_version=4) for path in (fresh, kept))
    if len(new.cells) != len(old.cells):
        return [f"{name} has {len(old.cells)} cells in chapters/, and {len(new.cells)} when generated"]
    found = [f"{name}: notebook metadata differ"] if new.metadata != old.metadata else []
    for index, (one, other) in enumerate(zip(new.cells, old.cells, strict=True)):
        if one != other:
            keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
            found.append(f"{name}: cell {index} ({other.get('id')}) differs in {', '.join(keys)}")
    return found


def main() -> int:
    """Write the release of the assignments named on the command line, or of all."""
    parser = argparse.ArgumentParser(description="Generate chapters/ from solutions/.")
    parser.add_argument("assignments", nargs="*", help="folders in solutions/ (default: all)")
    parser.add_argument("--course", type=Path, default=Path(), help="folder that holds solutions/ (default: this one)")
    args = parser.parse_args()
    for assignment in args.assignments or list_assignments(args.course):
        print(f"wrote {write_release(args.course.resolve(), assignment)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
