"""Every chapter as a whole: it runs, its release is the one that solutions/ make, its answers earn all points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from vlmcourse.commands import demo
from vlmcourse.grading.process import QUIET_KERNEL
from vlmcourse.grading.release import find_differences
from vlmcourse.grading.run import PreparedCourse, grade_submission, list_assignments, prepare_course
from vlmcourse.grading.steps import is_lab

ROOT = Path(__file__).parents[1]
POINTS = {
    "ch01b_model_parallelism": (22, 0),
    "ch02_accumulation": (16, 2),
    "ch03_precision": (16, 5),
    "ch04_checkpointing": (12, 0),
    "ch05_zero_offload": (10, 0),
    "ch05b_memory_engines": (15, 3),
    "ch06_monitoring": (4, 0),
    "ch06b_diagnosis": (34, 6),
    "ch07b_tuned": (16, 6),
}
"""By tests and by hand, of the chapters that the demo does not run and grade (see test_demo.py)."""
SHOWN = {
    "ch05_zero_offload": (
        "left unexplained: nothing",
        "counts of tokens and norms aside: nothing",
        "the tree says layered",
        *("kept within it\n" for _ in range(3)),
    ),
    "ch05b_memory_engines": ("MULTI_CPU DistributedDataParallel 2", "9 of 9 pairs go on"),
    "ch06_monitoring": (
        "by hand 97,280, PyTorch's counter 97,280",
        "the run goes on without it",
        "8 of 8 rows in log.jsonl",
        "messages: 1, you predicted",
        "finished, step 25 of 25",
    ),
    "ch06b_diagnosis": (
        "mean 576 ms, median 308 ms",
        "planted: healthy; found: healthy",
        "planted: queue that runs empty; found: data_loading",
        "the first fix removes 24.7% of the time: 1 / (1 - 0.247) = 1.33 times",
        "16 of 16 recorded runs",
    ),
    "ch07b_tuned": (
        "q_proj [96, 96], the same in the other layout: True",
        "k_proj [48, 96], the same in the other layout: True",
        "v_proj [48, 96], the same in the other layout: True",
        "the first key head begins in row 48,",
        "the other layout: logits differ by 0e+00 at most",
        "cut as if stacked: by 1",
        "largest gap between layouts 0e+00",
        *("    files of weights: 1\n" for _ in range(2)),
        "InternVLForConditionalGeneration: logits differ by",
        "layers move: [7, 4]",
    ),
}
"""What cells print that the text around them rests on, as often as it stands here."""

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=list_assignments(ROOT))
def chapter(request: pytest.FixtureRequest) -> Iterator[PreparedCourse]:
    """A chapter, generated; its cells but those that start ranks are run for it."""
    with prepare_course(ROOT, request.param) as prepared:
        yield prepared


def test_every_chapter_is_run_by_a_test() -> None:
    assert {*POINTS, demo.CHAPTER} == set(list_assignments(ROOT))


@pytest.mark.parametrize("path", sorted(ROOT.glob("solutions/*/*.ipynb")), ids=lambda path: path.stem)
def test_cells_that_start_ranks_are_tagged_so_that_grading_need_not_run_them(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.source.startswith("%%torchrun")]
    assert [cell.id for cell in cells if "nbgrader" not in cell.metadata and not is_lab(cell)] == []


def test_the_release_is_what_generation_makes_now(chapter: PreparedCourse) -> None:
    assert find_differences(chapter, ROOT) == []


def test_the_reference_answers_earn_all_points(chapter: PreparedCourse) -> None:
    name = chapter.assignment
    if name == demo.CHAPTER:
        pytest.skip("the demo grades it")
    marks = grade_submission(ROOT / "solutions" / name / f"{name}.ipynb", chapter)
    assert not marks.failure
    assert (marks.points, marks.max_auto_points, marks.waiting_points) == (POINTS[name][0], *POINTS[name])


@pytest.mark.parametrize("name", POINTS)
def test_every_cell_runs_on_real_ranks(name: str) -> None:
    folder = ROOT / "solutions" / name
    notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    arguments = list(QUIET_KERNEL)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", extra_arguments=arguments, resources=resources
    ).execute()
    figures = [output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in str(output)]
    captions = [cell for cell in notebook.cells if cell.source.startswith("*Figure ")]
    assert len(figures) == len(captions) > 0
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    expected = SHOWN.get(name, ())
    assert {text: said.count(text) for text in expected} == Counter(expected)
