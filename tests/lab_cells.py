"""The graded cells of an exercise or a lab, as they stand in solutions/ and in chapters/."""

from __future__ import annotations

from pathlib import Path

import nbformat
import torch
from nbclient import NotebookClient

from vlmcourse.grading.process import QUIET_KERNEL

ROOT = Path(__file__).parents[1]
CHAPTER_OF = {
    "lab01_1": "ch01b_model_parallelism",
    "lab01_2": "ch01b_model_parallelism",
    "ex04_3": "ch03_precision",
    "lab04_1": "ch04_checkpointing",
    "ex04_4": "ch05b_memory_engines",
    "ex04_5": "ch06b_diagnosis",
    "ex04_6": "ch06b_diagnosis",
    "ex04_7": "ch07b_tuned",
    "lab05_1": "ch05_zero_offload",
    "lab06_1": "ch06_monitoring",
}


def read_cells(folder: str, exercise: str) -> dict[str, nbformat.NotebookNode]:
    """Return an exercise's cells by id, from "solutions" or "chapters"."""
    chapter = CHAPTER_OF[exercise]
    notebook = nbformat.read(ROOT / folder / chapter / f"{chapter}.ipynb", as_version=4)
    return {cell.id: cell for cell in notebook.cells if cell.id.startswith(f"{exercise}_")}


def reference(exercise: str, *names: str) -> dict[str, object]:
    """Run the named cells of the solution, after the chapter's import of torch, and return what they define."""
    cells = read_cells("solutions", exercise)
    namespace: dict[str, object] = {"__name__": "__main__", "torch": torch}
    for name in names:
        exec(cells[name].source, namespace)
    return namespace


def stated_points(exercise: str) -> dict[str, float]:
    """Return the points of an exercise's graded cells, after a check that the task states their sum and each share."""
    cells = read_cells("solutions", exercise)
    graded = {name: cell.metadata["nbgrader"] for name, cell in cells.items() if cell.metadata.get("nbgrader")}
    points = {name: data["points"] for name, data in graded.items() if data["grade"]}
    assert all(data["grade_id"] == name for name, data in graded.items())
    task = cells[f"{exercise}_task"].source
    assert f"**{sum(points.values())} points" in task
    rows = [line for line in task.splitlines() if line.startswith("|")]
    for name, value in points.items():
        part = name.removeprefix(f"{exercise}_").removesuffix("_test")
        assert any(row.startswith(f"| {part} |") and f"| {value} |" in row for row in rows), name
        if cells[name].cell_type == "code":
            assert f"points={value}" in cells[name].source and f"# {value} points" in cells[name].source
    return points


def run_blank(exercise: str) -> dict[str, tuple[str, str]]:
    """Run the release's cells to their end; return what each graded cell printed and its result."""
    notebook = nbformat.v4.new_notebook(cells=list(read_cells("chapters", exercise).values()))
    NotebookClient(notebook, timeout=120, kernel_name="python3", extra_arguments=list(QUIET_KERNEL)).execute()
    found = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("grade"):
            *printed, result = cell.outputs
            found[cell.id] = "".join(output.text for output in printed).strip(), result["data"]["text/plain"]
    return found


def hidden_seeds(exercise: str) -> list[str]:
    """Return the seed lines of an exercise's hidden tests."""
    lines = []
    for cell in read_cells("solutions", exercise).values():
        if "### BEGIN HIDDEN TESTS" in cell.source:
            hidden = cell.source.split("### BEGIN HIDDEN TESTS")[1].split("### END HIDDEN TESTS")[0]
            lines.append(hidden.strip().splitlines()[0])
    return lines
