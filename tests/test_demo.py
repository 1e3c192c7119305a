"""`make demo`: trains, runs chapter 1 from top to bottom, and grades, in one table."""

import json
import subprocess
import time

import pytest
from readme import ROOT, environment

from vlmcourse.commands import demo
from vlmcourse.grading.run import CellMarks, Marks
from vlmcourse.progress import heartbeat


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.timeout(660)
def test_demo_trains_runs_the_chapter_and_grades(tmp_path):
    command = ["vlmcourse", "demo", "--json", "--steps", "40", "--course", str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    parts = {part["name"]: part for part in json.loads(done.stdout.splitlines()[-1])["parts"]}
    assert all(part["good"] for part in parts.values()), parts
    assert {"loss before -> after", "held-out exact match", "speed", "ch01_parallelism"} <= set(parts)
    assert parts["reference answers"]["seen"] == "20 of 20 points by tests; by hand: 5 to give"
    assert parts["blank submission"]["seen"] == "0 of 20 points by tests; by hand: 5 unanswered"
    assert "40 of the 1000 steps" in parts["held-out exact match"]["expected"]
    assert (tmp_path / "runs" / "demo" / "tiny" / "training.png").is_file()  # where the training said
    assert "log, plot and checkpoints: runs/demo/tiny" in done.stdout
    assert "  cell " in done.stderr and " graded, " in done.stderr
    assert "without encryption" not in done.stdout + done.stderr


def test_heartbeat_prints_the_state_until_the_work_ends(capsys):
    state = "first"
    with heartbeat(lambda: state, every_s=0.05):
        time.sleep(0.3)
        state = "second"
        time.sleep(0.3)
    shown = capsys.readouterr()
    assert "  first, 0 s\n" in shown.err and "  second, " in shown.err and shown.out == ""
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def marks_of(name: str, points: float, failure: str = "", essay: float | None = 0.0) -> Marks:
    cells = (
        CellMarks(grade_id="test", points=points, max_points=20),
        CellMarks(grade_id="essay", points=essay, max_points=5, by_hand=True),
    )
    return Marks(submission=name, assignment="ch", cells=cells, failure=failure)


@pytest.mark.parametrize(
    ("marks", "seen", "good"),
    [
        (marks_of("reference answers", 20, essay=None), "20 of 20 points by tests; by hand: 5 to give", True),
        (marks_of("reference answers", 19, essay=None), "19 of 20 points by tests; by hand: 5 to give", False),
        (marks_of("blank submission", 0), "0 of 20 points by tests; by hand: 5 unanswered", True),
        (marks_of("blank submission", 2), "2 of 20 points by tests; by hand: 5 unanswered", False),
        (marks_of("blank submission", 0, failure="stopped"), "stopped", False),
    ],
)
def test_row_of_a_submission_says_what_was_graded_by_whom(marks, seen, good):
    row = demo._grading_row(marks)
    assert (row.seen, row.good) == (seen, good)


def test_table_says_what_is_checked(capsys):
    demo.print_table([demo.Part("held-out exact match", "17 % [a]", "above 0 %: 40 of the 1000 steps", True, 3.2)])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "17 % [a]" in shown and "should be" in shown and "above 0 %" in shown
